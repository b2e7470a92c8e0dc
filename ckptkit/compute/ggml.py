"""Dequantize the block types of ggml (GGUF), bit-exactly as gguf-py and ggml do.

A block of 32 to 256 elements contains codes of 1 to 8 bits. The codes are divided into groups. Each
group has a scale and, for some types, a minimum. A decoder maps blocks to int8 codes, scales and
minimums. An element is ``code * scale - minimum``. Each float32 operation is rounded separately.
The order of the operations is that of ggml's C code, compiled without fused multiply-add.

For speed, the decoders make few passes over memory:

* A decoder unpacks bits in 64-bit words of eight codes.
* A decoder copies each field of a block as one element.
* Tables contain the signs and grids of the IQ types as words.

A decoder may move a power of two or a sign from a code to its scale, because this does not change
the rounded result. Sources: ggml-common.h, ggml-quants.c and gguf-py's quants.py of llama.cpp.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

from ckptkit.compute.lazy import Array, np
from ckptkit.compute.numbers import encode
from ckptkit.compute.operation import Pieces, aligned, ends_after, stream_reusing_buffer, within
from ckptkit.core.bytesource import Derived, Extent, Operation
from ckptkit.core.dtypes import BY_NAME, GGML

# Codes, the scale of each group and, for some types, the minimum of each group.
Parts = tuple[Array, ...]

# Number of elements that are unpacked at once. For fewer elements, numpy calls take most of the
# time.
UNPACKED = 1 << 19
ELEMENTS = 1 << 16  # number of elements that are computed at once; their floats fit the cache
TYPES = {dtype.name: dtype for dtype in GGML.values()}
PAIRS = (0, 2, 4, 6)  # shifts for codes of two bits
# Offsets of the 16-bit fields of a block, for each type that llama.cpp's converter writes to
# big-endian files.
FIELDS = {
    "Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,), "Q1_0": (0,), "TQ2_0": (64,),
    "MXFP4": (), "NVFP4": (),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class GgmlDequantize(Operation):
    """Dequantizes blocks of a ggml type to the dtype `target`.

    If `big_endian` is set, the 16-bit fields of the blocks are big-endian.
    """

    type: str
    target: str = "float32"
    big_endian: bool = False
    expands: ClassVar[bool] = True

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        unit = TYPES[self.type].block * BY_NAME[self.target].itemsize
        first = start // unit
        made = self._floats(extent.inputs[0], first, -(-stop // unit))
        return within(made, first * unit, start, stop)

    def _floats(self, source: Extent, first: int, last: int) -> Pieces:
        """Dequantize the blocks from `first` to `last`."""
        dtype = TYPES[self.type]
        size, most = dtype.itemsize, UNPACKED // dtype.block * dtype.itemsize
        values = np.empty(ELEMENTS, "<f4")
        blocks_read = stream_reusing_buffer(source, first * size, last * size, most)
        for piece in aligned(blocks_read, size, most):
            blocks = np.frombuffer(piece, "u1").reshape(-1, size)
            if self.big_endian:  # swap the bytes of each 16-bit field
                blocks = blocks.copy()
                for at in FIELDS[self.type]:
                    blocks[:, at : at + 2] = blocks[:, at : at + 2][:, ::-1].copy()
            with np.errstate(all="ignore"):  # ggml returns infinities and NaN too
                codes, *numbers = DECODERS[self.type](blocks)
            codes = codes.reshape(-1).view("i1")
            for begin in range(0, codes.size, ELEMENTS):
                with np.errstate(all="ignore"):
                    out = _computed(values, codes, begin, *numbers)
                yield encode(out, BY_NAME[self.target])

    def ends(self, extent: Derived, size: int) -> Iterable[int]:
        unit = TYPES[self.type].block * BY_NAME[self.target].itemsize
        return ends_after(extent, max(1, size // unit) * unit)


def _computed(
    values: Array, codes: Array, begin: int, scale: Array, minimum: Array | None = None
) -> Array:
    """Return ``code * scale - minimum`` for the codes from index `begin` on.

    `scale` and `minimum` contain one number for each group of codes. The result is stored in
    `values`.
    """
    out = values[: codes.size - begin]
    np.copyto(out, codes[begin : begin + out.size])
    for how, numbers in ((np.multiply, scale), (np.subtract, minimum)):
        if numbers is not None:
            width = codes.size // numbers.size
            groups = numbers.reshape(-1)[begin // width : (begin + out.size) // width]
            # np.repeat is faster than broadcasting, because broadcasting starts a loop for each
            # group.
            how(out, np.repeat(groups, width), out=out)
    return out


# Fields of blocks


def _half(blocks: Array, at: int) -> Array:
    """Return the float16 number at byte `at` of each block, converted to float32.

    The result is an array with the dimensions [block, 1].
    """
    found: Array = blocks.view("<f2")[:, at // 2, None].astype("<f4")
    return found


def _field(blocks: Array, at: int, size: int) -> Array:
    """Return `size` bytes from byte `at` of each block, as an array [block, byte].

    The function copies each field as one element, because numpy copies short rows slowly.
    """
    copied = np.ascontiguousarray(blocks[:, at : at + size].view(f"V{size}"))
    found: Array = copied.view("u1")
    return found


def _planes(
    blocks: Array, at: int, runs: int, width: int, shifts: Sequence[int], mask: int
) -> Array:
    """Shift the bytes of consecutive fields by each of `shifts`.

    The result is an array of words with the dimensions [field, shift, word].

    Each block contains `runs` fields of `width` bytes, from byte `at` on. `mask` selects the bits
    of each shifted byte. The mask also clears bits that the shift moved from an adjacent byte.
    """
    fields = blocks[:, at : at + runs * width].view(f"V{width}").T
    words = np.ascontiguousarray(fields).view("<u8")
    made: Array = words[:, None] >> np.array(shifts, "<u8")[:, None]
    made &= np.uint64(mask * 0x0101010101010101)
    return made


def _in_turns(planes: Array, width: int) -> Array:
    """Interleave planes in units of `width` bytes.

    The result contains the first unit of each plane, then the second unit of each plane, and so on.
    """
    runs = planes.reshape(-1, planes.shape[-1]).view(f"V{width}")
    made = np.empty(runs.shape[::-1], runs.dtype)
    for number, plane in enumerate(runs):
        made[:, number] = plane
    return made.view("<u8").reshape(-1)


def _nibbles(blocks: Array, at: int, runs: int, width: int) -> Array:
    """Return codes of 4 bits. For each field, the low halves of its bytes precede the high halves.

    Each block contains `runs` fields of `width` bytes, from byte `at` on.
    """
    return _in_turns(_planes(blocks, at, runs, width, (0, 4), 15), width)


def _split(field: Array) -> Array:
    """Return an array [block, half byte]: the low half of each byte, then its high half."""
    return np.stack((field & 15, field >> 4), axis=-1).reshape(len(field), -1)


def _less(codes: Array, number: int) -> Array:
    """Subtract `number` from the codes, in place, and return the codes."""
    codes = codes.reshape(-1).view("i1")
    codes -= np.int8(number)
    return codes


@cache
def _bits() -> Array:
    """Return a table that maps a byte to a word of eight bytes.

    Byte number i of the word is bit number i of the input byte: 0 or 1.
    """
    bits = np.arange(256)[:, None] >> np.arange(8) & 1
    return bits.astype("u1").view("<u8").reshape(-1)


@cache
def _table(name: str) -> Array:
    """Return a table that maps codes to values.

    * "IQ4" and "FP4" map two 4-bit codes, in two bytes, to two values.
    * "ternary" maps a byte with four 2-bit codes to four bytes.
    * "E4M3" maps a byte to half of the absolute value of its E4M3 number.
    """
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
    # The absolute value of each E4M3 number, divided by 2. NVFP4 has no NaN.
    exponent, mantissa = byte >> 3 & 15, byte & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 8)
    halves = np.where(exponent > 0, normal, mantissa * 2.0**-10).astype("<f4")
    halves[0x7F] = 0
    return halves


def _looked_up(name: str, nibbles: Array) -> Array:
    """Return the values of 4-bit codes, one value per byte. One lookup returns two values."""
    return np.take(_table(name), nibbles.view("<u2"), mode="clip")


@cache
def _grid(name: str) -> Array:
    """Return the vectors of a grid in ascending order. Each vector is stored as one integer."""
    lines = Path(__file__).with_name("ggml_grids.txt").read_text().splitlines()
    rows = dict(line.split(" ", 1) for line in lines if not line.startswith("#"))
    count, levels, members = rows[name].split()
    values = np.array(levels.split(","), "i1")
    bitmap = np.unpackbits(np.frombuffer(b64decode(members), "u1"), bitorder="little")
    digits = np.flatnonzero(bitmap)[:, None] // len(values) ** np.arange(int(count)) % len(values)
    found: Array = values[digits].view(f"<u{count}").reshape(-1)
    return found


@cache
def _parity() -> Array:
    """Return a table that maps seven sign bits to eight sign bits, with an even number of ones."""
    seven = np.arange(128)
    ones = sum((seven >> bit & 1 for bit in range(7)), np.zeros(128, int))
    return (seven | (ones & 1) << 7).astype("u1")


def _signed(words: Array, signs: Array) -> Array:
    """Negate each code, in place, if its bit in `signs` is set. No code is 0.

    Words contain eight codes. To negate a code, invert its bits and add 1.
    """
    words ^= np.take(_bits() * np.uint64(255), signs, mode="clip")
    words += np.take(_bits(), signs, mode="clip")
    return words


# Types with blocks of 32 to 128 elements: one scale per block. Q4_1 and Q5_1 also have one minimum.


def _q5(b: Array, at: int) -> Array:
    """Return codes of 5 bits. The fifth bits are in a word at byte `at`, before the low 4 bits."""
    codes = _nibbles(b, at + 4, 1, 16)
    codes |= np.unpackbits(_field(b, at, 4), bitorder="little").view("<u8") << np.uint64(4)
    return codes


def _mxfp4(b: Array) -> Parts:
    scale = np.ldexp(np.float32(1), b[:, 0].astype("i4") - 128)
    return _looked_up("FP4", _nibbles(b, 1, 1, 16)), scale


def _nvfp4(b: Array) -> Parts:
    scale = np.take(_table("E4M3"), b[:, :4] & 0x7F)
    scale[b[:, :4] == 0xFF] = 240
    return _looked_up("FP4", _nibbles(b, 4, 4, 8)), scale


def _q1_0(b: Array) -> Parts:
    bits = np.unpackbits(_field(b, 2, 16), bitorder="little")
    bits <<= np.uint8(1)
    return _less(bits, 1), _half(b, 0)


# K types: 256 elements per block, with a scale for each 16 or 32 elements. Some K types have
# minimums.


def _q2_k(b: Array) -> Parts:
    scales = _field(b, 0, 16)
    codes = _in_turns(_planes(b, 16, 2, 32, PAIRS, 3), 32)
    return codes, _half(b, 80) * (scales & 15), _half(b, 82) * (scales >> 4)


def _q3_k(b: Array) -> Parts:
    # Bit k of each byte of the field belongs to the k-th group of 32 elements.
    codes = _planes(b, 0, 1, 32, range(8), 1).reshape(2, 4, -1) << np.uint64(2)
    codes |= _planes(b, 32, 2, 32, PAIRS, 3)
    words = np.ascontiguousarray(b.view("<u2")[:, 48:54]).view("<u4")
    scales = np.empty((len(b), 4), "<u4")  # a word contains four scales of six bits, one per byte
    for place in range(4):
        low = words[:, place % 2] >> np.uint32(4 * (place // 2)) & np.uint32(0x0F0F0F0F)
        two = words[:, 2] >> np.uint32(2 * place) & np.uint32(0x03030303)
        scales[:, place] = low | two << np.uint32(4)
    steps = _less(scales, 32).reshape(-1, 16)
    return _less(_in_turns(codes, 32), 4), _half(b, 108) * steps


def _scales_of_6_bits(b: Array) -> tuple[Array, Array]:
    """Return the 8 scales and the 8 minimums of each block of Q4_K or Q5_K.

    A block stores the scales and minimums in 12 bytes.
    """
    first, second, third = np.ascontiguousarray(b.view("<u4")[:, 1:4].T)
    six, four, two = (np.uint32(each * 0x01010101) for each in (0x3F, 0x0F, 0x30))
    found = np.empty((2, len(b), 2), "<u4")
    found[0, :, 0], found[1, :, 0] = first & six, second & six
    found[0, :, 1] = third & four | first >> np.uint32(2) & two
    found[1, :, 1] = third >> np.uint32(4) & four | second >> np.uint32(2) & two
    scales, minimums = found.view("u1")
    return _half(b, 0) * scales, _half(b, 2) * minimums


def _q5_k(b: Array) -> Parts:
    codes = _planes(b, 16, 1, 32, range(8), 1).reshape(4, 2, -1) << np.uint64(4)
    codes |= _planes(b, 48, 4, 32, (0, 4), 15)
    return _in_turns(codes, 32), *_scales_of_6_bits(b)


def _q6_k(b: Array) -> Parts:
    # The dimensions are [half of the block, field and half byte, word].
    codes = _planes(b, 128, 2, 32, PAIRS, 3) << np.uint64(4)
    # The dimensions are [half of the block, field, half byte, word].
    low = _planes(b, 0, 4, 32, (0, 4), 15).reshape(2, 2, 2, -1)
    codes.reshape(low.shape)[:] |= low.swapaxes(1, 2)
    return _less(_in_turns(codes, 32), 32), _half(b, 208) * _field(b, 192, 16).view("i1")


# IQ types: a code selects a vector of a grid. Signs are separate.


def _iq2_xxs(b: Array) -> Parts:
    pairs = _field(b, 2, 64).view("<u4").reshape(-1, 8, 2)
    words = np.take(_grid("iq2_xxs"), np.ascontiguousarray(pairs[..., 0]).view("u1"), mode="clip")
    codes, scale = _with_seven(words, pairs[..., 1], 4)
    return codes, (_half(b, 0) * scale) * np.float32(0.25)


def _with_seven(words: Array, field: Array, count: int) -> tuple[Array, Array]:
    """Return the codes of `words` with their signs, and ``0.5 + scale``.

    Each number in `field` contains `count` groups of 7 sign bits. The top 4 bits of the number are
    the scale.
    """
    shifts = np.arange(0, 7 * count, 7, dtype="<u4")
    signs = np.take(_parity(), field[..., None] >> shifts & 127, mode="clip")
    codes = _signed(words.reshape(-1), signs.reshape(-1))
    return codes, np.float32(0.5) + (field >> 28).astype("<f4")


def _iq2_xs(b: Array) -> Parts:
    field = _field(b, 2, 64).view("<u2")
    words = np.take(_grid("iq2_xs"), field & 511, mode="clip")
    codes = _signed(words, np.take(_parity(), field >> 9, mode="clip"))
    return codes, _half_steps(b, _split(b[:, 66:74]))


def _half_steps(b: Array, steps: Array) -> Array:
    return (_half(b, 0) * (np.float32(0.5) + steps.astype("<f4"))) * np.float32(0.25)


def _iq2_s(b: Array) -> Parts:
    high = (b[:, 66:74, None] >> np.arange(0, 8, 2, dtype="u1") & 3).reshape(-1, 32)
    words = np.take(_grid("iq2_s"), b[:, 2:34] | high.astype("<u2") << 8, mode="clip")
    return _signed(words, b[:, 34:66]), _half_steps(b, _split(b[:, 74:82]))


def _iq3_xxs(b: Array) -> Parts:
    words = np.take(_grid("iq3_xxs"), b[:, 2:66], mode="clip").view("<u8")
    codes, scale = _with_seven(words, _field(b, 66, 32).view("<u4"), 4)
    return codes, (_half(b, 0) * scale) * np.float32(0.5)


def _iq3_s(b: Array) -> Parts:
    high = np.take(_bits(), b[:, 66:74], mode="clip").view("u1")
    words = np.take(_grid("iq3_s"), b[:, 2:66] | high.astype("<u2") << 8, mode="clip")
    scale = _half(b, 0) * (1 + 2 * _split(b[:, 106:110]).astype("<f4"))
    return _signed(words.view("<u8"), b[:, 74:106]), scale


@cache
def _shifted_grid() -> Array:
    """Return two grids in one array: ``8 * grid + 1``, then ``8 * grid - 1``, for the grid of IQ1.

    The offsets of IQ1 are 0.125 and -0.125.
    """
    eights = _grid("iq1").view("i1") * np.int8(8)
    return np.concatenate((eights + np.int8(1), eights - np.int8(1))).view("<u8")


def _iq1_s(b: Array) -> Parts:
    field = _field(b, 34, 16).view("<u2")
    high = field[..., None] >> np.arange(0, 12, 3, dtype="<u2") & 7 | (field >> 15 << 3)[..., None]
    words = np.take(_shifted_grid(), b[:, 2:34] | high.reshape(-1, 32) << 8, mode="clip")
    scale = _half(b, 0) * (2 * (field >> 12 & 7) + 1).astype("<f4")
    return words, scale * np.float32(0.125)


def _iq1_m(b: Array) -> Parts:
    field = _field(b, 48, 8).view("<u2")
    bits = sum((field[:, k] >> 12 << 4 * k for k in range(1, 4)), field[:, 0] >> 12)
    half = bits.astype("<u2").view("<f2").astype("<f4")[:, None]
    words = np.take(
        _shifted_grid(), b[:, :32] | _split(b[:, 32:48]).astype("<u2") << 8, mode="clip"
    )
    steps = (field[..., None] >> np.arange(0, 12, 3, dtype="<u2") & 7).reshape(-1, 16)
    return words, (half * (2 * steps + 1).astype("<f4")) * np.float32(0.125)


def _iq4_xs(b: Array) -> Parts:
    codes = _looked_up("IQ4", _nibbles(b, 8, 8, 16))
    high = _field(b, 2, 2).view("<u2") >> np.arange(0, 16, 2, dtype="<u2") & 3
    scale = (_split(b[:, 4:8]) | high.astype("u1") << 4).astype("i1") - np.int8(32)
    return codes, _half(b, 0) * scale


# Ternary type TQ1_0


def _tq1_0(b: Array) -> Parts:
    # The ternary digit of a byte n in `powers` is ``3 * n >> 8``: 0 for n up to 85, 1 for n from 86
    # to 170, and 2 for larger n.
    powers = b.reshape(-1) * np.array((1, 3, 9, 27, 81), "u1")[:, None]
    digits = (powers > np.uint8(85)).view("u1") + (powers > np.uint8(170)).view("u1")
    codes = np.empty((len(b), 256), "u1")
    at = 0
    for start, size, count in ((0, 32, 5), (32, 16, 5), (48, 4, 4)):
        for digit in digits[:count].reshape(count, *b.shape):
            runs = codes[:, at : at + size].view(f"V{size}")
            runs[:] = digit[:, start : start + size].view(f"V{size}")
            at += size
    return _less(codes, 1), _half(b, 52)


DECODERS: dict[str, Callable[[Array], Parts]] = {
    "Q4_0": lambda b: (_less(_nibbles(b, 2, 1, 16), 8), _half(b, 0)),
    "Q4_1": lambda b: (_nibbles(b, 4, 1, 16), _half(b, 0), -_half(b, 2)),
    "Q5_0": lambda b: (_less(_q5(b, 2), 16), _half(b, 0)),
    "Q5_1": lambda b: (_q5(b, 4), _half(b, 0), -_half(b, 2)),
    "Q8_0": lambda b: (_field(b, 2, 32), _half(b, 0)),
    "Q4_K": lambda b: (_nibbles(b, 16, 4, 32), *_scales_of_6_bits(b)),
    "IQ4_NL": lambda b: (_looked_up("IQ4", _nibbles(b, 2, 1, 16)), _half(b, 0)),
    "Q2_0": lambda b: (_less(np.take(_table("ternary"), b[:, 2:], mode="clip"), 1), _half(b, 0)),
    "TQ2_0": lambda b: (_less(_in_turns(_planes(b, 0, 2, 32, PAIRS, 3), 32), 1), _half(b, 64)),
    "Q2_K": _q2_k, "Q3_K": _q3_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs, "IQ3_XXS": _iq3_xxs, "IQ1_S": _iq1_s, "IQ3_S": _iq3_s, "IQ2_S": _iq2_s,
    "IQ4_XS": _iq4_xs, "IQ1_M": _iq1_m, "TQ1_0": _tq1_0, "MXFP4": _mxfp4, "NVFP4": _nvfp4,
    "Q1_0": _q1_0,
}  # fmt: skip
