"""Compare a checkpoint with another one, or with what a model expects."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from ckptkit.analysis import diff as reports
from ckptkit.analysis.diff import compare_checkpoints, entire
from ckptkit.api import reading
from ckptkit.core import arguments
from ckptkit.core.checkpoint import Checkpoint, Source
from ckptkit.core.errors import UsageError
from ckptkit.core.tensor import Shape
from ckptkit.loading import building
from ckptkit.quantized import look_through_both, look_through_for

if TYPE_CHECKING:
    from torch import nn

_SPEC = re.compile(r"(?:[^\W\d][\w.]*|.*\.py):[^\W\d][\w.]*")


def diff(
    checkpoint: Source,
    other: Source | nn.Module,
    *,
    key: str | None = None,
    everything: bool = False,
    values: bool = False,
    atol: float | None = None,
    rtol: float | None = None,
) -> reports.Diff:
    """Return how a checkpoint differs from another one, or from what a model expects.

    `other` is a checkpoint, a ``torch.nn.Module``, or names a model class: ``package.module:Class``
    or ``path/to/file.py:Class``, which is imported and built. `values`, `atol` and `rtol` also
    compare the elements of two checkpoints (:func:`ckptkit.analysis.diff.compare`), `everything`
    what is beside their weights.
    """
    arguments.flags(values=values, everything=everything)
    arguments.tolerances(atol=atol, rtol=rtol)
    with ExitStack() as stack:
        ck = stack.enter_context(reading(checkpoint, key=key))
        if isinstance(other, str) and _SPEC.fullmatch(other) and not os.path.exists(other):
            other = building.model_from(other)
        if not hasattr(other, "state_dict"):
            second = stack.enter_context(reading(other, key=key))
            sides = look_through_both(entire(ck), entire(second))
            return compare_checkpoints(
                *sides, everything=everything, values=values, atol=atol, rtol=rtol, name=ck.name
            )
        arguments.module("other", other)
        if values or atol is not None or rtol is not None:
            raise UsageError("the values of a model that is only built are not worth comparing")
        module: Any = other
        return against_model(ck, module, ck.name)


def against_model(
    ck: Checkpoint, model: nn.Module, name: str | None, *, stored: bool = False
) -> reports.Diff:
    """Compare weights with the state_dict of a model: quantized ones as the model has them."""
    shapes = building.model_shapes(model)
    ck = ck if stored else seen_by(ck, shapes)
    return reports.against(
        ck.weights, shapes, building.model_ties(model), name=name, chosen=ck.chosen
    )


def seen_by(ck: Checkpoint, shapes: Mapping[str, tuple[str, Shape]]) -> Checkpoint:
    """The checkpoint with the weights that a model of these dtypes and shapes would be given."""
    return look_through_for(ck, {name: dtype for name, (dtype, _) in shapes.items()})
