"""Trace a pickle: record the names that it looks up and the calls that it makes.

`Machine` reads the opcodes of a pickle and calls a builder (`ckptkit.pickles.machine.Builder`) for
each value. `Tracer` is a builder that constructs no objects. `Tracer` records every lookup, call
and change that CPython executes when it loads the pickle. If an opcode fails, `Tracer` returns what
it has recorded. If unpicklers treat an opcode differently, `Tracer` records a doubt.

The stack of a traced pickle contains these values:

* Strings, numbers, byte strings and tuples are Python values, because a pickle can compute the name
  of a global from such values.
* The name of a class or function is a Global.
* Any other value is a Sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ckptkit.core.bytesource import ByteSource, Memory, Range, Section
from ckptkit.core.errors import CkptkitError, FormatError, LimitError
from ckptkit.core.limits import check
from ckptkit.core.tree import Global, StoredBytes, collector_paused
from ckptkit.pickles import judge
from ckptkit.pickles.machine import NAMES, Machine, SpellingError
from ckptkit.pickles.streams import MAGIC_NUMBER, Call, Nested, Trace, looks_like_a_file

# Maximum number of byte strings in one pickle in which ckptkit searches for other pickles.
NESTED = 10_000
DOUBTS = 20  # Maximum number of recorded doubts.
MEMO = 1000  # Maximum number of calls with a cached verdict.
SHOWN = 120  # Maximum number of characters of a call's arguments in a message.
SHOWN_ITEMS = 8  # maximum number of items of a container in a message
SHOWN_LEVELS = 4  # maximum number of nesting levels in a message
MOST_VISITED = 5_000_000  # maximum number of values inside containers that a trace visits
# Opcodes that weights_only=True accepts. Source: `Unpickler.load` in
# torch/_weights_only_unpickler.py of torch 2.13.
WEIGHTS_ONLY_OPCODES = frozenset((
    "APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPERSID",
    "BINPUT", "BINUNICODE", "BUILD", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET", "EMPTY_TUPLE",
    "GLOBAL", "LONG1", "LONG_BINGET", "LONG_BINPUT", "MARK", "NEWFALSE", "NEWOBJ", "NEWTRUE",
    "NONE", "PROTO", "REDUCE", "SETITEM", "SETITEMS", "SHORT_BINSTRING", "STOP", "TUPLE", "TUPLE1",
    "TUPLE2", "TUPLE3",
))  # fmt: skip
_REFUSED = {code for code, name in NAMES.items() if name not in WEIGHTS_ONLY_OPCODES}
# Names that a trace uses for changes of a list, dict or set.
_STEPS = {judge.LIST: "append", judge.DICT: "set", judge.SET: "add"}
_BYTES = ("_codecs.encode", "builtins.bytes", "builtins.bytearray")
_NOT_CHANGED = "changes a value that is not a list or dict"


@dataclass(slots=True, eq=False)
class Sign:
    """A placeholder for a value.

    `made` is the class or function that returned the value. For a literal, `made` is None. `items`
    are the items of a container. For a dict, keys and values alternate. `data` is a large byte
    string. `type` is the element type of a numpy.dtype. `built` is True after the state of the
    object was set. After the state was set, any change of the object is suspicious. `fixed` is True
    for the dict of a dtype's fields: any change of this dict is suspicious.
    """

    sort: int
    items: list[Any] | None = None
    made: Any = None
    text: str = ""
    data: ByteSource | None = None
    type: judge.NumpyType | None = None
    built: bool = False
    fixed: bool = False


class _SignView:
    """Gives `judge` access to the values of a trace. See `ckptkit.pickles.judge.View`."""

    def __init__(self) -> None:
        self.left = MOST_VISITED

    def sort(self, value: Any) -> int:
        sort = judge.PLAIN.get(value.__class__)
        if sort is not None:
            return sort
        return judge.name_sort(value) if value.__class__ is Global else value.sort

    def items(self, value: Any) -> Sequence[Any] | None:
        items: Sequence[Any] | None = value if value.__class__ is tuple else value.items
        self.left -= 1 if items is None else 1 + len(items)
        return items if self.left >= 0 else None

    def numpy(self, value: Any) -> judge.NumpyType | None:
        return value.type if isinstance(value, Sign) and value.built else None

    def flat(self, values: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the category of each value. For a tuple, return the categories of its items.

        Return None if a value is a list, dict or set, or if an item of a tuple is a container.
        """
        found: list[Any] = []
        for value in values:
            is_tuple = value.__class__ is tuple
            sorts = (*map(self.sort, value if is_tuple else (value,)),)
            if any(sort & judge.LITERAL for sort in sorts):
                return None
            found.append(sorts if is_tuple else sorts[0])
        return (*found,)


class Tracer:
    """Traces a pickle."""

    counted = frozenset((Global, tuple))
    watchful = True
    weight = 160

    def __init__(self, source: ByteSource, start: int, stop: int) -> None:
        self.machine = Machine(source, start, stop, self, "trace_bytes")
        self.globals: dict[Global, Global] = {}
        self.called: dict[int, int] = {}  # id of a Global -> number of calls that consumed it
        self.times: dict[int, int] = {}  # id of a Global -> number of times that it was pushed
        self.calls: dict[tuple[str, str, str], list[Any]] = {}
        self.nested: list[Nested] = []
        self.doubts: list[str] = []
        self.refused: tuple[int, str] | None = None  # offset and reason
        self.view = _SignView()
        self.unfinished: Sign | None = None  # an object whose state the next opcode must set
        # Cache for calls whose verdict depends only on the categories of the arguments. Each value
        # contains three items: the verdict, the result of the call, and a bool. The bool is True if
        # a pickle cannot change the result, so that all calls can return the same object.
        self.judged: dict[tuple[Any, ...], tuple[str, Sign, bool]] = {}

    def run(self) -> Trace:
        """Run until STOP or an error, and return the trace. The trace contains the error."""
        error, goes_on, result = None, False, None
        try:
            result = self.machine.run()
        except CkptkitError as failure:
            error = self._here(failure.message.removeprefix("pickle "))
            goes_on = isinstance(failure, (LimitError, SpellingError))
        except RecursionError:
            error, goes_on = self._here("nests values too deeply"), True
        machine = self.machine
        if self.refused is not None or _REFUSED & machine.rare.keys():
            opcodes = (
                (at, f"opcode {NAMES[op]}") for op, at in machine.rare.items() if op in _REFUSED
            )
            self.refused = min(filter(None, (self.refused, *opcodes)))
        held = (
            name for name in self.globals if self.times[id(name)] > self.called.get(id(name), 0)
        )
        return Trace(
            protocol=machine.protocol,
            size=machine.size,
            stop=machine.offset,
            globals=tuple(self.globals),
            values=tuple(held),
            calls=tuple(
                Call(*key, args, at, count) for key, (args, at, count) in self.calls.items()
            ),
            nested=tuple(self.nested),
            doubts=tuple(self.doubts),
            refused=None if self.refused is None else self.refused[1],
            error=error,
            goes_on=goes_on,
            # torch.load compares the value of the pickle with MAGIC_NUMBER. A Decimal, or a tensor
            # with one element, can be equal to MAGIC_NUMBER too.
            may_be_legacy=result == MAGIC_NUMBER
            or (isinstance(result, Sign) and (result.made is not None or bool(result.text))),
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

    def new_list(self) -> Sign:
        return Sign(judge.LIST, [])

    def new_dict(self) -> Sign:
        return Sign(judge.DICT, [])

    def new_set(self) -> Sign:
        return Sign(judge.SET, [])

    # Names

    def name(self, module: Any, name: Any) -> Any:
        if isinstance(module, str) and isinstance(name, str):
            return self._named(Global(module, name))
        if not isinstance(module, Sign) and not isinstance(name, Sign):
            raise FormatError("names a global with values that are not strings")
        self.doubt("computes the name of a global, so ckptkit cannot determine the name")
        return Sign(judge.UNKNOWN, text="a global of unknown name")

    def _named(self, name: Global) -> Global:
        """Return the Global object for a name.

        Increment the number of times that the name was pushed on the stack.

        Equal names have the same Global object.
        """
        known = self.globals.setdefault(name, name)
        self.pushed(known)
        return known

    def pushed(self, value: Any) -> None:
        """Count each Global that is pushed on the stack, including those inside tuples."""
        waiting, seen = [value], set()
        while waiting:
            each = waiting.pop()
            if each.__class__ is tuple and id(each) not in seen:
                seen.add(id(each))
                self.view.left -= len(each)
                if self.view.left < 0:
                    raise SpellingError("repeats large tuples too often")
                waiting += each
            elif each.__class__ is Global:
                self.times[id(each)] = self.times.get(id(each), 0) + 1

    def _take(self, *names: Any) -> None:
        """Record that a call consumes names. Consumed names are not values of the pickle."""
        for name in names:
            if name.__class__ is Global:
                self.called[id(name)] = self.called.get(id(name), 0) + 1

    # Byte strings that may contain a file

    def text(self, text: str) -> None:
        if text[-1:] == "." or text[:1] == "\x80":
            try:
                self._keep(text.encode("latin-1"))
            except UnicodeEncodeError:
                pass

    def byte_string(self, value: bytes | StoredBytes, kind: str) -> Any:
        """Return a Sign for a large byte string, and a str for an ASCII string of Python 2.

        Return bytes for any other byte string.
        """
        if isinstance(value, StoredBytes):
            assert isinstance(value.extent, Range)
            source = Section(*value.extent)
            self._keep(source)
            return Sign(judge.BYTES, text=f"{source.size:,} bytes", data=source)
        self._keep(value)
        if kind != "python2":
            return value
        if value.decode(errors="ignore").encode() != value:
            self.refuse("contains a Python 2 string that is not UTF-8")
        return value.decode() if value.isascii() else value

    def _keep(self, data: bytes | ByteSource) -> None:
        """Record the byte string `data` if it may be a file."""
        head = data[:8] if isinstance(data, bytes) else data.read(0, min(8, data.size))
        if looks_like_a_file(head) and len(self.nested) < NESTED:
            source = Memory(data) if isinstance(data, bytes) else data
            self.nested.append(Nested(self.machine.offset, source, False))

    # Calls

    def call(self, made: Any, args: Any, *, new: bool = False, kwargs: Any = None) -> Any:
        """Record a call and return a placeholder for its result."""
        self._take(made)
        self.finish(None)
        key = None
        if made.__class__ is Global and args.__class__ is tuple and not new:
            if judge.by_sorts(made):
                key = self.view.flat(args)
            known = None if key is None else self.judged.get((made, key))
            if known is not None:
                kind, result, shared = known
                self.note(str(made), kind, args)
                if shared:
                    return result
                return Sign(result.sort, None if result.items is None else [], made)
        judged = judge.judge_call(self.view, made, args, new=new, kwargs=kwargs)
        self._take(*judge.consumed(made, args))
        shown = args if kwargs is None or not isinstance(args, tuple) else (*args, kwargs)
        self.note(judge.describe(made), judged.kind, shown)
        if judged.kind != judge.ACCEPTED and not isinstance(made, Global):
            self.refuse("calls a computed value")
        if judged.kind == judge.LOADS and not self._loads(args[0]):
            self.doubt("loads a file from bytes that another call returns")
        result = self._result(made, args, judged)
        if isinstance(result, Sign):
            if judge.is_unfinished(result.made):
                self.unfinished = result
            if key is not None and len(self.judged) < MEMO and not result.items:
                self.judged[made, key] = judged.kind, result, judge.is_final(made)
        return result

    def persistent(self, pid: Any) -> Any:
        """Resolve a persistent id.

        Return a storage. If the id identifies a class, return the class.

        In a legacy file, the id of a class is ("module", class, file name, source code). The oldest
        files omit "module". ckptkit never runs the source code.
        """
        parts = pid if isinstance(pid, tuple) else ()
        if parts[:1] == ("storage",):
            # torch writes ("storage", class, key, device, size). Old versions also append a view.
            kinds, more = [type(each) for each in parts[1:5]], parts[5:]
            plain = more in ((), (None,))
            if len(more) == 1 and isinstance(more[0], tuple):
                plain = [type(each) for each in more[0]] == [str, int, int]
            if plain and kinds == [Global, str, str, int]:
                self._take(parts[1])
            else:
                self.doubt("identifies a storage by values other than class, key, device and size")
            return _STORAGE
        if not isinstance(pid, int):
            self.refuse("has a persistent id that is not a storage")
        made = next((each for each in parts[:2] if isinstance(each, Global)), None)
        if made is None or parts[0] not in ("module", made):
            return _STORAGE
        texts = judge.TEXT | judge.BYTES | judge.NONE
        if not all(self.view.sort(each) & texts for each in parts[parts.index(made) + 1 :]):
            self.doubt("the description of a class contains values other than strings")
        return made  # `_named` already counted the name

    def outside(self, opcode: str, value: Any) -> Any:
        if opcode.startswith("EXT"):
            self.doubt(f"uses copyreg extension {value:,}, which the loading program defines")
            return Sign(judge.UNKNOWN, text=f"extension {value}")
        self.doubt("uses a buffer or a value from outside the file")
        return _STORAGE if opcode == "PERSID" else Sign(judge.UNKNOWN, text="a buffer")

    # Changes

    def build(self, target: Any, state: Any) -> None:
        """Record that the pickle sets attributes, or calls __setstate__ of the class."""
        self.step("build", target, state)
        if not (isinstance(target, Sign) and isinstance(target.made, Global)):
            self.refuse("sets the state of a value that has no state")

    def extend(self, target: Any, items: list[Any], how: str) -> None:
        self.step(how, target, items)
        if how == "add":
            self._check_keys(items)
        sort = judge.LIST if how == "append" else judge.SET
        if not isinstance(target, Sign) or target.sort != sort:
            self.refuse(_NOT_CHANGED)

    def set(self, target: Any, items: Sequence[Any]) -> None:
        self.step("set", target, items)
        self._check_keys(items[0::2])
        if not isinstance(target, Sign) or not target.sort & (judge.DICT | judge.MAPPING):
            self.refuse(_NOT_CHANGED)

    def collected(self, kind: str, items: list[Any]) -> Sign:
        self.fill(items)
        if kind != "list":
            self._check_keys(items[0::2] if kind == "dict" else items)
        return Sign({"list": judge.LIST, "dict": judge.DICT, "frozenset": judge.SET}[kind], items)

    def _check_keys(self, keys: Sequence[Any]) -> None:
        """Record a doubt for each key whose hash function could run code of the file."""
        for key in keys:
            if key.__class__ is not str and not judge.is_key(self.view, key):
                self.doubt(f"hashes {brief(key)}")

    def drop(self, values: list[Any]) -> None: ...

    def end(self, stack: list[Any], marks: list[list[Any]]) -> Any:
        self.finish(None)
        return stack[-1]

    def finish(self, built: Any) -> None:
        """Record an unfinished object if an opcode other than its BUILD comes next."""
        if self.unfinished is not None and self.unfinished is not built:
            self.note(
                f"{judge.describe(self.unfinished.made)} (without its state)", judge.UNSURE, ()
            )
        self.unfinished = None

    def fill(self, values: Any) -> None:
        """Record an unfinished object, unless all `values` are numbers or strings."""
        if self.unfinished and not all(self.view.sort(each) & judge.SCALAR for each in values):
            self.finish(None)

    def step(self, step: str, target: Any, value: Any) -> None:
        """Record a change of a value, unless the allowlist permits this change."""
        if isinstance(target, Global):
            self.note(f"{target} (changed)", judge.HARMFUL, value)
            return
        if not isinstance(target, Sign) or target.fixed:
            self.note("(a value that is not an object)", judge.UNSURE, value)
            return
        if target.made is None:
            if _STEPS.get(target.sort) != step:
                self.note("(a value that is not an object)", judge.UNSURE, value)
                return
            self.fill(value)
        # The earlier state may have replaced the method that this opcode calls.
        elif target.built:
            self.finish(None)
            self.note(f"{judge.describe(target.made)} (changed again)", judge.HARMFUL, value)
            return
        else:
            self.finish(target if step == "build" else None)
            before = judge.Judged(judge.ACCEPTED, target.sort, target.type)
            judged = judge.judge_step(self.view, target.made, step, value, before)
            if judged.kind not in judge.WRITTEN:
                self.note(f"{judge.describe(target.made)} (changed)", judged.kind, value)
            target.sort, target.type, target.built = judged.sort, judged.type, step == "build"
            if judged.type is not None and isinstance(value, tuple):
                # Mark later changes of the dict with the dtype's fields as suspicious.
                for part in value:
                    if isinstance(part, Sign) and part.sort == judge.DICT:
                        part.fixed = True
        if step != "build" and target.items is not None:
            target.items += value

    def note(self, name: str, kind: str, args: Any) -> None:
        key = (name, self.machine.opcode, kind)
        known = self.calls.get(key)
        if known is None:
            check("scan_parts", len(self.calls), "different calls in a pickle")
            shown = brief(tuple(args) if isinstance(args, list) else args)
            self.calls[key] = [shown, self.machine.offset, 1]
        else:
            known[2] += 1

    def _result(self, made: Any, args: Any, judged: judge.Judged) -> Any:
        """Return the result of a call: bytes, a Global, or a Sign."""
        name = str(made)
        if not isinstance(args, tuple):
            return Sign(judged.sort, None, made)
        first: Any = args[0] if args else None
        if name in _BYTES and judged.kind in judge.WRITTEN:
            if not isinstance(first, str):
                return b"" if first is None else first
            try:
                data = first.encode("latin-1")
            except UnicodeEncodeError as error:
                raise FormatError("encodes bytes with characters above 255") from error
            self._keep(data)
            return data
        if name == "builtins.getattr" and judged.kind == judge.HARMLESS:
            return self._named(Global(first.module, f"{first.name}.{args[1]}"))
        items = None
        if judged.sort & judge.CONTAINERS and judged.kind in judge.WRITTEN:
            items = judge.contents(self.view, judged.sort, args)
            if items is not None and judged.sort != judge.LIST and judged.sort != judge.TUPLE:
                self._check_keys(items if judged.sort == judge.SET else items[0::2])
        return Sign(judged.sort, items, judge.target_of(made, args), type=judged.type)

    def _loads(self, sign: Any) -> bool:
        if not isinstance(sign, (Sign, bytes)):
            return False
        data = sign.data if isinstance(sign, Sign) else sign
        if data is None or len(self.nested) >= NESTED:
            return False
        for each in [*self.nested]:  # without this loop, a scan would search the bytes twice
            if data in (each.source, getattr(each.source, "data", None)):
                self.nested.remove(each)
        source = Memory(data) if isinstance(data, bytes) else data
        self.nested.append(Nested(self.machine.offset, source, True))
        return True


_STORAGE = Sign(judge.STORAGE, text="persistent")


def brief(args: Any) -> str:
    """Return shortened arguments for a message.

    The arguments may contain text of the file. Escape the result before you print it.
    """
    text = _shown(args, SHOWN_LEVELS)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _shown(value: Any, depth: int) -> str:
    if isinstance(value, Sign) and value.text:
        return f"<{value.text}>"
    if isinstance(value, Sign) and value.made is not None:
        return f"{value.made}(...)" if isinstance(value.made, Global) else "<a result>"
    if isinstance(value, (tuple, Sign)):
        items, ends = (value, "()") if isinstance(value, tuple) else (value.items or (), "{}")
        if isinstance(value, Sign) and value.sort == judge.LIST:
            ends = "[]"
        parts = [_shown(each, depth - 1) for each in items[:SHOWN_ITEMS]] if depth else ["..."]
        return ends[0] + ", ".join(parts if items else ()) + ends[1]
    if isinstance(value, (str, bytes)):
        return repr(value[:SHOWN])
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return "<a large integer>"
    return str(value)[:SHOWN] if isinstance(value, Global) else repr(value)


def trace(source: ByteSource, start: int = 0, stop: int | None = None) -> Trace:
    """Return the trace of the pickle at `start`. Malformed bytes never raise an error."""
    with collector_paused():
        return Tracer(source, start, source.size if stop is None else stop).run()
