"""Convert bytes to and from NumPy numbers, and cast elements, mostly without torch.

Importing torch takes a second and 200 MiB, more than everything that is done here. numpy lacks
``bfloat16``, 8-bit floats, ``complex32`` and ``bcomplex32``, and converts float16 slowly. These
types are decoded to float32 or complex64, which represent all of their values. They are encoded
from float32 by rounding to the nearest, ties to even, as in torch. float64 is first rounded to
float32, also as in torch. A NaN stays NaN; in torch, its bits depend on the processor.

Numbers above the range become the largest number in ``float8_e4m3fn``, infinity in ``float8_e5m2``,
and NaN in the two ``fnuz`` types. The ``fnuz`` types have neither infinities nor a negative zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ckptkit.compute.operation import Rows, Swap, as_bytes
from ckptkit.core.bytesource import Pending, Piece, Record
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import TensorError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = np.ndarray[Any, Any]


# 8-bit types that are cast without torch, and the code of NaN.
_SMALL = {
    "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7F, "float8_e4m3fnuz": 0x80, "float8_e5m2fnuz": 0x80,
}  # fmt: skip
# As bits of float32: the least normal number of float16, the largest number that is not rounded to
# infinity, and the difference between the exponent biases.
_LEAST, _MOST, _REBIASED = 0x38800000, 0x477FEFFF, 112 << 23
_OTHERS = ("bfloat16", "complex32", "bcomplex32", "float8_e8m0fnu")  # `decode` supports these too
FLOATS = frozenset({"float64", "float32", "float16", "bfloat16", *_SMALL})  # types of `encode`
NUMBERS = ("float", "int", "bool", "complex")  # kinds of dtypes whose elements are numbers


def decode(data: Piece, dtype: DType) -> Array:
    """Return the elements as a 1-D array of their own or a wider type. Bools are 0 and 1.

    Raises UnsupportedError for elements that are not numbers by themselves: quantized, packed, or
    smaller than a byte.
    """
    import numpy as np

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
    """Return whether `decode` supports the type."""
    return dtype.numpy is not None or dtype.name in _SMALL or dtype.name in _OTHERS


def encode(values: Array, dtype: DType) -> memoryview:
    """Return the bytes of numbers as elements of `dtype`, one of `FLOATS`.

    If `values` has this type already, the result is a view of its bytes.
    """
    import numpy as np

    # Overflow gives infinity, or the value that the type has instead.
    with np.errstate(all="ignore"):
        if dtype.name in ("float64", "float32"):
            return as_bytes(values.astype(f"<f{dtype.itemsize}", copy=False))
        single = values.astype("<f4", copy=False)
        if dtype.name == "float16":
            return as_bytes(_float16(single))
        if dtype.name == "bfloat16":
            return as_bytes(single.astype(own_dtype("bfloat16")))
        # Look up the upper half of each number. It has 7 bits of mantissa and codes at most 3, so
        # its last bit is free to mark that the lower half is not zero.
        bits = single.view("<u4")
        halves = (bits >> 16).astype(np.uint16)
        halves |= (bits & 0xFFFF) != 0
        return as_bytes(np.take(_codes(dtype.name), halves))


@lru_cache
def own_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of ml_dtypes with this name, for types that numpy lacks."""
    import ml_dtypes
    import numpy as np

    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
    return found


def _float16(values: Array) -> Array:
    """Return codes of float16, rounded to nearest, ties to even.

    For numbers that are normal in both types, half of the last place is added, or slightly less if
    the tie must go down to even. numpy converts the rest: zeros, very small and large ones, NaN.
    """
    import numpy as np

    bits = values.view("<u4")
    others = bits & 0x7FFFFFFF
    others -= _LEAST
    odd = np.flatnonzero(others > _MOST - _LEAST)  # smaller numbers wrapped around
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
    """Return float16 as float32: shift the bits of normal numbers, look up the others."""
    import numpy as np

    others = (codes & 0x7FFF) - 0x400  # zeros and subnormal numbers wrap around
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
    """Convert codes of float16 to bfloat16 or back. `table` has the result of every code.

    Shift the mantissas of numbers that are normal in both types, look up the others.
    """
    import numpy as np

    sizes = codes & 0x7FFF
    if target.name == "bfloat16":
        odd = np.flatnonzero(sizes - 0x400 >= 0x7800)  # smaller numbers wrap around
        made = sizes >> 3
        made &= 1  # ties to even
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
    """Return the float32 value of each code of float16."""
    import numpy as np

    with np.errstate(invalid="ignore"):  # for signaling NaNs
        return np.arange(1 << 16, dtype="<u2").view("<f2").astype("<f4")


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

    values = (np.arange(1 << 16, dtype="<u4") << 16).view("<f4")
    with np.errstate(all="ignore"):
        codes = values.astype(own_dtype(name)).view("u1")
    if name == "float8_e4m3fn":  # ml_dtypes maps larger numbers to NaN
        codes[codes & 0x7F == 0x7F] -= 1
    sign = codes & 0x80 if _SMALL[name] == 0x7F else 0
    found: Array = np.where(np.isnan(values), _SMALL[name] | sign, codes)
    return found


# The operation


@dataclass(frozen=True, slots=True)
class Cast(Rows):
    """Elements of dtype `source` converted to dtype `target`, as torch converts them.

    Conversions among floats and from integers to floats use numpy; all others use torch.
    """

    source: str
    target: str

    @property
    def rows(self) -> tuple[int, ...]:
        return BY_NAME[self.target].itemsize, BY_NAME[self.source].itemsize

    def of(self, *pieces: Piece) -> memoryview:
        import numpy as np

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
    """Return a lookup table for 16 bits of input: one code of 16 bits, or two of 8."""
    import numpy as np

    codes = np.arange(1 << 16, dtype="<u2")
    made = np.frombuffer(encode(decode(codes.data.cast("B"), source), target), "u1")
    found: Array = made.view(f"<u{len(made) >> 16}")
    return found


def _by_torch(data: Piece, source: DType, target: DType) -> memoryview:
    """Convert elements. Raises UnsupportedError if the installed torch cannot."""
    import torch

    values = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(torch_dtype(source))
    try:
        return as_bytes(values.to(torch_dtype(target)).view(torch.uint8).numpy())
    except (RuntimeError, NotImplementedError) as error:
        raise UnsupportedError(
            f"torch {torch.__version__} cannot convert {source} to {torch_dtype(target)}"
        ) from error


def torch_dtype(dtype: DType) -> torch.dtype:
    """Return the torch.dtype. Raises UnsupportedError if the installed torch lacks it."""
    import torch

    found = getattr(torch, dtype.name, None)
    if not isinstance(found, torch.dtype):
        hint = "ckptkit.dequantize converts its codes to floats" if dtype.block > 1 else None
        raise UnsupportedError(f"torch {torch.__version__} has no dtype {dtype}", hint=hint)
    return found


# The expressions that `Compute` supports, each with its inverse.
INVERSES = {"x - 1": "x + 1", "x + 1": "x - 1", "log(-x)": "-exp(x)", "-exp(x)": "log(-x)"}


@dataclass(frozen=True, slots=True)
class Compute(Rows):
    """`expression` of each element x, in float32, or float64 if that is the dtype."""

    expression: str
    dtype: str
    name: str  # for error messages

    @property
    def rows(self) -> tuple[int, ...]:
        return (BY_NAME[self.dtype].itemsize,) * 2

    def of(self, *pieces: Piece) -> memoryview:
        """Raise TensorError if the result for a finite number is not finite."""
        import numpy as np

        dtype = BY_NAME[self.dtype]
        wide = "<f8" if dtype.name == "float64" else "<f4"
        with np.errstate(all="ignore"):
            values = decode(pieces[0], dtype).astype(wide)
            if self.expression == "log(-x)":  # in float64, rounded once
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
    """Return the elements of `record`, of dtype `source`, as little-endian ones of dtype `target`.

    Raises TensorError for conversions without a clear meaning (quantized types, complex to another
    kind), and for a record whose length is not divisible by the element size.
    """
    if not {source.kind, target.kind} <= set(NUMBERS) or source.bits % 8 or target.bits % 8:
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
    """Reverse the byte order of each element; of complex numbers, that of each component."""
    if dtype.component == 1:
        return record
    return Pending(Swap(dtype.component), (record,), record.length)
