"""Read rearranged elements: the operation that executes strided copies.

The operation computes its output in tiles. A tile is a range of indices along one axis, with fixed
indices along the outer axes and all indices along the inner axes. If ckptkit may write the output
in any order, it writes a large transpose in blocks instead.

A copy supplies a part of a tile or block. The operation reads the source of a copy in boxes. A box
is a rectangular region of the source. The operation chooses the range of a box in each dimension,
beginning with the dimension of the smallest stride:

1. While gaps and box are small, the box spans complete dimensions, and the operation also reads the
   gaps between the elements.
2. If the gaps between rows are large, each row is read into a separate buffer.
3. The next dimension is split into ranges, and a box spans one range. In each of the remaining
   dimensions, a box has one index.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod
from typing import NamedTuple

from ckptkit.compute.lazy import Array, np
from ckptkit.compute.operation import Pieces, Reader, ScratchBuffer
from ckptkit.compute.strided import Box, StridedCopy, corners, normal, on_axes
from ckptkit.core.bytesource import Derived, Extent, Operation, reading
from ckptkit.core.tensor import Shape, contiguous_stride

TILE = 16 << 20  # number of output bytes per tile
JOINED = 8 << 20  # number of output bytes per tile if the output has several inputs
BOX = 1 << 20  # number of input bytes per box; a box must fit the cache
# Maximum length of a gap that is read. To read a gap of this length takes as long as to start
# another box.
CALL = 64 << 10
EXACT = 512  # reads skip the gaps between runs only if a run has at least this number of bytes
ROW = 1 << 10  # minimum number of bytes of a row that is read directly into the output
LINE = 1024  # number of bytes of each row that a box of a transpose contains, if possible
MANY = 128  # minimum number of boxes for which larger tiles are faster
LARGE = 64 << 20  # number of bytes per tile of a large transpose: each tile reads from every row

# Minimum number of output bytes between the first and the last column of a large transpose. All
# columns of a smaller matrix are in the same tile.
LEAST = 16 << 20
BLOCK = 48 << 20  # number of bytes of a block of a large transpose
COLUMNS = 4096  # maximum number of columns of a block: a strip must fit the cache of a core
# Number of bytes of a page. Before a write to a part of a page, the system must read the page.
PAGE = 4 << 10
_AT_ONCE = 1024  # number of adjacent rows that one call writes

# Number of bytes of a cache line. If the distance between rows is a power of two, the rows compete
# for a few cache lines.
_LINE = 64
STRIP_ROWS = 256  # number of rows of a strip; a strip is transposed in the cache
STRIP_WIDTH = 1024  # number of bytes of each row of a strip
SMALL_AXIS = 32  # strips are slower for an axis with at most this number of elements
_LANES = 4  # number of bytes that numpy copies as fast as one byte
_UNITS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


@dataclass(frozen=True, slots=True)
class Arrange(Operation):
    """Copies elements from the inputs. The copies fill each output element exactly once.

    Elements have 1, 2, 4, 8 or 16 bytes. The dimensions of the copies are in normal form
    (:func:`normal`). Each copy fills a box of the output (:func:`on_axes`).
    """

    itemsize: int
    copies: tuple[StridedCopy, ...]

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        shape, boxes = self._layout(extent)
        room = ScratchBuffer()
        reads = [Reader(extent.inputs[copy.source], room) for copy in self.copies]
        parts = list(zip(reads, boxes, (copy.start for copy in self.copies), strict=True))
        limit = _limit(shape, boxes, self.itemsize)
        limit = min(JOINED, limit) if len(parts) > 1 else limit
        return _tiles(shape, parts, self.itemsize, limit, start, stop)

    def ends(self, extent: Derived, size: int) -> Iterable[int]:
        """Yield the ends of parts of at least `size` bytes. Only the last part may be smaller.

        Each part consists of complete tiles. Tasks that compute complete tiles do not read the same
        bytes.
        """
        if extent.length < 2 * size:
            yield extent.length
            return
        shape, boxes = self._layout(extent)
        axis, width = _tile(shape, self.itemsize, _limit(shape, boxes, self.itemsize))
        row = prod(shape[axis + 1 :]) * self.itemsize
        n, last = shape[axis], 0
        for outer in range(0, extent.length, max(1, n * row)):
            for first in range(0, n, width):
                end = outer + min(first + width, n) * row
                if end - last >= size or end == extent.length:
                    yield end
                    last = end

    def needed(self, extent: Derived, number: int) -> int:
        read = sum(copy.elements for copy in self.copies if copy.source == number)
        return read * self.itemsize

    def _layout(self, extent: Derived) -> tuple[Shape, list[Box]]:
        found = on_axes(self.copies, extent.length // self.itemsize)
        assert found is not None
        return found


# Tiles


def _limit(shape: Shape, boxes: Sequence[Box], itemsize: int) -> int:
    """Return the number of bytes per tile.

    Tiles are larger for outputs with many boxes. Tiles are also larger for a transpose that would
    otherwise read less than `EXACT` bytes of each row.
    """
    if len(boxes) > 1:
        return TILE if len(boxes) < MANY else LARGE // 2
    n, step = shape[-1], boxes[0][-1].stride * itemsize
    unturned = step <= itemsize or n * itemsize * (EXACT // itemsize) < TILE
    return TILE if unturned else LARGE


def _tile(shape: Shape, itemsize: int, limit: int) -> tuple[int, int]:
    """Return the axis along which the output is split, and the number of its indices per tile."""
    row = itemsize
    for axis in range(len(shape) - 1, -1, -1):
        n = shape[axis]
        if row * n > limit or axis == 0:
            most = max(1, min(n, limit // row))
            return axis, -(-n // -(-n // most)) if n else 1
        row *= n
    raise AssertionError("`shape` must have at least one axis")


def _tiles(
    shape: Shape,
    boxes: Sequence[tuple[Reader, Box, int]],
    itemsize: int,
    limit: int,
    start: int,
    stop: int,
) -> Pieces:
    """Yield bytes `start` to `stop` of an array.

    `boxes` contains triples: the reader of the source, the box, and the position of its first
    element in the source.
    """
    axis, width = _tile(shape, itemsize, limit)
    row = prod(shape[axis + 1 :]) * itemsize  # number of bytes per index of the axis
    unit = np.dtype(_UNITS[itemsize])
    # Small tiles use the same buffer, because to allocate new pages takes longer than a copy.
    room = np.empty(min(width, shape[axis]) * row // itemsize if len(boxes) > 1 else 0, unit)
    at = start
    while at < stop:
        outer, rest = divmod(at, shape[axis] * row)
        first = rest // row // width * width
        outside, inner = shape[:axis], shape[axis + 1 :]
        low = (*map(int, np.unravel_index(outer, outside)), first, *(0 for _ in inner))
        sizes = (*(1 for _ in outside), min(width, shape[axis] - first), *inner)
        tile = room[: prod(sizes)].reshape(sizes) if len(boxes) > 1 else np.empty(sizes, unit)
        for read, box, origin in boxes:
            _read_region(read, tile, low, box, origin)
        made = tile.reshape(-1).view(np.uint8).data
        lower = rest - first * row
        upper = min(len(made), lower + stop - at)
        yield made[lower:upper]
        del tile, made  # free this tile before the allocation of the next tile
        at += upper - lower


def _read_region(read: Reader, tile: Array, low: tuple[int, ...], box: Box, start: int) -> None:
    """Read the intersection of a box and a tile. `low` are the first indices of the tile."""
    inside = []
    for begin, n, (offset, size, stride) in zip(low, tile.shape, box, strict=True):
        first, last = max(begin, offset), min(begin + n, offset + size)
        if first >= last:
            return
        inside.append(slice(first - begin, last - begin))
        start += (first - offset) * stride
    strides = tuple(each.stride * tile.itemsize for each in box)
    fill(tile[tuple(inside)], read, start * tile.itemsize, strides)


def fill(made: Array, read: Reader, offset: int, strides: tuple[int, ...]) -> None:
    """Fill `made` with elements of the source.

    `offset` is the byte offset of the first element in the source. `strides` contains the strides
    in the source, in bytes.
    """
    itemsize = made.itemsize
    place = (made.__array_interface__["data"], made.shape, made.strides, strides)
    if read.place != place:  # if the next tile has the same memory, use the same row buffers
        order = normal(zip(made.shape, strides, contiguous_stride(made.shape), strict=True))
        is_one_run = order == ((made.size, itemsize, 1),) and made.shape[-1] * itemsize >= ROW
        rows = _rows(made.view(np.uint8)) if read.is_local and is_one_run else ()
        read.place, read.buffers = place, list(rows)
    if read.buffers:  # read the bytes into `made` directly
        read.rows(offset, len(read.buffers[0]), read.buffers)
        return
    dims = list(zip(made.shape, strides, strict=True))
    box, span, apart = _box(dims, itemsize, read.is_local)
    at = [0] * len(dims)
    # In this order of the axes, offsets in the source ascend.
    rising = sorted(range(len(dims)), key=lambda axis: -dims[axis][1])
    for corner in product(*(range(0, dims[axis][0], box[axis]) for axis in rising)):
        for axis, index in zip(rising, corner, strict=True):
            at[axis] = index
        shape = [min(b, n - i) for b, (n, _), i in zip(box, dims, at, strict=True)]
        start = offset + sum(i * s for i, s in zip(at, strides, strict=True))
        apart_by = list(strides)
        with reading(None):  # compute no checksum, because the bytes may include gaps
            if apart is None:
                span = itemsize + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
                data = read(start, span)
            else:
                pitch = apart_by[apart] = _pitch(span)
                data = read.room.of(shape[apart] * pitch)
                ends = range(0, shape[apart] * pitch, pitch)
                read.rows(start, strides[apart], [data[end : end + span] for end in ends])
        target = made[tuple(slice(i, i + n) for i, n in zip(at, shape, strict=True))]
        transposed_copy(target, np.ndarray(shape, made.dtype, data, 0, apart_by))


def _rows(data: Array) -> Iterator[memoryview]:
    """Yield the memory of each row. If the array is contiguous, yield all its memory at once."""
    if data.flags.c_contiguous:
        yield data.reshape(-1).data
        return
    for index in np.ndindex(data.shape[:-2]):
        yield from (row.data for row in data[index])


def _box(
    dims: list[tuple[int, int]], itemsize: int, is_local: bool
) -> tuple[list[int], int, int | None]:
    """Choose the number of indices that a box has along each dimension.

    Return these numbers, the number of bytes of a row, and the dimension along which rows are read
    into separate buffers. The dimension is None if one read fills the box.
    """
    box = [1] * len(dims)
    span = itemsize
    whole = sum((n - 1) * s for n, s in dims)
    for axis in sorted(range(len(dims)), key=lambda axis: dims[axis][1]):
        n, s = dims[axis]
        is_exact = span >= EXACT and (s >= span if is_local else whole > TILE and s > 2 * span)
        if s - span > CALL or is_exact:
            wanted = min(max(BOX // span, LINE // itemsize), 8 * BOX // span)
            box[axis] = max(1, min(n, wanted))
            return box, span, axis if n > 1 else None
        box[axis] = n if s == 0 else max(1, min(n, 1 + (BOX - span) // s))
        span += (box[axis] - 1) * s
        if box[axis] < n:
            break
    return box, span, None


def _pitch(width: int) -> int:
    """Return the distance in memory between rows of `width` bytes: an odd number of cache lines."""
    return (-(-width // _LINE) | 1) * _LINE


def transposed_copy(target: Array, view: Array) -> None:
    """Copy `view` into `target`, a row-major array of the same shape and dtype.

    A simple transpose would load a new cache line for each element that it reads. Therefore this
    function copies a few rows into a buffer (a strip), and transposes the strip. In a strip, a few
    unused bytes follow each row, because rows whose distance is a power of two would compete for a
    few cache lines.
    """
    last = view.ndim - 1
    near = min(range(view.ndim), key=lambda axis: (view.shape[axis] == 1, view.strides[axis]))
    if near == last or min(view.shape[near], view.shape[last]) <= SMALL_AXIS:
        target[...] = view
        return
    order = [axis for axis in range(view.ndim) if axis not in (near, last)] + [last, near]
    target, view = target.transpose(order), view.transpose(order)
    size = view.itemsize
    width = STRIP_WIDTH // size
    strip = np.empty((STRIP_ROWS, _pitch(STRIP_WIDTH) // size), view.dtype)
    for index in np.ndindex(view.shape[:-2]):
        rows, columns = view[index], target[index]
        # Rows at a distance of an odd number of cache lines need no strip.
        if rows.strides[0] % (2 * _LINE) == _LINE:
            _transpose_into(columns, rows)
            continue
        for left in range(0, rows.shape[1], width):
            for top in range(0, rows.shape[0], STRIP_ROWS):
                part = rows[top : top + STRIP_ROWS, left : left + width]
                held = strip[: part.shape[0], : part.shape[1]]
                held[...] = part
                _transpose_into(columns[top : top + STRIP_ROWS, left : left + width], held)


def _transpose_into(target: Array, rows: Array) -> None:
    """Copy rows into an array whose columns are contiguous.

    If elements are single bytes, the function transposes groups of four columns as 32-bit numbers.
    Then the function extracts the first bytes of all numbers, then the second bytes, and so on.
    Compared with a copy of single bytes, this method takes 33 % less time (measured). The numpy
    calls are few and large, because threads wait for each other between calls.
    """
    height, width = rows.shape
    wide = width // _LANES * _LANES if rows.itemsize == rows.strides[1] == 1 else 0
    target[:, wide:] = rows[:, wide:]
    if wide:
        units = np.empty((wide // _LANES, height), "<u4")
        units[...] = rows[:, :wide].view("<u4").T
        target[:, 0:wide:_LANES] = units.T  # the cast to uint8 keeps the lowest byte
        for lane in range(1, _LANES):
            np.right_shift(units, 8, out=units)
            target[:, lane:wide:_LANES] = units.T


# Large transposes

# An output row of a transpose has one element of every input row. A tile of complete output rows
# therefore covers only a few input columns, and reads a few bytes of every input row. If ckptkit
# may write the output in any order, it reads a block of rows and columns in long reads, transposes
# the block in memory, and writes it in long writes.


class Matrix(NamedTuple):
    """A matrix whose rows are contiguous in the source.

    The columns of the matrix are contiguous in the target.
    """

    source: Extent
    start: int  # Offset of the first element in the source, in bytes.
    place: int  # Offset of the first element in the target, in bytes.
    rows: int
    columns: int
    pitch: int  # distance between rows in the source, in bytes
    step: int  # distance between columns in the target, in bytes
    itemsize: int

    @property
    def size(self) -> int:
        return self.rows * self.columns * self.itemsize


class Block(NamedTuple):
    """Matrices whose columns are adjacent in the target, so that one call writes the columns."""

    parts: tuple[Matrix, ...]

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.parts)

    @property
    def size(self) -> int:
        return sum(each.size for each in self.parts)


def blocks(extent: Extent, at: int = 0) -> list[Block]:
    """Split a large transpose into blocks. Return [] for other extents.

    `at` is the offset of the extent in the output file.
    """
    if not isinstance(extent, Derived) or not isinstance(extent.operation, Arrange):
        return []
    found: list[Matrix] = []
    for copy in extent.operation.copies if extent.length >= LEAST else ():
        matrices = list(_matrices(extent.inputs[copy.source], copy, extent.operation.itemsize))
        if not matrices:
            return []
        for matrix in matrices:
            found += _cut(matrix, at)
    return list(_together(sorted(found, key=lambda matrix: matrix.place)))


def _together(matrices: Iterable[Matrix]) -> Iterator[Block]:
    """Group adjacent matrices into blocks."""
    held: list[Matrix] = []
    size = 0
    for matrix in matrices:
        size += matrix.size
        if held and (size > BLOCK or not _follows(held[-1], matrix)):
            yield Block(tuple(held))
            held, size = [], matrix.size
        held.append(matrix)
    if held:
        yield Block(tuple(held))


def _follows(one: Matrix, other: Matrix) -> bool:
    ends = one.place + one.rows * one.itemsize
    return ends == other.place and (one.columns, one.step) == (other.columns, other.step)


def _matrices(source: Extent, copy: StridedCopy, itemsize: int) -> Iterator[Matrix]:
    """Yield the matrices of a copy if it is a large transpose. Otherwise, yield nothing."""
    dims = normal(copy.dims)
    rows = next((dim for dim in dims if dim[2] == 1 and dim[1] > 1), None)
    columns = next((dim for dim in dims if dim[1] == 1 and dim[2] > 1), None)
    if rows is None or columns is None or columns[0] * columns[2] * itemsize < LEAST:
        return  # a tile contains all columns, so ckptkit reads each row once
    pitch, step = rows[1] * itemsize, columns[2] * itemsize
    for start, place in corners(copy, [dim for dim in dims if dim not in (rows, columns)]):
        sizes = (rows[0], columns[0], pitch, step, itemsize)
        yield Matrix(source, start * itemsize, place * itemsize, *sizes)


def _cut(matrix: Matrix, at: int) -> Iterator[Matrix]:
    """Split a matrix into blocks of equal size. See `blocks` for `at`.

    If a block spans complete columns, one write call writes many columns. If a block spans complete
    rows, one read call reads many rows. A write takes about twice as long as a read (measured).
    Therefore, blocks of a large matrix have twice as many rows as columns.

    If possible, blocks begin at page boundaries of the file. If two blocks share a page, the
    operating system must read the page before it writes the page. This takes 12 % more time
    (measured).
    """
    size, elements = matrix.itemsize, BLOCK // matrix.itemsize
    # The number of elements of a column that fill a page, or 1 if columns start inside pages.
    unit = 1 if matrix.step % PAGE else PAGE // size
    side = math.isqrt(2 * elements)
    height = max(side, elements // min(matrix.columns, COLUMNS))
    if matrix.rows <= 2 * side:
        height = matrix.rows
    height = -(-matrix.rows // -(-matrix.rows // height))
    height = min(matrix.rows, height + -height % unit)
    width = max(1, min(matrix.columns, COLUMNS, elements // height))
    is_whole = height == matrix.rows or height % unit
    over = 0 if is_whole else (at + matrix.place) // size % unit
    for row, end in pairwise([0, *range(height - over, matrix.rows, height), matrix.rows]):
        for column in range(0, matrix.columns, width):
            yield matrix._replace(
                start=matrix.start + row * matrix.pitch + column * size,
                place=matrix.place + column * matrix.step + row * size,
                rows=end - row,
                columns=min(width, matrix.columns - column),
            )


class BlockTransposer:
    """Transposes blocks in one buffer, because to allocate new pages takes longer than a copy."""

    def __init__(self) -> None:
        # Allocate the buffer with numpy, because numpy uses large pages. A transpose of many rows
        # is slow with small pages.
        self._memory, self._strips = np.empty(0, np.uint8), ScratchBuffer()

    def pieces(self, block: Block) -> Iterator[tuple[int, list[memoryview]]]:
        """Transpose a block. Yield pairs: an offset in the target, and the buffers to write there.

        The next call of `pieces` overwrites the buffers.
        """
        first = block.parts[0]
        size, width = first.itemsize, block.rows * first.itemsize
        pitch = _pitch(width)
        if len(self._memory) < first.columns * pitch:
            self._memory = np.empty(first.columns * pitch, np.uint8)
        memory = self._memory[: first.columns * pitch]
        columns = memory.view(_UNITS[size]).reshape(first.columns, -1)
        at = 0
        for matrix in block.parts:
            read = Reader(matrix.source, self._strips)
            fill(columns[:, at : at + matrix.rows], read, matrix.start, (size, matrix.pitch))
            at += matrix.rows
        data = memory.data
        rows = [data[at : at + width] for at in range(0, first.columns * pitch, pitch)]
        at_once = _AT_ONCE if first.step == width else 1
        for column in range(0, first.columns, at_once):
            yield first.place + column * first.step, rows[column : column + at_once]
