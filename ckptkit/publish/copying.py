"""Write the segments of an output file at the speed of ``cp`` and with a few MiB of memory.

The work consists of independent tasks. Each task contains consecutive segments, and the offset of
the first segment in the output file. There are three ways to write a segment:

* The kernel copies a long range if its offset within a file system block is equal in the input file
  and in the output file. Some file systems share the blocks and copy nothing.
* Other long ranges are read and written in pieces that fit the cache of a CPU core. A kernel copy
  would not be faster, and ckptkit computes the checksum in the same pass.
* Short ranges are read through a read-ahead buffer. One system call writes several short ranges and
  the literals between them.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator
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
    in_file,
    reading,
    runs,
)
from ckptkit.core.errors import InputChangedError, OutputError
from ckptkit.core.plan import Checksummed, ChecksumPlaceholder, Segment, length

if TYPE_CHECKING:
    from ckptkit.compute.strided_read import Block

WINDOW = 1 << 20  # maximum bytes of a read-ahead, and of a write that joins short ranges
PIECE = 256 << 10  # bytes per read and write, small enough for the CPU cache
NEARBY = 4 << 10  # initial number of bytes of a read-ahead
# A range with fewer bytes is short. Measurements show that for short ranges, a read-ahead buffer is
# faster than one system call per range.
SHORT = 32 << 10
CHUNK = 64 << 20  # bytes per kernel copy
BLOCK = 4 << 10  # bytes of a file system block

# copy_file_range fails with these codes if the kernel cannot copy from one file to the other.
_NOT_HERE = {
    *(errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP),
    *(errno.ENOTSUP, errno.ENOTSOCK, errno.EPERM),
}

_of_thread = threading.local()

Progress = Callable[[int], None]
Sum = tuple[int, int, int]  # (index of the checksum, CRC-32 of bytes, number of these bytes)


class WriteTask(NamedTuple):
    """A picklable task that writes bytes of the file `path`, beginning at byte `start`.

    A task does one of three things:

    * A task with `segments` writes the segments one after another.
    * A task with a `block` writes this block of a large transpose.
    * A task with a `checksum` (number, length) computes the CRC-32 of bytes that other tasks wrote.

    `summed` contains identities of sources. While a task reads these sources, it computes checksums
    of the bytes. If `summed` is None, the task verifies no checksums, not even those of compressed
    data. If `keeps_sums` is true, the task computes no checksums of `Range` segments, so the kernel
    can copy these segments.
    """

    path: str
    start: int
    segments: tuple[Segment, ...] = ()
    block: Block | None = None
    checksum: tuple[int, int] | None = None
    summed: tuple[Identity, ...] | None = None
    keeps_sums: bool = False

    @property
    def size(self) -> int:
        """The number of bytes that the task writes."""
        return sum(map(length, self.segments)) if self.block is None else self.block.size

    def is_copied(self, segment: Segment, place: int) -> bool:
        """Return True if the kernel should copy a segment to the offset `place` of the output.

        The kernel is fast only if the source offset and the output offset are equal modulo `BLOCK`.
        Otherwise, the kernel copies page by page, with two writes per page.
        """
        if not isinstance(segment, Range) or segment.length < SHORT:
            return False
        source = segment.source
        is_free = self.keeps_sums or source.identity not in (self.summed or ())
        return isinstance(source, LocalFile) and is_free and not (segment.offset - place) % BLOCK


class TaskResult(NamedTuple):
    """The checksums of the bytes that a task wrote, and of the bytes that the task read."""

    sums: list[Sum]
    read: list[list[int]]  # runs of `ReadSums`


def cut(task: WriteTask, size: int) -> Iterator[WriteTask]:
    """Split a task into tasks of about `size` bytes.

    For a ChecksumPlaceholder, a task writes the `template`. Later, `execute` writes the checksums
    into the gaps.
    """
    from ckptkit.compute.strided_read import blocks

    batch: list[Segment] = []
    start = at = task.start
    for segment in task.segments:
        extent = segment.extent if isinstance(segment, Checksummed) else segment
        turned = blocks(extent, at) if isinstance(extent, Derived) else []
        parts = () if turned else _parts(segment, size)
        for part in parts:
            batch.append(part)
            at += length(part)
            if at - start >= size:
                yield task._replace(start=start, segments=tuple(batch))
                batch, start = [], at
        if not turned:
            continue
        if batch:
            yield task._replace(start=start, segments=tuple(batch))
        for block in turned:
            yield task._replace(start=at, segments=(), block=block)
        if isinstance(segment, Checksummed):
            yield task._replace(start=at, segments=(), checksum=(segment.number, length(segment)))
        at += length(segment)
        batch, start = [], at
    if batch:
        yield task._replace(start=start, segments=tuple(batch))


def _parts(segment: Segment, size: int) -> Iterator[Segment]:
    if isinstance(segment, (bytes, ChecksumPlaceholder)) or length(segment) <= size:
        yield segment
        return
    for each in runs(segment.extent if isinstance(segment, Checksummed) else segment):
        if isinstance(each, Derived):
            ends = each.operation.ends(each, size)
        else:
            ends = (*range(size, each.length, size), each.length)
        start = 0
        for end in ends:
            part = part_of(each, start, end - start)
            yield Checksummed(part, segment.number) if isinstance(segment, Checksummed) else part
            start = end


def run(task: WriteTask, progress: Progress = lambda count: None) -> TaskResult:
    """Execute one task.

    Raises OSError or OutputError if the output cannot be written, InputError if an input cannot be
    read, and InputChangedError if an input changes during the copy.
    """
    if task.checksum is not None:
        return TaskResult([_reread(task.path, task.start, *task.checksum)], [])
    # A transpose reads its source out of order, so do not compute checksums of the source.
    sums = ReadSums(() if task.block is not None else task.summed or ())
    flags = os.O_WRONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
    fd = os.open(task.path, flags)
    try:
        os.lseek(fd, task.start, os.SEEK_SET)
        writer = _SegmentWriter(fd, task, progress)
        with reading(None if task.summed is None else sums):
            if task.block is None:
                writer.write()
            else:
                _write_block(fd, task.block, task.start)
    finally:
        os.close(fd)
    return TaskResult(writer.sums, sums.runs)


def _write_block(fd: int, block: Block, start: int) -> None:
    """Write the `block` of a transpose.

    Reuse the buffer, because allocating new pages takes as long as a copy.
    """
    from ckptkit.compute.strided_read import BlockTransposer

    if not hasattr(_of_thread, "transposer"):
        _of_thread.transposer = BlockTransposer()
    for offset, rows in _of_thread.transposer.pieces(block):
        place = start + offset
        done = os.pwritev(fd, rows, place) if hasattr(os, "pwritev") else 0
        for data in rows:
            if done < len(data):
                os.lseek(fd, place + done, os.SEEK_SET)  # each task has its own descriptor
                write_all(fd, data[done:])
            place += len(data)
            done = max(0, done - len(data))


def _reread(path: str, start: int, number: int, size: int) -> Sum:
    total, left = 0, size
    with open(path, "rb", buffering=0) as file:
        file.seek(start)
        while left:
            data = file.read(min(PIECE, left))
            if not data:
                raise OutputError("became shorter while it was written", where=path)
            total = crc32(data, total)
            left -= len(data)
    return number, total, size


class _SegmentWriter:
    """A writer for the segments of a task. The writer begins at the current position of `fd`."""

    def __init__(self, fd: int, task: WriteTask, progress: Progress) -> None:
        self.sums: list[Sum] = []
        self._fd = fd
        self._task = task
        self._progress = progress
        self._pending: list[bytes] = []
        self._buffer: memoryview | None = None  # buffer for all long ranges
        self._can_copy = hasattr(os, "copy_file_range")

    def write(self) -> None:
        """Write the segments.

        The loop handles short segments without function calls, because a task can have hundreds of
        thousands of segments.
        """
        read, pending, size = ReadAhead().read, self._pending, 0
        for segment in self._task.segments:
            extent, number = segment if isinstance(segment, Checksummed) else (segment, None)
            if isinstance(extent, bytes):
                data = extent
            elif isinstance(extent, Range) and extent[2] < SHORT:
                data = read(*extent)
            elif isinstance(extent, ChecksumPlaceholder):
                data = extent.template
            elif isinstance(extent, Derived) and extent.length < SHORT:
                data = b"".join(stream(extent))
            else:
                self._flush()
                size = 0
                for each in runs(extent):
                    self._long(each, number)
                continue
            if number is not None:
                self._count(number, data)
            pending.append(data)
            size += len(data)
            if size >= WINDOW:
                self._flush()
                size = 0
        self._flush()

    def _long(self, extent: Extent, number: int | None) -> None:
        """Write a long extent by a kernel copy, or piece by piece."""
        place = os.lseek(self._fd, 0, os.SEEK_CUR)
        if isinstance(extent, Range):
            if number is None and self._can_copy and self._task.is_copied(extent, place):
                done = self._copy(extent)
                extent, place = extent.part(done, extent.length - done), place + done
            if self._buffer is None:
                self._buffer = memoryview(bytearray(PIECE))
        for piece in pieces(extent, place, self._buffer):
            if number is not None:
                self._count(number, piece)
            write_all(self._fd, piece)
            self._progress(len(piece))
            del piece  # free memory before the next piece is computed

    def _copy(self, extent: Range) -> int:
        """Copy with the kernel. Return the number of copied bytes. If the kernel cannot copy, the
        number is smaller than the length of `extent`."""
        assert isinstance(extent.source, LocalFile)
        done = 0
        while done < extent.length:
            wanted = min(extent.length - done, CHUNK)
            try:
                count = os.copy_file_range(extent.source.fd, self._fd, wanted, extent.offset + done)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                self._can_copy = False
                break
            if not count:
                raise InputChangedError(
                    "became shorter while it was read", where=extent.source.name
                )
            done += count
            self._progress(count)
        return done

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


def pieces(
    extent: Extent, place: int = 0, buffer: memoryview | None = None
) -> Iterator[bytes | memoryview]:
    """Yield the bytes of an extent. For a local file, reuse one buffer that fits the CPU cache.

    `place` is the offset of the extent in the output. In the output, each piece except the last
    ends at an offset that is divisible by the buffer size.
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
    """Yield the bytes of all segments in order. Write the checksums into the placeholders.

    All pieces may use the same buffer, so the next piece may overwrite the previous piece.
    """
    ahead = ReadAhead()
    for segment in segments:
        extent = segment.extent if isinstance(segment, Checksummed) else segment
        if isinstance(extent, bytes):
            yield extent
        elif isinstance(extent, ChecksumPlaceholder):
            yield extent.render(sums)
        elif isinstance(extent, Range) and extent.length < SHORT:
            yield ahead.read(*extent)
        else:
            yield from pieces(extent)


def checksums(segments: Iterable[Segment]) -> dict[int, int]:
    """Read the bytes of all `Checksummed` segments. Return a dict that maps the number of each
    checksum to the CRC-32."""
    found: dict[int, int] = {}
    for segment in segments:
        if isinstance(segment, Checksummed):
            for piece in pieces(segment.extent):
                found[segment.number] = crc32(piece, found.get(segment.number, 0))
    return found


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all bytes of `data`, with several system calls if necessary."""
    done = os.write(fd, data)
    while done < len(data):
        done += os.write(fd, memoryview(data)[done:])


class ReadAhead:
    """A read-ahead buffer for short ranges. As long as each range begins soon after the previous
    range, the buffer grows."""

    def __init__(self) -> None:
        self._source: ByteSource | None = None
        self._start = 0
        self._data = b""
        self._size = NEARBY

    def read(self, source: ByteSource, offset: int, length: int) -> bytes:
        """Return `length` bytes of `source` at `offset`.

        Update the checksums with these bytes, not with the bytes that are read ahead.
        """
        at = offset - self._start
        if source is not self._source or at < 0 or at + length > len(self._data):
            follows = source is self._source and 0 <= at <= len(self._data) + self._size
            self._size = min(4 * self._size, WINDOW) if follows else NEARBY
            with reading(None):
                wanted = max(length, min(self._size, source.size - offset))
                self._data = source.read(offset, wanted)
            self._source, self._start, at = source, offset, 0
        data = self._data[at : at + length]
        if READING.sums is not None and READING.sums.numbers:
            file, place = in_file(source, offset)
            READING.sums.add(file.identity, place, data)
        return data


def combined(sums: Iterable[Sum]) -> dict[int, int]:
    """Combine the CRC-32s of consecutive bytes that belong to the same checksum.

    Return a dict that maps the number of each checksum to the CRC-32.
    """
    found: dict[int, int] = {}
    for number, crc, size in sums:
        found[number] = crc32_combine(found[number], crc, size) if number in found else crc
    return found
