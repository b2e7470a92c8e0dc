"""Tensors put together from boxes that several files hold: covered exactly once, copies
compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ckptkit.compute.arranged import joined
from ckptkit.compute.strided import check_cover
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import CkptkitError, CorruptError, UnsupportedError
from ckptkit.core.pieces import Box
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.formats.parallel.copies import Copies, Copy

_SHOWN = 80  # characters of a name in a message


class Held(NamedTuple):
    """A box and the file that holds it."""

    box: Box
    file: str


class Joiner:
    """Makes whole tensors. Those that are made of the same bytes share a storage, as they did in
    the files."""

    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self._made: dict[object, Storage] = {}
        self._cpu: dict[int, tuple[Storage, Storage]] = {}

    def tensor(self, name: str, dtype: DType, shape: Shape, held: Iterable[Held]) -> Tensor:
        """The tensor whose boxes are `held`. Raises CorruptError for a hole, an overlap, or copies
        that differ."""
        boxes: dict[tuple[Shape, Shape], Held] = {}
        for each in held:
            known = boxes.setdefault((each.box.offsets, each.box.sizes), each)
            if known is not each:
                self.copies.add(
                    Copy(name, known.box.tensor, each.box.tensor, (known.file, each.file))
                )
        try:
            check_cover(shape, list(boxes))
        except CkptkitError as error:
            error.message = f"{name[:_SHOWN]!r}: {error.message}"
            raise
        return self._whole(name, dtype, shape, [boxes[place].box for place in sorted(boxes)])

    def _whole(self, name: str, dtype: DType, shape: Shape, boxes: Sequence[Box]) -> Tensor:
        if len(boxes) == 1:
            return self.plain(boxes[0].tensor)
        if dtype.kind == "quantized" or dtype.bits % 8:
            raise UnsupportedError(f"{name[:_SHOWN]!r}: parts of {dtype} are not put together")
        key = dtype.name, shape, tuple(map(_place, boxes))
        if key not in self._made:
            parts = [(box.offsets, box.tensor) for box in boxes]
            self._made[key] = Storage(joined(dtype, shape, parts))
        return Tensor(self._made[key], dtype, shape, contiguous_stride(shape))

    def plain(self, tensor: Tensor) -> Tensor:
        """A tensor of one file, tagged like those that were put together: they have been on no
        device."""
        storage = tensor.storage
        if storage is None or tensor.layout != "strided":
            return tensor
        if id(storage) not in self._cpu:
            on_cpu = Storage(storage.record, "cpu", storage.crc32, storage.big_endian)
            self._cpu[id(storage)] = storage, storage if storage.device == "cpu" else on_cpu
        return Tensor(
            self._cpu[id(storage)][1], tensor.dtype, tensor.shape, tensor.stride, tensor.offset,
            conj=tensor.conj, neg=tensor.neg,
        )  # fmt: skip

    def same(self, name: str, held: Sequence[tuple[Tensor, str]]) -> Tensor:
        """The first of tensors that must be equal. Raises CorruptError where they are not."""
        first, file = held[0]
        for other, place in held[1:]:
            if (other.dtype, other.shape) != (first.dtype, first.shape):
                one, two = (f"{each.dtype} {each.shape}" for each in (first, other))
                raise CorruptError(
                    f"{name[:_SHOWN]!r} is {one} in {file}, {two} in {place}",
                    hint="the files are not of one save",
                )
            self.copies.add(Copy(name, first, other, (file, place)))
        return self.plain(first)


def _place(box: Box) -> tuple[object, ...]:
    """Equal for boxes that are the same elements of the same files."""
    tensor = box.tensor
    return box.offsets, box.sizes, id(tensor.storage), tensor.offset, tensor.stride
