"""A grid of numbers: as many columns as fit, and digits enough to tell different numbers apart."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptkit.cli import render

if TYPE_CHECKING:
    from ckptkit.analysis.slices import Pick, Picks

CELL = 10  # characters of a number and the space before it, at least
PLAIN = 100  # characters of a line where there is no terminal
LABEL = 8  # characters for the row indices
FEWEST, MOST = 3, 17  # significant digits; 17 tell all numbers of 64 bits apart
MARK = "*"  # at a number that differs from that of the first table


class Corner(NamedTuple):
    """A part of a tensor that is shown: its picks, and its numbers, row by row.

    A vector is one row, which is printed in lines of `columns` numbers.
    """

    picks: Picks
    cells: list[list[Any]]
    columns: int

    @property
    def many(self) -> list[Pick]:
        """The dimensions of the grid: the rows and columns, the elements of a vector, or none."""
        return [pick for pick in self.picks if not pick.single]

    @property
    def is_vector(self) -> bool:
        return len(self.many) == 1

    def cut(self, rows: int, columns: int) -> Corner:
        """Return this corner with fewer columns."""
        from ckptkit.analysis.slices import plane

        width = rows * columns if self.is_vector else columns
        cells = [row[:width] for row in self.cells]
        return Corner(plane(self.picks, rows, width), cells, columns)


class Line(NamedTuple):
    """A line of a grid: the index before it, and the numbers with their texts."""

    label: str
    numbers: list[Any]
    texts: list[str]


def fitting(tables: int, cell: int = CELL) -> int:
    """Return how many columns of `cell` characters fit, for tables side by side."""
    width = render.terminal_width() or PLAIN
    return max(1, (width - LABEL) // tables // cell)


def texts(rows: Iterable[list[Any]]) -> list[list[str]]:
    """Format numbers with so many digits that those that differ have different texts."""
    rows = list(rows)
    numbers = [each for each in chain.from_iterable(rows) if not _is_nan(each)]
    different = len(set(numbers))
    digits = FEWEST
    while digits < MOST and len({_text(each, digits) for each in numbers}) < different:
        digits += 1
    return [[_text(each, digits) for each in row] for row in rows]


def _is_nan(number: Any) -> bool:
    return bool(number != number)


def _text(number: Any, digits: int) -> str:
    if isinstance(number, int):
        return str(number)
    if not isinstance(number, complex):
        return f"{number:.{digits}g}"
    sign = "-" if math.copysign(1, number.imag) < 0 else "+"
    return f"{number.real:.{digits}g}{sign}{abs(number.imag):.{digits}g}j"


def cell_width(corners: Sequence[Corner]) -> int:
    """Return the characters of a cell with its mark and the space before it."""
    written = texts(chain.from_iterable(corner.cells for corner in corners))
    longest = max(map(len, chain.from_iterable(written)), default=0)
    return max(CELL, longest + 1 + (len(corners) > 1))


def lines(corners: Sequence[Corner]) -> Iterator[str]:
    """Yield the tables side by side, with row and column indices."""
    if not all(corner.cells for corner in corners):
        yield "no elements"
        return
    cell = cell_width(corners)
    written = iter(texts(chain.from_iterable(corner.cells for corner in corners)))
    tables = [list(_lines(corner, [next(written) for _ in corner.cells])) for corner in corners]
    side = max(len(line.label) for line in tables[0])
    heads = ["".join(f"{head:>{cell}}" for head in _heads(corner)) for corner in corners]
    if any(heads):
        yield (" " * side + "  |".join(heads)).rstrip()
    nothing = Line("", [], [])
    for row in zip_longest(*tables, fillvalue=nothing):
        parts = [_marked(line, row[0], cell) for line in row]
        yield (f"{row[0].label:>{side}}" + "  |".join(parts)).rstrip()


def _lines(corner: Corner, written: list[list[str]]) -> Iterator[Line]:
    """Yield the rows of a matrix, or a vector in several lines."""
    columns = corner.columns
    if corner.is_vector:
        ((numbers,), (cells,)) = corner.cells, written
        for at in range(0, len(numbers), columns):
            label = str(_index(corner.many[0], at)) if len(numbers) > columns else ""
            yield Line(label, numbers[at : at + columns], cells[at : at + columns])
        return
    for at, (numbers, cells) in enumerate(zip(corner.cells, written, strict=True)):
        label = str(_index(corner.many[0], at)) if corner.many else ""
        yield Line(label, numbers, cells)


def _heads(corner: Corner) -> list[str]:
    """Return the column indices; those of a vector of several lines count from the line's own."""
    if not corner.many:
        return []
    across = corner.many[-1]
    if corner.is_vector and across.size > corner.columns:
        return [f"+{at * across.step}" for at in range(corner.columns)]
    return [str(_index(across, at)) for at in range(across.size)]


def _index(pick: Pick, at: int) -> int:
    return pick.start + at * pick.step


def _marked(line: Line, first: Line, cell: int) -> str:
    """Return the cells of a line, with a mark where they differ from those of the first table."""
    pairs = zip_longest(line.numbers, first.numbers[: len(line.numbers)])
    marks = ["" if _same(number, other) else MARK for number, other in pairs]
    return "".join(f"{text + mark:>{cell}}" for text, mark in zip(line.texts, marks, strict=True))


def _same(number: Any, other: Any) -> bool:
    return bool(number == other) or (other is not None and _is_nan(number) and _is_nan(other))
