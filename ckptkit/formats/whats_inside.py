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
from pathlib import Path

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

_NUMPY = "; ckptkit reads what numpy.savez wrote"
_KERAS = "load it with Keras, and save its weights with numpy.savez" + _NUMPY
_TENSORFLOW = "load it with TensorFlow, and save its variables with numpy.savez" + _NUMPY
# The last bytes of the index file of a TensorFlow checkpoint.
_TABLE_END = bytes.fromhex("57fb808b247547db")


def refusal(probe: Probe) -> InputError:
    """Return the error for a file or folder that has no supported format."""
    kind: type[InputError] = FormatError
    head = probe.head
    if probe.is_folder:
        what, hint = _foreign("folder", probe)
    elif not head:
        kind, what = TruncatedError, "is empty"
        hint = "the download or save did not finish; get the file again"
    elif found := _foreign("file", probe):
        what, hint = found
    elif _ends_like_an_index(probe.source):
        what, hint = "is the index of a TensorFlow checkpoint", _TENSORFLOW
    elif probe.zip is not None:
        kind, what, hint = _zip(probe.zip)
    elif head[257:262] == b"ustar":  # a valid tar file matches another format
        what = "is a tar archive whose first header is damaged"
        hint = "download or copy it again"
    elif not head.strip(b"\0"):
        what = "begins with zeros: the save or copy did not finish"
        hint = "get the file again"
    elif _is_text(head):
        what = "is a text file, not a checkpoint"
        hint = f"it begins with {head.decode('utf-8', 'ignore')[:40]!r}"
        what, hint = _foreign("text", probe) or (what, hint)
    elif _are_floats(head):
        what = "has no header; the bytes look like float32 numbers"
        hint = "if you know the shape, read the file with numpy.fromfile and save with numpy.savez"
        hint += _NUMPY
    else:
        what = "does not have a format that ckptkit supports"
        hint = "`ckptkit formats` lists what ckptkit reads"
    return kind(what, hint=hint)


def _foreign(kind: str, probe: Probe) -> tuple[str, ...]:
    """Return description and hint of the first row in foreign.toml that matches, or ().

    `kind` is "file", "text" or "folder".
    """
    import tomllib  # imported only for files that ckptkit cannot read

    text = Path(__file__).with_name("foreign.toml").read_text("utf-8")
    for row in tomllib.loads(text)[kind]:
        begins = re.match(row.get("head", "").encode("latin-1"), probe.head, re.DOTALL)
        named = re.search(row.get("name", ""), probe.name.lower())
        inside = "inside" not in row or any(
            re.fullmatch(row["inside"], name) for name in probe.names
        )
        if begins and named and inside:
            return row["what"], row["hint"].replace("{file}", shell_word(probe.name))
    return ()


def _ends_like_an_index(source: ByteSource) -> bool:
    size = len(_TABLE_END)
    return source.size >= 48 and source.read(source.size - size, size) == _TABLE_END


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
