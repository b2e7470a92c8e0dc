"""Trace of a pickle: which names are looked up, which calls made, in which order.

The builder of the pickle machine (`ckptkit.pickles.machine.Builder`) that makes no values. It
refuses nothing that CPython would run: whatever comes before the opcode that fails has been run by
then. What machines read differently is a doubt. The stack holds symbols: text, numbers and byte
strings for themselves (names are made of them), tuples of symbols, a Global for what was looked up,
a Result for what a call gives, a Symbol for everything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptkit.core.bytesource import ByteSource, Memory, Range, Section
from ckptkit.core.errors import CkptkitError, FormatError
from ckptkit.core.limits import check
from ckptkit.core.tree import Global, StoredBytes, collector_paused
from ckptkit.pickles import trust
from ckptkit.pickles.allowlist.rows import SCALARS
from ckptkit.pickles.machine import NAMES, Machine
from ckptkit.pickles.nested import looks_like_a_file
from ckptkit.pickles.streams import Call, Nested, Trace
from ckptkit.scanning.trace_symbols import (
    WEIGHTS_ONLY_OPCODES,
    Result,
    SignView,
    Symbol,
    brief,
    class_of,
)

NESTED = 10_000  # byte strings that are handed on to be looked into
DOUBTS = 20
MEMO = 1000  # calls whose judgment is remembered
_LATIN1 = ("latin1", "latin-1")
_LITERAL_STEPS = {"list": "append", "dict": "set", "set": "add"}
_MAPPINGS = (Global("collections", "OrderedDict"), Global("collections", "Counter"))
_NOT_CHANGED = "changes what is not a list or dict"
_REFUSED = {code for code, name in NAMES.items() if name not in WEIGHTS_ONLY_OPCODES}


class Tracer:
    """The symbols of a pickle that is traced, and what is noted of it."""

    counted = watchful = True

    def __init__(self, source: ByteSource, start: int, stop: int) -> None:
        self.machine = Machine(source, start, stop, self, "trace_bytes")
        self.globals: dict[Global, Global] = {}
        self.called: dict[int, int] = {}  # id of a Global: how often it was taken as a callable
        self.times: dict[int, int] = {}  # id of a Global: how often it was put on the stack
        self.calls: dict[tuple[str, str, str], list[Any]] = {}
        self.nested: list[Nested] = []
        self.doubts: list[str] = []
        self.refused: tuple[int, str] | None = None  # where, and why
        self.view = SignView()
        self.unfinished: Result | None = None  # what nothing may touch before its state is set
        self.judged: dict[tuple[Global, bool, tuple[int, ...]], trust.Judged] = {}

    def run(self) -> Trace:
        """Run until STOP or failure; a CkptkitError is a failure, whose reason is noted."""
        error = None
        try:
            self.machine.run()
        except CkptkitError as failure:
            error = self._here(failure.message.removeprefix("pickle "))
        machine = self.machine
        if self.refused is not None or _REFUSED & machine.rare.keys():
            opcodes = (
                (at, f"opcode {NAMES[op]}") for op, at in machine.rare.items() if op in _REFUSED
            )
            self.refused = min(filter(None, (self.refused, *opcodes)))
        uncalled = (
            name for name in self.globals if self.times[id(name)] > self.called.get(id(name), 0)
        )
        return Trace(
            protocol=machine.protocol,
            size=machine.size,
            stop=machine.offset,
            globals=tuple(self.globals),
            values=tuple(uncalled),
            calls=tuple(
                Call(*key, args, at, count) for key, (args, at, count) in self.calls.items()
            ),
            nested=tuple(self.nested),
            doubts=tuple(self.doubts),
            refused=None if self.refused is None else self.refused[1],
            error=error,
        )

    def _here(self, reason: str) -> str:
        opcode = self.machine.opcode
        return f"{reason} ({opcode and f'{opcode} at '}byte {self.machine.offset:,})"

    def doubt(self, reason: str) -> None:
        if len(self.doubts) < DOUBTS:
            self.doubts.append(self._here(reason))

    def odd(self, reason: str) -> None:
        self.doubt(reason.removeprefix("pickle "))

    def refuse(self, reason: str) -> None:
        if self.refused is None:
            self.refused = self.machine.offset, self._here(reason)

    def new_list(self) -> Symbol:
        return Symbol("list")

    def new_dict(self) -> Symbol:
        return Symbol("dict")

    def new_set(self) -> Symbol:
        return Symbol("set")

    # Names

    def name(self, module: Any, name: Any) -> Any:
        if isinstance(module, str) and isinstance(name, str):
            return self._named(Global(module, name))
        if not isinstance(module, (Symbol, Result)) and not isinstance(name, (Symbol, Result)):
            raise FormatError("names a global by something other than strings")
        self.doubt("names a global by something that only running it would tell")
        return Symbol("a global of unknown name")

    def _named(self, name: Global) -> Global:
        """Return the Global of this name, always the same object, to push on the stack."""
        known = self.globals.setdefault(name, name)
        self.pushed(known)
        return known

    def pushed(self, name: Global) -> None:
        self.times[id(name)] = self.times.get(id(name), 0) + 1

    # Byte strings that may be files

    def text(self, text: str) -> None:
        if text[-1:] == "." or text[:1] == "\x80":
            try:
                self._keep(text.encode("latin-1"))
            except UnicodeEncodeError:
                pass

    def byte_string(self, value: bytes | StoredBytes, kind: str) -> Any:
        """Return a byte string, or where it is if it is large; ASCII of Python 2 as text."""
        if isinstance(value, StoredBytes):
            assert isinstance(value.extent, Range)
            source = Section(*value.extent)
            self._keep(source)
            return Symbol(f"{source.size:,} bytes", source)
        self._keep(value)
        if kind != "python2":
            return value
        if value.decode(errors="ignore").encode() != value:
            self.refuse("a string of Python 2 that is not UTF-8")
        return value.decode() if value.isascii() else value

    def _keep(self, data: bytes | ByteSource) -> None:
        """Report a byte string that may be a file of its own."""
        head = data[:8] if isinstance(data, bytes) else data.read(0, min(8, data.size))
        if looks_like_a_file(head) and len(self.nested) < NESTED:
            source = Memory(data) if isinstance(data, bytes) else data
            self.nested.append(Nested(self.machine.offset, source, False))

    # Calls

    def call(self, made: Any, args: Any, *, new: bool = False, kwargs: Any = None) -> Any:
        """Note a call and return the stand-in for its result."""
        if isinstance(made, Global):
            self.called[id(made)] = self.called.get(id(made), 0) + 1
        self.finish(None)
        judged = self._judged(made, args, new, kwargs)
        shown = args if kwargs is None or not isinstance(args, tuple) else (*args, kwargs)
        self.note(trust.describe(made), judged.kind, shown)
        if judged.kind != trust.ACCEPTED and not isinstance(made, Global):
            self.refuse("calls a value")
        if judged.kind == trust.LOADS and not self._loads(args[0]):
            self.doubt("loads a file that only running it would tell")
        result = self._result(made, args, judged, new)
        if isinstance(result, Result) and trust.is_unfinished(result.callable):
            self.unfinished = result
        return result

    def persistent(self, pid: Any) -> Any:
        """Return the class that a persistent id of a legacy file holds, else a storage."""
        if not isinstance(pid, int) and not (
            isinstance(pid, tuple) and pid and pid[0] == "storage"
        ):
            self.refuse("a persistent id that is no storage")
        made = class_of(pid)
        if made is None:
            if isinstance(pid, tuple) and pid[:1] == ("storage",) and not _is_storage(pid):
                self.doubt("names a storage by something other than class, key, device and size")
            return Symbol("persistent")
        self.pushed(made)
        return made

    def outside(self, opcode: str, value: Any) -> Any:
        if opcode.startswith("EXT"):
            self.doubt(
                f"takes number {value:,} of copyreg's extensions, which the program that loads it "
                "decides"
            )
            return Symbol(f"extension {value}")
        self.doubt("takes a buffer or a value from outside")
        return Symbol("persistent" if opcode == "PERSID" else "a buffer")

    # Changes

    def build(self, target: Any, state: Any) -> None:
        """Note that attributes are set, or __setstate__ called, of the class or its substitute."""
        self.step("build", target, state)
        if not (isinstance(target, Result) and isinstance(target.callable, Global)):
            self.refuse("sets the state of what has none")

    def extend(self, target: Any, items: list[Any], how: str) -> None:
        self.step(how, target, items)
        if isinstance(target, Symbol):
            target.add(items)
        kind = "list" if how == "append" else "set"
        if not isinstance(target, Symbol) or target.kind != kind:
            self.refuse(_NOT_CHANGED)

    def set(self, target: Any, items: Sequence[Any]) -> None:
        self.step("set", target, items)
        if isinstance(target, Symbol):
            target.add(items)
        is_dict = target.kind == "dict" if isinstance(target, Symbol) else _is_mapping(target)
        if not is_dict:
            self.refuse(_NOT_CHANGED)

    def collected(self, kind: str, items: list[Any]) -> Symbol:
        self.fill(items)
        made = Symbol("set" if kind == "frozenset" else kind)
        made.add(items)
        return made

    def drop(self, values: list[Any]) -> None: ...

    def end(self, stack: list[Any], marks: list[list[Any]]) -> Any:
        self.finish(None)
        return stack[-1]

    def finish(self, built: Any) -> None:
        """Note an object whose memory is not set up and which something else comes before."""
        if self.unfinished is not None and self.unfinished is not built:
            made = trust.describe(self.unfinished.callable)
            self.note(f"{made} (without its state)", trust.UNSURE, ())
        self.unfinished = None

    def fill(self, values: Any) -> None:
        """Note an unfinished object before a literal that holds more than numbers and text."""
        if self.unfinished is not None and not all(
            self.view.sort(each) & SCALARS for each in values
        ):
            self.finish(None)

    def _is_literal_step(self, target: Any, step: str, value: Any) -> bool:
        if (
            not isinstance(target, Symbol)
            or _LITERAL_STEPS.get(target.kind) != step
            or target.fixed
        ):
            return False
        self.fill(value)
        return True

    def _judged(self, made: Any, args: Any, new: bool, kwargs: Any) -> trust.Judged:
        """Judge a call, once for all calls of a name with arguments of the same sorts."""
        sorts = None
        if (
            made.__class__ is Global
            and args.__class__ is tuple
            and kwargs is None
            and trust.by_sorts(made, len(args))
        ):
            sorts = self.view.flat(args)
        known = None if sorts is None else self.judged.get((made, new, sorts))
        if known is None:
            known = trust.judge_call(self.view, made, args, new=new, kwargs=kwargs)
            if sorts is not None and len(self.judged) < MEMO:
                self.judged[made, new, sorts] = known
        return known

    def step(self, step: str, target: Any, value: Any) -> None:
        """Note what changes a value, unless what it is allows that."""
        if isinstance(target, Global):
            self.note(f"{target} (changed)", trust.HARMFUL, value)
            return
        if not isinstance(target, Result):
            if not self._is_literal_step(target, step, value):
                self.note("(what is no object)", trust.UNSURE, value)
            return
        self.finish(target if step == "build" else None)
        if target.built:  # an attribute may stand in the place of the method that this calls
            self.note(f"{trust.describe(target.callable)} (changed again)", trust.HARMFUL, value)
        else:
            judged = trust.judge_step(self.view, target.callable, step, value, target.judged)
            if judged.kind not in trust.WRITTEN:
                self.note(f"{trust.describe(target.callable)} (changed)", judged.kind, value)
            target.judged, target.sort, target.built = judged, judged.sort, step == "build"

    def note(self, name: str, kind: str, args: Any) -> None:
        key = (name, self.machine.opcode, kind)
        known = self.calls.get(key)
        if known is None:
            check("scan_parts", len(self.calls), "different calls in a pickle")
            self.calls[key] = [
                brief(tuple(args) if isinstance(args, list) else args),
                self.machine.offset,
                1,
            ]
        else:
            known[2] += 1

    def _result(self, made: Any, args: Any, judged: trust.Judged, new: bool) -> Any:
        """Return the kind of a result: encoded text, a nested class, else the call of it."""
        name = str(made)
        if not isinstance(args, tuple):
            return Result(made, judged, new=new)
        if (
            name == "_codecs.encode"
            and len(args) == 2
            and isinstance(args[0], str)
            and args[1] in _LATIN1
        ):
            try:
                data = args[0].encode("latin-1")
            except UnicodeEncodeError as error:
                raise FormatError("spells bytes with characters beyond 255") from error
            self._keep(data)
            return data
        if (
            name in ("builtins.bytes", "builtins.bytearray")
            and len(args) == 1
            and judged.sort == self.view.sort(args[0])
        ):
            return args[0]
        if (
            name == "builtins.getattr"
            and len(args) == 2
            and isinstance(args[0], Global)
            and isinstance(args[1], str)
        ):
            return self._named(Global(args[0].module, f"{args[0].name}.{args[1]}"))
        return Result(trust.target_of(made, args), judged, new=new)

    def _loads(self, sign: Any) -> bool:
        if not isinstance(sign, (Symbol, bytes)):
            return False
        data = sign.data if isinstance(sign, Symbol) else sign
        if data is None or len(self.nested) >= NESTED:
            return False
        inert = [
            each
            for each in self.nested
            if data in (each.source, getattr(each.source, "data", None))
        ]
        for each in inert:  # looked at once, as what it is
            self.nested.remove(each)
        self.nested.append(
            Nested(self.machine.offset, Memory(data) if isinstance(data, bytes) else data, True)
        )
        return True


def _is_storage(pid: tuple[Any, ...]) -> bool:
    """Return whether it is (..., class, key, device, size), and perhaps a view, as torch writes."""
    if not 5 <= len(pid) <= 6:
        return False
    kinds = [type(each) for each in pid[1:5]]
    view = pid[5] if len(pid) > 5 else None
    plain = view is None or (
        isinstance(view, tuple) and [type(each) for each in view] == [str, int, int]
    )
    return kinds == [Global, str, str, int] and plain


def _is_mapping(target: Any) -> bool:
    return isinstance(target, Result) and target.callable in _MAPPINGS


def trace(source: ByteSource, start: int = 0, stop: int | None = None) -> Trace:
    """Return what the pickle at `start` would do. Never raises for bytes."""
    with collector_paused():
        return Tracer(source, start, source.size if stop is None else stop).run()
