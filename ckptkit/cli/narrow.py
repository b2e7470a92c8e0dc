"""Lines and tables on a terminal that is too narrow for them; all text is escaped already."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from textwrap import wrap

Row = Sequence[str]
Aligned = Callable[[Row, Sequence[Row]], Iterator[str]]

NARROWEST = 16  # characters of a name that are always shown
PROSE = 24  # characters of a line of prose in the last column, at least
GAP = 2  # characters between columns
UNBROKEN = "\N{NO-BREAK SPACE}"  # a space at which no line is wrapped; escaped text has none
_UNIT = re.compile(r"(?<=[0-9]) (?=[kMGTP]?B\b)")  # between a number and its unit


def line(text: str, width: int, *, whole: bool = False) -> list[str]:
    """Break a line into several, indented; words that are longer only if not `whole`."""
    indent = " " * (len(text) - len(text.lstrip()) + 4)
    lines = wrap(
        _UNIT.sub(UNBROKEN, text),
        max(NARROWEST, width),
        subsequent_indent=indent,
        break_long_words=not whole,
        break_on_hyphens=False,
    )
    return [each.replace(UNBROKEN, " ") for each in lines]


def table(
    headers: Row, rows: Sequence[Row], right: Sequence[str], width: int, aligned: Aligned
) -> Iterator[str]:
    """Format a table in lines of at most `width` characters; `aligned` formats one that fits.

    Columns with the same cell in every row are taken out first, and named above. Then prose in the
    last column is wrapped, or else names in the first are cut in the middle. Where that is not
    enough, or would make two names equal, each row becomes a name and lines of its cells.
    """
    if _width(headers, rows) <= width:
        yield from aligned(headers, rows)
        return
    headers, rows, same = _without_same(headers, rows, right)
    if same:
        yield from line(f"the same in all rows: {same}", width)
    narrower = _wrapped_prose(headers, rows, right, width) or _cut_names(headers, rows, width)
    if narrower is None:
        yield from _stacked(headers, rows, width)
    else:
        yield from aligned(headers, narrower)


def _widths(headers: Row, rows: Sequence[Row]) -> list[int]:
    """Return the width of each column."""
    return [max(map(len, column)) for column in zip(headers, *rows, strict=True)]


def _width(headers: Row, rows: Sequence[Row]) -> int:
    return sum(_widths(headers, rows)) + GAP * (len(headers) - 1)


def _without_same(
    headers: Row, rows: Sequence[Row], right: Sequence[str]
) -> tuple[Row, Sequence[Row], str]:
    """Take out columns, other than names and numbers, whose cells are all the same."""
    if len(rows) < 2:
        return headers, rows, ""
    first, *columns = zip(headers, *rows, strict=True)
    same = [each for each in columns if each[0] not in right and len({*each[1:]}) == 1]
    kept = [first, *(each for each in columns if each not in same)]
    left, *cells = zip(*kept, strict=True)
    return left, cells, _pairs([head for head, *_ in same], [cell for _, cell, *_ in same])


def _wrapped_prose(
    headers: Row, rows: Sequence[Row], right: Sequence[str], width: int
) -> Sequence[Row] | None:
    """Wrap the last column into rows of its own; None where it is no prose, or has no room."""
    *widths, last = _widths(headers, rows)
    room = width - sum(widths) - GAP * len(widths)
    words = [word for row in rows for word in row[-1].split()]
    if _width(headers, rows) <= width:
        return rows
    is_prose = last > PROSE and headers[-1] not in right and len(words) > len(rows)
    if not (widths and is_prose and room >= PROSE and max(map(len, words)) <= room):
        return None
    found: list[Row] = []
    for *cells, prose in rows:
        first, *others = wrap(prose, room, break_on_hyphens=False) or [""]
        found.append([*cells, first])
        found += [[*[""] * len(cells), other] for other in others]
    return found


def _cut_names(headers: Row, rows: Sequence[Row], width: int) -> Sequence[Row] | None:
    """Cut the names in the middle; None if they have no room, or two would become equal."""
    _, *widths = _widths(headers, rows)
    room = width - sum(GAP + each for each in widths) - 1  # a column stays free
    names = distinct([row[0] for row in rows], room) if room >= NARROWEST else None
    if names is None:
        return None
    return [[name, *row[1:]] for name, row in zip(names, rows, strict=True)]


def _stacked(headers: Row, rows: Sequence[Row], width: int) -> Iterator[str]:
    """Yield each row as its name and, indented below it, its other cells after their headings."""
    names = [row[0] for row in rows]
    names = distinct(names, max(NARROWEST, width)) or names
    for name, (_, *cells) in zip(names, rows, strict=True):
        yield from line(name, width, whole=True)
        yield from line(f"  {_pairs(headers[1:], cells)}", width)


def _pairs(headers: Sequence[str], cells: Sequence[str]) -> str:
    """Return cells after their headings; a pair stays on one line if it is short."""
    pairs = []
    for header, cell in zip(headers, cells, strict=True):
        mark = ":" if " " in header else ""
        pair = f"{header}{mark} {cell}".strip()
        if cell:
            pairs.append(pair.replace(" ", UNBROKEN) if len(pair) <= PROSE else pair)
    return ", ".join(pairs)


def distinct(names: Sequence[str], room: int) -> list[str] | None:
    """Shorten names to `room` characters; return None if two of them would become equal."""
    short = {name: shortened(name, room) for name in names}
    if len({*short.values()}) < len(short):
        return None
    return [short[name] for name in names]


def shortened(text: str, room: int) -> str:
    """Return `text` in at most `room` characters, cut in the middle."""
    if len(text) <= room:
        return text
    head = (room - 3) // 2
    return f"{text[:head]}...{text[len(text) - (room - 3 - head) :]}"
