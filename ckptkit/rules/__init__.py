"""Tensor rules: one line says which tensors become which, and how their elements are arranged.

In: names and shapes (`Rules.plan`), or a Checkpoint (``applying``). Out: for each target, copies of
elements, lowered to byte ranges (``lowering``). The reader of the notation is ``parsing``.
Uses core, compute, quantized and transforms; no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptkit.rules.planner import Rules, Target

__all__ = ["Rules", "Target"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ckptkit.rules import planner

    return getattr(planner, name)
