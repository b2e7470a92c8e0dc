"""Run the opcodes of a pickle without importing or calling anything that the pickle names.

A pickle is a program for a stack machine. CPython's Lib/pickletools.py describes every opcode. All
modules of ckptkit read pickles with the `Machine` of this module. `Machine` supports protocols 0 to
5 and behaves like CPython's C unpickler (Modules/_pickle.c).

`Machine` keeps the stack, the marks and the memo. Where CPython would import a name, call a
function or modify an object, `Machine` calls a method of a `Builder`. There are two builders.
`ckptkit.pickles.values` builds the tree of a checkpoint. `ckptkit.scanning.trace` lists the effects
of loading the pickle.

`Machine` calls `Builder.odd` for input that no pickler writes, or on which unpicklers disagree.
For such input, the builder in `values` raises an error, and the builder in `trace` records a doubt.

`Machine` reads the file through a window of at most 1 MiB. `Machine` does not read byte strings of
64 KiB and more. The loop inlines frequent opcodes. Each other opcode has its own method. A file may
contain 100,000 tensors of 24 opcodes each. If the opcodes of a tensor are those of torch.save, one
method runs all 24 opcodes.
"""

from __future__ import annotations

import re
import warnings
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from codecs import escape_decode
from collections.abc import Callable, Sequence
from functools import lru_cache
from struct import Struct
from struct import error as StructError  # noqa: N812
from typing import Any, NoReturn, Protocol

from ckptkit.core.bytesource import ByteSource, Range
from ckptkit.core.errors import FormatError, TruncatedError, UnsupportedError
from ckptkit.core.limits import LIMITS, check
from ckptkit.core.tree import Node, StoredBytes

# The first read has FIRST_WINDOW bytes, because most pickles are small. Later reads are larger, up
# to WINDOW bytes.
WINDOW = 1 << 20
FIRST_WINDOW = 1 << 14
LARGE = 1 << 16  # minimum length of the byte strings that `Machine` does not read
CUT = "download or copy the file again"
UNSET: Any = object()  # an empty slot of the memo

U4 = Struct("<I").unpack_from
I4 = Struct("<i").unpack_from
U2 = Struct("<H").unpack_from
F8 = Struct(">d").unpack

# Patterns of the arguments that the picklers of CPython 2 and 3 write for text opcodes. See
# save_bool, save_int, save_long, save_float, memoize and save_string in pickle.py and _pickle.c.
# CPython's unpicklers accept more forms. The C unpickler and the Python unpickler accept different
# forms.
_INT = re.compile(rb"0|-?[1-9][0-9]*")
_INDEX = re.compile(rb"0|[1-9][0-9]*")
_FLOAT = re.compile(rb"-?(?:[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]+)?|inf)|nan")
# Numbers that an unpickler of CPython may accept. CPython uses int(), float() and strtol(). The
# function strtol() stops at a NUL byte.
_READABLE = re.compile(
    rb"\s*[+-]?(?:[0-9][0-9a-fxo_.+-]*l?|inf(?:inity)?|nan)\s*(?:\0.*)?", re.IGNORECASE | re.DOTALL
)
_STRING = re.compile(
    rb"""'(?:[^'\\]|\\(?:[\\'"nrt]|x[0-9a-f]{2}))*'|"(?:[^"\\]|\\(?:[\\'"nrt]|x[0-9a-f]{2}))*\""""
)
_NUMBER = rb"(?:K.|M..|J....)"  # BININT1, BININT2, BININT
# The opcodes of a tensor, from the byte after MARK to the PUT of the tensor. The opcodes push the
# arguments of _rebuild_tensor_v2 and call this function. The arguments are
#     (("storage", class, key, device, elements), offset, size, stride, False, OrderedDict()).
_TENSOR = re.compile(
    rb"\(h(.)h(.)X(.)\0\0\0([0-9]+)r(....)h(.)(@t)r(....)Q(@@{1,3}[\x85-\x87])r(....)"
    rb"(@{1,3}[\x85-\x87])r(....)\x89h(.)\)Rr(....)tr(....)Rr(....)".replace(b"@", _NUMBER),
    re.DOTALL,
).match
# `first * _ONES + _NEXT` is the integer whose bytes are seven consecutive 4-byte memo indices. The
# first of the indices is `first`.
_ONES, _NEXT = sum(1 << 32 * n for n in range(7)), sum(n << 32 * n for n in range(7))


class Builder(Protocol):
    """The methods that `Machine` calls for the values, names and calls in a pickle."""

    # `Machine` calls `pushed` for each value of these types that it pushes from the memo.
    counted: frozenset[type]
    weight: int  # Estimated bytes of memory per value, without the content of strings.
    watchful: bool  # If True, `Machine` calls `text` for each string.

    def new_list(self) -> Any: ...

    def new_dict(self) -> Any: ...

    def new_set(self) -> Any: ...

    def name(self, module: Node, name: Node) -> Any:
        """Return a class or function. In a malformed pickle, the arguments may not be strings."""

    def pushed(self, value: Any) -> None: ...

    def text(self, text: str) -> None: ...

    def byte_string(self, value: bytes | StoredBytes, kind: str) -> Any:
        """Return a byte string. `kind` is bytes, bytearray or python2."""

    def call(self, made: Any, args: Any, *, new: bool = False, kwargs: Any = None) -> Any:
        """Return the result of calling `made`. If `new` is True, call ``made.__new__`` instead."""

    def persistent(self, pid: Any) -> Any: ...

    def build(self, target: Any, state: Any) -> None: ...

    def extend(self, target: Any, items: list[Any], how: str) -> None:
        """Add items to a list ("append") or a set ("add")."""

    def set(self, target: Any, items: Sequence[Any]) -> None:
        """Set keys. `items` contains keys and values alternately."""

    def collected(self, kind: str, items: list[Any]) -> Any:
        """Return a container with these items. `kind` is "list", "dict" or "frozenset"."""

    def drop(self, values: list[Any]) -> None: ...

    def odd(self, reason: str) -> None:
        """Handle input on which unpicklers disagree. If this method returns, reading continues."""

    def outside(self, opcode: str, value: Any) -> Any:
        """Return a value that the pickle does not contain.

        `value` is the code of a registered extension, an out-of-band buffer or a persistent id.
        """

    def end(self, stack: list[Any], marks: list[list[Any]]) -> Any:
        """Return the value of the pickle at STOP."""


class SpellingError(FormatError):
    """Raised for a number or string that no pickler writes but an unpickler of CPython may read."""


class Short(Exception):
    """Raised if the window ends inside an opcode. `end` is the index where the opcode ends."""

    def __init__(self, end: int) -> None:
        self.end = end


@lru_cache(maxsize=4096)
def _numbers(code: bytes) -> tuple[int, ...]:
    """Return the integers that the opcodes in `code` push. Ignore the last byte of `code`."""
    found, at = [], 0
    while at < len(code) - 1:
        size = {0x4B: 1, 0x4D: 2, 0x4A: 4}[code[at]]
        found.append(int.from_bytes(code[at + 1 : at + 1 + size], "little", signed=size == 4))
        at += 1 + size
    return tuple(found)


def renamed(module: str, name: str) -> tuple[str, str]:
    """Return the module and name that Python 3 uses for a name of Python 2."""
    return NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))


class Machine:
    """Runs one pickle.

    Messages use ``offset`` (the position of the current opcode) and ``opcode`` (the name of the
    current opcode). ``rare`` maps each opcode that has its own method to the offset of its first
    use. `torch.load(weights_only=True)` rejects some of these opcodes.
    """

    def __init__(
        self, source: ByteSource, start: int, stop: int, builder: Builder,
        most: str = "pickle_bytes",
    ) -> None:  # fmt: skip
        self.source = source
        self.start = start
        self.limit = stop
        self.most = most  # name of the limit on the number of bytes read
        self.builder = builder
        self.data = b""  # the window
        self.base = start  # offset of data[0] in the source
        self.at = 0  # index of the current opcode in the window
        self.pos = 0  # index of the next byte, valid while the method of an opcode runs
        self.frame_end: int | None = None
        self.skipped = 0  # total length of the byte strings that were not read
        self.protocol = 0
        self.stack: list[Any] = []
        self.marks: list[list[Any]] = []  # the values below each open MARK
        self.memo: list[Any] = []
        self.far: dict[int, Any] = {}  # memo entries whose indices are far beyond those of `memo`
        self.gaps = 0  # number of UNSET entries in `memo`
        self.rare: dict[int, int] = {}
        self.made = 0  # approximate number of containers and call results
        self.result: Any = UNSET

    @property
    def offset(self) -> int:
        return self.base + self.at

    @property
    def opcode(self) -> str:
        """Return the name of the current opcode. Return "" before and after the pickle."""
        return NAMES.get(self.data[self.at], "") if self.at < len(self.data) else ""

    @property
    def size(self) -> int:
        """Return the number of bytes read. Large byte strings do not count."""
        return self.offset - self.start - self.skipped

    def run(self) -> Any:
        """Run until STOP and return the builder's result.

        Raises FormatError for a malformed pickle, TruncatedError for an incomplete pickle,
        LimitError for a pickle that exceeds a limit, and UnsupportedError for an unknown protocol.
        The builder may raise other errors.
        """
        while self.result is UNSET:
            self._loop()
        return self.result

    def _loop(self) -> None:  # noqa: C901  a method call per opcode would take twice as long
        """Run opcodes until STOP or the end of the window."""
        data, stack, memo, builder = self.data, self.stack, self.memo, self.builder
        marks, counted = self.marks, builder.counted
        push = stack.append
        pos = start = op = need = made = 0
        try:
            while True:
                start = pos
                op = data[pos]
                pos += 1
                if op == 0x68 or op == 0x6A:  # BINGET, LONG_BINGET
                    index = data[pos] if op == 0x68 else U4(data, pos)[0]
                    pos += 1 if op == 0x68 else 4
                    value = memo[index] if index < len(memo) else self._get(index)
                    if value is UNSET or value.__class__ in counted:
                        self._again(value)
                    push(value)
                elif op == 0x58:  # BINUNICODE
                    end = pos + 4 + U4(data, pos)[0]
                    if end > len(data):
                        raise Short(end)
                    value = str(data[pos + 4 : end], "utf-8", "surrogatepass")
                    if builder.watchful:
                        self.at = start
                        builder.text(value)
                    push(value)
                    pos = end
                elif op == 0x72 or op == 0x71:  # LONG_BINPUT, BINPUT
                    index = data[pos] if op == 0x71 else U4(data, pos)[0]
                    pos += 1 if op == 0x71 else 4
                    if index == len(memo):
                        memo.append(stack[-1])
                    else:
                        self.at = start
                        self._put(index, stack[-1])
                elif op == 0x28:  # MARK
                    # `_TENSOR` matches BINGET opcodes with a one-byte memo index. Such an index is
                    # always valid if the memo has at least 256 entries.
                    usual = stack and len(memo) > 255 and not self.gaps
                    found = _TENSOR(data, pos) if usual else None
                    if found is not None and self._tensor(found, stack):
                        made += 6
                        pos = found.end()
                    else:
                        marks.append(stack)
                        stack = []
                        push = stack.append
                elif op == 0x4B:  # BININT1
                    push(data[pos])
                    pos += 1
                elif op == 0x74:  # TUPLE
                    made += 1
                    value = tuple(stack)
                    stack = marks.pop()
                    push = stack.append
                    push(value)
                elif 0x85 <= op <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
                    made += 1
                    index = len(stack) - (op - 0x84)
                    if index < 0:
                        raise IndexError
                    stack[index:] = [tuple(stack[index:])]
                elif op == 0x52:  # REDUCE
                    made += 1
                    value = stack.pop()
                    self.at = start
                    stack[-1] = builder.call(stack[-1], value)
                elif op == 0x51:  # BINPERSID
                    self.at = start
                    stack[-1] = builder.persistent(stack[-1])
                elif op == 0x89:  # NEWFALSE
                    push(False)
                elif op == 0x29:  # EMPTY_TUPLE
                    push(())
                elif op == 0x4D:  # BININT2
                    push(U2(data, pos)[0])
                    pos += 2
                elif op == 0x4A:  # BININT
                    push(I4(data, pos)[0])
                    pos += 4
                elif op == 0x7D:  # EMPTY_DICT
                    made += 1
                    push(builder.new_dict())
                elif op == 0x73:  # SETITEM
                    value = stack.pop()
                    key = stack.pop()
                    self.at = start
                    builder.set(stack[-1], (key, value))
                elif op == 0x75:  # SETITEMS
                    items = stack
                    stack = marks.pop()
                    push = stack.append
                    self.at = start
                    if len(items) % 2:
                        raise FormatError("pickle sets a key without a value")
                    builder.set(stack[-1], items)
                elif op == 0x2E:  # STOP
                    self.at = start
                    self.result = builder.end(stack, marks)
                    start = pos
                    break
                else:
                    rare = RARE.get(op)
                    self.at = start
                    if rare is None:
                        raise FormatError(f"byte 0x{op:02x} is not a pickle opcode")
                    if op not in self.rare:
                        self.rare[op] = self.base + start
                    made += 1
                    self.stack, self.pos = stack, pos
                    rare(self)
                    data, stack, pos = self.data, self.stack, self.pos
                    push = stack.append
        except Short as short:
            need = short.end - start
        except (IndexError, StructError) as error:
            need = 1 + OPERANDS.get(op, 0) if start < len(data) else 1
            if len(data) - start >= need:
                raise FormatError("pickle uses a value that is not on the stack") from error
        except UnicodeDecodeError as error:
            raise FormatError("pickle contains text that is not UTF-8") from error
        finally:
            self.stack = stack
            self.at = max(start, self.at)  # if `_tensor` raises, `self.at` is beyond `start`
            self.made += made
        self._check_limits()
        if self.result is UNSET:
            self._read_on(start, need)
        elif self.frame_end is not None and self.frame_end != self.offset:
            builder.odd("pickle ends inside a frame")

    def _tensor(self, found: re.Match[bytes], stack: list[Any]) -> bool:
        """Run all opcodes of a tensor. `found` is their match with `_TENSOR`.

        The top of the stack is the function `_rebuild_tensor_v2`. If the opcodes differ from those
        of torch.save, change nothing and return False.
        """
        (
            tag, made, length, key, put_key, device, elements, put_id, size, put_size, stride,
            put_stride, hooks, put_hooks, put_args, put_tensor,
        ) = found.groups()  # fmt: skip
        memo, builder = self.memo, self.builder
        end = found.end()
        sizes, strides = _numbers(size), _numbers(stride)  # sizes[0] is the storage offset
        puts = put_key + put_id + put_size + put_stride + put_hooks + put_args + put_tensor
        if (
            length[0] != len(key)
            or len(sizes) - 1 != size[-1] - 0x84
            or len(strides) != stride[-1] - 0x84
            or int.from_bytes(puts, "little") != len(memo) * _ONES + _NEXT
        ):
            return False
        text = key.decode()
        values = memo[tag[0]], memo[made[0]], memo[device[0]], memo[hooks[0]]
        for value in values if builder.counted else ():
            if value.__class__ in builder.counted:
                builder.pushed(value)
        if builder.watchful:
            self.at = found.start(3) - 1
            builder.text(text)
        id_ = (values[0], values[1], text, values[2], _numbers(elements)[0])
        self.at = found.start(9) - 1
        storage = builder.persistent(id_)
        self.at = end - 18
        empty = builder.call(values[3], ())
        shape, strides = sizes[1:], (*strides,)  # copy the tuples, because `_numbers` caches them
        args = (storage, sizes[0], shape, strides, False, empty)
        self.at = end - 6
        stack[-1] = tensor = builder.call(stack[-1], args)
        memo += (text, id_, shape, strides, empty, args, tensor)
        return True

    def _read_on(self, start: int, need: int) -> None:
        """Move the window to index `start` and read on until the window has `need` bytes.

        The window ends at the end of the frame or earlier.
        """
        have = len(self.data) - start
        need = max(need, have + 1)
        at = self.base + start
        if at + need > self.limit:
            raise TruncatedError("pickle ends before it is complete", hint=CUT)
        check("string_bytes", need, "bytes of one value in a pickle")
        if self.frame_end is not None and at + need > self.frame_end:
            if have:
                self.builder.odd("pickle opcode extends beyond its frame")
            self.frame_end = None
        end = self.limit if self.frame_end is None else self.frame_end
        length = min(max(need, have + min(WINDOW, max(FIRST_WINDOW, 4 * len(self.data)))), end - at)
        self.data = self.data[start:] + self.source.read(at + have, length - have)
        self.base, self.at = at, 0

    def _check_limits(self) -> None:
        check("pickle_stack", len(self.stack), "values on the pickle stack")
        check("pickle_marks", len(self.marks), "open marks of a pickle")
        check("memo_entries", len(self.memo), "stored values of a pickle")
        check(self.most, self.size, "bytes of a pickle")
        memory = self.made * self.builder.weight
        check("value_bytes", memory, "bytes of memory for the values of a pickle")

    def _take(self, size: int) -> bytes:
        """Return the next `size` bytes of the pickle, and skip these bytes."""
        end = self.pos + size
        if end > len(self.data):
            raise Short(end)
        found = self.data[self.pos : end]
        self.pos = end
        return found

    # The memo

    def _put(self, index: int, value: Any) -> None:
        """Store a memo value at an index other than `len(memo)`.

        If the index is far beyond the end of `memo`, the value is stored in `far`.
        """
        memo = self.memo
        if index < len(memo):
            if memo[index] is not UNSET:
                self.builder.odd("pickle stores two values at one memo index")
            else:
                self.gaps -= 1
            memo[index] = value
        elif index - len(memo) < 16:
            self.gaps += index - len(memo)
            memo.extend([UNSET] * (index - len(memo)))
            memo.append(value)
        else:
            if index in self.far:
                self.builder.odd("pickle stores two values at one memo index")
            self.far[index] = value
            check("memo_sparse", len(self.far), "memo values with out-of-order indices in a pickle")

    def _get(self, index: int) -> Any:
        return self.memo[index] if index < len(self.memo) else self.far.get(index, UNSET)

    def _again(self, value: Any) -> None:
        """Call `Builder.pushed` for a value from the memo, if its type is in `counted`."""
        if value is UNSET:
            raise FormatError("pickle reads an empty memo entry")
        if value.__class__ in self.builder.counted:
            self.builder.pushed(value)

    def op_memoize(self) -> None:
        value = self.stack[-1]
        if self.gaps or self.far:  # CPython uses the number of occupied entries as the index
            self._put(len(self.memo) - self.gaps + len(self.far), value)
        else:
            self.memo.append(value)

    def op_put(self) -> None:
        self._put(self._number(_INDEX), self.stack[-1])

    def op_get(self) -> None:
        value = self._get(self._number(_INDEX))
        self._again(value)
        self.stack.append(value)

    # The stack

    def _items(self) -> list[Any]:
        items = self.stack
        self.stack = self.marks.pop()
        return items

    def op_pop(self) -> None:
        """Pop the top of the stack, which may be a mark."""
        if self.stack:
            self.builder.drop([self.stack.pop()])
        else:
            self._items()

    def op_pop_mark(self) -> None:
        self.builder.drop(self._items())

    def op_dup(self) -> None:
        self._again(self.stack[-1])
        self.stack.append(self.stack[-1])

    # Containers

    def op_empty_list(self) -> None:
        self.stack.append(self.builder.new_list())

    def op_empty_set(self) -> None:
        self.stack.append(self.builder.new_set())

    def op_collect(self) -> None:
        """Pop the items above the last mark. Push a list, dict or frozenset with these items."""
        items, kind = self._items(), self.opcode.lower()
        if kind == "dict" and len(items) % 2:
            raise FormatError("pickle sets a key without a value")
        self.stack.append(self.builder.collected(kind, items))

    def op_extend(self) -> None:
        """Add the items of APPEND, APPENDS or ADDITEMS to a list or set."""
        items = [self.stack.pop()] if self.opcode == "APPEND" else self._items()
        self.builder.extend(self.stack[-1], items, "add" if self.opcode == "ADDITEMS" else "append")

    # Names and calls

    def _name(self, module: Any, name: Any) -> Any:
        """Return a class or function. Below protocol 3, translate the name from Python 2 first."""
        if module.__class__ is str and name.__class__ is str:
            check("name_bytes", len(module) + len(name), "characters of a global's name")
            if self.protocol < 3:
                module, name = renamed(module, name)
        return self.builder.name(module, name)

    def _line(self, limit: str | None = None) -> bytes:
        """Return the bytes up to the next newline, and skip the newline.

        `limit` is the name of a limit on the length of the line. If `limit` is None, a line longer
        than `line_bytes` raises FormatError.
        """
        end = self.data.find(b"\n", self.pos)
        length = (len(self.data) if end < 0 else end) - self.pos
        if limit is not None:
            check(limit, length, "bytes of a line in a pickle")
        elif length > LIMITS.line_bytes:
            raise FormatError(f"pickle contains a name of more than {LIMITS.line_bytes:,} bytes")
        if end < 0:
            raise Short(len(self.data) + 1)
        return self._take(length + 1)[:-1]

    def _read_name(self) -> Any:
        module, name = self._line(), self._line()
        return self._name(module.decode(), name.decode())

    def op_global(self) -> None:
        self.stack.append(self._read_name())

    def op_stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.stack.append(self._name(module, name))

    def op_inst(self) -> None:
        made, args = self._read_name(), tuple(self._items())
        self.stack.append(self.builder.call(made, args))

    def op_obj(self) -> None:
        items = self._items()
        self.stack.append(self.builder.call(items[0], tuple(items[1:])))

    def op_newobj(self) -> None:
        args = self.stack.pop()
        self.stack[-1] = self.builder.call(self.stack[-1], args, new=True)

    def op_newobj_ex(self) -> None:
        kwargs, args = self.stack.pop(), self.stack.pop()
        if kwargs is None:
            raise FormatError("pickle makes a call whose keyword arguments are not a dict")
        self.stack[-1] = self.builder.call(self.stack[-1], args, new=True, kwargs=kwargs)

    def op_build(self) -> None:
        state = self.stack.pop()
        self.builder.build(self.stack[-1], state)

    # Values from outside the pickle

    def op_persid(self) -> None:
        self.stack.append(self.builder.outside("PERSID", self._line()))

    def op_extension(self) -> None:
        size = int(self.opcode.removeprefix("EXT"))
        code = int.from_bytes(self._take(size), "little", signed=size == 4)
        self.stack.append(self.builder.outside(f"EXT{size}", code))

    def op_next_buffer(self) -> None:
        self.stack.append(self.builder.outside("NEXT_BUFFER", None))

    def op_readonly_buffer(self) -> None:
        self.stack[-1] = self.builder.outside("READONLY_BUFFER", self.stack[-1])

    # Framing

    def op_proto(self) -> None:
        protocol = self._take(1)[0]
        if protocol > 5:
            raise UnsupportedError(f"pickle protocol {protocol} is unknown; ckptkit reads 0 to 5")
        self.protocol = protocol

    def op_frame(self) -> None:
        length = int.from_bytes(self._take(8), "little")
        end = self.base + self.pos + length
        if self.frame_end is not None:
            self.builder.odd("pickle opens a frame inside a frame")
        if end > self.limit:
            self.builder.odd("pickle frame extends beyond the end of the pickle")
            end = self.limit
        self.frame_end = end
        self.data = self.data[: end - self.base]  # the window must not extend beyond the frame

    # Scalars

    def op_none(self) -> None:
        self.stack.append(None)

    def op_newtrue(self) -> None:
        self.stack.append(True)

    def op_binfloat(self) -> None:
        self.stack.append(F8(self._take(8))[0])

    def _number(self, form: re.Pattern[bytes]) -> int:
        """Return the integer in the next line, which must match the pattern `form`."""
        line = self._line("line_bytes")
        if form is _INT:
            line = line.removesuffix(b"L")
        if not form.fullmatch(line):
            self._malformed(line)
        check("int_bytes", len(line) // 2, "bytes of an integer in a pickle")
        return int(line)

    def _malformed(self, line: bytes) -> NoReturn:
        error = SpellingError if _READABLE.fullmatch(line) else FormatError
        raise error(f"pickle contains {line[:40]!r}, a form that no pickler writes")

    def op_int(self) -> None:
        if self.data[self.pos : self.pos + 3] in (b"00\n", b"01\n"):
            self.stack.append(self._take(3) == b"01\n")
        else:
            self.op_long()

    def op_long(self) -> None:
        self.stack.append(self._number(_INT))

    def op_float(self) -> None:
        line = self._line("line_bytes")
        if not _FLOAT.fullmatch(line):
            self._malformed(line)
        self.stack.append(float(line))

    # Strings

    def _text(self, text: str) -> None:
        if self.builder.watchful:
            self.builder.text(text)
        self.stack.append(text)

    def op_unicode(self) -> None:
        line = self._line("string_bytes")
        try:
            text = line.decode("raw-unicode-escape")
        except UnicodeDecodeError as error:
            raise FormatError("pickle contains text with a malformed escape") from error
        self._text(text)

    def op_string(self) -> None:
        """Push a string that Python 2 wrote as a quoted literal."""
        line = self._line("string_bytes")
        if not _STRING.fullmatch(line):
            is_quoted = line[:1] in (b"'", b'"') and line.rstrip()[-1:] == line[:1]
            error = SpellingError if is_quoted else FormatError
            raise error("pickle contains a string quoted in a form that no pickler writes")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            value = escape_decode(line[1:-1])[0]
        self.stack.append(self.builder.byte_string(value, "python2"))

    def op_sized(self) -> None:
        """Push an integer, a string or a byte string. A length field precedes the value."""
        width, signed, kind = SIZED[self.data[self.at]]
        size = int.from_bytes(self._take(width), "little", signed=signed)
        if size < 0:
            raise FormatError("pickle contains a value of negative length")
        if kind == "int":
            if self.base + self.pos + size <= self.limit:  # otherwise `_take` raises TruncatedError
                check("int_bytes", size, "bytes of an integer in a pickle")
            self.stack.append(int.from_bytes(self._take(size), "little", signed=True))
        elif kind == "text":
            self._text(str(self._take(size), "utf-8", "surrogatepass"))
        elif size < LARGE:
            self.stack.append(self.builder.byte_string(self._take(size), kind))
        else:
            self._stored(size, kind)

    def _stored(self, size: int, kind: str) -> None:
        """Push a reference to a large byte string, and skip the bytes without reading them."""
        at = self.base + self.pos
        if self.frame_end is not None and at + size > self.frame_end:
            self.builder.odd("pickle opcode extends beyond its frame")
            self.frame_end = None
        if at + size > self.limit:
            raise TruncatedError("pickle ends inside a byte string", hint=CUT)
        value = StoredBytes(Range(self.source, at, size), kind)
        self.stack.append(self.builder.byte_string(value, kind))
        self.skipped += size
        self.pos += size
        if self.pos > len(self.data):
            self.data, self.base, self.at, self.pos = b"", at + size, 0, 0


# Opcodes of values that follow a length field. An entry contains the number of bytes in the length
# field, True for a signed length, and the type of the value.
SIZED = {
    0x8A: (1, False, "int"), 0x8B: (4, True, "int"), 0x8C: (1, False, "text"),
    0x8D: (8, False, "text"), 0x54: (4, True, "python2"), 0x55: (1, False, "python2"),
    0x43: (1, False, "bytes"), 0x42: (4, False, "bytes"), 0x8E: (8, False, "bytes"),
    0x96: (8, False, "bytearray"),
}  # fmt: skip
NAMES = {
    0x28: "MARK", 0x29: "EMPTY_TUPLE", 0x2E: "STOP", 0x30: "POP", 0x31: "POP_MARK", 0x32: "DUP",
    0x42: "BINBYTES", 0x43: "SHORT_BINBYTES", 0x46: "FLOAT", 0x47: "BINFLOAT", 0x49: "INT",
    0x4A: "BININT", 0x4B: "BININT1", 0x4C: "LONG", 0x4D: "BININT2", 0x4E: "NONE", 0x50: "PERSID",
    0x51: "BINPERSID", 0x52: "REDUCE", 0x53: "STRING", 0x54: "BINSTRING", 0x55: "SHORT_BINSTRING",
    0x56: "UNICODE", 0x58: "BINUNICODE", 0x5D: "EMPTY_LIST", 0x61: "APPEND", 0x62: "BUILD",
    0x63: "GLOBAL", 0x64: "DICT", 0x65: "APPENDS", 0x67: "GET", 0x68: "BINGET", 0x69: "INST",
    0x6A: "LONG_BINGET", 0x6C: "LIST", 0x6F: "OBJ", 0x70: "PUT", 0x71: "BINPUT",
    0x72: "LONG_BINPUT", 0x73: "SETITEM", 0x74: "TUPLE", 0x75: "SETITEMS", 0x7D: "EMPTY_DICT",
    0x80: "PROTO", 0x81: "NEWOBJ", 0x82: "EXT1", 0x83: "EXT2", 0x84: "EXT4", 0x85: "TUPLE1",
    0x86: "TUPLE2", 0x87: "TUPLE3", 0x88: "NEWTRUE", 0x89: "NEWFALSE", 0x8A: "LONG1",
    0x8B: "LONG4", 0x8C: "SHORT_BINUNICODE", 0x8D: "BINUNICODE8", 0x8E: "BINBYTES8",
    0x8F: "EMPTY_SET", 0x90: "ADDITEMS", 0x91: "FROZENSET", 0x92: "NEWOBJ_EX",
    0x93: "STACK_GLOBAL", 0x94: "MEMOIZE", 0x95: "FRAME", 0x96: "BYTEARRAY8", 0x97: "NEXT_BUFFER",
    0x98: "READONLY_BUFFER",
}  # fmt: skip
# Methods for the opcodes that `Machine._loop` does not inline: `op_pop` for POP, and so on.
RARE: dict[int, Callable[[Machine], None]] = {
    **{
        code: getattr(Machine, f"op_{name.lower()}")
        for code, name in NAMES.items()
        if hasattr(Machine, f"op_{name.lower()}")
    },
    **dict.fromkeys((0x61, 0x65, 0x90), Machine.op_extend),
    **dict.fromkeys((0x64, 0x6C, 0x91), Machine.op_collect),
    **dict.fromkeys((0x82, 0x83, 0x84), Machine.op_extension),
    **dict.fromkeys(SIZED, Machine.op_sized),
}
# Number of operand bytes for the opcodes that `Machine._loop` inlines.
OPERANDS = {**dict.fromkeys(b"Khq", 1), **dict.fromkeys(b"M", 2), **dict.fromkeys(b"rjJX", 4)}
