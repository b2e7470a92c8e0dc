"""Explain unsupported files, and the contents of zip archives and programs.

* `refusal` returns the error for a file without a supported format. The error describes the file,
  and its hint gives advice.
* `pickles` yields every member of a zip archive, even if the loader of the archive ignores the
  member. The name of a member determines which loader reads the member.
* `check` yields the members of a zip archive with their CRC-32.
* `without_program` replaces a program by its state_dict, because other formats cannot store a
  program.
"""

from __future__ import annotations

import re
import struct
from codecs import getincrementaldecoder
from collections.abc import Iterator

from ckptkit.core.bytesource import ByteSource, Range, Section
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    InputError,
    TruncatedError,
    UnsupportedError,
    UsageError,
)
from ckptkit.core.text import shell_word, shown, typed
from ckptkit.core.tree import Node, Object, children, join, rebuild, walk
from ckptkit.core.weights import as_tensor, plain_state_dict
from ckptkit.formats.format import CheckedPart, Probe
from ckptkit.formats.table import SAFETENSORS, TORCH_SUFFIXES
from ckptkit.formats.zip_reader import ZipDirectory
from ckptkit.pickles.streams import (
    NOT_TORCH,
    PICKLE,
    TORCH_LOAD,
    TORCHSCRIPT,
    Found,
    Inner,
    PickleStream,
    Program,
    Remark,
)

_AGAIN = "download the file itself, not its web page"
_OTHER = "`ckptkit formats` lists what ckptkit reads"
_UNPACK = "unpack it first"
_UNPACK_BY = "unpack it first: {0} -c {{0}} > {{0}}.unpacked"
_NUMPY = "; ckptkit reads what numpy.savez wrote"
_TENSORFLOW = "load it with TensorFlow, and save its variables with numpy.savez" + _NUMPY
_KERAS = "load it with Keras, and save its weights with numpy.savez" + _NUMPY
_FLAX = "load it with flax.serialization, flatten it, and save it with numpy.savez" + _NUMPY
_CAFFE = "load it with Caffe, and save it with numpy.savez" + _NUMPY
_MATLAB = "read it with scipy.io.loadmat, and save it with numpy.savez" + _NUMPY
_DEPLOYED = "this file is for inference: find the checkpoint from which it was exported"

# Signatures of files: offset, bytes, description of the file, and hint.
_SIGNATURES: tuple[tuple[int, bytes | tuple[bytes, ...], str, str], ...] = (
    (0, b"version https://git-lfs", "a Git LFS pointer, not the file itself", "run `git lfs pull`"),
    (0, b"\x5d\0\0\x80\0", "an lzma file", _UNPACK_BY.format("unlzma")),
    (0, b"\x04\x22\x4d\x18", "an lz4 file", _UNPACK_BY.format("unlz4")),
    (0, b"\x1f\x9d", "a compressed file (.Z)", _UNPACK_BY.format("uncompress")),
    (0, (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda"),
     "a zlib stream, such as a compressed joblib file", "unpack it with Python's zlib, or joblib"),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (0, b"Rar!", "a RAR archive", _UNPACK),
    (0, b"PK\x05\x06", "an empty zip archive", "download or save it again"),
    (0, b"PK00PK", "a spanned zip archive", "join its parts first"),
    (0, (b"lmgg", b"fmgg", b"tjgg", b"algg"), "a GGML model (llama.cpp before GGUF)",
     "find the checkpoint from which it was converted"),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file (Keras)", _KERAS),
    (4, b"TFL3", "a TensorFlow Lite model", _DEPLOYED),
    (4, b"PTMF", "a model for PyTorch mobile", _DEPLOYED),
    (4, b"ET12", "an ExecuTorch program", _DEPLOYED),
    (0, b"\0\0\0\0\2\0\0\0\5\0\0\0", "the weights of a Darknet model (YOLO)",
     "the file does not store names or shapes of tensors"),
    (0, b"MATLAB 5.0 MAT-file", "a MATLAB file", _MATLAB),
    (0, (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"%PDF", b"PAR1", b"ARROW1", b"SQLite format 3"),
     "an image, document or table", _OTHER),
    (0, (b"\x7fELF", b"MZ", b"\xcf\xfa\xed\xfe"), "a program or library", _OTHER),
)  # fmt: skip
# Protocol buffers have no signature. If the first byte can begin a protocol buffer, the file name
# decides.
_PROTOBUF = {
    ".onnx": (
        "an ONNX model",
        "this file is for inference; read its arrays with onnx.numpy_helper",
    ),
    ".pb": ("a TensorFlow graph", _TENSORFLOW),
    ".mlmodel": ("a Core ML model", _DEPLOYED),
    ".caffemodel": ("a Caffe model", _CAFFE),
}
# The first bytes of an ONNX model: the fields ir_version and producer_name.
_ONNX = re.compile(rb"\x08[\x01-\x20]\x12([\x01-\x40])[ -~]{3}", re.DOTALL)
# The first bytes of a msgpack map whose first key is a string.
_FLAX_MAP = re.compile(rb"([\x81-\x8f]|\xde..|\xdf....)([\xa1-\xbf]|\xd9.)[ -~]", re.DOTALL)
# The last bytes of the index file of a TensorFlow checkpoint.
_TABLE_END = bytes.fromhex("57fb808b247547db")
_HTML = (b"<!doctype html", b"<html", b"<head")
_XML = (b"<?xml", b"<error", b"<net")
_CONFIG = "is the configuration of a model, not its weights"
_WEIGHTS = "the weights are in another file of the folder"
# Text files: the first bytes, other bytes near the beginning, a description, and a hint.
_TEXTS: tuple[tuple[bytes | tuple[bytes, ...], bytes, str, str], ...] = (
    (_HTML, b"", "is an HTML page, not a checkpoint", _AGAIN),
    (_XML, b"<net ", "is an OpenVINO model", _DEPLOYED),
    (_XML, b"", "is an XML document, not a checkpoint",
     "servers send such documents when a download fails"),
    (b"model_checkpoint_path:", b"", "contains only the name of the latest TensorFlow checkpoint",
     _TENSORFLOW),
    (b"{", b'"model_type"', _CONFIG, _WEIGHTS),
    (b"{", b'"architectures"', _CONFIG, _WEIGHTS),
    ((b"{", b"["), b"", "is a JSON file, not a checkpoint",
     "for shards, name their folder or their index file"),
)  # fmt: skip
# Folders: a pattern for the name of one of their files, a description, and a hint.
_FOLDERS = (
    (r"saved_model\.pb|keras_metadata\.pb", "is a TensorFlow model (SavedModel)", _TENSORFLOW),
    (r".*\.data-[0-9]{5}-of-[0-9]{5}", "is a folder of TensorFlow checkpoints", _TENSORFLOW),
    (r"manifest\.ocdbt|_CHECKPOINT_METADATA|_METADATA", "is an Orbax checkpoint (JAX)",
     "restore it with Orbax, and save it with numpy.savez" + _NUMPY),
    (r"model_index\.json", "is a pipeline of several models (diffusers)",
     "name the folder of one model, such as unet"),
)  # fmt: skip


def refusal(probe: Probe) -> InputError:
    """Return the error for a file or folder that has no supported format."""
    kind: type[InputError] = FormatError
    head = probe.head
    text = head.lstrip().lower()
    if probe.is_folder:
        what, hint = _folder(probe)
    elif not head:
        kind, what = TruncatedError, "is empty"
        hint = "the download or save did not finish; get the file again"
    elif (found := _signature(probe)) is not None:
        what, hint = f"is {found[0]}", found[1].format(shell_word(probe.name))
    elif probe.zip is not None:
        kind, what, hint = _zip(probe.zip)
    elif head[257:262] == b"ustar":  # a valid tar file matches another format
        what = "is a tar archive whose first header is damaged"
        hint = "download or copy it again"
    elif not head.strip(b"\0"):
        what = "begins with zeros: the save or copy did not finish"
        hint = "get the file again"
    elif text.startswith(_HTML) or _is_text(head):
        what = "is a text file, not a checkpoint"
        hint = f"it begins with {head.decode('utf-8', 'ignore')[:40]!r}"
        for start, inside, *said in _TEXTS:
            if text.startswith(start) and inside in text:
                what, hint = said
                break
    elif _are_floats(head):
        what = "has no header; the bytes look like float32 numbers"
        hint = "if you know the shape, read the file with numpy.fromfile and save with numpy.savez"
        hint += _NUMPY
    else:
        what, hint = "does not have a format that ckptkit supports", _OTHER
    return kind(what, hint=hint)


def _signature(probe: Probe) -> tuple[str, str] | None:
    """Return description and hint for a file with a known signature. Return None otherwise."""
    head, source = probe.head, probe.source
    for offset, magic, what, hint in _SIGNATURES:
        if head[offset:].startswith(magic):
            return what, hint
    protobuf = _PROTOBUF.get("." + probe.name.lower().rpartition(".")[2])
    if protobuf is not None and head[0] in (0x08, 0x0A):  # the tag of field 1, a number or message
        return protobuf
    if _ONNX.match(head):
        return _PROTOBUF[".onnx"]
    if _FLAX_MAP.match(head):
        return "a msgpack file (Flax)", _FLAX
    size = len(_TABLE_END)
    if source.size >= 48 and source.read(source.size - size, size) == _TABLE_END:
        return "the index of a TensorFlow checkpoint", _TENSORFLOW
    return None


def _are_floats(head: bytes) -> bool:
    """Return whether the bytes look like float32 numbers of the usual magnitude of weights.

    The function also returns True for about 17 % of other files.
    """
    values = struct.unpack_from(f"<{len(head) // 4}f", head)
    likely = sum(1e-8 < abs(value) < 1e3 or value == 0 for value in values)
    return len(values) >= 16 and likely >= 0.95 * len(values)


def _is_text(head: bytes) -> bool:
    """Return whether bytes are UTF-8 without control characters.

    The last character may be incomplete.
    """
    try:
        text = getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return all(c.isprintable() or c in "\r\n\t" for c in text)


def _zip(archive: ZipDirectory) -> tuple[type[InputError], str, str]:
    names = [name.rpartition("/")[2] for name in archive.entries]
    inside = [name for name in names if name.endswith((*TORCH_SUFFIXES, *SAFETENSORS.suffixes))]
    if {"model.weights.h5", "config.json"} <= set(names):
        return FormatError, "is a Keras model", _KERAS
    if f"{archive.top}/.data/extern_modules" in archive.entries:
        what = "is a torch.package archive: Python code, and pickles that need this code"
        hint = (
            "if you trust it, load it with torch.package.PackageImporter, which runs its code, "
            "and save the state_dict"
        )
        return UnsupportedError, what, hint
    # torch.save writes data.pkl first. If only data.pkl is missing, torch.save failed.
    version, pickled = f"{archive.top}/version", f"{archive.top}/data.pkl"
    is_of_torch = all(name.startswith(f"{archive.top}/") for name in archive.entries)
    if version in archive.entries and pickled not in archive.entries and is_of_torch:
        what = "has no data.pkl: torch.save failed half-way and left an incomplete file"
        return TruncatedError, what, "read the error that torch.save raised, and save again"
    if inside:
        what = f"is a zip archive that contains checkpoint files, such as {shown(inside[0])}"
        return FormatError, what, "unpack it first: `unzip {where}`"
    what = "is a zip archive without a data.pkl, not a checkpoint"
    return FormatError, what, "`unzip -l {where}` lists its files"


def _folder(probe: Probe) -> tuple[str, str]:
    for pattern, what, hint in _FOLDERS:
        if any(re.fullmatch(pattern, name) for name in probe.names):
            return what, hint
    if "Manifest.json" in probe.names and probe.name.rstrip("/").endswith(".mlpackage"):
        return "is a Core ML model", _DEPLOYED
    hint = "name a checkpoint file, or the folder that contains the file"
    return "is a folder without a checkpoint", hint


# Programs


def without_program(checkpoint: Checkpoint) -> Checkpoint:
    """Replace the outermost object that contains the weights by the state_dict of the weights.

    Raises UsageError if the checkpoint has no weights, or only weights in packed layers.
    """
    selection = checkpoint.selection
    if selection is not None and not selection.hold_tensors and _quantized(checkpoint.root):
        raise UsageError(
            "its weights are packed in quantized layers", where=checkpoint.name, hint=_unpacked()
        )
    weights = checkpoint.required
    holder, depth = checkpoint.root, 0
    while not isinstance(holder, Object):
        if depth == len(weights.path):
            return checkpoint
        key = weights.path[depth]
        holder = next(child for other, child in children(holder) if other == key)
        depth += 1
    root = rebuild(checkpoint.root, swap={id(holder): plain_state_dict(weights.nodes)})
    path = join(weights.path[:depth])
    return checkpoint.with_root(root).with_key(None if checkpoint.key is None else path)


def notes(before: Checkpoint, after: Checkpoint) -> list[str]:
    """Return notes on values that were dropped from `before` to get `after`."""
    if after is before:
        return ["dropped: the program"]
    lost = _quantized(before.root) - _quantized(after.root)
    packed = [f"dropped: {len(lost):,} packed quantized tensors; {_unpacked()}"] if lost else []
    return ["dropped: the program, and everything in it except its state_dict", *packed]


def _unpacked() -> str:
    return f"{typed('--dequantize', 'dequantize')} converts them to weights"


def _quantized(root: Node) -> set[int]:
    """Return the ids of the storages of quantized tensors."""
    tensors = (as_tensor(node) for _, node in walk(root))
    return {
        id(each.storage) for each in tensors if each is not None and each.dtype.kind == "quantized"
    }


# Members of zip archives


PICKLES = (".pkl", ".pickle", ".p", ".joblib", ".dill")
METHODS = {0: None, 8: "deflate", 12: "bzip2"}
NO_PROGRAMS = "torch.load(weights_only=True) refuses TorchScript"
_SCRIPT = ("constants.pkl", "bytecode.pkl", "model.json")
_STORAGE = re.compile(r"[^/]+/(data|constants|tensors)/[0-9]+")
_CODE = re.compile(r"[^/]+/code/.*\.py")
_FUNCTION = re.compile(rb"^ *def ", re.MULTILINE)
# Operators that read or write files, or load code.
_FILES = re.compile(
    rb"\b(?:torch|ops\.aten)\.(?:save|load|from_file|_save|_load)\b"
    rb"|\bops\.image\.(?:read|write)_file\b"
)


def pickles(probe: Probe) -> Iterator[Found] | None:
    """Yield the pickles, the code and the other members of a zip file. Return None for other files.

    Raises the errors of `read_directory`.
    """
    return None if probe.zip is None else _contents(probe.zip)


def _contents(directory: ZipDirectory) -> Iterator[Found]:
    top = directory.top
    script = any(f"{top}/{name}" in directory.entries for name in _SCRIPT)
    for name, entry in directory.entries.items():
        if name.endswith("/") and not entry.length:
            continue
        if directory.source.remote and _STORAGE.fullmatch(name):
            continue  # one request for each storage would be slow
        try:
            extent = directory.locate(name)
            stored = extent if isinstance(extent, Range) else extent.inputs[0]
            assert isinstance(stored, Range)
            yield member(name, Section(*stored), top, script, METHODS[entry.method])
            if script and _CODE.fullmatch(name):
                code = directory.read(name)
                files = {found.group().decode() for found in _FILES.finditer(code)}
                yield Program(name, len(_FUNCTION.findall(code)), tuple(sorted(files)))
        except CkptkitError as error:
            yield Remark(name, error.message)


def member(
    name: str,
    source: ByteSource,
    top: str,
    script: bool,
    packed: str | None,
    open_end: bool = False,
) -> PickleStream | Inner:
    """Classify a member by its name: a pickle that torch loads, another pickle, or other bytes."""
    inner = name.removeprefix(f"{top}/")
    reader: tuple[str, str | None] | None = None
    if not script and inner == "data.pkl":
        reader = TORCH_LOAD, None
    elif script and inner.endswith(".pkl") and "/" not in inner:
        reader = TORCHSCRIPT, NO_PROGRAMS
    elif name.lower().endswith(PICKLES) and not open_end:
        reader = PICKLE, NOT_TORCH
    if reader is None:
        return Inner(name, source, False, packed, open_end)
    return PickleStream(name, source, 0, source.size, *reader, packed=packed, open_end=open_end)


def check(probe: Probe) -> Iterator[CheckedPart]:
    """Yield every non-empty member of an archive, even if no pickle refers to it."""
    assert probe.zip is not None
    return members(probe.zip)


def members(directory: ZipDirectory, file: str = "", item: str = "") -> Iterator[CheckedPart]:
    """Yield the non-empty members of an archive.

    If a file of a folder contains the archive, `file` is the name of this file. `item` is a prefix
    of the members' descriptions, such as ``at byte 1,024: ``.
    """
    for name, entry in directory.entries.items():
        if entry.length or entry.stored:
            yield CheckedPart(f"{item}record {shown(name)}", *directory.record(name), file)
