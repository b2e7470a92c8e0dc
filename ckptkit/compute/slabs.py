"""Large transposes: blocks are read once, turned in memory, and written where they belong.

The output of a transpose has rows as long as the input has rows, so that a tile of whole rows holds
few columns: made in order, each tile needs a little of every row of the input. Where the order of
writing is free, a block of rows and columns is read in long pieces and written in long pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptkit.compute import transposing
from ckptkit.core.bytesource import Derived, Extent

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, Any]

LEAST = 16 << 20  # bytes that the columns of a matrix span in the target; less fits into a tile
BLOCK = 32 << 20  # bytes of a block
WIDE = 4096  # rows of a block, if there are so many: what is written at once has as many elements
_MADE = 4 << 20  # bytes of a block that are turned at once
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


def blocks(extent: Extent) -> list[Matrix]:
    """The blocks that a large transpose falls into; nothing for an extent that is none."""
    if not isinstance(extent, Derived) or extent.length < LEAST:
        return []
    found: list[Matrix] = []
    for source, origin, place, dims, itemsize in _boxes(extent):
        matrices = list(_matrices(source, origin, place, dims, itemsize))
        if not matrices:
            return []
        for matrix in matrices:
            found += _cut(matrix)
    return found


Box = tuple[Extent, int, int, Dims, int]


def _boxes(extent: Derived) -> Iterator[Box]:
    """Yield source, its first byte, first element of the target, dimensions and itemsize."""
    if extent.operation == "gather":
        itemsize, shape, stride, origin = extent.parameters
        assert isinstance(shape, tuple) and isinstance(stride, tuple)
        assert isinstance(itemsize, int) and isinstance(origin, int)
        dims = merged(zip(shape, stride, _row_major(shape), strict=True))
        yield extent.inputs[0], origin, 0, dims, itemsize
    elif extent.operation == "chunks":
        itemsize, shape, boxes = extent.parameters
        assert isinstance(shape, tuple) and isinstance(boxes, tuple) and isinstance(itemsize, int)
        steps = _row_major(shape)
        for source, (offsets, sizes, stride, origin) in zip(extent.inputs, boxes, strict=True):
            place = sum(o * s for o, s in zip(offsets, steps, strict=True))
            yield source, origin, place, merged(zip(sizes, stride, steps, strict=True)), itemsize


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


def _cut(matrix: Matrix) -> Iterator[Matrix]:
    """Yield blocks: many rows, so that much is written at once, and the columns that fit."""
    size = matrix.itemsize
    rows = min(matrix.rows, max(WIDE, BLOCK // (matrix.columns * size)))
    columns = max(1, min(matrix.columns, BLOCK // (rows * size)))
    for row in range(0, matrix.rows, rows):
        for column in range(0, matrix.columns, columns):
            yield matrix._replace(
                start=matrix.start + row * matrix.pitch + column * size,
                place=matrix.place + column * matrix.step + row * size,
                rows=min(rows, matrix.rows - row),
                columns=min(columns, matrix.columns - column),
            )


class Turner:
    """Turns blocks, one after another, in the same memory."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._made = bytearray()

    def pieces(self, block: Matrix) -> Iterator[tuple[int, memoryview]]:
        """Yield the pieces of the target that a block gives, each with its first byte there.

        A piece is the caller's until the next one is asked for.
        """
        import numpy as np

        units = np.dtype(_UNITS[block.itemsize])
        rows = np.frombuffer(self._read(block), units).reshape(block.rows, block.columns)
        length = block.rows * block.itemsize
        at_once = max(1, _MADE // length)
        if len(self._made) < min(at_once, block.columns) * length:
            self._made = bytearray(min(at_once, block.columns) * length)
        for column in range(0, block.columns, at_once):
            count = min(at_once, block.columns - column)
            flat = memoryview(self._made)[: count * length]
            made = np.frombuffer(flat, units).reshape(count, -1)
            transposing.copy(made, rows[:, column : column + count].T)
            place = block.place + column * block.step
            if block.step == length:
                yield place, flat
                continue
            for n in range(count):
                yield place + n * block.step, flat[n * length : (n + 1) * length]

    def _read(self, block: Matrix) -> memoryview:
        """The rows of a block, one after another."""
        from ckptkit.compute.operations import read_into

        width = block.columns * block.itemsize
        if len(self._data) < block.rows * width:
            self._data = bytearray(block.rows * width)
        view = memoryview(self._data)[: block.rows * width]
        if block.pitch == width:
            read_into(block.source, block.start, view)
            return view
        for row in range(block.rows):
            part = view[row * width : (row + 1) * width]
            read_into(block.source, block.start + row * block.pitch, part)
        return view
