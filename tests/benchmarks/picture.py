"""The picture: ckptkit and the others against `cp`, and in seconds where there is nothing to copy,
on log axes.

Transparent, in colours that stand out from white and from black alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    "gguf-py": ("8", 7, "#6b7a8f"),
    "peft": ("H", 7, "#c98b2b"),
    "slime": ("h", 7, "#6b7a8f"),
}


def draw(rows: Sequence[Row], caption: str, path: Path) -> None:
    """Write the picture to `path`, as SVG or PNG: the works on the largest usual input, and those
    on most tensors. Raises ImportError where matplotlib is not installed."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.costs(OURS)]
    gib = max((row.gib for row in rows if row.tensors == PLAIN and row.gib <= TOP), default=0)
    most = max((row.tensors for row in rows), default=0)
    plain = [row for row in rows if row.tensors == PLAIN and row.gib == gib]
    copied = [row for row in plain if row.ratio() is not None]
    timed = [row for row in rows if row.tensors == most > PLAIN]
    panels = [each for each in (copied, timed) if each]
    if not panels:
        return
    heights = [len(works) + 1 for works in panels]
    style = {"svg.hashsalt": "ckptkit", "font.size": 10, "svg.fonttype": "path"}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(9, 1.3 + 0.34 * sum(heights)), layout="constrained")
        ratios = {"height_ratios": heights}
        grid = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw=ratios)
        for axes, works in zip(grid[:, 0], panels, strict=True):
            panel(axes, works, seconds=works is timed)
        shown: dict[str, Any] = {}  # everybody once, ours first
        for axes in grid[:, 0]:
            for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
                shown.setdefault(name, handle)
        names = sorted(shown, key=list(STYLES).index)
        handles = [shown[name] for name in names]
        where = {"loc": "outside upper center", "ncols": 5}
        figure.legend(handles, names, labelcolor=INK, frameon=False, **where)
        figure.supxlabel(caption, fontsize=8, color=INK)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, transparent=True, metadata=metadata)


def panel(axes: Axes, works: Sequence[Row], seconds: bool) -> None:
    """Draw a line for each work."""
    for place, row in enumerate(works):
        found = {
            name: row.seconds(name) if seconds else row.ratio(name)
            for name in row.taken
            if name != CP
        }
        known = {name: value for name, value in found.items() if value is not None}
        ends = [min(known.values()), max(known.values())]
        axes.plot(ends, [place, place], color=INK, linewidth=1, alpha=0.5, zorder=1)
        for name, value in known.items():
            marker, width, color = STYLES[name]
            above = 3 if name == OURS else 2
            axes.plot([value], [place], marker, ms=width, color=color, label=name, zorder=above)
    axes.set_yticks(range(len(works)), [row.label if seconds else row.work for row in works])
    axes.set_ylim(len(works) - 0.4, -0.6)
    axes.set_xscale("log")
    copied = f"times as long as cp of the same file ({works[0].label.split(', ')[-1]})"
    axes.set_xlabel("seconds" if seconds else copied)
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
