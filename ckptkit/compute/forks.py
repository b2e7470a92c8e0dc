"""Work on many tensors by forked processes, where threads would wait for the interpreter's lock.

A forked process has the tensors and open files as they are: nothing is pickled, and no file is
opened again. It gets the number of a call and answers with its result as JSON. When this process
ends, however it does, there are no more numbers and nobody to answer, and the others end too.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from itertools import islice
from typing import NamedTuple, NoReturn, TypeVar

R = TypeVar("R")
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
