"""Elements as numbers of numpy, and the operation that casts them, mostly without torch.

Importing torch takes a second and 200 MiB, which is more than all that is done here takes. numpy
has no ``bfloat16``, no floating-point types of 8 bits, no ``complex32`` and no ``bcomplex32``, and
converts float16 one number at a time. They are read as float32 or complex64, which hold all of
their values, and written by rounding float32 to the nearest, ties to even, as torch does; float64
is rounded to float32 first, again as torch does. A NaN stays one: which bits it has depends in
torch on the processor.

What is too large for ``float8_e4m3fn`` becomes its largest number, and infinite for
``float8_e5m2``. For the two types ``fnuz``, which have neither infinities nor a negative zero, it
becomes NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptkit.compute.operation import Rows, Swap, as_bytes
from ckptkit.core.bytesource import Pending, Piece, Record
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import TensorError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = np.ndarray[Any, Any]


class _Small(NamedTuple):
    """Codes of a floating-point type of 8 bits: its largest number, what is larger, NaN."""

    largest: int
    overflow: int
    nan: int


_SMALL = {
    "float8_e4m3fn": _Small(0x7E, 0x7E, 0x7F),  # older versions of torch make NaN of larger numbers
    "float8_e5m2": _Small(0x7B, 0x7C, 0x7F),
    "float8_e4m3fnuz": _Small(0x7F, 0x80, 0x80),
    "float8_e5m2fnuz": _Small(0x7F, 0x80, 0x80),
}
# Bits of float32: the least normal number of float16, the largest that is not rounded up to
# infinity, and the difference of the biases of the exponents.
_LEAST, _MOST, _REBIASED = 0x38800000, 0x477FEFFF, 112 << 23
_OTHERS = ("bfloat16", "complex32", "bcomplex32", "float8_e8m0fnu")  # that `decode` knows
FLOATS = frozenset({"float64", "float32", "float16", "bfloat16", *_SMALL})  # cast without torch
_NUMBERS = ("float", "int", "bool", "complex")


def decode(data: Piece, dtype: DType) -> Array:
    """Return the elements as an array of one dimension, of their own type or of a wider one.

    Bools are 0 and 1.

    Raises UnsupportedError for elements that are not numbers by themselves: quantized, packed,
    smaller than a byte.
    """
    import numpy as np

    if dtype.name in ("float16", "complex32"):
        single = _halves(np.frombuffer(data, "<u2"))
        return single if dtype.name == "float16" else single.view("<c8")
    if dtype.kind == "bool":  # any other byte than 0 is true
        truth: Array = (np.frombuffer(data, "u1") != 0).view("u1")
        return truth
    if dtype.numpy is not None:
        return np.frombuffer(data, np.dtype(dtype.numpy).newbyteorder("<"))
    if dtype.name in ("bfloat16", "bcomplex32"):
        single = np.frombuffer(data, own_dtype("bfloat16")).astype("<f4")
        return single if dtype.name == "bfloat16" else single.view("<c8")
    if dtype.name in _SMALL or dtype.name == "float8_e8m0fnu":
        values: Array = np.take(_values(dtype.name), np.frombuffer(data, "u1"))
        return values
    raise UnsupportedError(f"elements of {dtype} are not numbers by themselves")


def is_decoded(dtype: DType) -> bool:
    """Return whether `decode` knows the type."""
    return dtype.numpy is not None or dtype.name in _SMALL or dtype.name in _OTHERS


def encode(values: Array, dtype: DType) -> memoryview:
    """Return the bytes of floating-point numbers as elements of `dtype`, one of `FLOATS`."""
    import numpy as np

    # What is too large becomes infinite, or what its type has for that.
    with np.errstate(all="ignore"):
        if dtype.name in ("float64", "float32"):
            return as_bytes(values.astype(f"<f{dtype.itemsize}"))
        single = values.astype("<f4", copy=False)
        if dtype.name == "float16":
            return as_bytes(_float16(single))
        if dtype.name == "bfloat16":
            return as_bytes(single.astype(own_dtype("bfloat16")))
        return as_bytes(_small(single, dtype.name))


def own_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy type of a dtype that ml_dtypes has and numpy has not."""
    import ml_dtypes
    import numpy as np

    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return found


def _float16(values: Array) -> Array:
    """Return codes of float16, rounded to nearest, ties to even.

    Half of a last place is added to numbers that are normal in both types, a little less where that
    makes a tie even. numpy converts the others, one by one: zeros, small and large ones, NaN.
    """
    import numpy as np

    bits = values.view("<u4")
    others = bits & 0x7FFFFFFF
    others -= _LEAST
    odd = np.flatnonzero(others > _MOST - _LEAST)  # below the least they wrap around
    if len(odd) > len(values) // 4:
        return values.astype("<f2").view("<u2")
    rounded = bits >> 13
    rounded &= 1
    rounded += bits
    rounded += 0xFFF - _REBIASED & 0xFFFFFFFF
    rounded >>= 13
    rounded &= 0x7FFF
    made: Array = rounded.astype("<u2")
    np.right_shift(bits, 16, out=rounded)
    rounded &= 0x8000
    made |= rounded.astype("<u2")
    if len(odd):
        made[odd] = values[odd].astype("<f2").view("<u2")
    return made


def _halves(codes: Array) -> Array:
    """Return float16 as float32: its bits in place, and 2**112 for what the exponent lacks.

    All are looked up where some are infinite or NaN, or many are below the normal numbers, which
    take many processors a hundred times as long.
    """
    import numpy as np

    sizes = codes & 0x7FFF
    largest = sizes.max(initial=0)
    sizes -= 1  # zero, which takes no longer than others, wraps around
    below = np.count_nonzero(sizes < 0x3FF)
    if largest >= 0x7C00 or below > len(codes) // 256:
        found: Array = np.take(_half_values(), codes, mode="clip")
        return found
    wide = codes.view("<i2").astype("<i4")
    wide <<= 13
    wide &= np.int32(0x8FFFE000 - (1 << 32))
    values: Array = wide.view("<f4")
    values *= np.float32(2.0**112)
    return values


@lru_cache
def _half_values() -> Array:
    """Return the float32 value of each code of float16."""
    import numpy as np

    with np.errstate(invalid="ignore"):  # a NaN that asks for a trap
        return np.arange(1 << 16, dtype="<u2").view("<f2").astype("<f4")


def _small(values: Array, name: str) -> Array:
    """Through a table of what the upper halves become; bit 0 of such a half says that something
    follows.

    8 bits have at most 3 of mantissa, an upper half has 7: where one code ends and the next begins,
    bit 0 is not set.
    """
    import numpy as np

    bits = values.view("<u4")
    halves = (bits >> 16).astype(np.uint16)
    halves |= (bits & 0xFFFF) != 0
    codes: Array = np.take(_codes(name), halves)
    return codes


@lru_cache
def _values(name: str) -> Array:
    """Return the float32 value of each of the 256 codes."""
    import numpy as np

    values = np.arange(256, dtype="u1").view(own_dtype(name)).astype("<f4")
    values[np.isnan(values)] = np.nan
    found: Array = values
    return found


@lru_cache
def _codes(name: str) -> Array:
    """Return the code for the upper half of each float32: the nearest value, ties to even."""
    import numpy as np

    kind = _SMALL[name]
    values = _values(name)[: kind.largest + 1].astype("f8")  # rising
    beyond = 2 * values[-1] - values[-2]  # where the next number would be
    middles = (values + np.append(values[1:], beyond)) / 2
    half = np.arange(1 << 16, dtype="<u4")
    size = (half << 17 >> 1).view("<f4").astype("f8")
    code = np.searchsorted(middles, size)  # the lower of two as near
    code += (code % 2 == 1) & np.isin(size, middles)
    code[code > kind.largest] = kind.overflow
    code[np.isnan(size)] = kind.nan
    signed = (code > 0) | (kind.nan != 0x80)
    codes: Array = (code | np.where(signed & (half > 0x7FFF), 0x80, 0)).astype("u1")
    return codes


# The operation


@dataclass(frozen=True, slots=True)
class Cast(Rows):
    """Elements of dtype `source` converted to dtype `target`, as torch does it.

    torch itself does it unless both are floating-point types.
    """

    source: str
    target: str

    @property
    def units(self) -> tuple[int, ...]:
        return (BY_NAME[self.source].itemsize,)

    @property
    def unit(self) -> int:
        return BY_NAME[self.target].itemsize

    def of(self, *pieces: Piece) -> memoryview:
        import numpy as np

        (data,) = pieces
        source, target = BY_NAME[self.source], BY_NAME[self.target]
        if not {self.source, self.target} <= FLOATS:
            import torch

            return as_bytes(as_torch(data, source, torch_dtype(target)).view(torch.uint8).numpy())
        if target.itemsize <= {1: 4, 2: 2}.get(source.itemsize, 0) and len(data) % 2 == 0:
            codes = np.frombuffer(data, "<u2")
            return as_bytes(np.take(_table(source, target), codes, mode="clip"))
        return encode(decode(data, source), target)


@lru_cache(8)
def _table(source: DType, target: DType) -> Array:
    """Return what each 16 bits of codes become: one of 16 bits, or two of 8."""
    import numpy as np

    codes = np.arange(1 << 16, dtype="<u2")
    made = np.frombuffer(encode(decode(codes.data.cast("B"), source), target), "u1")
    found: Array = made.view(f"<u{len(made) >> 16}")
    return found


def as_torch(data: Piece, source: DType, target: torch.dtype) -> torch.Tensor:
    """Elements of dtype `source`, converted. Raises UnsupportedError where the installed torch
    cannot."""
    import torch

    values = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(torch_dtype(source))
    try:
        return values.to(target)
    except (RuntimeError, NotImplementedError) as error:
        raise UnsupportedError(
            f"torch {torch.__version__} cannot convert {source} to {target}"
        ) from error


def torch_dtype(dtype: DType) -> torch.dtype:
    """torch's own object for `dtype`. Raises UnsupportedError where the installed torch has
    none."""
    import torch

    found = getattr(torch, dtype.name, None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedError(f"torch {torch.__version__} has no dtype {dtype}")
    return found


def cast_record(record: Record, source: DType, target: DType, *, big_endian: bool) -> Record:
    """Return the elements of `record`, of dtype `source`, as little-endian ones of dtype `target`.

    Raises TensorError for a conversion that has no plain meaning (quantized types, complex to
    anything else) and for a record that is not a whole number of elements.
    """
    if (
        source.kind not in _NUMBERS
        or target.kind not in _NUMBERS
        or source.bits % 8
        or target.bits % 8
    ):
        raise TensorError(f"{source} cannot be cast to {target}")
    if source.kind == "complex" and target.kind != "complex":
        raise TensorError(f"{source} cannot be cast to {target}: the imaginary part would be lost")
    if source.packed != target.packed or record.length % source.itemsize:
        raise TensorError(f"{record.length:,} bytes of {source} cannot be cast to {target}")
    if big_endian:
        record = swapped(record, source)
    if source == target:
        return record
    length = record.length // source.itemsize * target.itemsize
    return Pending(Cast(source.name, target.name), (record,), length)


def swapped(record: Record, dtype: DType) -> Record:
    """Return the elements of a record with their bytes reversed, those of each component apart."""
    if dtype.component == 1:
        return record
    return Pending(Swap(dtype.component), (record,), record.length)


# Codes of less than a byte

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# bitsandbytes: functional.py, create_normal_map and the table of its CPU kernel
INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ: column of each nibble, from the low end


@lru_cache
def numbers(table: str) -> Array:
    """The float32 number of each code of a table. Shared: not to be written to."""
    import numpy as np

    if table in ("e2m1", "e2m1+0"):
        values = np.array((*E2M1, *(-each for each in E2M1)), "<f4")
        values[8] = 0.0 if table == "e2m1+0" else -0.0
    elif table in ("e2m3", "e3m2"):
        values = _six_bits(*((1, 3) if table == "e2m3" else (3, 2)))
    elif table == "exponent":  # 2**128 is infinite
        with np.errstate(over="ignore"):
            values = np.ldexp(np.ones(256, "<f4"), np.arange(256) - 127).astype("<f4")
    else:
        values = decode(bytes(range(256)), BY_NAME[table])
    values.setflags(write=False)
    made: Array = values
    return made


def _six_bits(bias: int, mantissa: int) -> Array:
    """The numbers of a format of 6 bits without infinities."""
    import numpy as np

    code = np.arange(32)
    exponent, fraction = code >> mantissa, code % (1 << mantissa)
    significand = np.where(exponent > 0, fraction + (1 << mantissa), fraction)
    positive = np.ldexp(significand.astype("<f4"), np.maximum(exponent, 1) - bias - mantissa)
    return np.concatenate([positive, -positive]).astype("<f4")


def unpack(data: Array, bits: int, count: int, *, high_first: bool = False) -> Array:
    """The first `count` codes of each row of bytes, as bytes; dense, from the low bits up."""
    import numpy as np

    if bits == 8:
        return data[:, :count]
    if bits == 4:
        return _nibbles(data, high_first)[:, :count]
    groups = -(-count // 8)
    if data.shape[1] < groups * bits:
        data = np.pad(data, ((0, 0), (0, groups * bits - data.shape[1])))
    source = data[:, : groups * bits].reshape(len(data), groups, bits)
    made = np.empty((len(data), groups, 8), "u1")
    for number in range(8):
        first, shift = divmod(number * bits, 8)
        np.right_shift(source[..., first], shift, out=made[..., number])
        if shift + bits > 8:
            made[..., number] |= source[..., first + 1] << (8 - shift)
    made &= (1 << bits) - 1
    return made.reshape(len(data), -1)[:, :count]


def _nibbles(data: Array, high_first: bool) -> Array:
    """Two codes of each byte, which numpy moves as one number of 16 bits."""
    import numpy as np

    pairs = data.astype("<u2")
    if high_first:
        high = pairs >> 4
        pairs <<= 8
        pairs |= high
    else:
        pairs |= pairs << 4
    pairs &= np.uint16(0x0F0F)
    return pairs.view("u1").reshape(len(data), -1)


def unpack_words(data: Array, bits: int, count: int) -> Array:
    """The first `count` codes of each row of bytes, 32 // bits of them in a word."""
    import numpy as np

    words = np.ascontiguousarray(data).view("<u4")
    each = 32 // bits
    made = np.empty((*words.shape, each), "u1")
    for number in range(each):
        made[..., number] = (words >> (number * bits)) & ((1 << bits) - 1)
    return made.reshape(len(data), -1)[:, :count]


def untiled(data: Array, rows: int, columns: int) -> Array:
    """Scales that lie in tiles of 128 x 4, as [rows, columns]."""
    tall, wide = -(-rows // 128), -(-columns // 4)
    tiles = data.reshape(tall, wide, 32, 4, 4)
    made: Array = tiles.transpose(0, 3, 2, 1, 4).reshape(tall * 128, wide * 4)
    return made[:rows, :columns]
