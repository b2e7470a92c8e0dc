"""Pickles under ``pickle.load`` in a forked process with limits, and what they did there.

An audit hook notes whatever reaches for files, processes, sockets, code or modules, and refuses it
before it happens. Beside it: the canary's functions, Python functions that the unpickler enters,
names that it looks up, and the state of the process before and after. The process is replaced when
it dies, and when something in it has changed.
"""

from __future__ import annotations

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
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.fuzz import canary

SECONDS = 4  # of processor time for a pickle
MEMORY = 1 << 30  # bytes more than the process has
MEMBER = "archive/data.pkl"

# What happens all the time, and is harmless.
_QUIET = frozenset((
    "builtins.id", "object.__getattr__", "sys._getframe", "sys.setprofile",
))  # fmt: skip

# Methods that Python calls itself when an object is made, changed, compared or hashed.
_SETUP = frozenset((
    "__array_finalize__", "__bool__", "__contains__", "__del__", "__delattr__", "__eq__", "__ge__",
    "__get__", "__getattr__", "__getattribute__", "__getitem__", "__gt__", "__hash__",
    "__init_subclass__", "__instancecheck__", "__iter__", "__le__", "__len__", "__lt__",
    "__missing__", "__ne__", "__new__", "__repr__", "__set__", "__set_name__", "__setattr__",
    "__setitem__", "__setstate__", "__str__", "__subclasscheck__", "__subclasshook__",
    "__torch_function__",
))  # fmt: skip

# Functions that C code of Python, numpy and torch calls on its own.
_INSIDE = (
    "abc.ABCMeta.", "namedtuple_", "dataclasses._dataclass_setstate", "abc.ABC.", "encodings.search_function",
    "tensordict.tensorclass._setstate", "weakref.WeakValueDictionary.", "zoneinfo._tzpath.find_tzfile",
    "zoneinfo._common.load_tzdata",
    "enum.EnumMeta.", "enum.EnumType.", "importlib._bootstrap.", "numpy._core._exceptions.",
    "numpy._core._internal.", "numpy._core._dtype.", "numpy.core._internal.",
    "numpy._core._methods.", "torch._utils._validate_loaded_sparse_tensors",
    "_collections_abc.Mapping.get", "collections.abc.Mapping.get", "torch.storage.TypedStorage.",
    "torch.storage._StorageBase.", "torch.storage.UntypedStorage.",
)  # fmt: skip


class Outcome(NamedTuple):
    """The outcome of one pickle: what it did, how it ended, and the names that were looked up.

    ``wanted`` are attributes that somebody looked for in the canary's objects.
    """

    events: tuple[str, ...]
    end: str  # "ok TYPE", or the error
    names: tuple[tuple[str, str], ...]
    wanted: tuple[str, ...] = ()


class Watch:
    """The record of what happens while a pickle is loaded."""

    def __init__(self, rows: Collection[str]) -> None:
        self.armed = False
        self.events: list[str] = []
        self.names: list[tuple[str, str]] = []
        self.rows = frozenset(rows)
        self.loaders = {_load.__code__, torch.serialization._load.__code__}
        self.own = {__file__, torch.serialization.__file__}
        self.wanted: list[str] = []
        canary.tell = self.note
        canary.wants = self.wanted.append

    def note(self, event: str) -> None:
        """Keep an event, the first of many."""
        if self.armed and len(self.events) < 8:
            self.events.append(event)

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Take an audit event; refuse what it tells of."""
        if not self.armed:
            return
        if event == "pickle.find_class":
            self.names.append(args)  # type: ignore[arg-type]
            return
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

    def enter(self, frame: Any, event: str, arg: Any) -> None:
        """Note a Python function that something without a Python frame of its own calls."""
        if event != "call" or frame.f_back is None or frame.f_back.f_code not in self.loaders:
            return
        code = frame.f_code
        if code.co_filename in self.own:
            return
        name = getattr(code, "co_qualname", code.co_name)
        full = f"{frame.f_globals.get('__name__')}.{name}"
        if full.startswith(_INSIDE) or full in self.rows or _is_setup_of_row(full, self.rows):
            return
        if code.co_name in _SETUP:
            return
        self.note(f"enters {full}")


def _is_serious(error: BaseException) -> bool:
    """Return whether an error in a destructor says that memory is not what it should be."""
    return isinstance(error, SystemError) or "nternal error" in str(error)


def _is_setup_of_row(full: str, rows: frozenset[str]) -> bool:
    made, _, method = full.rpartition(".")
    return made in rows and method.startswith("__")


class Sandbox:
    """A process that loads pickles, made anew when it is needed."""

    def __init__(self, rows: Collection[str], check: Callable[[], object] | None = None) -> None:
        self.rows = rows
        self.check = check or state
        self.pid = 0
        self.started = 0
        _torch_load(archive(b"N."))  # which imports what it needs

    def run(self, pickles: Sequence[bytes]) -> list[Outcome]:
        """Load them one after the other in a new process; what changes it is then loaded alone."""
        self.close()
        done, changed = self._batch(pickles)
        if not changed:
            return done
        if len(pickles) == 1:
            return [done[0]._replace(events=(*done[0].events, *changed))]
        half = len(pickles) // 2
        return self.run(pickles[:half]) + self.run(pickles[half:])

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
            done.append(Outcome((f"dies: {status}",), status, ()))
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
            _work(os.fdopen(child_into, "rb"), os.fdopen(child_out, "wb"), self.rows, self.check)
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


def _work(into: Any, out: Any, rows: Collection[str], check: Callable[[], object]) -> None:
    """The process: batches in, outcomes and then a list of what has changed out."""
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    warnings.simplefilter("ignore")
    sys.unraisablehook = lambda told: None
    _limit()
    watch = Watch(rows)
    sys.addaudithook(watch.audit)
    for batch in iter(lambda: _receive(into), None):
        before = check()
        for data in batch:
            _send(out, tuple(_attempt(data, watch)))
        after = check()
        _send(out, [f"changes {name}" for name, was, now in _differences(before, after)])


def _limit() -> None:
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))


def _differences(before: Any, after: Any) -> Iterator[tuple[str, object, object]]:
    for name, was in before.items():
        if after[name] != was:
            yield name, was, after[name]


def _attempt(data: bytes, watch: Watch) -> Outcome:
    watch.events, watch.names = [], []
    watch.wanted.clear()
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime) + SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    signal.alarm(15 * SECONDS)  # for what waits, and takes no processor time
    end = _load(data, watch)
    watch.armed = False
    if "MemoryError:" in end or "allocate" in end:
        watch.events.append("takes too much memory")
    names = tuple((str(module), str(name)) for module, name in watch.names)
    return Outcome(tuple(map(str, watch.events)), end, names, tuple(set(watch.wanted[:50])))


def _load(data: bytes, watch: Watch) -> str:
    """Load it as its container says. Its result is dropped while the hook still listens."""
    load = _torch_load if data[:2] == b"PK" else pickle.loads
    sys.setprofile(watch.enter)
    watch.armed = True
    try:
        made = load(data)
        sys.setprofile(None)
        end = f"ok {type(made).__name__}"
        _touch(made, 3)
        made = None
    except BaseException as error:
        end = f"{type(error).__name__}: {_message(error)}"
    sys.setprofile(None)
    return end


def _touch(made: object, depth: int) -> None:
    """Read the elements of arrays and tensors: pointers that are none end the process."""
    inside: Iterable[object] = ()
    if type(made) in (list, tuple, set, frozenset):
        inside = made  # type: ignore[assignment]
    elif type(made) in (dict, collections.OrderedDict):
        inside = made.values()  # type: ignore[attr-defined]
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


def _torch_load(data: bytes) -> object:
    return torch.load(io.BytesIO(data), weights_only=False)


def archive(data: bytes) -> bytes:
    """Return what torch.save writes around a pickle, with one storage of 64 bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr(MEMBER, data)
        file.writestr("archive/data/0", bytes(64))
        file.writestr("archive/version", b"3\n")
    return buffer.getvalue()


def state() -> dict[str, object]:
    """Whatever of a process pickles have no business to change."""
    found: dict[str, object] = {
        "the modules": len(sys.modules),
        "the environment": dict(os.environ),
        "the working directory": os.getcwd(),
        "copyreg": (len(copyreg.dispatch_table), len(vars(copyreg)["_extension_registry"])),
        "the warnings": len(warnings.filters),
        "random": hash(random.getstate()),
        "numpy.random": hash(np.random.get_state()[1].tobytes()),  # type: ignore[index,union-attr]
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
