"""Write output files by tasks: here, or spread over threads, forked processes or an executor.

Writes to one file wait for each other in the kernel, so what the kernel copies gains nothing from
threads. They read, compute and sum up while another of them writes. Where much is computed,
processes do it if they may be forked: each short call of a thread waits for the lock of the
interpreter.
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


TASK = 256 << 20  # bytes of a task for an executor
THREAD_TASK = 32 << 20  # bytes of a task for a thread
THREADS = 4  # and processes, at most

Results = Generator[tuple[int, TaskResult], None, None]  # number and result of a task


def execute(
    files: Sequence[WriteTask],
    executor: Executor | None,
    progress: Progress,
    *,
    fork: bool = False,
) -> tuple[list[dict[int, int]], list[list[int]]]:
    """Write the files, which exist and are empty.

    Return the checksums of each by number, and the runs of all that was read and summed up. Without
    an executor, threads are used where there is much to compute, to fetch or to read; kernel copies
    gain nothing from them. With ``fork``, processes take the place of threads where much is
    computed and all of them can read the sources. Raises the errors of reading and writing, when no
    task is running any more.
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
    """Count the bytes of one output that are written sooner by threads.

    None are where whole tensors are held in memory: there is one at a time.
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
    """Return whether forked processes write the files sooner, and can read what they need."""
    every = extents(flatten(file.segments for file in files))
    computed = [each for each in every if isinstance(each, Derived)]
    if not computed or any(map(_is_whole, computed)):
        return False
    from ckptkit.compute.workers import should_fork

    needed = flatten(sources(file.segments) for file in files)
    return should_fork(sum(each.length for each in computed), needed)


def _share() -> int:
    """Return how many threads or processes share the work."""
    from ckptkit.compute.workers import processors

    return min(THREADS, processors())


def _spread(
    files: Sequence[WriteTask],
    size: int,
    way: Callable[[Sequence[WriteTask]], Results],
    progress: Progress,
) -> list[list[TaskResult]]:
    """Write the files by tasks of about `size` bytes; return the results of each file's tasks.

    `way` carries tasks out and yields their numbers and results, in any order.
    """
    tasks = [list(cut(file, size)) for file in files]
    done: dict[int, TaskResult] = {}
    for is_late in (False, True):  # checksums of what other tasks write come after those
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
            hint = "it ran out of memory, or found another file where the input was"
            raise OutputError("a worker ended before its work was done", hint=hint) from error
        raise


def _fill(file: WriteTask, sums: dict[int, int]) -> None:
    """Write the deferred segments, whose checksums are known now."""
    at = 0
    with open(file.path, "r+b", buffering=0) as output:
        for segment in file.segments:
            if isinstance(segment, ChecksumPlaceholder):
                output.seek(at)
                write_all(output.fileno(), segment.render(sums))
            at += length(segment)
