"""Savings and costs of recomputing, and why dropout needs the random state restored.

A DenseNet with dropout, one step each: activations kept; recomputed in the backward pass with the
random state of the forward pass; and without it. The last is a little faster, and wrong: other
units are dropped when it computes again.

``python -m ckptkit.trainer.examples.recompute``
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from ckptkit.trainer.memory import activations
from ckptkit.trainer.models.densenet import DenseNet

WAYS = {
    "kept": {},
    "recomputed": {"memory_efficient": True},
    "without the random state": {"memory_efficient": True, "preserve_rng": False},
}
IMAGES = (32, 3, 32, 32)
REPEATS = 3  # of which the fastest counts


@dataclass(frozen=True)
class Measured:
    """Bytes of activations, seconds of one step, and its gradients."""

    activations: int
    seconds: float
    gradients: list[Tensor]

    def equals(self, other: Measured) -> bool:
        return all(map(torch.allclose, self.gradients, other.gradients))


def measure(device: torch.device, width: float = 1.0, dropout: float = 0.2) -> dict[str, Measured]:
    """Measure one step each way, with equal weights, images and random numbers."""
    return {name: _measure(device, width, dropout, options) for name, options in WAYS.items()}


def _measure(
    device: torch.device, width: float, dropout: float, options: dict[str, bool]
) -> Measured:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = DenseNet(IMAGES[1:], 10, width, dropout=dropout, **options).to(device)
        images = torch.rand(IMAGES).to(device)
        model(images).sum().backward()  # warm-up
        model.zero_grad()
        seconds = []
        for _ in range(REPEATS):
            model.zero_grad()
            torch.manual_seed(1)
            started = perf_counter()
            with activations(model, device) as kept:
                outputs = model(images)
            outputs.square().mean().backward()
            gradients = [each.grad.cpu() for each in model.parameters() if each.grad is not None]
            seconds.append(perf_counter() - started)
        return Measured(kept.peak, min(seconds), gradients)


def table(measured: dict[str, Measured]) -> list[str]:
    """Return a line for each way."""
    first = next(iter(measured.values()))
    lines = ["activations              memory  seconds  gradients"]
    for name, row in measured.items():
        same = "equal" if row.equals(first) else "different"
        lines.append(f"{name:24}{row.activations / 1e6:5.1f} MB  {row.seconds:7.3f}  {same}")
    return lines


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(*table(measure(device)), sep="\n")


if __name__ == "__main__":
    main()
