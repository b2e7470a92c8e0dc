"""Plan: a description of the bytes of each output file.

A plan can be pickled, and is complete before ckptkit copies the first byte. A plan consists of one
or more output files. Each output file is a sequence of segments, of these types:

* ``bytes``: ckptkit writes these bytes unchanged.
* ``Range``: ckptkit copies these bytes from a source.
* ``Derived``: ckptkit computes these bytes.
* ``Checksummed``: a ``Range`` or ``Derived`` whose CRC-32 is needed by a placeholder.
* ``ChecksumPlaceholder``: bytes with gaps into which ckptkit writes CRC-32s.

A Patch, in contrast, edits an existing file in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from ckptkit.core.bytesource import ByteSource, Derived, Extent, LocalFile, Range, runs
from ckptkit.core.text import plural


class Checksummed(NamedTuple):
    """Bytes that are included in the CRC-32 with the index `number`.

    All bytes that a CRC-32 covers are consecutive in the output file.
    """

    extent: Extent
    number: int


class ChecksumPlaceholder(NamedTuple):
    """Bytes with gaps for CRC-32s.

    For each pair (position, number) of `holes`, the CRC-32 with the index `number` is written at
    `position` of `template`. A CRC-32 has 4 bytes, little-endian.
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
    """Return the number of bytes that the segment has in the output."""
    if isinstance(segment, bytes):
        return len(segment)
    if isinstance(segment, (Range, Derived)):
        return segment.length
    if isinstance(segment, Checksummed):
        return segment.extent.length
    return len(segment.template)


@dataclass(frozen=True, slots=True, repr=False)
class OutputFile:
    """One output file, with its segments in order.

    `name` is the path of the file inside the output folder, with slashes. If the output is a single
    file, `name` is "". If `keeps_sums` is set, each Range is copied together with its old checksum.
    """

    name: str
    segments: tuple[Segment, ...]
    keeps_sums: bool = False
    size: int = field(init=False, compare=False)  # number of bytes of the complete file

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", sum(map(length, self.segments)))

    def __repr__(self) -> str:
        return f"<OutputFile {self.name or 'alone'}: {self.size:,} bytes>"


@dataclass(frozen=True, slots=True, repr=False)
class Plan:
    """Everything that one command writes.

    `notes` tell the user which data the output format cannot represent. `tensors` is the number of
    written tensors. `tensors` is None if the command writes exactly the weights.
    """

    files: tuple[OutputFile, ...]
    notes: tuple[str, ...] = ()
    tensors: int | None = None

    @property
    def is_folder(self) -> bool:
        return bool(self.files[0].name)

    @property
    def size(self) -> int:
        """Number of bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def folders(self) -> list[str]:
        """Paths of the folders inside the output. Each folder follows its parent folder."""
        parts = [file.name.split("/") for file in self.files]
        return sorted({"/".join(each[:n]) for each in parts for n in range(1, len(each))})

    def sources(self) -> list[ByteSource]:
        """Return each source that the plan reads, once."""
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
    """An edit that writes `data` at byte `offset` of a file.

    If ``places`` is empty, the bytes are contiguous. Otherwise ``places`` contains the position of
    each byte, relative to `offset`. The positions are little-endian uint32 in ascending order.
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
    """An edit in place: new bytes for some positions of the file `base`, and the new file size.

    The order of the writes ensures that readers reject a half-written file. First, ``breaks``
    makes the file invalid. Then ckptkit writes ``edits``, in ascending order of their offsets.
    Last, ``seal`` makes the file valid again. ``edits`` and ``seal`` do not overlap. A patch
    without a ``seal`` is a no-op.
    """

    base: LocalFile
    breaks: Edit | None
    edits: tuple[Edit, ...]
    seal: Edit | None
    size: int  # number of bytes of the file after the edit
    notes: tuple[str, ...] = ()

    @property
    def written(self) -> int:
        """Number of bytes that the patch writes."""
        return sum(len(edit.data) for edit in (*self.edits, self.seal) if edit is not None)

    def __repr__(self) -> str:
        return f"<Patch {self}>"

    def __str__(self) -> str:
        """Describe the patch for --dry-run, in one line."""
        places = len(self.edits) + (self.seal is not None)
        return (
            f"in place: {self.written:,} of {self.size:,} bytes in {places:,} places; "
            f"the file had {self.base.size:,} bytes before"
        )


def extents(segments: Iterable[Segment]) -> Iterator[Extent]:
    """Yield the Range or Derived of each segment, except literal bytes and placeholders."""
    for segment in segments:
        if isinstance(segment, (Range, Derived)):
            yield segment
        elif isinstance(segment, Checksummed):
            yield segment.extent


def sources(segments: Iterable[Segment]) -> Iterator[ByteSource]:
    """Yield the sources from which the segments read. A source may repeat."""
    for extent in extents(segments):
        if isinstance(extent, Range):
            yield extent.source
        else:
            yield from extent.sources()
