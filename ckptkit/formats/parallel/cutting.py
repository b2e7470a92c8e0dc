"""Whole tensors cut into the parts of ranks by the table that puts them together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptkit.compute.arranged import contiguous, joined
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import TensorError, UsageError
from ckptkit.core.options import Options
from ckptkit.core.pieces import Box
from ckptkit.core.plan import OutputFile
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import typed
from ckptkit.core.tree import Node, OrderedMapping
from ckptkit.formats import torch_zip
from ckptkit.formats.parallel.tables import Table
from ckptkit.formats.parallel.verbs import Drop, Refuse, Same


def ranks_of(options: Options, name: str) -> int:
    """Return the number of parts that the options ask for. Raises UsageError if they give none."""
    if options.ranks is None:
        raise UsageError(
            f"{name} is cut into parts, and nothing says how many",
            hint=typed("--ranks 2", "ranks=2"),
        )
    return options.ranks


def cut(tensors: Mapping[str, Tensor], table: Table, count: int) -> list[OrderedMapping]:
    """The entries of each of `count` parts. Raises UsageError for what does not come out even."""
    parts: list[dict[Node, Node]] = [{} for _ in range(count)]
    for name, tensor in tensors.items():
        if tensor.storage is None or tensor.layout != "strided":
            raise TensorError(f"{name[:80]!r} is not a plain tensor, and cannot be cut")
        verb = table.verb(name)
        if isinstance(verb, (Drop, Refuse)):
            raise UsageError(f"{name[:80]!r} has no place in parts: {verb.reason}")
        for part, boxes in zip(parts, verb.cut(name, tensor, count), strict=True):
            part[name] = tensor if isinstance(verb, Same) or count == 1 else _part(boxes)
    return [OrderedMapping(part) for part in parts]


def _part(boxes: list[Box]) -> Tensor:
    """A tensor of its own, made of the boxes at their offsets."""
    first = boxes[0].tensor
    shape: Shape = tuple(
        max(box.offsets[dim] + box.sizes[dim] for box in boxes) for dim in range(len(first.shape))
    )
    if len(boxes) == 1:
        storage = Storage(contiguous(first))
    else:
        storage = Storage(joined(first.dtype, shape, [(box.offsets, box.tensor) for box in boxes]))
    return Tensor(storage, first.dtype, shape, contiguous_stride(shape))


def file(name: str, root: Node, options: Options) -> OutputFile:
    """One file of a folder, as torch.save writes it."""
    plan = torch_zip.layout(Checkpoint(root), options)
    return replace(plan.files[0], name=name)
