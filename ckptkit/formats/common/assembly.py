"""A whole tensor put together from boxes of it: chunks of DCP, pieces of ranks, parts of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ckptkit.compute.arranged import contiguous
from ckptkit.compute.gather import Chunks
from ckptkit.compute.operation import concat
from ckptkit.core.bytesource import Derived, Extent, Range, Section
from ckptkit.core.dtypes import DType
from ckptkit.core.pieces import Box
from ckptkit.core.tensor import Shape, Tensor, contiguous_stride


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """A record: the bytes of a tensor whose boxes, in order of their offsets, cover it."""

    dtype: DType
    shape: Shape
    boxes: tuple[Box, ...]
    length: int  # bytes

    def locate(self) -> Extent:
        return assembled(self.dtype, self.shape, self.boxes, self.length)


def assembled(dtype: DType, shape: Shape, boxes: Sequence[Box], length: int) -> Extent:
    """Copied, one range after another, where the boxes follow each other; else computed."""
    if not _is_row(shape, boxes):
        return _arranged(dtype, shape, boxes, length)
    extents = [_outside(contiguous(box.tensor).locate()) for box in boxes]
    return concat(extents)


def _arranged(dtype: DType, shape: Shape, boxes: Sequence[Box], length: int) -> Derived:
    inputs, places = [], []
    for box in boxes:
        extent, stride, start = _view(box.tensor)
        inputs.append(_outside(extent))
        places.append((box.offsets, box.sizes, stride, start))
    return Derived(Chunks(dtype.itemsize, shape, tuple(places)), tuple(inputs), length)


def _outside(extent: Extent) -> Extent:
    """The same bytes, ranges of items named as ranges of their file: what the kernel can copy."""
    if isinstance(extent, Derived):
        return replace(extent, inputs=tuple(map(_outside, extent.inputs)))
    source, offset, length = extent
    if isinstance(source, Section):
        return Range(source.whole, source.offset + offset, length)
    return extent


def _view(tensor: Tensor) -> tuple[Extent, Shape, int]:
    """Bytes that hold the elements as they are meant, strides in elements, and the byte of the
    first element."""
    storage = tensor.storage
    if storage is None or tensor.conj or tensor.neg or storage.big_endian:
        return contiguous(tensor).locate(), contiguous_stride(tensor.shape), 0
    return storage.record.locate(), tensor.stride, tensor.offset * tensor.dtype.itemsize


def _is_row(shape: Shape, boxes: Sequence[Box]) -> bool:
    """Return whether the boxes, in this order, split the first dimension (of more than one index)
    and make the whole.
    """
    axis = next((axis for axis, n in enumerate(shape) if n > 1), len(shape))
    return all(box.sizes[axis + 1 :] == shape[axis + 1 :] for box in boxes)
