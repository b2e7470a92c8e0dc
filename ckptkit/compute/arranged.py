"""The plain bytes of the elements of tensors: row-major, little-endian, without gaps.

Tensors may have more elements than their storage holds: stride 0, and overlapping windows. A file
of a kilobyte can describe a tensor of terabytes. What is computed from elements reads repeated ones
once; what needs every element in its place is refused where that is many times what the storage
holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from ckptkit.compute.gather import Gather
from ckptkit.compute.numbers import swapped
from ckptkit.compute.operation import Flip, RecordSlice
from ckptkit.core.bytesource import Pending, Record
from ckptkit.core.errors import TensorError
from ckptkit.core.limits import LIMITS
from ckptkit.core.tensor import Tensor

SMALL = 1 << 20  # bytes of elements that are always read


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
        start = tensor.offset * dtype.itemsize
        view = Gather(dtype.itemsize, tensor.shape, tensor.stride, start)
        record = Pending(view, (record,), nbytes)
    if tensor.storage.big_endian:
        record = swapped(record, dtype)
    if tensor.conj:
        record = Pending(Flip(dtype.name, conj=True), (record,), nbytes)
    if tensor.neg:
        record = Pending(Flip(dtype.name), (record,), nbytes)
    return record


# Repeated elements


def repeated(*tensors: Tensor) -> tuple[int, ...]:
    """The dimensions along which all of the tensors, of one shape, repeat their elements."""
    if any(tensor.layout != "strided" or 0 in tensor.shape for tensor in tensors):
        return ()
    sizes = enumerate(tensors[0].shape)
    return tuple(
        axis for axis, n in sizes if n > 1 and all(tensor.stride[axis] == 0 for tensor in tensors)
    )


def once(tensor: Tensor, axes: Sequence[int]) -> Tensor:
    """Return the tensor with one index of each of `axes`, which repeat its elements."""
    if not axes:
        return tensor
    return replace(
        tensor, shape=tuple(1 if axis in axes else n for axis, n in enumerate(tensor.shape))
    )


def times(tensor: Tensor, axes: Sequence[int]) -> int:
    """Return how often each element of `once` is there."""
    return prod(tensor.shape[axis] for axis in axes)


def place(position: int, shape: Sequence[int], axes: Sequence[int]) -> int:
    """Return the row-major position in `shape` of `position`, where `axes` have one index."""
    found, step = 0, 1
    for axis in reversed(range(len(shape))):
        if axis not in axes:
            position, index = divmod(position, shape[axis])
            found += index * step
        step *= shape[axis]
    return found


def refusal(tensor: Tensor, free: int = SMALL) -> TensorError | None:
    """Return the error for a tensor with many times the bytes of its storage, beyond `free`."""
    held = tensor.storage.nbytes if tensor.storage is not None else 0
    if tensor.layout != "strided" or tensor.nbytes <= LIMITS.expansion * held + free:
        return None
    return TensorError(
        f"its {tensor.nbytes:,} bytes of elements are views of a storage of {held:,}: they are not "
        "read (expansion)"
    )


class Allowance:
    """The bytes beyond those in storages that may be read for all tensors together."""

    def __init__(self) -> None:
        self._free = LIMITS.expansion_free

    def refusal(self, tensor: Tensor) -> TensorError | None:
        """Return the error for a tensor that exceeds the allowance."""
        found = refusal(tensor, self._free)
        held = tensor.storage.nbytes if tensor.storage is not None else 0
        if found is None and tensor.layout == "strided":
            self._free -= max(0, tensor.nbytes - LIMITS.expansion * held)
        return found
