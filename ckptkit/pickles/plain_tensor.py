"""The code of a plain tensor, recognized at once: thirty opcodes with varying operands.

    (                                           after _rebuild_tensor_v2
    ( tag class key [r] device [r] numel t [r] Q    the storage; torch spells a GPU out each time
    offset  shape [r]  stride [r]  grad
    OrderedDict ) R [r]                         no hooks
    t [r] R r

``r`` stores a value in the memo: torch stores all that are marked, ckptkit the tensor alone. What
is written in any other way does not match, and the machine reads it opcode by opcode. Nothing
refers to the arguments as a tuple, to the id or to the hooks of a tensor again: they are not
stored, and a reference to one finds UNSET.

A dict has many tensors of few kinds, mostly in an order that repeats. In the code of one kind, only
the names, the keys of the storages and the numbers of the memo entries differ: after a tensor,
`PlainTensors` expects the kind that came after its kind the last time, and compares the code with
what that must be, the name included.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from struct import Struct
from typing import Any

from ckptkit.core.tensor import Storage, Tensor, TypedStorage
from ckptkit.core.tree import Global, Node
from ckptkit.pickles.globals import Reducer, ordered_dict, tensor_v2
from ckptkit.pickles.opcode_values import U4, UNSET

_GET, _PUT, _INT = rb"h(.)", rb"(?:r(....))?", rb"(?:K.|M..|J....)"
_DEVICE = rb"(?:h(.)|X(.)\0\0\0([a-z]{1,9}:[0-9]{1,3})%b)" % _PUT
_SIZES = rb"(%b\x85|%b{2}\x86|%b{3}\x87|\(%b{4,8}t)" % (_INT, _INT, _INT, _INT)
_CODE = (
    rb"\(", _GET, rb"(h.|j....)", rb"X(.)\0\0\0([0-9]{1,20})", _PUT, _DEVICE,
    rb"(%b)t" % _INT, _PUT, rb"Q",
    rb"(%b)" % _INT, _SIZES, _PUT, _SIZES, _PUT, rb"([\x88\x89])", _GET,
    rb"\)R", _PUT, rb"t", _PUT, rb"Rr(....)",
)  # fmt: skip
_match = re.compile(b"".join(_CODE), re.DOTALL).match
_integers = re.compile(_INT, re.DOTALL).findall

_SIZE, _KEY, _PUTS = 3, 4, (5, 9, 11, 14, 16, 19, 20, 21)  # groups

_EIGHT, _SEVEN, _ONE = Struct("<8I").pack, Struct("<7I").pack, Struct("<I").pack
TEXT_SIZES = {b"X%c\0\0\0" % size: size for size in range(256)}  # by the code before a short text
_MOST_KINDS = 256


class Code:
    """Code that occurs again and again, in which only the numbers of the memo entries differ.

    These are that of the first, n, plus a constant, in 4 bytes each: as one integer, the code is
    ``rest + n * unit``. No number reaches 2 ** 32, so that nothing is carried.
    """

    def __init__(self, code: bytes, puts: Iterable[int], n: int) -> None:
        """Take the code as it occurs once: the offsets of the numbers, and its n."""
        self.size = len(code)
        self.unit = sum(1 << 8 * at for at in puts)
        self.rest = int.from_bytes(code, "little") - n * self.unit


@dataclass(slots=True, eq=False)
class Kind:
    """Tensors that differ in name and storage only, stored in the memo one after the other."""

    before: Code  # from the name to the key of the storage
    after: Code  # from the key to the end
    typed: TypedStorage  # that of one of them
    between: tuple[Node, ...] | None  # stored after the key; None: name and tensor alone are
    like: Tensor
    following: Kind | None = field(default=None)  # the kind that came after it the last time


Kinds = dict[tuple[int, int], Kind]
Another = Callable[[TypedStorage, str], Storage | None]  # with this key; None if that is not new


def no_other(like: TypedStorage, key: str) -> None:
    """Return no storage: each is asked for by its persistent id."""


class PlainTensors:
    """Reads the tensors of one pickle.

    Its machine has this memo and these reducers (by id of the Global), and clears `kinds` when it
    overwrites an entry of the memo, to which they may refer.
    """

    def __init__(
        self,
        memo: list[Node],
        reducers: dict[int, Reducer],
        persistent_load: Callable[[Node], Node],
        another: Another,
        kinds: Kinds,
    ) -> None:
        self._memo = memo
        self._reducers = reducers
        self._persistent_load = persistent_load
        self._another = another
        self._values = _Values()
        self._devices: dict[bytes, str] = {}
        self._alike: dict[tuple[object, ...], Tensor] = {}  # each checked once
        self._kinds = kinds
        self._last: Kind | None = None  # that of the tensor before, if it is in `kinds`

    def read(self, data: bytes, pos: int, stack: list[Node]) -> int:
        """Read a tensor's code at `pos`, after a MARK; return the offset after it, or 0.

        On top of `stack` is what is called. The names and tensors that follow are read, too, as
        far as they are of the kinds that are expected.
        """
        found = _match(data, pos)
        if found is None:
            return 0
        (
            tag, kind, size, key, put_key, known, length, spelled, put_device, numel, put_id,
            offset, shape, put_shape, stride, put_stride, grad, hooks, put_hooks, put_args, put,
        ) = found.groups(b"")  # fmt: skip
        memo, reducers, values = self._memo, self._reducers, self._values
        n = len(memo)
        puts = b"".join(
            (put_key, put_device, put_id, put_shape, put_stride, put_hooks, put_args, put)
        )
        if spelled:
            whole = puts == _EIGHT(n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6, n + 7)
        else:
            whole = puts == _SEVEN(n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6)
        if (
            not (whole or puts == _ONE(n))
            or size[0] != len(key)
            or (spelled and length[0] != len(spelled))
        ):
            return 0
        try:
            made, tag, hooks = stack[-1], memo[tag[0]], memo[hooks[0]]
            device: Node = (
                self._devices.setdefault(spelled, spelled.decode()) if spelled else memo[known[0]]
            )
            kind = memo[kind[1]] if len(kind) == 2 else memo[U4(kind, 1)[0]]
        except IndexError:
            return 0
        if (
            reducers.get(id(made)) is not tensor_v2 or reducers.get(id(hooks)) is not ordered_dict
            or tag.__class__ is not str or kind.__class__ is not Global
            or device.__class__ is not str
        ):  # fmt: skip
            return 0
        name, sizes, steps = key.decode(), values[shape], values[stride]
        typed = self._persistent_load((tag, kind, name, device, values[numel]))
        if typed.__class__ is not TypedStorage or typed.dtype is None or typed.stop is not None:
            return 0
        first = values[offset]
        like = typed.dtype.name, typed.storage.record.length, sizes, steps, first, grad
        alike = self._alike.get(like)
        again = alike is not None
        if alike is None:
            alike = Tensor(typed.storage, typed.dtype, sizes, steps, first, grad == b"\x88")
            self._alike[like] = alike
        between = (*((device,) if spelled else ()), UNSET, sizes, steps, UNSET, UNSET)
        expecting = again and self._expect(found, stack, typed, between if whole else None, alike)
        stack[-1] = tensor = alike.over(typed.storage)
        if whole:
            memo += (name, *between, tensor)
        else:
            memo.append(tensor)
        return self._read_on(data, found.end(), stack) if expecting else found.end()

    def _expect(
        self,
        found: re.Match[bytes],
        stack: list[Node],
        typed: TypedStorage,
        between: tuple[Node, ...] | None,
        like: Tensor,
    ) -> bool:
        """Make the kind of a tensor the one that is expected after the one before; return if it is.

        The tensor must follow its name, stored in the memo as one of torch's dicts is, and what is
        called must be fetched by one byte.
        """
        data, memo = found.string, self._memo
        start = found.start() - 3  # of the BINGET before the MARK
        if start < 0 or data[start] != 0x68 or data[start + 1] >= len(memo):
            return False
        if memo[data[start + 1]] is not stack[-1] or len(stack) < 2 or memo[-1] is not stack[-2]:
            return False
        n = len(memo) - 1  # the entry of the name
        end = found.end(_KEY)
        puts = [found.start(put) - end for put in _PUTS if found[put] is not None]
        code = b"r" + n.to_bytes(4, "little") + data[start : found.start(_SIZE) - 1]
        before, after = Code(code, [1], n), Code(data[end : found.end()], puts, n)
        key = before.rest, after.rest
        kind = self._kinds.get(key)
        if kind is None and len(self._kinds) < _MOST_KINDS:
            kind = self._kinds[key] = Kind(before, after, typed, between, like)
        if self._last is not None:
            self._last.following = kind
        self._last = kind
        return kind is not None

    def _read_on(self, data: bytes, pos: int, stack: list[Node]) -> int:
        """Read names and tensors at `pos` while they are of the kinds that are expected.

        Return the offset after them. The first that is not as expected is left to the machine.
        """
        memo, another, integer = self._memo, self._another, int.from_bytes
        while self._last is not None and self._last.following is not None:
            kind = self._last.following
            before, after, n = kind.before, kind.after, len(memo)
            name_at = pos + 5
            code_at = name_at + TEXT_SIZES.get(data[pos:name_at], len(data))
            key_at = code_at + before.size + 5
            after_at = key_at + TEXT_SIZES.get(data[key_at - 5 : key_at], len(data))
            end = after_at + after.size
            key = data[key_at:after_at]
            if (
                end > len(data)
                or integer(data[code_at : key_at - 5], "little") != before.rest + n * before.unit
                or integer(data[after_at:end], "little") != after.rest + n * after.unit
                or not key.isdigit()
            ):
                break
            try:
                name = str(data[name_at:code_at], "utf-8", "surrogatepass")
            except UnicodeDecodeError:
                break
            text = key.decode()
            storage = another(kind.typed, text)
            if storage is None:
                break
            tensor = kind.like.over(storage)
            stack += (name, tensor)
            if kind.between is None:
                memo += (name, tensor)
            else:
                memo += (name, text, *kind.between, tensor)
            self._last, pos = kind, end
        return pos


class _Values(dict[bytes, Any]):
    """Integers, and tuples of them, by the code that spells them: many tensors are of few sizes."""

    def __missing__(self, code: bytes) -> int | tuple[int, ...]:
        parts = _integers(code)
        numbers = [int.from_bytes(part[1:], "little", signed=len(part) == 5) for part in parts]
        self[code] = value = numbers[0] if parts[0] == code else tuple(numbers)
        return value
