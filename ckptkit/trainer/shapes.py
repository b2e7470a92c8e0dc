"""Trace shapes: how a batch is split, and how outputs are gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from ckptkit.trainer.run import Run


@contextmanager
def trace(run: Run, say: Callable[[str], None], wanted: bool = True) -> Iterator[None]:
    """Print the shapes inside and outside the model, each combination once."""
    hooks = []
    if wanted:
        shown: set[str] = set()
        hooks.append(run.model.register_forward_hook(_teller("in the model", say, shown)))
        if run.wrapped is not run.model:
            hooks.append(run.wrapped.register_forward_hook(_teller("outside", say, shown)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _teller(
    where: str, say: Callable[[str], None], shown: set[str]
) -> Callable[[nn.Module, Any, Any], None]:
    def tell(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor | list[Tensor]) -> None:
        outputs = [output] if isinstance(output, Tensor) else output
        shapes = " + ".join(f"{list(each.shape)} on {each.device}" for each in outputs)
        line = f"{where}: input {list(inputs[0].shape)}, output {shapes}"
        if line not in shown:
            shown.add(line)
            say(line)

    return tell
