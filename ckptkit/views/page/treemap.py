"""The layout of a treemap: rectangles whose areas are in proportion. Nothing is drawn here.

`tiles` are what pictures draw; `arranged` is the same for a page, whose script knows the size of
the window and zooms.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ckptkit.analysis.shares import Branch, joined

DEEPEST = 12  # tiles inside tiles


UNUSED = "in no tensor"


class Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float


class Tile(NamedTuple):
    """A rectangle for a branch, or for the `rest` smallest ones together.

    ``label`` joins the names on the way to it.
    """

    branch: Branch
    label: str
    box: Box
    leaf: bool
    rest: int = 0


class Piece(NamedTuple):
    branch: Branch
    label: str
    value: int
    rest: int = 0
    own: bool = False  # the tensor itself of a branch that has others below


class Frame(NamedTuple):
    """Space that tiles do not fill, and sizes below which they are merged.

    `border` is the margin around the tiles inside another, `top` the height of its label. A tile
    smaller than `least` has no tiles inside, and those of an area below `dust` are merged into one.
    """

    border: float
    top: float
    least: float
    dust: float


class Strip(NamedTuple):
    """Neighbors that are placed together, along the left side of the space or along its top."""

    start: int
    end: int
    is_column: bool


def strips(values: Sequence[float], width: float, height: float) -> Iterator[Strip]:
    """Yield the strips that fill a box in proportion to `values`, as square as possible.

    The values are positive and in descending order. Algorithm: Bruls, Huizing and van Wijk (2000).
    """
    rest, start = float(sum(values)), 0
    while start < len(values):
        is_column, side = width >= height, min(width, height)
        end = _row(values, start, side, width * height / rest if rest > 0 else 0.0)
        amount = sum(values[start:end])
        part = min(1.0, amount / rest) if rest > 0 else 0.0
        yield Strip(start, end, is_column)
        if is_column:
            width -= width * part
        else:
            height -= height * part
        rest, start = rest - amount, end


def squarified(values: Sequence[float], box: Box) -> list[Box]:
    """Return boxes that fill `box` in proportion to `values`, strip by strip."""
    found: list[Box] = []
    x, y, width, height = box
    rest = float(sum(values))
    for start, end, is_column in strips(values, width, height):
        side, across = (height, width) if is_column else (width, height)
        amount = sum(values[start:end])
        thick = across * min(1.0, amount / rest) if rest > 0 else 0.0
        at = 0.0
        for value in values[start:end]:
            long = side * value / amount
            found.append(Box(x, y + at, thick, long) if is_column else Box(x + at, y, long, thick))
            at += long
        if is_column:
            x, width = x + thick, width - thick
        else:
            y, height = y + thick, height - thick
        rest -= amount
    return found


def _row(values: Sequence[float], start: int, side: float, scale: float) -> int:
    """Return the end of the next row: values are added while its worst aspect ratio improves."""
    end, amount, worst = start, 0.0, float("inf")
    while end < len(values):
        both, square = (amount + values[end]) * scale, side * side
        most, least = values[start] * scale, values[end] * scale
        if not square * least or not both * both:  # no room
            return len(values)
        ratio = max(square * most / (both * both), both * both / (square * least))
        if ratio > worst:
            break
        amount, worst, end = amount + values[end], ratio, end + 1
    return max(end, start + 1)


def tiles(root: Branch, measure: str, box: Box, frame: Frame) -> Iterator[Tile]:
    """Yield the tiles below `root`, parents first. `measure` is ``parameters`` or ``nbytes``."""
    waiting = [(root, box, 0)]
    while waiting:
        branch, inside, depth = waiting.pop()
        found = _pieces(branch, measure, inside.width * inside.height, frame.dust)
        for piece, part in zip(
            found, squarified([each.value for each in found], inside), strict=True
        ):
            inner = _inner(piece, part, frame) if depth < DEEPEST else None
            yield Tile(piece.branch, piece.label, part, inner is None, piece.rest)
            if inner is not None:
                waiting.append((piece.branch, inner, depth + 1))


def _inner(piece: Piece, box: Box, frame: Frame) -> Box | None:
    """Return the box for tiles inside a tile, or None if there are none or no room."""
    if (
        piece.rest
        or piece.own
        or not piece.branch.children
        or min(box.width, box.height) < frame.least
    ):
        return None
    return Box(
        box.x + frame.border,
        box.y + frame.top,
        box.width - 2 * frame.border,
        box.height - frame.top - frame.border,
    )


def _pieces(parent: Branch, measure: str, area: float, dust: float, unused: int = 0) -> list[Piece]:
    """Return the parts of a branch, largest first; those too small to see are merged.

    `unused` bytes are in no tensor, and one more piece.
    """
    found = [Piece(*_named(child), getattr(child, measure)) for child in parent.children.values()]
    own = getattr(parent, measure) - sum(piece.value for piece in found)
    if parent.share is not None and own > 0:
        found.append(Piece(parent, parent.label, own, own=True))
    found.append(Piece(parent, UNUSED, unused))
    found = sorted((piece for piece in found if piece.value > 0), key=lambda piece: -piece.value)
    least = dust * sum(piece.value for piece in found) / area if area > 0 else 0
    seen = [piece for piece in found if piece.value >= least]
    small = found[len(seen) :]
    if len(small) > 1:
        rest = Piece(
            parent, f"{len(small):,} more", sum(piece.value for piece in small), len(small)
        )
        found = sorted((*seen, rest), key=lambda piece: -piece.value)
    return found


def _named(branch: Branch) -> tuple[Branch, str]:
    last = joined(branch)
    return last, branch.label + last.path[len(branch.path) :]


WINDOW = Box(0, 0, 1200, 560)  # of a page, about: strips are chosen for this size
FRAME = Frame(2, 18, 40, 120)

Strips = list[list[int]]


def arranged(
    root: Branch, numbers: Mapping[int, int], measure: str, unused: int = 0
) -> dict[int, Strips]:
    """Return how the parts of each branch are placed, by its number.

    A strip is a list: whether it is a column, then its pieces: the number of a branch (that of the
    branch itself for its own tensor), -1 for `unused` bytes, or -n for n small ones together.
    `numbers` are the numbers of the branches, by their id.
    """
    found: dict[int, Strips] = {}
    waiting = [(root, WINDOW)]
    while waiting:
        branch, box = waiting.pop()
        if min(box.width, box.height) < FRAME.least:
            box = WINDOW  # it is seen when it fills the page
        pieces = _pieces(branch, measure, WINDOW.width * WINDOW.height, FRAME.dust, unused)
        unused = 0
        values = [piece.value for piece in pieces]
        placed = strips(values, box.width, box.height)
        found[numbers[id(branch)]] = [
            [int(is_column), *(_number(piece, numbers) for piece in pieces[start:end])]
            for start, end, is_column in placed
        ]
        boxes = squarified(values, box)
        for piece, part in zip(pieces, boxes, strict=True):
            if not (piece.rest or piece.own or piece.label == UNUSED) and piece.branch.children:
                inner = _inner(piece, part, FRAME)
                waiting.append((piece.branch, WINDOW if inner is None else inner))
                _pass_through(branch, piece.branch, numbers, found)
    return found


def _number(piece: Piece, numbers: Mapping[int, int]) -> int:
    if piece.rest:
        return -piece.rest
    return -1 if piece.label == UNUSED else numbers[id(piece.branch)]


def _pass_through(
    above: Branch, below: Branch, numbers: Mapping[int, int], found: dict[int, Strips]
) -> None:
    """Add the branches between two that have one child each: the page goes up one by one."""
    for child in above.children.values():
        while child is not below and joined(child) is below:
            found[numbers[id(child)]] = [[1, numbers[id(below)]]]
            (child,) = child.children.values()


class Numbered(NamedTuple):
    """The branches of a tree in order, parents first: labels, numbers of parents, and tensors."""

    label: list[str]
    parent: list[int]
    row: list[int]


def numbered(root: Branch, rows: Mapping[int, int]) -> tuple[Numbered, dict[int, int]]:
    """Return the branches and their numbers by id; `rows` numbers the tensors by id of the share.

    -1 stands for no parent and no tensor.
    """
    found, numbers = Numbered([], [], []), {}
    waiting = [(root, -1)]
    while waiting:
        branch, parent = waiting.pop()
        number = numbers[id(branch)] = len(found.label)
        found.label.append(branch.label)
        found.parent.append(parent)
        found.row.append(-1 if branch.share is None else rows[id(branch.share)])
        waiting += [(child, number) for child in reversed(branch.children.values())]
    return found, numbers
