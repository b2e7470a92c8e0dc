"""Make numbers of the block types of ggml (GGUF), bit for bit as gguf-py and ggml make them.

A block of 32 to 256 elements holds codes of 1 to 8 bits and the scales of its groups. Each type is
a function from blocks to codes of int8 and what these are multiplied by, group for group; some
subtract a minimum of each group. Every operation on float32 is rounded by itself, in the order of
ggml's C code without fused multiply-add.

The codes of many blocks are unpacked at once, in few passes over bytes or words of eight codes. The
signs and the grids of the IQ types are words that are looked up. Powers of two, and signs, move
freely between codes and scales: nothing is rounded there. Sources: ggml-common.h, ggml-quants.c and
gguf-py's quants.py of llama.cpp.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ckptkit.compute.numbers import encode, own_dtype
from ckptkit.compute.operation import Pieces, aligned, as_bytes, flow
from ckptkit.core.bytesource import Derived, Operation, Piece
from ckptkit.core.dtypes import BY_NAME, GGML

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]
    # Codes, the scale of each group, and its minimum if there is one.
    Parts = tuple[Array, Array, Array | None]

ELEMENTS = 1 << 18  # worked on at once: they and their codes stay in the cache of a core
TYPES = {dtype.name: dtype for dtype in GGML.values()}
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

        size, unit = dtype.itemsize, dtype.block * target.itemsize
        at, first, last = start // unit * unit, start // unit * size, -(-stop // unit) * size
        pieces = flow(extent.inputs[0], first, last, rows * size)  # which stay in the cache
        for piece in aligned(pieces, size, rows * size):
            found = made(piece)
            yield found[max(start - at, 0) : min(stop - at, len(found))]
            at += len(found)

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

    codes = codes.view("i1")
    np.copyto(out.reshape(codes.shape), codes)
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
    found: Array = blocks.view("<f2")[:, at // 2, None].astype("<f4")
    return found


def _ints(blocks: Array, at: int, count: int, kind: str) -> Array:
    """`count` integers of each block."""
    import numpy as np

    size = np.dtype(kind).itemsize
    return np.ascontiguousarray(blocks[:, at : at + count * size]).view(kind)


def _shifted(field: Array, shifts: Sequence[int], mask: int, place: int = 0) -> Array:
    """Bits of the bytes of a field [block, byte], for each shift; moved to `place`."""
    import numpy as np

    words = np.ascontiguousarray(field).view("<u8")  # bits of other bytes are masked
    made = np.empty((len(shifts), *words.shape), "<u8")
    for each, shift in zip(made, shifts, strict=True):
        how = np.left_shift if place > shift else np.right_shift
        how(words, np.uint64(abs(place - shift)), out=each)
    made &= np.uint64((mask << place) * 0x0101010101010101)
    return made.view("u1")


def _nibbles(blocks: Array, at: int, width: int, less: int = 0) -> Array:
    """All nibbles of blocks from byte `at`, less a number, [nibble, block, run, byte of a run]."""
    import numpy as np

    both = np.empty((2, *blocks.shape), "u1")  # headers too: long rows are faster
    np.bitwise_and(blocks, np.uint8(15), out=both[0])
    np.right_shift(blocks, np.uint8(4), out=both[1])
    if less:
        _less(both, less)
    return both[:, :, at:].reshape(2, len(blocks), -1, width)


def _pairs(field: Array) -> Array:
    """All pairs of bits of a field of 64 bytes, [pair, block, run of 32 bytes, byte]."""
    return _shifted(field, (0, 2, 4, 6), 3).reshape(4, len(field), 2, 32)


def _in_order(parts: Array) -> Array:
    """Codes [part, block, run, byte] in the order of elements: each run has all its parts."""
    return parts.transpose(1, 2, 0, 3)


def _split(field: Array) -> Array:
    """Low and high nibble of each byte, side by side."""
    import numpy as np

    return np.stack((field & 15, field >> 4), axis=-1).reshape(len(field), -1)


def _less(codes: Array, number: int) -> Array:
    """Codes less a number, in place."""
    import numpy as np

    codes = codes.view("i1")
    codes -= np.int8(number)
    return codes


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
    """The values of nibbles, each of which is in a byte, in order; two are taken at once."""
    import numpy as np

    pairs = np.ascontiguousarray(_in_order(nibbles)).reshape(-1).view("<u2")
    return np.take(_table(name), pairs, mode="clip")


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
    return _in_order(_nibbles(b, 2, 16, 8)), _half(b, 0), None


def _q4_1(b: Array) -> Parts:
    return _in_order(_nibbles(b, 4, 16)), _half(b, 0), -_half(b, 2)


def _q5(b: Array, at: int, less: int = 0) -> Array:
    """Codes whose fifth bits are in a word of their own, before the nibbles."""
    import numpy as np

    codes = np.ascontiguousarray(_in_order(_nibbles(b, at + 4, 16)))
    words = codes.reshape(-1, 32).view("<u8")
    words |= np.take(_bits(), b[:, at : at + 4], mode="clip") << np.uint64(4)
    return _less(codes, less) if less else codes


def _q5_0(b: Array) -> Parts:
    return _q5(b, 2, 16), _half(b, 0), None


def _q5_1(b: Array) -> Parts:
    return _q5(b, 4), _half(b, 0), -_half(b, 2)


def _q8_0(b: Array) -> Parts:
    return b[:, 2:].view("i1"), _half(b, 0), None


def _iq4_nl(b: Array) -> Parts:
    return _looked_up("IQ4", _nibbles(b, 2, 16)), _half(b, 0), None


def _mxfp4(b: Array) -> Parts:
    import numpy as np

    scale = np.ldexp(np.float32(1), b[:, 0].astype("i4") - 128)
    return _looked_up("FP4", _nibbles(b, 1, 16)), scale, None


def _nvfp4(b: Array) -> Parts:
    import numpy as np

    scale = np.take(_table("E4M3"), b[:, :4] & 0x7F)
    scale[b[:, :4] == 0xFF] = 240
    return _looked_up("FP4", _nibbles(b, 4, 8)), scale, None


def _q1_0(b: Array) -> Parts:
    import numpy as np

    bits = np.take(_bits(), b[:, 2:], mode="clip")
    return _less(bits << np.uint64(1), 1), _half(b, 0), None


def _q2_0(b: Array) -> Parts:
    import numpy as np

    return _less(np.take(_table("ternary"), b[:, 2:], mode="clip"), 1), _half(b, 0), None


# K types: 256 elements, a scale (and a minimum) for each 16 or 32


def _q2_k(b: Array) -> Parts:
    codes, scales = _pairs(b[:, 16:80]), b[:, :16]
    return _in_order(codes), _half(b, 80) * (scales & 15), _half(b, 82) * (scales >> 4)


def _q3_k(b: Array) -> Parts:
    import numpy as np

    codes = _pairs(b[:, 32:96])
    # The third bit of element i is bit i // 32 of byte i % 32: of both halves, one after another.
    high = np.stack([_shifted(b[:, :32], range(k, k + 4), 1, 2) for k in (0, 4)], axis=2)
    codes |= high
    words = np.ascontiguousarray(b.view("<u2")[:, 48:54]).view("<u4")
    scales = np.empty((len(b), 4), "<u4")  # of four groups each, six bits in a byte
    for place in range(4):
        low = words[:, place % 2] >> np.uint32(4 * (place // 2)) & np.uint32(0x0F0F0F0F)
        two = words[:, 2] >> np.uint32(2 * place) & np.uint32(0x03030303)
        scales[:, place] = low | two << np.uint32(4)
    return _in_order(_less(codes, 4)), _half(b, 108) * _less(scales.view("u1"), 32), None


def _scales_of_6_bits(b: Array) -> tuple[Array, Array]:
    """Eight scales and eight minimums of Q4_K and Q5_K, in 12 bytes: four at once."""
    import numpy as np

    first, second, third = np.ascontiguousarray(b.view("<u4")[:, 1:4].T)
    six, four, two = (np.uint32(each * 0x01010101) for each in (0x3F, 0x0F, 0x30))
    found = np.empty((2, len(b), 2), "<u4")
    found[0, :, 0], found[1, :, 0] = first & six, second & six
    found[0, :, 1] = third & four | first >> np.uint32(2) & two
    found[1, :, 1] = third >> np.uint32(4) & four | second >> np.uint32(2) & two
    scales, minimums = found.view("u1")
    return _half(b, 0) * scales, _half(b, 2) * minimums


def _q4_k(b: Array) -> Parts:
    return _in_order(_nibbles(b, 16, 32)), *_scales_of_6_bits(b)


def _q5_k(b: Array) -> Parts:
    codes = _nibbles(b, 48, 32)
    for nibble in (0, 1):  # run k of 32 elements has bit k of the bytes of the field
        codes[nibble] |= _shifted(b[:, 16:48], range(nibble, 8, 2), 1, 4).transpose(1, 0, 2)
    return _in_order(codes), *_scales_of_6_bits(b)


def _q6_k(b: Array) -> Parts:
    import numpy as np

    codes = _nibbles(b[:, :128], 0, 64)
    high = _shifted(b[:, 128:192], (0, 2, 4, 6), 3, 4)  # of the first 32 elements, the next...
    parts = high.reshape(2, 2, len(b), 2, 32).transpose(0, 2, 3, 1, 4)
    codes |= parts.reshape(codes.shape)
    scales = np.ascontiguousarray(b[:, 192:208]).view("i1")
    return _in_order(_less(codes, 32)), _half(b, 208) * scales, None


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

    codes = _looked_up("IQ4", _nibbles(b, 8, 16))
    high = _ints(b, 2, 1, "<u2") >> np.arange(0, 16, 2, dtype="<u2") & 3
    scale = (_split(b[:, 4:8]) | high.astype("u1") << 4).astype("i1") - np.int8(32)
    return codes, _half(b, 0) * scale, None


# Ternary types


def _tq1_0(b: Array) -> Parts:
    import numpy as np

    codes = np.empty((len(b), 256), "u1")
    at = 0
    for start, stop, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        field = np.ascontiguousarray(b[:, start:stop])
        for digit in range(digits):
            power = field * np.uint8(3**digit)  # of 8 bits; the digit is power * 3 >> 8
            found = (power > np.uint8(85)).view("u1") + (power > np.uint8(170)).view("u1")
            codes[:, at : at + stop - start] = found
            at += stop - start
    return _less(codes, 1), _half(b, 52), None


def _tq2_0(b: Array) -> Parts:
    return _in_order(_less(_pairs(b[:, :64]), 1)), _half(b, 64), None


DECODERS: dict[str, Callable[[Array], Parts]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k,
    "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs, "IQ3_XXS": _iq3_xxs, "IQ1_S": _iq1_s, "IQ4_NL": _iq4_nl, "IQ3_S": _iq3_s,
    "IQ2_S": _iq2_s, "IQ4_XS": _iq4_xs, "IQ1_M": _iq1_m, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0,
    "MXFP4": _mxfp4, "NVFP4": _nvfp4, "Q1_0": _q1_0, "Q2_0": _q2_0,
}  # fmt: skip
