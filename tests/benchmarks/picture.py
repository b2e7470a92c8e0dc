"""The picture: ckptkit and the others against `cp`, and in seconds where there is nothing to copy,
on log axes.

Transparent, in colours that stand out from white and from black alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from tests.benchmarks.report import Run
from tests.benchmarks.results import CP, OURS, Row
from tests.benchmarks.works import PLAIN, TOP

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK = "#7d7d7d"
DECADES = 30  # a shorter axis has numbers between the powers of ten
# Marker, size and colour of each; nobody else looks like it.
STYLES = {
    OURS: ("o", 9, "#e4572e"),
    "torch mmap": ("s", 6, "#3d8bd4"),
    "torch": ("D", 5, "#6aa9e0"),
    "safetensors": ("^", 7, "#2a9d8f"),
    "dcp_to_torch_save": ("v", 7, "#2a9d8f"),
    "mergekit": ("P", 7, "#a06cd5"),
    "brainsurgery": ("X", 7, "#c45ab3"),
    "sha256sum": ("*", 9, "#b08a2e"),
    "cmp": ("d", 7, "#b08a2e"),
    "transformers": ("p", 8, "#5b9e3f"),
    "torchtitan": ("<", 7, "#5b9e3f"),
    "compressed-tensors": (">", 7, "#5b9e3f"),
}


def draw(runs: Sequence[Run], caption: str, path: Path) -> None:
    """Write the picture to `path`, as SVG or PNG. Raises ImportError where matplotlib is not
    installed."""
    import matplotlib
    from matplotlib.figure import Figure

    copied, timed = _rows(runs)
    panels = [each for each in (copied, timed) if each]
    if not panels:
        return
    heights = [len(works) + 1 for works in panels]
    with matplotlib.rc_context(
        {"svg.hashsalt": "ckptkit", "font.size": 10, "svg.fonttype": "path"}
    ):
        figure = Figure(figsize=(9, 1.3 + 0.34 * sum(heights)), layout="constrained")
        grid = figure.subplots(
            len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights}
        )
        for axes, works in zip(grid[:, 0], panels, strict=True):
            panel(axes, works, seconds=works is timed)
        _legend(figure, grid[:, 0], caption)
        figure.savefig(
            path, transparent=True, metadata={"Date": None} if path.suffix == ".svg" else None
        )


def _rows(runs: Sequence[Run]) -> tuple[list[list[Row]], list[list[Row]]]:
    """The works on the largest usual input, and those on most tensors; each with the rows of all
    runs."""
    every = [row for run in runs for row in run if row.costs(OURS) and not row.place]
    gib = max((row.gib for row in every if row.tensors == PLAIN and row.gib <= TOP), default=0)
    most = max((row.tensors for row in every), default=0)
    copied = [
        row for row in every if row.tensors == PLAIN and row.gib == gib and row.ratio() is not None
    ]
    timed = [row for row in every if row.tensors == most > PLAIN]
    return _grouped(copied), _grouped(timed)


def _grouped(rows: Sequence[Row]) -> list[list[Row]]:
    return [
        [row for row in rows if row.key == key] for key in dict.fromkeys(row.key for row in rows)
    ]


def panel(axes: Axes, works: Sequence[Sequence[Row]], seconds: bool) -> None:
    """Draw a line for each work, given with its rows of all runs."""
    for place, rows in enumerate(works):
        found = {name: _value(rows, name, seconds) for name in rows[0].taken if name != CP}
        values = [value for value in found.values() if value is not None]
        axes.plot(
            [min(values), max(values)], [place, place], color=INK, linewidth=1, alpha=0.5, zorder=1
        )
        for name, value in found.items():
            if value is not None:
                marker, size, color = STYLES[name]
                axes.plot(
                    [value],
                    [place],
                    marker,
                    ms=size,
                    color=color,
                    label=name,
                    zorder=3 if name == OURS else 2,
                )
    axes.set_yticks(
        range(len(works)), [rows[0].work if not seconds else rows[0].label for rows in works]
    )
    axes.set_ylim(len(works) - 0.4, -0.6)
    axes.set_xscale("log")
    axes.set_xlabel(
        "seconds"
        if seconds
        else f"times as long as cp of the same file ({works[0][0].label.split(', ')[-1]})"
    )
    if not seconds:
        axes.axvline(1, color=INK, linewidth=1.5)
    low, high = axes.get_xlim()
    if high < 10 * low:  # a small difference looks small
        low, high = 10 ** floor(log10(low)), 10 ** ceil(log10(high))
        axes.set_xlim(low, high)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    between = ("2", "5") if high < DECADES * low else ()
    axes.xaxis.set_minor_formatter(
        lambda value, _: f"{value:g}" if f"{value:e}"[0] in between else ""
    )
    axes.grid(axis="x", color=INK, alpha=0.25)
    axes.tick_params(colors=INK, which="both")
    axes.tick_params(axis="y", length=0)
    axes.xaxis.label.set_color(INK)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(INK)


def _value(rows: Sequence[Row], name: str, seconds: bool) -> float | None:
    """The median over the runs of the figure that is drawn."""
    found = [row.seconds(name) if seconds else row.ratio(name) for row in rows]
    known = [value for value in found if value is not None]
    return median(known) if known else None


def _legend(figure: Any, panels: Any, caption: str) -> None:
    """Everybody once, ours first; below, machine and date."""
    shown: dict[str, Any] = {}
    for axes in panels:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            shown.setdefault(name, handle)
    names = sorted(shown, key=list(STYLES).index)
    figure.legend(
        [shown[name] for name in names],
        names,
        loc="outside upper center",
        ncols=5,
        labelcolor=INK,
        frameon=False,
    )
    figure.supxlabel(caption, fontsize=8, color=INK)
