"""Write the segments of an output file at the speed of ``cp`` and with a few MiB of memory.

The work consists of independent tasks. Each task contains consecutive segments, and the offset of
the first segment in the output file. There are three ways to write a segment:

* The kernel copies a long range if its offset within a file system block is equal in the input file
  and in the output file. Some file systems share the blocks and copy nothing.
* Other long ranges are read and written in pieces that fit the cache of a CPU core. A kernel copy
  would not be faster, and ckptkit computes the checksum in the same pass.
* Short ranges are read through a read-ahead buffer. One system call writes several short ranges and
  the literals between them.

The tasks run in this thread, or in several threads, forked processes or an executor. The kernel
executes all writes to a file one after another. Therefore, threads do not speed up kernel copies.
However, threads can read bytes and compute while another thread writes. If most bytes are computed,
forked processes are faster than threads, because threads wait for the GIL.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from ckptkit.compute.operation import part as part_of
from ckptkit.compute.operation import stream, stream_reusing_buffer
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
from ckptkit.core.plan import (
    Checksummed,
    ChecksumPlaceholder,
    Segment,
    extents,
    length,
    sources,
)
from ckptkit.core.text import flatten

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from ckptkit.compute.strided_read import Block

WINDOW = 1 << 20  # maximum bytes of a read-ahead, and of a write that joins short ranges
PIECE = 256 << 10  # bytes per read and write, small enough for the CPU cache
NEARBY = 4 << 10  # initial number of bytes of a read-ahead
# A range with fewer bytes is short. Measurements show that for short ranges, a read-ahead buffer is
# faster than one system call per range.
SHORT = 32 << 10
CHUNK = 64 << 20  # bytes per kernel copy
BLOCK = 4 << 10  # bytes of a file system block
TASK = 256 << 20  # bytes per task of an executor
THREAD_TASK = 32 << 20  # bytes per task of a thread
THREADS = 4  # maximum number of threads or processes

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


Results = Generator[tuple[int, TaskResult], None, None]  # (index of a task, result of the task)


# Execution of tasks


def cut(task: WriteTask, size: int) -> Iterator[WriteTask]:
    """Split a task into tasks of about `size` bytes.

    For a ChecksumPlaceholder, a task writes the `template`. Later, `execute` writes the checksums
    into the gaps.
    """
    from ckptkit.compute.strided_read import blocks

    batch: list[Segment] = []
    start = at = task.start
    for segment in task.segments:
        extent, number = segment if isinstance(segment, Checksummed) else (segment, None)
        turned = blocks(extent, at) if isinstance(extent, Derived) else []
        if turned:
            if batch:
                yield task._replace(start=start, segments=tuple(batch))
            for block in turned:
                yield task._replace(start=at, segments=(), block=block)
            if number is not None:
                yield task._replace(start=at, segments=(), checksum=(number, length(segment)))
            at += length(segment)
            batch, start = [], at
            continue
        for part in _parts(segment, size):
            batch.append(part)
            at += length(part)
            if at - start >= size:
                yield task._replace(start=start, segments=tuple(batch))
                batch, start = [], at
    if batch:
        yield task._replace(start=start, segments=tuple(batch))


def _parts(segment: Segment, size: int) -> Iterator[Segment]:
    if isinstance(segment, (bytes, ChecksumPlaceholder)) or length(segment) <= size:
        yield segment
        return
    for each in runs(segment.extent if isinstance(segment, Checksummed) else segment):
        ends: Iterable[int] = (*range(size, each.length, size), each.length)
        if isinstance(each, Derived):
            ends = each.operation.ends(each, size)
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
        number, size = task.checksum
        with closing(LocalFile(task.path, follow=False)) as written:
            total = crc32_of(Range(written, task.start, size))
        return TaskResult([(number, total, size)], [])
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


class _SegmentWriter:
    """A writer for the segments of a task. The writer begins at the current position of `fd`."""

    def __init__(self, fd: int, task: WriteTask, progress: Progress) -> None:
        self.sums: list[Sum] = []
        self._fd = fd
        self._task = task
        self._progress = progress
        self._pending: list[bytes] = []
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
        can_copy = isinstance(extent, Range) and number is None and self._can_copy
        if isinstance(extent, Range) and can_copy and self._task.is_copied(extent, place):
            done = self._copy(extent)
            extent = extent.part(done, extent.length - done)
        for piece in stream_reusing_buffer(extent, size=PIECE):
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


def crc32_of(extent: Extent, total: int = 0) -> int:
    """Return the CRC-32 of the bytes of an extent. `total` is the CRC-32 of preceding bytes."""
    for piece in stream_reusing_buffer(extent, size=PIECE):
        total = crc32(piece, total)
    return total


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
            yield from stream_reusing_buffer(extent, size=PIECE)


def checksums(segments: Iterable[Segment]) -> dict[int, int]:
    """Read the bytes of all `Checksummed` segments. Return a dict that maps the number of each
    checksum to the CRC-32."""
    found: dict[int, int] = {}
    for segment in segments:
        if isinstance(segment, Checksummed):
            known = found.get(segment.number, 0)
            found[segment.number] = crc32_of(segment.extent, known)
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


def execute(
    files: Sequence[WriteTask],
    executor: Executor | None,
    progress: Progress,
    *,
    fork: bool = False,
) -> tuple[list[dict[int, int]], list[list[int]]]:
    """Write the files. The files must exist and be empty.

    Return two lists. The first list contains one dict for each file, which maps the number of each
    checksum to a CRC-32. The second list contains the runs of `ReadSums`: the checksums of the
    bytes that were read.

    Without an executor, several threads write the files if many bytes must be computed, downloaded
    or read. If `fork` is true, forked processes can replace the threads. If a task fails, `execute`
    raises the error after all tasks have ended.
    """
    if executor is not None:
        done = _spread(files, TASK, partial(_by_executor, executor), progress)
    elif fork and _can_fork(files):
        done = _spread(files, THREAD_TASK, _by_forks, progress)
    elif sum(map(_work_of, files)) >= 2 * THREAD_TASK:
        from concurrent.futures import ThreadPoolExecutor

        from ckptkit.compute.workers import processors

        with ThreadPoolExecutor(min(THREADS, processors())) as threads:
            done = _spread(files, THREAD_TASK, partial(_by_executor, threads), progress)
    else:
        done = [[run(file, progress)] for file in files]
    found = []
    for file, results in zip(files, done, strict=True):
        known = combined(flatten(result.sums for result in results))
        found.append(known)
        if known:
            _fill(file, known)
    return found, [each for results in done for result in results for each in result.read]


def combined(sums: Iterable[Sum]) -> dict[int, int]:
    """Combine the CRC-32s of consecutive bytes that belong to the same checksum.

    Return a dict that maps the number of each checksum to the CRC-32.
    """
    found: dict[int, int] = {}
    for number, crc, size in sums:
        found[number] = crc32_combine(found[number], crc, size) if number in found else crc
    return found


def _work_of(file: WriteTask) -> int:
    """Return the number of bytes that ckptkit must compute, download or read to write a file.

    Several threads speed up computing, downloading and reading, but not a copy by the kernel. If a
    complete tensor must be in memory, return a large negative number, so that `execute` uses only
    one thread.
    """
    work, place = 0, 0
    for segment in file.segments:
        size = length(segment)
        if isinstance(segment, (Checksummed, Derived)):
            if _is_whole(segment.extent if isinstance(segment, Checksummed) else segment):
                return -sys.maxsize
            work += size
        elif isinstance(segment, Range) and (size >= SHORT or segment.source.remote):
            work += 0 if file.is_copied(segment, place) else size
        place += size
    return work


def _is_whole(extent: Extent) -> bool:
    if not isinstance(extent, Derived):
        return False
    return extent.operation.whole or any(map(_is_whole, extent.inputs))


def _can_fork(files: Sequence[WriteTask]) -> bool:
    """Return True if forked processes are faster than threads and can read the sources."""
    every = extents(flatten(file.segments for file in files))
    computed = [each for each in every if isinstance(each, Derived)]
    if not computed or any(map(_is_whole, computed)):
        return False
    from ckptkit.compute.workers import should_fork

    needed = flatten(sources(file.segments) for file in files)
    return should_fork(sum(each.length for each in computed), needed)


def _spread(
    files: Sequence[WriteTask],
    size: int,
    way: Callable[[Sequence[WriteTask]], Results],
    progress: Progress,
) -> list[list[TaskResult]]:
    """Split the files into tasks of about `size` bytes and execute the tasks. Return the results
    for each file.

    `way` executes tasks and yields (index, result) in any order.
    """
    tasks = [list(cut(file, size)) for file in files]
    done: dict[int, TaskResult] = {}
    for is_late in (False, True):  # checksums of written bytes come last
        chosen = [task for task in flatten(tasks) if (task.checksum is not None) is is_late]
        if chosen:
            with closing(way(chosen)) as results:
                for number, result in results:
                    done[id(chosen[number])] = result
                    progress(chosen[number].size)
    return [[done[id(task)] for task in each] for each in tasks]


def _by_forks(tasks: Sequence[WriteTask]) -> Results:
    from ckptkit.compute.workers import processors, results

    share = min(THREADS, processors())
    with closing(results(lambda number: run(tasks[number]), len(tasks), share)) as found:
        yield from ((number, TaskResult(*done)) for number, done in found)


def _by_executor(executor: Executor, tasks: Sequence[WriteTask]) -> Results:
    from concurrent.futures import BrokenExecutor, Future, as_completed, wait

    futures: dict[Future[TaskResult], int] = {}
    try:
        for number, task in enumerate(tasks):
            futures[executor.submit(run, task)] = number
        for future in as_completed(futures):
            yield futures[future], future.result()
    except BaseException as error:
        for future in futures:
            future.cancel()
        wait(futures)
        if isinstance(error, BrokenExecutor):
            hint = "the process may have run out of memory, or its input file has changed"
            raise OutputError("a worker process ended early", hint=hint) from error
        raise


def _fill(file: WriteTask, sums: dict[int, int]) -> None:
    """Write the checksums into the gaps of the placeholders."""
    at = 0
    with open(file.path, "r+b", buffering=0) as output:
        for segment in file.segments:
            if isinstance(segment, ChecksumPlaceholder):
                output.seek(at)
                write_all(output.fileno(), segment.render(sums))
            at += length(segment)
