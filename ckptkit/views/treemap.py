"""Lay out treemaps, in which the areas of rectangles are proportional to parameters or bytes.

`tiles` lays out pictures for papers and model cards. matplotlib draws these pictures. `arranged`
lays out the treemap of the HTML page. The script of the page scales this layout to the window.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptkit.analysis.shares import Branch, joined
from ckptkit.core.errors import UsageError
from ckptkit.core.text import escape, family, flatten, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes


DEEPEST = 12  # maximum nesting depth of tiles


UNUSED = "in no tensor"


class TileBox(NamedTuple):
    x: float
    y: float
    width: float
    height: float


class Tile(NamedTuple):
    """A rectangle for a branch of the tree of names.

    If ``rest`` is not 0, the rectangle represents this number of small branches. If a branch has
    only one child, one tile represents the branch and the child. ``label`` then contains both
    names.
    """

    branch: Branch
    label: str
    box: TileBox
    leaf: bool
    rest: int = 0


class TreemapCell(NamedTuple):
    branch: Branch
    label: str
    value: int
    rest: int = 0
    own: bool = False  # True if the tile shows only the tensor at the branch, not its children


class Frame(NamedTuple):
    """The margins of tiles, and the minimum sizes of tiles.

    `border` is the width of the margin around nested tiles. `top` is the height of the label. If
    the width or height of a tile is below `least`, the tile has no nested tiles. One tile replaces
    all tiles with an area below `dust`.
    """

    border: float
    top: float
    least: float
    dust: float


def strips(values: Sequence[float], box: TileBox) -> Iterator[tuple[bool, list[TileBox]]]:
    """Divide a box into boxes whose areas are proportional to `values`.

    The values must be positive and in descending order. The boxes are nearly square. The algorithm
    is "Squarified Treemaps" by Bruls, Huizing and van Wijk (2000).

    Yield (is_column, boxes) for each strip. A strip is a column at the left of the free space, or a
    row at the top of the free space. If the last value of a strip equals the first value of the
    next strip, both strips have the same direction. Therefore, layers of equal size appear in
    order.
    """
    x, y, width, height = box
    rest, start, is_column = float(sum(values)), 0, True
    while start < len(values):
        if not start or values[start] != values[start - 1]:
            is_column = width >= height
        side, across = (height, width) if is_column else (width, height)
        end = _row(values, start, side, width * height / rest if rest > 0 else 0.0)
        amount = sum(values[start:end])
        thick = across * min(1.0, amount / rest) if rest > 0 else 0.0
        at, found = 0.0, []
        for value in values[start:end]:
            long = side * value / amount
            place = (x, y + at, thick, long) if is_column else (x + at, y, long, thick)
            found.append(TileBox(*place))
            at += long
        yield is_column, found
        if is_column:
            x, width = x + thick, width - thick
        else:
            y, height = y + thick, height - thick
        rest, start = rest - amount, end


def _row(values: Sequence[float], start: int, side: float, scale: float) -> int:
    """Return the index after the last value of the next strip.

    The strip gets further values until a value would make the worst aspect ratio of the boxes in
    the strip worse.
    """
    end, amount, worst = start, 0.0, float("inf")
    while end < len(values):
        both, square = (amount + values[end]) * scale, side * side
        most, least = values[start] * scale, values[end] * scale
        if not square * least or not both * both:  # the free space has no area
            return len(values)
        ratio = max(square * most / (both * both), both * both / (square * least))
        if ratio > worst:
            break
        amount, worst, end = amount + values[end], ratio, end + 1
    return max(end, start + 1)


def tiles(root: Branch, measure: str, box: TileBox, frame: Frame) -> Iterator[Tile]:
    """Yield the tiles below `root`, parents first. `measure` is ``parameters`` or ``nbytes``."""
    waiting = [(root, box, 0)]
    while waiting:
        branch, inside, depth = waiting.pop()
        found = _cells(branch, measure, inside.width * inside.height, frame.dust)
        placed = flatten(boxes for _, boxes in strips([each.value for each in found], inside))
        for cell, part in zip(found, placed, strict=True):
            inner = _inner(cell, part, frame) if depth < DEEPEST else None
            yield Tile(cell.branch, cell.label, part, inner is None, cell.rest)
            if inner is not None:
                waiting.append((cell.branch, inner, depth + 1))


def _inner(cell: TreemapCell, box: TileBox, frame: Frame) -> TileBox | None:
    """Return the box for nested tiles. Return None if the tile has no children or is too small."""
    if (
        cell.rest
        or cell.own
        or not cell.branch.children
        or min(box.width, box.height) < frame.least
    ):
        return None
    return TileBox(
        box.x + frame.border,
        box.y + frame.top,
        box.width - 2 * frame.border,
        box.height - frame.top - frame.border,
    )


def _cells(
    parent: Branch, measure: str, area: float, dust: float, unused: int = 0
) -> list[TreemapCell]:
    """Return the cells of a branch, largest first. One cell replaces all very small cells.

    `unused` is the number of bytes that belong to no tensor. These bytes have their own cell.
    """
    found = []
    for child in parent.children.values():
        last = joined(child)
        label = child.label + last.path[len(child.path) :]
        found.append(TreemapCell(last, label, getattr(child, measure)))
    own = getattr(parent, measure) - sum(cell.value for cell in found)
    if parent.share is not None and own > 0:
        found.append(TreemapCell(parent, parent.label, own, own=True))
    found.append(TreemapCell(parent, UNUSED, unused))
    found = sorted((cell for cell in found if cell.value > 0), key=lambda cell: -cell.value)
    least = dust * sum(cell.value for cell in found) / area if area > 0 else 0
    seen = [cell for cell in found if cell.value >= least]
    small = found[len(seen) :]
    if len(small) > 1:
        amount = sum(cell.value for cell in small)
        rest = TreemapCell(parent, f"{len(small):,} more", amount, len(small))
        found = sorted((*seen, rest), key=lambda cell: -cell.value)
    return found


WINDOW = TileBox(0, 0, 1200, 560)  # typical size of a treemap on the HTML page, in pixels
FRAME = Frame(2, 18, 40, 120)

Strips = list[list[int]]


def arranged(
    root: Branch, numbers: Mapping[int, int], measure: str, unused: int = 0
) -> dict[int, Strips]:
    """Map the number of each branch to its strips. `numbers` maps the id of a branch to its number.

    A strip is a list of integers. The first integer is 1 for a column and 0 for a row.
    The other integers represent tiles.
    The number of a child branch represents the child.
    The number of the branch itself represents the tensor at the branch.
    -1 represents the `unused` bytes.
    -n represents n small branches that share one tile.
    """
    found: dict[int, Strips] = {}
    waiting = [(root, WINDOW)]
    while waiting:
        branch, box = waiting.pop()
        if min(box.width, box.height) < FRAME.least:
            box = WINDOW  # the page shows this branch only after the user zooms into it
        cells = _cells(branch, measure, WINDOW.width * WINDOW.height, FRAME.dust, unused)
        unused = 0
        left = iter(cells)
        lines = found[numbers[id(branch)]] = []
        for is_column, boxes in strips([cell.value for cell in cells], box):
            line = [int(is_column)]
            for part in boxes:
                cell = next(left)
                is_branch = not (cell.rest or cell.label == UNUSED)
                line.append(numbers[id(cell.branch)] if is_branch else -(cell.rest or 1))
                if is_branch and not cell.own and cell.branch.children:
                    waiting.append((cell.branch, _inner(cell, part, FRAME) or WINDOW))
                    # The page can also zoom to the branches between `branch` and `cell.branch`,
                    # which have only one child each.
                    for child in branch.children.values():
                        while child is not cell.branch and joined(child) is cell.branch:
                            found[numbers[id(child)]] = [[1, numbers[id(cell.branch)]]]
                            (child,) = child.children.values()
            lines.append(line)
    return found


WIDTH, HEIGHT = 800.0, 450.0  # size of the treemap in 1/100 inch
# Ten colors, similar to the palette of Tableau. Color-blind people can distinguish the colors.
PALETTE = (
    "#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759",
    "#76b7b2", "#d4ac2b", "#9c755f", "#ff9da7", "#b5cf6b",
)  # fmt: skip
GREY, GROUP, EDGE = "#8a939d", "#eceef1", "#c9ced4"
# Font size in points, and width of a character in 1/100 inch per point of the font size
FONT, NARROW = 8.0, 0.87
LEGEND = 6


def drawn(root: Branch, kind: str, measure: str, title: str) -> bytes:
    """Draw the treemap as SVG, PNG or PDF. Equal trees give equal bytes.

    `measure` is ``parameters`` or ``bytes``. Raises UsageError if matplotlib is missing, or if the
    tree has no parameters or bytes.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("pictures need matplotlib", hint="pip install matplotlib") from error
    attribute = "parameters" if measure == "parameters" else "nbytes"
    if not getattr(root, attribute):
        raise UsageError(f"there are no {measure} to draw")
    with matplotlib.rc_context(
        {"svg.hashsalt": "ckptkit", "svg.fonttype": "none", "font.family": "DejaVu Sans"}
    ):
        figure = Figure(figsize=(WIDTH / 100 + 0.2, HEIGHT / 100 + 1.0), facecolor="white")
        axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
        axes.set(xlim=(-10, WIDTH + 10), ylim=(HEIGHT + 66, -34))
        axes.axis("off")
        _draw(axes, root, attribute, title)
        buffer = io.BytesIO()
        # Without dates and versions, the output is reproducible.
        omitted: dict[str, dict[str, Any]] = {
            "svg": {"Date": None, "Creator": None},
            "png": {"Software": None},
        }
        metadata = omitted.get(kind, {"CreationDate": None, "Creator": None, "Producer": None})
        figure.savefig(buffer, format=kind, dpi=200, metadata=metadata)
    return buffer.getvalue()


def _draw(axes: Axes, root: Branch, measure: str, title: str) -> None:
    from matplotlib.patches import Rectangle

    total = _amount(getattr(root, measure), measure)
    total += " parameters" if measure == "parameters" else ""
    axes.text(0, -12, _plain(title), fontsize=12, weight="bold", va="center")
    axes.text(WIDTH, -12, total, fontsize=10, ha="right", va="center", color="#5c6670")
    colours, kinds = _colours(root, measure)
    for tile in tiles(root, measure, TileBox(0, 0, WIDTH, HEIGHT), Frame(2, 13, 26, 20)):
        x, y, width, height = tile.box
        colour = GREY if tile.rest else colours.get(_kind(tile.branch), GREY)
        colour = colour if tile.leaf else GROUP
        edge, line = ("white", 0.6) if tile.leaf else (EDGE, 0.5)
        axes.add_patch(
            Rectangle((x, y), width, height, facecolor=colour, edgecolor=edge, linewidth=line)
        )
        room = int((width - 5) / (NARROW * (FONT - 1)))
        if height < 11 or room < 2:
            continue
        ink = "#3a424a"
        if tile.leaf:
            ink = "white" if _is_dark(colour) else "#16191d"
        value = _amount(getattr(tile.branch, measure), measure) if not tile.rest else ""
        label = _fitted(tile.label or "(empty)", room)
        if not tile.leaf and value and len(label) + len(value) + 2 <= room:
            label += f"  {value}"
        how: dict[str, Any] = {"color": ink, "va": "center"}
        axes.text(x + 3, y + 7, _plain(label), fontsize=FONT - 1, clip_on=True, **how)
        if tile.leaf and value and height >= 23 and len(value) <= room:
            axes.text(x + 3, y + 17, value, fontsize=FONT - 2, alpha=0.85, **how)
    for number, (kind, colour) in enumerate(list(colours.items())[:LEGEND]):
        x, y = (number % 2) * WIDTH / 2, HEIGHT + 14 + number // 2 * 17
        axes.add_patch(Rectangle((x, y - 4), 8, 8, facecolor=colour, edgecolor="none"))
        text = f"{_fitted(kind, 56)}  {_amount(kinds[kind], measure)}"
        axes.text(x + 13, y, _plain(text), fontsize=FONT, va="center", color="#3a424a")


def _colours(root: Branch, measure: str) -> tuple[dict[str, str], Counter[str]]:
    """Return the colors of the largest families, and the parameters or bytes of all families."""
    kinds: Counter[str] = Counter()
    waiting = [root]
    while waiting:
        branch = waiting.pop()
        if branch.share is not None:
            kinds[_kind(branch)] += (
                branch.share.parameters if measure == "parameters" else branch.share.nbytes
            )
        waiting += reversed(branch.children.values())
    named = [kind for kind, value in kinds.most_common(len(PALETTE)) if value]
    return dict(zip(named, PALETTE, strict=False)), kinds


def _kind(branch: Branch) -> str:
    """Return the family of the first tensor in a branch, such as ``layers.*.weight``."""
    while branch.share is None and branch.children:
        branch = next(iter(branch.children.values()))
    return family(branch.path if branch.share is None else branch.share.place)


def _amount(value: int, measure: str) -> str:
    if measure == "nbytes":
        return size(value)
    return f"{value:,}" if value < 1_000 else size(value).removesuffix("B")


def _fitted(text: str, room: int) -> str:
    text = escape(text)
    return text if len(text) <= room else f"{text[: max(1, room - 1)]}…"


def _plain(text: str) -> str:
    """Escape characters that matplotlib interprets as the start of a formula."""
    return escape(text).replace("$", r"\$")


def _is_dark(colour: str) -> bool:
    red, green, blue = ((int(colour[at : at + 2], 16) / 255) ** 2.2 for at in (1, 3, 5))
    return bool(0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.24)
