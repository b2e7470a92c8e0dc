"""Savings and costs of checkpoint_sequential on 72 linear layers, beside the article's figures.

The article ran 16 inputs of 1000 with Adam, and read 1717, 1283, 1043 and 959 MB off nvidia-smi.
The activations of these layers take 5 MB in all, so they are not what was saved. Its
`checkpoint_sequential` (the reentrant kind) got an input that needs no gradient, so every segment
but the last got no gradients, and Adam kept no state for them: :func:`broken_tape` computes that
and comes within 4 % of each figure. The trainer uses the other kind: all segments get gradients.

``python -m ckptkit.trainer.examples.segments``; on a GPU it also shows the allocator's peaks, of
both kinds.
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint_sequential

from ckptkit.trainer.memory import activations
from ckptkit.trainer.models.mlp import LAYERS, UNITS, Mlp

ARTICLE = {0: 1717, 2: 1283, 5: 1043, 10: 959}  # segments -> MB that nvidia-smi showed
BATCH, CLASSES = 16, 100
REPEATS = 3  # of which the fastest counts
MB = 1 << 20


@dataclass(frozen=True)
class Measured:
    """Bytes of activations and seconds of one training step; peak bytes of the GPU, if on one.

    ``reentrant_peak`` is that of the article's program.
    """

    activations: int
    seconds: float
    peak: int | None = None
    reentrant_peak: int | None = None


def measure(device: torch.device, width: float = 1.0) -> dict[int, Measured]:
    """Measure a step for each number of segments, of models with equal weights."""
    return {segments: _measure(device, width, segments) for segments in ARTICLE}


def _measure(device: torch.device, width: float, segments: int) -> Measured:
    with torch.random.fork_rng(devices=[]):
        model = Mlp((UNITS,), CLASSES, width, segments).to(device)
        inputs = torch.randn(BATCH, UNITS).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002, betas=(0.5, 0.999))
    _step(model(inputs), optimizer)  # what the CUDA libraries allocate once, and Adam's state
    _begin(device)
    seconds = []
    for _ in range(REPEATS):
        started = perf_counter()
        with activations(model, device) as kept:
            _step(model(inputs), optimizer)
        peak = _peak(device)
        seconds.append(perf_counter() - started)
    del model, optimizer
    reentrant = _reentrant_peak(device, width, segments) if device.type == "cuda" else None
    return Measured(kept.peak, min(seconds), peak, reentrant)


def _reentrant_peak(device: torch.device, width: float, segments: int) -> int | None:
    """Return the peak of the article's program: segments whose input needs no gradient."""
    with torch.random.fork_rng(devices=[]):
        model = Mlp((UNITS,), CLASSES, width).to(device)
        inputs = torch.randn(BATCH, UNITS).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002, betas=(0.5, 0.999))
    _begin(device)
    for _ in range(2):
        outputs = (
            checkpoint_sequential(  # type: ignore[no-untyped-call]
                model.layers, segments, inputs, use_reentrant=True
            )
            if segments
            else model(inputs)
        )
        _step(outputs, optimizer)
    return _peak(device)


def _step(outputs: Tensor, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad(set_to_none=False)  # gradients stay allocated: they are not measured
    outputs.sum().backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _begin(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def broken_tape(segments: int) -> float:
    """Return the MB that the article's program used, if only its last segment was trained.

    Only that segment then has gradients and Adam's two averages. The excess of its first figure
    over the model (the CUDA context) is assumed for all.
    """
    layers = [UNITS * (UNITS + 1)] * (LAYERS - 1) + [(UNITS + 1) * CLASSES]
    last = LAYERS - (segments - 1) * (LAYERS // segments) if segments else LAYERS
    return ARTICLE[0] - 3 * 4 * (sum(layers) - sum(layers[-last:])) / MB


def table(measured: dict[int, Measured]) -> list[str]:
    """Return a line per number of segments: measured, the article's figure, its explanation."""
    lines = ["segments  activations  share  seconds  article  share  without the gradients it lost"]
    first = measured[0].activations
    for segments, row in measured.items():
        figure = ARTICLE[segments]
        line = (
            f"{segments:8}  {row.activations / 1e6:8.3f} MB  {row.activations / first:5.3f}"
            f"  {row.seconds:7.3f}  {figure:4} MB  {figure / ARTICLE[0]:5.3f}"
            f"  {broken_tape(segments):4.0f} MB"
        )
        if row.peak is not None and row.reentrant_peak is not None:
            line += f"  peak {row.peak / MB:.0f} MB, reentrant {row.reentrant_peak / MB:.0f} MB"
        lines.append(line)
    return lines


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(*table(measure(device)), sep="\n")


if __name__ == "__main__":
    main()
