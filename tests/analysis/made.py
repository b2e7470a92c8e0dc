"""Checkpoints made by hand, for reports: no file, no format."""

from __future__ import annotations

import struct
from typing import Any

from ckptkit.core.bytesource import Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.tensor import Storage, Tensor, contiguous_stride
from ckptkit.core.tree import Global, Node, Object


def storage(values: tuple[float, ...], device: str = "cpu") -> Storage:
    """float32 values in a source of their own."""
    data = struct.pack(f"<{len(values)}f", *values)
    return Storage(Range(Memory(data), 0, len(data)), device)


def tensor(*values: float, shape: tuple[int, ...] | None = None, device: str = "cpu") -> Tensor:
    """A contiguous float32 tensor."""
    shape = (len(values),) if shape is None else shape
    return Tensor(storage(values, device), BY_NAME["float32"], shape, contiguous_stride(shape))


def view(
    of: Tensor, shape: tuple[int, ...], stride: tuple[int, ...] | None = None, offset: int = 0
) -> Tensor:
    """Another tensor on the same storage."""
    return Tensor(
        of.storage, of.dtype, shape, contiguous_stride(shape) if stride is None else stride, offset
    )


def opaque(name: str, *args: Node, state: Node = None) -> Object:
    """An object of the class ``module.name``."""
    module, _, last = name.rpartition(".")
    made = Object(Global(module, last), args)
    if state is not None:
        made.steps.append(("build", state))
    return made


def module(parameters: dict[str, Node], modules: dict[str, Node] | None = None) -> Object:
    """A pickled nn.Module, as its attributes are on disk."""
    state = {"training": True, "_parameters": parameters, "_buffers": {}, "_modules": modules or {}}
    return opaque("models.Net", state=state)


def checkpoint(root: Node, **fields: Any) -> Checkpoint:
    return Checkpoint(root, "torch-zip", Memory(b"12345678", "run.pth"), **fields)
