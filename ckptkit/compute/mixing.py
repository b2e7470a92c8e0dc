"""Weighted means and sums of several inputs, computed in float64 and rounded once."""

from __future__ import annotations

from dataclasses import dataclass
from math import frexp, fsum, inf, isfinite
from typing import Any, ClassVar

from ckptkit.compute.lazy import np
from ckptkit.compute.numbers import decode, encode, is_decoded
from ckptkit.compute.operation import Rows
from ckptkit.core.bytesource import Pending, Piece, Record
from ckptkit.core.dtypes import BY_NAME, DType

_COMPONENTS = {
    "complex32": "float16", "bcomplex32": "bfloat16", "complex64": "float32", "complex128":
    "float64",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class WeightedSum(Rows):
    """The elementwise weighted sum of the inputs, divided by `divisor`."""

    dtype: str  # dtype of the result
    dtypes: tuple[str, ...]
    weights: tuple[float, ...]
    divisor: float
    # Number of elements per step. The elements and their sums must fit the caches. The numpy calls
    # must be long enough that threads rarely wait for the interpreter lock.
    at_once: ClassVar[int] = 128 << 10

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(BY_NAME[name].itemsize for name in (self.dtype, *self.dtypes))

    def of(self, *pieces: Piece) -> memoryview:
        """Return the weighted sum of the pieces. Infinities and NaN propagate."""
        total: np.ndarray[Any, Any] | None = None
        with np.errstate(all="ignore"):
            for piece, name, weight in zip(pieces, self.dtypes, self.weights, strict=True):
                # Convert before the addition, because numpy adds arrays of two types slowly.
                wide = decode(piece, BY_NAME[name]).astype("f8")
                if weight != 1:
                    wide *= weight
                total = wide if total is None else np.add(total, wide, out=total)
            assert total is not None
            factor = 1 / self.divisor if abs(frexp(self.divisor)[0]) == 0.5 else inf
            # If the divisor is a power of two, the product with its reciprocal is exact, and twice
            # as fast as a division.
            if isfinite(factor):
                total *= factor
            else:
                total /= self.divisor
        return encode(total, BY_NAME[self.dtype])


def has_mean(dtype: DType) -> bool:
    """Return True if elements of this dtype can be averaged: floats and complex numbers."""
    return (
        dtype.kind in ("float", "complex") and is_decoded(dtype) and dtype.name != "float8_e8m0fnu"
    )


def sum_record(records: tuple[Record, ...], dtype: DType) -> Record:
    """Return the elementwise sum of `records`. All records have the dtype `dtype`."""
    name = _COMPONENTS.get(dtype.name, dtype.name)
    count = len(records)
    operation = WeightedSum(name, (name,) * count, (1.0,) * count, 1.0)
    return Pending(operation, records, records[-1].length)


def mean_record(
    records: tuple[Record, ...], types: tuple[DType, ...], shares: tuple[float, ...]
) -> Record:
    """Return the elementwise mean of `records`, weighted by `shares`.

    `types` contains the dtype of each record. The mean has the dtype of the last record. The real
    and imaginary parts of complex numbers are averaged separately.
    """
    names = tuple(_COMPONENTS.get(dtype.name, dtype.name) for dtype in types)
    operation = WeightedSum(names[-1], names, shares, fsum(shares))
    return Pending(operation, records, records[-1].length)
