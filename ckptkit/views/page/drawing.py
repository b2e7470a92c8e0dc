"""The treemap as a picture for papers and model cards, drawn by matplotlib."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckptkit.analysis.shares import Branch
from ckptkit.core.errors import UsageError
from ckptkit.core.text import escape, family, size
from ckptkit.views.page.treemap import Box, Frame, Tile, tiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 800.0, 450.0  # points of the map: 1/100 inch
# Tableau's ten colors, which color-blind people can tell apart, and gray for the rest.
PALETTE = (
    "#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759",
    "#76b7b2", "#d4ac2b", "#9c755f", "#ff9da7", "#86bcb6",
)  # fmt: skip
GREY, GROUP, EDGE = "#8a939d", "#eceef1", "#c9ced4"
FONT, NARROW = 8.0, 0.87  # points; what a character takes of the map for each point
LEGEND = 6


def treemap(root: Branch, kind: str, measure: str, title: str) -> bytes:
    """Draw the treemap as SVG, PNG or PDF; the same tree gives the same bytes.

    `measure` is ``parameters`` or ``bytes``. Raises UsageError without matplotlib, and if there is
    nothing to show.
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
        unsaid: dict[str, dict[str, Any]] = {
            "svg": {"Date": None, "Creator": None},
            "png": {"Software": None},
        }
        metadata = unsaid.get(kind, {"CreationDate": None, "Creator": None, "Producer": None})
        figure.savefig(buffer, format=kind, dpi=200, metadata=metadata)
    return buffer.getvalue()


def _draw(axes: Axes, root: Branch, measure: str, title: str) -> None:
    total = _amount(getattr(root, measure), measure) + (
        " parameters" if measure == "parameters" else ""
    )
    axes.text(0, -12, _plain(title), fontsize=12, weight="bold", va="center")
    axes.text(WIDTH, -12, total, fontsize=10, ha="right", va="center", color="#5c6670")
    colours, kinds = _colours(root, measure)
    for tile in tiles(root, measure, Box(0, 0, WIDTH, HEIGHT), Frame(2, 13, 26, 20)):
        _tile(axes, tile, _fill(tile, colours), measure)
    _legend(axes, colours, kinds, measure)


def _fill(tile: Tile, colours: Mapping[str, str]) -> str:
    if not tile.leaf:
        return GROUP
    return GREY if tile.rest else colours.get(_kind(tile.branch), GREY)


def _ink(tile: Tile, colour: str) -> str:
    if not tile.leaf:
        return "#3a424a"
    return "white" if _is_dark(colour) else "#16191d"


def _tile(axes: Axes, tile: Tile, colour: str, measure: str) -> None:
    from matplotlib.patches import Rectangle

    x, y, width, height = tile.box
    edge, line = ("white", 0.6) if tile.leaf else (EDGE, 0.5)
    axes.add_patch(
        Rectangle((x, y), width, height, facecolor=colour, edgecolor=edge, linewidth=line)
    )
    room = int((width - 5) / (NARROW * (FONT - 1)))
    if height < 11 or room < 2:
        return
    ink = _ink(tile, colour)
    value = _amount(getattr(tile.branch, measure), measure) if not tile.rest else ""
    label = _fitted(tile.label or "(empty)", room)
    if not tile.leaf and value and len(label) + len(value) + 2 <= room:
        label += f"  {value}"
    axes.text(x + 3, y + 7, _plain(label), fontsize=FONT - 1, color=ink, va="center", clip_on=True)
    if tile.leaf and value and height >= 23 and len(value) <= room:
        axes.text(x + 3, y + 17, value, fontsize=FONT - 2, color=ink, va="center", alpha=0.85)


def _legend(axes: Axes, colours: dict[str, str], kinds: Counter[str], measure: str) -> None:
    from matplotlib.patches import Rectangle

    for number, (kind, colour) in enumerate(list(colours.items())[:LEGEND]):
        x, y = (number % 2) * WIDTH / 2, HEIGHT + 14 + number // 2 * 17
        axes.add_patch(Rectangle((x, y - 4), 8, 8, facecolor=colour, edgecolor="none"))
        text = f"{_fitted(kind, 56)}  {_amount(kinds[kind], measure)}"
        axes.text(x + 13, y, _plain(text), fontsize=FONT, va="center", color="#3a424a")


def _colours(root: Branch, measure: str) -> tuple[dict[str, str], Counter[str]]:
    """Return colors for the most common kinds of tensors, and the amount of each kind."""
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
    """Return the kind of a branch's first tensor, as ``layers.*.weight``."""
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
    """Return text without characters that matplotlib takes for formulas."""
    return escape(text).replace("$", r"\$")


def _is_dark(colour: str) -> bool:
    red, green, blue = ((int(colour[at : at + 2], 16) / 255) ** 2.2 for at in (1, 3, 5))
    return bool(0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.24)
