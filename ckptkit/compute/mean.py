"""The weighted mean of elements of several inputs, in float64, rounded once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import frexp, isfinite
from typing import TYPE_CHECKING, Any

from ckptkit.compute.floats import decode, encode, is_decoded
from ckptkit.core import dtypes
from ckptkit.core.bytesource import Derived, Pending, Record
from ckptkit.core.dtypes import DType
from ckptkit.core.text import flatten

if TYPE_CHECKING:
    import numpy as np

# Of each input at a time: they and their sum stay in the caches, and calls of numpy are so long
# that threads seldom wait for the lock of the interpreter.
ELEMENTS = 128 << 10
_COMPONENTS = {
    "complex32": "float16", "bcomplex32": "bfloat16", "complex64": "float32", "complex128":
    "float64",
}  # fmt: skip


def has_mean(dtype: DType) -> bool:
    """Return whether elements have a mean of their own type: floats and complex numbers."""
    return (
        dtype.kind in ("float", "complex") and is_decoded(dtype) and dtype.name != "float8_e8m0fnu"
    )


def sum_record(records: tuple[Record, ...], dtype: DType) -> Record:
    """The sums of the elements of `records`, all of `dtype`, added up as float64 and rounded
    once."""
    name = _COMPONENTS.get(dtype.name, dtype.name)
    parameters = (name, *((name, 1.0) * len(records)))
    return Pending("sum", records, parameters, records[-1].length)


def mean_record(
    records: tuple[Record, ...], types: tuple[DType, ...], shares: tuple[float, ...]
) -> Record:
    """Return the mean of the elements of `records`, of `types`, weighted by `shares`.

    It has the type of the last.

    Complex numbers are averaged by component.
    """
    names = [_COMPONENTS.get(dtype.name, dtype.name) for dtype in types]
    parameters = (names[-1], *flatten(zip(names, shares, strict=True)))
    return Pending("mean", records, parameters, records[-1].length)


class Mean:
    """Parameters of a Derived ``mean`` or ``sum``: dtypes and weights of its inputs, dtype of the
    result."""

    def __init__(self, derived: Derived) -> None:
        target, *rest = derived.parameters
        self.target = dtypes.BY_NAME[str(target)]
        self.types = [dtypes.BY_NAME[str(name)] for name in rest[::2]]
        self.shares = [float(str(share)) for share in rest[1::2]]
        self.divisor = 1.0 if derived.operation == "sum" else sum(self.shares)

    def of(self, pieces: Sequence[bytes | memoryview]) -> memoryview:
        """The mean, or sum, of as many elements of each input."""
        values = (decode(p, t) for p, t in zip(pieces, self.types, strict=True))
        return encode(_sum(values, self.shares, self.divisor), self.target)


def _sum(
    values: Iterable[np.ndarray[Any, Any]], shares: list[float], divisor: float
) -> np.ndarray[Any, Any]:
    """The weighted sum over `divisor`; an infinite or missing number stays one."""
    import numpy as np

    total: np.ndarray[Any, Any] | None = None
    with np.errstate(all="ignore"):
        for each, share in zip(values, shares, strict=True):
            wide = each.astype("f8")  # at once: numpy adds numbers of two types much slower
            if share != 1:
                wide *= share
            total = wide if total is None else np.add(total, wide, out=total)
        assert total is not None
        _divide(total, divisor)
    return total


def _divide(numbers: np.ndarray[Any, Any], divisor: float) -> None:
    """Divide in place; by a power of two as a product, which is as exact, and twice as fast."""
    if divisor == 1:
        return
    if abs(frexp(divisor)[0]) == 0.5 and isfinite(1 / divisor):
        numbers *= 1 / divisor
    else:
        numbers /= divisor
