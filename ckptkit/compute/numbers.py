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
from typing import TYPE_CHECKING, Any

from ckptkit.compute.operation import Rows, Swap, as_bytes
from ckptkit.core.bytesource import Pending, Piece, Record
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import TensorError, UnsupportedError

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = np.ndarray[Any, Any]


# Types of 8 bits that are cast without torch, and the code that a NaN becomes.
_SMALL = {
    "float8_e4m3fn": 0x7F, "float8_e5m2": 0x7F, "float8_e4m3fnuz": 0x80, "float8_e5m2fnuz": 0x80,
}  # fmt: skip
# Bits of float32: the least normal number of float16, the largest that is not rounded up to
# infinity, and the difference of the biases of the exponents.
_LEAST, _MOST, _REBIASED = 0x38800000, 0x477FEFFF, 112 << 23
_OTHERS = ("bfloat16", "complex32", "bcomplex32", "float8_e8m0fnu")  # that `decode` knows
FLOATS = frozenset({"float64", "float32", "float16", "bfloat16", *_SMALL})  # `encode` knows them
NUMBERS = ("float", "int", "bool", "complex")  # kinds of dtypes whose elements are numbers


def decode(data: Piece, dtype: DType) -> Array:
    """Return the elements as an array of one dimension, of their own type or of a wider one.

    Bools are 0 and 1.

    Raises UnsupportedError for elements that are not numbers by themselves: quantized, packed,
    smaller than a byte.
    """
    import numpy as np

    name = dtype.name
    if name in ("float16", "complex32"):
        single = _halves(np.frombuffer(data, "<u2"))
    elif dtype.kind == "bool":  # any other byte than 0 is true
        truth: Array = (np.frombuffer(data, "u1") != 0).view("u1")
        return truth
    elif dtype.numpy is not None:
        return np.frombuffer(data, np.dtype(dtype.numpy).newbyteorder("<"))
    elif name in ("bfloat16", "bcomplex32"):
        single = np.frombuffer(data, own_dtype("bfloat16")).astype("<f4")
    elif name in _SMALL or name == "float8_e8m0fnu":
        single = np.take(_values(name), np.frombuffer(data, "u1"))
    else:
        raise UnsupportedError(f"elements of {dtype} are not numbers by themselves")
    return single if dtype.kind == "float" else single.view("<c8")


def is_decoded(dtype: DType) -> bool:
    """Return whether `decode` knows the type."""
    return dtype.numpy is not None or dtype.name in _SMALL or dtype.name in _OTHERS


def encode(values: Array, dtype: DType) -> memoryview:
    """Return the bytes of numbers as elements of `dtype`, one of `FLOATS`.

    They are those of `values` itself if it has this type already.
    """
    import numpy as np

    # What is too large becomes infinite, or what its type has for that.
    with np.errstate(all="ignore"):
        if dtype.name in ("float64", "float32"):
            return as_bytes(values.astype(f"<f{dtype.itemsize}", copy=False))
        single = values.astype("<f4", copy=False)
        if dtype.name == "float16":
            return as_bytes(_float16(single))
        if dtype.name == "bfloat16":
            return as_bytes(single.astype(own_dtype("bfloat16")))
        # By the upper half of each number: 8 bits have at most 3 of mantissa, a half has 7. So its
        # last bit can say that something follows: no code ends there.
        bits = single.view("<u4")
        halves = (bits >> 16).astype(np.uint16)
        halves |= (bits & 0xFFFF) != 0
        return as_bytes(np.take(_codes(dtype.name), halves))


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
    if name == "float8_e4m3fn":  # older versions of torch make NaN of larger numbers, as ml_dtypes
        codes[codes & 0x7F == 0x7F] -= 1
    sign = codes & 0x80 if _SMALL[name] == 0x7F else 0
    found: Array = np.where(np.isnan(values), _SMALL[name] | sign, codes)
    return found


# The operation


@dataclass(frozen=True, slots=True)
class Cast(Rows):
    """Elements of dtype `source` converted to dtype `target`, as torch does it.

    torch itself does it unless both are floating-point types, or integers become those.
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


def _by_torch(data: Piece, source: DType, target: DType) -> memoryview:
    """Convert elements. Raises UnsupportedError where the installed torch cannot."""
    import torch

    values = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(torch_dtype(source))
    try:
        return as_bytes(values.to(torch_dtype(target)).view(torch.uint8).numpy())
    except (RuntimeError, NotImplementedError) as error:
        raise UnsupportedError(
            f"torch {torch.__version__} cannot convert {source} to {torch_dtype(target)}"
        ) from error


def torch_dtype(dtype: DType) -> torch.dtype:
    """torch's own object for `dtype`. Raises UnsupportedError where the installed torch has
    none."""
    import torch

    found = getattr(torch, dtype.name, None)
    if not isinstance(found, torch.dtype):
        hint = "ckptkit.dequantize gives floats for its codes" if dtype.block > 1 else None
        raise UnsupportedError(f"torch {torch.__version__} has no dtype {dtype}", hint=hint)
    return found


# The expressions that `Compute` knows: each with its inverse, and what a bad result means.
INVERSES = {"x - 1": "x + 1", "x + 1": "x - 1", "log(-x)": "-exp(x)", "-exp(x)": "log(-x)"}


@dataclass(frozen=True, slots=True)
class Compute(Rows):
    """`expression` of each element x, in float32 (float64: in that); errors give the `name`."""

    expression: str
    dtype: str
    name: str

    @property
    def rows(self) -> tuple[int, ...]:
        return (BY_NAME[self.dtype].itemsize,) * 2

    def of(self, *pieces: Piece) -> memoryview:
        """Raise TensorError where a finite number has no finite result."""
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
            raise TensorError(f"{self.name!r}: {self.expression} of {bad:g} is not a finite number")
        return encode(made, dtype)


def cast_record(record: Record, source: DType, target: DType, *, big_endian: bool) -> Record:
    """Return the elements of `record`, of dtype `source`, as little-endian ones of dtype `target`.

    Raises TensorError for a conversion that has no plain meaning (quantized types, complex to
    anything else) and for a record that is not a whole number of elements.
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
    """Return the elements of a record with their bytes reversed, those of each component apart."""
    if dtype.component == 1:
        return record
    return Pending(Swap(dtype.component), (record,), record.length)
