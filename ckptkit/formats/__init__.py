"""Bytes -> Checkpoint, and Checkpoint -> Plan. The table below is the list of formats; there is no other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module

from ckptkit.core.bytesource import ByteSource, Folder, LocalFile
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, UnsupportedError, UsageError
from ckptkit.core.plan import Patch, Plan
from ckptkit.formats.format import Asked, Finding, Format, Part, Probe, Salvaged, WriteOptions
from ckptkit.remote import urls

# In sniff order. TorchScript comes before torch-zip, which it also looks like. Zip, tar, legacy stream is the order in
# which torch tries them. A plain pickle comes after the legacy stream, which begins with one; a folder that stands for
# one of its files comes after all others; the last two are written and never found. Where each is, by its name.
MODULES = {
    "torchscript": "torchscript.reader",
    "torch-zip": "torch_zip.reader",
    "torch-tar": "torch_tar",
    "pt2": "pt2",
    "torch-legacy": "torch_legacy",
    "safetensors": "safetensors",
    "dcp": "dcp",
    "parallel": "parallel",
    "deepspeed": "deepspeed.reader",
    "sharded": "sharded.safetensors_shards",
    "sharded-bin": "sharded.torch_shards",
    "npz": "npz",
    "npy": "npy",
    "pickle": "plain_pickle",
    "folder": "folder",
    "llama-parts": "parallel.llama_parts",
    "megatron-parts": "parallel.megatron_parts",
}
# What `Format.suffixes` of all of them come to: the one that a suffix chooses is found without importing the others.
SUFFIXES = {
    **dict.fromkeys((".pth", ".pt", ".bin", ".ckpt", ".pth.tar", ".pt.tar", ".th"), "torch-zip"),
    ".safetensors": "safetensors",
    ".npz": "npz",
}


class Formats:
    """The formats in sniff order, each imported when it is reached: a .pth file does not pay for the others."""

    def __iter__(self) -> Iterator[Format]:
        return map(_imported, MODULES)


def _imported(name: str) -> Format:
    format: Format = import_module(f"ckptkit.formats.{MODULES[name]}").FORMAT
    return format


FORMATS = Formats()
WHOLE = ("always", "asked")  # of Format.everything


def open_place(path: str | os.PathLike[str]) -> ByteSource | Folder:
    """The file or folder at `path`, which may be a URL. Raises PathError for what is neither."""
    if urls.is_url(path):
        from ckptkit.remote.files import open_url  # local files do not pay for it

        return open_url(os.fspath(path))
    return Folder(path) if os.path.isdir(path) else LocalFile(path)


def match(probe: Probe) -> Format | None:
    """The format that claims a file or folder. Raises what is wrong with the container that some of them share."""
    return next((format for format in FORMATS if format.matches(probe)), None)


def identify(probe: Probe) -> Format:
    """The format of a file or folder, by its content. Raises an InputError that says what it is instead."""
    found = match(probe)
    if found is not None:
        return found
    from ckptkit.formats.common import foreign

    refusal = foreign.refusal(probe)
    if elsewhere := urls.behind_page(probe.name):
        refusal.hint = f"the file itself is at {elsewhere}"
    raise refusal


def read(place: ByteSource | Folder, asked: Asked | None = None) -> Checkpoint:
    """The checkpoint in a file or folder: headers only. Every error says which file."""
    probe = Probe(place, asked)
    try:
        return _reader(probe).read(probe)
    except CkptkitError as error:
        raise error.at(place.name) from error.__cause__


def _reader(probe: Probe) -> Format:
    """The format that reads it; a table of parts is for a folder of parts."""
    if probe.asked.table is None:
        return identify(probe)
    if not probe.is_folder:
        raise UsageError("is a file, and --parts says how the files of a folder go together", where=probe.name)
    return _imported("parallel")


def check(probe: Probe) -> Iterator[Part | Finding]:
    """What can be checked beyond reading, and what is wrong; nothing where the format has no more than that."""
    format = identify(probe)
    return iter(()) if format.check is None else format.check(probe)


def salvage(place: ByteSource | Folder) -> Salvaged:
    """What is whole of a damaged file. Raises CorruptError if nothing is, UnsupportedError for other formats."""
    probe = Probe(place)
    try:
        for format in FORMATS:
            if format.salvage is not None and (found := format.salvage(probe)) is not None:
                return found
    except CkptkitError as error:
        raise error.at(place.name) from error.__cause__
    able = ", ".join(format.name for format in FORMATS if format.salvage is not None)
    raise UnsupportedError("is of no format that can be recovered", where=place.name, hint=f"these can: {able}")


def writable() -> Iterator[Format]:
    """The formats that can be written."""
    return (format for format in FORMATS if format.layout is not None)


def by_name(name: str | None) -> Format | None:
    """The format called `name`, None if there is none."""
    return _imported(name) if name is not None and name in MODULES else None


def for_writing(
    path: str | os.PathLike[str], name: str | None = None, keep: str | None = None, *, shards: bool = False
) -> Format:
    """The format to write `path` in: the one called `name`, else by its suffix, else that of the input (`keep`).

    With `shards` it is one that writes a folder of them, safetensors if nothing says otherwise. Raises UsageError for a
    name or suffix that no writer has.
    """
    if name is not None:
        return _writer(name, shards)
    lower = os.fspath(path).lower()
    by_suffix = by_name(next((each for suffix, each in SUFFIXES.items() if lower.endswith(suffix)), None))
    kept = by_name(keep)
    if shards:
        return _sharding(path, by_suffix, kept)
    if by_suffix is not None:
        return by_suffix
    if kept is not None:
        return kept if kept.layout is not None else _writer(kept.rewrite_as or "torch-zip")
    known = ", ".join(SUFFIXES)
    raise UsageError(
        "the suffix does not say which format to write",
        where=urls.shown(os.fspath(path)),
        hint=f"use one of {known}, or --format; --shard-size 5GB writes a folder",
    )


def _sharding(path: str | os.PathLike[str], by_suffix: Format | None, kept: Format | None) -> Format:
    if by_suffix is not None and not by_suffix.shards:
        raise UsageError(
            f"is the name of a file ({by_suffix.name}), and shards are written into a folder",
            where=urls.shown(os.fspath(path)),
            hint="name a folder, or leave out --shard-size",
        )
    return kept if kept is not None and kept.shards else _writer("sharded")


def _writer(name: str, shards: bool = False) -> Format:
    format = by_name(name)
    if format is None or format.layout is None:
        names = ", ".join(each.name for each in writable())
        known = "cannot be written" if format is not None else "is no format that ckptkit knows"
        raise UsageError(f"{name!r} {known}", hint=f"formats that can be written: {names}")
    if shards and not format.shards:
        able = ", ".join(each.name for each in writable() if each.shards)
        raise UsageError(f"{name} is one file, and --shard-size is for folders", hint=f"--format {able}")
    return format


def layout(checkpoint: Checkpoint, format: Format, options: WriteOptions) -> Plan:
    """What writing `checkpoint` in `format` comes to. Every error says which checkpoint."""
    assert format.layout is not None
    if options.everything and format.everything not in WHOLE:
        able = ", ".join(each.name for each in writable() if each.everything in WHOLE)
        raise UsageError(f"{format.name} cannot hold a whole checkpoint (--all)", hint=f"these can: {able}")
    try:
        checkpoint = _without_pieces(checkpoint, format, options)
        if holds_program(checkpoint) and not options.everything:
            return _layout_weights(checkpoint, format, options)
        return format.layout(checkpoint, options)
    except CkptkitError as error:
        raise error.at(checkpoint.name or "") from error.__cause__


def _without_pieces(checkpoint: Checkpoint, format: Format, options: WriteOptions) -> Checkpoint:
    """The checkpoint with plain tensors for those of several processes, where the output cannot keep such.

    Raises UnsupportedError if it has but a part of them.
    """
    keeps = options.everything or format.everything == "always"
    if keeps and options.objects != "drop" and format.name == checkpoint.format:
        return checkpoint
    if not options.everything:
        checkpoint.whole()
    return checkpoint if keeps and options.objects != "drop" else checkpoint.plain()


def patch(before: Checkpoint, after: Checkpoint, format: Format, options: WriteOptions) -> Patch | None:
    """What makes of the file that `before` was read from one that holds `after`; None if that takes a new file.

    Every error says which checkpoint.
    """
    if format.patch is None:
        return None
    unchanged = after.root is before.root and after.metadata == before.metadata and options == WriteOptions()
    if unchanged and isinstance(before.source, LocalFile):
        return Patch(before.source, None, (), None, before.source.size)
    try:
        return format.patch(before, after, options)
    except CkptkitError as error:
        raise error.at(before.name or "") from error.__cause__


def holds_program(checkpoint: Checkpoint) -> bool:
    """Whether it was read from a format of programs, of which only the weights can be written."""
    kept = by_name(checkpoint.format)
    return kept is not None and kept.program


def _layout_weights(checkpoint: Checkpoint, format: Format, options: WriteOptions) -> Plan:
    from ckptkit.formats.common.programs import notes, without_program

    assert format.layout is not None
    plain = without_program(checkpoint)
    plan = format.layout(plain, options)
    return replace(plan, notes=(*notes(checkpoint, plain), *plan.notes))
