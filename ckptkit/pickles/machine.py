"""The pickle machine: reads a pickle symbolically. Nothing is imported, nothing called.

A pickle is a program for a stack machine (CPython's Lib/pickletools.py describes every opcode).
This one runs protocols 0 to 5 and builds the nodes of `ckptkit.tree`: containers and scalars become
themselves, a class or function becomes a Global, a call becomes what `ckptkit.pickles.globals`
knows it to mean, or else an Object.

The stream is read through a window, so that a pickle without a known length (legacy checkpoints)
and long byte strings (numpy arrays) cost no more memory than they must: byte strings of 64 KiB and
more stay in the source, as a Blob. The machine has one loop with the frequent opcodes inline, most
frequent first; it is the hottest code of ckptkit (4 million opcodes for 100,000 tensors), and
longer than style allows for that reason. All others are methods in a table
(`ckptkit.pickles.opcodes`, `opcode_values`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from struct import error as StructError  # noqa: N812
from typing import NamedTuple

from ckptkit.core.bytesource import ByteSource
from ckptkit.core.errors import FormatError, TruncatedError
from ckptkit.core.limits import check
from ckptkit.core.text import plural
from ckptkit.core.tree import Global, Node, Object, OrderedMapping, collector_paused
from ckptkit.pickles.globals import REDUCERS, Reducer
from ckptkit.pickles.opcode_values import (
    CUT,
    I4,
    NO_TUPLE,
    U2,
    U4,
    UNSET,
    NotStoredError,
    Short,
    python2_string,
)
from ckptkit.pickles.opcodes import OPERANDS, RARE, Opcodes
from ckptkit.pickles.plain_tensor import Another, PlainTensors, no_other
from ckptkit.pickles.plain_versions import PlainVersions

WINDOW = (
    1 << 20
)  # bytes read at once, after smaller windows: the pickles before a legacy checkpoint are tiny
FIRST_WINDOW = 1 << 14

# The window, an offset, the stack and, of versions, the stacks below the marks -> the offset after.
ReadTensor = Callable[[bytes, int, list[Node]], int]
ReadVersion = Callable[[bytes, int, list[Node], list[list[Node]]], int]


class Unpickled(NamedTuple):
    root: Node
    globals: tuple[Global, ...]  # every class and function that is named, in order
    protocol: int
    stop: int  # offset in the source of the first byte after STOP
    warnings: tuple[str, ...]


def unpickle(
    source: ByteSource,
    start: int = 0,
    stop: int | None = None,
    *,
    persistent_load: Callable[[Node], Node] | None = None,
    another: Another = no_other,
    reducers: Mapping[tuple[str, str], Reducer] = REDUCERS,
) -> Unpickled:
    """Return the tree of the pickle at `start`, which must end before `stop` (default: the end).

    `persistent_load` turns a persistent id into a node, `another` makes a new storage that differs
    from one in its key alone; `reducers` are the calls that are known.
    Raises FormatError, TruncatedError, LimitError, UnsupportedError, and whatever `persistent_load`
    raises.
    """
    machine = partial(
        _Machine, source, start, source.size if stop is None else stop, persistent_load, reducers
    )
    with collector_paused():
        try:
            return machine().run(another)
        except NotStoredError:  # what nothing refers to is left out there
            pass
        return machine().run(None)


def _read_none(*_: object) -> int:
    """Read nothing, in the place of `PlainTensors.read` and `PlainVersions.read`."""
    return 0


class _Machine(Opcodes):
    def run(self, another: Another | None) -> Unpickled:
        """Run all opcodes; one by one if `another` is None."""
        plain_tensor: ReadTensor = _read_none
        plain_version: ReadVersion = _read_none
        if another is not None:
            plain_tensor = PlainTensors(
                self.memo, self.reducers, self.persistent_load, another, self.kinds
            ).read
            plain_version = PlainVersions(self.memo).read
        while not self.stopped:
            self._loop(plain_tensor, plain_version)
        if len(self.stack) != 1 or self.marks:
            raise FormatError(
                f"pickle ends with {len(self.stack)} values and {len(self.marks)} open marks, not "
                "one value"
            )
        root = self.stack[0]
        warnings = []
        if number := self.check_dropped(root):
            code = "functions and classes that dill made from code"
            warnings.append(f"{plural(number, 'attribute')} of {code} are not read")
        swap: dict[int, Node] = {
            id(made): made.tensor for made in self.tensors if len(made.steps) == 1
        }
        if self.pairs:
            for target, pairs in self.pairs.values():
                pairs.state = target.state if isinstance(target, OrderedMapping) else None
            swap.update((key, pairs) for key, (_, pairs) in self.pairs.items())
            warnings.append(f"{len(self.pairs)} mappings have repeated or unhashable keys")
        if swap:
            from ckptkit.core.rebuilding import rebuild  # few pickles need it

            root = rebuild(root, swap=swap)
        return Unpickled(
            root, tuple(self.globals.values()), self.protocol, self.base, tuple(warnings)
        )

    def _loop(  # noqa: C901  a call for each opcode would take twice as long
        self, plain_tensor: ReadTensor, plain_version: ReadVersion
    ) -> None:
        """Run opcodes until STOP, or until the window is used up; `base` is then where to go on."""
        data, stack, memo = self.data, self.stack, self.memo
        marks, reducers, persistent_load = self.marks, self.reducers, self.persistent_load
        pairs = self.pairs
        push = stack.append
        remember = memo.append
        pos = start = op = 0
        need = 1
        try:
            while True:
                start = pos
                op = data[pos]
                pos += 1
                if op == 0x72:  # LONG_BINPUT
                    index = U4(data, pos)[0]
                    pos += 4
                    if index == len(memo):
                        remember(stack[-1])
                    else:
                        self._put(index, stack[-1])
                elif op == 0x68:  # BINGET
                    index = data[pos]
                    pos += 1
                    value = memo[index] if index < len(memo) else self._get(index)
                    if value is UNSET:
                        raise NotStoredError
                    push(value)
                elif op == 0x4B:  # BININT1
                    push(data[pos])
                    pos += 1
                elif op == 0x58:  # BINUNICODE
                    end = pos + 4 + U4(data, pos)[0]
                    if end > len(data):
                        raise Short(end)
                    push(str(data[pos + 4 : end], "utf-8", "surrogatepass"))
                    pos = end
                elif op == 0x28:  # MARK
                    end = plain_tensor(data, pos, stack)
                    if end:
                        pos = end
                        continue
                    marks.append(stack)
                    stack = []
                    push = stack.append
                elif op == 0x74:  # TUPLE
                    value = tuple(stack)
                    stack = marks.pop()
                    push = stack.append
                    push(value)
                elif op == 0x52:  # REDUCE
                    items = stack.pop()
                    value = stack[-1]
                    if items.__class__ is not tuple:
                        raise FormatError(NO_TUPLE)
                    reducer = reducers.get(id(value))
                    stack[-1] = Object(value, items) if reducer is None else reducer(value, items)
                elif op == 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                elif op == 0x86:  # TUPLE2
                    value = stack.pop()
                    stack[-1] = (stack[-1], value)
                elif op == 0x51:  # BINPERSID
                    stack[-1] = persistent_load(stack[-1])
                elif op == 0x4D:  # BININT2
                    push(U2(data, pos)[0])
                    pos += 2
                elif op == 0x89:  # NEWFALSE
                    push(False)
                elif op == 0x29:  # EMPTY_TUPLE
                    push(())
                elif op == 0x71:  # BINPUT
                    index = data[pos]
                    pos += 1
                    if index == len(memo):
                        remember(stack[-1])
                    else:
                        self._put(index, stack[-1])
                elif op == 0x4A:  # BININT
                    push(I4(data, pos)[0])
                    pos += 4
                elif op == 0x7D:  # EMPTY_DICT
                    end = plain_version(data, pos, stack, marks)
                    if end:
                        pos = end
                        continue
                    push({})
                elif op == 0x73:  # SETITEM
                    value = stack.pop()
                    key = stack.pop()
                    target = stack[-1]
                    if (
                        target.__class__ is dict
                        and key.__class__ is str
                        and key not in target
                        and not pairs
                    ):
                        target[key] = value
                    else:
                        self._set(target, [key], [value])
                elif op == 0x75:  # SETITEMS
                    items = stack
                    stack = marks.pop()
                    push = stack.append
                    if len(items) % 2:
                        raise FormatError("pickle sets a key without a value")
                    self._set(stack[-1], items[0::2], items[1::2])
                elif op == 0x6A:  # LONG_BINGET
                    index = U4(data, pos)[0]
                    pos += 4
                    value = memo[index] if index < len(memo) else self._get(index)
                    if value is UNSET:
                        raise NotStoredError
                    push(value)
                elif op == 0x87:  # TUPLE3
                    value = stack.pop()
                    key = stack.pop()
                    stack[-1] = (stack[-1], key, value)
                elif op == 0x94:  # MEMOIZE
                    remember(stack[-1])
                elif op == 0x8C:  # SHORT_BINUNICODE
                    end = pos + 1 + data[pos]
                    if end > len(data):
                        raise Short(end)
                    push(str(data[pos + 1 : end], "utf-8", "surrogatepass"))
                    pos = end
                elif op == 0x55:  # SHORT_BINSTRING
                    end = pos + 1 + data[pos]
                    if end > len(data):
                        raise Short(end)
                    push(python2_string(data[pos + 1 : end]))
                    pos = end
                elif op == 0x2E:  # STOP
                    self.stopped = True
                    start = pos
                    break
                else:
                    rare = RARE.get(op)
                    if rare is None:
                        raise FormatError(f"byte 0x{op:02x} is not a pickle opcode")
                    self.stack = stack
                    pos = rare(self, data, pos)
                    stack = self.stack
                    push = stack.append
                    if self.data is not data:
                        data = self.data
        except Short as short:
            need = short.end - start
        except (IndexError, StructError) as error:
            need = 1 + OPERANDS.get(op, 0) if start < len(data) else 1
            if len(data) - start >= need:
                raise FormatError(
                    f"pickle opcode 0x{op:02x} takes a value that is not there"
                ) from error
        except UnicodeDecodeError as error:
            raise FormatError("pickle holds text that is not UTF-8") from error
        self.stack = stack
        self._check_limits()
        if self.stopped:
            self._stop(start)
        else:
            self._read_on(start, need)

    def _read_on(self, start: int, need: int) -> None:
        """Move the window to `start`, at least `need` bytes long. A window never reaches beyond its
        frame."""
        have = len(self.data) - start
        need = max(need, have + 1)
        check("string_bytes", need, "bytes of one value in a pickle")
        at = self.base + start
        if have == 0 and at == self.frame_end:
            self.frame_end = None
        end = self.end if self.frame_end is None else self.frame_end
        if at + need > end:
            if self.frame_end is not None:
                raise FormatError("pickle opcode reaches beyond its frame")
            raise TruncatedError("pickle ends before it is complete", hint=CUT)
        length = min(max(need, have + min(WINDOW, max(FIRST_WINDOW, 4 * len(self.data)))), end - at)
        self.data = self.data[start:] + self.source.read(at + have, length - have)
        self.base = at

    def _stop(self, after: int) -> None:
        if self.frame_end is not None and self.frame_end != self.base + after:
            raise FormatError("pickle ends inside a frame")
        self.base += after
        self._check_size()

    def _check_limits(self) -> None:
        check("pickle_stack", len(self.stack), "values on the pickle stack")
        check("pickle_marks", len(self.marks), "open marks of a pickle")
        check("memo_entries", len(self.memo), "stored values of a pickle")
        self._check_size()

    def _check_size(self) -> None:
        check("pickle_bytes", self.base - self.start - self.skipped, "bytes of a pickle")
