"""A function of the caller, applied to weights one at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from fnmatch import translate
from typing import Any

from ckptkit.compute.torch_bridge import applied
from ckptkit.core import arguments
from ckptkit.core.checkpoint import Checkpoint, edit
from ckptkit.core.errors import CkptkitError, UsageError
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import guess, plural, quoted
from ckptkit.core.tree import Node, rebuild
from ckptkit.core.weights import Weights, as_tensor
from ckptkit.transforms import groups

Function = Callable[[Any], Any]


@edit
def map_weights(ck: Checkpoint, function: Function, keys: str | Iterable[str] = "*") -> Checkpoint:
    """Apply `function`, from tensor to tensor, to the weights that match a glob of `keys`.

    It is applied when the result is read or written. Tied weights stay tied. Raises UsageError for
    a glob that matches nothing or codes of quantized weights.
    """
    arguments.function("function", function)
    weights = ck.required
    names = list(_matching(weights, keys))
    groups.refuse(ck, names, "a function would take codes for numbers")
    swap: dict[int, Node] = {}
    views: dict[object, Tensor] = {}
    left = []
    for name in names:
        node = weights.nodes[name]
        tensor = as_tensor(node)
        if tensor is None or tensor.layout != "strided" or tensor.dtype.kind == "quantized":
            left.append(name)
            continue
        view = (id(tensor.storage), tensor.dtype, tensor.offset, tensor.shape, tensor.stride)
        if view not in views:
            views[view] = _applied(name, tensor, function)
        swap[id(node)] = views[view]
    warnings = [f"not mapped, as they are made of other tensors: {quoted(left)}"] if left else []
    root = rebuild(ck.root, swap=swap)
    notes = [f"mapped {plural(len(names) - len(left), 'weight')}"]
    return ck.with_root(root, notes=notes, warnings=warnings)


def _applied(name: str, tensor: Tensor, function: Function) -> Tensor:
    try:
        return applied(tensor, function)
    except CkptkitError as error:
        error.message = f"{name}: {error.message}"
        raise


def _matching(weights: Weights, globs: Iterable[str]) -> Iterator[str]:
    patterns = {glob: re.compile(translate(glob)) for glob in globs}
    for glob, pattern in patterns.items():
        if not any(map(pattern.match, weights.nodes)):
            raise UsageError(f"no weight matches {glob!r}", hint=guess(glob, weights.nodes))
    return (name for name in weights.nodes if any(each.match(name) for each in patterns.values()))
