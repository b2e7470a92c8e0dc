"""The pickle machine against CPython's two, on pickles that were changed and spliced.

    python -m tests.fuzz.machines COUNT [SEED]

`ckptkit.pickles.machine`, C's ``pickle.Unpickler`` and ``pickle._Unpickler`` run the same bytes.
Their ``find_class`` gives classes that only record what is done with them. Whenever a machine of
CPython comes to the end, ours has recorded the same names, calls, states and items, and gives the
same value; or it has stopped, or called something odd. Prints the first difference as bytes.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import random
import resource
import struct
import sys
import warnings
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from ckptkit.core.bytesource import Memory
from ckptkit.core.errors import CkptkitError
from ckptkit.core.tree import StoredBytes
from ckptkit.pickles.machine import Machine
from tests.fuzz.trees import today
from tests.scanning.hostile_pickles import CALLS, UNCLEAR

MEMORY = 1 << 30
MANY = 500  # containers of a value that are compared


class Odd(CkptkitError):
    """Machines may differ in what comes now."""


class Log:
    """What a machine did, in order. Objects that it made are known by their number."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.names: dict[tuple[str, str], type] = {}
        self.made = 0

    def name(self, module: str, name: str) -> type:
        """Record a name, and return the class that stands for it."""
        self.events.append(("name", module, name))
        if (module, name) not in self.names:
            self.names[module, name] = Recorder(
                "Thing", (Thing,), {"log": self, "of": (module, name)}
            )
        return self.names[module, name]

    def note(self, step: str, target: Any, *values: Any) -> None:
        self.events.append((step, plain(target), *map(plain, values)))


class Recorder(type):
    """The class of the classes that stand for names."""

    log: Log
    of: tuple[str, str]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return cls.__new__(cls, *args, **kwargs)


class Thing:
    """What a call of a name makes: it records what is done to it."""

    log: Log
    of: tuple[str, str]
    number: int

    def __new__(cls, *args: Any, **kwargs: Any) -> Thing:
        made = object.__new__(cls)
        made.number = cls.log.made
        cls.log.made += 1
        cls.log.events.append(("make", cls.of, plain(args), plain(kwargs)))
        return made

    def __setstate__(self, state: Any) -> None:
        self.log.note("build", self, state)

    def append(self, value: Any) -> None:
        self.log.note("append", self, value)

    def extend(self, values: Sequence[Any]) -> None:
        for value in values:
            self.append(value)

    def add(self, value: Any) -> None:
        self.log.note("add", self, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.log.note("set", self, key, value)


class Held:
    """What a persistent id stands for."""

    def __init__(self, log: Log, pid: Any) -> None:
        log.events.append(("persistent", plain(pid)))
        self.number = log.made
        log.made += 1


def plain(value: Any, seen: dict[int, int] | None = None) -> Any:
    """Return a value that equals those of equal values alone: their types, signs and sharing."""
    if isinstance(value, float):
        return struct.pack("<d", value)
    if isinstance(value, (Thing, Held)):
        return ("made", value.number)
    if isinstance(value, type):
        return ("class", value.of)
    if not isinstance(value, (list, tuple, dict, set, frozenset, bytearray)) or value == ():
        return (type(value).__name__, value)
    seen = {} if seen is None else seen
    if id(value) in seen:
        return ("again", seen[id(value)])
    seen[id(value)] = len(seen)
    if len(seen) > MANY:
        return "too much to compare"
    if isinstance(value, bytearray):
        return ("bytearray", bytes(value))
    items = [*value.items()] if isinstance(value, dict) else value
    if isinstance(value, dict):
        return ("dict", *((plain(key, seen), plain(each, seen)) for key, each in items))
    inside = [plain(each, {} if isinstance(value, (set, frozenset)) else seen) for each in items]
    return (
        type(value).__name__,
        *(inside if isinstance(value, (list, tuple)) else sorted(inside, key=repr)),
    )


class _Recording:
    """It does not tell its protocol: names are compared as Python 3 has them."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data), encoding="bytes")  # type: ignore[call-arg]
        self.log = Log()

    def find_class(self, module: str, name: str) -> Any:
        return self.log.name(*today(module, name))

    def persistent_load(self, pid: Any) -> Any:
        return Held(self.log, pid)


class InC(_Recording, pickle.Unpickler):
    """C's machine."""


class InPython(_Recording, pickle._Unpickler):
    """Python's machine."""


class Ours:
    """A builder that makes the values that CPython makes, and stops where that is not certain."""

    counted: frozenset[type] = frozenset()
    watchful = False
    weight = 1

    def __init__(self, data: bytes) -> None:
        self.log = Log()
        source = Memory(data)
        self.machine = Machine(source, 0, source.size, self)

    def load(self) -> Any:
        return self.machine.run()

    def new_list(self) -> Any:
        return []

    def new_dict(self) -> Any:
        return {}

    def new_set(self) -> Any:
        return set()

    def name(self, module: Any, name: Any) -> Any:
        if type(module) is not str or type(name) is not str:
            raise Odd("no strings")
        return self.log.name(*today(module, name))

    def pushed(self, name: Any) -> None: ...

    def text(self, text: str) -> None: ...

    def byte_string(self, value: bytes | StoredBytes, kind: str) -> Any:
        assert isinstance(value, bytes)
        return bytearray(value) if kind == "bytearray" else value

    def call(self, made: Any, args: Any, *, new: bool = False, kwargs: Any = None) -> Any:
        if not isinstance(made, Recorder) or type(args) is not tuple:
            raise Odd("calls what is no name")
        if kwargs is not None and (
            type(kwargs) is not dict or any(type(key) is not str for key in kwargs)
        ):
            raise Odd("keywords")
        return made(*args, **(kwargs or {}))

    def persistent(self, pid: Any) -> Any:
        return Held(self.log, pid)

    def build(self, target: Any, state: Any) -> None:
        if not isinstance(target, Thing):
            raise Odd("a state of what has none")
        target.__setstate__(state)

    def extend(self, target: Any, items: list[Any], how: str) -> None:
        if how == "append" and type(target) in (list, *self.log.names.values()):
            target.extend(items)
        elif how == "add" and type(target) in (set, *self.log.names.values()):
            for each in items:
                self._hashable(each)
                target.add(each)
        else:
            raise Odd("adds to what takes nothing")

    def set(self, target: Any, items: Sequence[Any]) -> None:
        if type(target) not in (dict, *self.log.names.values()):
            raise Odd("sets keys of what has none")
        for key, value in zip(items[0::2], items[1::2], strict=True):
            if type(target) is dict:
                self._hashable(key)
            target[key] = value

    def _hashable(self, key: Any) -> None:
        try:
            hash(key)
        except (TypeError, RecursionError):
            raise Odd("not hashable") from None

    def collected(self, kind: str, items: list[Any]) -> Any:
        if kind == "list":
            return items
        if kind == "dict":
            made: dict[Any, Any] = {}
            self.set(made, items)
            return made
        for each in items:
            self._hashable(each)
        return frozenset(items)

    def drop(self, values: list[Any]) -> None: ...

    def odd(self, reason: str) -> None:
        raise Odd(reason)

    def outside(self, opcode: str, value: Any) -> Any:
        raise Odd("from outside")

    def end(self, stack: list[Any], marks: list[list[Any]]) -> Any:
        return stack[-1]


def outcome(machine: Any) -> tuple[Any, list[Any]] | None:
    """Return the value and the events, None if the machine does not come to the end."""
    try:
        value = machine.load()
    except Exception:  # whatever the bytes make CPython say
        return None
    return plain(value), machine.log.events


def difference(data: bytes, counts: Counter[str] | None = None) -> str | None:
    """Return what CPython does otherwise than our machine, None if nothing."""
    ours = None
    counts = Counter() if counts is None else counts
    for kind in (InC, InPython):
        theirs = outcome(kind(data))
        if theirs is None:
            continue
        counts[kind.__name__] += 1
        if ours is None:
            ours = outcome(Ours(data))
            if ours is None:
                counts["stopped"] += 1
                return None
        if ours != theirs:
            return f"{kind.__name__} gives {theirs}, ckptkit {ours}"
    return None


# Material


VALUES: list[Any] = [
    None, True, [1, -2, 300, 70_000, 1 << 40, -(1 << 70), 2.5, float("inf")], "text\n\u20ac\\", b"by\xfftes",
    {"a": (1, 2), "b": ((), (1,), (1, 2, 3), (1, 2, 3, 4))}, {1, "x"}, frozenset("ab"), bytearray(b"more"),
    OrderedDict(a=1, b=[{}]), [[]] * 3, 1 + 2j, slice(1, 2), io.BytesIO, ["same", "same", ("same",)],
]  # fmt: skip
PIECES = [
    b"I01\n", b"I00\n", b"I063\n", b"I-5\n", b"L12L\n", b"F1.5\n", b"S'a\\n'\n", b'S"b"\n', b"V\\u00e9\n", b"p0\n", b"p1\n",
    b"g0\n", b"g1\n", b"q\0", b"q\1", b"h\0", b"h\1", b"r\2\0\0\0", b"j\2\0\0\0", b"\x94", b"(", b")", b"]", b"}", b"0", b"1",
    b"2", b"t", b"l", b"d", b"a", b"e", b"s", b"u", b"R", b"b", b"o", b"\x85", b"\x86", b"\x87", b"\x81", b"\x92", b"\x8f",
    b"\x90", b"\x91", b"\x93", b"cos\nsystem\n", b"ios\nsystem\n", b"c__builtin__\nset\n", b"\x8c\2os", b"\x8c\6system",
    b"U\1a", b"U\1\xff", b"T\2\0\0\0ab", b"X\1\0\0\0k", b"C\1x", b"B\1\0\0\0y", b"\x80\2", b"\x80\4", b"\x80\0", b"Q", b"P1\n",
    b"N", b"\x88", b"\x89", b"K\7", b"M\1\2", b"J\xff\xff\xff\xff", b"G?\xf8\0\0\0\0\0\0", b"\x8a\1\xff", b"\x8b\1\0\0\0\7",
    b"\x95\4\0\0\0\0\0\0\0", b"\x96\1\0\0\0\0\0\0\0z", b"\x8e\1\0\0\0\0\0\0\0z", b"\x8d\1\0\0\0\0\0\0\0z", b"\x97", b"\x98", b".",
]  # fmt: skip
_ODD_NUMBERS = ("{}", "0{}", "00{}", "+{}", "-{}", " {}", "{} ", "{}L", "1_{}", "0x{}", "0" * 25 + "{}", "0o{}")  # fmt: skip


def seeds() -> list[list[bytes]]:
    """Return pickles, each in its opcodes."""
    made = [pickle.dumps(value, protocol) for value in VALUES for protocol in range(6)]
    made += [pickle._dumps(value, protocol) for value in VALUES for protocol in range(6)]
    made += [pickletools.optimize(each) for each in made]
    made += [*CALLS.values(), *UNCLEAR.values()]
    split = [split for each in made if len(split := opcodes(each)) > 1]
    return [*split, *[tensors()] * (len(split) // 8)]


def tensors() -> list[bytes]:
    """Return a pickle of tensors as torch.save spells them, and of some that they store in the memo.

    Our machine runs each in one step, from the place in the memo on where PUT has four bytes.
    """
    names = b"ctorch\nrebuild\nq\0ctorch\nFloatStorage\nq\1ccollections\nOrderedDict\nq\2"
    texts = b"X\7\0\0\0storageq\3X\3\0\0\0cpuq\4"
    parts = [b"\x80\2", b"](", names + texts + b"\x94" * 251]
    for number, sizes in enumerate((b"K\6\x85", b"M\0\1K\2\x86", b"J\0\0\1\0K\2K\3\x87")):
        puts = [struct.pack("<I", 256 + 7 * number + n) for n in range(7)]
        key = b"%d" % (number + 9)
        spelled = b"h\0((h\3h\1X%c\0\0\0%br@h\4K\6tr@QK\0%br@%br@\x89h\2)Rr@tr@Rr@"
        pieces = (spelled % (len(key), key, sizes, sizes)).split(b"@")
        parts += opcodes(b"".join(map(bytes.__add__, pieces, puts)))
        parts += [b"j" + puts[2 * number]]
    return [*parts, b"e"]


def opcodes(data: bytes) -> list[bytes]:
    """Return a pickle cut at its opcodes, as far as they can be told."""
    places = [0]
    try:
        for _, _, place in pickletools.genops(data):
            places += [place] if place else []
    except Exception:  # a hostile one: the rest is one piece
        pass
    return [data[a:b] for a, b in zip(places, [*places[1:], len(data)], strict=True)]


def changed(rng: random.Random, pool: list[list[bytes]]) -> bytes:
    """Return a pickle of the pool, changed in one to five places."""
    parts = list(rng.choice(pool))
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(len(parts) + 1)
        way = rng.random()
        if way < 0.35:
            parts.insert(at, rng.choice(PIECES))
        elif way < 0.5:
            other = rng.choice(pool)
            first = rng.randrange(len(other))
            parts[at:at] = other[first : first + rng.randint(1, 6)]
        elif way < 0.65 and parts:
            del parts[at : at + rng.randint(1, 3)]
        elif way < 0.85 and at < len(parts):
            parts[at] = respelled(rng, parts[at])
        elif at < len(parts) and parts[at]:
            one = bytearray(parts[at])
            one[rng.randrange(len(one))] = rng.randrange(256)
            parts[at] = bytes(one)
    return b"".join(parts) + b"."


def respelled(rng: random.Random, opcode: bytes) -> bytes:
    """Return an opcode with its argument written in another way."""
    if opcode[:1] in b"ILFpg" and opcode.endswith(b"\n"):
        number = opcode[1:-1].decode("latin-1").strip("L ") or "0"
        return opcode[:1] + rng.choice(_ODD_NUMBERS).format(number).encode("latin-1") + b"\n"
    if opcode[:1] in b"qh" and len(opcode) == 2:
        return rng.choice([b"%b%c", b"%b%c"]) % (rng.choice([b"q", b"h"]), rng.randrange(4))
    if opcode[:1] in b"rj" and len(opcode) == 5:
        index = struct.unpack("<I", opcode[1:])[0] + rng.randint(-3, 3)
        return opcode[:1] + struct.pack("<I", max(0, index))
    if opcode[:1] in b"SV" and opcode.endswith(b"\n"):
        return opcode[:-1] + rng.choice([b" \n", b"\\\n", b"'\n", b"\r\n", b"\\x4\n", b"\\101'\n"])
    return opcode * 2


def strings(count: int, seed: int) -> Iterator[bytes]:
    """Yield so many changed pickles, the same ones for a seed."""
    rng, pool = random.Random(seed), seeds()
    for _ in range(count):
        yield changed(rng, pool)


def main(count: int, seed: int) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))  # C's memo is as long as an index says
    warnings.simplefilter("ignore")
    counts: Counter[str] = Counter()
    for number, data in enumerate(strings(count, seed), 1):
        found = difference(data, counts)
        if found is not None:
            print(f"{number:,}: {data!r}\n{found}")
            return 1
    print(
        f"{count:,} strings, no difference. To the end: {dict(counts)}, where ckptkit stopped too"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 0))
