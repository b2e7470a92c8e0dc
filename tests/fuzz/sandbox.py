"""Files under ``torch.load`` in a forked process with limits, and what they did there.

An audit hook notes whatever reaches for files, processes, sockets or code, and refuses it before it
happens. Beside it: the canary's functions, and the state of the process before and after. The
process is replaced when it dies, and when something in it has changed.
"""

from __future__ import annotations

import codecs
import collections
import copyreg
import gc
import io
import marshal
import os
import pickle
import random
import resource
import signal
import struct
import sys
import threading
import warnings
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.fuzz import canary
from tests.fuzz.trees import MAGIC, archive

SECONDS = 2  # of processor time for a pickle
MEMORY = 1 << 30  # bytes more than the process has

# What happens all the time, and is harmless.
_QUIET = frozenset((
    "builtins.id", "object.__getattr__", "sys._getframe", "pickle.find_class",
))  # fmt: skip


class Outcome(NamedTuple):
    """What one file did, how it ended, and what the canary's probes were asked."""

    events: tuple[str, ...]
    end: str  # "ok TYPE", or the error
    wanted: tuple[str, ...] = ()


class Watch:
    """The record of what happens while a pickle is loaded."""

    def __init__(self) -> None:
        self.armed = False
        self.events: list[str] = []
        self.wanted: list[str] = []
        canary.tell = self.note
        canary.wants = self.want

    def want(self, question: str) -> None:
        """Keep what a probe is asked."""
        if self.armed and len(self.wanted) < 400:
            self.wanted.append(question)

    def note(self, event: str) -> None:
        """Keep an event, the first of many."""
        if self.armed and len(self.events) < 8:
            self.events.append(event)

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Take an audit event; refuse what it tells of."""
        if not self.armed:
            return
        if event == "import":
            raise ModuleNotFoundError("refused by the sandbox")
        if event in _QUIET or (event == "compile" and len(args) > 1 and args[1] == "<unknown>"):
            return  # ast.literal_eval parses, and runs nothing
        if event == "sys.unraisablehook":
            if _is_serious(args[1].exc_value):
                self.note(f"destroys what is not whole: {args[1].exc_value}")
            return
        self.armed = False  # for what showing the arguments sets off
        try:
            shown = repr(args)[:160]
        except Exception:
            shown = "(...)"
        self.armed = True
        self.note(f"audit {event} {shown}")
        raise PermissionError(f"refused by the sandbox: {event}")


def _is_serious(error: BaseException) -> bool:
    """Return whether an error in a destructor says that memory is not what it should be."""
    return isinstance(error, SystemError) or "nternal error" in str(error)


class Sandbox:
    """A process that loads pickles, made anew when it is needed."""

    def __init__(self) -> None:
        self.pid = 0
        self.started = 0
        canary.install()
        torch.set_num_threads(1)  # others are not there after a fork
        torch.load(io.BytesIO(archive(b"N.")), weights_only=False)  # which imports what it needs
        codecs.lookup("latin1")

    def run(self, pickles: Sequence[bytes], alone: bool = True) -> list[Outcome]:
        """Load them one after the other; what changes the process is then loaded alone in new ones."""
        done, changed = self._batch(pickles)
        if not changed:
            return done
        self.close()
        if len(pickles) == 1:
            return [done[0]._replace(events=(*done[0].events, *changed))]
        half = len(pickles) // 2
        return self.run(pickles[:half]) + self.run(pickles[half:]) if alone else done

    def _batch(self, pickles: Sequence[bytes]) -> tuple[list[Outcome], list[str]]:
        done: list[Outcome] = []
        while len(done) < len(pickles):
            if not self.pid:
                self._start()
            _send(self.out, pickles[len(done) :])
            for answer in iter(lambda: _receive(self.into), None):
                if isinstance(answer, list):
                    return done, answer
                done.append(Outcome(*answer))
            status = self._reap()
            done.append(Outcome((f"dies: {status}",), status))
        return done, []

    def _start(self) -> None:
        into, child_out = os.pipe()
        child_into, out = os.pipe()
        sys.stdout.flush()
        self.started += 1
        self.pid = os.fork()
        if self.pid:
            os.close(child_out)
            os.close(child_into)
            self.into, self.out = os.fdopen(into, "rb"), os.fdopen(out, "wb")
            return
        try:
            os.close(into)
            os.close(out)
            _work(os.fdopen(child_into, "rb"), os.fdopen(child_out, "wb"))
        finally:
            os._exit(0)

    def _reap(self) -> str:
        self.into.close()
        try:
            self.out.close()
        except BrokenPipeError:
            pass
        _, status = os.waitpid(self.pid, 0)
        self.pid = 0
        if os.WIFSIGNALED(status):
            return signal.Signals(os.WTERMSIG(status)).name
        return f"exit {os.WEXITSTATUS(status)}"

    def close(self) -> None:
        """End the process."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self._reap()


def _send(stream: Any, value: object) -> None:
    data = marshal.dumps(value)
    try:
        stream.write(struct.pack("<I", len(data)) + data)
        stream.flush()
    except BrokenPipeError:
        pass


def _receive(stream: Any) -> Any:
    """The next message; None when there is no more."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    data = stream.read(struct.unpack("<I", head)[0])
    return marshal.loads(data)  # noqa: S302  # from our own process


def _work(into: Any, out: Any) -> None:
    """The process: batches in, outcomes and then a list of what has changed out."""
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda told: None
    _limit()
    torch.serialization.register_package(1, lambda storage: None, _elsewhere)
    watch = Watch()
    sys.addaudithook(watch.audit)
    for batch in iter(lambda: _receive(into), None):
        before = state()
        for data in batch:
            _send(out, tuple(_attempt(data, watch)))
        after = state()
        _send(out, [f"changes {name}" for name, was in before.items() if after[name] != was])


def _elsewhere(storage: Any, location: str) -> Any:
    """As packages for other devices read it, and torch itself before 2.13."""
    return storage if location.startswith("elsewhere") else None


def _limit() -> None:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _attempt(data: bytes, watch: Watch) -> Outcome:
    watch.events, watch.wanted = [], []
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime) + SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    signal.alarm(15 * SECONDS)  # for what waits, and takes no processor time
    end = _load(data, watch)
    watch.armed = False
    signal.alarm(0)
    if "MemoryError:" in end or "allocate" in end:
        watch.events.append("takes too much memory")
    return Outcome(tuple(map(str, watch.events)), end, tuple(dict.fromkeys(watch.wanted))[:80])


def _load(data: bytes, watch: Watch) -> str:
    """Load it as its container says. Its result is dropped while the hook still listens."""
    watch.armed = True
    try:
        made = loaded(data)
        end = f"ok {type(made).__name__}"
        _touch(made, 3)
        made = None
    except BaseException as error:
        end = f"{type(error).__name__}: {_message(error)}"
    return end


def _touch(made: object, depth: int) -> None:
    """Read the elements of arrays and tensors: pointers that are none end the process."""
    inside: Iterable[object] = ()
    if type(made) in (list, tuple, set, frozenset):
        inside = made
    elif type(made) in (dict, collections.OrderedDict):
        inside = made.values()
    elif isinstance(made, np.ndarray) and made.size < 1_000:
        np.ndarray.tolist(made)
    elif isinstance(made, np.generic):
        made.item()
    elif type(made) is torch.Tensor and max(made.numel(), *made.shape, 0) < 1_000:
        made.tolist()
    for each in islice(inside if depth else (), 20):
        _touch(each, depth - 1)


def _message(error: BaseException) -> str:
    try:
        return str(error)[:60]
    except Exception:
        return "?"


def loaded(data: bytes) -> object:
    """Load it as its container says: torch.load drops the value of a pickle that is alone."""
    made = torch if data[:2] == b"PK" else pickle.loads(data)
    is_torch = made is torch or (type(made) is int and made == MAGIC)
    return torch.load(io.BytesIO(data), weights_only=False) if is_torch else made


def state() -> dict[str, object]:
    """Whatever of a process pickles have no business to change."""
    found: dict[str, object] = {
        "the environment": dict(os.environ),
        "the working directory": os.getcwd(),
        "copyreg": (len(copyreg.dispatch_table), len(vars(copyreg)["_extension_registry"])),
        "the warnings": len(warnings.filters),
        "random": hash(random.getstate()),
        "numpy.random": hash(np.random.get_state()[1].tobytes()),
        "torch.random": hash(torch.get_rng_state().numpy().tobytes()),
        "torch's defaults": (
            torch.get_default_dtype(),
            torch.get_num_threads(),
            torch.is_grad_enabled(),
        ),
        "the interpreter": (sys.getrecursionlimit(), gc.isenabled(), threading.active_count()),
        "the files": len(os.listdir("/proc/self/fd")),
        "numpy's types": tuple(map(repr, map(np.dtype, "?bhilqefdgFDGSUVOMm"))),
    }
    for name in _WATCHED:
        if name in sys.modules:
            items = vars(sys.modules[name]).items()
            found[name] = hash(tuple(id(value) for key, value in items if key != _WARNED))
    return found


_WARNED = "__warningregistry__"
_WATCHED = (
    "builtins", "os", "sys", "types", "collections", "copyreg", "functools", "operator", "pathlib",
    "io", "pickle", "argparse", "datetime", "decimal", "fractions", "uuid", "codecs", "numpy",
    "torch", "torch._utils", "torch._tensor", "torch.storage", "torch.serialization", "usercode",
)  # fmt: skip
