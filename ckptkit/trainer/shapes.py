"""Trace shapes: how a batch is split, and how outputs are gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ckptkit.trainer.parallel import Replicated
from ckptkit.trainer.run import Run

Log = Callable[[str], None]


@contextmanager
def trace(run: Run, log: Log, requested: bool = True) -> Iterator[None]:
    """Print the shapes inside and outside the model, each combination once."""
    if not requested:
        yield
        return
    if isinstance(run.wrapped, Replicated):
        log(_split(run.wrapped, len(run.group.devices)))
    seen: set[str] = set()
    hooks = [run.model.register_forward_hook(_printer("in the model", log, seen))]
    if run.wrapped is not run.model:
        hooks.append(run.wrapped.register_forward_hook(_printer("outside", log, seen)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _split(wrapped: Replicated, devices: int) -> str:
    if wrapped.simulated > 1:
        return f"simulated: {devices} parts of each batch, one after the other on the CPU"
    if devices == 1:
        return "one device: nothing is split (--devices cpu,cpu simulates a split into two)"
    return f"each batch is split over {devices} devices"


def _printer(where: str, log: Log, seen: set[str]) -> Callable[[nn.Module, Any, Any], None]:
    def print_shapes(
        _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | list[Tensor]
    ) -> None:
        outputs = [output] if isinstance(output, Tensor) else output
        shapes = " + ".join(f"{list(each.shape)} on {each.device}" for each in outputs)
        line = f"{where}: input {list(inputs[0].shape)}, output {shapes}"
        if line not in seen:
            seen.add(line)
            log(line)

    return print_shapes
