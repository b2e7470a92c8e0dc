"""Write the segments of one output file, at the speed of ``cp`` and in a few MiB of memory.

The work on a file is cut into independent tasks: which segments, and where they begin. Long ranges
of a local file are copied inside the kernel where it can (``copy_file_range``, ``sendfile``), which
shares the bytes instead where the file system can do that, and read and written in pieces where it
cannot (a remote source, macOS, Windows) or would be slower. So are those of which a checksum is
needed, each piece while it is in a core's cache. Short ranges are cut out of bytes that were read
ahead, and written together with the literals between them.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from ckptkit.compute.operation import part as part_of
from ckptkit.compute.operation import stream
from ckptkit.core.bytesource import (
    READING,
    ByteSource,
    Derived,
    Extent,
    Identity,
    LocalFile,
    Range,
    ReadSums,
    crc32,
    crc32_combine,
    file_system,
    in_file,
    reading,
    runs,
)
from ckptkit.core.errors import InputChangedError, OutputError
from ckptkit.core.plan import BLOCK, Deferred, Segment, Summed, length

if TYPE_CHECKING:
    from ckptkit.compute.strided_read import Block, Turner


class TransposeTask(NamedTuple):
    """Some blocks of a large transpose, written where they belong from byte `start` on."""

    blocks: tuple[Block, ...]

    @property
    def length(self) -> int:
        return sum(block.size for block in self.blocks)


class ChecksumTask(NamedTuple):
    """Bytes of the output, of which checksum `number` is taken once they are there."""

    length: int
    number: int


class WriteTask(NamedTuple):
    """Segments to be written one after another from byte `start` of the file `path`; picklable.

    The sources `summed` are summed up while they are read (None: no checksum is compared). With
    `keeps_sums`, ranges need not be: the kernel may copy them.
    """

    path: str
    start: int
    segments: tuple[Segment | TransposeTask | ChecksumTask, ...]
    summed: tuple[Identity, ...] | None = None
    keeps_sums: bool = False

    @property
    def size(self) -> int:
        """Bytes that it writes."""
        return sum(_size(each) for each in self.segments)

    @property
    def is_late(self) -> bool:
        """True if it reads what other tasks write."""
        return isinstance(self.segments[0], ChecksumTask)


class Summing(NamedTuple):
    """What tasks sum up while they read, as in `WriteTask`, and the runs that were.

    `keeps_sums` has a flag for each file.
    """

    sources: tuple[Identity, ...] | None
    keeps_sums: tuple[bool, ...]
    runs: list[list[int]]


def _size(segment: Segment | TransposeTask | ChecksumTask) -> int:
    if isinstance(segment, ChecksumTask):
        return 0
    return segment.length if isinstance(segment, TransposeTask) else length(segment)


def cut(path: str, segments: Iterable[Segment], size: int) -> Iterator[WriteTask]:
    """Cut the work on a file into independent tasks of about `size` bytes; holes stay unfilled."""
    batch: list[Segment] = []
    start = at = 0
    for segment in segments:
        if turned := _turned(segment, at):
            if batch:
                yield WriteTask(path, start, tuple(batch))
            yield from _turning(path, at, segment, turned, size)
            at += length(segment)
            batch, start = [], at
            continue
        for part in _parts(segment, size):
            batch.append(part)
            at += length(part)
            if at - start >= size:
                yield WriteTask(path, start, tuple(batch))
                batch, start = [], at
    if batch:
        yield WriteTask(path, start, tuple(batch))


def _turned(segment: Segment, at: int) -> list[Block]:
    """The blocks of a segment at byte `at` that is a large transpose; else none."""
    extent = segment.extent if isinstance(segment, Summed) else segment
    if not isinstance(extent, Derived):
        return []
    from ckptkit.compute.strided_read import blocks

    return blocks(extent, at)


def _turning(
    path: str, start: int, segment: Segment, blocks: list[Block], size: int
) -> Iterator[WriteTask]:
    """Yield tasks for the blocks of a segment, and one for its checksum if that is needed."""
    batch: list[Block] = []
    held = 0
    for block in blocks:
        batch.append(block)
        held += block.size
        if held >= size:
            yield WriteTask(path, start, (TransposeTask(tuple(batch)),))
            batch, held = [], 0
    if batch:
        yield WriteTask(path, start, (TransposeTask(tuple(batch)),))
    if isinstance(segment, Summed):
        yield WriteTask(path, start, (ChecksumTask(length(segment), segment.number),))


def _parts(segment: Segment, size: int) -> Iterable[Segment]:
    if isinstance(segment, (bytes, Deferred)) or length(segment) <= size:
        return (segment,)
    if isinstance(segment, Summed):
        return (Summed(part, segment.number) for part in _split(segment.extent, size))
    return _split(segment, size)


def _split(extent: Extent, size: int) -> Iterator[Extent]:
    for each in runs(extent):
        start = 0
        ends = each.operation.ends(each, size) if isinstance(each, Derived) else _ends(each, size)
        for end in ends:
            yield part_of(each, start, end - start)
            start = end


def _ends(extent: Range, size: int) -> Iterable[int]:
    return (*range(size, extent.length, size), extent.length)


WINDOW = 1 << 20  # bytes read ahead, and joined into one write
PIECE = 256 << 10  # bytes read and written at a time, so that they stay in a core's cache
NEARBY = 4 << 10  # bytes read ahead at first; the window grows while ranges follow each other
# Bytes; below, reading ahead is cheaper than a system call for each range (measured).
SHORT = 32 << 10
CHUNK = 64 << 20  # bytes of one kernel copy, so that progress and interrupts get through
# File systems where the kernel copies a page at a time, so that bytes at another place in a page of
# the output take two writes for each: reading and writing pieces is a third faster (measured).
BY_PAGES = ("btrfs", "ext4", "overlay", "xfs")

_O_BINARY = getattr(os, "O_BINARY", 0)
_NOT_HERE = {
    *(errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP),
    *(errno.ENOTSUP, errno.ENOTSOCK, errno.EPERM),
}

_of_thread = threading.local()

Progress = Callable[[int], None]
Sum = tuple[int, int, int]  # number, CRC-32, bytes that it covers


class TaskResult(NamedTuple):
    """The checksums of the parts of a task, in order, and those of what it has read."""

    sums: list[Sum]
    read: list[list[int]]  # runs of `ReadSums`


def run(task: WriteTask, progress: Progress = lambda count: None) -> TaskResult:
    """Write one task. Raises OSError, InputError, InputChangedError."""
    first = task.segments[0] if task.segments else None
    if isinstance(first, ChecksumTask):
        return TaskResult([_reread(task.path, task.start, first)], [])
    # A transpose is read in small pieces that do not follow each other.
    sums = ReadSums(() if isinstance(first, TransposeTask) else task.summed or ())
    fd = os.open(task.path, os.O_WRONLY | _O_BINARY | getattr(os, "O_NOFOLLOW", 0))
    try:
        os.lseek(fd, task.start, os.SEEK_SET)
        writer = _SegmentWriter(fd, progress, () if task.keeps_sums else task.summed or ())
        with reading(None if task.summed is None else sums):
            if isinstance(first, TransposeTask):
                for block in first.blocks:
                    for place, rows in _turner().pieces(block):
                        _write_at(fd, rows, task.start + place)
                    progress(block.size)
            else:
                writer.write(task.segments)  # type: ignore[arg-type]  # all others are segments
    finally:
        os.close(fd)
    return TaskResult(writer.sums, sums.runs)


def _turner() -> Turner:
    """Return the thread's own: its memory is used again, since new pages cost as much as copies."""
    from ckptkit.compute.strided_read import Turner

    if not hasattr(_of_thread, "turner"):
        _of_thread.turner = Turner()
    found: Turner = _of_thread.turner
    return found


def _buffer() -> memoryview:
    """Return the thread's own memory for pieces, used again by its next task."""
    if not hasattr(_of_thread, "buffer"):
        _of_thread.buffer = memoryview(bytearray(PIECE))
    found: memoryview = _of_thread.buffer
    return found


def _write_at(fd: int, rows: list[memoryview], place: int) -> None:
    """Write the rows one after another from byte `place` on."""
    done = os.pwritev(fd, rows, place) if hasattr(os, "pwritev") else 0
    for data in rows:
        if done < len(data):
            os.lseek(fd, place + done, os.SEEK_SET)  # each task has a descriptor of its own
            write_all(fd, data[done:])
        place += len(data)
        done = max(0, done - len(data))


def _reread(path: str, start: int, part: ChecksumTask) -> Sum:
    total, left = 0, part.length
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while left:
            data = file.read(min(PIECE, left))
            if not data:
                raise OutputError("became shorter while it was written", where=path)
            total = crc32(data, total)
            left -= len(data)
    return part.number, total, part.length


class _SegmentWriter:
    """Writer of segments one after another, from the current position of `fd`."""

    def __init__(self, fd: int, progress: Progress, summed: Sequence[Identity] = ()) -> None:
        self.sums: list[Sum] = []
        self._summed = summed  # sources whose ranges are read, not copied by the kernel
        self._fd = fd
        self._progress = progress
        self._ahead = ReadAhead()
        self._pending: list[bytes] = []
        self._copiers = [_copy_file_range, _sendfile]  # those that work here, the best first
        self._kind = file_system(fd)

    def write(self, segments: Iterable[Segment]) -> None:
        """Write the segments.

        Short ones are handled in one loop without calls: there may be hundreds of thousands.
        """
        read, pending, size = self._ahead.read, self._pending, 0
        for segment in segments:
            extent, number = segment if isinstance(segment, Summed) else (segment, None)
            if isinstance(extent, bytes):
                data = extent
            elif isinstance(extent, Range) and extent[2] < SHORT:
                data = read(*extent)
            elif isinstance(extent, Deferred):
                data = extent.template
            elif isinstance(extent, Derived) and extent.length < SHORT:
                data = b"".join(stream(extent))
            else:
                for each in runs(extent):
                    size = self._long(each, number, size)
                continue
            if number is not None:
                self._count(number, data)
            pending.append(data)
            size += len(data)
            if size >= WINDOW:
                self._flush()
                size = 0
        self._flush()

    def _long(self, extent: Extent, number: int | None, waiting: int) -> int:
        """Write a long extent after `waiting` pending bytes; count those of it that are pending."""
        source = extent.source if number is None and isinstance(extent, Range) else None
        if isinstance(source, LocalFile) and source.identity not in self._summed:
            assert isinstance(extent, Range)
            return self._long_range(extent, source, waiting)
        self._flush()
        self._in_pieces(extent, number)
        return 0

    def _long_range(self, extent: Range, source: LocalFile, waiting: int) -> int:
        """Let the kernel copy a long range, as far as it can; count the bytes that are pending.

        Those are before and after blocks that files can share: written with their neighbors, since
        the kernel takes several times as long for a part of a block.
        """
        place = os.lseek(self._fd, 0, os.SEEK_CUR) + waiting
        head, tail = _edges(extent.offset, place, extent.length)
        if head:
            self._pending.append(self._ahead.read(source, extent.offset, head))
        self._flush()
        whole = extent.part(head, extent.length - head - tail)
        copied = 0 if is_sooner_read(self._kind, whole, place + head) else self._copy(source, whole)
        if copied < whole.length:
            self._in_pieces(whole.part(copied, whole.length - copied), None)
        if tail:
            end = extent.offset + extent.length
            self._pending.append(self._ahead.read(source, end - tail, tail))
        return tail

    def _in_pieces(self, extent: Extent, number: int | None) -> None:
        """Read or compute, and write, piece by piece."""
        place = os.lseek(self._fd, 0, os.SEEK_CUR)
        buffer = _buffer() if isinstance(extent, Range) else None
        for piece in pieces(extent, place, buffer):
            if number is not None:
                self._count(number, piece)
            write_all(self._fd, piece)
            self._progress(len(piece))
            del piece  # it may be large, and the next one is made before this name is used again

    def _count(self, number: int, data: bytes | memoryview) -> None:
        known, crc, size = self.sums[-1] if self.sums else (None, 0, 0)
        if known == number:
            self.sums[-1] = (number, crc32(data, crc), size + len(data))
        else:
            self.sums.append((number, crc32(data), len(data)))

    def _flush(self) -> None:
        if self._pending:
            data = b"".join(self._pending)
            self._pending.clear()
            write_all(self._fd, data)
            self._progress(len(data))

    def _copy(self, source: LocalFile, extent: Range) -> int:
        """Let the kernel copy; return how many bytes it did: all of them, if it can do so here."""
        done = 0
        while done < extent.length and self._copiers:
            wanted = min(extent.length - done, CHUNK)
            try:
                count = self._copiers[0](self._fd, source, extent.offset + done, wanted)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                del self._copiers[0]
                continue
            if not count:
                raise InputChangedError("became shorter while it was read", where=source.name)
            done += count
            self._progress(count)
        return done


def is_sooner_read(kind: str, extent: Range, place: int) -> bool:
    """Return whether a range of a local file is sooner read and written than copied by the kernel.

    `kind` is that of the file system of the output, and `place` where the range begins there.
    """
    return kind in BY_PAGES and extent.length >= PIECE and (extent.offset - place) % BLOCK != 0


def _edges(offset: int, place: int, length: int) -> tuple[int, int]:
    """Return how many bytes come before and after those that two files can share, if there are any.

    Those are whole blocks of both: the bytes have to be at the same place in a block.
    """
    head = -offset % BLOCK
    can_share = (offset - place) % BLOCK == 0 and length >= head + BLOCK
    return (head, (offset + length) % BLOCK) if can_share else (0, 0)


def _copy_file_range(fd: int, source: LocalFile, offset: int, count: int) -> int:
    if not hasattr(os, "copy_file_range"):
        raise OSError(errno.ENOSYS, "")
    return os.copy_file_range(source.fd, fd, count, offset)


def _sendfile(fd: int, source: LocalFile, offset: int, count: int) -> int:
    if not hasattr(os, "sendfile"):
        raise OSError(errno.ENOSYS, "")
    return os.sendfile(fd, source.fd, offset, count)


def pieces(
    extent: Extent, place: int = 0, buffer: memoryview | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of an extent; a local file's through one buffer that fits a core's cache.

    Pieces for `place` in the output end at multiples of the buffer's size there.
    """
    if isinstance(extent, Derived) or not isinstance(extent.source, LocalFile):
        yield from stream(extent)
        return
    buffer = buffer or memoryview(bytearray(min(PIECE, extent.length)))
    size = len(buffer)
    at = 0
    while at < extent.length:
        piece = buffer[: min(size - (place + at) % size, extent.length - at)]
        extent.source.read_into(extent.offset + at, piece)
        yield piece
        at += len(piece)


def in_order(segments: Iterable[Segment], sums: dict[int, int]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of all segments, given the checksums.

    A piece may be overwritten when the next one is requested.
    """
    ahead = ReadAhead()
    for segment in segments:
        extent = segment.extent if isinstance(segment, Summed) else segment
        if isinstance(extent, bytes):
            yield extent
        elif isinstance(extent, Deferred):
            yield extent.render(sums)
        elif isinstance(extent, Range) and extent.length < SHORT:
            yield ahead.read(*extent)
        elif isinstance(extent, (Range, Derived)):
            yield from pieces(extent)


def checksums(segments: Iterable[Segment]) -> dict[int, int]:
    """Compute the CRC-32s that deferred segments need, by number, reading the bytes they cover."""
    found: dict[int, int] = {}
    for segment in segments:
        if isinstance(segment, Summed):
            for piece in pieces(segment.extent):
                found[segment.number] = crc32(piece, found.get(segment.number, 0))
    return found


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write every byte: a system call may write fewer than it is given."""
    done = os.write(fd, data)
    while done < len(data):
        done += os.write(fd, memoryview(data)[done:])


class ReadAhead:
    """Reader of short ranges, mostly consecutive, through a window that grows while they are."""

    def __init__(self) -> None:
        self._source: ByteSource | None = None
        self._start = 0
        self._data = b""
        self._size = NEARBY

    def read(self, source: ByteSource, offset: int, length: int) -> bytes:
        """Return `length` bytes of `source` from `offset`: they count as read, others do not."""
        at = offset - self._start
        if source is not self._source or at < 0 or at + length > len(self._data):
            with reading(None):
                self._move(source, offset, length)
            at = 0
        data = self._data[at : at + length]
        if READING.sums is not None:
            file, place = in_file(source, offset)
            READING.sums.add(file.identity, place, data)
        return data

    def _move(self, source: ByteSource, offset: int, length: int) -> None:
        follows = (
            source is self._source and 0 <= offset - self._start <= len(self._data) + self._size
        )
        self._size = min(4 * self._size, WINDOW) if follows else NEARBY
        wanted = max(length, min(self._size, source.size - offset))
        self._data = source.read(offset, wanted)
        self._source, self._start = source, offset


def combined(sums: Iterable[Sum]) -> dict[int, int]:
    """Combine the checksums of parts, in order, into one for each number."""
    found: dict[int, int] = {}
    for number, crc, size in sums:
        found[number] = crc32_combine(found[number], crc, size) if number in found else crc
    return found
