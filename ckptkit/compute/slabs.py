"""Large transposes: blocks are read once, turned in memory, and written where they belong.

The output of a transpose has rows as long as the input has rows, so that a tile of whole rows holds
few columns: made in order, each tile needs a little of every row of the input. Where the order of
writing is free, a block of rows and columns is read in long pieces and written in long pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import pairwise, product
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptkit.compute.gather import Chunks, Gather
from ckptkit.compute.operation import Reader, Room
from ckptkit.core.bytesource import Derived, Extent

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

LEAST = 16 << 20  # bytes that the columns of a matrix span in the target; less fits into a tile
BLOCK = 48 << 20  # bytes of a block
COLUMNS = 4096  # of a block at most: a strip of them stays in a core's cache
PAGE = 4 << 10  # bytes that the system keeps together: it fills up those that are written in part
_LINE = 1024  # bytes that a strip gives to each row of the target
_ROWS = 512  # of a strip at most
_LANES = 4  # bytes that are turned as one unit: numpy copies a unit as fast as a byte
_PADDING = 64  # bytes after each row in memory: rows a power of two apart share lines of the cache
_AT_ONCE = 1024  # rows that are written by one call where they follow each other
_UNITS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}

Dims = tuple[tuple[int, int, int], ...]  # elements, stride in the source, stride in the target


class Matrix(NamedTuple):
    """A matrix whose rows lie in the source and whose columns lie in the target; all in bytes."""

    source: Extent
    start: int  # of the first element in the source
    place: int  # and in the target
    rows: int
    columns: int
    pitch: int  # from row to row in the source
    step: int  # from column to column in the target
    itemsize: int

    @property
    def size(self) -> int:
        return self.rows * self.columns * self.itemsize


def merged(dims: Iterable[tuple[int, int, int]]) -> Dims:
    """The same elements with as few dimensions as possible, by falling stride in the target."""
    found: list[tuple[int, int, int]] = []
    for n, read, written in sorted((d for d in dims if d[0] != 1), key=lambda d: -d[2]):
        if found and found[-1][1] == n * read and found[-1][2] == n * written:
            found[-1] = (found[-1][0] * n, read, written)
        else:
            found.append((n, read, written))
    return tuple(found)


class Block(NamedTuple):
    """Matrices whose columns follow each other in the target: they are written together."""

    parts: tuple[Matrix, ...]

    @property
    def rows(self) -> int:
        return sum(each.rows for each in self.parts)

    @property
    def size(self) -> int:
        return sum(each.size for each in self.parts)


def blocks(extent: Extent, at: int = 0) -> list[Block]:
    """The blocks that a large transpose falls into; nothing for an extent that is none.

    They are cut for a target that begins at byte `at` of its file.
    """
    if not isinstance(extent, Derived) or extent.length < LEAST:
        return []
    found: list[Matrix] = []
    for source, origin, place, dims, itemsize in _boxes(extent):
        matrices = list(_matrices(source, origin, place, dims, itemsize))
        if not matrices:
            return []
        for matrix in matrices:
            found += _cut(matrix, at)
    return list(_together(sorted(found, key=lambda matrix: matrix.place)))


def _together(matrices: Iterable[Matrix]) -> Iterator[Block]:
    """Yield blocks of matrices, of which one ends where the next begins."""
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


Box = tuple[Extent, int, int, Dims, int]


def _boxes(extent: Derived) -> Iterator[Box]:
    """Yield source, its first byte, first element of the target, dimensions and itemsize."""
    operation = extent.operation
    if isinstance(operation, Gather):
        dims = merged(
            zip(operation.shape, operation.stride, _row_major(operation.shape), strict=True)
        )
        yield extent.inputs[0], operation.start, 0, dims, operation.itemsize
    elif isinstance(operation, Chunks):
        steps = _row_major(operation.shape)
        for source, box in zip(extent.inputs, operation.boxes, strict=True):
            offsets, sizes, stride, origin = box
            place = sum(o * s for o, s in zip(offsets, steps, strict=True))
            dims = merged(zip(sizes, stride, steps, strict=True))
            yield source, origin, place, dims, operation.itemsize


def _row_major(shape: tuple[int, ...]) -> list[int]:
    strides, step = [], 1
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return strides[::-1]


def _matrices(
    source: Extent, origin: int, place: int, dims: Dims, itemsize: int
) -> Iterator[Matrix]:
    """Yield the large matrices of a box, if it is made of such."""
    rows = next((dim for dim in dims if dim[2] == 1 and dim[1] > 1), None)
    columns = next((dim for dim in dims if dim[1] == 1 and dim[2] > 1), None)
    if rows is None or columns is None or columns[0] * columns[2] * itemsize < LEAST:
        return  # a tile holds all columns, and each row is read once
    outer = [dim for dim in dims if dim not in (rows, columns)]
    for index in product(*(range(n) for n, _, _ in outer)):
        read = sum(i * dim[1] for i, dim in zip(index, outer, strict=True))
        written = sum(i * dim[2] for i, dim in zip(index, outer, strict=True))
        start, at = origin + read * itemsize, (place + written) * itemsize
        pitch, step = rows[1] * itemsize, columns[2] * itemsize
        yield Matrix(source, start, at, rows[0], columns[0], pitch, step, itemsize)


def _cut(matrix: Matrix, at: int) -> Iterator[Matrix]:
    """Yield blocks of even size, as many as are needed, of a target that begins at byte `at`."""
    height, width = _block_shape(matrix)
    size = matrix.itemsize
    for row, end in pairwise(_ends(matrix, height, at)):
        for column in range(0, matrix.columns, width):
            yield matrix._replace(
                start=matrix.start + row * matrix.pitch + column * size,
                place=matrix.place + column * matrix.step + row * size,
                rows=end - row,
                columns=min(width, matrix.columns - column),
            )


def _ends(matrix: Matrix, height: int, at: int) -> list[int]:
    """Return the rows where blocks begin and end: where pages of the file do, if possible.

    A page that is written in two parts has to be filled up first: an eighth more time (measured).
    """
    unit = _rows_of_page(matrix)
    is_whole = height == matrix.rows or height % unit
    over = 0 if is_whole else (at + matrix.place) // matrix.itemsize % unit
    return [0, *range(height - over, matrix.rows, height), matrix.rows]


def _rows_of_page(matrix: Matrix) -> int:
    """Return the rows whose elements of a column fill a page, 1 if columns begin anywhere in it."""
    return 1 if matrix.step % PAGE else PAGE // matrix.itemsize


def _block_shape(matrix: Matrix) -> tuple[int, int]:
    """Return the rows and columns of a block for which the fewest calls read and write it.

    Whole rows follow each other in the source, and whole columns in the target: there one call
    takes many. A piece that is written costs about twice as much as one that is read (measured).
    """
    elements = max(1, BLOCK // matrix.itemsize)
    heights = (matrix.rows, elements // min(matrix.columns, COLUMNS), math.isqrt(2 * elements))
    shapes = [_fitting(matrix, height, elements) for height in heights]
    return min(shapes, key=lambda shape: _cost(matrix, *shape))


def _fitting(matrix: Matrix, height: int, elements: int) -> tuple[int, int]:
    """Return the shape of even blocks of at most `height` rows and as many columns as fit."""
    height = max(1, min(matrix.rows, height, elements))
    height = -(-matrix.rows // -(-matrix.rows // height))
    # A little more of them where that gives whole pages.
    height = min(matrix.rows, height + -height % _rows_of_page(matrix))
    return height, max(1, min(matrix.columns, COLUMNS, elements // height))


def _cost(matrix: Matrix, height: int, width: int) -> float:
    """Estimate the calls for each element."""
    is_whole = width == matrix.columns and matrix.pitch == width * matrix.itemsize
    reads = 0 if is_whole else 1 / width
    return reads + (0 if height == matrix.rows else 2 / height)


class _Rows:
    """Rows of bytes in memory that is used again: new pages cost more than copies."""

    def __init__(self) -> None:
        self._memory: Array | None = None

    def of(self, count: int, width: int, units: str) -> tuple[Array, list[memoryview]]:
        """Return `count` rows of `width` bytes, as an array and one by one; the next call takes
        them back."""
        import numpy as np

        pitch = -(-width // _PADDING) * _PADDING + _PADDING
        if self._memory is None or self._memory.size < count * pitch:
            self._memory = np.empty(count * pitch, np.uint8)
        data = self._memory.data
        rows = [data[at : at + width] for at in range(0, count * pitch, pitch)]
        return self._memory[: count * pitch].view(units).reshape(count, -1), rows


class Turner:
    """Turns blocks, one after another, in the same memory.

    Rows are read strip by strip; each strip is turned while it is in the cache.
    """

    def __init__(self) -> None:
        self._strip, self._slab = _Rows(), _Rows()
        self._lanes = Room()

    def pieces(self, block: Block) -> Iterator[tuple[int, list[memoryview]]]:
        """Yield the pieces of the target that a block gives, each with its first byte there.

        A piece is a list of buffers. They are the caller's until the next block is turned.
        """
        first = block.parts[0]
        width = block.rows * first.itemsize
        slab, rows = self._slab.of(first.columns, width, _UNITS[first.itemsize])
        at = 0
        for matrix in block.parts:
            self._turn(matrix, slab[:, at : at + matrix.rows])
            at += matrix.rows
        at_once = _AT_ONCE if first.step == width else 1
        for column in range(0, first.columns, at_once):
            yield first.place + column * first.step, rows[column : column + at_once]

    def _turn(self, matrix: Matrix, columns: Array) -> None:
        """Fill `columns` with those of a matrix."""
        size, read = matrix.itemsize, Reader(matrix.source)
        height = min(matrix.rows, _ROWS, max(1, _LINE // size))
        strip, rows = self._strip.of(height, matrix.columns * size, _UNITS[size])
        for row in range(0, matrix.rows, height):
            count = min(height, matrix.rows - row)
            at = matrix.start + row * matrix.pitch
            read.rows(at, matrix.pitch, rows[:count])
            self._turn_strip(strip[:count, : matrix.columns], columns[:, row : row + count])

    def _turn_strip(self, strip: Array, columns: Array) -> None:
        """Fill `columns` with those of a strip; single bytes four at a time.

        Units of four columns are turned, and casts take one of their bytes after another: a third
        faster (measured). Calls are few and large, since threads wait for each other between them.
        """
        import numpy as np

        wide = strip.shape[1] // _LANES * _LANES if strip.itemsize == 1 else 0
        columns[wide:] = strip[:, wide:].T
        if not wide:
            return
        height = strip.shape[0]
        units = np.frombuffer(self._lanes.of(wide * height), "<u4").reshape(-1, height)
        units[...] = strip[:, :wide].view("<u4").T
        columns[0:wide:_LANES] = units  # a cast keeps the lowest 8 bits: the first byte
        for lane in range(1, _LANES):
            np.right_shift(units, 8, out=units)
            columns[lane:wide:_LANES] = units
