"""Plan: what will be written where; pure, picklable values, complete before the first byte moves.

A plan is a few output files, each a row of segments. A segment is one of

- ``bytes``: literal;
- ``Range``: bytes of a source, copied as they are;
- ``Derived``: bytes that are computed;
- ``Summed``: a ``Range`` or ``Derived`` whose CRC-32 another segment needs;
- ``Deferred``: a literal with holes that are filled with those CRC-32s.

A patch edits a file in place instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from ckptkit.core.bytesource import ByteSource, Derived, Extent, LocalFile, Range, runs
from ckptkit.core.text import plural


class Summed(NamedTuple):
    """`extent`, counted into checksum `number`.

    Extents with one number follow each other in the file.
    """

    extent: Extent
    number: int


class Deferred(NamedTuple):
    """`template` with holes for CRC-32 checksums.

    For each hole (position, number), the CRC-32 of checksum `number` is put at `position` (4 bytes,
    little-endian).
    """

    template: bytes
    holes: tuple[tuple[int, int], ...]  # (position, number)

    def render(self, sums: dict[int, int]) -> bytes:
        data = bytearray(self.template)
        for position, number in self.holes:
            data[position : position + 4] = sums[number].to_bytes(4, "little")
        return bytes(data)


Segment = bytes | Range | Derived | Summed | Deferred


def length(segment: Segment) -> int:
    """Return the number of bytes that the segment writes."""
    if isinstance(segment, bytes):
        return len(segment)
    if isinstance(segment, (Range, Derived)):
        return segment.length
    if isinstance(segment, Summed):
        return segment.extent.length
    return len(segment.template)


@dataclass(frozen=True, slots=True, repr=False)
class OutputFile:
    """One file and its segments in order: its name inside a folder, with slashes where that has
    folders of its own, "" if the plan is that file alone.

    With `keeps_sums`, the ranges that are segments keep the checksum that they have in their
    source.
    """

    name: str
    segments: tuple[Segment, ...]
    keeps_sums: bool = False
    size: int = field(init=False, compare=False)  # bytes of the whole file

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum(map(length, self.segments)))

    def __repr__(self) -> str:
        return f"<OutputFile {self.name or 'alone'}: {self.size:,} bytes>"


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """Everything that one command writes.

    `notes` are what the format could not keep, for the report; `tensors` is how many tensors are
    written where these are others than the weights, None where they are the weights.
    """

    files: tuple[OutputFile, ...]
    notes: tuple[str, ...] = ()
    tensors: int | None = None

    @property
    def is_folder(self) -> bool:
        return bool(self.files[0].name)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def folders(self) -> list[str]:
        """The names of the folders inside the output, outer ones first."""
        parts = [file.name.split("/") for file in self.files]
        return sorted({"/".join(each[:n]) for each in parts for n in range(1, len(each))})

    def sources(self) -> list[ByteSource]:
        """Return every source that bytes come from, once."""
        every = chain.from_iterable(sources(file.segments) for file in self.files)
        return list({id(source): source for source in every}.values())

    def __repr__(self) -> str:
        return f"<Plan of {plural(len(self.files), 'file')}, {self.size:,} bytes>"

    def __str__(self) -> str:
        """Describe the plan for --dry-run, a line per file."""
        lines = []
        for file in self.files:
            data = list(chain.from_iterable(map(runs, extents(file.segments))))
            copied = sum(run.length for run in data if isinstance(run, Range))
            computed = sum(run.length for run in data if isinstance(run, Derived))
            written = file.size - copied - computed
            lines.append(
                f"{file.name or 'output'}: {file.size:,} bytes: {copied:,} copied, "
                f"{computed:,} computed, {written:,} written in {len(file.segments):,} segments"
            )
        return "\n".join(lines)


class Edit(NamedTuple):
    """`data` put at byte `offset` of a file: in a row, or each byte at its own place.

    ``places`` are u4, little-endian, rising, and count from `offset`; none: in a row.
    """

    offset: int
    data: bytes
    places: bytes = b""

    @property
    def stop(self) -> int:
        last = int.from_bytes(self.places[-4:], "little") + 1 if self.places else len(self.data)
        return self.offset + last


@dataclass(frozen=True, slots=True, repr=False)
class Patch:
    """An edit of `base` in place: other bytes in a few places, and the size `size`.

    Written in this order, so that no reader accepts a half-written file: ``breaks`` makes the file
    invalid, ``edits`` (rising, disjoint from each other and from the seal) change it, ``seal``
    makes it valid again. Without a seal nothing changes.
    """

    base: LocalFile
    breaks: Edit | None
    edits: tuple[Edit, ...]
    seal: Edit | None
    size: int  # bytes of the whole file afterwards
    notes: tuple[str, ...] = ()

    @property
    def written(self) -> int:
        """Bytes that are written."""
        return sum(len(edit.data) for edit in (*self.edits, self.seal) if edit is not None)

    def __repr__(self) -> str:
        return f"<Patch {self}>"

    def __str__(self) -> str:
        """Describe the patch for --dry-run, in a line."""
        places = len(self.edits) + (self.seal is not None)
        return (
            f"in place: {self.written:,} of {self.size:,} bytes in {places:,} places, "
            f"{self.base.size:,} before"
        )


def extents(segments: Iterable[Segment]) -> Iterator[Extent]:
    """Yield the extents of all non-literal segments."""
    for segment in segments:
        if isinstance(segment, (Range, Derived)):
            yield segment
        elif isinstance(segment, Summed):
            yield segment.extent


def sources(segments: Iterable[Segment]) -> Iterator[ByteSource]:
    """Yield the sources that segments read, each as often as they do."""
    for extent in extents(segments):
        if isinstance(extent, Range):
            yield extent.source
        else:
            yield from extent.sources()
