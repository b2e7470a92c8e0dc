"""Check a torch.distributed.checkpoint folder: items against the metadata, and checksums.

Items are archives of torch.save, with a CRC-32 for each record, or are in a safetensors file, which
has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from os.path import basename

from ckptkit.core.bytesource import Section
from ckptkit.core.errors import CkptkitError, InputError
from ckptkit.core.text import shown
from ckptkit.formats import whats_inside
from ckptkit.formats.dcp.items import Files
from ckptkit.formats.dcp.metadata import Chunk, Place, Whole
from ckptkit.formats.dcp.reading import EXTRA, described, folder_of, places
from ckptkit.formats.format import CheckedPart, Defect, Probe
from ckptkit.formats.table import is_torch_zip


def check(probe: Probe) -> Iterator[CheckedPart | Defect]:
    """Yield every item whose file exists. Raises what is wrong with the metadata."""
    folder = folder_of(probe)
    files = Files(folder)
    found = described(files, frozenset(folder.list()))
    there = {place for place in places(found) if place.file in folder}
    for place in sorted(there):
        for each in _records(files, place):
            yield each
            if isinstance(each, Defect):
                there.discard(place)
    for name, entry in found.entries.items():
        if isinstance(entry, Whole):
            yield from _chunks(files, name, entry, there)
    if EXTRA in folder:
        extra = Probe(folder.open(EXTRA))
        if is_torch_zip(extra) and extra.zip is not None:
            yield from whats_inside.members(extra.zip, EXTRA)


def _records(files: Files, place: Place) -> Iterator[CheckedPart | Defect]:
    """Yield the records of the archive at a place; nothing for another kind of item."""
    try:
        if not files.is_archive(place):
            return
        inner = Probe(Section(files.folder.open(place.file), place.offset, place.length))
        if inner.zip is not None:
            yield from whats_inside.members(inner.zip, place.file, f"at byte {place.offset:,}: ")
    except InputError as error:
        yield Defect(f"at byte {place.offset:,}: {error.message}", place.file)


def _chunks(files: Files, name: str, entry: Whole, there: set[Place]) -> Iterator[Defect]:
    """Yield the findings on chunks whose own headers contradict the metadata."""
    for chunk in entry.chunks:
        if chunk.place in there and (why := _contradiction(files, name, entry, chunk)) is not None:
            yield Defect(
                f"{shown(name)}, at byte {chunk.place.offset:,}: {why.message}",
                _file(why, chunk),
                (name,),
            )


def _contradiction(files: Files, name: str, entry: Whole, chunk: Chunk) -> CkptkitError | None:
    try:
        files.chunk(name, entry.dtype, chunk)
    except InputError as error:
        return error
    return None


def _file(error: CkptkitError, chunk: Chunk) -> str:
    return basename(error.where) if error.where else chunk.place.file
