"""The opcodes of a pickle, and the state that they work on. `ckptkit.formats.torch.unpickle` runs them.

Each method takes the window and the offset after the opcode, and returns the offset after its operand. It changes
nothing before it has its whole operand: where the window ends too early it raises Short, and is tried again.
"""

from __future__ import annotations

import re
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from codecs import escape_decode
from collections.abc import Callable
from struct import Struct

from ckptkit.bytesource import ByteSource, Range
from ckptkit.errors import FormatError, LimitError, TruncatedError, UnsupportedError
from ckptkit.formats.torch import globals as known
from ckptkit.limits import LIMITS, check
from ckptkit.tree import Blob, ByteString, Global, Node, Object, OrderedDict, Pairs, SetNode

BLOB = 1 << 16  # byte strings from this length on stay in the source
CUT = "the file is cut: download or copy it again"
NOT_STORED = "pickle refers to a value that it has not stored"
NO_TUPLE = "pickle makes a call with arguments that are no tuple"
UNSET = object()
_DROPPED = "pickle drops a value that it made: what that did would be lost"
_UNHASHABLE = (list, dict, SetNode, Pairs, Blob, bytearray)
_UNNAMEABLE = re.compile("[\n\r\ud800-\udfff]")
_ESCAPED = re.compile(r"(?:[^\\]|\\(?:[\\'\"abfnrtv0-3]|[4-7](?![0-7]{2})|x[0-9a-fA-F]{2}))*")

U4 = Struct("<I").unpack_from
I4 = Struct("<i").unpack_from
U2 = Struct("<H").unpack_from
_U8 = Struct("<Q").unpack_from
_F8 = Struct(">d").unpack_from


class Short(Exception):
    """The window ends before the opcode does, which reaches to its offset `end` at least."""

    def __init__(self, end: int) -> None:
        self.end = end


class Opcodes:
    """The state of the machine, and all opcodes but those that its loop has inline."""

    def __init__(
        self, source: ByteSource, start: int, stop: int, persistent_load: Callable[[Node], Node] | None
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
        self.far: dict[int, Node] = {}  # memo entries set out of order
        self.globals: dict[tuple[str, str], Global] = {}
        self.reducers: dict[int, known.Reducer] = {}  # by id of the Global
        self.odd_keys = 0
        self.key_values = 0  # in tuples used as dict keys
        self.pairs: dict[int, tuple[Node, Pairs]] = {}  # by id of the dict that could not hold them
        self.stopped = False

    # The memo

    def _put(self, index: int, value: Node) -> None:
        """Store out of order: small gaps (memos that start at 1) in the list, anything else aside."""
        memo = self.memo
        if index < len(memo):
            memo[index] = value
        elif index - len(memo) < 16:
            memo.extend([UNSET] * (index - len(memo)))
            memo.append(value)
        else:
            self.far[index] = value
            check("memo_sparse", len(self.far), "values stored out of order in a pickle")

    def _get(self, index: int) -> Node:
        value = self.memo[index] if index < len(self.memo) else self.far.get(index, UNSET)
        if value is UNSET:
            raise FormatError(NOT_STORED)
        return value

    # Names

    def _global(self, module: str, name: str) -> Global:
        """The one Global of this name. Newlines in a name would become opcodes when it is written back."""
        if not module or not all(name.split(".")) or _UNNAMEABLE.search(module + name):
            raise FormatError(f"pickle names a global that cannot exist: {module!r} {name!r}")
        check("name_bytes", len(module) + len(name), "characters of a global's name")
        if "." in name and self.protocol < 4:
            raise FormatError(f"pickle of protocol {self.protocol} names a nested global: {module!r} {name!r}")
        if self.protocol < 3:
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        found = self.globals.get((module, name))
        if found is None:
            found = self.globals[module, name] = Global(module, name)
            reducer = known.REDUCERS.get((module, name))
            if reducer is not None:
                self.reducers[id(found)] = reducer
        return found

    def _line(self, data: bytes, pos: int, encoding: str = "utf-8") -> tuple[str, int]:
        """The text up to the next newline, and the offset after it."""
        end = data.find(b"\n", pos)
        check("line_bytes", (len(data) if end < 0 else end) - pos, "bytes of a line in a pickle")
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
        self.data = data[: end - self.base]  # what is beyond is not in the window while the frame lasts
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
        self.stack.append(text == "01" if text in ("00", "01") else _decimal(text))
        return pos

    def op_long(self, data: bytes, pos: int) -> int:
        text, pos = self._line(data, pos)
        self.stack.append(_decimal(text.removesuffix("L")))
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
        text, pos = self._line(data, pos, "raw-unicode-escape")
        self.stack.append(text)
        return pos

    def op_string(self, data: bytes, pos: int) -> int:
        """A quoted literal of Python 2."""
        text, pos = self._line(data, pos, "latin-1")
        if len(text) < 2 or text[0] not in "'\"" or text[-1] != text[0]:
            raise FormatError("pickle holds a string without its quotes")
        if not _ESCAPED.fullmatch(text, 1, len(text) - 1):
            raise FormatError("pickle holds a string with a malformed escape")
        self.stack.append(python2_string(escape_decode(text[1:-1].encode("latin-1"))[0]))
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

    def _bytes(self, data: bytes, pos: int, size: int, make: Callable[[bytes], Node], kind: str = "bytes") -> int:
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
        self.stack.append(Blob(Range(self.source, at, size), kind))
        if pos + size <= len(self.data):
            return pos + size
        self.skipped += size
        self.data, self.base = b"", at + size
        return 0

    # Containers

    def _items(self) -> list[Node]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def op_empty_list(self, data: bytes, pos: int) -> int:
        self.stack.append([])
        return pos

    def op_list(self, data: bytes, pos: int) -> int:
        items = self._items()
        self.stack.append(items)
        return pos

    def op_append(self, data: bytes, pos: int) -> int:
        value = self.stack.pop()
        self._extend(self.stack[-1], [value])
        return pos

    def op_appends(self, data: bytes, pos: int) -> int:
        items = self._items()
        self._extend(self.stack[-1], items)
        return pos

    def _extend(self, target: Node, items: list[Node]) -> None:
        if target.__class__ is list:
            target.extend(items)
        elif isinstance(target, Object):
            _step(target, "append", items)
        else:
            raise FormatError(f"pickle appends to a {_kind(target)}")

    def op_dict(self, data: bytes, pos: int) -> int:
        items = self._items()
        if len(items) % 2:
            raise FormatError("pickle sets a key without a value")
        self.stack.append({})
        self._set(self.stack[-1], items[0::2], items[1::2])
        return pos

    def _set(self, target: Node, keys: list[Node], values: list[Node]) -> None:
        if isinstance(target, Object):
            _step(target, "set", list(zip(keys, values, strict=True)))
        elif not isinstance(target, dict):
            raise FormatError(f"pickle sets a key of a {_kind(target)}")
        elif id(target) in self.pairs:
            self.pairs[id(target)][1].pairs.extend(zip(keys, values, strict=True))
        else:
            self._set_dict(target, keys, values)

    def _set_dict(self, target: dict[Node, Node], keys: list[Node], values: list[Node]) -> None:
        """All or none: a repeated key must not overwrite what it repeats."""
        if all(key.__class__ is str for key in keys) or all(self._hashable(key) for key in keys):
            new = dict(zip(keys, values, strict=True))
            if len(new) == len(keys) and (not target or target.keys().isdisjoint(new)):
                target.update(new)
                return
        pairs = Pairs([*target.items(), *zip(keys, values, strict=True)])
        self.pairs[id(target)] = (target, pairs)

    def _hashable(self, key: Node) -> bool:
        """Whether hashing is harmless: shallow, and with hashes that a file cannot choose in any number."""
        if key.__class__ is str or (key.__class__ is int and -(2**60) < key < 2**60):
            return True
        if isinstance(key, (int, float, complex)) or (isinstance(key, tuple) and not _all_text(key)):
            self.odd_keys += 1
            check("odd_keys", self.odd_keys, "dict keys that are large integers, floats or tuples")
        level, depth = [key], 0
        while level:
            if any(isinstance(each, _UNHASHABLE) and not _is_frozen(each) for each in level):
                return False
            check("key_depth", depth := depth + 1, "tuples nested in a dict key")
            self.key_values += sum(len(each) for each in level if isinstance(each, tuple))
            check("key_values", self.key_values, "values in tuples used as dict keys")
            level = [inner for each in level if isinstance(each, tuple) for inner in each]
        return True

    def op_empty_set(self, data: bytes, pos: int) -> int:
        self.stack.append(SetNode([]))
        return pos

    def op_additems(self, data: bytes, pos: int) -> int:
        items = self._items()
        target = self.stack[-1]
        if isinstance(target, Object):
            _step(target, "add", items)
        elif isinstance(target, SetNode) and not target.frozen:
            target.items.extend(items)
        else:
            raise FormatError(f"pickle adds items to a {_kind(target)}")
        return pos

    def op_frozenset(self, data: bytes, pos: int) -> int:
        items = self._items()
        self.stack.append(SetNode(items, frozen=True))
        return pos

    # Stack

    def op_dup(self, data: bytes, pos: int) -> int:
        self.stack.append(self.stack[-1])
        return pos

    def op_put(self, data: bytes, pos: int) -> int:
        text, pos = self._line(data, pos)
        self._put(_decimal(text, least=0), self.stack[-1])
        return pos

    def op_get(self, data: bytes, pos: int) -> int:
        text, pos = self._line(data, pos)
        self.stack.append(self._get(_decimal(text, least=0)))
        return pos

    def op_pop(self, data: bytes, pos: int) -> int:
        """Only as CPython pickles a tuple that contains itself: drop its items, get the finished tuple instead.

        Anything else that drops a value would hide a call from whoever reads on.
        """
        after = pos
        while data[after : after + 1] in (b"0", b"1"):
            after += 1
        check("pickle_stack", after - pos, "values dropped at once in a pickle")
        if after == len(data) or after + 1 + OPERANDS.get(data[after], 0) > len(data):
            raise Short(max(len(data), after) + 1)
        get = _GETS.get(data[after])
        if get is None:
            raise UnsupportedError(_DROPPED)
        end = get(self, data, after + 1)
        kept = self.stack.pop()
        dropped: list[Node] = []
        for op in data[pos - 1 : after]:
            if op == 0x30 and self.stack:
                dropped.append(self.stack.pop())
            else:  # POP takes an open mark where the stack above it is empty
                dropped.extend(self._items())
        same = set(map(id, kept)) if isinstance(kept, tuple) else set()
        if not isinstance(kept, tuple) or any(id(each) not in same and not _is_scalar(each) for each in dropped):
            raise UnsupportedError(_DROPPED)
        self.stack.append(kept)
        return end

    def op_binget(self, data: bytes, pos: int) -> int:
        self.stack.append(self._get(data[pos]))
        return pos + 1

    def op_long_binget(self, data: bytes, pos: int) -> int:
        self.stack.append(self._get(U4(data, pos)[0]))
        return pos + 4

    # Objects

    def op_inst(self, data: bytes, pos: int) -> int:
        pos = self.op_global(data, pos)
        made = self.stack.pop()
        args = tuple(self._items())
        self.stack.append(Object(made, args))
        return pos

    def op_obj(self, data: bytes, pos: int) -> int:
        items = self._items()
        if not items:
            raise FormatError("pickle makes an object of no class")
        self.stack.append(Object(items[0], tuple(items[1:])))
        return pos

    def op_newobj(self, data: bytes, pos: int) -> int:
        args = self.stack.pop()
        if not isinstance(args, tuple):
            raise FormatError(NO_TUPLE)
        self.stack[-1] = Object(self.stack[-1], args, new=True)
        return pos

    def op_newobj_ex(self, data: bytes, pos: int) -> int:
        kwargs, args = self.stack.pop(), self.stack.pop()
        if not isinstance(args, tuple) or not isinstance(kwargs, dict):
            raise FormatError(NO_TUPLE)
        self.stack[-1] = Object(self.stack[-1], args, new=True, kwargs=kwargs)
        return pos

    def op_build(self, data: bytes, pos: int) -> int:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, Object):
            target.steps.append(("build", state))
            known.built(target, state)
        elif isinstance(target, OrderedDict) and target.state is None:
            target.state = state
        else:
            raise FormatError(f"pickle sets the state of a {_kind(target)}")
        return pos

    def op_refused(self, data: bytes, pos: int) -> int:
        raise UnsupportedError(f"pickle opcode {_REFUSED[data[pos - 1]]}: it refers to something outside the file")


def _no_persistent_ids(pid: Node) -> Node:
    raise UnsupportedError("pickle refers to values outside itself (persistent ids)")


def _step(target: Object, step: str, items: list[Node]) -> None:
    if target.steps and target.steps[-1][0] == step:
        target.steps[-1][1].extend(items)
    else:
        target.steps.append((step, items))


def python2_string(data: bytes) -> Node:
    """Text if that is certain, else bytes of unknown encoding."""
    return data.decode("ascii") if data.isascii() else ByteString(data)


def _decimal(text: str, least: int | None = None) -> int:
    digits = text[1:] if text[:1] in ("-", "+") else text
    if not (digits.isascii() and digits.isdigit()):
        raise FormatError(f"pickle holds {text[:40]!r} where an integer must be")
    if len(digits) > 2 * LIMITS.int_bytes:
        raise LimitError(f"integer of {len(digits):,} digits in a pickle (int_bytes)")
    value = int(text)
    if least is not None and value < least:
        raise FormatError(f"pickle holds {value} where an index must be")
    return value


def _is_scalar(node: Node) -> bool:
    return node is None or isinstance(node, (str, int, float, complex, bytes))


def _is_frozen(node: Node) -> bool:
    return isinstance(node, SetNode) and node.frozen


def _all_text(key: tuple[Node, ...]) -> bool:
    return all(each.__class__ is str for each in key)


def _kind(node: Node) -> str:
    return {OrderedDict: "OrderedDict", SetNode: "set"}.get(type(node), type(node).__name__)


RARE: dict[int, Callable[[Opcodes, bytes, int], int]] = {
    ord("N"): Opcodes.op_none,
    ord("c"): Opcodes.op_global,
    ord("]"): Opcodes.op_empty_list,
    ord("e"): Opcodes.op_appends,
    ord("a"): Opcodes.op_append,
    ord("b"): Opcodes.op_build,
    ord("G"): Opcodes.op_binfloat,
    0x88: Opcodes.op_true,
    0x8A: Opcodes.op_long1,
    0x8B: Opcodes.op_long4,
    0x93: Opcodes.op_stack_global,
    0x81: Opcodes.op_newobj,
    0x92: Opcodes.op_newobj_ex,
    0x80: Opcodes.op_proto,
    0x95: Opcodes.op_frame,
    0x8D: Opcodes.op_binunicode8,
    ord("C"): Opcodes.op_short_binbytes,
    ord("B"): Opcodes.op_binbytes,
    0x8E: Opcodes.op_binbytes8,
    0x96: Opcodes.op_bytearray8,
    ord("T"): Opcodes.op_binstring,
    ord("S"): Opcodes.op_string,
    ord("V"): Opcodes.op_unicode,
    ord("I"): Opcodes.op_int,
    ord("L"): Opcodes.op_long,
    ord("F"): Opcodes.op_float,
    ord("l"): Opcodes.op_list,
    ord("d"): Opcodes.op_dict,
    0x8F: Opcodes.op_empty_set,
    0x90: Opcodes.op_additems,
    0x91: Opcodes.op_frozenset,
    ord("2"): Opcodes.op_dup,
    ord("p"): Opcodes.op_put,
    ord("g"): Opcodes.op_get,
    ord("0"): Opcodes.op_pop,
    ord("1"): Opcodes.op_pop,
    ord("i"): Opcodes.op_inst,
    ord("o"): Opcodes.op_obj,
}
_GETS = {ord("g"): Opcodes.op_get, ord("h"): Opcodes.op_binget, ord("j"): Opcodes.op_long_binget}
_REFUSED = {
    ord("P"): "PERSID", 0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4", 0x97: "NEXT_BUFFER", 0x98: "READONLY_BUFFER",
}  # fmt: skip
RARE.update(dict.fromkeys(_REFUSED, Opcodes.op_refused))

# Bytes of the operand that follows the opcode, where its length is fixed or leads a longer one.
OPERANDS = {
    **dict.fromkeys(b"KhqU\x8cC\x80\x8a", 1), **dict.fromkeys(b"M", 2), **dict.fromkeys(b"rjJXTB\x8b", 4),
    **dict.fromkeys(b"G\x8d\x8e\x95\x96", 8),
}  # fmt: skip
