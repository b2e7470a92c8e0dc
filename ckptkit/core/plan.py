"""Plan: the bytes of each output file, a picklable value. It is complete before any copy starts.

A plan is one or more output files, each a sequence of segments. A segment is one of

- ``bytes``: literal bytes, written unchanged;
- ``Range``: bytes of a source, copied;
- ``Derived``: bytes that are computed;
- ``Checksummed``: a ``Range`` or ``Derived`` whose CRC-32 a placeholder needs;
- ``ChecksumPlaceholder``: bytes with holes that those CRC-32s fill.

A patch, in contrast, edits an existing file in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from ckptkit.core.bytesource import ByteSource, Derived, Extent, LocalFile, Range, runs
from ckptkit.core.text import plural


class Checksummed(NamedTuple):
    """An extent whose bytes count toward checksum `number`.

    The extents of one checksum are consecutive in the file.
    """

    extent: Extent
    number: int


class ChecksumPlaceholder(NamedTuple):
    """`template` with holes for CRC-32s.

    For each hole (position, number), checksum `number` is written at `position` of the template
    (4 bytes, little-endian).
    """

    template: bytes
    holes: tuple[tuple[int, int], ...]  # (position, number)

    def render(self, sums: dict[int, int]) -> bytes:
        data = bytearray(self.template)
        for position, number in self.holes:
            data[position : position + 4] = sums[number].to_bytes(4, "little")
        return bytes(data)


Segment = bytes | Range | Derived | Checksummed | ChecksumPlaceholder


def length(segment: Segment) -> int:
    """Return the number of bytes of the segment in the output."""
    if isinstance(segment, bytes):
        return len(segment)
    if isinstance(segment, (Range, Derived)):
        return segment.length
    if isinstance(segment, Checksummed):
        return segment.extent.length
    return len(segment.template)


@dataclass(frozen=True, slots=True, repr=False)
class OutputFile:
    """One output file and its segments in order.

    `name` is its path inside the output folder, with slashes, or "" if the plan is a single file.
    With `keeps_sums`, segments that are ranges keep the checksum of their source.
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

    `notes` tell the user which data the format could not keep. `tensors` is the number of written
    tensors, None if exactly the weights are written.
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
        """Paths of the folders inside the output, outer ones first."""
        parts = [file.name.split("/") for file in self.files]
        return sorted({"/".join(each[:n]) for each in parts for n in range(1, len(each))})

    def sources(self) -> list[ByteSource]:
        """Return every source that the plan reads, without repeats."""
        every = chain.from_iterable(sources(file.segments) for file in self.files)
        return list({id(source): source for source in every}.values())

    def __repr__(self) -> str:
        return f"<Plan of {plural(len(self.files), 'file')}, {self.size:,} bytes>"

    def __str__(self) -> str:
        """Describe the plan for --dry-run, one line per file."""
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
    """`data` written at byte `offset` of a file, contiguously or scattered.

    If ``places`` is not empty, each byte of `data` has its own place. Places are little-endian
    uint32 in ascending order, relative to `offset`.
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
    """An edit of the file `base` in place: new bytes in a few places, and a new size.

    The writes happen in an order in which no reader accepts a half-written file. First ``breaks``
    makes the file invalid. Then ``edits`` change it (rising; disjoint from each other and the
    seal). Last, ``seal`` makes it valid again. Without a seal the patch is a no-op.
    """

    base: LocalFile
    breaks: Edit | None
    edits: tuple[Edit, ...]
    seal: Edit | None
    size: int  # bytes of the whole file afterwards
    notes: tuple[str, ...] = ()

    @property
    def written(self) -> int:
        """Number of bytes written."""
        return sum(len(edit.data) for edit in (*self.edits, self.seal) if edit is not None)

    def __repr__(self) -> str:
        return f"<Patch {self}>"

    def __str__(self) -> str:
        """Describe the patch for --dry-run, in one line."""
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
        elif isinstance(segment, Checksummed):
            yield segment.extent


def sources(segments: Iterable[Segment]) -> Iterator[ByteSource]:
    """Yield the source of each read of the segments. Sources may repeat."""
    for extent in extents(segments):
        if isinstance(extent, Range):
            yield extent.source
        else:
            yield from extent.sources()
