"""Strided views, and arrays assembled from them, in row-major order, in bounded memory.

The output is made in tiles: some indices of one dimension with all dimensions after it, below fixed
indices of the dimensions before. A tile, or the region of it that is one view's, is read in boxes:
from the smallest stride up, a dimension is read whole, gaps included, as long as the gaps are small
and the box is; the next is cut, the others are taken index by index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, Protocol

from ckptkit.compute import transposing
from ckptkit.core.bytesource import Derived, LocalFile, reading

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
Box = tuple[
    tuple[int, ...], tuple[int, ...], tuple[int, ...], int
]  # offsets, sizes, stride, first byte of the input
Read = Callable[
    [int, int], bytes | memoryview
]  # of so many bytes at an offset, until the next is read


class Reading(Protocol):
    """Reads so many bytes at an offset, or fills memory with them, or rows that are apart."""

    def __call__(self, at: int, length: int, /) -> bytes: ...

    def into(self, at: int, buffer: memoryview, /) -> None: ...

    def rows(self, at: int, pitch: int, rows: Sequence[memoryview], /) -> None: ...


_UNITS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


class Room:
    """Memory to read into, again and again: new pages cost more than copies."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def of(self, length: int) -> memoryview:
        """So many bytes, which the next call takes back."""
        if len(self._buffer) < length:
            self._buffer = bytearray(length)
        return memoryview(self._buffer)[:length]

    def like(self, array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
        """Memory for as many elements of `dtype`, in the same shape."""
        import numpy as np

        view = self.of(array.size * np.dtype(dtype).itemsize)
        return np.frombuffer(view, dtype).reshape(array.shape)


class FileReader:
    """Reads bytes of a local file: into `room`, which readers may share, or where they belong."""

    def __init__(self, source: LocalFile, origin: int, room: Room) -> None:
        self._source, self._origin, self._room = source, origin, room

    def __call__(self, at: int, length: int) -> memoryview:
        """Return bytes that the next call overwrites."""
        view = self._room.of(length)
        self._source.read_into(self._origin + at, view)
        return view

    def rows(self, at: int, rows: Sequence[memoryview]) -> None:
        """Fill the rows, one after another, with the bytes from `at`."""
        self._source.read_into_all(self._origin + at, rows)


def gather(read: Read, derived: Derived, start: int, stop: int) -> Iterator[memoryview]:
    """Bytes `start` to `stop` of the view that `derived` describes; `read` reads its input."""
    itemsize, shape, stride, origin = derived.parameters
    assert isinstance(itemsize, int) and isinstance(shape, tuple) and isinstance(stride, tuple)
    assert isinstance(origin, int)
    dims = coalesce([(n, s * itemsize) for n, s in zip(shape, stride, strict=True)])
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


def ends(derived: Derived) -> Iterator[int]:
    """Yield where the tiles of a gather or of chunks end: from there on it is computed at no
    loss."""
    itemsize, shape = derived.parameters[:2]
    assert isinstance(itemsize, int) and isinstance(shape, tuple)
    if derived.operation == "gather":
        stride = derived.parameters[2]
        assert isinstance(stride, tuple)
        dims = coalesce([(n, s * itemsize) for n, s in zip(shape, stride, strict=True)])
        axis, width = _tile(dims, itemsize, _limit(dims, itemsize))
    else:
        boxes = derived.parameters[2]
        assert isinstance(boxes, tuple)
        dims = [(n, 0) for n in shape]
        axis, width = _tile(dims, itemsize, _limit_of(boxes))
    row = prod(n for n, _ in dims[axis + 1 :]) * itemsize
    n = dims[axis][0]
    for outer in range(0, derived.length, max(1, n * row)):
        for first in range(0, n, width):
            yield outer + min(first + width, n) * row


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


def assemble(
    reads: Sequence[Read], derived: Derived, start: int, stop: int
) -> Iterator[memoryview]:
    """Bytes `start` to `stop` of the array whose boxes `derived` describes; each of `reads` reads
    one input."""
    import numpy as np

    itemsize, shape, boxes = derived.parameters
    assert isinstance(itemsize, int) and isinstance(shape, tuple) and isinstance(boxes, tuple)
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


def _read_region(read: Read, tile: np.ndarray[Any, Any], low: tuple[int, ...], box: Box) -> None:
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


def _read_tile(read: Read, offset: int, dims: list[Dim], itemsize: int) -> memoryview:
    import numpy as np

    made = np.empty(tuple(n for n, _ in dims), np.dtype(_UNITS[itemsize]))
    _fill(made, read, offset, tuple(s for _, s in dims))
    return made.reshape(-1).view(np.uint8).data


def _fill(made: np.ndarray[Any, Any], read: Read, offset: int, strides: tuple[int, ...]) -> None:
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
        if isinstance(read, FileReader) and _are_rows(target, strides):
            read.rows(start, list(_rows(target)))
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
