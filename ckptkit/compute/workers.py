"""Process many tensors in several threads or forked processes.

Long computations and reads release the interpreter lock, so threads run in parallel. For short
calls, ckptkit forks processes instead, because threads would wait for the lock. Forked
processes inherit the tensors and open files, so nothing is pickled and no file is opened again. The
calls are numbered. A worker process receives the number of its next call through a pipe, and
returns the result as JSON. When the parent process ends, for any reason, the pipes close and the
workers end too.
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
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ckptkit.core.bytesource import ByteSource

THREADS = 8  # maximum number of threads; each thread needs a few MiB
BATCH = 16 << 20  # number of bytes per task; to start a task takes as long as about 100 KB of work
FORKED = 256 << 20  # minimum number of computed bytes for which forked processes save time

T = TypeVar("T")
R = TypeVar("R")


def ordered(
    function: Callable[[T], R], items: Iterable[T], nbytes: Callable[[T], int]
) -> Iterator[R]:
    """Yield ``function(item)`` for each item, in order, computed by one thread per processor.

    `nbytes` returns the size of an item. If there is little work, the calling thread does it alone.
    Only a few batches are in progress at a time. If a batch fails or the caller stops, no new batch
    starts, and `ordered` waits until the running batches end.
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
    """Return True if forked processes are faster than threads and can read the sources.

    Threads do not speed up many short calls, because such calls contend for the interpreter lock.
    """
    if nbytes < FORKED or processors() == 1:
        return False
    return can_fork() and all(source.is_shared for source in sources)


def processors() -> int:
    """Return the number of processors that this process may use.

    If the operating system does not report this number, return the number of all processors.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Forked processes

Results = Generator[tuple[int, R], None, None]

_AHEAD = 2  # number of calls in progress per process
_NUMBER = 4  # a call is identified by a number of 4 bytes, which a pipe transfers atomically
_PIECE = 64 << 10  # maximum number of bytes per read from a worker


def can_fork() -> bool:
    """Return True on Linux if this process has no other threads.

    If another thread holds a lock during a fork, the lock remains locked in the new process.
    """
    return sys.platform == "linux" and threading.active_count() == 1


def results(function: Callable[[int], R], count: int, processes: int) -> Results[R]:
    """Yield (n, function(n)) for all n below `count`, in any order, computed by forked processes.

    `processes` is the number of these processes. Results must be JSON values other than None. If a
    call fails or its process is killed, the parent process repeats the call. If the call fails
    again, raise the error of the call.
    """
    numbers, end = os.pipe()
    feed = FileIO(end, "wb")
    workers: list[_Worker] = []
    try:
        # Block signals until `workers` contains all processes, so that `finally` ends all workers.
        with _blocked_signals():
            for _ in range(min(processes, count)):
                with suppress(OSError):  # the operating system allows no more processes
                    workers.append(_forked(function, numbers, end, workers))
        yield from _answers(function, count, feed, workers)
    finally:
        with _blocked_signals():
            os.close(numbers)
            feed.close()
            for worker in workers:
                os.close(worker.answers)
                os.kill(worker.pid, signal.SIGKILL)  # the worker has no state to clean up
                os.waitpid(worker.pid, 0)


def in_order(results: Iterable[tuple[int, R]]) -> Iterator[R]:
    """Sort the results of numbered calls. Yield the result of call 0, of call 1 and so on."""
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
    answers: int  # file descriptor from which the parent process reads results


def _forked(
    function: Callable[[int], object], numbers: int, feed: int, others: Iterable[_Worker]
) -> _Worker:
    """Fork a worker that reads numbers, calls `function` with each, and writes the results."""
    answers, answer = os.pipe()
    try:
        pid = os.fork()
        if not pid:
            try:
                for descriptor in (feed, answers, *(other.answers for other in others)):
                    os.close(descriptor)
                _serve(function, numbers, answer)
            finally:
                os._exit(0)  # run no cleanup code of the parent process
    except OSError:
        os.close(answers)
        raise
    finally:
        os.close(answer)
    return _Worker(pid, answers)


@contextmanager
def _blocked_signals() -> Iterator[None]:
    """Block SIGHUP, SIGINT and SIGTERM within the ``with`` statement.

    Workers that are forked within the ``with`` statement never receive SIGHUP, SIGINT and SIGTERM.
    The parent process handles the signals and ends the workers.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _serve(function: Callable[[int], object], numbers: int, answer: int) -> None:
    """Run the calls of a worker until the pipe `numbers` is closed."""
    gc.freeze()  # garbage collection would copy the memory that worker and parent share
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
    """Send numbers to the workers and yield their results.

    If a worker is killed, its calls have no results. The parent process repeats these calls.
    """
    begun = {worker.answers: b"" for worker in workers}  # incomplete results of each worker
    waiting, under_way = iter(range(count)), set[int]()

    def fed(numbers: int) -> None:
        some = list(islice(waiting, numbers))
        under_way.update(some)
        for number in some:
            feed.write(number.to_bytes(_NUMBER, "big"))
        if len(some) < numbers:
            feed.close()  # the workers exit after the last number

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
