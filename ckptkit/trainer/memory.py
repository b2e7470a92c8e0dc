"""The memory of each step: parameters, gradients, optimizer, activations, peak, and its seconds.

On the CPU, activations are the bytes that autograd keeps for the backward pass, counted by
saved-tensor hooks, each storage once, without parameters; the peak is the sum of all. On a GPU,
activations are what the forward pass leaves allocated there; the peak and the reserved bytes are
those of the allocator, for each device. (The first step includes what the CUDA libraries allocate
once.)
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from ckptkit.core.text import flatten
from ckptkit.trainer.run import Run


class Saved:
    """Count the bytes that autograd keeps, now and at the peak.

    ``with Saved(model) as saved: model(inputs)``
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.now = self.peak = 0
        self._parameters = {_address(each) for each in model.parameters()} if model else set()
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
        address = _address(tensor)
        if address in self._parameters:
            return
        before = self._held[address] > 0
        self._held[address] += count
        self.now += ((self._held[address] > 0) - before) * tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, self.now)


class _Held:
    """A reference to a tensor that lives as long as autograd keeps it."""

    def __init__(self, saved: Saved, tensor: Tensor) -> None:
        self.saved, self.tensor = saved, tensor
        saved.hold(tensor, 1)

    def __del__(self) -> None:
        self.saved.hold(self.tensor, -1)


class Allocated:
    """Measure what a forward pass leaves allocated on a GPU, at most: activations and outputs.

    Gradients do not count: the backward pass allocates them.
    """

    def __init__(self, wrapped: nn.Module, device: torch.device) -> None:
        self.peak = self._before = 0
        self._wrapped, self._device = wrapped, device

    def __enter__(self) -> Allocated:
        self._hooks = [
            self._wrapped.register_forward_pre_hook(self._begin),
            self._wrapped.register_forward_hook(self._end),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, *_: object) -> None:
        self._before = torch.cuda.memory_allocated(self._device)

    def _end(self, *_: object) -> None:
        self.peak = max(self.peak, torch.cuda.memory_allocated(self._device) - self._before)


def activations(wrapped: nn.Module, device: torch.device) -> Saved | Allocated:
    """Return a context manager whose ``peak`` is the bytes of activations on a device."""
    return Allocated(wrapped, device) if device.type == "cuda" else Saved(wrapped)


class Tracker:
    """Write the memory of each step as JSON lines: ``with tracker.step(): ...``.

    Does nothing without a file.
    """

    def __init__(self, run: Run, path: Path | None = None) -> None:
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
        started = monotonic()
        with activations(self.run.wrapped, self.run.group.device) as kept:
            yield
        for device in gpus:
            torch.cuda.synchronize(device)
        self.count += 1
        row = {"step": self.count, "seconds": round(monotonic() - started, 6)}
        row |= measured(self.run, kept.peak, gpus)
        print(json.dumps(row), file=self.file, flush=True)

    def close(self) -> None:
        if self.file:
            self.file.close()


def measured(run: Run, kept: int, gpus: list[torch.device]) -> dict[str, Any]:
    """Return bytes on the first device, before the gradients are freed; peaks for each GPU."""
    held = {
        "parameters": total_bytes((*run.model.parameters(), *run.model.buffers())),
        "gradients": total_bytes(each.grad for each in run.model.parameters()),
        "optimizer": total_bytes(flatten(state.values() for state in run.optimizer.state.values())),
        "activations": kept,
    }
    if not gpus:
        return {**held, "peak": {"cpu": sum(held.values())}}
    peaks = {str(device): torch.cuda.max_memory_allocated(device) for device in gpus}
    reserved = {str(device): torch.cuda.memory_reserved(device) for device in gpus}
    return {**held, "peak": peaks, "reserved": reserved}


@contextmanager
def tracker(run: Run, path: Path | None) -> Iterator[Tracker]:
    """Return a tracker that writes the memory report, if requested."""
    tracker = Tracker(run, path if run.group.rank == 0 else None)
    try:
        yield tracker
    finally:
        tracker.close()


def total_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of tensors; of sharded ones, those of the local part."""
    return sum(_local(each).nbytes for each in tensors if isinstance(each, Tensor))


def _address(tensor: Tensor) -> int:
    return _local(tensor).untyped_storage().data_ptr()


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local
