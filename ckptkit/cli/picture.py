"""Tensors as PNG images, drawn by matplotlib."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from ckptkit.cli import render
from ckptkit.core.errors import UsageError

if TYPE_CHECKING:
    from ckptkit.analysis.slices import Picks
    from ckptkit.core.tensor import Tensor


def drawn(pictures: list[tuple[str, Tensor, Picks]], most: int) -> bytes:
    """Return one PNG of all tensors, side by side, on one scale centered at zero.

    Of a dimension with more than `most` indices, every n-th is drawn. Raises UsageError without
    matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("--png needs matplotlib", hint="pip install matplotlib") from error
    from ckptkit.analysis.slices import show

    planes = [(title, *_plane(tensor, picks, most)) for title, tensor, picks in pictures]
    if not all(values.size for _, _, values in planes):
        raise UsageError("there are no elements to draw")
    figure = Figure(figsize=(5.5 * len(planes), 5), layout="constrained")
    largest = max(_largest(values) for _, _, values in planes) or 1.0
    for axes, (title, picks, values) in zip(
        figure.subplots(1, len(planes), squeeze=False)[0], planes, strict=True
    ):
        colours = {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest}
        image = axes.imshow(values, aspect="auto", interpolation="nearest", **colours)
        axes.set_title(render.escape(title).replace("$", r"\$") + f"\n{show(picks)}", fontsize=8)
        figure.colorbar(image, ax=axes)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120, metadata={"Software": None})
    return buffer.getvalue()


def _plane(tensor: Tensor, picks: Picks, most: int) -> tuple[Picks, Any]:
    from ckptkit import compute
    from ckptkit.analysis.slices import plane, select, spread

    chosen = plane(spread(picks, most), most, most)
    values = compute.numbers(select(tensor, chosen))
    values = abs(values) if values.dtype.kind == "c" else values.astype("f8")
    return chosen, values.reshape(values.shape if values.ndim == 2 else (1, -1))


def _largest(values: Any) -> float:
    import numpy as np

    finite = np.abs(values[np.isfinite(values)])
    return float(finite.max()) if finite.size else 0.0
