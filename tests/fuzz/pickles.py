"""Pickles made opcode by opcode: right about the stack most of the time, and never run.

The choices are taken from bytes, so that whoever changes the bytes changes the pickle. ``plain``
ones hold nothing but what `torch.load(weights_only=True)` may make, in its own opcodes: torch says
what they mean.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from random import Random

DEPTH = 6
STORAGES = {"0": 48, "1": 12, "2": 16, "3": 0}  # key of a storage in the archive, and its bytes
CLASSES = {"Float": 4, "Long": 8, "Half": 2, "Bool": 1, "ComplexFloat": 8, "BFloat16": 2, "Byte": 1}
NUMBERS = (0, 1, 2, 3, -1, 255, 256, 65535, -(2**31), 2**31, 2**63, -(2**63), 2**64, 2**70, 10**20)
TEXTS = (
    "",
    "a",
    "model",
    "module.x",
    "état",
    "\U0001f600",
    "new\nline",
    "x" * 300,
    "a.b",
    "0",
    "\x00",
)
FLOATS = (0.0, -0.0, 1.5, float("inf"), float("-inf"), float("nan"), 5e-324, 1e308)
HOSTILE = ("os system", "posix system", "builtins eval", "builtins getattr", "torch.storage _load_from_bytes",
           "torch load", "copyreg _reconstructor", "functools partial", "pathlib os.system",
           "torch _utils._rebuild_tensor", "x \ny", "mine.nets Net",
           "numpy.core.multiarray _reconstruct", "datetime datetime", "codecs encode")  # fmt: skip


class Choices(Random):
    """Draws from bytes; zeros when there are no more."""

    def __new__(cls, data: bytes) -> Choices:
        return super().__new__(cls)

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def getrandbits(self, k: int) -> int:
        count = -(-k // 8)
        taken = self._data[self._at : self._at + count]
        self._at += count
        return int.from_bytes(taken, "big") >> (8 * count - k) if len(taken) == count else 0

    def random(self) -> float:
        return self.getrandbits(16) / (1 << 16)


def generate(data: bytes, *, plain: bool) -> bytes:
    """The pickle that these bytes choose."""
    return _Writer(Choices(data), plain).pickle()


class _Writer:
    def __init__(self, choices: Choices, plain: bool) -> None:
        self.random = choices
        self.plain = plain
        self.memo: list[bool] = []  # whether what is stored can be a key
        self.makers = [*_PLAIN, *(() if plain else _ODD)]

    def pickle(self) -> bytes:
        protocol = 2 if self.plain else self.random.choice((2, 2, 3, 4, 5))
        body = self.mapping(DEPTH) if self.plain else self.value(DEPTH)
        made = bytes((0x80, protocol)) + body + b"."
        return made if self.plain else self.broken(made)

    def broken(self, made: bytes) -> bytes:
        """An opcode too many or too few, in one of five."""
        if self.random.random() < 0.8:
            return made
        at = self.random.randrange(len(made) + 1)
        return (
            made[:at]
            + bytes([self.random.choice(_OPCODES)])
            + made[at + self.random.choice((0, 0, 1)) :]
        )

    def value(self, depth: int) -> bytes:
        """Opcodes that leave one value."""
        if depth == 0 or not self.random.left:
            return self.key()
        made: bytes = self.random.choice(self.makers)(self, depth - 1)
        return made + self.put(False) if self.random.random() < 0.2 else made

    def values(self, depth: int) -> bytes:
        return b"".join(self.value(depth) for _ in range(self.random.randrange(5)))

    # Scalars

    def key(self, depth: int = 0) -> bytes:
        """Return opcodes of a value that can be a key of a dict."""
        made = self.random.choice((self.none, self.text, self.text, self.integer, self.real))(depth)
        return made + self.put(True) if self.random.random() < 0.15 else made

    def none(self, depth: int) -> bytes:
        return self.random.choice((b"N", b"\x88", b"\x89"))

    def text(self, depth: int = 0) -> bytes:
        return self.text_of(self.random.choice(TEXTS))

    def text_of(self, value: str) -> bytes:
        data = value.encode()
        if not self.plain and len(data) < 256 and self.random.random() < 0.3:
            return b"\x8c" + bytes([len(data)]) + data
        if value.isascii() and len(data) < 256 and self.random.random() < 0.1:
            return b"U" + bytes([len(data)]) + data
        return b"X" + struct.pack("<I", len(data)) + data

    def integer(self, depth: int = 0) -> bytes:
        value = self.random.choice((*NUMBERS, self.random.randrange(300)))
        if 0 <= value < 256 and self.random.random() < 0.7:
            return b"K" + bytes([value])
        if 0 <= value < 65536 and self.random.random() < 0.5:
            return b"M" + struct.pack("<H", value)
        if -(2**31) <= value < 2**31 and self.random.random() < 0.7:
            return b"J" + struct.pack("<i", value)
        return self.long(value)

    def long(self, value: int) -> bytes:
        """Longer than it need be now and then."""
        size = (value.bit_length() >> 3) + 1 + self.random.choice((0, 0, 0, 3))
        return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)

    def real(self, depth: int = 0) -> bytes:
        return b"G" + struct.pack(">d", self.random.choice(FLOATS))

    # Containers

    def mapping(self, depth: int) -> bytes:
        return self.set_items(b"}", depth)

    def set_items(self, made: bytes, depth: int) -> bytes:
        if self.random.random() < 0.2:
            made += self.put(False)
        number = self.random.randrange(5)
        keys = [
            self.text_of(f"k{at}") if self.random.random() < 0.7 else self.key()
            for at in range(number)
        ]
        if self.random.random() < 0.3:
            return made + b"".join(key + self.value(depth) + b"s" for key in keys)
        return made + b"(" + b"".join(key + self.value(depth) for key in keys) + b"u"

    def sequence(self, depth: int) -> bytes:
        made = b"]" + (self.put(False) if self.random.random() < 0.2 else b"")
        if self.random.random() < 0.3:
            return made + self.value(depth) + b"a"
        return made + b"(" + self.values(depth) + b"e"

    def tuple(self, depth: int) -> bytes:
        number = self.random.randrange(5)
        if 0 < number < 4 and self.random.random() < 0.6:
            return (
                b"".join(self.value(depth) for _ in range(number))
                + b"\x85\x86\x87"[number - 1 : number]
            )
        return b")" if number == 0 else b"(" + self.values(depth) + b"t"

    def put(self, hashable: bool) -> bytes:
        self.memo.append(hashable)
        index = len(self.memo) - 1
        return b"q" + bytes([index]) if index < 256 else b"r" + struct.pack("<I", index)

    def get(self, depth: int) -> bytes:
        if not self.memo:
            return self.key()
        index = self.random.randrange(len(self.memo))
        return (
            b"h" + bytes([index])
            if index < 256 and self.random.random() < 0.8
            else b"j" + struct.pack("<I", index)
        )

    # Calls

    def call(self, name: str, *args: bytes) -> bytes:
        module, _, attribute = name.partition(" ")
        made = self.named(module, attribute)
        if len(args) < 4 and self.random.random() < 0.5:
            return made + b"".join(args) + b")\x85\x86\x87"[len(args) : len(args) + 1] + b"R"
        return made + b"(" + b"".join(args) + b"tR"

    def named(self, module: str, attribute: str) -> bytes:
        if not self.plain and self.random.random() < 0.3:
            return self.text_of(module) + self.text_of(attribute) + b"\x93"
        return f"c{module}\n{attribute}\n".encode()

    def harmless(self, depth: int) -> bytes:
        """Return opcodes for a value that has no opcode."""
        kind = self.random.randrange(8)
        if kind == 0:
            return self.call(
                "__builtin__ set",
                b"]("
                + b"".join(self.random.choice((self.text, self.integer))() for _ in range(3))
                + b"e",
            )
        if kind == 1:
            return self.call("torch Size", self.sizes(self.random.randrange(4)))
        if kind == 2:
            return self.call(
                "torch device", self.text_of(self.random.choice(("cpu", "cuda:3", "meta")))
            )
        if kind == 3:
            return self.named(
                "torch", self.random.choice(("float32", "int64", "strided", "float8_e4m3fn"))
            )
        if kind == 4:
            return self.call("_codecs encode", self.text_of("\xff\0a"), self.text_of("latin1"))
        if kind == 5:
            return self.call("collections Counter", b"}" + self.text_of("a") + b"K\2s")
        if kind == 6:
            return self.call("__builtin__ complex", self.real(), self.real())
        return self.call(
            "__builtin__ bytearray",
            self.call("_codecs encode", self.text_of("ab"), self.text_of("latin1")),
        )

    def ordered(self, depth: int) -> bytes:
        made = self.set_items(self.call("collections OrderedDict"), depth)
        if self.random.random() < 0.3:
            made += b"}" + self.text_of("_metadata") + self.value(depth) + b"sb"
        return made

    def sizes(self, rank: int) -> bytes:
        return (
            b"("
            + b"".join(b"K" + bytes([self.random.choice((1, 2, 3, 0))]) for _ in range(rank))
            + b"t"
        )

    def storage(self, key: str, made: str, nbytes: int) -> bytes:
        size = {**CLASSES, "Untyped": 1}[made]
        module = "torch.storage" if made == "Untyped" else "torch"
        numel = nbytes // size if self.random.random() < 0.9 else self.random.choice(NUMBERS)
        location = self.random.choice(("cpu", "cpu", "cuda:1", "meta"))
        named = self.named(module, f"{made}Storage")
        return (
            b"("
            + self.text_of("storage")
            + named
            + self.text_of(key)
            + self.text_of(location)
            + self.long(numel)
            + b"tQ"
        )

    def tensor(self, depth: int) -> bytes:
        key = self.random.choice(tuple(STORAGES))
        made = {"0": "Float", "1": "Half", "2": "Long", "3": "Byte"}[key]
        if self.random.random() < 0.1:
            made = self.random.choice(tuple(CLASSES))
        rank = self.random.randrange(4)
        place = self.storage(key, made, STORAGES[key])
        offset = b"K" + bytes([self.random.choice((0, 0, 0, 1, 2))])
        args = [
            place,
            offset,
            self.sizes(rank),
            self.sizes(rank if self.random.random() < 0.95 else 1),
        ]
        args += [self.random.choice((b"\x88", b"\x89")), self.call("collections OrderedDict")]
        if self.random.random() < 0.15:
            args.append(b"}" + self.text_of(self.random.choice(("neg", "conj"))) + b"\x88s")
        return self.wrapped(self.call("torch._utils _rebuild_tensor_v2", *args), args, depth)

    def wrapped(self, tensor: bytes, args: Sequence[bytes], depth: int) -> bytes:
        """As a parameter, or as what has attributes, now and then."""
        kind = self.random.randrange(8)
        if kind == 0:
            hooks = self.call("collections OrderedDict")
            return self.call("torch._utils _rebuild_parameter", tensor, b"\x88", hooks)
        if kind == 1:
            rebuild, made = (
                self.named("torch._utils", "_rebuild_tensor_v2"),
                self.named("torch", "Tensor"),
            )
            state = b"}" + self.text_of("note") + self.value(depth) + b"s"
            inner = b"(" + b"".join(args[:6]) + b"t"
            return self.call("torch._tensor _rebuild_from_type_v2", rebuild, made, inner, state)
        return tensor

    # What has no place in weights

    def hostile(self, depth: int) -> bytes:
        module, _, name = self.random.choice(HOSTILE).partition(" ")
        made = self.named(module, name)
        kind = self.random.randrange(6)
        if kind == 0:
            return made + self.tuple(depth) + b"R"
        if kind == 1:
            return (
                made + self.tuple(depth) + b"\x81" + b"}" + self.text() + self.value(depth) + b"sb"
            )
        if kind == 2:
            return b"(" + made + self.values(depth) + b"o"
        if kind == 3:
            return b"(" + self.values(depth) + f"i{module}\n{name}\n".encode()
        if kind == 4:
            return made + b")" + self.mapping(depth) + b"\x92"
        return made

    def other(self, depth: int) -> bytes:
        """Opcodes of other protocols, lengths that lie, and values that are thrown away."""
        kind = self.random.randrange(12)
        if kind == 0:
            return b"(" + self.values(depth) + self.random.choice((b"l", b"t", b"d", b"\x91"))
        if kind == 1:
            return b"\x8f(" + self.values(depth) + b"\x90"
        if kind == 2:
            return self.value(depth) + self.value(depth) + b"0"
        if kind == 3:
            return self.value(depth) + b"2\x86"
        if kind == 4:
            return self.value(depth) + b"\x94"
        if kind == 5:
            return self.random.choice(
                (
                    b"I12\n",
                    b"L12L\n",
                    b"F1.5\n",
                    b"Vab\\u00e9\n",
                    b"S'a\\x00'\n",
                    b"I01\n",
                    b"L1_0L\n",
                )
            )
        if kind == 6:
            data = bytes(self.random.getrandbits(8) for _ in range(self.random.randrange(6)))
            length = struct.pack(
                "<Q", self.random.choice((len(data), len(data), len(data), 1 << 40, len(data) + 1))
            )
            return self.random.choice((b"\x8e", b"\x96", b"\x8d")) + length + data
        if kind == 7:
            return b"C\3abc" + b"\x85" * self.random.choice((1, 1, 2000))
        if kind == 8:
            return b"\x95" + struct.pack("<Q", self.random.choice((1, 2, 9))) + self.value(depth)
        if kind == 9:
            return self.value(depth) + b"Q"
        if kind == 10:
            return b"((" + self.values(depth) + b"1" + self.value(depth) + b"t"
        return bytes([self.random.choice((0x82, 0x83, 0x84, 0x97, 0x98))]) + bytes(
            self.random.randrange(5)
        )


Maker = Callable[[_Writer, int], bytes]
_PLAIN: tuple[Maker, ...] = (
    _Writer.key, _Writer.mapping, _Writer.mapping, _Writer.sequence, _Writer.tuple, _Writer.get, _Writer.harmless,
    _Writer.ordered, _Writer.tensor, _Writer.tensor,
)  # fmt: skip
_ODD: tuple[Maker, ...] = (_Writer.hostile, _Writer.hostile, _Writer.other, _Writer.other)
_OPCODES = bytes([*b"().012NIJKLMFGSTUVXBCacdeghijloPQpqrstuv}])Rb", *range(0x80, 0x99)])
_LINES = (b"I12\n", b"L12L\n", b"F1.5\n", b"Vab\\u00e9\n", b"S'a\\x00'\n", b"I01\n", b"L1_0L\n")
