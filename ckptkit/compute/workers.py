"""Work on many tensors in several threads, or by forked processes.

Computing and reading release the interpreter's lock. Where calls are so short that threads would
wait for it, processes are forked: they have the tensors and open files as they are, so that nothing
is pickled, and no file is opened again. One gets the number of a call and answers with its result
as JSON. When this process ends, however it does, there are no more numbers and nobody to answer,
and the others end too.
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


def should_fork(nbytes: int, sources: Iterable[ByteSource]) -> bool:
    """Return whether forked processes are sooner done with so many bytes, and can read the sources.

    What many short calls compute, threads do no faster than one: each call gives back the
    interpreter's lock, or keeps it.
    """
    if nbytes < FORKED or processors() == 1:
        return False
    return can_fork() and all(source.is_shared for source in sources)


def processors() -> int:
    """Return the number of processors that this process may use, where the system has it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Forked processes

Results = Generator[tuple[int, R], None, None]

_AHEAD = 2  # numbers for each process that are under way
_NUMBER = 4  # bytes of a number, which a pipe keeps together
_PIECE = 64 << 10  # bytes of answers that are read at once


def can_fork() -> bool:
    """Return whether this process may be forked: on Linux, where it has no other threads.

    Locks that those hold would stay taken in the new process.
    """
    return sys.platform == "linux" and threading.active_count() == 1


def results(function: Callable[[int], R], count: int, processes: int) -> Results[R]:
    """Yield number and result of ``function(0)`` to ``function(count - 1)``, in any order.

    Results are what JSON can say, and not None. A call that fails in a process is made again in
    this one, which raises its error; so are those of a process that is killed.
    """
    numbers, end = os.pipe()
    feed = FileIO(end, "wb")
    workers: list[_Worker] = []
    try:
        with _blocked_signals():  # until all processes are known that are to be ended
            for _ in range(min(processes, count)):
                with suppress(OSError):  # the system allows no more
                    workers.append(_forked(function, numbers, end, workers))
        yield from _answers(function, count, feed, workers)
    finally:
        with _blocked_signals():
            os.close(numbers)
            feed.close()
            for worker in workers:
                os.close(worker.answers)
                os.kill(worker.pid, signal.SIGKILL)  # it has nothing to undo
                os.waitpid(worker.pid, 0)


def in_order(results: Iterable[tuple[int, R]]) -> Iterator[R]:
    """Yield results by their numbers, from 0 on."""
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
    answers: int  # the descriptor from which its answers are read


def _forked(
    function: Callable[[int], object], numbers: int, feed: int, others: Iterable[_Worker]
) -> _Worker:
    """Fork a process that calls the function with the numbers it reads, and writes the results."""
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
    """Block interrupts: in forked processes for ever, since this one answers them for all."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _end_after(
    function: Callable[[int], object], numbers: int, answer: int, foreign: Iterable[int]
) -> NoReturn:
    """Answer numbers, in a forked process, and end it without anything that this one would do."""
    try:
        for descriptor in foreign:
            os.close(descriptor)
        _serve(function, numbers, answer)
    finally:
        os._exit(0)


def _serve(function: Callable[[int], object], numbers: int, answer: int) -> None:
    """Answer numbers until there are none, in a forked process."""
    gc.freeze()  # looking at the objects that it shares would copy them
    while data := os.read(numbers, _NUMBER):
        number = int.from_bytes(data, "big")
        try:
            result = function(number)
        except BaseException:  # made again by the other process, which raises it
            result = None
        with open(answer, "wb", closefd=False) as file:
            file.write(json.dumps([number, result]).encode() + b"\n")


def _answers(
    function: Callable[[int], R], count: int, feed: FileIO, workers: Iterable[_Worker]
) -> Results[R]:
    """Yield the answers of the workers, feeding them a number for each; do here what they do not.

    A number without an answer was taken by a worker that was killed, or is left since all were.
    """
    begun = {worker.answers: b"" for worker in workers}  # answers that are not complete
    waiting, under_way = iter(range(count)), set[int]()

    def fed(numbers: int) -> None:
        some = list(islice(waiting, numbers))
        under_way.update(some)
        for number in some:
            feed.write(number.to_bytes(_NUMBER, "big"))
        if len(some) < numbers:
            feed.close()  # so that each ends after its last answer

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
