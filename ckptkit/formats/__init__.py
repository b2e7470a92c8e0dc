"""Bytes -> Checkpoint, and Checkpoint -> Plan. The tuple below is the list of formats; there is no other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module

from ckptkit.bytesource import ByteSource, Folder, LocalFile
from ckptkit.checkpoint import Checkpoint
from ckptkit.errors import CkptkitError, UsageError
from ckptkit.formats.format import Format, Probe, WriteOptions
from ckptkit.plan import Plan

# In sniff order. TorchScript comes before torch-zip, which it also looks like; a plain pickle comes after the legacy
# stream, which begins with one.
MODULES = (
    "torch.torchscript",
    "torch.zip_archive",
    "torch.legacy_stream",
    "safetensors",
    "sharded",
    "torch.plain_pickle",
)


class Formats:
    """The formats in sniff order, each imported when it is reached: a .pth file does not pay for the others."""

    def __iter__(self) -> Iterator[Format]:
        for module in MODULES:
            format: Format = import_module(f"ckptkit.formats.{module}").FORMAT
            yield format


FORMATS = Formats()


def open_place(path: str | os.PathLike[str]) -> ByteSource | Folder:
    """The file or folder at `path`. Raises PathError for what is neither."""
    return Folder(path) if os.path.isdir(path) else LocalFile(path)


def identify(probe: Probe) -> Format:
    """The format of a file or folder, by its content. Raises an InputError that says what it is instead."""
    for format in FORMATS:
        if format.matches(probe):
            return format
    from ckptkit.formats import foreign

    raise foreign.refusal(probe)


def read(place: ByteSource | Folder) -> Checkpoint:
    """The checkpoint in a file or folder: headers only. Every error says which file."""
    probe = Probe(place)
    try:
        return identify(probe).read(probe)
    except CkptkitError as error:
        raise error.at(place.name) from error.__cause__


def writable() -> Iterator[Format]:
    """The formats that can be written."""
    return (format for format in FORMATS if format.layout is not None)


def by_name(name: str | None) -> Format | None:
    """The format called `name`, None if there is none."""
    return next((format for format in FORMATS if format.name == name), None)


def for_writing(path: str | os.PathLike[str], name: str | None = None, keep: str | None = None) -> Format:
    """The format to write `path` in: the one called `name`, else by its suffix, else that of the input (`keep`).

    Raises UsageError for a name or suffix that no writer has.
    """
    if name is not None:
        return _writer(name)
    lower = os.fspath(path).lower()
    for format in writable():
        if lower.endswith(format.suffixes):
            return format
    kept = by_name(keep)
    if kept is not None:
        return kept if kept.layout is not None else _writer(kept.rewrite_as or "torch-zip")
    known = ", ".join(suffix for format in writable() for suffix in format.suffixes)
    raise UsageError(
        "the suffix does not say which format to write", where=os.fspath(path), hint=f"use one of {known}, or --format"
    )


def _writer(name: str) -> Format:
    format = by_name(name)
    if format is None or format.layout is None:
        names = ", ".join(each.name for each in writable())
        known = "cannot be written" if format is not None else "is no format that ckptkit knows"
        raise UsageError(f"{name!r} {known}", hint=f"formats that can be written: {names}")
    return format


def layout(checkpoint: Checkpoint, format: Format, options: WriteOptions) -> Plan:
    """What writing `checkpoint` in `format` comes to. Every error says which checkpoint."""
    assert format.layout is not None
    try:
        return format.layout(checkpoint, options)
    except CkptkitError as error:
        raise error.at(checkpoint.name or "") from error.__cause__
