"""The state of the pickle machine, and its opcodes that make one value out of bytes.

These are names, numbers and strings.

Each method takes the window and the offset after the opcode, and returns the offset after its
operand. It changes nothing before it has its whole operand: where the window ends too early it
raises Short, and is tried again.
"""

from __future__ import annotations

import re
import warnings
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from codecs import escape_decode
from collections.abc import Callable, Mapping
from struct import Struct

from ckptkit.core.bytesource import ByteSource, Range
from ckptkit.core.errors import FormatError, TruncatedError, UnsupportedError
from ckptkit.core.limits import check
from ckptkit.core.tree import ByteString, Global, Node, Pairs, StoredBytes
from ckptkit.pickles import globals as known
from ckptkit.pickles.dict_keys import KeyCheck

BLOB = 1 << 16  # byte strings from this length on stay in the source
CUT = "the file is cut: download or copy it again"
NO_TUPLE = "pickle makes a call with arguments that are no tuple"
UNSET = object()
_UNNAMEABLE = "[\n\r\ud800-\udfff]"

U4 = Struct("<I").unpack_from
I4 = Struct("<i").unpack_from
U2 = Struct("<H").unpack_from
_U8 = Struct("<Q").unpack_from
_F8 = Struct(">d").unpack_from


class NotStoredError(FormatError):
    """A GET of what has not been PUT."""

    def __init__(self) -> None:
        super().__init__("pickle refers to a value that it has not stored")


class Short(Exception):
    """The window ends before the opcode does, which reaches to its offset `end` at least."""

    def __init__(self, end: int) -> None:
        self.end = end


class Values:
    """The state of the machine, and the opcodes that make one value out of bytes."""

    def __init__(
        self,
        source: ByteSource,
        start: int,
        stop: int,
        persistent_load: Callable[[Node], Node] | None,
        reducers: Mapping[tuple[str, str], known.Reducer],
    ) -> None:
        self.source = source
        self.start = start
        self.end = stop
        self.frame_end: int | None = None
        self.data = b""
        self.base = start  # offset in the source of data[0]
        self.skipped = 0  # bytes of blobs
        self.persistent_load = persistent_load or _no_persistent_ids
        self.protocol = 0
        self.stack: list[Node] = []
        self.marks: list[list[Node]] = []  # the stacks below each open MARK
        self.memo: list[Node] = []
        self.kinds: dict[tuple[int, int], Node] = {}  # of plain tensors
        self.far: dict[int, Node] = {}  # memo entries set out of order
        self.globals: dict[tuple[str, str], Global] = {}
        self.meanings = reducers
        self.reducers: dict[int, known.Reducer] = {}  # by id of the Global
        self.keys = KeyCheck()
        self.pairs: dict[int, tuple[Node, Pairs]] = {}  # by id of the dict that could not hold them
        self.tensors: list[Node] = []  # objects that a BUILD has made nothing but a tensor
        self.dropped: dict[int, Node] = {}  # values that left the stack, by id
        self.pops = 0
        self.stopped = False

    # The memo

    def _put(self, index: int, value: Node) -> None:
        """Store out of order: small gaps (memos that start at 1) in the list, anything else
        aside."""
        memo = self.memo
        if index < len(memo):
            memo[index] = value
            self.kinds.clear()  # they may refer to what was there
        elif index - len(memo) < 16:
            memo.extend([UNSET] * (index - len(memo)))
            memo.append(value)
        else:
            self.far[index] = value
            check("memo_sparse", len(self.far), "values stored out of order in a pickle")

    def _get(self, index: int) -> Node:
        value = self.memo[index] if index < len(self.memo) else self.far.get(index, UNSET)
        if value is UNSET:
            raise NotStoredError
        return value

    # Names

    def _global(self, module: str, name: str) -> Global:
        """Return the one Global of this name.

        Newlines in a name would become opcodes when it is written back.
        """
        parts = name.split(".")
        exists = bool(name) if len(parts) == 1 else all(map(str.isidentifier, parts))
        if not module or not exists or re.search(_UNNAMEABLE, module + name):
            raise FormatError(f"pickle names a global that cannot exist: {module!r} {name!r}")
        check("name_bytes", len(module) + len(name), "characters of a global's name")
        if len(parts) > 1 and self.protocol < 4:
            raise FormatError(
                f"pickle of protocol {self.protocol} names a nested global: {module!r} {name!r}"
            )
        if self.protocol < 3:
            module, name = NAME_MAPPING.get(
                (module, name), (IMPORT_MAPPING.get(module, module), name)
            )
        found = self.globals.get((module, name))
        if found is None:
            found = self.globals[module, name] = Global(module, name)
            reducer = self.meanings.get((module, name))
            if reducer is not None:
                self.reducers[id(found)] = reducer
        return found

    def _line(
        self, data: bytes, pos: int, encoding: str = "utf-8", limit: str = "line_bytes"
    ) -> tuple[str, int]:
        """The text up to the next newline, and the offset after it."""
        end = data.find(b"\n", pos)
        check(limit, (len(data) if end < 0 else end) - pos, "bytes of a line in a pickle")
        if end < 0:
            raise Short(len(data) + 1)
        return data[pos:end].decode(encoding), end + 1

    def op_global(self, data: bytes, pos: int) -> int:
        module, pos = self._line(data, pos)
        name, pos = self._line(data, pos)
        self.stack.append(self._global(module, name))
        return pos

    def op_stack_global(self, data: bytes, pos: int) -> int:
        name, module = self.stack.pop(), self.stack.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise FormatError("pickle names a global by something other than strings")
        self.stack.append(self._global(module, name))
        return pos

    # Framing

    def op_proto(self, data: bytes, pos: int) -> int:
        if data[pos] > 5:
            raise UnsupportedError(f"pickle protocol {data[pos]}; ckptkit reads 0 to 5")
        self.protocol = data[pos]
        return pos + 1

    def op_frame(self, data: bytes, pos: int) -> int:
        if self.frame_end is not None:
            raise FormatError("pickle opens a frame inside a frame")
        end = self.base + pos + 8 + _U8(data, pos)[0]
        if end > self.end:
            raise TruncatedError("pickle frame reaches beyond the end", hint=CUT)
        self.frame_end = end
        self.data = data[
            : end - self.base
        ]  # what is beyond is not in the window while the frame lasts
        return pos + 8

    # Scalars

    def op_none(self, data: bytes, pos: int) -> int:
        self.stack.append(None)
        return pos

    def op_true(self, data: bytes, pos: int) -> int:
        self.stack.append(True)
        return pos

    def op_binfloat(self, data: bytes, pos: int) -> int:
        self.stack.append(_F8(data, pos)[0])
        return pos + 8

    def op_long1(self, data: bytes, pos: int) -> int:
        return self._long(data, pos + 1, data[pos])

    def op_long4(self, data: bytes, pos: int) -> int:
        return self._long(data, pos + 4, I4(data, pos)[0])

    def _long(self, data: bytes, pos: int, size: int) -> int:
        if size < 0:
            raise FormatError("pickle holds an integer of negative length")
        check("int_bytes", size, "bytes of an integer in a pickle")
        if pos + size > len(data):
            raise Short(pos + size)
        self.stack.append(int.from_bytes(data[pos : pos + size], "little", signed=True))
        return pos + size

    def op_int(self, data: bytes, pos: int) -> int:
        text, pos = self._line(data, pos)
        self.stack.append(text == "01" if text in ("00", "01") else decimal(text))
        return pos

    def op_long(self, data: bytes, pos: int) -> int:
        text, pos = self._line(data, pos)
        self.stack.append(decimal(text.removesuffix("L")))
        return pos

    def op_float(self, data: bytes, pos: int) -> int:
        text, pos = self._line(data, pos)
        try:
            if "_" in text or not text.isascii():
                raise ValueError
            self.stack.append(float(text))
        except ValueError as error:
            raise FormatError(f"pickle holds {text[:40]!r} where a number must be") from error
        return pos

    # Strings

    def op_unicode(self, data: bytes, pos: int) -> int:
        text, pos = self._line(data, pos, "raw-unicode-escape", "string_bytes")
        self.stack.append(text)
        return pos

    def op_string(self, data: bytes, pos: int) -> int:
        """A quoted literal of Python 2."""
        text, pos = self._line(data, pos, "latin-1", "string_bytes")
        if len(text) < 2 or text[0] not in "'\"" or text[-1] != text[0]:
            raise FormatError("pickle holds a string without its quotes")
        self.stack.append(python2_string(_unescaped(text[1:-1].encode("latin-1"))))
        return pos

    def op_binunicode8(self, data: bytes, pos: int) -> int:
        size = _U8(data, pos)[0]
        if pos + 8 + size > len(data):
            raise Short(pos + 8 + size)
        self.stack.append(str(data[pos + 8 : pos + 8 + size], "utf-8", "surrogatepass"))
        return pos + 8 + int(size)

    def op_binstring(self, data: bytes, pos: int) -> int:
        size = I4(data, pos)[0]
        if size < 0:
            raise FormatError("pickle holds a string of negative length")
        return self._bytes(data, pos + 4, size, python2_string, "python2")

    def op_short_binbytes(self, data: bytes, pos: int) -> int:
        return self._bytes(data, pos + 1, data[pos], bytes)

    def op_binbytes(self, data: bytes, pos: int) -> int:
        return self._bytes(data, pos + 4, U4(data, pos)[0], bytes)

    def op_binbytes8(self, data: bytes, pos: int) -> int:
        return self._bytes(data, pos + 8, _U8(data, pos)[0], bytes)

    def op_bytearray8(self, data: bytes, pos: int) -> int:
        return self._bytes(data, pos + 8, _U8(data, pos)[0], bytearray, "bytearray")

    def _bytes(
        self, data: bytes, pos: int, size: int, make: Callable[[bytes], Node], kind: str = "bytes"
    ) -> int:
        if size >= BLOB:
            return self._blob(pos, size, kind)
        if pos + size > len(data):
            raise Short(pos + size)
        self.stack.append(make(data[pos : pos + size]))
        return pos + size

    def _blob(self, pos: int, size: int, kind: str) -> int:
        """Leave the bytes where they are, and go on after them."""
        at = self.base + pos
        end = self.end if self.frame_end is None else self.frame_end
        if at + size > end:
            raise TruncatedError("pickle ends inside a byte string", hint=CUT)
        self.stack.append(StoredBytes(Range(self.source, at, size), kind))
        if pos + size <= len(self.data):
            return pos + size
        self.skipped += size
        self.data, self.base = b"", at + size
        return 0


def _no_persistent_ids(pid: Node) -> Node:
    raise UnsupportedError("pickle refers to values outside itself (persistent ids)")


def python2_string(data: bytes) -> Node:
    """Text if that is certain, else bytes of unknown encoding."""
    return data.decode("ascii") if data.isascii() else ByteString(data)


def _unescaped(data: bytes) -> bytes:
    """Return a quoted literal, its escapes resolved; unknown ones stay, as in Python 2."""
    if b"\\" not in data:
        return data
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return escape_decode(data)[0]
    except ValueError as error:
        raise FormatError("pickle holds a string with a malformed escape") from error


def decimal(text: str, least: int | None = None) -> int:
    digits = text[1:] if text[:1] in ("-", "+") else text
    if not (digits.isascii() and digits.isdigit()):
        raise FormatError(f"pickle holds {text[:40]!r} where an integer must be")
    check("int_bytes", len(digits) // 2, "digits of an integer in a pickle, two to a byte")
    value = int(text)
    if least is not None and value < least:
        raise FormatError(f"pickle holds {value} where an index must be")
    return value
