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
from pickletools import opcodes
from typing import Any

from ckptkit.core.bytesource import ByteSource
from ckptkit.core.errors import CkptkitError
from ckptkit.core.limits import check
from ckptkit.core.tree import Global
from ckptkit.pickles.machine import collector_paused
from ckptkit.pickles.streams import Call, Trace
from ckptkit.scan.trace_notes import Notes
from ckptkit.scan.trace_symbols import (
    WEIGHTS_ONLY_OPCODES,
    Result,
    Symbol,
    class_of,
    number,
    text_of,
)
from ckptkit.scan.trace_window import Stop

LARGE = 1 << 16  # byte strings from this length on are not read

_NOT_CHANGED = "changes what is no list or dict"
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
            raise Stop("a line that is no number") from None

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
        """Of Python 2: text where it is ASCII."""
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
            raise Stop("an index that is no number") from None

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


_RUN: dict[str, tuple[Any, ...]] = {  # by the names of pickletools: the method, and its argument
    "PROTO": (Tracer.proto,), "FRAME": (Tracer.frame,), "STOP": (Tracer.stop,),
    "NONE": (Tracer.push, None), "NEWTRUE": (Tracer.push, True), "NEWFALSE": (Tracer.push, False),
    "EMPTY_TUPLE": (Tracer.push, ()), "EMPTY_LIST": (Tracer.push_new, "list"),
    "EMPTY_DICT": (Tracer.push_new, "dict"), "EMPTY_SET": (Tracer.push_new, "set"),
    "BININT": (Tracer.push_int, 4), "BININT1": (Tracer.push_int, 1),
    "BININT2": (Tracer.push_int, 2),
    "BINFLOAT": (Tracer.binfloat,), "LONG1": (Tracer.long, 1), "LONG4": (Tracer.long, 4),
    "INT": (Tracer.number_line, "INT"), "LONG": (Tracer.number_line, "LONG"),
    "FLOAT": (Tracer.number_line, "FLOAT"),
    "BINUNICODE": (Tracer.text, 4), "SHORT_BINUNICODE": (Tracer.text, 1),
    "BINUNICODE8": (Tracer.text, 8),
    "UNICODE": (Tracer.unicode_line,), "STRING": (Tracer.string_line,),
    "BINSTRING": (Tracer.string, 4), "SHORT_BINSTRING": (Tracer.string, 1),
    "BINBYTES": (Tracer.byte_string, 4), "SHORT_BINBYTES": (Tracer.byte_string, 1),
    "BINBYTES8": (Tracer.byte_string, 8), "BYTEARRAY8": (Tracer.byte_string, 8),
    "NEXT_BUFFER": (Tracer.buffer,), "READONLY_BUFFER": (Tracer.nothing,),
    "MARK": (Tracer.mark,), "POP": (Tracer.pop,), "POP_MARK": (Tracer.items,), "DUP": (Tracer.dup,),
    "PUT": (Tracer.put, 0), "BINPUT": (Tracer.put, 1), "LONG_BINPUT": (Tracer.put, 4),
    "MEMOIZE": (Tracer.memoize,),
    "GET": (Tracer.get, 0), "BINGET": (Tracer.get, 1), "LONG_BINGET": (Tracer.get, 4),
    "TUPLE": (Tracer.tuple_,), "TUPLE1": (Tracer.tuple_of, 1), "TUPLE2": (Tracer.tuple_of, 2),
    "TUPLE3": (Tracer.tuple_of, 3),
    "LIST": (Tracer.collected, "list"), "DICT": (Tracer.collected, "dict"),
    "FROZENSET": (Tracer.collected, "set"),
    "APPEND": (Tracer.append,), "APPENDS": (Tracer.extend, "list"),
    "ADDITEMS": (Tracer.extend, "set"),
    "SETITEM": (Tracer.setitem,), "SETITEMS": (Tracer.setitems,),
    "GLOBAL": (Tracer.global_,), "STACK_GLOBAL": (Tracer.stack_global,),
    "EXT1": (Tracer.extension, 1), "EXT2": (Tracer.extension, 2), "EXT4": (Tracer.extension, 4),
    "PERSID": (Tracer.persid,), "BINPERSID": (Tracer.binpersid,),
    "REDUCE": (Tracer.reduce,), "INST": (Tracer.inst,), "OBJ": (Tracer.obj,),
    "NEWOBJ": (Tracer.newobj,), "NEWOBJ_EX": (Tracer.newobj_ex,), "BUILD": (Tracer.build,),
}  # fmt: skip
_TABLE: list[tuple[str, bool, Callable[..., None], tuple[Any, ...]] | None] = [None] * 256
for _op in opcodes:
    _TABLE[ord(_op.code)] = (
        _op.name,
        _op.name in WEIGHTS_ONLY_OPCODES,
        _RUN[_op.name][0],
        _RUN[_op.name][1:],
    )


def trace(source: ByteSource, start: int = 0, stop: int | None = None, before: int = 0) -> Trace:
    """Return what the pickle at `start` would do, after pickles of `before` opcodes in the file.

    Never raises for bytes.
    """
    with collector_paused():
        return Tracer(source, start, source.size if stop is None else stop, before).run()
