"""Tensors: the record of their plain bytes, and comparison of their values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

from ckptkit.compute import expanded
from ckptkit.compute.byte_pieces import Piece, in_step
from ckptkit.compute.floats import decode, is_decoded
from ckptkit.compute.operations import BUFFER, flow, import_numpy, keep_memory
from ckptkit.core.bytesource import Extent, Pending, Range, Record, RecordSlice
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import TensorError
from ckptkit.core.tensor import Tensor

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

_NUMBERS = ("float", "int", "bool", "complex")
_TABLES = frozenset({"float32", "float64", "int32", "int64"})  # dtypes of scales and zero points
WIDE = 1 << 17  # elements compared at once: they take up to 16 bytes each


def contiguous(tensor: Tensor) -> Record:
    """Return the plain bytes of the elements: row-major, little-endian, conj and neg resolved.

    A part of the storage's record where nothing needs to be computed. Raises TensorError for a
    tensor without bytes of its own, and for elements smaller than a byte that are not in a row
    from a byte on.
    """
    if tensor.storage is None or tensor.layout != "strided":
        raise TensorError(
            f"a {tensor.layout} tensor on device {tensor.device} has no bytes of its own"
        )
    record, dtype, nbytes = tensor.storage.record, tensor.dtype, tensor.nbytes
    if not nbytes:
        return RecordSlice(record, 0, 0)
    if tensor.is_contiguous and tensor.offset * dtype.bits % 8 == 0:
        start = tensor.offset * dtype.bits // 8
        record = (
            record if (start, nbytes) == (0, record.length) else RecordSlice(record, start, nbytes)
        )
    elif dtype.bits % 8:
        raise TensorError(
            f"elements of {dtype.bits} bits ({dtype}) are not one after another from a byte on"
        )
    else:
        parameters = (dtype.itemsize, tensor.shape, tensor.stride, tensor.offset * dtype.itemsize)
        record = Pending("gather", (record,), parameters, nbytes)
    if tensor.storage.big_endian:
        record = _swapped(record, dtype)
    for bit, operation in ((tensor.conj, "conj"), (tensor.neg, "neg")):
        if bit:
            record = Pending(operation, (record,), (dtype.name,), nbytes)
    return record


def _swapped(record: Record, dtype: DType) -> Record:
    if dtype.component == 1:
        return record
    return Pending("byteswap", (record,), (dtype.component,), record.length)


def cast_record(record: Record, source: DType, target: DType, *, big_endian: bool) -> Record:
    """The elements of `record`, of dtype `source`, as little-endian elements of dtype `target`.

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
        record = _swapped(record, source)
    if source == target:
        return record
    length = record.length // source.itemsize * target.itemsize
    return Pending("cast", (record,), (source.name, target.name), length)


def dequantized_record(
    tensor: Tensor, scale: float | Tensor, zero_point: int | Tensor, axis: int = 0
) -> Record:
    """Return the elements of a quantized tensor as float32, row-major and little-endian.

    Scale and zero point are two numbers, or two tensors with one for each index of the dimension
    `axis`. Raises TensorError where these do not fit, or the elements have no bytes in order.
    """
    data, length = contiguous(tensor), 4 * tensor.numel
    if isinstance(scale, Tensor) and isinstance(zero_point, Tensor):
        fits = (
            0 <= axis < len(tensor.shape)
            and scale.shape == zero_point.shape == tensor.shape[axis : axis + 1]
        )
        if (
            not fits
            or scale.dtype.kind != "float"
            or not {scale.dtype.numpy, zero_point.dtype.numpy} <= _TABLES
        ):
            raise TensorError(
                f"scales and zero points of {scale.shape} do not fit a shape of {tensor.shape}"
            )
        parameters = (
            tensor.dtype.name,
            scale.dtype.name,
            zero_point.dtype.name,
            prod(tensor.shape[axis + 1 :]),
        )
        return Pending(
            "dequant", (data, contiguous(scale), contiguous(zero_point)), parameters, length
        )
    if (
        type(scale) is not float
        or type(zero_point) is not int
        or not -(2**31) <= zero_point < 2**31
    ):
        raise TensorError(
            "a quantized tensor without a scale and a zero point that torch could have"
        )
    return Pending("dequant", (data,), (tensor.dtype.name, scale, zero_point), length)


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
    axes = expanded.repeated(a, b)
    each = [expanded.once(tensor, axes) for tensor in (a, b)]
    for tensor in each:
        if (error := expanded.refusal(tensor)) is not None:
            raise error
    left, right = (contiguous(tensor).locate() for tensor in each)
    if exact:
        found = None if _same(left, right) else _compare_bytes(left, right, a.dtype.itemsize)
    else:
        found = _compare_values((left, right), (a.dtype, b.dtype), atol or 0.0, rtol or 0.0)
    if found is None or not axes:
        return found
    first = expanded.place(found.first, a.shape, axes)
    return replace(found, count=found.count * expanded.times(a, axes), first=first)


def distance(a: Tensor, b: Tensor) -> tuple[float, float | None, float | None] | None:
    """Return the largest difference of two tensors of one shape, their relative distance and the
    cosine between them.

    Elements that are not finite are left out. None where a dtype has no numbers; the relative
    distance is None where `a` is zero, the cosine where one is.
    """
    if not (is_decoded(a.dtype) and is_decoded(b.dtype)):
        return None
    import numpy as np

    axes = expanded.repeated(a, b)
    left, right = (contiguous(expanded.once(tensor, axes)).locate() for tensor in (a, b))
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
    alike = (left.operation, left.parameters, left.length) == (
        right.operation,
        right.parameters,
        right.length,
    )
    if not alike or left.operation != "blocks" or len(left.inputs) != len(right.inputs):
        return False
    pairs = list(zip(left.inputs, right.inputs, strict=True))
    return all(a.length == b.length for a, b in pairs) and all(_equal(a, b) for a, b in pairs)


def _equal(left: Extent, right: Extent) -> bool:
    """Return whether the bytes of two extents of the same length are equal."""
    if left == right:
        return True
    return all(bytearray(x) == y for x, y in in_step((flow(left), flow(right)), (1, 1), BUFFER))


def _compare_bytes(left: Extent, right: Extent, itemsize: int) -> Difference | None:
    count, first, at = 0, -1, 0
    units = (itemsize, itemsize)
    for x, y in in_step((flow(left), flow(right)), units, BUFFER // itemsize):
        if bytearray(x) != y:  # unlike two memoryviews, which Python compares element by element
            places = _differing(x, y, itemsize)
            first = at + places[0] if not count else first
            count += places[1]
        at += len(x) // itemsize
    return Difference(count, first) if count else None


def _differing(x: Piece, y: Piece, itemsize: int) -> tuple[int, int]:
    """Position of the first element that differs, and the number of them."""
    import numpy as np

    differs = (
        (np.frombuffer(x, np.uint8) != np.frombuffer(y, np.uint8)).reshape(-1, itemsize).any(axis=1)
    )
    return int(differs.argmax()), int(np.count_nonzero(differs))


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
                odd = most > atol or np.isinf(most)
                differs = _exceeds(distance, y, atol, rtol) if odd else np.zeros(1, bool)
                if differs.any():
                    first = at + int(differs.argmax()) if not count else first
                    count += int(np.count_nonzero(differs))
            at += elements
    return Difference(count, first, largest) if count else None


def _exceeds(distance: Array, y: Array, atol: float, rtol: float) -> Array:
    """Return which distances exceed their limits; infinite ones always do."""
    import numpy as np

    limit: Array | float = atol
    if rtol:
        limit = np.abs(y)
        limit *= rtol
        limit += atol
    exceeds: Array = distance > limit
    exceeds |= np.isinf(distance)
    return exceeds


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
