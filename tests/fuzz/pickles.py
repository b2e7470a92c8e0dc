"""Pickles whose parts are chosen by bytes, so that whoever changes the bytes changes the pickle.

``plain`` ones hold nothing but what `torch.load(weights_only=True)` may make, in its own opcodes:
torch says what they mean. The others hold what hunts compose (``material``); never run.
"""

from __future__ import annotations

from functools import cache
from random import Random

from tests.fuzz.material import Material, group
from tests.fuzz.trees import Node, apply, call, changed, const, mapping, named, write

DEPTH = 6
STORAGES = {"0": 48, "1": 12, "2": 16, "3": 0}  # key of a storage in the archive, and its bytes
CLASSES = {"Float": 4, "Long": 8, "Half": 2, "Bool": 1, "ComplexFloat": 8, "BFloat16": 2, "Byte": 1}
SCALARS = (
    None, True, False, "", "a", "model", "module.x", "état", "\U0001f600", "new\nline", "x" * 300, "a.b", "\0",
    0, 1, -1, 255, 256, 65535, -(2**31), 2**31, 2**63, -(2**63), 2**70, 10**20,
    0.0, -0.0, 1.5, float("inf"), float("-inf"), float("nan"), 5e-324, 1e308,
)  # fmt: skip
HOOKS = apply("collections.OrderedDict")
LATIN1 = apply("_codecs.encode", const("\xff\0a"), const("latin1"))
VALUES = (
    apply("builtins.set", group("list", const("a"), const(1))), apply("torch.device", const("cuda:3")),
    apply("torch.Size", group("tuple", const(2))), named("torch", "float32"), named("torch", "float8_e4m3fn"), LATIN1,
    apply("collections.Counter", mapping(const("a"), const(2))), apply("builtins.complex", const(0.5), const(-0.0)),
    apply("builtins.bytearray", LATIN1),
)  # fmt: skip


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
    """The pickle that these bytes choose; another than a plain one is broken now and then."""
    choices = Choices(data)
    if plain:
        pairs = [part for at in range(4) for part in (const(f"k{at}"), _plain(choices, DEPTH))]
        return write(mapping(*pairs), 2)
    material = _material()
    material.random = choices
    made = write(material.odd(4), choices.choice((2, 2, 3, 4, 5)), choices.randrange(3))
    if choices.random() < 0.8:
        return made
    at = choices.randrange(len(made) + 1)
    return made[:at] + bytes([choices.randrange(256)]) + made[at + choices.randrange(2) :]


@cache
def _material() -> Material:
    return Material(Random(0))


def _plain(choices: Choices, depth: int) -> Node:
    """A value of a checkpoint."""
    kind = choices.randrange(10) if depth and choices.left else 0
    if kind in (1, 2, 3):
        values = [_plain(choices, depth - 1) for _ in range(choices.randrange(5))]
        if kind < 3:
            return group("list" if kind == 1 else "tuple", *values)
        pairs = [part for at, value in enumerate(values) for part in (const(f"k{at}"), value)]
        if choices.random() < 0.5:
            return mapping(*pairs)
        made = changed(HOOKS, "setitems", *pairs)
        return changed(
            made, "build", mapping(const("_metadata"), *values[:1], *[HOOKS][: not values])
        )
    if kind == 4:
        return choices.choice(VALUES)
    if kind == 5:
        return ("put", None, (_plain(choices, depth - 1),))
    if kind == 6:
        return ("ref", choices.randrange(4), ())
    return _tensor(choices, depth) if kind > 6 else const(choices.choice(SCALARS))


def _tensor(choices: Choices, depth: int) -> Node:
    """A tensor, a parameter, or a tensor with attributes; now and then of what is not there."""
    key = choices.choice("00012")
    kind = {"0": "Float", "1": "Half", "2": "Long", "3": "Byte"}[key]
    if choices.random() < 0.03:
        kind = choices.choice(tuple(CLASSES))
    numel = STORAGES[key] // CLASSES[kind] if choices.random() < 0.97 else 2**31
    parts = (
        const("storage"), named("torch", f"{kind}Storage"), const(key),
        const(choices.choice(("cpu", "cpu", "meta"))),
    )  # fmt: skip
    rank = choices.randrange(3)
    shape = group("tuple", *(const(choices.choice((1, 2, 2, 0))) for _ in range(rank)))
    steps = rank if choices.random() < 0.97 else 1
    stride = group("tuple", *(const(choices.choice((1, 1, 1, 0, 2))) for _ in range(steps)))
    args = [
        ("binpersid", None, (group("tuple", *parts, const(numel)),)),
        const(choices.choice((0, 0, 0, 1))), shape, stride,
    ]  # fmt: skip
    args += [const(kind in ("Float", "Half") and choices.random() < 0.5), HOOKS]
    rebuild = named("torch._utils", "_rebuild_tensor_v2")
    bits = []
    if choices.random() < 0.15:
        bits = [mapping(const(choices.choice(("neg", "conj"))), const(True))]
    made = call(rebuild, *args, *bits)
    if choices.random() < 0.15:
        return apply("torch._utils._rebuild_parameter", made, const(True), HOOKS)
    if choices.random() < 0.15:
        state = mapping(const("note"), _plain(choices, depth - 1))
        return apply(
            "torch._tensor._rebuild_from_type_v2",
            rebuild,
            named("torch", "Tensor"),
            group("tuple", *args),
            state,
        )
    return made
