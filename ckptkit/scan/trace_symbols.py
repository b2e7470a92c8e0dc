"""What stands for a value while a pickle is traced, and how arguments are shown."""

from __future__ import annotations

from codecs import escape_decode
from pickletools import opcodes
from typing import Any
from warnings import catch_warnings, simplefilter

from ckptkit.core.bytesource import ByteSource
from ckptkit.core.tree import Global, Object
from ckptkit.scan.trace_window import Stop

# torch/_weights_only_unpickler.py, `Unpickler.load` of torch 2.13.
WEIGHTS_ONLY_OPCODES = frozenset((
    "APPEND", "APPENDS", "BINFLOAT", "BINGET", "BININT", "BININT1", "BININT2", "BINPERSID", "BINPUT", "BINUNICODE",
    "BUILD", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_SET", "EMPTY_TUPLE", "GLOBAL", "LONG1", "LONG_BINGET", "LONG_BINPUT",
    "MARK", "NEWFALSE", "NEWOBJ", "NEWTRUE", "NONE", "PROTO", "REDUCE", "SETITEM", "SETITEMS", "SHORT_BINSTRING",
    "STOP", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3",
))  # fmt: skip

SHOWN = 120  # characters of the arguments of a call
SOME = 8  # items that a sign remembers, to be shown
DEEP = 4  # levels that are shown

# Attributes that an unpickler looks up on an object and calls; an instance can have its own.
HOOKS = frozenset({"__setstate__", "append", "extend", "add", "__reduce__", "__reduce_ex__", "__del__", "__class__"})

# How files begin that may have pickles inside: pickles since protocol 2, zip, gzip, bzip2, xz, numpy.
_HEADS = (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK\3\4", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x93NUMPY")
_OPCODES = frozenset(ord(each.code) for each in opcodes)  # a pickle without a protocol may begin with any of them


class Sign:
    """A value that nothing but its kind is known of: a container, with its first items, or something from outside."""

    __slots__ = ("data", "hook", "kind", "some")

    def __init__(self, kind: str, data: ByteSource | None = None) -> None:
        self.kind = kind
        self.data = data
        self.some: list[Any] = []
        self.hook: str | None = None  # one of HOOKS that a dict has as a key, for something that can be called

    def add(self, values: list[Any]) -> None:
        self.some += values[: SOME - len(self.some)]

    def set(self, pairs: list[Any]) -> None:
        self.add(pairs)
        self.hook = hook_of(pairs) or self.hook


def hook_of(pairs: list[Any]) -> str | None:
    """The key that would replace a method that unpicklers call, if one of the values could be called."""
    for key, value in zip(pairs[0::2], pairs[1::2], strict=False):
        if isinstance(value, (Global, Object)) and (isinstance(key, Object) or (isinstance(key, str) and key in HOOKS)):
            return key if isinstance(key, str) else "(a computed name)"
    return None


def number(data: bytes, signed: bool = False) -> int:
    return int.from_bytes(data, "little", signed=signed)


def text_of(line: bytes) -> str | bytes:
    """What stands between the quotes of a literal of Python 2: text where it is ASCII."""
    line = line.strip()
    if len(line) < 2 or line[:1] not in (b"'", b'"') or line[-1:] != line[:1]:
        raise Stop("a string without its quotes")
    try:
        with catch_warnings():
            simplefilter("ignore")
            data = escape_decode(line[1:-1])[0]
    except ValueError:
        raise Stop("a string with a malformed escape") from None
    return data.decode() if data.isascii() else data


def class_of(pid: Any) -> Global | None:
    """The class that a persistent id of legacy files stands for: ("module", class, file, source text), or without the
    first. Nobody runs the text."""
    made = next((each for each in pid[:2] if isinstance(each, Global)), None) if isinstance(pid, tuple) else None
    return made if made is not None and pid[0] in ("module", made) else None


def looks_like_a_file(head: bytes) -> bool:
    """Whether bytes that begin so may be one of the files that have pickles inside, or a pickle."""
    return head.startswith(_HEADS) or looks_like_a_pickle(head)


def looks_like_a_pickle(head: bytes) -> bool:
    """Whether bytes that begin so may be a pickle: those of protocol 0 and 1 have no signature."""
    return len(head) > 2 and head[0] in _OPCODES


def brief(args: Any) -> str:
    """Arguments, shortened: their values are the file's, and are escaped by whoever prints them."""
    text = "".join(_pieces(args, DEEP))
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _pieces(sign: Any, depth: int) -> list[str]:
    if isinstance(sign, (tuple, Sign)):
        inside = sign[:SOME] if isinstance(sign, tuple) else sign.some
        left, right = _BRACKETS.get(sign.kind, (f"<{sign.kind}", ">")) if isinstance(sign, Sign) else ("(", ")")
        if depth == 0 and inside:
            return [left, "...", right]
        items = [piece for each in inside for piece in (", ", *_pieces(each, depth - 1))][1:]
        return [left, *items, right]
    if isinstance(sign, Object):
        return [f"{sign.callable}(...)" if isinstance(sign.callable, Global) else "<a result>"]
    if isinstance(sign, Global):
        return [str(sign)[:SHOWN]]
    if isinstance(sign, (str, bytes)):
        return [repr(sign[:SHOWN])]
    return [repr(sign) if not isinstance(sign, int) or abs(sign) < 1 << 64 else "<a large integer>"]


_BRACKETS = {"list": ("[", "]"), "dict": ("{", "}"), "set": ("{", "}")}
