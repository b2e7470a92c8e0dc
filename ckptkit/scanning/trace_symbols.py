"""Symbols for values while a pickle is traced, and how arguments are shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ckptkit.core.bytesource import ByteSource
from ckptkit.core.text import flatten
from ckptkit.core.tree import Global, Object
from ckptkit.pickles.allowlist.calls import Judged
from ckptkit.pickles.allowlist.numpy_types import NumpyType
from ckptkit.pickles.allowlist.rows import (
    BYTES,
    DICT,
    FLAG,
    FLOAT,
    INT,
    LIST,
    LITERALS,
    NAME,
    NONE,
    SET,
    STORAGE,
    TEXT,
    TUPLE,
    UNKNOWN_SORT,
    VALUES,
)

# torch/_weights_only_unpickler.py, `Unpickler.load` of torch 2.13.
WEIGHTS_ONLY_OPCODES = frozenset((
    "APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPERSID",
    "BINPUT", "BINUNICODE",
    "BUILD", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET", "EMPTY_TUPLE", "GLOBAL", "LONG1",
    "LONG_BINGET", "LONG_BINPUT",
    "MARK", "NEWFALSE", "NEWOBJ", "NEWTRUE", "NONE", "PROTO", "REDUCE", "SETITEM", "SETITEMS",
    "SHORT_BINSTRING",
    "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
))  # fmt: skip

SHOWN = 120  # characters of the arguments of a call
SOME = 8  # items that are shown
KEPT = 1 << 12  # items that a sign remembers
DEEP = 4  # levels that are shown


class Symbol:
    """A value of which only the kind is known: a container, with first items, or other.

    ``sort`` is what the allowlist calls it, ``held`` are the sorts of what it holds, ``parts`` the
    containers in it, ``count`` is its length. Nothing may change one that is ``fixed``.
    """

    __slots__ = ("count", "data", "fixed", "held", "kind", "parts", "some", "sort")

    def __init__(self, kind: str, data: ByteSource | None = None) -> None:
        self.kind = kind
        self.data = data
        self.some: list[Any] = []
        self.sort = _SIGNS.get(kind, UNKNOWN_SORT) if data is None else BYTES
        self.held = 0
        self.parts: list[Any] = []
        self.count = 0
        self.fixed = False

    def add(self, values: Sequence[Any]) -> None:
        self.count += len(values)
        if len(self.some) < KEPT:
            self.some += values[: KEPT - len(self.some)]
        for value in values:
            self.held |= VIEW.sort(value)
            if isinstance(value, (tuple, Symbol)) or VIEW.sort(value) & LITERALS:
                self.parts.append(value)  # what a call of list or dict gave is looked into as well


class Result(Object):
    """The result of a call, without its arguments: which call, its verdict, and whether its state
    was set.
    """

    __slots__ = ("built", "judged", "sort")

    def __init__(self, made: Any, judged: Judged, *, new: bool = False) -> None:
        super().__init__(made, (), new=new)
        self.judged = judged
        self.sort = judged.sort
        self.built = False


_SIGNS = {"list": LIST, "dict": DICT, "set": SET, "persistent": STORAGE}
_SORTS: dict[type, int] = {
    type(None): NONE, bool: FLAG, int: INT, float: FLOAT, str: TEXT, bytes: BYTES, tuple: TUPLE,
    Global: NAME,
}  # fmt: skip
_BITS = UNKNOWN_SORT.bit_length()
LOOKED_AT = 5_000_000  # values in containers that a trace looks at again, all in all


class SignView:
    """The sorts of symbols; see `ckptkit.pickles.trust.View`."""

    def __init__(self) -> None:
        self.left = LOOKED_AT

    def flat(self, values: tuple[Any, ...]) -> tuple[int, ...] | None:
        """Return the sorts of values and of what tuples among them hold, None where that goes
        deeper."""
        sorts = []
        for value in values:
            sort = self.sort(value)
            held = _sorts(value) if sort == TUPLE and value.__class__ is tuple else sort & LITERALS
            if held & LITERALS:
                return None
            sorts.append(sort | held << _BITS)
        return tuple(sorts)

    def sort(self, value: Any) -> int:
        """Return the sort of a sign."""
        sort = _SORTS.get(value.__class__)
        if sort is not None:
            return sort
        return int(value.sort) if isinstance(value, (Symbol, Result)) else UNKNOWN_SORT

    def inside(self, value: Any, every: bool) -> int:
        """Return the sorts of what a container holds; past the limit, the unknown sort."""
        mask = 0
        seen: set[int] = set()
        waiting = [value]
        while waiting:
            sign = waiting.pop()
            if id(sign) in seen:
                continue
            seen.add(id(sign))
            parts = sign if isinstance(sign, tuple) else getattr(sign, "parts", None)
            self.left -= 1 if parts is None else 1 + len(parts)
            if parts is None or self.left < 0:  # what a call has filled
                return VALUES | UNKNOWN_SORT
            mask |= sign.held if isinstance(sign, Symbol) else _sorts(sign)
            if every:
                waiting += [each for each in parts if self.sort(each) & LITERALS]
        return mask

    def numpy(self, value: Any) -> NumpyType | None:
        """Return the element type that a built dtype stands for."""
        return value.judged.type if isinstance(value, Result) and value.built else None

    def pairs(self, value: Any) -> list[tuple[Any, Any]] | None:
        """Return the items of a dict, None if too many. Nothing may change it from now on."""
        if not isinstance(value, Symbol) or value.sort != DICT:
            return None
        if value.count > len(value.some) or value.count % 2:
            return None
        value.fixed = True
        return list(zip(value.some[0::2], value.some[1::2], strict=True))

    def count(self, value: Any) -> int | None:
        """Return the length of a list."""
        return value.count if isinstance(value, Symbol) and value.sort == LIST else None

    def is_bytes(self, value: Any) -> bool:
        """Return whether it is a byte string, or the text that Python 2 had for one."""
        return bool(self.sort(value) & (BYTES | TEXT))


def _sorts(values: tuple[Any, ...]) -> int:
    mask = 0
    for value in values:
        mask |= VIEW.sort(value)
    return mask


VIEW = SignView()  # for the sorts alone


def class_of(pid: Any) -> Global | None:
    """Return the class of a persistent id of legacy files, ("module", class, file, source text).

    The first element may be missing. The text is never run.
    """
    made = (
        next((each for each in pid[:2] if isinstance(each, Global)), None)
        if isinstance(pid, tuple)
        else None
    )
    return made if made is not None and pid[0] in ("module", made) else None


def brief(args: Any) -> str:
    """Return arguments, shortened.

    Their values are the file's: escape them before printing.
    """
    text = "".join(_pieces(args, DEEP))
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _pieces(sign: Any, depth: int) -> list[str]:
    if isinstance(sign, (tuple, Symbol)):
        inside = (sign if isinstance(sign, tuple) else sign.some)[:SOME]
        left, right = (
            _BRACKETS.get(sign.kind, (f"<{sign.kind}", ">"))
            if isinstance(sign, Symbol)
            else ("(", ")")
        )
        if depth == 0 and inside:
            return [left, "...", right]
        items = list(flatten((", ", *_pieces(each, depth - 1)) for each in inside))[1:]
        return [left, *items, right]
    if isinstance(sign, Object):
        return [f"{sign.callable}(...)" if isinstance(sign.callable, Global) else "<a result>"]
    if isinstance(sign, Global):
        return [str(sign)[:SHOWN]]
    if isinstance(sign, (str, bytes)):
        return [repr(sign[:SHOWN])]
    return [repr(sign) if not isinstance(sign, int) or abs(sign) < 1 << 64 else "<a large integer>"]


_BRACKETS = {"list": ("[", "]"), "dict": ("{", "}"), "set": ("{", "}")}
