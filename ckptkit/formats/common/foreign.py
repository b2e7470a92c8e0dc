"""Recognize files that are not checkpoints, or not readable ones: what they are and what to do."""

from __future__ import annotations

import re
import struct
from codecs import getincrementaldecoder
from typing import NamedTuple

from ckptkit.core.errors import FormatError, InputError, TruncatedError, UnsupportedError
from ckptkit.core.text import shell_word, shown
from ckptkit.formats.containers.zip_reader import ZipDirectory
from ckptkit.formats.format import Probe
from ckptkit.formats.table import SAFETENSORS, TORCH_SUFFIXES


class Signature(NamedTuple):
    """Bytes at an offset, the kind of file that has them, and the advice."""

    offset: int
    magic: bytes
    what: str
    hint: str


_AGAIN = "download the file itself, not its web page"
_OTHER = "`ckptkit formats` lists what ckptkit reads"
_UNPACK = "unpack it first"
_NUMPY = "; ckptkit reads what numpy.savez wrote"
_TENSORFLOW = "load it with TensorFlow, and save its variables with numpy.savez" + _NUMPY
_KERAS = "load it with Keras, and save its weights with numpy.savez" + _NUMPY
_FLAX = "load it with flax.serialization, flatten it, and save it with numpy.savez" + _NUMPY
_DEPLOYED = "it is for inference: look for the checkpoint that it was exported from"

SIGNATURES = (
    Signature(
        0,
        b"version https://git-lfs",
        "a Git LFS pointer, not the file itself",
        "run `git lfs pull`",
    ),
    Signature(
        0, b"\x5d\0\0\x80\0", "an lzma file", "unpack it first: unlzma -c {0} > {0}.unpacked"
    ),
    Signature(
        0, b"\x04\x22\x4d\x18", "an lz4 file", "unpack it first: unlz4 -c {0} > {0}.unpacked"
    ),
    Signature(
        0,
        b"\x1f\x9d",
        "a compressed file (.Z)",
        "unpack it first: uncompress -c {0} > {0}.unpacked",
    ),
    *(
        Signature(
            0,
            magic,
            "a zlib stream, such as a compressed joblib file",
            "unpack it with Python's zlib, or joblib",
        )
        for magic in (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
    ),
    Signature(0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    Signature(0, b"Rar!", "a RAR archive", _UNPACK),
    Signature(0, b"PK\x05\x06", "an empty zip archive", "download or save it again"),
    Signature(0, b"PK00PK", "a spanned zip archive", "join its parts first"),
    Signature(
        0,
        b"GGUF",
        "a GGUF model (llama.cpp)",
        "ckptkit reads PyTorch checkpoints; see the gguf package",
    ),
    *(
        Signature(
            0,
            magic,
            "a GGML model (llama.cpp before GGUF)",
            "look for the checkpoint that it was converted from",
        )
        for magic in (b"lmgg", b"fmgg", b"tjgg", b"algg")
    ),
    Signature(0, b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras)", _KERAS),
    Signature(4, b"TFL3", "a TensorFlow Lite model", _DEPLOYED),
    Signature(4, b"PTMF", "a model for PyTorch mobile", _DEPLOYED),
    Signature(4, b"ET12", "an ExecuTorch program", _DEPLOYED),
    Signature(
        0,
        b"\0\0\0\0\2\0\0\0\5\0\0\0",
        "the weights of a Darknet model (YOLO)",
        "they have no names or shapes",
    ),
    Signature(
        0,
        b"MATLAB 5.0 MAT-file",
        "a MATLAB file",
        "read it with scipy.io.loadmat, save it with numpy.savez" + _NUMPY,
    ),
    Signature(0, b"PAR1", "a Parquet table", _OTHER),
    Signature(0, b"ARROW1", "an Arrow table", _OTHER),
    Signature(0, b"SQLite format 3", "an SQLite database", _OTHER),
    Signature(0, b"\x89PNG", "a PNG image", _OTHER),
    Signature(0, b"\xff\xd8\xff", "a JPEG image", _OTHER),
    Signature(0, b"GIF8", "a GIF image", _OTHER),
    Signature(8, b"WEBP", "a WebP image", _OTHER),
    Signature(0, b"%PDF", "a PDF document", _OTHER),
    Signature(0, b"\x7fELF", "a program or library (ELF)", _OTHER),
    Signature(0, b"MZ", "a program or library (Windows)", _OTHER),
    Signature(0, b"\xcf\xfa\xed\xfe", "a program or library (macOS)", _OTHER),
)
# Protocol buffers have no signature: by the name of the file, where its bytes can be one.
_PROTOBUF = {
    ".onnx": Signature(
        0, b"", "an ONNX model", "it is for inference; read its arrays with onnx.numpy_helper"
    ),
    ".pb": Signature(0, b"", "a TensorFlow graph", _TENSORFLOW),
    ".mlmodel": Signature(0, b"", "a Core ML model", _DEPLOYED),
    ".caffemodel": Signature(
        0, b"", "a Caffe model", "load it with Caffe, and save it with numpy.savez" + _NUMPY
    ),
}
_ONNX = re.compile(
    rb"\x08[\x01-\x20]\x12([\x01-\x40])[ -~]{3}", re.DOTALL
)  # ir_version, producer_name
_FLAX_MAP = re.compile(
    rb"([\x81-\x8f]|\xde..|\xdf....)([\xa1-\xbf]|\xd9.)[ -~]", re.DOTALL
)  # a key that is a text
_TABLE_END = bytes.fromhex("57fb808b247547db")  # of the index of a TensorFlow checkpoint
_TF_DATA = re.compile(r"\.data-[0-9]{5}-of-[0-9]{5}$")
_HTML = (b"<!doctype html", b"<html", b"<head")


def refusal(probe: Probe) -> InputError:
    """Return the error for a file or folder that no format claims."""
    if probe.is_folder:
        return _folder(probe)
    head = probe.head
    if not head:
        return TruncatedError(
            "is empty", hint="the download or save did not finish; get the file again"
        )
    found = _signature(probe)
    if found is not None:
        return FormatError(f"is {found.what}", hint=found.hint.format(shell_word(probe.name)))
    if probe.zip is not None:
        return _zip(probe.zip)
    if head[257:262] == b"ustar":  # other tar files are for torch-tar
        return FormatError(
            "is a tar archive whose first header is damaged", hint="download or copy it again"
        )
    if not head.strip(b"\0"):
        return FormatError(
            "begins with zeros only: the save or copy did not finish", hint="get the file again"
        )
    if _is_text(head) or head.lstrip().lower().startswith(_HTML):
        return _text(head)
    if _are_floats(head):
        return FormatError(
            "has no header, its bytes look like plain float32 numbers",
            hint="if you know their shape, read them with numpy.fromfile and save with numpy.savez"
            + _NUMPY,
        )
    return FormatError("is not in a format that ckptkit knows", hint=_OTHER)


def _signature(probe: Probe) -> Signature | None:
    head, source = probe.head, probe.source
    for signature in SIGNATURES:
        if head[signature.offset :].startswith(signature.magic):
            return signature
    protobuf = _PROTOBUF.get("." + probe.name.lower().rpartition(".")[2])
    if protobuf is not None and head[0] in (
        0x08,
        0x0A,
    ):  # the tag of field 1, a number or a message
        return protobuf
    if _ONNX.match(head):
        return _PROTOBUF[".onnx"]
    if _FLAX_MAP.match(head):
        return Signature(0, b"", "a msgpack file (Flax)", _FLAX)
    if (
        source.size >= 48
        and source.read(source.size - len(_TABLE_END), len(_TABLE_END)) == _TABLE_END
    ):
        return Signature(0, b"", "the index of a TensorFlow checkpoint", _TENSORFLOW)
    return None


def _text(head: bytes) -> InputError:
    text = head.lstrip().lower()
    if text.startswith(_HTML):
        return FormatError("is an HTML page, not a checkpoint", hint=_AGAIN)
    if text.startswith((b"<?xml", b"<error", b"<net")):
        if b"<net " in text:
            return FormatError("is an OpenVINO model", hint=_DEPLOYED)
        return FormatError(
            "is an XML document, not a checkpoint",
            hint="servers send such documents when a download fails",
        )
    if text.startswith(b"model_checkpoint_path:"):
        return FormatError("names the latest of several TensorFlow checkpoints", hint=_TENSORFLOW)
    if text[:1] == b"{" and (b'"model_type"' in text or b'"architectures"' in text):
        return FormatError(
            "is the configuration of a model, not its weights",
            hint="they are in another file of the folder",
        )
    if text[:1] in (b"{", b"["):
        return FormatError(
            "is JSON text, not a checkpoint",
            hint="for shards, give their folder or their index file",
        )
    return FormatError("is text, not a checkpoint", hint=f"it begins with {_start(head)}")


def _are_floats(head: bytes) -> bool:
    """Return whether bytes are float32 of usual sizes of weights.

    Of other bytes, one in six is.
    """
    values = struct.unpack_from(f"<{len(head) // 4}f", head)
    likely = sum(1e-8 < abs(value) < 1e3 or value == 0 for value in values)
    return len(values) >= 16 and likely >= 0.95 * len(values)


def _is_text(head: bytes) -> bool:
    """Return whether bytes are UTF-8 without control characters; the last character may be cut."""
    try:
        return all(
            c.isprintable() or c in "\r\n\t" for c in getincrementaldecoder("utf-8")().decode(head)
        )
    except UnicodeDecodeError:
        return False


def _start(head: bytes) -> str:
    return repr(head.decode("utf-8", "ignore")[:40])


def _zip(archive: ZipDirectory) -> InputError:
    names = [name.rpartition("/")[2] for name in archive.entries]
    inside = [name for name in names if name.endswith((*TORCH_SUFFIXES, *SAFETENSORS.suffixes))]
    if {"model.weights.h5", "config.json"} <= set(names):
        return FormatError("is a Keras model", hint=_KERAS)
    if f"{archive.top}/.data/extern_modules" in archive:
        return UnsupportedError(
            "is a torch.package archive: Python code with pickles that need it",
            hint="if you trust it, load it with torch.package.PackageImporter, which runs "
            "its code, and save the state_dict",
        )
    if _is_unfinished(archive):
        return TruncatedError(
            "has no data.pkl: torch.save failed half-way and left an incomplete file",
            hint="read the error that torch.save raised, and save again",
        )
    if inside:
        return FormatError(
            f"is a zip archive of files: {shown(inside[0])}",
            hint="unpack it first: `unzip {where}`",
        )
    return FormatError(
        "is a zip archive without a data.pkl, not a checkpoint", hint="`unzip -l {where}` lists it"
    )


def _is_unfinished(archive: ZipDirectory) -> bool:
    """Return whether the file has what torch.save always writes, but not how its files begin."""
    version, pickled = f"{archive.top}/version", f"{archive.top}/data.pkl"
    if version not in archive or pickled in archive:
        return False
    return all(name.startswith(f"{archive.top}/") for name in archive.entries)


def _folder(probe: Probe) -> InputError:
    names = probe.names
    if "saved_model.pb" in names or "keras_metadata.pb" in names:
        return FormatError("is a TensorFlow model (SavedModel)", hint=_TENSORFLOW)
    if any(_TF_DATA.search(name) for name in names):
        return FormatError("is a folder of TensorFlow checkpoints", hint=_TENSORFLOW)
    if names & {"manifest.ocdbt", "_CHECKPOINT_METADATA", "_METADATA"}:
        return FormatError(
            "is an Orbax checkpoint (JAX)",
            hint="restore it with Orbax, and save it with numpy.savez" + _NUMPY,
        )
    if "model_index.json" in names:
        return FormatError(
            "is a pipeline of several models (diffusers)",
            hint="name the folder of one, e.g. its unet",
        )
    if "Manifest.json" in names and probe.name.rstrip("/").endswith(".mlpackage"):
        return FormatError("is a Core ML model", hint=_DEPLOYED)
    return FormatError(
        "is a folder without a checkpoint", hint="name a file, or the folder that holds it"
    )
