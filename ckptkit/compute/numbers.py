"""Convert bytes to and from NumPy numbers, and cast elements, mostly without torch.

The import of torch takes a second and 200 MiB, more than most conversions. numpy lacks
``bfloat16``, 8-bit floats, ``complex32`` and ``bcomplex32``, and converts float16 slowly. `decode`
converts floats of 8 and 16 bits exactly to float32, and complex numbers of 32 bits exactly to
complex64. `encode` rounds float32 numbers to nearest, ties to even, as torch does. `encode` rounds
float64 numbers to float32 first, as torch does. A NaN remains a NaN. In torch, the bits of a NaN
depend on the processor.

A number above the range of an 8-bit type becomes

* the largest number in ``float8_e4m3fn``,
* infinity in ``float8_e5m2``,
* NaN in the two ``fnuz`` types, because these types have no infinities.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ckptkit.compute.lazy import Array, np
from ckptkit.compute.operation import Rows, Swap, as_bytes
from ckptkit.core.bytesource import Pending, Piece, Record
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import TensorError, UnsupportedError

if TYPE_CHECKING:
    import torch


# The code of NaN for each 8-bit type that ckptkit casts without torch.
_SMALL = {
    "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7F, "float8_e4m3fnuz": 0x80, "float8_e5m2fnuz": 0x80,
}  # fmt: skip
# Three constants as bits of float32: the smallest normal number of float16, the largest number that
# float16 does not round to infinity, and the difference between the exponent biases of float32 and
# float16.
_LEAST, _MOST, _REBIASED = 0x38800000, 0x477FEFFF, 112 << 23
# Dtypes that `decode` supports in addition to numpy's dtypes and the dtypes in `_SMALL`.
_OTHERS = ("bfloat16", "complex32", "bcomplex32", "float8_e8m0fnu")
FLOATS = frozenset({"float64", "float32", "float16", "bfloat16", *_SMALL})  # types of `encode`
NUMBERS = ("float", "int", "bool", "complex")  # kinds of dtypes whose elements are numbers


def decode(data: Piece, dtype: DType) -> Array:
    """Return the elements as a 1-D array of their dtype or a wider dtype. Bools are 0 and 1.

    Raise UnsupportedError for elements that are not numbers: quantized elements, packed elements,
    and elements smaller than a byte.
    """
    name = dtype.name
    if name in ("float16", "complex32"):
        single = _halves(np.frombuffer(data, "<u2"))
    elif dtype.kind == "bool":  # every byte but 0 is true
        truth: Array = (np.frombuffer(data, "u1") != 0).view("u1")
        return truth
    elif dtype.numpy is not None:
        return np.frombuffer(data, np.dtype(dtype.numpy).newbyteorder("<"))
    elif name in ("bfloat16", "bcomplex32"):
        single = np.frombuffer(data, own_dtype("bfloat16")).astype("<f4")
    elif name in _SMALL or name == "float8_e8m0fnu":
        single = np.take(_values(name), np.frombuffer(data, "u1"))
    else:
        raise UnsupportedError(f"elements of {dtype} are not plain numbers")
    return single if dtype.kind == "float" else single.view("<c8")


def is_decoded(dtype: DType) -> bool:
    """Return True if `decode` supports the dtype."""
    return dtype.numpy is not None or dtype.name in _SMALL or dtype.name in _OTHERS


def encode(values: Array, dtype: DType) -> memoryview:
    """Convert numbers to `dtype`, which is one of `FLOATS`. Return the bytes of the result.

    If `values` already has this dtype, return a view of its bytes.
    """
    # An overflow results in infinity, or in the value that the dtype has in place of infinity.
    with np.errstate(all="ignore"):
        if dtype.name in ("float64", "float32"):
            return as_bytes(values.astype(f"<f{dtype.itemsize}", copy=False))
        single = values.astype("<f4", copy=False)
        if dtype.name == "float16":
            return as_bytes(_float16(single))
        if dtype.name == "bfloat16":
            return as_bytes(single.astype(own_dtype("bfloat16")))
        # Use the upper 16 bits of each number to look up the code. The upper 16 bits contain 7 bits
        # of mantissa, but an 8-bit code has at most 3. If the lower 16 bits are not 0, set the last
        # of the upper 16 bits to 1. Otherwise, a number slightly above a tie would look like a tie.
        bits = single.view("<u4")
        halves = (bits >> 16).astype(np.uint16)
        halves |= (bits & 0xFFFF) != 0
        return as_bytes(np.take(_codes(dtype.name), halves))


def rounded(values: Array, dtype: str) -> Array:
    """Round float32 numbers to the dtype `dtype`. Return float32 numbers."""
    if dtype == "float32":
        return values
    kind = BY_NAME[dtype]
    made: Array = decode(encode(values.reshape(-1), kind), kind).reshape(values.shape)
    return made


@lru_cache
def own_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype `name` from ml_dtypes, because numpy has no such dtype."""
    import ml_dtypes

    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return found


def _float16(values: Array) -> Array:
    """Round float32 numbers to float16: to nearest, ties to even. Return the float16 codes.

    If a number is normal in both dtypes, the function adds half a unit in the last place and drops
    the low bits. For a tie, the function adds slightly less if the even number is below. All other
    numbers are converted by numpy: zeros, NaN, very small and very large numbers.
    """
    bits = values.view("<u4")
    others = bits & 0x7FFFFFFF
    others -= _LEAST
    odd = np.flatnonzero(others > _MOST - _LEAST)  # the subtraction wraps around for small numbers
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
    """Convert float16 codes to float32.

    The function shifts the bits of normal numbers, and looks up all other numbers in a table.
    """
    others = (codes & 0x7FFF) - 0x400  # the subtraction wraps around for zeros and subnormals
    odd = np.flatnonzero(others >= 0x7800)
    if len(odd) > len(codes) // 4:
        found: Array = np.take(_half_values(), codes, mode="clip")
        return found
    wide = codes.view("<i2").astype("<i4")
    wide <<= 13
    wide &= np.int32(0x8FFFE000 - (1 << 32))
    wide += _REBIASED
    values: Array = wide.view("<f4")
    values[odd] = _half_values()[codes[odd]]
    return values


def _between_halves(codes: Array, target: DType, table: Array) -> Array:
    """Convert float16 codes to bfloat16 codes, or bfloat16 codes to float16 codes.

    If a number is normal in both dtypes, the function shifts its mantissa. All other numbers are
    looked up in `table`, which contains the result for every code.
    """
    sizes = codes & 0x7FFF
    if target.name == "bfloat16":
        # The subtraction wraps around for smaller numbers.
        odd = np.flatnonzero(sizes - 0x400 >= 0x7800)
        made = sizes >> 3
        made &= 1  # rounds ties to even
        made += sizes
        made += 3
        made >>= 3
        made += _REBIASED >> 16
    else:
        odd = np.flatnonzero(sizes - (_LEAST >> 16) > _MOST - _LEAST >> 16)
        made = sizes << 3
        made -= _REBIASED >> 13 & 0xFFFF
    if len(odd) > len(codes) // 4:
        return np.take(table, codes, mode="clip")
    sizes ^= codes  # the signs
    made |= sizes
    made[odd] = table[codes[odd]]
    return made


@lru_cache
def _half_values() -> Array:
    """Return a table with the float32 value of each float16 code."""
    with np.errstate(invalid="ignore"):  # for signaling NaNs
        return np.arange(1 << 16, dtype="<u2").view("<f2").astype("<f4")


@lru_cache
def _values(name: str) -> Array:
    """Return a table with the float32 value of each of the 256 codes of the dtype `name`."""
    values = np.arange(256, dtype="u1").view(own_dtype(name)).astype("<f4")
    values[np.isnan(values)] = np.nan
    found: Array = values
    return found


@lru_cache
def _codes(name: str) -> Array:
    """Return a table that maps the upper 16 bits of a float32 to a code of the dtype `name`.

    The code is the nearest code, ties to even.
    """
    values = (np.arange(1 << 16, dtype="<u4") << 16).view("<f4")
    with np.errstate(all="ignore"):
        codes = values.astype(own_dtype(name)).view("u1")
    if name == "float8_e4m3fn":  # ml_dtypes maps numbers above the largest float8_e4m3fn to NaN
        codes[codes & 0x7F == 0x7F] -= 1
    sign = codes & 0x80 if _SMALL[name] == 0x7F else 0
    found: Array = np.where(np.isnan(values), _SMALL[name] | sign, codes)
    return found


# The operation


@dataclass(frozen=True, slots=True)
class Cast(Rows):
    """Converts elements of the dtype `source` to the dtype `target`, as torch does.

    Conversions of floats and integers to floats use numpy. All other conversions use torch.
    """

    source: str
    target: str

    @property
    def rows(self) -> tuple[int, ...]:
        return BY_NAME[self.target].itemsize, BY_NAME[self.source].itemsize

    def of(self, *pieces: Piece) -> memoryview:
        (data,) = pieces
        source, target = BY_NAME[self.source], BY_NAME[self.target]
        is_plain = source.kind in ("int", "bool") and source.numpy is not None
        if target.name not in FLOATS or not (is_plain or source.name in FLOATS):
            return _by_torch(data, source, target)
        is_small = target.itemsize <= {1: 4, 2: 2}.get(source.itemsize, 0)
        if is_small and source.kind == "float" and len(data) % 2 == 0:
            codes, table = np.frombuffer(data, "<u2"), _table(source, target)
            if source.itemsize == target.itemsize == 2:
                return as_bytes(_between_halves(codes, target, table))
            return as_bytes(np.take(table, codes, mode="clip"))
        return encode(decode(data, source), target)


@lru_cache(8)
def _table(source: DType, target: DType) -> Array:
    """Return a lookup table for 16 bits of input: one 16-bit element, or two 8-bit elements."""
    codes = np.arange(1 << 16, dtype="<u2")
    made = np.frombuffer(encode(decode(codes.data.cast("B"), source), target), "u1")
    found: Array = made.view(f"<u{len(made) >> 16}")
    return found


def _by_torch(data: Piece, source: DType, target: DType) -> memoryview:
    """Convert elements with torch.

    Raise UnsupportedError if the installed torch does not support the conversion.
    """
    import torch

    values = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(torch_dtype(source))
    try:
        return as_bytes(values.to(torch_dtype(target)).view(torch.uint8).numpy())
    except (RuntimeError, NotImplementedError) as error:
        raise UnsupportedError(
            f"torch {torch.__version__} cannot convert {source} to {torch_dtype(target)}"
        ) from error


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return torch's dtype for `dtype`. Raise UnsupportedError if the installed torch lacks it."""
    import torch

    found = getattr(torch, dtype.name, None)
    if not isinstance(found, torch.dtype):
        floats = "ckptkit.dequantize converts quantized weights to floats"
        hint = floats if dtype.block > 1 else None
        raise UnsupportedError(f"torch {torch.__version__} has no dtype {dtype}", hint=hint)
    return found


# The expressions that `Compute` supports, each with its inverse.
INVERSES = {"x - 1": "x + 1", "x + 1": "x - 1", "log(-x)": "-exp(x)", "-exp(x)": "log(-x)"}


@dataclass(frozen=True, slots=True)
class Compute(Rows):
    """Computes `expression` for each element x.

    The computation is in float64 if the dtype is float64, otherwise in float32.
    """

    expression: str
    dtype: str
    name: str  # for error messages

    @property
    def rows(self) -> tuple[int, ...]:
        return (BY_NAME[self.dtype].itemsize,) * 2

    def of(self, *pieces: Piece) -> memoryview:
        """Compute the expression. Raise TensorError if a finite number has a non-finite result."""
        dtype = BY_NAME[self.dtype]
        wide = "<f8" if dtype.name == "float64" else "<f4"
        with np.errstate(all="ignore"):
            values = decode(pieces[0], dtype).astype(wide)
            if self.expression == "log(-x)":  # compute in float64 and round once
                made = np.log(-values.astype("<f8")).astype(wide)
            elif self.expression == "-exp(x)":
                made = -np.exp(values.astype("<f8")).astype(wide)
            else:
                made = values + (np.float32(1) if self.expression == "x + 1" else np.float32(-1))
        if not np.isfinite(made[np.isfinite(values)]).all():
            bad = values[np.isfinite(values) & ~np.isfinite(made)][0]
            raise TensorError(f"{self.name!r}: {self.expression} of {bad:g} is not finite")
        return encode(made, dtype)


def cast_record(record: Record, source: DType, target: DType, *, big_endian: bool) -> Record:
    """Convert the elements of `record` from the dtype `source` to `target`, and to little-endian.

    Raise TensorError for quantized dtypes, and for a conversion of complex numbers to real numbers.
    Raise TensorError also if the length of the record is not divisible by the element size.
    """
    if not {source.kind, target.kind} <= set(NUMBERS) or source.bits % 8 or target.bits % 8:
        raise TensorError(f"{source} cannot be cast to {target}")
    if source.kind == "complex" and target.kind != "complex":
        raise TensorError(f"{source} cannot be cast to {target}: the imaginary part would be lost")
    if source.packed != target.packed or record.length % source.itemsize:
        raise TensorError(
            f"{record.length:,} bytes of {source} cannot be cast to {target}: only one dtype is "
            f"packed, or the length is not divisible by {source.itemsize}"
        )
    if big_endian:
        record = swapped(record, source.component)
    if source == target:
        return record
    length = record.length // source.itemsize * target.itemsize
    return Pending(Cast(source.name, target.name), (record,), length)


def swapped(record: Record, component: int) -> Record:
    """Reverse the bytes of each group of `component` bytes.

    A group is an element, or a part of a complex number (`DType.component`).
    """
    return Pending(Swap(component), (record,), record.length) if component > 1 else record
