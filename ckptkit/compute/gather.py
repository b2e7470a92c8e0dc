"""Strided views, and arrays assembled from them, in row-major order, in bounded memory.

The output is made in tiles: some indices of one dimension with all dimensions after it, below fixed
indices of the dimensions before. A tile, or the region of it that is one view's, is read in boxes:
from the smallest stride up, a dimension is read whole, gaps included, as long as the gaps are small
and the box is; the next is cut, the others are taken index by index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any

from ckptkit.compute import transposing
from ckptkit.compute.columns import Place, columns, joined
from ckptkit.compute.operation import Pieces, Reader, Room
from ckptkit.core.bytesource import Derived, Operation, reading
from ckptkit.core.tensor import Shape

if TYPE_CHECKING:
    import numpy as np

TILE = 16 << 20  # bytes of the output made at once
JOINED = 4 << 20  # the same of an array that is put together from several inputs
BOX = 1 << 20  # bytes of the input read at once: few enough to be put in order inside the cache
CALL = (
    64 << 10
)  # bytes worth reading to save a box, which costs Python some microseconds and the cache its lines
EXACT = 512  # bytes that are read by themselves where more than as much lies between them
ROW = 1 << 10  # bytes of a row from which on it is read where it belongs, without a copy
MANY = 128  # boxes, from which on larger tiles pay
LARGE = 64 << 20  # bytes of a tile of a large transpose, of which each needs a little of every row

Dim = tuple[int, int]  # elements, stride in bytes
_UNITS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


@dataclass(frozen=True, slots=True)
class Gather(Operation):
    """Row-major elements of a strided view.

    `itemsize` is 1, 2, 4, 8 or 16 bytes, strides count elements, and the first element is at byte
    `start`.
    """

    itemsize: int
    shape: Shape
    stride: Shape
    start: int

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        return gather(self, Reader(extent.inputs[0]), start, stop)

    def ends(self, extent: Derived, size: int) -> Iterable[int]:
        dims = self.dims()
        return _ends(dims, self.itemsize, _limit(dims, self.itemsize), extent.length, size)

    def needed(self, extent: Derived, number: int) -> int:
        return extent.length

    def dims(self) -> list[Dim]:
        """Return the dimensions of the view, with strides in bytes, as few as possible."""
        pairs = zip(self.shape, self.stride, strict=True)
        return coalesce([(n, s * self.itemsize) for n, s in pairs])


@dataclass(frozen=True, slots=True)
class Chunks(Operation):
    """Row-major elements of an array: each input holds one of `boxes` of it.

    A box is described by offsets, sizes, strides in elements, and the byte of its first element in
    its input; each element is in exactly one box. `itemsize` as for `Gather`.
    """

    itemsize: int
    shape: Shape
    boxes: tuple[Place, ...]

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        found = columns(self.itemsize, self.shape, self.boxes, extent.inputs)
        if found:
            return joined(found, start, stop)
        room = Room()
        return assemble(self, [Reader(each, room) for each in extent.inputs], start, stop)

    def ends(self, extent: Derived, size: int) -> Iterable[int]:
        dims = [(n, 0) for n in self.shape]
        return _ends(dims, self.itemsize, _limit_of(self.boxes), extent.length, size)

    def needed(self, extent: Derived, number: int) -> int:
        return self.itemsize * prod(self.boxes[number][1])


def gather(view: Gather, read: Reader, start: int, stop: int) -> Iterator[memoryview]:
    """Yield bytes `start` to `stop` of a view; `read` reads its input."""
    itemsize, origin, dims = view.itemsize, view.start, view.dims()
    axis, width = _tile(dims, itemsize, _limit(dims, itemsize))
    n, step = dims[axis]
    inner = dims[axis + 1 :]
    row = prod(m for m, _ in inner) * itemsize  # bytes for one index of the axis
    at = start
    while at < stop:
        outer, rest = divmod(at, n * row)
        first = rest // row // width * width
        offset = origin + _offset(dims[:axis], outer) + first * step
        made = _read_tile(read, offset, [(min(width, n - first), step), *inner], itemsize)
        lower = rest - first * row
        upper = min(len(made), lower + stop - at)
        yield made[lower:upper]
        del made  # before the next one is made
        at += upper - lower


def coalesce(dims: list[Dim]) -> list[Dim]:
    """The same elements in the same order with as few dimensions as possible, at least one."""
    merged: list[Dim] = []
    for n, s in dims:
        if n == 1:
            continue
        if merged and merged[-1][1] == n * s:
            merged[-1] = (merged[-1][0] * n, s)
        else:
            merged.append((n, s))
    return merged or [(1, 0)]


def _limit(dims: list[Dim], itemsize: int) -> int:
    """Bytes of a tile: more for a transpose whose tiles would take less than `EXACT` of a row."""
    n, step = dims[-1]
    unturned = step <= itemsize or n * itemsize * (EXACT // itemsize) < TILE
    return TILE if unturned else LARGE


def _limit_of(boxes: Sequence[object]) -> int:
    """Bytes of a tile of an array: each looks at all boxes, of which there may be many."""
    return TILE if len(boxes) < MANY else LARGE // 2


def _tile(dims: list[Dim], itemsize: int, limit: int) -> tuple[int, int]:
    """The dimension that tiles cut, and how many of its indices are in each; the last has fewer."""
    row = itemsize
    for axis in range(len(dims) - 1, -1, -1):
        n = dims[axis][0]
        if row * n > limit or axis == 0:
            most = max(1, min(n, limit // row))
            return axis, -(-n // -(-n // most)) if n else 1
        row *= n
    raise AssertionError("there is at least one dimension")


def _ends(dims: list[Dim], itemsize: int, limit: int, length: int, size: int) -> Iterator[int]:
    """Yield where tiles end, `size` bytes or more apart: from there on nothing is read twice."""
    if length < 2 * size:
        yield length
        return
    axis, width = _tile(dims, itemsize, limit)
    row = prod(n for n, _ in dims[axis + 1 :]) * itemsize
    n, last = dims[axis][0], 0
    for outer in range(0, length, max(1, n * row)):
        for first in range(0, n, width):
            end = outer + min(first + width, n) * row
            if end - last >= size or end == length:
                yield end
                last = end


def _offset(dims: list[Dim], number: int) -> int:
    """Byte offset of the `number`-th combination of indices, in row-major order."""
    index = _index(tuple(n for n, _ in dims), number)
    return sum(i * s for i, (_, s) in zip(index, dims, strict=True))


def _index(shape: tuple[int, ...], number: int) -> tuple[int, ...]:
    """The `number`-th combination of indices, in row-major order."""
    index = []
    for n in reversed(shape):
        number, each = divmod(number, n)
        index.append(each)
    return tuple(reversed(index))


def assemble(array: Chunks, reads: Sequence[Reader], start: int, stop: int) -> Iterator[memoryview]:
    """Yield bytes `start` to `stop` of an array; each of `reads` reads one input."""
    import numpy as np

    itemsize, shape, boxes = array.itemsize, array.shape, array.boxes
    axis, width = _tile([(n, 0) for n in shape], itemsize, min(JOINED, _limit_of(boxes)))
    row = prod(shape[axis + 1 :]) * itemsize  # bytes for one index of the axis
    unit = np.dtype(_UNITS[itemsize])
    room = np.empty(
        min(width, shape[axis]) * row // itemsize, unit
    )  # of every tile: new pages cost more than copies
    at = start
    while at < stop:
        outer, rest = divmod(at, shape[axis] * row)
        first = rest // row // width * width
        low = (*_index(shape[:axis], outer), first, *(0 for _ in shape[axis + 1 :]))
        sizes = (*(1 for _ in shape[:axis]), min(width, shape[axis] - first), *shape[axis + 1 :])
        tile = room[: prod(sizes)].reshape(sizes)
        for read, box in zip(reads, boxes, strict=True):
            _read_region(read, tile, low, box)
        made = tile.reshape(-1).view(np.uint8).data
        lower = rest - first * row
        upper = min(len(made), lower + stop - at)
        yield made[lower:upper]
        del tile, made  # before the next one is made
        at += upper - lower


def _read_region(
    read: Reader, tile: np.ndarray[Any, Any], low: tuple[int, ...], box: Place
) -> None:
    """Read the intersection of the box and the tile that begins at indices `low` of the array."""
    offsets, sizes, stride, origin = box
    begin = [max(a, b) for a, b in zip(low, offsets, strict=True)]
    end = [min(a + n, b + m) for a, n, b, m in zip(low, tile.shape, offsets, sizes, strict=True)]
    if any(a >= b for a, b in zip(begin, end, strict=True)):
        return
    region = tile[tuple(slice(a - c, b - c) for a, b, c in zip(begin, end, low, strict=True))]
    steps = tuple(s * tile.itemsize for s in stride)
    _fill(
        region,
        read,
        origin + sum((a - b) * s for a, b, s in zip(begin, offsets, steps, strict=True)),
        steps,
    )


def _read_tile(read: Reader, offset: int, dims: list[Dim], itemsize: int) -> memoryview:
    import numpy as np

    made = np.empty(tuple(n for n, _ in dims), np.dtype(_UNITS[itemsize]))
    _fill(made, read, offset, tuple(s for _, s in dims))
    return made.reshape(-1).view(np.uint8).data


def _fill(made: np.ndarray[Any, Any], read: Reader, offset: int, strides: tuple[int, ...]) -> None:
    """Read into `made` the elements that are `strides` bytes apart from `offset` on."""
    import numpy as np

    unit, itemsize = made.dtype, made.itemsize
    dims = list(zip(made.shape, strides, strict=True))
    box = _box(dims, itemsize)
    order = sorted(range(len(dims)), key=lambda axis: -dims[axis][1])  # so that offsets grow
    at = [0] * len(dims)
    for corner in product(*(range(0, dims[axis][0], box[axis]) for axis in order)):
        for axis, index in zip(order, corner, strict=True):
            at[axis] = index
        shape = [min(b, n - i) for b, (n, _), i in zip(box, dims, at, strict=True)]
        start = offset + sum(i * s for i, s in zip(at, strides, strict=True))
        target = made[tuple(slice(i, i + n) for i, n in zip(at, shape, strict=True))]
        if read.is_local and _are_rows(target, strides):
            rows = list(_rows(target))
            read.rows(start, len(rows[0]), rows)
            continue
        span = itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        with reading(None):  # boxes have gaps, and there may be millions
            data = read(start, span)
        transposing.copy(target, np.ndarray(shape, unit, data, 0, strides))


def _are_rows(target: np.ndarray[Any, Any], strides: tuple[int, ...]) -> bool:
    """Return whether elements follow each other in the input, and fill long rows of `target`."""
    whole = coalesce(list(zip(target.shape, strides, strict=True)))
    is_one_range = whole == [(target.size, target.itemsize)]
    return is_one_range and target.shape[-1] * target.itemsize >= ROW


def _rows(target: np.ndarray[Any, Any]) -> Iterator[memoryview]:
    """Yield the memory of each row, or of all of them where they follow each other."""
    import numpy as np

    data = target.view(np.uint8)
    if data.flags.c_contiguous:
        yield data.reshape(-1).data
        return
    for index in np.ndindex(data.shape[:-2]):
        yield from (row.data for row in data[index])


def _box(dims: list[Dim], itemsize: int) -> list[int]:
    """Return how many indices of each dimension are read at once."""
    box = [1] * len(dims)
    span = itemsize
    whole = sum((n - 1) * s for n, s in dims)
    for axis in sorted(range(len(dims)), key=lambda axis: dims[axis][1]):
        n, s = dims[axis]
        if s - span > CALL or (whole > TILE and s > 2 * span and span >= EXACT):
            break
        box[axis] = n if s == 0 else max(1, min(n, 1 + (BOX - span) // s))
        span += (box[axis] - 1) * s
        if box[axis] < n:
            break
    return box
