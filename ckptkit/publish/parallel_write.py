"""Write output files by tasks: here, or spread over threads, forked processes or an executor.

Writes to one file wait for each other in the kernel, so what the kernel copies gains nothing from
threads. They read, compute and sum up while another of them writes. Where much is computed,
processes do it if they may be forked: each short call of a thread waits for the lock of the
interpreter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from functools import partial
from itertools import accumulate, chain
from typing import TYPE_CHECKING

from ckptkit.core.bytesource import Derived, Extent, Identity, Range, file_system
from ckptkit.core.errors import OutputError
from ckptkit.core.plan import Deferred, Segment, Summed, extents, length, sources
from ckptkit.core.text import flatten
from ckptkit.publish.copying import (
    PIECE,
    Progress,
    Summing,
    TaskResult,
    WriteTask,
    combined,
    cut,
    is_sooner_read,
    run,
    write_all,
)

if TYPE_CHECKING:
    from concurrent.futures import Executor


TASK = 256 << 20  # bytes of a task for an executor
THREAD_TASK = 32 << 20  # bytes of a task for a thread
THREADS = 4  # and processes, at most

Results = Generator[tuple[int, TaskResult], None, None]  # number and sums of a task


def execute(
    files: Sequence[tuple[str, Sequence[Segment]]],
    executor: Executor | None,
    progress: Progress,
    *,
    fork: bool = False,
    summing: Summing | None = None,
) -> list[dict[int, int]]:
    """Write the files (path, segments), which exist and are empty; return the checksums of each.

    Those of what is read go to `summing`.

    Without an executor, threads are used where there is much to compute, to fetch or to read;
    kernel copies gain nothing from them. With ``fork``, processes take the place of threads where
    much is computed and all of them can read the sources. Checksums are by number. Raises the
    errors of reading and writing, when no task is running any more.
    """
    marks = summing or Summing(None, (False,) * len(files), [])
    if executor is not None:
        done = _spread(files, marks, TASK, partial(_by_executor, executor), progress)
    elif fork and _can_fork(files):
        done = _spread(files, marks, THREAD_TASK, _by_forks, progress)
    else:
        work = sum(  # bytes that are written sooner by threads
            _work_of(path, segments, () if kept else marks.sources or ())
            for (path, segments), kept in zip(files, marks.keeps_sums, strict=True)
        )
        if work < 2 * THREAD_TASK:
            done = [
                [run(WriteTask(path, 0, tuple(segments), marks.sources, kept), progress)]
                for (path, segments), kept in zip(files, marks.keeps_sums, strict=True)
            ]
        else:
            from concurrent.futures import ThreadPoolExecutor

            with ThreadPoolExecutor(_share()) as threads:
                way = partial(_by_executor, threads)
                done = _spread(files, marks, THREAD_TASK, way, progress)
    if summing is not None:
        summing.runs.extend(run for parts in done for part in parts for run in part.read)
    found = [combined(chain.from_iterable(part.sums for part in parts)) for parts in done]
    for (path, segments), known in zip(files, found, strict=True):
        if known:
            _fill(path, segments, known)
    return found


def _can_fork(files: Sequence[tuple[str, Sequence[Segment]]]) -> bool:
    """Return whether forked processes write the files sooner, and can read what they need."""
    every = (each for _, segments in files for each in extents(segments))
    computed = [each for each in every if isinstance(each, Derived)]
    if not computed or any(map(_is_whole, computed)):
        return False
    from ckptkit.compute.workers import is_sooner_forked

    needed = flatten(sources(segments) for _, segments in files)
    return is_sooner_forked(sum(each.length for each in computed), needed)


def _share() -> int:
    """Return how many threads or processes share the work."""
    from ckptkit.compute.workers import processors

    return min(THREADS, processors())


def _work_of(path: str, segments: Sequence[Segment], summed: Sequence[Identity]) -> int:
    """Count the bytes of one output that are written sooner by threads.

    Ranges of the sources `summed` are read.

    None are where whole tensors are held in memory: there is one at a time.
    """
    computed = [each for each in segments if isinstance(each, (Summed, Derived))]
    if any(map(_is_whole, computed)):
        return -sys.maxsize
    fetched = [
        each
        for each in segments
        if isinstance(each, Range) and (each.source.remote or each.source.identity in summed)
    ]
    return sum(map(length, chain(computed, fetched))) + _bytes_read(path, segments)


def _bytes_read(path: str, segments: Sequence[Segment]) -> int:
    """Count the bytes of local files that are read rather than copied by the kernel."""
    if not any(isinstance(each, Range) and each.length >= PIECE for each in segments):
        return 0
    with open(path, "rb", buffering=0) as file:
        kind = file_system(file.fileno())
    places = accumulate(map(length, segments), initial=0)
    return sum(
        each.length
        for each, place in zip(segments, places, strict=False)  # the last place is the end
        if isinstance(each, Range) and not each.source.remote and is_sooner_read(kind, each, place)
    )


def _is_whole(segment: Segment | Extent) -> bool:
    extent = segment.extent if isinstance(segment, Summed) else segment
    if not isinstance(extent, Derived):
        return False
    return extent.operation.whole or any(map(_is_whole, extent.inputs))


def _spread(
    files: Sequence[tuple[str, Sequence[Segment]]],
    marks: Summing,
    size: int,
    way: Callable[[Sequence[WriteTask]], Results],
    progress: Progress,
) -> list[list[TaskResult]]:
    """Write the files by tasks of about `size` bytes; return what each task of each file sums up.

    `way` carries tasks out and yields their numbers and sums, in any order.
    """
    tasks = [
        [part._replace(summed=marks.sources, keeps_sums=kept) for part in cut(path, segments, size)]
        for (path, segments), kept in zip(files, marks.keeps_sums, strict=True)
    ]
    done: dict[int, TaskResult] = {}
    for late in (False, True):
        chosen = [task for task in flatten(tasks) if task.is_late is late]
        with closing(way(chosen)) as results:
            for number, sums in results:
                done[id(chosen[number])] = sums
                progress(chosen[number].size)
    return [[done[id(task)] for task in each] for each in tasks]


def _by_forks(tasks: Sequence[WriteTask]) -> Results:
    from ckptkit.compute import workers

    results = workers.results(lambda number: run(tasks[number]), len(tasks), _share())
    with closing(results):
        yield from ((number, TaskResult(*done)) for number, done in results)


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


def _fill(path: str, segments: Iterable[Segment], sums: dict[int, int]) -> None:
    """Write the deferred segments, whose checksums are known now."""
    at = 0
    with open(path, "r+b", buffering=0) as file:
        for segment in segments:
            if isinstance(segment, Deferred):
                file.seek(at)
                write_all(file.fileno(), segment.render(sums))
            at += length(segment)
