"""Rearranged elements: joined tensors, permuted tensors, and contiguous copies of views.

The bytes of a rearranged tensor are row-major, little-endian and contiguous. ckptkit describes
these bytes by the simplest of the following extents:

* a byte range,
* a concatenation of byte ranges and strided views,
* one strided view,
* or an array that several strided copies fill.

If the source of a rearrangement is the result of another rearrangement, ckptkit combines both
rearrangements. Therefore ckptkit reads each byte only once for a chain of rearrangements.

A tensor may have more elements than its storage, because of stride 0 or overlapping windows. A file
of a kilobyte can describe a tensor of terabytes. Statistics and comparisons read a repeated element
only once. An operation that needs every element raises TensorError if the tensor is many times
larger than its storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from operator import itemgetter

from ckptkit.compute.numbers import swapped
from ckptkit.compute.operation import HELD, Concat, Flip, RecordSlice, Slice, concat, part
from ckptkit.compute.strided import (
    ZEROS,
    StridedCopy,
    composed,
    corners,
    is_dense,
    normal,
    of_box,
    on_axes,
)
from ckptkit.compute.strided_read import Arrange
from ckptkit.core.bytesource import (
    Derived,
    Extent,
    Memory,
    Pending,
    Range,
    Record,
    in_file,
    starts_anywhere,
)
from ckptkit.core.dtypes import UNKNOWN, DType
from ckptkit.core.errors import TensorError, UnsupportedError
from ckptkit.core.limits import LIMITS
from ckptkit.core.tensor import Shape, Tensor, contiguous_stride
from ckptkit.core.text import flatten

# A tensor of at most this number of bytes may be much larger than its storage.
SMALL = 1 << 20
# ckptkit splits a copy into byte ranges only if each run of contiguous bytes has at least this
# number of bytes.
RUN = 128 << 10
RUNS = 50_000  # maximum number of byte ranges that make up one tensor
_ZERO_BYTES = Range(Memory(bytes(16), "zeros"), 0, 16)


def refuse_without_elements(tensor: Tensor, what: str) -> None:
    """Raise TensorError if the dtype is unknown, or the tensor is a meta or non-strided tensor.

    For a meta or non-strided tensor, the message ends with "has no" and `what`.
    """
    if tensor.layout == UNKNOWN:
        raise TensorError(f"its elements have the {UNKNOWN} {tensor.dtype}")
    if tensor.storage is None or tensor.layout != "strided":
        raise TensorError(f"a {tensor.layout} tensor on device {tensor.device} has no {what}")


def contiguous(tensor: Tensor) -> Record:
    """Return the elements of a tensor as contiguous, row-major, little-endian bytes.

    If the tensor is conjugated or negated, ckptkit computes its values. If no computation is
    needed, the result is a slice of the storage's record. Raise TensorError for meta tensors and
    non-strided tensors. Raise TensorError also if elements smaller than a byte are not
    contiguous, or if the first of them does not start at a byte.
    """
    refuse_without_elements(tensor, "bytes of its own")
    assert tensor.storage is not None
    record, dtype, nbytes = tensor.storage.record, tensor.dtype, tensor.nbytes
    if not nbytes:
        return RecordSlice(record, 0, 0)
    if tensor.is_contiguous and tensor.offset * dtype.bits % (8 * dtype.block) == 0:
        start = tensor.offset // dtype.block * dtype.bits // 8
        record = (
            record if (start, nbytes) == (0, record.length) else RecordSlice(record, start, nbytes)
        )
    elif dtype.bits % 8 or dtype.block > 1:
        unit = "blocks" if dtype.block > 1 else f"elements of {dtype.bits} bits"
        raise TensorError(f"{unit} ({dtype}) are not contiguous, or do not start at a byte")
    else:
        shape, start = tensor.shape, tensor.offset
        view = _normal(of_box(shape, (0,) * len(shape), shape, tensor.stride, start))
        record = Pending(Arrange(dtype.itemsize, (view,)), (record,), nbytes)
    if tensor.storage.big_endian:
        record = swapped(record, dtype.component)
    if tensor.conj:
        record = Pending(Flip(dtype.name, conj=True), (record,), nbytes)
    if tensor.neg:
        record = Pending(Flip(dtype.name), (record,), nbytes)
    return record


@dataclass(frozen=True, slots=True, eq=False)
class Arranged:
    """A record whose elements are copied from other records.

    `locate` returns the extent of the record.
    """

    records: tuple[Record, ...]
    copies: tuple[StridedCopy, ...]
    itemsize: int
    length: int  # bytes

    def locate(self) -> Extent:
        sources: dict[int, Extent] = {ZEROS: _ZERO_BYTES}
        pieces = []
        for copy in self.copies:
            if copy.source not in sources:
                sources[copy.source] = _outside(self.records[copy.source].locate())
            if copy.source == ZEROS:
                copy = copy._replace(start=0, dims=tuple((n, 0, t) for n, _, t in copy.dims))
            pieces.append((sources[copy.source], copy))
        return lowered(pieces, self.itemsize, self.length // self.itemsize)


def joined(dtype: DType, shape: Shape, parts: Sequence[tuple[Shape, Tensor]]) -> Record:
    """Return the bytes of a tensor that consists of the tensors in `parts`.

    Each item of `parts` is a pair: the offsets of a tensor in the result, and the tensor.
    """
    copies = tuple(
        of_box(shape, offsets, each.shape, contiguous_stride(each.shape), source=number)
        for number, (offsets, each) in enumerate(parts)
    )
    records = tuple(contiguous(tensor) for _, tensor in parts)
    return Arranged(records, copies, dtype.itemsize, dtype.nbytes(prod(shape)))


def _outside(extent: Extent) -> Extent:
    """Convert each range of an archive member to the range of the archive file with the same bytes.

    The operating system can copy such ranges directly.
    """
    if isinstance(extent, Derived):
        return replace(extent, inputs=tuple(map(_outside, extent.inputs)))
    return Range(*in_file(extent.source, extent.offset), extent.length)


# Conversion of strided copies to extents

Piece = tuple[Extent, StridedCopy]  # an extent, and a copy that reads this extent


def how(copies: Sequence[StridedCopy], itemsize: int) -> str:
    """Return a word that describes the copies.

    * ``joined``: all contiguous byte ranges are long.
    * ``transposed``: at least one copy is a transpose.
    * ``gathered``: the copies read many short byte ranges.
    """
    found = "joined"
    for copy in map(_normal, copies):
        if _runs(copy, itemsize) is None:
            found = "gathered"
            if copy.dims[-1][1:] != (1, 1) and any(read == 1 for _, read, _ in copy.dims):
                return "transposed"
    return found


def lowered(pieces: Sequence[Piece], itemsize: int, total: int) -> Extent:
    """Return the extent of an array of `total` elements. The copies in `pieces` fill the array.

    Raise UnsupportedError if a read of this extent would take too long.
    """
    if not total:
        return Range(_ZERO_BYTES.source, 0, 0)
    found = [
        (source, _normal(each))
        for extent, copy in pieces
        for source, each in _looked_through(extent, copy, itemsize)
    ]
    for extent, copy in found:
        _check_readable(extent, copy, itemsize)
    counts = [_runs(copy, itemsize) for _, copy in found]
    if sum(n or 0 for n in counts) <= RUNS and all(
        n or is_dense(copy) for n, (_, copy) in zip(counts, found, strict=True)
    ):
        return _one_after_another(found, itemsize)
    copies = tuple(copy._replace(source=n) for n, (_, copy) in enumerate(found))
    if on_axes(copies, total) is None:
        return _one_after_another(_unrolled(found), itemsize)
    inputs = tuple(extent for extent, _ in found)
    return Derived(Arrange(itemsize, copies), inputs, total * itemsize)


def _normal(copy: StridedCopy) -> StridedCopy:
    return copy._replace(dims=normal(copy.dims))


def _runs(copy: StridedCopy, itemsize: int) -> int | None:
    """Return the number of contiguous runs that a copy reads.

    Return None if the copy reads several runs that are shorter than RUN.
    """
    if not copy.dims:
        return 1
    n, read, written = copy.dims[-1]
    if (read, written) != (1, 1) or (len(copy.dims) > 1 and n * itemsize < RUN):
        return None
    return prod(n for n, _, _ in copy.dims[:-1])


def _one_after_another(pieces: Sequence[Piece], itemsize: int) -> Extent:
    """Return the concatenation of copies. Each copy fills a contiguous part of the target."""
    parts: list[tuple[int, Extent]] = []
    for extent, copy in pieces:
        if _runs(copy, itemsize) is None:
            view = Arrange(itemsize, (copy._replace(source=0, place=0),))
            parts.append((copy.place, Derived(view, (extent,), copy.elements * itemsize)))
            continue
        run = copy.dims[-1][0] if copy.dims else 1
        for start, place in corners(copy, copy.dims[:-1]):
            parts.append((place, part(extent, start * itemsize, run * itemsize)))
    parts.sort(key=itemgetter(0))
    merged: list[Extent] = []
    for _, extent in parts:
        last = merged[-1] if merged else None
        if isinstance(last, Range) and isinstance(extent, Range) and _follows(last, extent):
            merged[-1] = last._replace(length=last.length + extent.length)
        else:
            merged.append(extent)
    return concat(merged)


def _follows(one: Range, other: Range) -> bool:
    return one.source is other.source and one.offset + one.length == other.offset


def _unrolled(pieces: Sequence[Piece]) -> list[Piece]:
    """Split copies along outer dimensions. Each new copy fills a contiguous part of the target."""
    found: list[Piece] = []
    for extent, copy in pieces:
        outer = 0
        while not is_dense(copy._replace(dims=copy.dims[outer:])):
            outer += 1
        if len(found) + prod(n for n, _, _ in copy.dims[:outer]) > RUNS:
            raise UnsupportedError(
                "the elements of a target tensor are in too many small pieces of the source",
                hint="split the rule into two `rules` steps, such as a transpose and a split",
            )
        inner = copy.dims[outer:]
        for start, place in corners(copy, copy.dims[:outer]):
            found.append((extent, copy._replace(start=start, place=place, dims=inner)))
    return found


def _check_readable(extent: Extent, copy: StridedCopy, itemsize: int) -> None:
    """Raise UnsupportedError if `copy` reads a large, non-seekable source out of order."""
    if starts_anywhere(extent) or extent.length <= HELD:
        return
    whole = len(copy.dims) < 2 and _runs(copy, itemsize) is not None
    if not whole or copy.start:
        raise UnsupportedError(
            "a large compressed tensor cannot be read out of order",
            hint="write the checkpoint uncompressed first: `ckptkit convert {where} {new}`",
        )


# Composition of copies


def _looked_through(extent: Extent, copy: StridedCopy, itemsize: int) -> list[Piece]:
    """Replace a copy of a rearranged extent by copies that read the extent's sources directly."""
    inner = _parts(extent, itemsize)
    if inner is not None:
        copies = [each._replace(source=number) for number, (_, each) in enumerate(inner)]
        made = composed(copy, copies, extent.length // itemsize)
        if made is not None:
            every = (_looked_through(inner[each.source][0], each, itemsize) for each in made)
            return list(flatten(every))
    return [(extent, copy)]


def _parts(extent: Extent, itemsize: int) -> list[Piece] | None:
    """Return the copies that produce a rearranged extent. Return None for other extents."""
    if isinstance(extent, Range):
        return None
    operation = extent.operation
    if isinstance(operation, Slice):
        inner = extent.inputs[0]
        looks = isinstance(inner, Range) or _parts(inner, itemsize) is not None
        if operation.start % itemsize or extent.length % itemsize or not looks:
            return None
        return [(inner, _run(operation.start // itemsize, 0, extent.length // itemsize))]
    if isinstance(operation, Concat):
        if any(each.length % itemsize for each in extent.inputs):
            return None
        parts, place = [], 0
        for each in extent.inputs:
            if each.length:
                parts.append((each, _run(0, place, each.length // itemsize)))
            place += each.length // itemsize
        return parts
    if isinstance(operation, Arrange) and operation.itemsize == itemsize:
        return [(extent.inputs[copy.source], copy) for copy in operation.copies]
    return None


def _run(start: int, place: int, elements: int) -> StridedCopy:
    return StridedCopy(0, start, place, ((elements, 1, 1),))


# Repeated elements


def repeated(*tensors: Tensor) -> tuple[int, ...]:
    """Return the dimensions in which every tensor has stride 0. All tensors have the same shape."""
    if any(tensor.layout != "strided" or 0 in tensor.shape for tensor in tensors):
        return ()
    sizes = enumerate(tensors[0].shape)
    return tuple(axis for axis, n in sizes if n > 1 and not any(t.stride[axis] for t in tensors))


def once(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    """Return the slice of `tensor` with index 0 in each dimension of `axes`."""
    shape = tuple(1 if axis in axes else n for axis, n in enumerate(tensor.shape))
    return replace(tensor, shape=shape) if axes else tensor


def times(tensor: Tensor, axes: Sequence[int]) -> int:
    """Return the number of times that `tensor` repeats each element of `once(tensor, axes)`."""
    return prod(tensor.shape[axis] for axis in axes)


def place(position: int, shape: Sequence[int], axes: Sequence[int]) -> int:
    """Convert a row-major position in the result of `once` to a position in the complete tensor.

    The complete tensor has the shape `shape`.
    """
    found, step = 0, 1
    for axis in reversed(range(len(shape))):
        if axis not in axes:
            position, index = divmod(position, shape[axis])
            found += index * step
        step *= shape[axis]
    return found


def refusal(tensor: Tensor, free: int = SMALL) -> TensorError | None:
    """Return an error if a tensor is larger than `free` bytes and much larger than its storage."""
    held = tensor.storage.nbytes if tensor.storage is not None else 0
    if tensor.layout != "strided" or tensor.nbytes <= LIMITS.expansion * held + free:
        return None
    return TensorError(
        f"its elements have {tensor.nbytes:,} bytes, but its storage has only {held:,} bytes: "
        f"the limit is {LIMITS.expansion} times the storage plus {free:,} bytes "
        "(CKPTKIT_LIMIT_EXPANSION)"
    )


class Allowance:
    """Limits how far the total size of tensors may exceed the size of their storages."""

    def __init__(self) -> None:
        self._free = LIMITS.expansion_free

    def refusal(self, tensor: Tensor) -> TensorError | None:
        """Return an error if the total exceeds the limit. Otherwise, add `tensor` to the total."""
        found = refusal(tensor, self._free)
        held = tensor.storage.nbytes if tensor.storage is not None else 0
        if found is None and tensor.layout == "strided":
            self._free -= max(0, tensor.nbytes - LIMITS.expansion * held)
        return found
