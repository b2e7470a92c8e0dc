"""Process many tensors in several threads or forked processes.

Long computations and reads release the interpreter lock, so threads run in parallel. If calls are
short, threads would wait for the lock, and processes are forked instead. They inherit the tensors
and open files, so nothing is pickled and no file is reopened. A worker receives the number of a
call and answers with the result as JSON. When the parent process ends, for any reason, the pipes
close and the workers end too.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, NoReturn, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ckptkit.core.bytesource import ByteSource

THREADS = 8  # maximum number of threads: each thread takes some MiB
BATCH = 16 << 20  # bytes per task: passing a task on costs as much as processing 100 KB
FORKED = 256 << 20  # bytes to compute; for fewer, forking takes longer than it saves

T = TypeVar("T")
R = TypeVar("R")


def ordered(
    function: Callable[[T], R], items: Iterable[T], nbytes: Callable[[T], int]
) -> Iterator[R]:
    """Yield ``map(function, items)``, computed by one thread per processor.

    `nbytes` returns the size of an item. A small amount of work is done by the calling thread. Only
    a few batches are in progress at a time. If one fails or the caller stops, no new batch starts,
    and the running ones are awaited.
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
    """Call a function on all items, by one thread per processor, including the calling thread.

    It discards the results and costs less than `ordered`. A small amount of work is done by the
    calling thread alone. If one call fails, no other starts, and the running ones are awaited.
    """
    waiting = iter(items)  # shared: each thread takes its next item from it

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


def should_fork(nbytes: int, sources: Iterable[ByteSource]) -> bool:
    """Return whether forked processes would be faster, and can read the sources.

    Threads do not speed up many short calls, which contend for the interpreter lock.
    """
    if nbytes < FORKED or processors() == 1:
        return False
    return can_fork() and all(source.is_shared for source in sources)


def processors() -> int:
    """Return the number of processors that this process may use, as far as the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Forked processes

Results = Generator[tuple[int, R], None, None]

_AHEAD = 2  # calls in progress per process
_NUMBER = 4  # bytes of a number; a pipe transfers so few bytes atomically
_PIECE = 64 << 10  # bytes of answers per read


def can_fork() -> bool:
    """Return whether this process may fork: only on Linux, and without other threads.

    A lock that another thread holds would stay locked in the new process.
    """
    return sys.platform == "linux" and threading.active_count() == 1


def results(function: Callable[[int], R], count: int, processes: int) -> Results[R]:
    """Yield (n, function(n)) for all n below `count`, in any order, computed by `processes`.

    Results must be JSON values other than None. If a call fails or its process is killed, this
    process repeats the call, and raises its error.
    """
    numbers, end = os.pipe()
    feed = FileIO(end, "wb")
    workers: list[_Worker] = []
    try:
        with _blocked_signals():  # until all workers are listed, so that all are ended
            for _ in range(min(processes, count)):
                with suppress(OSError):  # the system allows no more processes
                    workers.append(_forked(function, numbers, end, workers))
        yield from _answers(function, count, feed, workers)
    finally:
        with _blocked_signals():
            os.close(numbers)
            feed.close()
            for worker in workers:
                os.close(worker.answers)
                os.kill(worker.pid, signal.SIGKILL)  # it has no state to clean up
                os.waitpid(worker.pid, 0)


def in_order(results: Iterable[tuple[int, R]]) -> Iterator[R]:
    """Yield the results of numbered calls in order, from 0 on."""
    early: dict[int, R] = {}
    following = 0
    for number, result in results:
        early[number] = result
        while following in early:
            yield early.pop(following)
            following += 1


class _Worker(NamedTuple):
    """A forked process."""

    pid: int
    answers: int  # descriptor to read its answers from


def _forked(
    function: Callable[[int], object], numbers: int, feed: int, others: Iterable[_Worker]
) -> _Worker:
    """Fork a worker that reads numbers, calls the function, and writes the results."""
    answers, answer = os.pipe()
    try:
        pid = os.fork()
        if not pid:
            foreign = (feed, answers, *(other.answers for other in others))
            _end_after(function, numbers, answer, foreign)
    except OSError:
        os.close(answers)
        raise
    finally:
        os.close(answer)
    return _Worker(pid, answers)


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block interrupts. Forked workers keep them blocked: the parent handles them for all."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _end_after(
    function: Callable[[int], object], numbers: int, answer: int, foreign: Iterable[int]
) -> NoReturn:
    """Run a worker and exit, without the cleanup of the parent process."""
    try:
        for descriptor in foreign:
            os.close(descriptor)
        _serve(function, numbers, answer)
    finally:
        os._exit(0)


def _serve(function: Callable[[int], object], numbers: int, answer: int) -> None:
    """Answer numbers, in a worker, until the pipe is closed."""
    gc.freeze()  # garbage collection would copy the pages that it shares with the parent
    while data := os.read(numbers, _NUMBER):
        number = int.from_bytes(data, "big")
        try:
            result = function(number)
        except BaseException:  # the parent repeats the call and raises the error
            result = None
        with open(answer, "wb", closefd=False) as file:
            file.write(json.dumps([number, result]).encode() + b"\n")


def _answers(
    function: Callable[[int], R], count: int, feed: FileIO, workers: Iterable[_Worker]
) -> Results[R]:
    """Feed numbers to the workers and yield their answers; compute unanswered calls here.

    A number stays unanswered if its worker was killed, or if all were.
    """
    begun = {worker.answers: b"" for worker in workers}  # incomplete answers
    waiting, under_way = iter(range(count)), set[int]()

    def fed(numbers: int) -> None:
        some = list(islice(waiting, numbers))
        under_way.update(some)
        for number in some:
            feed.write(number.to_bytes(_NUMBER, "big"))
        if len(some) < numbers:
            feed.close()  # workers exit when no number is left

    fed(_AHEAD * len(begun))
    with selectors.DefaultSelector() as selector:
        for descriptor in begun:
            selector.register(descriptor, selectors.EVENT_READ)
        while under_way and selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, _PIECE)
                if not data:
                    selector.unregister(key.fd)
                *lines, begun[key.fd] = (begun[key.fd] + data).split(b"\n")
                fed(len(lines))
                for line in lines:
                    number, result = json.loads(line)
                    under_way.remove(number)
                    yield number, function(number) if result is None else result
    for number in (*under_way, *waiting):
        yield number, function(number)
