"""Find the pickles in a zip archive of torch.save, TorchScript, torch.export, numpy or any other.

Every member is examined by its content, whether its loader reads it or not; the name only tells
which loader reads it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptkit.core.bytesource import ByteSource, Range, Section
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.containers.zip_reader import ZipDirectory
from ckptkit.formats.format import Probe
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

PICKLES = (".pkl", ".pickle", ".p", ".joblib", ".dill")
METHODS = {0: None, 8: "deflate", 12: "bzip2"}
NO_PROGRAMS = "torch.load(weights_only=True) refuses TorchScript"
_SCRIPT = ("constants.pkl", "bytecode.pkl", "model.json")
_STORAGE = re.compile(r"[^/]+/(data|constants|tensors)/[0-9]+")
_CODE = re.compile(r"[^/]+/code/.*\.py")
_FUNCTION = re.compile(rb"^ *def ", re.MULTILINE)
# Operators that leave the program: read, write or load files.
_FILES = re.compile(
    rb"\b(?:torch|ops\.aten)\.(?:save|load|from_file|_save|_load)\b"
    rb"|\bops\.image\.(?:read|write)_file\b"
)


def pickles(probe: Probe) -> Iterator[Found] | None:
    """Yield the pickles of a zip file; None if it is not one.

    Raises what is wrong with the directory.
    """
    directory = probe.zip
    return None if directory is None else _members(directory)


def _members(directory: ZipDirectory) -> Iterator[Found]:
    top = directory.top
    script = any(f"{top}/{name}" in directory for name in _SCRIPT)
    for name, entry in directory.entries.items():
        if name.endswith("/") and not entry.size:
            continue
        if directory.source.remote and _STORAGE.fullmatch(name):
            continue  # a request for each
        try:
            extent = directory.locate(name)
            stored = extent if isinstance(extent, Range) else extent.inputs[0]
            assert isinstance(stored, Range)
            yield member(name, Section(*stored), top, script, METHODS[entry.method])
            if script and _CODE.fullmatch(name):
                yield program(name, directory.read(name))
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
    """Classify a member by its name: what torch.load or torch.jit.load reads, or other bytes."""
    inner = name.removeprefix(f"{top}/")
    size = source.size
    if not script and inner == "data.pkl":
        return PickleStream(
            name, source, 0, size, TORCH_LOAD, None, packed=packed, open_end=open_end
        )
    if script and inner.endswith(".pkl") and "/" not in inner:
        return PickleStream(
            name, source, 0, size, TORCHSCRIPT, NO_PROGRAMS, packed=packed, open_end=open_end
        )
    if name.lower().endswith(PICKLES) and not open_end:
        return PickleStream(name, source, 0, size, PICKLE, NOT_TORCH, packed=packed)
    return Inner(name, source, False, packed, open_end)


def program(name: str, data: bytes) -> Program:
    """Summarize the source text of a program: its functions and the file operators it uses."""
    files = {found.group().decode() for found in _FILES.finditer(data)}
    return Program(name, len(_FUNCTION.findall(data)), tuple(sorted(files)))
