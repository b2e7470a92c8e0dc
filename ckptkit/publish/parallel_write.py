"""Write output files in this thread, or with several threads, forked processes or an executor.

The kernel executes all writes to a file one after another. Therefore, threads do not speed up
kernel copies. However, threads can read bytes and compute while another thread writes. If most
bytes are computed, forked processes are faster than threads, because threads wait for the GIL.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from ckptkit.core.bytesource import Derived, Extent, Range
from ckptkit.core.errors import OutputError
from ckptkit.core.plan import Checksummed, ChecksumPlaceholder, extents, length, sources
from ckptkit.core.text import flatten
from ckptkit.publish.copying import (
    SHORT,
    Progress,
    TaskResult,
    WriteTask,
    combined,
    cut,
    run,
    write_all,
)

if TYPE_CHECKING:
    from concurrent.futures import Executor


TASK = 256 << 20  # bytes per task of an executor
THREAD_TASK = 32 << 20  # bytes per task of a thread
THREADS = 4  # maximum number of threads or processes

Results = Generator[tuple[int, TaskResult], None, None]  # (index of a task, result of the task)


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
        done = _spread(files, THREAD_TASK, _by_threads, progress)
    else:
        done = [[run(file, progress)] for file in files]
    sums = [[each for part in parts for each in part.sums] for parts in done]
    found = [combined(each) if each else {} for each in sums]
    for file, known in zip(files, found, strict=True):
        if known:
            _fill(file, known)
    return found, [each for parts in done for part in parts for each in part.read]


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


def _share() -> int:
    """Return the number of threads or processes to use."""
    from ckptkit.compute.workers import processors

    return min(THREADS, processors())


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
    from ckptkit.compute import workers

    results = workers.results(lambda number: run(tasks[number]), len(tasks), _share())
    with closing(results):
        yield from ((number, TaskResult(*done)) for number, done in results)


def _by_threads(tasks: Sequence[WriteTask]) -> Results:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_share()) as threads:
        yield from _by_executor(threads, tasks)


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
