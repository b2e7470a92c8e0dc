"""Compare two checkpoints, or a checkpoint and a model."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

from ckptkit.analysis.diff import (
    Diff,
    Matches,
    Progress,
    compare_checkpoints,
    entire,
    has_weights,
    selected,
)
from ckptkit.analysis.summary import summarize
from ckptkit.api import reading
from ckptkit.core import arguments
from ckptkit.core.checkpoint import Checkpoint, Source
from ckptkit.core.errors import UsageError
from ckptkit.core.text import flatten, matcher
from ckptkit.quantized import dequantized_views

if TYPE_CHECKING:
    from torch import nn

_SPEC = re.compile(r"(?:[^\W\d][\w.]*|.*\.py):[^\W\d][\w.]*")


def diff(
    checkpoint: Source,
    other: Source | nn.Module,
    *,
    key: str | None = None,
    all: bool = False,
    values: bool = True,
    atol: float | None = None,
    rtol: float | None = None,
    keys: Iterable[str] = (),
) -> Diff:
    """Return the differences between a checkpoint and `other`: another checkpoint, or a model.

    A model is a ``torch.nn.Module`` or the name of a model class, such as ``package.module:Class``
    or ``path/to/file.py:Class``. `diff` imports the class and builds the model.

    By default, `diff` compares the elements of two checkpoints. If `values` is false, `diff`
    compares only names, dtypes and shapes. Without `atol` and `rtol`, elements are equal if their
    bytes are equal. `atol` and `rtol` are the absolute and the relative tolerance. For a
    model, `diff` compares only keys and shapes. With `all`, `diff` also compares entries other than
    the weights. If `keys` (globs) is given, `diff` compares only tensors whose name or path matches
    a glob. If one of the checkpoints is a GGUF file, `diff` gives its tensors the names of the
    other checkpoint, and ignores differences that the GGUF types explain.
    """
    globs = arguments.texts("keys", keys)
    matches = matcher(globs) if globs else None
    arguments.flags(values=values, all=all)
    arguments.tolerance("atol", atol)
    arguments.tolerance("rtol", rtol)
    with ExitStack() as stack:
        ck = stack.enter_context(reading(checkpoint, key=key))
        if isinstance(other, str) and _SPEC.fullmatch(other) and not os.path.exists(other):
            from ckptkit.loading import building

            other = building.model_from(other)
        if not hasattr(other, "state_dict"):
            second = stack.enter_context(reading(other, key=key))
            return compared(
                *(entire(ck), entire(second)), matches=matches, everything=all, values=values,
                atol=atol, rtol=rtol, name=ck.name,
            )  # fmt: skip
        from ckptkit.loading.model import against_model

        arguments.module("other", other)
        if atol is not None or rtol is not None:
            raise UsageError("the values of a model are not compared: remove atol and rtol")
        module: Any = other
        return against_model(ck, module, ck.name, matches=matches)


def compared(
    a: Checkpoint,
    b: Checkpoint,
    *,
    stored: bool = False,
    matches: Matches | None = None,
    watched: Callable[[int], AbstractContextManager[Progress | None]] = lambda _: nullcontext(),
    **how: Any,
) -> Diff:
    """Compare two checkpoints. Unless `stored` is set, compare dequantized weights.

    If one of the checkpoints is a GGUF file, give its tensors the names of the other checkpoint.
    With `stored`, `everything` or a tolerance, keep the names of the GGUF file. `watched` gets the
    number of bytes to compare, and returns a context manager for the progress. `how` contains the
    other arguments of :func:`~ckptkit.analysis.diff.compare_checkpoints`.
    """
    keeps_names = stored or any(how.get(each) for each in ("everything", "atol", "rtol"))
    if not keeps_names and (a.format == "gguf") != (b.format == "gguf"):
        from ckptkit.run.gguf_names import paired

        if (pair := paired(a, b)) is not None:
            with watched(pair.nbytes) as progress:
                return pair.diff(how.get("values", True), matches, progress)
    sides = (a, b) if stored else dequantized_views(a, b)
    if how.get("everything") or not has_weights(*sides):
        nbytes = sum(summarize(each).totals.nbytes for each in sides)
    else:
        tensors = flatten(selected(each.weights, matches).values() for each in sides)
        nbytes = sum(tensor.nbytes for tensor in tensors)
    with watched(nbytes) as progress:
        return compare_checkpoints(*sides, matches=matches, progress=progress, **how)
