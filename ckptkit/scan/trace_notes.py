"""The state of the tracing machine, and what it notes: names, calls, byte strings, doubts."""

from __future__ import annotations

from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from typing import Any

from ckptkit.core.bytesource import ByteSource, Memory
from ckptkit.core.limits import check
from ckptkit.core.tree import Global, Object
from ckptkit.pickles import trust
from ckptkit.pickles.streams import Nested
from ckptkit.scan.trace_symbols import Sign, brief, looks_like_a_file
from ckptkit.scan.trace_window import Stop, Window

NESTED = 10_000  # byte strings that are handed on to be looked into
DOUBTS = 20
_LATIN1 = ("latin1", "latin-1")


class Notes:
    """The state of the machine, and what is noted of it."""

    def __init__(self, source: ByteSource, start: int, stop: int) -> None:
        self.window = Window(source, start, stop)
        self.start = start
        self.protocol = 0
        self.count = 0
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

    def doubt(self, said: str) -> None:
        if len(self.doubts) < DOUBTS:
            self.doubts.append(f"{said} ({self.opcode} at byte {self.at:,})")

    def refuse(self, said: str) -> None:
        if self.refused is None:
            self.refused = f"{said} ({self.opcode} at byte {self.at:,})"

    def look_up(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            if isinstance(module, (Sign, Object)) or isinstance(name, (Sign, Object)):
                self.doubt("names a global by something that only running it would tell")
                self.stack.append(Sign("a global of unknown name"))
                return
            raise Stop("names a global by something other than strings")
        check("name_bytes", len(module) + len(name), "characters of a global's name")
        if self.protocol < 3:
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        self.stack.append(self.named(Global(module, name)))

    def named(self, name: Global) -> Global:
        """The one Global of this name, which goes onto the stack."""
        known = self.globals.setdefault(name, name)
        self.pushed[id(known)] = self.pushed.get(id(known), 0) + 1
        return known

    def call(self, made: Any, args: Any, *, new: bool = False, shown: Any = None) -> Any:
        """Note a call; the sign of its result."""
        if isinstance(made, Global):
            self.called[id(made)] = self.called.get(id(made), 0) + 1
        node = Object(made, args, new=new)
        kind = trust.kind(node)
        self.note(trust.describe(made), kind, args if shown is None else shown)
        if kind != trust.ACCEPTED and not isinstance(made, Global):
            self.refuse("calls a value")
        if kind == trust.LOADS and not self._loads(args[0]):
            self.doubt("loads a file that only running it would tell")
        return self._result(made, args, node)

    def note(self, name: str, kind: str, args: Any) -> None:
        key = (name, self.opcode, kind)
        known = self.calls.get(key)
        if known is None:
            check("scan_parts", len(self.calls), "different calls in a pickle")
            self.calls[key] = [brief(args), self.at, 1]
        else:
            known[2] += 1

    def _result(self, made: Any, args: Any, node: Object) -> Any:
        """What is known of a result: text that was encoded, a class inside a class; else which call made it."""
        name = str(made)
        if not isinstance(args, tuple):
            return Object(made, (), new=node.new)
        if name == "_codecs.encode" and len(args) == 2 and isinstance(args[0], str) and args[1] in _LATIN1:
            try:
                data = args[0].encode("latin-1")
            except UnicodeEncodeError as error:
                raise Stop("spells bytes with characters beyond 255") from error
            self.keep(data)
            return data
        if name in ("builtins.bytes", "builtins.bytearray") and len(args) == 1 and isinstance(args[0], (bytes, Sign)):
            return args[0]
        if name == "builtins.getattr" and len(args) == 2 and isinstance(args[0], Global) and isinstance(args[1], str):
            return self.named(Global(args[0].module, f"{args[0].name}.{args[1]}"))
        return Object(made, (), new=node.new)

    def keep(self, data: bytes | ByteSource) -> None:
        """Hand on a byte string that may be a file of its own."""
        head = data[:8] if isinstance(data, bytes) else data.read(0, min(8, data.size))
        if looks_like_a_file(head) and len(self.nested) < NESTED:
            self.nested.append(Nested(self.at, Memory(data) if isinstance(data, bytes) else data, False))

    def _loads(self, sign: Any) -> bool:
        data = sign.data if isinstance(sign, Sign) else sign if isinstance(sign, bytes) else None
        if data is None or len(self.nested) >= NESTED:
            return False
        inert = [each for each in self.nested if data in (each.source, getattr(each.source, "data", None))]
        for each in inert:  # looked at once, as what it is
            self.nested.remove(each)
        self.nested.append(Nested(self.at, Memory(data) if isinstance(data, bytes) else data, True))
        return True

    def change(self, target: Any, values: Any, accepted: bool) -> None:
        """Items are added to something: what a class does about that is its own affair, a name is none of ours."""
        if isinstance(target, Global):
            self.note(f"{target} (changed)", trust.HARMFUL, values)
        if not accepted:
            self.refuse("changes what is no list or dict")

    def items(self) -> list[Any]:
        items, self.stack = self.stack, self.marks.pop() if self.marks else self._no_mark()
        return items

    def _no_mark(self) -> list[Any]:
        raise Stop("closes a mark that is not open")
