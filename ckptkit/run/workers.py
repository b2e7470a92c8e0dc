"""Run calls in local processes or on a Dask cluster.

Both executors run picklable calls, and continue if a worker dies. If a worker dies, its call raises
BrokenExecutor, and the next call gets another worker. If the parent process exits for any reason,
worker processes remove the output that they are writing and exit too.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, TypeVar

from ckptkit.core import __version__
from ckptkit.core.errors import CkptkitError, OutputError, UsageError
from ckptkit.core.text import shown_url

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

ANSWER = 10  # seconds to wait for a scheduler to answer
PATIENCE = 60  # seconds to wait for the scheduler's first worker
FRESH = 5  # seconds for which the number of workers is cached
INTERRUPTED = 130  # exit code of a worker whose parent process has exited

T = TypeVar("T")


@contextmanager
def opened(workers: int | None = None, scheduler: str | None = None) -> Iterator[Pool | None]:
    """Yield a pool of `workers` processes or of a Dask `scheduler`. Yield None for a single
    process.

    `scheduler` is an address (``tcp://host:8786``). Raises UsageError if both `workers` and
    `scheduler` are given, or if Dask is not installed. Raises OutputError if the scheduler does not
    answer.
    """
    if scheduler is not None and workers is not None:
        raise UsageError("use either --workers or --scheduler: a scheduler has its own workers")
    if scheduler is None and (workers or 0) < 2:
        yield None
        return
    pool = Processes(workers or 0) if scheduler is None else Cluster(scheduler)
    try:
        yield pool
    except BaseException:
        pool.stop()
        raise
    finally:
        pool.shutdown()


class Pool(Executor):
    """An executor that also reports its number of workers and can end the running calls."""

    def workers(self) -> int:
        raise NotImplementedError

    def stop(self) -> None:
        """Stop the running calls. Each call first removes its incomplete output."""


class Processes(Pool):
    """Worker processes, each in its own pool. If a process dies, only its own calls are lost."""

    def __init__(self, count: int) -> None:
        self._slots: list[_Slot] = [_Slot() for _ in range(count)]

    def workers(self) -> int:
        return len(self._slots)

    def submit(self, function: Callable[..., T], /, *args: Any, **named: Any) -> Future[T]:
        slot = min(self._slots, key=lambda each: each.waiting)
        return slot.submit(function, args, named)

    def stop(self) -> None:
        for slot in self._slots:
            slot.stop()
        self.shutdown(cancel_futures=True)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for slot in self._slots:
            slot.shutdown(wait, cancel_futures)


class _Slot:
    """One worker process, started when needed and restarted after it died."""

    def __init__(self) -> None:
        self.waiting = 0  # number of calls that have not ended
        self._pool: ProcessPoolExecutor | None = None
        self._lifeline: Connection | None = None

    def submit(self, function: Callable[..., T], args: Any, named: Any) -> Future[T]:
        for _ in range(2):
            try:
                with _safe_path():
                    future = (self._pool or self._start()).submit(_guarded, function, args, named)
            except BrokenExecutor:
                self.shutdown(True, True)
                continue
            self.waiting += 1
            future.add_done_callback(self._ended)
            return future
        raise BrokenExecutor("worker processes exit as soon as they are started")

    def _ended(self, _: Future[Any]) -> None:
        self.waiting -= 1

    def _start(self) -> ProcessPoolExecutor:
        from multiprocessing import get_context

        # Do not fork: locks that other threads of the parent hold would stay locked in the worker.
        context = get_context("spawn")
        theirs, self._lifeline = context.Pipe(duplex=False)
        self._pool = ProcessPoolExecutor(1, context, _begin, (theirs,))
        return self._pool

    def stop(self) -> None:
        if self._lifeline is not None:
            self._lifeline.close()
            self._lifeline = None

    def shutdown(self, wait: bool, cancel_futures: bool) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait, cancel_futures=cancel_futures)
            self._pool = None
        self.stop()


@contextmanager
def _safe_path() -> Iterator[None]:
    """Set PYTHONSAFEPATH: new processes import no modules from the working directory."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


class _ParentExited(BaseException):
    """Raised in a worker whose parent process has exited."""


_busy = False  # in a worker: whether a call is running
_leaving = False  # in a worker: whether the process exits after the call


def _begin(lifeline: Connection) -> None:
    """Initialize a worker: ignore SIGINT, and exit when the parent process exits."""
    sys.unraisablehook = _unraisable
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _leave)
    threading.Thread(target=_watch, args=(lifeline,), daemon=True).start()


def _watch(lifeline: Connection) -> None:
    try:
        lifeline.recv_bytes()
    except (EOFError, OSError):
        os.kill(os.getpid(), signal.SIGTERM)


def _leave(_: int, __: object) -> None:
    global _leaving
    if not _busy:
        os._exit(INTERRUPTED)
    if not _leaving:
        _leaving = True
        raise _ParentExited


def _unraisable(dropped: sys.UnraisableHookArgs) -> None:
    """Report an exception that Python ignored in a destructor, unless it is _ParentExited.

    After _ParentExited, `_guarded` exits anyway.
    """
    if not issubclass(dropped.exc_type, _ParentExited):
        sys.__unraisablehook__(dropped)


def _guarded(function: Callable[..., T], args: Any, named: Any) -> T:
    """Run a call in a worker; exit if the parent process has exited."""
    global _busy
    try:
        try:
            _busy = True
            return function(*args, **named)
        finally:
            _busy = False
            if _leaving:  # Python may have ignored _ParentExited in a destructor
                os._exit(INTERRUPTED)
    except _ParentExited:  # `finally` may raise _ParentExited too
        os._exit(INTERRUPTED)


class Cluster(Pool):
    """The workers of a Dask scheduler, used through the executor of its client."""

    def __init__(self, address: str) -> None:
        try:
            import distributed
        except ImportError as error:
            raise UsageError("--scheduler needs Dask", hint="pip install distributed") from error
        _silence()
        self.address = shown_url(address)
        make: Any = distributed.Client
        try:
            self._client = make(address, timeout=ANSWER, set_as_default=False)
        # If the server is not a Dask server, Client may raise MemoryError.
        except (OSError, ValueError, MemoryError) as error:
            hint = "`dask scheduler` prints its address when it starts"
            raise OutputError("no scheduler answers", where=self.address, hint=hint) from error
        self._executor = self._client.get_executor(pure=False)
        self._cores, self._next = 1, 0.0
        try:
            self._check()
        except BaseException:
            self._client.close()
            raise

    def _check(self) -> None:
        """Raise OutputError if there are no workers, or if a worker has another ckptkit version."""
        try:
            self._client.wait_for_workers(1, timeout=PATIENCE)
        except TimeoutError as error:
            what, hint = (
                "the scheduler has no workers",
                f"start a worker: dask worker {self.address}",
            )
            raise OutputError(what, where=self.address, hint=hint) from error
        try:
            versions = self._client.run(_version)
        except ImportError as error:
            raise _without(error) from error
        for worker, version in versions.items():
            if version != __version__:
                raise OutputError(
                    f"has ckptkit {version}, but this batch needs {__version__}",
                    where=worker,
                    hint="install the same version on every worker",
                )

    def workers(self) -> int:
        if monotonic() >= self._next:
            try:
                cores: dict[str, int] = self._client.ncores()
            except (OSError, AttributeError) as error:  # AttributeError: the client is closed
                raise _gone(self.address) from error
            self._cores, self._next = max(1, sum(cores.values())), monotonic() + FRESH
        return self._cores

    def submit(self, function: Callable[..., T], /, *args: Any, **named: Any) -> Future[T]:
        from distributed.client import ClosedClientError

        try:
            # Dask would search the arguments for Dask objects. A partial hides the arguments.
            call = self._executor.submit(partial(function, *args, **named))
        except ClosedClientError as error:
            raise _gone(self.address) from error
        return _Remote(call, self.address)

    def stop(self) -> None:
        self._executor.shutdown(wait=False)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            self.stop()
        self._client.close()


class _Remote(Future[T]):
    """A Dask future that raises the exceptions of `concurrent.futures`."""

    def __init__(self, inner: Future[T], scheduler: str) -> None:
        super().__init__()
        self._inner, self._scheduler = inner, scheduler
        inner.add_done_callback(self._take)

    def cancel(self) -> bool:
        return super().cancel() and self._inner.cancel()

    def _take(self, inner: Future[T]) -> None:
        if not self.set_running_or_notify_cancel():
            return
        try:
            self.set_result(inner.result())
        except CancelledError:
            self.set_exception(_gone(self._scheduler))
        except CkptkitError as error:
            self.set_exception(error)
        except ImportError as error:
            self.set_exception(_without(error))
        except BaseException as error:
            is_killed = type(error).__name__ == "KilledWorker"
            self.set_exception(BrokenExecutor(str(error)) if is_killed else error)


def _silence() -> None:
    """Keep Dask from logging tracebacks of failures that ckptkit reports itself."""
    import logging

    for name in ("distributed", "distributed.client", "distributed.core", "tornado"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _gone(address: str) -> OutputError:
    return OutputError(
        "the scheduler canceled the work: the scheduler stopped or is unreachable",
        where=address,
        hint="start the scheduler and run the command again",
    )


def _without(error: ImportError) -> OutputError:
    return OutputError(
        f"a worker cannot run ckptkit: {error}",
        hint=f"install ckptkit {__version__} and its extras on every worker",
    )


def _version() -> str:
    """Return the version of ckptkit in a worker (Dask runs this function there)."""
    return __version__
