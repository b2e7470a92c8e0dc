"""Make numbers of the block types of ggml (GGUF), bit for bit as gguf-py and ggml make them.

A block of 32 to 256 elements holds codes of 1 to 8 bits and the scales of its groups. Each type is
a function from blocks to codes of int8 and what these are multiplied by, group for group; some
subtract a minimum of each group. Every operation on float32 is rounded by itself, in the order of
ggml's C code without fused multiply-add.

Blocks are worked on as numbers of 64 bits, eight codes at once. The signs and the grids of the IQ
types are looked up so too. Powers of two, and signs, move freely between codes and scales: nothing
is rounded there. Sources: ggml-common.h, ggml-quants.c and gguf-py's quants.py of llama.cpp.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ckptkit.compute.numbers import encode, own_dtype
from ckptkit.compute.operation import Pieces, as_bytes, by_rows
from ckptkit.core.bytesource import Derived, Operation, Piece
from ckptkit.core.dtypes import BY_NAME, GGML

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    # Codes, the scale of each group, and its minimum if there is one.
    Parts = tuple[Array, Array, Array | None]

ELEMENTS = 1 << 17  # worked on at once: they and their codes stay in the cache of a core
TYPES = {dtype.name: dtype for dtype in GGML.values()}
_EACH = 0x0101010101010101  # a byte of 1, eight times
# The offsets of fields of 16 bits, in types that a program writes into big-endian files.
FIELDS = {
    "Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,), "Q1_0": (0,), "TQ2_0": (64,),
    "MXFP4": (), "NVFP4": (),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgmlDequantize(Operation):
    """Elements of `target` of blocks of a type of ggml; those of `big_endian` files are swapped."""

    type: str
    target: str = "float32"
    big_endian: bool = False
    expands: ClassVar[bool] = True

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        import numpy as np

        dtype, target = TYPES[self.type], BY_NAME[self.target]
        rows = ELEMENTS // dtype.block
        values = np.empty((rows, dtype.block), "<f4")

        def made(piece: Piece) -> memoryview:
            blocks = np.frombuffer(piece, "u1").reshape(-1, dtype.itemsize)
            if self.big_endian:
                blocks = _swapped(blocks, FIELDS[self.type])
            out = values[: len(blocks)]
            with np.errstate(all="ignore"):  # infinities and NaN are those of ggml too
                _multiplied(out, *DECODERS[self.type](blocks))
                if target.name == "float32":
                    return out.reshape(-1).view("u1").data
                if target.name == "bfloat16":
                    return as_bytes(out.reshape(-1).astype(own_dtype("bfloat16")))
                return encode(out.reshape(-1), target)

        if start < stop:
            unit = dtype.block * target.itemsize
            yield from by_rows(extent.inputs, (dtype.itemsize,), unit, start, stop, made, rows)

    def ends(self, extent: Derived, size: int) -> Iterable[int]:
        unit = TYPES[self.type].block * BY_NAME[self.target].itemsize
        step = max(1, size // unit) * unit
        yield from range(step, extent.length, step)
        yield extent.length


def _swapped(blocks: Array, fields: tuple[int, ...]) -> Array:
    blocks = blocks.copy()
    for at in fields:
        blocks[:, at : at + 2] = blocks[:, at : at + 2][:, ::-1].copy()
    return blocks


def _multiplied(out: Array, codes: Array, scale: Array, minimum: Array | None = None) -> None:
    """Fill `out` with codes times the scale of their group, less its minimum."""
    import numpy as np

    codes = codes.view("i1").reshape(out.shape)
    np.copyto(out, codes)
    for how, numbers in ((np.multiply, scale), (np.subtract, minimum)):
        if numbers is None:
            continue
        width = out.size // numbers.size
        if width <= 16:  # short rows are slower than more memory
            how(out.reshape(-1), np.repeat(numbers.reshape(-1), width), out=out.reshape(-1))
        else:
            groups = out.reshape(-1, width)
            how(groups, numbers.reshape(-1, 1), out=groups)


# Fields of blocks


def _half(blocks: Array, at: int) -> Array:
    """The float16 at byte `at` of each block, as float32."""
    import numpy as np

    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype("<f4")


def _ints(blocks: Array, at: int, count: int, kind: str) -> Array:
    """`count` integers of each block."""
    import numpy as np

    size = np.dtype(kind).itemsize
    return np.ascontiguousarray(blocks[:, at : at + count * size]).view(kind)


def _words(blocks: Array, at: int, length: int) -> Array:
    """The bytes of a field, eight in a word."""
    return _ints(blocks, at, length // 8, "<u8")


def _masked(words: Array, shift: int, mask: int) -> Array:
    """Bits of each byte: those of `mask` after the shift."""
    import numpy as np

    return words >> np.uint64(shift) & np.uint64(mask * _EACH)


def _nibbles(words: Array) -> Array:
    """Low nibbles of each run of bytes on the last axis, then the high ones of the same."""
    import numpy as np

    return np.stack((_masked(words, 0, 15), _masked(words, 4, 15)), axis=-2)


def _pairs(words: Array) -> Array:
    """The lowest two bits of each run of bytes on the last axis, then the next two..."""
    import numpy as np

    return np.stack([_masked(words, shift, 3) for shift in (0, 2, 4, 6)], axis=-2)


def _split(field: Array) -> Array:
    """Low and high nibble of each byte, side by side."""
    import numpy as np

    return np.stack((field & 15, field >> 4), axis=-1).reshape(len(field), -1)


def _less(codes: Array, number: int) -> Array:
    """Codes less a number."""
    import numpy as np

    return codes.view("i1") - np.int8(number)


@cache
def _bits() -> Array:
    """For each byte, a word of its bits: a byte of 0 or 1 each, the lowest first."""
    import numpy as np

    bits = np.arange(256)[:, None] >> np.arange(8) & 1
    return bits.astype("u1").view("<u8").reshape(-1)


@cache
def _table(name: str) -> Array:
    """Values of codes: of pairs of nibbles (each in a byte), or of all bytes."""
    import numpy as np

    if name in ("IQ4", "FP4"):
        values = np.zeros(16, "i1")
        values[:] = {
            "IQ4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
            "FP4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
        }[name]
        low, high = np.arange(1 << 12) & 15, np.arange(1 << 12) >> 8
        return np.stack((values[low], values[high]), axis=-1).view("<u2").reshape(-1)
    byte = np.arange(256)
    if name == "ternary":  # Q2_0: four codes in a byte
        return (byte[:, None] >> (0, 2, 4, 6) & 3).astype("u1").view("<u4").reshape(-1)
    # E4M3, without a sign, halved; NVFP4 has no NaN.
    exponent, mantissa = byte >> 3 & 15, byte & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 8)
    halves = np.where(exponent > 0, normal, mantissa * 2.0**-10).astype("<f4")
    halves[0x7F] = 0
    return halves


def _looked_up(name: str, nibbles: Array) -> Array:
    """The values of nibbles, each of which is in a byte; two at once."""
    import numpy as np

    return np.take(_table(name), nibbles.reshape(-1).view("<u2"), mode="clip")


@cache
def _grid(name: str) -> Array:
    """The vectors of a grid, each in a word: the members of a set, in rising order."""
    import numpy as np

    lines = Path(__file__).with_name("ggml_grids.txt").read_text().splitlines()
    rows = dict(line.split(" ", 1) for line in lines if not line.startswith("#"))
    count, levels, members = rows[name].split()
    values = np.array(levels.split(","), "i1")
    bitmap = np.unpackbits(np.frombuffer(b64decode(members), "u1"), bitorder="little")
    digits = np.flatnonzero(bitmap)[:, None] // len(values) ** np.arange(int(count)) % len(values)
    found: Array = values[digits].view(f"<u{count}").reshape(-1)
    return found


@cache
def _signs() -> tuple[Array, Array]:
    """Words to negate the codes whose bit is set in a byte: one to xor, one to add."""
    import numpy as np

    return _bits() * np.uint64(255), _bits()


@cache
def _parity() -> Array:
    """Seven bits of signs as eight: the last makes their number even."""
    import numpy as np

    seven = np.arange(128)
    ones = sum((seven >> bit & 1 for bit in range(7)), np.zeros(128, int))
    return (seven | (ones & 1) << 7).astype("u1")


def _signed(words: Array, signs: Array) -> Array:
    """Codes, none of which is 0, with the signs of the bits of a byte for each eight."""
    import numpy as np

    flip, add = (np.take(each, signs, mode="clip") for each in _signs())
    words ^= flip
    words += add
    return words


# Types of 32 elements, with one scale; the older ones with one minimum


def _q4_0(b: Array) -> Parts:
    return _less(_nibbles(_words(b, 2, 16)), 8), _half(b, 0), None


def _q4_1(b: Array) -> Parts:
    return _nibbles(_words(b, 4, 16)), _half(b, 0), -_half(b, 2)


def _q5(b: Array, at: int) -> Array:
    """Codes whose fifth bits are in a word of their own, before the nibbles."""
    import numpy as np

    high = np.take(_bits(), b[:, at : at + 4], mode="clip") << np.uint64(4)
    codes: Array = _nibbles(_words(b, at + 4, 16)).reshape(-1, 4)
    codes |= high
    return codes


def _q5_0(b: Array) -> Parts:
    return _less(_q5(b, 2), 16), _half(b, 0), None


def _q5_1(b: Array) -> Parts:
    return _q5(b, 4), _half(b, 0), -_half(b, 2)


def _q8_0(b: Array) -> Parts:
    return _ints(b, 2, 32, "i1"), _half(b, 0), None


def _iq4_nl(b: Array) -> Parts:
    return _looked_up("IQ4", _nibbles(_words(b, 2, 16))), _half(b, 0), None


def _mxfp4(b: Array) -> Parts:
    import numpy as np

    scale = np.ldexp(np.float32(1), b[:, 0].astype("i4") - 128)
    return _looked_up("FP4", _nibbles(_words(b, 1, 16))), scale, None


def _nvfp4(b: Array) -> Parts:
    import numpy as np

    codes = _nibbles(_ints(b, 4, 4, "<u8").reshape(-1, 4, 1))
    scale = np.take(_table("E4M3"), b[:, :4] & 0x7F)
    scale[b[:, :4] == 0xFF] = 240
    return _looked_up("FP4", codes), scale, None


def _q1_0(b: Array) -> Parts:
    import numpy as np

    bits = np.take(_bits(), b[:, 2:], mode="clip")
    return _less(bits << np.uint64(1), 1), _half(b, 0), None


def _q2_0(b: Array) -> Parts:
    import numpy as np

    return _less(np.take(_table("ternary"), b[:, 2:], mode="clip"), 1), _half(b, 0), None


# K types: 256 elements, a scale (and a minimum) for each 16 or 32


def _q2_k(b: Array) -> Parts:
    codes = _pairs(_words(b, 16, 64).reshape(-1, 2, 4))
    scales = b[:, :16]
    return codes, _half(b, 80) * (scales & 15), _half(b, 82) * (scales >> 4)


def _q3_k(b: Array) -> Parts:
    import numpy as np

    codes = _pairs(_words(b, 32, 64).reshape(-1, 2, 4)).reshape(-1, 8, 4)
    mask = _words(b, 0, 32)
    for bit in range(8):
        codes[:, bit] |= _masked(mask, bit, 1) << np.uint64(2)
    low = np.concatenate((b[:, 96:104] & 15, b[:, 96:104] >> 4), axis=1)
    high = np.concatenate([b[:, 104:108] >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    return _less(codes, 4), _half(b, 108) * _less(low | high << 4, 32), None


def _scales_of_6_bits(b: Array) -> tuple[Array, Array]:
    """Eight scales and eight minimums of Q4_K and Q5_K, in 12 bytes."""
    import numpy as np

    first, second, third = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=1)
    minimums = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=1)
    return _half(b, 0) * scales, _half(b, 2) * minimums


def _q4_k(b: Array) -> Parts:
    return _nibbles(_words(b, 16, 128).reshape(-1, 4, 4)), *_scales_of_6_bits(b)


def _q5_k(b: Array) -> Parts:
    import numpy as np

    codes = _nibbles(_words(b, 48, 128).reshape(-1, 4, 4)).reshape(-1, 8, 4)
    high = _words(b, 16, 32)
    for bit in range(8):
        codes[:, bit] |= _masked(high, bit, 1) << np.uint64(4)
    return codes, *_scales_of_6_bits(b)


def _q6_k(b: Array) -> Parts:
    import numpy as np

    codes = _nibbles(_words(b, 0, 128).reshape(-1, 2, 8)).reshape(-1, 2, 4, 4)
    codes |= _pairs(_words(b, 128, 64).reshape(-1, 2, 4)) << np.uint64(4)
    return _less(codes, 32), _half(b, 208) * _ints(b, 192, 16, "i1"), None


# IQ types: vectors of a grid, with signs


def _iq2_xxs(b: Array) -> Parts:
    import numpy as np

    pairs = _ints(b, 2, 16, "<u4").reshape(-1, 8, 2)
    words = np.take(_grid("iq2_xxs"), np.ascontiguousarray(pairs[..., 0]).view("u1"), mode="clip")
    codes, scale = _with_seven(words, pairs[..., 1], 4)
    return codes, (_half(b, 0) * scale) * np.float32(0.25), None


def _with_seven(words: Array, field: Array, count: int) -> tuple[Array, Array]:
    """Codes with the signs of `count` times seven bits of a field, and 0.5 + its highest four."""
    import numpy as np

    shifts = np.arange(0, 7 * count, 7, dtype="<u4")
    signs = np.take(_parity(), field[..., None] >> shifts & 127, mode="clip")
    codes = _signed(words.reshape(-1), signs.reshape(-1))
    return codes, np.float32(0.5) + (field >> 28).astype("<f4")


def _iq2_xs(b: Array) -> Parts:
    import numpy as np

    field = _ints(b, 2, 32, "<u2")
    words = np.take(_grid("iq2_xs"), field & 511, mode="clip")
    codes = _signed(words, np.take(_parity(), field >> 9, mode="clip"))
    return codes, _half_steps(b, _split(b[:, 66:74])), None


def _half_steps(b: Array, steps: Array) -> Array:
    import numpy as np

    return (_half(b, 0) * (np.float32(0.5) + steps.astype("<f4"))) * np.float32(0.25)


def _iq2_s(b: Array) -> Parts:
    import numpy as np

    high = (b[:, 66:74, None] >> np.arange(0, 8, 2, dtype="u1") & 3).reshape(-1, 32)
    words = np.take(_grid("iq2_s"), b[:, 2:34] | high.astype("<u2") << 8, mode="clip")
    return _signed(words, b[:, 34:66]), _half_steps(b, _split(b[:, 74:82])), None


def _iq3_xxs(b: Array) -> Parts:
    import numpy as np

    words = np.take(_grid("iq3_xxs"), b[:, 2:66], mode="clip").view("<u8")
    codes, scale = _with_seven(words, _ints(b, 66, 8, "<u4"), 4)
    return codes, (_half(b, 0) * scale) * np.float32(0.5), None


def _iq3_s(b: Array) -> Parts:
    import numpy as np

    high = np.take(_bits(), b[:, 66:74], mode="clip").view("u1")
    words = np.take(_grid("iq3_s"), b[:, 2:66] | high.astype("<u2") << 8, mode="clip")
    scale = _half(b, 0) * (1 + 2 * _split(b[:, 106:110]).astype("<f4"))
    return _signed(words.view("<u8"), b[:, 74:106]), scale, None


@cache
def _shifted_grid() -> Array:
    """The grid of IQ1 times 8, plus 1; then the same minus 1: t is 0.125, then -0.125."""
    import numpy as np

    eights = _grid("iq1").view("i1") * np.int8(8)
    return np.concatenate((eights + np.int8(1), eights - np.int8(1))).view("<u8")


def _iq1_s(b: Array) -> Parts:
    import numpy as np

    field = _ints(b, 34, 8, "<u2")
    high = field[..., None] >> np.arange(0, 12, 3, dtype="<u2") & 7 | (field >> 15 << 3)[..., None]
    words = np.take(_shifted_grid(), b[:, 2:34] | high.reshape(-1, 32) << 8, mode="clip")
    scale = _half(b, 0) * (2 * (field >> 12 & 7) + 1).astype("<f4")
    return words, scale * np.float32(0.125), None


def _iq1_m(b: Array) -> Parts:
    import numpy as np

    field = _ints(b, 48, 4, "<u2")
    bits = sum((field[:, k] >> 12 << 4 * k for k in range(1, 4)), field[:, 0] >> 12)
    half = bits.astype("<u2").view("<f2").astype("<f4")[:, None]
    words = np.take(
        _shifted_grid(), b[:, :32] | _split(b[:, 32:48]).astype("<u2") << 8, mode="clip"
    )
    steps = (field[..., None] >> np.arange(0, 12, 3, dtype="<u2") & 7).reshape(-1, 16)
    return words, (half * (2 * steps + 1).astype("<f4")) * np.float32(0.125), None


def _iq4_xs(b: Array) -> Parts:
    import numpy as np

    codes = _looked_up("IQ4", _nibbles(_words(b, 8, 128).reshape(-1, 8, 2)))
    high = _ints(b, 2, 1, "<u2") >> np.arange(0, 16, 2, dtype="<u2") & 3
    scale = (_split(b[:, 4:8]) | high.astype("u1") << 4).astype("i1") - np.int8(32)
    return codes, _half(b, 0) * scale, None


# Ternary types


def _tq1_0(b: Array) -> Parts:
    import numpy as np

    codes = np.empty((len(b), 256), "u1")
    at = 0
    for start, stop, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        for digit in range(digits):
            power = b[:, start:stop] * np.uint8(3**digit)  # of 8 bits
            # (power * 3) >> 8
            here = codes[:, at : at + stop - start]
            np.add((power > 85).view("u1"), (power > 170).view("u1"), out=here)
            at += stop - start
    return _less(codes, 1), _half(b, 52), None


def _tq2_0(b: Array) -> Parts:
    return _less(_pairs(_words(b, 0, 64).reshape(-1, 2, 4)), 1), _half(b, 64), None


DECODERS: dict[str, Callable[[Array], Parts]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k,
    "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs, "IQ3_XXS": _iq3_xxs, "IQ1_S": _iq1_s, "IQ4_NL": _iq4_nl, "IQ3_S": _iq3_s,
    "IQ2_S": _iq2_s, "IQ4_XS": _iq4_xs, "IQ1_M": _iq1_m, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4, "NVFP4": _nvfp4, "Q1_0": _q1_0, "Q2_0": _q2_0,
}  # fmt: skip
