"""The layout of a treemap: rectangles whose areas are in proportion. Nothing is drawn here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptkit.analysis.shares import Branch, joined

DEEPEST = 12  # tiles inside tiles


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


def squarified(values: Sequence[float], box: Box) -> list[Box]:
    """Return boxes that fill `box` in proportion to `values`, as square as possible.

    The values are positive and in descending order. Algorithm: Bruls, Huizing and van Wijk (2000).
    """
    found: list[Box] = []
    x, y, width, height = box
    rest, start = float(sum(values)), 0
    while start < len(values):
        side = min(width, height)
        row = _row(values, start, side, width * height / rest if rest > 0 else 0.0)
        amount = sum(values[start:row])
        thick = max(width, height) * min(1.0, amount / rest) if rest > 0 else 0.0
        at = 0.0
        for value in values[start:row]:
            long = side * value / amount
            found.append(
                Box(x, y + at, thick, long) if width >= height else Box(x + at, y, long, thick)
            )
            at += long
        x, y, width, height = (
            (x + thick, y, width - thick, height)
            if width >= height
            else (x, y + thick, width, height - thick)
        )
        rest, start = rest - amount, row
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


def _pieces(parent: Branch, measure: str, area: float, dust: float) -> list[Piece]:
    """Return the parts of a branch, largest first; those too small to see are merged."""
    found = [Piece(*_named(child), getattr(child, measure)) for child in parent.children.values()]
    own = getattr(parent, measure) - sum(piece.value for piece in found)
    if parent.share is not None and own > 0:
        found.append(Piece(parent, parent.label, own, own=True))
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
