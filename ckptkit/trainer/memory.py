"""Memory reports: parameters, gradients, optimizer, activations, peak; savings of checkpointing.

On the CPU, activations are the bytes that autograd keeps for the backward pass, counted by
saved-tensor hooks, each storage once, without parameters; the peak is the sum of all. On a GPU the
peak is that of the allocator, for each device, and activations are the peak minus parameters,
gradients and optimizer.

The article behind :data:`ARTICLE` measured 72 linear layers with 16 inputs of 1000: 1717, 1283,
1043 and 959 MB. Their activations take 5 MB in all, so they are not what was saved. Its
`checkpoint_sequential` (the reentrant kind) got an input that needs no gradient, so every segment
but the last got no gradients, and Adam kept no state for them: :func:`broken_tape` computes that
and comes within 4 % of each figure. Here all segments have their gradients.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ckptkit.core.grouping import flatten
from ckptkit.trainer.config import Files
from ckptkit.trainer.models.mlp import LAYERS, UNITS, Mlp
from ckptkit.trainer.parallel import split_loss
from ckptkit.trainer.run import Run

ARTICLE = {0: 1717, 2: 1283, 5: 1043, 10: 959}  # segments -> MB that nvidia-smi showed
ARTICLE_BATCH, ARTICLE_CLASSES = 16, 100
MB = 1 << 20


class Saved:
    """Count the bytes that autograd keeps, now and at the peak.

    ``with Saved(model) as saved: model(inputs)``
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.now = self.peak = 0
        self._parameters = {_place(each) for each in model.parameters()} if model else set()
        self._held: Counter[int] = Counter()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _Held(self, tensor), lambda held: held.tensor
        )

    def __enter__(self) -> Saved:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__()

    def hold(self, tensor: Tensor, count: int) -> None:
        """Count `tensor` as kept once more (1) or once less (-1)."""
        place = _place(tensor)
        if place in self._parameters:
            return
        before = self._held[place] > 0
        self._held[place] += count
        self.now += ((self._held[place] > 0) - before) * tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, self.now)


class _Held:
    """A reference to a tensor that lives as long as autograd keeps it."""

    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        self.saved, self.tensor = saved, tensor
        saved.hold(tensor, 1)

    def __del__(self) -> None:
        self.saved.hold(self.tensor, -1)


def _place(tensor: Tensor) -> int:
    return _local(tensor).untyped_storage().data_ptr()


def _local(tensor: Tensor) -> Tensor:
    """Return the local part of a sharded tensor."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def _bytes(tensors: Iterable[Tensor | None]) -> int:
    return sum(_local(each).nbytes for each in tensors if isinstance(each, Tensor))


class Tracker:
    """Write memory facts as JSON lines: ``with tracker.step():`` around each step.

    Does nothing without a file.
    """

    def __init__(self, run: Run, path: Path | None) -> None:
        self.run, self.count = run, 0
        self.file = path.open("w", encoding="utf-8") if path else None

    @contextmanager
    def step(self) -> Iterator[None]:
        if self.file is None:
            yield
            return
        gpus = [device for device in self.run.group.devices if device.type == "cuda"]
        for device in gpus:
            torch.cuda.reset_peak_memory_stats(device)
        with Saved(self.run.model) as saved:
            yield
        peaks = {str(device): torch.cuda.max_memory_allocated(device) for device in gpus}
        self.count += 1
        print(
            json.dumps({"step": self.count, **facts(self.run, saved.peak, peaks)}),
            file=self.file,
            flush=True,
        )

    def close(self) -> None:
        if self.file:
            self.file.close()


def facts(run: Run, activations: int, peaks: dict[str, int]) -> dict[str, Any]:
    """Return bytes on the first device, before the gradients are freed."""
    kept = {
        "parameters": _bytes((*run.model.parameters(), *run.model.buffers())),
        "gradients": _bytes(each.grad for each in run.model.parameters()),
        "optimizer": _bytes(flatten(state.values() for state in run.optimizer.state.values())),
    }
    known = sum(kept.values())
    if not peaks:
        return {**kept, "activations": activations, "peak": {"cpu": known + activations}}
    return {**kept, "activations": max(0, next(iter(peaks.values())) - known), "peak": peaks}


@contextmanager
def tracker(run: Run, files: Files) -> Iterator[Tracker]:
    """Return a tracker that writes the memory report, if requested."""
    made = Tracker(run, files.memory_report if run.group.rank == 0 else None)
    try:
        yield made
    finally:
        made.close()


def tables(run: Run) -> list[str]:
    """Yield lines that compare ways to save memory, as far as they concern the config."""
    if run.config.model == "mlp":
        return segments_table(segments(run.config.width, run.group.device))
    return loss_table(run) if run.config.parallel.startswith("dp") else []


def segments(width: float = 1.0, device: torch.device | None = None) -> dict[int, int]:
    """Measure the bytes of activations for each number of segments.

    Of the 72 layers, in one step of the article's batch. On a GPU this is the peak of the allocator
    above its value before the step, gradients included.
    """
    device = device or torch.device("cpu")
    model = Mlp((UNITS,), ARTICLE_CLASSES, width).to(device)
    inputs = torch.randn(ARTICLE_BATCH, UNITS, device=device)
    return {number: _activations(model, inputs, number) for number in ARTICLE}


def _activations(model: Mlp, inputs: Tensor, number: int) -> int:
    model.segments = number
    if inputs.device.type != "cuda":
        with Saved(model) as saved:
            model(inputs)
        return saved.peak
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats(inputs.device)
    before = torch.cuda.memory_allocated(inputs.device)
    model(inputs).sum().backward()
    return torch.cuda.max_memory_allocated(inputs.device) - before


def broken_tape(number: int) -> float:
    """Return the MB that the article's program used, if only its last segment was trained.

    Only that segment then has gradients and Adam's two averages. The excess of its first figure
    over the model (the CUDA context) is assumed for all.
    """
    layers = [UNITS * (UNITS + 1)] * (LAYERS - 1) + [(UNITS + 1) * ARTICLE_CLASSES]
    last = LAYERS - (number - 1) * (LAYERS // number) if number else LAYERS
    return ARTICLE[0] - 3 * 4 * (sum(layers) - sum(layers[-last:])) / MB


def segments_table(measured: dict[int, int]) -> list[str]:
    """Yield a line per number of segments: measured, the article's figure, its explanation."""
    lines = ["segments  activations  share  article  share  without the gradients it lost"]
    for number, nbytes in measured.items():
        there = ARTICLE[number]
        lines.append(
            f"{number:8}  {nbytes / 1e6:8.3f} MB  {nbytes / measured[0]:5.3f}"
            f"  {there:4} MB  {there / ARTICLE[0]:5.3f}  {broken_tape(number):4.0f} MB"
        )
    return lines


def loss_table(run: Run) -> list[str]:
    """Yield bytes on the first device for outputs and loss of one batch.

    Gathered on one device, or balanced over all. Without several GPUs the split is simulated: two
    halves on one device, of which one is counted.
    """
    inputs, targets = (part[: run.config.batch_size] for part in run.data.train)
    run.model.eval()
    with torch.no_grad():
        outputs = run.model(inputs.to(run.group.device))
    count = max(2, len(run.group.devices))
    kept = {
        "dp": _kept(run, [outputs], targets),
        "dp-balanced": _kept(run, list(outputs.chunk(count))[:1], targets),
    }
    how = "computed for" if len(run.group.devices) > 1 else "simulated:"
    lines = [f"outputs and loss on the first device ({how} {count} devices, batch {len(inputs)})"]
    return [*lines, *(f"{name:>11}  {nbytes / 1e6:8.3f} MB" for name, nbytes in kept.items())]


def _kept(run: Run, outputs: list[Tensor], targets: Tensor) -> int:
    """Return the bytes of outputs, their gradients, and what the loss keeps."""
    leaves = [output.clone().requires_grad_() for output in outputs]
    loss: Callable[[list[Tensor], Tensor], Tensor] = split_loss(run.task.loss)
    with Saved() as saved:
        loss(leaves, targets[: sum(map(len, leaves))].to(run.group.device))
    return 2 * _bytes(leaves) + saved.peak
