"""Arrays that files hold cut into columns: each row joined from a piece of every file.

The pieces are read where they belong in a band of rows, and no element is looked at: numpy would
cost more than the copies of a model of some GiB.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from ckptkit.core.bytesource import Extent, LocalFile, Range
from ckptkit.core.tensor import Shape, contiguous_stride

BAND = 1 << 20  # bytes of rows made at once: they stay in a core's cache until they are written
WIDEST = 8 << 20  # bytes of rows made at once where one alone is more than a band
ROWS = 4  # so many of them: a read for each row of each file would cost more
LEAST = 1 << 10  # bytes of a piece that are worth an entry in a call of the system

Place = tuple[Shape, Shape, Shape, int]  # offsets, sizes, stride, first byte of the input


class Column(NamedTuple):
    """The part of one file: `width` bytes of each row, one row after another from byte `start`."""

    source: LocalFile
    start: int
    width: int


def columns(
    itemsize: int, shape: Shape, places: Sequence[Place], inputs: Sequence[Extent]
) -> list[Column]:
    """Return the columns that boxes are, in order; none where the array is cut otherwise."""
    cut = {axis for _, sizes, _, _ in places for axis in _differing(sizes, shape)}
    axis = cut.pop() if len(cut) == 1 else 0
    if not prod(shape[:axis]) > 1:
        return []
    unit = prod(shape[axis + 1 :]) * itemsize
    found = []
    for extent, place in sorted(
        zip(inputs, places, strict=True), key=lambda each: each[1][0][axis]
    ):
        column = _column(extent, place, place[1][axis] * unit)
        if column is None:
            return []
        found.append(column)
    return found if sum(each.width for each in found) <= WIDEST else []


def _differing(sizes: Shape, shape: Shape) -> Iterator[int]:
    return (axis for axis, (n, m) in enumerate(zip(sizes, shape, strict=True)) if n != m)


def _column(extent: Extent, place: Place, width: int) -> Column | None:
    """The column that a box is, None if its rows do not follow each other in a local file."""
    _, sizes, stride, first = place
    if not isinstance(extent, Range) or not isinstance(extent.source, LocalFile):
        return None
    if stride != contiguous_stride(sizes) or width < LEAST:
        return None
    return Column(extent.source, extent.offset + first, width)


def joined(found: list[Column], start: int, stop: int) -> Iterator[memoryview]:
    """Yield bytes `start` to `stop` of the rows that the columns make, band by band."""
    row = sum(column.width for column in found)
    first, last = start // row, -(-stop // row)
    count = max(1, min(max(BAND // row, min(ROWS, WIDEST // row)), last - first))
    band = memoryview(bytearray(count * row))
    pieces = list(_pieces(found, band, row))
    for top in range(first, last, count):
        height = min(count, last - top)
        for column, own in zip(found, pieces, strict=True):
            column.source.read_into_all(column.start + top * column.width, own[:height])
        yield band[max(start - top * row, 0) : min(stop - top * row, height * row)]


def _pieces(found: list[Column], band: memoryview, row: int) -> Iterator[list[memoryview]]:
    """Yield for each column its place in every row of a band."""
    left = 0
    for column in found:
        yield [band[at : at + column.width] for at in range(left, len(band), row)]
        left += column.width
