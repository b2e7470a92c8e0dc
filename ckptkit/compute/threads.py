"""Work on many tensors in several threads; computing and reading release the interpreter lock."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ckptkit.core.bytesource import ByteSource

THREADS = 8  # at most: each takes some MiB
BATCH = (
    16 << 20
)  # bytes of a task: handing one over costs as much as looking at a hundred kilobytes
FORKED = 256 << 20  # bytes to compute: for fewer, forking takes longer than it saves

T = TypeVar("T")
R = TypeVar("R")


def ordered(
    function: Callable[[T], R], items: Iterable[T], nbytes: Callable[[T], int]
) -> Iterator[R]:
    """Yield ``map(function, items)``, by a thread for each processor; `nbytes` sizes an item.

    Little work is done right here. Only some batches are under way at a time, however many items
    there are; when one fails or the caller stops, those that have begun are waited for and no
    other begins.
    """
    some = batches(items, nbytes)
    first, second = next(some, None), next(some, None)
    threads = min(THREADS, processors())
    if first is None or second is None or threads == 1:
        for batch in (first, second, *some):
            yield from map(function, batch or ())
        return
    from concurrent.futures import ThreadPoolExecutor

    waiting: deque[Future[list[R]]] = deque()
    pool = ThreadPoolExecutor(threads)
    try:
        waiting.extend(pool.submit(_all, function, batch) for batch in (first, second))
        for batch in some:
            waiting.append(pool.submit(_all, function, batch))
            if len(waiting) >= 2 * threads:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def in_any_order(
    function: Callable[[T], object], items: Sequence[T], nbytes: Callable[[T], int]
) -> None:
    """Apply a function to the items, by a thread for each processor, the calling one included.

    Where nothing is made of the results, this costs less than `ordered`. Little work is done right
    here. When one item fails no other begins, and those that have begun are waited for.
    """
    waiting = iter(items)  # each thread takes its next item from it

    def work() -> None:
        try:
            for item in waiting:
                function(item)
        except BaseException:
            deque(waiting, maxlen=0)
            raise

    threads = min(THREADS, processors(), len(items))
    if threads < 2 or sum(map(nbytes, items)) < BATCH:
        work()
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(threads - 1) as pool:
        others = [pool.submit(work) for _ in range(threads - 1)]
        work()
    for other in others:
        other.result()


def _all(function: Callable[[T], R], batch: list[T]) -> list[R]:
    return list(map(function, batch))


def batches(items: Iterable[T], nbytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Yield the items in lists of about `BATCH` bytes."""
    batch: list[T] = []
    size = 0
    for item in items:
        batch.append(item)
        size += nbytes(item)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def is_sooner_forked(nbytes: int, sources: Iterable[ByteSource]) -> bool:
    """Return whether forked processes are sooner done with so many bytes, and can read the sources.

    What many short calls compute, threads do no faster than one: each call gives back the
    interpreter's lock, or keeps it.
    """
    if nbytes < FORKED or processors() == 1:
        return False
    from ckptkit.compute.forks import can_fork

    return can_fork() and all(source.is_shared for source in sources)


def processors() -> int:
    """Return the number of processors that this process may use, where the system has it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
