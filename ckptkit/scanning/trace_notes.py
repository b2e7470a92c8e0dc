"""The state of the tracing machine, and what it notes: names, calls, byte strings, doubts."""

from __future__ import annotations

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from typing import Any

from ckptkit.core.bytesource import ByteSource, Memory
from ckptkit.core.limits import check
from ckptkit.core.tree import Global
from ckptkit.pickles import trust
from ckptkit.pickles.allowlist.rows import SCALARS
from ckptkit.pickles.nested import looks_like_a_file
from ckptkit.pickles.streams import Nested
from ckptkit.scanning.trace_symbols import Result, SignView, Symbol, brief
from ckptkit.scanning.trace_window import Stop, Window

NESTED = 10_000  # byte strings that are handed on to be looked into
DOUBTS = 20
MEMO = 1000  # calls whose judgment is remembered
_LATIN1 = ("latin1", "latin-1")
_LITERAL_STEPS = {"list": "append", "dict": "set", "set": "add"}


class Notes:
    """The state of the machine, and what is noted of it."""

    def __init__(self, source: ByteSource, start: int, stop: int, before: int = 0) -> None:
        self.window = Window(source, start, stop)
        self.start = start
        self.protocol = 0
        self.count = 0
        self.before = before  # opcodes of other pickles of the file
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []
        self.memo: dict[int, Any] = {}
        self.frame_end: int | None = None
        self.at = start  # of the opcode
        self.opcode = ""
        self.globals: dict[Global, Global] = {}
        self.called: dict[int, int] = {}  # id of a Global: how often it was taken as a callable
        self.pushed: dict[int, int] = {}  # id of a Global: how often it was put on the stack
        self.calls: dict[tuple[str, str, str], list[Any]] = {}
        self.nested: list[Nested] = []
        self.doubts: list[str] = []
        self.refused: str | None = None
        self.view = SignView()
        self.unfinished: Result | None = None  # what nothing may touch before its state is set
        self.judged: dict[tuple[Global, bool, tuple[int, ...]], trust.Judged] = {}

    def doubt(self, reason: str) -> None:
        if len(self.doubts) < DOUBTS:
            self.doubts.append(f"{reason} ({self.opcode} at byte {self.at:,})")

    def refuse(self, reason: str) -> None:
        if self.refused is None:
            self.refused = f"{reason} ({self.opcode} at byte {self.at:,})"

    def look_up(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            if isinstance(module, (Symbol, Result)) or isinstance(name, (Symbol, Result)):
                self.doubt("names a global by something that only running it would tell")
                self.stack.append(Symbol("a global of unknown name"))
                return
            raise Stop("names a global by something other than strings")
        check("name_bytes", len(module) + len(name), "characters of a global's name")
        if self.protocol < 3:
            module, name = NAME_MAPPING.get(
                (module, name), (IMPORT_MAPPING.get(module, module), name)
            )
        self.stack.append(self.named(Global(module, name)))

    def named(self, name: Global) -> Global:
        """Return the Global of this name, always the same object, to push on the stack."""
        known = self.globals.setdefault(name, name)
        self.pushed[id(known)] = self.pushed.get(id(known), 0) + 1
        return known

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

    def step(self, step: str, value: Any) -> None:
        """Note what changes the value on top of the stack, unless what it is allows that."""
        target = self.stack[-1]
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
        key = (name, self.opcode, kind)
        known = self.calls.get(key)
        if known is None:
            check("scan_parts", len(self.calls), "different calls in a pickle")
            self.calls[key] = [brief(tuple(args) if isinstance(args, list) else args), self.at, 1]
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
                raise Stop("spells bytes with characters beyond 255") from error
            self.keep(data)
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
            return self.named(Global(args[0].module, f"{args[0].name}.{args[1]}"))
        return Result(trust.target_of(made, args), judged, new=new)

    def keep(self, data: bytes | ByteSource) -> None:
        """Report a byte string that may be a file of its own."""
        head = data[:8] if isinstance(data, bytes) else data.read(0, min(8, data.size))
        if looks_like_a_file(head) and len(self.nested) < NESTED:
            self.nested.append(
                Nested(self.at, Memory(data) if isinstance(data, bytes) else data, False)
            )

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
        self.nested.append(Nested(self.at, Memory(data) if isinstance(data, bytes) else data, True))
        return True

    def items(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop() if self.marks else self._no_mark()
        return items

    def _no_mark(self) -> list[Any]:
        raise Stop("closes a mark that is not open")
