"""Comparison of the values of tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ckptkit.compute.arranged import contiguous, once, place, refusal, repeated, times
from ckptkit.compute.lazy import Array, np
from ckptkit.compute.numbers import decode, is_decoded
from ckptkit.compute.operation import BUFFER, aligned, in_step, keep_memory, stream_reusing_buffer
from ckptkit.core.bytesource import Extent, Piece, Range
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import TensorError
from ckptkit.core.tensor import Tensor

# Number of elements per step; with fewer elements, threads wait for the interpreter lock.
WIDE = 1 << 17
# If a float32 sum of squares is not between _LEAST and _MOST, the sums are computed again in
# float64. _ROUNDED bounds the relative rounding error of a float32 difference.
_LEAST, _MOST, _ROUNDED = 1e-28, 1e37, 1e-6


@dataclass(frozen=True, slots=True)
class Difference:
    """Differences between two tensors.

    * ``count`` is the number of elements that differ.
    * ``first`` is the row-major position of the first element that differs.
    * ``largest`` is the largest absolute difference, or None if only bytes were compared.
    * ``distance`` is the norm of the difference.
    * ``relative`` is `distance` divided by the norm of the first tensor, or None if the norm is 0.
    * ``cosine`` is the cosine of the angle between the tensors, or None if a tensor is zero.
    """

    count: int
    first: int
    largest: float | None = None
    relative: float | None = None
    cosine: float | None = None
    distance: float | None = None


def compare(
    a: Tensor,
    b: Tensor,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    measured: bool = False,
) -> Difference | None:
    """Return the differences between two tensors of the same shape.

    Return None if the tensors are equal. Without tolerances, equal tensors have equal dtypes and
    bytes, including NaN payloads and the sign of zero. With `atol` or `rtol`, elements are equal if
    ``|a - b| <= atol + rtol * |b|``, computed in float64 or complex128. A missing tolerance is 0.
    NaN equals NaN.

    If `measured` is set and the dtypes are numeric, the result also contains the distances between
    the tensors. The distances ignore infinities and NaN. Raise TensorError if the shapes differ.
    Without tolerances, raise TensorError also if the dtypes differ.
    """
    exact = atol is None and rtol is None
    if a.shape != b.shape or (exact and a.dtype != b.dtype):
        raise TensorError(
            f"{a.dtype} {a.shape} and {b.dtype} {b.shape} cannot be compared element by element"
        )
    types = a.dtype, b.dtype
    for dtype in () if exact else types:
        if not is_decoded(dtype):
            raise TensorError(f"values of {dtype} cannot be compared within a tolerance")
    axes = repeated(a, b)
    each = [once(tensor, axes) for tensor in (a, b)]
    for tensor in each:
        if (error := refusal(tensor)) is not None:
            raise error
    extents = contiguous(each[0]).locate(), contiguous(each[1]).locate()
    measure = _Measure() if measured and all(map(is_decoded, types)) else None
    if exact and (_same(*extents) or (a.nbytes <= BUFFER and equal(*extents))):
        return None  # small equal tensors do not need numpy
    keep_memory()
    with np.errstate(all="ignore"):  # differences of infinities are NaN, and squares may overflow
        tolerance = None if exact else (atol or 0.0, rtol or 0.0)
        found = _compare(extents, types, tolerance, measure)
    if found is None or not axes:
        return found
    first = place(found.first, a.shape, axes)
    return replace(found, count=found.count * times(a, axes), first=first)


class _Measure:
    """Accumulates the distance between the elements of two tensors."""

    def __init__(self) -> None:
        self.largest = 0.0
        self.squares = self.others = self.product = self.moved = 0.0

    def add(self, x: Array, y: Array) -> None:
        """Add some elements of both tensors to the sums.

        `x` contains elements of the first tensor. `y` contains the elements at the same positions
        of the second tensor.

        Both arrays have the same dtype. If the elements are equal, pass the same array as `x` and
        `y`. The sums have the dtype of the elements. If the squares overflow or underflow in
        float32, the sums are float64. The largest difference is exact.
        """
        if x.dtype.kind in "iu":
            x, y = x.astype("f8"), (x if x is y else y).astype("f8")
        if x is y:
            pairs, apart = [(x, x)], x[:0]
        else:
            apart = x - y
            pairs = [(x, x), (apart, apart), (y, y), (x, y)]
        sums = [float(np.vdot(*pair).real) for pair in pairs]
        if not all(_LEAST < each < _MOST for each in sums[:3]) and (
            x.dtype.itemsize < np.dtype(_wide_type(x)).itemsize or not np.isfinite(sums).all()
        ):
            finite = np.isfinite(x) & np.isfinite(y)
            wide = x[finite].astype(_wide_type(x))
            return self.add(wide, wide if x is y else y[finite].astype(wide.dtype))
        self.squares += sums[0]
        if x is y:
            self.others += sums[0]
            self.product += sums[0]
            return None
        self.moved += sums[1]
        self.others += sums[2]
        self.product += sums[3]
        sizes = np.abs(apart)
        most = float(sizes.max(initial=0.0))
        if most * (1 + _ROUNDED) > self.largest:
            near = sizes >= most * (1 - _ROUNDED)
            wide = x[near].astype(_wide_type(x))
            self.largest = max(self.largest, float(np.abs(wide - y[near]).max(initial=0.0)))
        return None

    def of(self, found: Difference) -> Difference:
        """Return `found` with the accumulated distances."""
        relative = (self.moved / self.squares) ** 0.5 if self.squares else None
        norms = (self.squares * self.others) ** 0.5
        return replace(
            found,
            largest=self.largest if found.largest is None else found.largest,
            relative=relative,
            cosine=self.product / norms if norms else None,
            distance=self.moved**0.5,
        )


def _same(left: Extent, right: Extent) -> bool:
    """Return True if both extents are the same range, or the same operation on equal inputs."""
    if isinstance(left, Range) or isinstance(right, Range):
        return left == right
    alike = left.operation == right.operation and left.length == right.length
    if not alike or not left.operation.expands or not left.operation.seekable:
        return left == right
    pairs = list(zip(left.inputs, right.inputs, strict=True))
    return all(a.length == b.length for a, b in pairs) and all(equal(a, b) for a, b in pairs)


def equal(left: Extent, right: Extent) -> bool:
    """Return True if the bytes of two extents are equal. The extents have the same length."""
    if left == right:
        return True
    return all(
        bytearray(x) == y
        for x, y in in_step(
            (stream_reusing_buffer(left), stream_reusing_buffer(right)), (1, 1), BUFFER
        )
    )


def _compare(
    extents: tuple[Extent, Extent],
    types: tuple[DType, DType],
    tolerance: tuple[float, float] | None,
    measure: _Measure | None,
) -> Difference | None:
    """Compare bytes, or values as ``torch.isclose`` does.

    `tolerance` is a pair (absolute, relative). If it is None, compare bytes.
    """
    count, first, at, largest = 0, -1, 0, 0.0
    begin: int | None = None  # the start of the first block whose bytes differ
    units = [dtype.itemsize for dtype in types]
    for left, right in in_step(map(stream_reusing_buffer, extents), units, WIDE):
        # Python compares two memoryviews slowly.
        is_equal = types[0] == types[1] and bytearray(left) == right
        begin = at if begin is None and not is_equal else begin
        # While the bytes of all blocks are equal, measure nothing. See the end of this function.
        if begin is not None and (measure is not None or not (is_equal or tolerance is None)):
            x = decode(left, types[0])
            y = x if is_equal else decode(right, types[1])
            if tolerance is not None:
                x, y = _wide(x), _wide(y)
            if measure is not None:
                measure.add(x, x if is_equal else y)
        if not is_equal:
            if tolerance is None:
                odd = _codes(left, types[0]) != _codes(right, types[1])
            else:
                distance = _distances(x, y)
                most, (atol, rtol) = float(distance.max()), tolerance
                largest = max(largest, most)
                odd = np.isinf(distance)  # an infinite difference exceeds any tolerance
                if most > atol:
                    odd |= distance > (np.abs(y) * rtol + atol if rtol else atol)
            if odd.any():
                first = at + int(odd.argmax()) if not count else first
                count += int(np.count_nonzero(odd))
        at += len(left) // units[0]
    if not count:
        return None
    found = Difference(count, first, None if tolerance is None else largest)
    if measure is None:
        return found
    equal = stream_reusing_buffer(extents[0], 0, (begin or 0) * units[0])
    for piece in aligned(equal, units[0], WIDE * units[0]):
        x = decode(piece, types[0])
        measure.add(x, x)
    return measure.of(found)


def _codes(piece: Piece, dtype: DType) -> Array:
    """Return elements as integers or as opaque items. `==` on the result compares bytes."""
    unit = f"<u{dtype.itemsize}" if dtype.itemsize in (1, 2, 4, 8) else f"V{dtype.itemsize}"
    return np.frombuffer(piece, unit)


def _distances(x: Array, y: Array) -> Array:
    """Return absolute differences.

    The difference of two NaN is 0. The difference of a NaN and a number is infinite.
    """
    distance: Array = np.subtract(x, y)
    distance = np.abs(distance, out=distance if distance.dtype.kind == "f" else None)
    if not np.isfinite(distance.max()):
        distance[(x == y) | (np.isnan(x) & np.isnan(y))] = 0.0
        distance[np.isnan(distance)] = np.inf
    return distance


def _wide(values: Array) -> Array:
    return values.astype(_wide_type(values))


def _wide_type(values: Array) -> str:
    return "c16" if values.dtype.kind == "c" else "f8"
