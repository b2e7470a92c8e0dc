"""Damage that is found while a checkpoint is written: the tensors concerned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptkit.core.bytesource import Range, leaves
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import InputError
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import some
from ckptkit.core.tree import join, walk
from ckptkit.core.weights import as_tensor

_NAMED = 4  # tensors in a message


def tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor once, with the place where it is met first."""
    seen: set[int] = set()
    for path, node in walk(checkpoint.root):
        tensor = as_tensor(node)
        if tensor is not None and id(tensor) not in seen:
            seen.add(id(tensor))
            yield join(path), tensor


def located(tensor: Tensor) -> list[Range]:
    """Return the byte ranges of files that a tensor is made of."""
    try:
        return [] if tensor.storage is None else list(leaves(tensor.storage.record.locate()))
    except InputError:  # said elsewhere
        return []


def overlap(a: Range, b: Range) -> bool:
    same = a.source.identity == b.source.identity
    return same and a.offset < b.offset + b.length and b.offset < a.offset + a.length


def damaged_in(checkpoint: Checkpoint, damaged: Sequence[Range]) -> str:
    """Return the names of the tensors whose bytes are in these ranges, some of many."""
    names = [
        name
        for name, tensor in tensors(checkpoint)
        if any(overlap(own, bad) for own in located(tensor) for bad in damaged)
    ]
    return some(names, _NAMED)
