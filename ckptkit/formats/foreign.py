"""What is no checkpoint, or none that ckptkit reads: what it is, and what to do about it."""

from __future__ import annotations

from codecs import getincrementaldecoder
from typing import NamedTuple

from ckptkit.errors import FormatError, InputError, TruncatedError, UnsupportedError
from ckptkit.formats.format import Probe
from ckptkit.formats.torch.zip_container import ZipDirectory
from ckptkit.formats.torch.zip_members import shown


class Signature(NamedTuple):
    """Bytes at an offset, what has them, and the advice."""

    offset: int
    magic: bytes
    what: str
    hint: str


_AGAIN = "download the file itself, not a page about it"
_UNPACK = "unpack it first"

SIGNATURES = (
    Signature(0, b"version https://git-lfs", "a Git LFS pointer, not the file it stands for", "run `git lfs pull`"),
    Signature(0, b"\x1f\x8b", "a gzip file", "unpack it first: gunzip -c FILE > UNPACKED"),
    Signature(0, b"BZh", "a bzip2 file", "unpack it first: bunzip2 -c FILE > UNPACKED"),
    Signature(0, b"\xfd7zXZ\0", "an xz file", "unpack it first: unxz -c FILE > UNPACKED"),
    Signature(0, b"\x28\xb5\x2f\xfd", "a zstd file", "unpack it first: unzstd -c FILE > UNPACKED"),
    Signature(0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    Signature(0, b"Rar!", "a RAR archive", _UNPACK),
    Signature(0, b"PK\x05\x06", "an empty zip archive", _AGAIN),
    Signature(0, b"PK00PK", "a spanned zip archive", "join its parts first"),
    Signature(0, b"GGUF", "a GGUF model (llama.cpp)", "ckptkit reads PyTorch checkpoints; see the gguf package"),
    Signature(0, b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras)", "ckptkit reads PyTorch checkpoints; see h5py"),
    Signature(0, b"\x93NUMPY", "a numpy array (.npy)", "numpy.load reads it"),
    Signature(0, b"\x89PNG", "a PNG image", _AGAIN),
    Signature(0, b"\xff\xd8\xff", "a JPEG image", _AGAIN),
    Signature(0, b"GIF8", "a GIF image", _AGAIN),
    Signature(0, b"%PDF", "a PDF document", _AGAIN),
    Signature(0, b"\x7fELF", "a program or library (ELF)", _AGAIN),
    Signature(4, b"TFL3", "a TensorFlow Lite model", "ckptkit reads PyTorch checkpoints"),
)
_SUFFIXES = (".pth", ".pt", ".bin", ".safetensors", ".ckpt")
_HTML = (b"<!doctype html", b"<html", b"<head")


def refusal(probe: Probe) -> InputError:
    """The error for a file or folder that no format claims."""
    if probe.is_folder:
        return _folder(probe)
    head = probe.head
    if not head:
        return TruncatedError("is empty", hint="the download or save did not finish; get the file again")
    for signature in SIGNATURES:
        if head[signature.offset :].startswith(signature.magic):
            return FormatError(f"is {signature.what}", hint=signature.hint)
    if probe.zip is not None:
        return _zip(probe.zip)
    if head[257:262] == b"ustar":
        return _tar(probe)
    text = head.lstrip().lower()
    if text.startswith(_HTML):
        return FormatError("is an HTML page, not a checkpoint", hint=_AGAIN)
    if text.startswith((b"<?xml", b"<error")):
        return FormatError("is an XML document, not a checkpoint", hint="servers send such when a download fails")
    if not head.strip(b"\0"):
        return FormatError("begins with zeros only: the save or copy did not finish", hint="get the file again")
    if text[:1] in (b"{", b"[") and _is_text(head):
        return FormatError("is JSON text, not a checkpoint", hint="for shards, give their folder or their index file")
    if _is_text(head):
        return FormatError("is text, not a checkpoint", hint=f"it begins with {_start(head)}")
    return FormatError(
        "is in no format that ckptkit knows", hint="`ckptkit formats` lists what it reads; raw tensors have no header"
    )


def _is_text(head: bytes) -> bool:
    """Whether it is UTF-8 without control characters, the last character perhaps cut."""
    try:
        return all(c.isprintable() or c in "\r\n\t" for c in getincrementaldecoder("utf-8")().decode(head))
    except UnicodeDecodeError:
        return False


def _start(head: bytes) -> str:
    return repr(head.decode("utf-8", "ignore")[:40])


def _zip(archive: ZipDirectory) -> InputError:
    names = [name.rpartition("/")[2] for name in archive.entries]
    inside = [name for name in names if name.endswith(_SUFFIXES)]
    if inside:
        return FormatError("is a zip archive of files", hint=f"unpack it first: it holds {shown(inside[0])}")
    if names and all(name.endswith(".npy") for name in names):
        return FormatError("is an archive of numpy arrays (.npz)", hint="numpy.load reads it")
    return FormatError("is a zip archive without a data.pkl, not a checkpoint", hint=_AGAIN)


def _tar(probe: Probe) -> InputError:
    if probe.head.startswith((b"sys_info", b"pickle", b"tensors", b"storages", b"./")):
        return UnsupportedError(
            "is a checkpoint of torch 0.1.1 or before (torch-tar), which this version of ckptkit does not read",
            hint="if you trust it, load it with torch where nothing is at stake, and save it again",
        )
    return FormatError("is a tar archive", hint="unpack it first: tar -xf")


def _folder(probe: Probe) -> InputError:
    names = probe.names
    if ".metadata" in names or any(name.endswith(".distcp") for name in names):
        return UnsupportedError(
            "is a torch.distributed.checkpoint folder (dcp), which this version of ckptkit does not read",
            hint="python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER FILE",
        )
    if "latest" in names or any("zero_pp_rank" in name for name in names):
        return UnsupportedError(
            "is a DeepSpeed folder, which this version of ckptkit does not read",
            hint="run the zero_to_fp32.py that DeepSpeed put into it",
        )
    known = [name for name in sorted(names) if name.endswith(_SUFFIXES)]
    if known:
        return UnsupportedError("is a folder of files without an index", hint=f"name one of its files, e.g. {known[0]}")
    return FormatError("is a folder that holds no checkpoint", hint="name a file, or a folder with an index.json")
