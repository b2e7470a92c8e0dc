"""Checkpoints made by hand: of torch's state_dicts, and of nothing but names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from ckptkit.core import dtypes
from ckptkit.core.bytesource import Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.tensor import Storage, Tensor
from ckptkit.core.tree import Node, Object, OrderedMapping


def storage(data: bytes, device: str = "cpu") -> Storage:
    return Storage(Range(Memory(data), 0, len(data)), device)


def tensor(n: int = 2, device: str = "cpu", **more: object) -> Tensor:
    """`n` float32 on a storage of their own."""
    return Tensor(storage(bytes(4 * n), device), dtypes.BY_NAME["float32"], (n,), (1,), **more)  # type: ignore[arg-type]


def from_torch(state_dict: Mapping[str, torch.Tensor]) -> OrderedMapping:
    """A state_dict as a reader gives it: one Storage per torch storage, ``_metadata`` as the
    attribute."""
    storages: dict[int, Storage] = {}
    new = OrderedMapping()
    for name, value in state_dict.items():
        memory = value.untyped_storage()
        if memory.data_ptr() not in storages:
            storages[memory.data_ptr()] = storage(bytes(memory.tolist()))
        dtype = dtypes.parse(str(value.dtype))
        new[name] = Tensor(
            storages[memory.data_ptr()],
            dtype,
            tuple(value.shape),
            value.stride(),
            int(value.storage_offset()),
        )
    if hasattr(state_dict, "_metadata"):
        new.state = {"_metadata": OrderedMapping(state_dict._metadata)}
    return new


def named(*names: str) -> dict[str, Node]:
    return {name: tensor() for name in names}


def checkpoint(*names: str) -> Checkpoint:
    """A plain state_dict with these names."""
    return Checkpoint(OrderedMapping(named(*names)))


def module(
    parameters: Mapping[str, Node] | None = None,
    submodules: Mapping[str, Node] | None = None,
    callable: Node = None,
    buffers: Iterable[tuple[str, Node]] = (),
) -> Object:
    """A pickled ``nn.Module``: its class is never looked up."""
    made = Object(callable, (), new=True)
    attributes = {
        "_parameters": OrderedMapping(parameters or {}),
        "_buffers": OrderedMapping(buffers),
        "_modules": OrderedMapping(submodules or {}),
    }
    made.steps.append(("build", attributes))
    return made


def metadata(ck: Checkpoint) -> Mapping[str, Node]:
    """``_metadata`` of the weights."""
    paths: Mapping[str, Node] = ck.required.node.state["_metadata"]
    return paths


def lines(ck: Checkpoint) -> str:
    """Everything that a transform said."""
    return "\n".join((*ck.notes, *ck.warnings))
