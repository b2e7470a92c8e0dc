"""Trace of a pickle stream: which names are looked up, which calls made, in which order.

Unlike :mod:`unpickle` this machine makes no values and refuses nothing that CPython would run:
whatever comes before the opcode that fails has been run by then. All opcodes of protocols 0 to 5,
read straight on through frames, as CPython did until 2026. Where two machines would go different
ways, that is a doubt. The stack holds signs: text, numbers and byte strings for themselves (names
are made of them), tuples of signs, a Global for what was looked up, a Result for what a call gives,
a Sign for everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptkit.core.bytesource import ByteSource
from ckptkit.core.errors import CkptkitError
from ckptkit.core.limits import check
from ckptkit.core.tree import Global, collector_paused
from ckptkit.pickles.streams import Call, Trace
from ckptkit.scanning.trace_notes import Notes
from ckptkit.scanning.trace_symbols import (
    WEIGHTS_ONLY_OPCODES,
    Result,
    Symbol,
    class_of,
    number,
    text_of,
)
from ckptkit.scanning.trace_window import Stop

LARGE = 1 << 16  # byte strings from this length on are not read

_NOT_CHANGED = "changes what is not a list or dict"
_MAPPINGS = (Global("collections", "OrderedDict"), Global("collections", "Counter"))


class Tracer(Notes):
    """The tracing machine.

    Opcodes are methods.
    """

    def run(self) -> Trace:
        """Run until STOP or failure.

        Never raises a CkptkitError: that is a failure too, and has a reason.
        """
        error = None
        try:
            self._loop()
        except Stop as stop:
            error = str(stop) or None
        except IndexError:
            error = "takes a value that is not there"
        except CkptkitError as refusal:
            error = refusal.message
        if error is not None:
            error = (
                f"{error} ({self.opcode} at byte {self.at:,})"
                if self.opcode
                else f"{error} (byte {self.at:,})"
            )
        uncalled = (
            name for name in self.globals if self.pushed[id(name)] > self.called.get(id(name), 0)
        )
        return Trace(
            protocol=self.protocol,
            opcodes=self.count,
            stop=self.window.offset if error is None else self.at,
            globals=tuple(self.globals),
            values=tuple(uncalled),
            calls=tuple(
                Call(*key, args, at, count) for key, (args, at, count) in self.calls.items()
            ),
            nested=tuple(self.nested),
            doubts=tuple(self.doubts),
            refused=self.refused,
            error=error,
        )

    def _loop(self) -> None:
        window, table = self.window, _TABLE
        while True:
            self.at = window.base + window.at
            self.opcode = ""
            if self.frame_end is not None and self.at >= self.frame_end:
                self._leave_frame()
            op = window.take(1)[0]
            entry = table[op]
            if entry is None:
                raise Stop(f"byte 0x{op:02x} is no opcode")
            self.opcode, accepted, run, arguments = entry
            self.count += 1
            if not accepted and self.refused is None:
                self.refused = f"opcode {self.opcode}"
            if self.count & 0xFFF == 0:
                self._check_limits()
            run(self, *arguments)

    def _check_limits(self) -> None:
        check("trace_opcodes", self.before + self.count, "opcodes of the pickles of a file")
        check("pickle_stack", len(self.stack), "values on the pickle stack")
        check("pickle_marks", len(self.marks), "open marks of a pickle")
        check("memo_entries", len(self.memo), "stored values of a pickle")
        check("pickle_bytes", self.at - self.start - self.window.skipped, "bytes of a pickle")

    def _leave_frame(self) -> None:
        if self.at != self.frame_end:
            self.doubt("an opcode reaches beyond its frame")
        self.frame_end = None

    def proto(self) -> None:
        self.protocol = self.window.take(1)[0]
        if self.protocol > 5:
            raise Stop(f"protocol {self.protocol}")

    def frame(self) -> None:
        size = number(self.window.take(8))
        if self.frame_end is not None and self.window.offset < self.frame_end:
            self.doubt("opens a frame inside a frame")
        if size > self.window.end - self.window.offset:
            self.doubt("a frame reaches beyond the end")
        self.frame_end = self.window.offset + size

    def stop(self) -> None:
        self.stack.pop()
        self.finish(None)
        if self.frame_end is not None and self.window.offset != self.frame_end:
            self.doubt("ends inside a frame")
        raise Stop

    def push(self, sign: Any) -> None:
        self.stack.append(sign)

    def push_new(self, kind: str) -> None:
        self.stack.append(Symbol(kind))

    def push_int(self, size: int) -> None:
        self.stack.append(number(self.window.take(size), signed=size == 4))

    def binfloat(self) -> None:
        self.window.take(8)
        self.stack.append(0.0)

    def long(self, size: int) -> None:
        length = number(self.window.take(size), signed=size == 4)
        if length < 0:
            raise Stop("an integer of negative length")
        check("int_bytes", length, "bytes of an integer in a pickle")
        self.stack.append(number(self.window.take(length), signed=True))

    def number_line(self, kind: str) -> None:
        line = self.window.line()
        if kind == "INT" and line in (b"00", b"01"):
            self.stack.append(line == b"01")
            return
        check("int_bytes", len(line), "digits of a number in a pickle")
        try:
            self.stack.append(float(line) if kind == "FLOAT" else int(line.removesuffix(b"L")))
        except ValueError:
            raise Stop("a line that is not a number") from None

    def text(self, size: int) -> None:
        data = self.window.take(number(self.window.take(size)))
        try:
            self.stack.append(str(data, "utf-8", "surrogatepass"))
        except UnicodeDecodeError:
            raise Stop("text that is not UTF-8") from None
        if data[:2] == b"\xc2\x80" or data[-1:] == b".":
            self._keep_text(self.stack[-1])

    def _keep_text(self, text: str) -> None:
        try:
            self.keep(text.encode("latin-1"))
        except UnicodeEncodeError:
            pass

    def unicode_line(self) -> None:
        try:
            self.stack.append(self.window.line().decode("raw-unicode-escape"))
        except UnicodeDecodeError:
            raise Stop("text with a malformed escape") from None
        self._keep_text(self.stack[-1])

    def string_line(self) -> None:
        self.stack.append(text_of(self.window.line()))

    def string(self, size: int) -> None:
        """Push a string of Python 2: as text if it is ASCII."""
        length = number(self.window.take(size), signed=size == 4)
        if length < 0:
            raise Stop("a string of negative length")
        data = self._bytes(length)
        if data is not None and data.isascii():
            self.stack[-1] = data.decode()
        elif data is not None and data.decode(errors="ignore").encode() != data:
            self.refuse("a string of Python 2 that is not UTF-8")

    def byte_string(self, size: int) -> None:
        self._bytes(number(self.window.take(size)))

    def _bytes(self, length: int) -> bytes | None:
        """Push a byte string, or only where it is if it is large."""
        if length < LARGE:
            data = self.window.take(length)
            self.keep(data)
            self.stack.append(data)
            return data
        source = self.window.skip(length)
        self.keep(source)
        self.stack.append(Symbol(f"{length:,} bytes", source))
        return None

    def buffer(self) -> None:
        self.doubt("takes a buffer from outside")
        self.stack.append(Symbol("a buffer"))

    def nothing(self) -> None:
        self.stack[-1]

    # Stack and memo

    def mark(self) -> None:
        self.marks.append(self.stack)
        self.stack = []

    def pop(self) -> None:
        if self.stack:
            self.stack.pop()
        else:
            self.items()

    def dup(self) -> None:
        self._again(self.stack[-1])

    def _again(self, sign: Any) -> None:
        if isinstance(sign, Global):
            self.pushed[id(sign)] = self.pushed.get(id(sign), 0) + 1
        self.stack.append(sign)

    def _index(self, size: int) -> int:
        if size:
            return number(self.window.take(size))
        try:
            return int(self.window.line()[:20])
        except ValueError:
            raise Stop("an index that is not a number") from None

    def put(self, size: int) -> None:
        self.memo[self._index(size)] = self.stack[-1]

    def memoize(self) -> None:
        self.memo[len(self.memo)] = self.stack[-1]

    def get(self, size: int) -> None:
        index = self._index(size)
        if index not in self.memo:
            raise Stop("takes a value that was not stored")
        self._again(self.memo[index])

    # Containers

    def tuple_of(self, size: int) -> None:
        if len(self.stack) < size:
            raise IndexError
        self.stack[-size:] = [tuple(self.stack[-size:])]

    def tuple_(self) -> None:
        items = self.items()
        self.stack.append(tuple(items))

    def collected(self, kind: str) -> None:
        items = self.items()
        self.fill(items)
        made = Symbol(kind)
        made.add(items)
        self.stack.append(made)

    def append(self) -> None:
        value = self.stack.pop()
        self._extend([value], "list")

    def extend(self, kind: str) -> None:
        self._extend(self.items(), kind)

    def _extend(self, values: list[Any], kind: str) -> None:
        self.step("append" if kind == "list" else "add", values)
        target = self.stack[-1]
        if isinstance(target, Symbol):
            target.add(values)
        if not isinstance(target, Symbol) or target.kind != kind:
            self.refuse(_NOT_CHANGED)

    def setitem(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set([key, value])

    def setitems(self) -> None:
        self._set(self.items())

    def _set(self, pairs: list[Any]) -> None:
        if len(pairs) % 2:
            raise Stop("sets a key without a value")
        self.step("set", pairs)
        target = self.stack[-1]
        if isinstance(target, Symbol):
            target.add(pairs)
        is_dict = target.kind == "dict" if isinstance(target, Symbol) else _is_mapping(target)
        if not is_dict:
            self.refuse(_NOT_CHANGED)

    # Names, calls, objects

    def global_(self) -> None:
        module, name = self.window.line(), self.window.line()
        try:
            self.look_up(module.decode(), name.decode())
        except UnicodeDecodeError:
            raise Stop("a name that is not UTF-8") from None

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.look_up(module, name)

    def extension(self, size: int) -> None:
        code = number(self.window.take(size))
        self.doubt(
            f"takes number {code:,} of copyreg's extensions, which the program that loads it "
            "decides"
        )
        self.stack.append(Symbol(f"extension {code}"))

    def persid(self) -> None:
        self.window.line()
        self.stack.append(Symbol("persistent"))

    def binpersid(self) -> None:
        pid = self.stack.pop()
        if not isinstance(pid, int) and not (
            isinstance(pid, tuple) and pid and pid[0] == "storage"
        ):
            self.refuse("a persistent id that is no storage")
        self.stack.append(class_of(pid) or Symbol("persistent"))

    def reduce(self) -> None:
        args = self.stack.pop()
        made = self.stack.pop()
        self.stack.append(self.call(made, args))

    def inst(self) -> None:
        self.global_()
        made = self.stack.pop()
        args = tuple(self.items())
        self.stack.append(self.call(made, args))

    def obj(self) -> None:
        items = self.items()
        self.stack.append(self.call(items[0], tuple(items[1:])))

    def newobj(self) -> None:
        args = self.stack.pop()
        made = self.stack.pop()
        self.stack.append(self.call(made, args, new=True))

    def newobj_ex(self) -> None:
        kwargs, args = self.stack.pop(), self.stack.pop()
        made = self.stack.pop()
        self.stack.append(self.call(made, args, new=True, kwargs=kwargs))

    def build(self) -> None:
        """Note that attributes are set, or __setstate__ called, of the class or its substitute."""
        state = self.stack.pop()
        self.step("build", state)
        target = self.stack[-1]
        if not (isinstance(target, Result) and isinstance(target.callable, Global)):
            self.refuse("sets the state of what has none")


def _is_mapping(target: Any) -> bool:
    return isinstance(target, Result) and target.callable in _MAPPINGS


_RUN: dict[int, tuple[Any, ...]] = {  # by byte: the name, the method, its argument
    0x80: ("PROTO", Tracer.proto), 0x95: ("FRAME", Tracer.frame), ord("."): ("STOP", Tracer.stop),
    ord("N"): ("NONE", Tracer.push, None), 0x88: ("NEWTRUE", Tracer.push, True),
    0x89: ("NEWFALSE", Tracer.push, False), ord(")"): ("EMPTY_TUPLE", Tracer.push, ()),
    ord("]"): ("EMPTY_LIST", Tracer.push_new, "list"),
    ord("}"): ("EMPTY_DICT", Tracer.push_new, "dict"), 0x8F: ("EMPTY_SET", Tracer.push_new, "set"),
    ord("J"): ("BININT", Tracer.push_int, 4), ord("K"): ("BININT1", Tracer.push_int, 1),
    ord("M"): ("BININT2", Tracer.push_int, 2), ord("G"): ("BINFLOAT", Tracer.binfloat),
    0x8A: ("LONG1", Tracer.long, 1), 0x8B: ("LONG4", Tracer.long, 4),
    ord("I"): ("INT", Tracer.number_line, "INT"), ord("L"): ("LONG", Tracer.number_line, "LONG"),
    ord("F"): ("FLOAT", Tracer.number_line, "FLOAT"), ord("X"): ("BINUNICODE", Tracer.text, 4),
    0x8C: ("SHORT_BINUNICODE", Tracer.text, 1), 0x8D: ("BINUNICODE8", Tracer.text, 8),
    ord("V"): ("UNICODE", Tracer.unicode_line), ord("S"): ("STRING", Tracer.string_line),
    ord("T"): ("BINSTRING", Tracer.string, 4), ord("U"): ("SHORT_BINSTRING", Tracer.string, 1),
    ord("B"): ("BINBYTES", Tracer.byte_string, 4),
    ord("C"): ("SHORT_BINBYTES", Tracer.byte_string, 1), 0x8E: ("BINBYTES8", Tracer.byte_string, 8),
    0x96: ("BYTEARRAY8", Tracer.byte_string, 8), 0x97: ("NEXT_BUFFER", Tracer.buffer),
    0x98: ("READONLY_BUFFER", Tracer.nothing), ord("("): ("MARK", Tracer.mark),
    ord("0"): ("POP", Tracer.pop), ord("1"): ("POP_MARK", Tracer.items),
    ord("2"): ("DUP", Tracer.dup), ord("p"): ("PUT", Tracer.put, 0),
    ord("q"): ("BINPUT", Tracer.put, 1), ord("r"): ("LONG_BINPUT", Tracer.put, 4),
    0x94: ("MEMOIZE", Tracer.memoize), ord("g"): ("GET", Tracer.get, 0),
    ord("h"): ("BINGET", Tracer.get, 1), ord("j"): ("LONG_BINGET", Tracer.get, 4),
    ord("t"): ("TUPLE", Tracer.tuple_), 0x85: ("TUPLE1", Tracer.tuple_of, 1),
    0x86: ("TUPLE2", Tracer.tuple_of, 2), 0x87: ("TUPLE3", Tracer.tuple_of, 3),
    ord("l"): ("LIST", Tracer.collected, "list"), ord("d"): ("DICT", Tracer.collected, "dict"),
    0x91: ("FROZENSET", Tracer.collected, "set"), ord("a"): ("APPEND", Tracer.append),
    ord("e"): ("APPENDS", Tracer.extend, "list"), 0x90: ("ADDITEMS", Tracer.extend, "set"),
    ord("s"): ("SETITEM", Tracer.setitem), ord("u"): ("SETITEMS", Tracer.setitems),
    ord("c"): ("GLOBAL", Tracer.global_), 0x93: ("STACK_GLOBAL", Tracer.stack_global),
    0x82: ("EXT1", Tracer.extension, 1), 0x83: ("EXT2", Tracer.extension, 2),
    0x84: ("EXT4", Tracer.extension, 4), ord("P"): ("PERSID", Tracer.persid),
    ord("Q"): ("BINPERSID", Tracer.binpersid), ord("R"): ("REDUCE", Tracer.reduce),
    ord("i"): ("INST", Tracer.inst), ord("o"): ("OBJ", Tracer.obj), 0x81: ("NEWOBJ", Tracer.newobj),
    0x92: ("NEWOBJ_EX", Tracer.newobj_ex), ord("b"): ("BUILD", Tracer.build),
}  # fmt: skip
_TABLE: list[tuple[str, bool, Callable[..., None], tuple[Any, ...]] | None] = [None] * 256
for _byte, (_name, _method, *_arguments) in _RUN.items():
    _TABLE[_byte] = (_name, _name in WEIGHTS_ONLY_OPCODES, _method, tuple(_arguments))


def trace(source: ByteSource, start: int = 0, stop: int | None = None, before: int = 0) -> Trace:
    """Return what the pickle at `start` would do, after pickles of `before` opcodes in the file.

    Never raises for bytes.
    """
    with collector_paused():
        return Tracer(source, start, source.size if stop is None else stop, before).run()
