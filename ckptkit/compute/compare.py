"""Comparison of the values of tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ckptkit.compute.arranged import contiguous, once, place, refusal, repeated, times
from ckptkit.compute.numbers import decode, is_decoded
from ckptkit.compute.operation import BUFFER, flow, import_numpy, in_step, keep_memory
from ckptkit.core.bytesource import Extent, Piece, Range
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import TensorError
from ckptkit.core.tensor import Tensor

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

WIDE = 1 << 17  # elements compared at once: they take up to 16 bytes each


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences of two tensors: `count` elements, the first of them at row-major position
    `first`.

    ``largest`` is the largest absolute difference of all elements, None where bytes were compared;
    ``relative`` the norm of the difference by that of the first, ``cosine`` that of the angle
    between the two: None where they are not known (:func:`distance`).
    """

    count: int
    first: int
    largest: float | None = None
    relative: float | None = None
    cosine: float | None = None


def compare(
    a: Tensor, b: Tensor, *, atol: float | None = None, rtol: float | None = None
) -> Difference | None:
    """Return how the values of two tensors of one shape differ, None if they do not.

    Without tolerances dtype and bytes must be equal: NaN payloads and the sign of zero count. With
    one of them (the other is then 0) elements are equal where ``|a - b| <= atol + rtol * |b|``,
    computed in float64 or complex128, and NaN equals NaN. Raises TensorError if the shapes differ,
    or the dtypes where bytes are compared.
    """
    exact = atol is None and rtol is None
    if a.shape != b.shape or (exact and a.dtype != b.dtype):
        raise TensorError(
            f"{a.dtype} {a.shape} and {b.dtype} {b.shape} cannot be compared element by element"
        )
    for dtype in () if exact else (a.dtype, b.dtype):
        if not is_decoded(dtype):
            raise TensorError(f"values of {dtype} cannot be compared within a tolerance")
    axes = repeated(a, b)
    each = [once(tensor, axes) for tensor in (a, b)]
    for tensor in each:
        if (error := refusal(tensor)) is not None:
            raise error
    left, right = (contiguous(tensor).locate() for tensor in each)
    if exact:
        found = None if _same(left, right) else _compare_bytes(left, right, a.dtype.itemsize)
    else:
        found = _compare_values((left, right), (a.dtype, b.dtype), atol or 0.0, rtol or 0.0)
    if found is None or not axes:
        return found
    first = place(found.first, a.shape, axes)
    return replace(found, count=found.count * times(a, axes), first=first)


def distance(a: Tensor, b: Tensor) -> tuple[float, float | None, float | None] | None:
    """Return the largest difference of two tensors of one shape, their relative distance and the
    cosine between them.

    Elements that are not finite are left out. None where a dtype has no numbers; the relative
    distance is None where `a` is zero, the cosine where one is.
    """
    if not (is_decoded(a.dtype) and is_decoded(b.dtype)):
        return None
    import numpy as np

    axes = repeated(a, b)
    left, right = (contiguous(once(tensor, axes)).locate() for tensor in (a, b))
    largest, moved, ours, theirs, product = 0.0, 0.0, 0.0, 0.0, 0.0
    with np.errstate(all="ignore"):
        for x, y in _values((left, right), (a.dtype, b.dtype)):
            finite = np.isfinite(x) & np.isfinite(y)
            x, y = x[finite], y[finite]
            steps = np.abs(x - y)
            largest = max(largest, float(steps.max(initial=0.0)))
            moved += float((steps**2).sum())
            ours += float((np.abs(x) ** 2).sum())
            theirs += float((np.abs(y) ** 2).sum())
            product += float((x * np.conj(y)).real.sum())
    relative = (moved / ours) ** 0.5 if ours else None
    cosine = product / (ours * theirs) ** 0.5 if ours and theirs else None
    return largest, relative, cosine


def _same(left: Extent, right: Extent) -> bool:
    """Return whether two extents are one place, or one computation on equal bytes."""
    if isinstance(left, Range) or isinstance(right, Range):
        return left == right
    alike = left.operation == right.operation and left.length == right.length
    if not alike or not left.operation.expands or not left.operation.seekable:
        return left == right
    pairs = list(zip(left.inputs, right.inputs, strict=True))
    return all(a.length == b.length for a, b in pairs) and all(_equal(a, b) for a, b in pairs)


def _equal(left: Extent, right: Extent) -> bool:
    """Return whether the bytes of two extents of the same length are equal."""
    if left == right:
        return True
    return all(bytearray(x) == y for x, y in in_step((flow(left), flow(right)), (1, 1), BUFFER))


def _compare_bytes(left: Extent, right: Extent, itemsize: int) -> Difference | None:
    import numpy as np

    count, first, at = 0, -1, 0
    units = (itemsize, itemsize)
    for x, y in in_step((flow(left), flow(right)), units, BUFFER // itemsize):
        if bytearray(x) != y:  # unlike two memoryviews, which Python compares element by element
            odd = np.frombuffer(x, np.uint8) != np.frombuffer(y, np.uint8)
            differs = odd.reshape(-1, itemsize).any(axis=1)
            first = at + int(differs.argmax()) if not count else first
            count += int(np.count_nonzero(differs))
        at += len(x) // itemsize
    return Difference(count, first) if count else None


def _compare_values(
    extents: tuple[Extent, Extent], types: tuple[DType, DType], atol: float, rtol: float
) -> Difference | None:
    """By the rule of ``torch.isclose``."""
    import numpy as np

    count, first, at, largest = 0, -1, 0, 0.0
    alike = types[0] == types[1]
    with np.errstate(all="ignore"):  # the difference of infinities
        for left, right in _in_step(extents, types):
            elements = len(left) // types[0].itemsize
            if not (alike and bytearray(left) == right):
                x, y = _wide(left, types[0]), _wide(right, types[1])
                distance = _distances(x, y)
                most = float(distance.max())
                largest = max(largest, most)
                if most > atol or np.isinf(most):  # infinite ones always exceed their limits
                    limit = np.abs(y) * rtol + atol if rtol else atol
                    differs = (distance > limit) | np.isinf(distance)
                    if differs.any():
                        first = at + int(differs.argmax()) if not count else first
                        count += int(np.count_nonzero(differs))
            at += elements
    return Difference(count, first, largest) if count else None


def _distances(x: Array, y: Array) -> Array:
    """Return the absolute differences: infinite where one is NaN, 0 where both are, or equal."""
    import numpy as np

    distance: Array = np.subtract(x, y)
    distance = np.abs(distance, out=distance if distance.dtype.kind == "f" else None)
    if not np.isfinite(distance.max()):
        distance[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
        distance[np.isnan(distance)] = np.inf
    return distance


def _values(
    extents: tuple[Extent, Extent], types: tuple[DType, DType]
) -> Iterator[tuple[Array, Array]]:
    """Yield the elements of both, at most `WIDE` at a time, as float64 or complex128."""
    for left, right in _in_step(extents, types):
        yield _wide(left, types[0]), _wide(right, types[1])


def _in_step(
    extents: tuple[Extent, Extent], types: tuple[DType, DType]
) -> Iterator[list[memoryview]]:
    keep_memory()
    import_numpy()
    return in_step(map(flow, extents), [dtype.itemsize for dtype in types], WIDE)


def _wide(piece: Piece, dtype: DType) -> Array:
    return decode(piece, dtype).astype("c16" if dtype.kind == "complex" else "f8")
