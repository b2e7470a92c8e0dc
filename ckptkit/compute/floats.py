"""Elements as numbers of numpy, and floating-point numbers as elements, without torch.

Importing torch takes a second and 200 MiB, which is more than all that is done here takes. numpy
has no ``bfloat16``, no floating-point types of 8 bits, no ``complex32`` and no ``bcomplex32``, and
converts float16 one number at a time. They are read as float32 or complex64, which hold all of
their values, and written by rounding float32 to the nearest, ties to even, as torch does; float64
is rounded to float32 first, again as torch does. A NaN stays one: which bits it has depends in
torch on the processor.

========  ====  ========  ==============================  ===================
fp8       bias  mantissa  codes that are no number        what is too large
========  ====  ========  ==============================  ===================
e4m3fn       7    3 bits  0x7f and 0xff: NaN              the largest number
e5m2        15    2 bits  as in IEEE 754                  infinite
e4m3fnuz     8    3 bits  0x80: NaN; there is no -0.0     NaN
e5m2fnuz    16    2 bits  likewise                        NaN
========  ====  ========  ==============================  ===================
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptkit.core.dtypes import DType
from ckptkit.core.errors import UnsupportedError

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

Data = bytes | memoryview


class _Small(NamedTuple):
    """A floating-point type of 8 bits: codes of its largest number, of larger ones, of NaN."""

    bias: int
    mantissa: int  # bits
    largest: int
    overflow: int
    nan: int


_SMALL = {
    "float8_e4m3fn": _Small(
        7, 3, 0x7E, 0x7E, 0x7F
    ),  # older versions of torch make NaN of what is too large
    "float8_e5m2": _Small(15, 2, 0x7B, 0x7C, 0x7F),
    "float8_e4m3fnuz": _Small(8, 3, 0x7F, 0x80, 0x80),
    "float8_e5m2fnuz": _Small(16, 2, 0x7F, 0x80, 0x80),
}
# Bits of float32: the least normal number of float16, the largest that is not rounded up to
# infinity, and the difference of the biases of the exponents.
_LEAST, _MOST, _REBIASED = 0x38800000, 0x477FEFFF, 112 << 23
_OTHERS = ("bfloat16", "complex32", "bcomplex32", "float8_e8m0fnu")  # that `decode` knows
FLOATS = frozenset(
    {"float64", "float32", "float16", "bfloat16", *_SMALL}
)  # what is cast to each other here


def decode(data: Data, dtype: DType) -> Array:
    """The elements as an array of one dimension, of their own type or of a wider one; bools as 0
    and 1.

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
        wide = np.frombuffer(data, "<u2").astype("<u4")
        wide <<= 16
        return wide.view("<f4" if dtype.name == "bfloat16" else "<c8")
    if dtype.name in _SMALL or dtype.name == "float8_e8m0fnu":
        values: Array = np.take(_values(dtype.name), np.frombuffer(data, "u1"))
        return values
    raise UnsupportedError(f"elements of {dtype} are not numbers by themselves")


def is_decoded(dtype: DType) -> bool:
    """Return whether `decode` knows the type."""
    return dtype.numpy is not None or dtype.name in _SMALL or dtype.name in _OTHERS


def encode(values: Array, dtype: DType) -> memoryview:
    """The bytes of floating-point numbers as elements of `dtype`, one of `FLOATS`."""
    import numpy as np

    with np.errstate(
        all="ignore"
    ):  # what is too large becomes infinite, or what its type has for that
        if dtype.name in ("float64", "float32"):
            return _bytes(values.astype(f"<f{dtype.itemsize}"))
        single = values.astype("<f4", copy=False)
        if dtype.name == "float16":
            return _bytes(_float16(single))
        return _bytes(_bfloat16(single) if dtype.name == "bfloat16" else _small(single, dtype.name))


def _bytes(values: Array) -> memoryview:
    import numpy as np

    return values.view(np.uint8).data


def _bfloat16(values: Array) -> Array:
    """Return the upper halves, rounded to nearest, ties to even.

    Half of a last place is added first, a little less where that makes a tie even.
    """
    import numpy as np

    bits = values.view("<u4")
    rounded = bits >> 16
    rounded &= 1
    rounded += bits
    rounded += 0x7FFF
    rounded >>= 16
    made: Array = rounded.astype("<u2")
    if np.isnan(values.max(initial=0)):  # of which one NaN makes a NaN
        made[np.isnan(values)] = 0x7FC0
    return made


def _float16(values: Array) -> Array:
    """Return codes of float16, rounded to nearest, ties to even.

    Numbers that are normal in both types are rounded as for bfloat16, all at once; numpy converts
    the others, one by one: zeros, small and large ones, NaN.
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
    """The float32 value of each of the 256 codes."""
    import numpy as np

    code = np.arange(256)
    if name == "float8_e8m0fnu":  # an exponent alone
        exponents: Array = np.where(code == 255, np.nan, np.ldexp(1.0, code - 127)).astype("<f4")
        return exponents
    kind, size = _SMALL[name], code % 128
    exponent, mantissa = size >> kind.mantissa, size % (1 << kind.mantissa)
    significand = np.where(exponent > 0, mantissa + (1 << kind.mantissa), mantissa)
    value = np.ldexp(significand.astype("f8"), np.maximum(exponent, 1) - kind.bias - kind.mantissa)
    value[size > kind.largest] = np.nan
    value[size == kind.overflow] = np.inf if kind.overflow > kind.largest else value[kind.largest]
    value[128:] *= -1
    value[kind.nan] = np.nan
    values: Array = value.astype("<f4")
    return values


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
