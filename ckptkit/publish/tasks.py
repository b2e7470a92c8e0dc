"""The work on one output file as independent tasks: which segments, and where they begin."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ckptkit.core.bytesource import Derived, Extent, Identity, runs
from ckptkit.core.plan import SEEKABLE, Deferred, Segment, Summed, length

if TYPE_CHECKING:
    from ckptkit.compute.slabs import Block


class Turned(NamedTuple):
    """Some blocks of a large transpose, written where they belong from byte `start` on."""

    blocks: tuple[Block, ...]

    @property
    def length(self) -> int:
        return sum(block.size for block in self.blocks)


class Reread(NamedTuple):
    """Bytes of the output, of which checksum `number` is taken once they are there."""

    length: int
    number: int


class Task(NamedTuple):
    """Segments to be written one after another from byte `start` of the file `path`; picklable.

    The sources `summed` are summed up while they are read (None: no checksum is compared). With
    `keeps_sums`, ranges need not be: the kernel may copy them.
    """

    path: str
    start: int
    segments: tuple[Segment | Turned | Reread, ...]
    summed: tuple[Identity, ...] | None = None
    keeps_sums: bool = False

    @property
    def size(self) -> int:
        """Bytes that it writes."""
        return sum(_written(each) for each in self.segments)

    @property
    def is_late(self) -> bool:
        """True if it reads what other tasks write."""
        return isinstance(self.segments[0], Reread)


class Summing(NamedTuple):
    """What tasks sum up while they read, as in `Task`, and the runs that were.

    `keeps_sums` has a flag for each file.
    """

    sources: tuple[Identity, ...] | None
    keeps_sums: tuple[bool, ...]
    runs: list[list[int]]


def _written(segment: Segment | Turned | Reread) -> int:
    if isinstance(segment, Reread):
        return 0
    return segment.length if isinstance(segment, Turned) else length(segment)


def cut(path: str, segments: Iterable[Segment], size: int) -> Iterator[Task]:
    """Cut the work on a file into independent tasks of about `size` bytes; holes stay unfilled."""
    batch: list[Segment] = []
    start = at = 0
    for segment in segments:
        if turned := _turned(segment, at):
            if batch:
                yield Task(path, start, tuple(batch))
            yield from _turning(path, at, segment, turned, size)
            at += length(segment)
            batch, start = [], at
            continue
        for part in _parts(segment, size):
            batch.append(part)
            at += length(part)
            if at - start >= size:
                yield Task(path, start, tuple(batch))
                batch, start = [], at
    if batch:
        yield Task(path, start, tuple(batch))


def _turned(segment: Segment, at: int) -> list[Block]:
    """The blocks of a segment at byte `at` that is a large transpose; else none."""
    extent = segment.extent if isinstance(segment, Summed) else segment
    if not isinstance(extent, Derived):
        return []
    from ckptkit.compute.slabs import blocks

    return blocks(extent, at)


def _turning(
    path: str, start: int, segment: Segment, blocks: list[Block], size: int
) -> Iterator[Task]:
    """Yield tasks for the blocks of a segment, and one for its checksum if that is needed."""
    batch: list[Block] = []
    held = 0
    for block in blocks:
        batch.append(block)
        held += block.size
        if held >= size:
            yield Task(path, start, (Turned(tuple(batch)),))
            batch, held = [], 0
    if batch:
        yield Task(path, start, (Turned(tuple(batch)),))
    if isinstance(segment, Summed):
        yield Task(path, start, (Reread(length(segment), segment.number),))


def _parts(segment: Segment, size: int) -> Iterable[Segment]:
    if isinstance(segment, (bytes, Deferred)) or length(segment) <= size:
        return (segment,)
    if isinstance(segment, Summed):
        return (Summed(part, segment.number) for part in _split(segment.extent, size))
    return _split(segment, size)


def _split(extent: Extent, size: int) -> Iterator[Extent]:
    for each in runs(extent):
        if isinstance(each, Derived):
            yield from _pieces_of(each, size)
            continue
        for start in range(0, each.length, size):
            yield each.part(start, min(size, each.length - start))


def _pieces_of(extent: Derived, size: int) -> Iterator[Extent]:
    """Yield parts of about `size` bytes if the extent can start anywhere; else itself."""
    if extent.operation in SEEKABLE:
        step = _step(extent, size)
        for start in range(0, extent.length, step):
            yield Derived("slice", (extent,), (start,), min(step, extent.length - start))
        return
    if extent.operation not in ("gather", "chunks") or extent.length < 2 * size:
        yield extent
        return
    from ckptkit.compute.gather import ends

    start = 0
    for end in ends(extent):
        if end - start >= size or end == extent.length:
            yield Derived("slice", (extent,), (start,), end - start)
            start = end


def _step(extent: Derived, size: int) -> int:
    """Return `size` bytes or more, a whole number of matrices where several are in one tensor."""
    from ckptkit.compute.blocks import Blocks

    (blocks,) = extent.parameters if extent.operation == "blocks" else (None,)
    matrix = extent.length // blocks.batches if isinstance(blocks, Blocks) else extent.length
    return -(-size // matrix) * matrix if matrix <= 2 * size else size
