"""Rank files as older and newer torches pickle them: the names and states that their wheels
write."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

NEW, OLD = "torch.distributed.tensor", "torch.distributed._tensor"
LAYOUT = "torch.distributed._mesh_layout"


class Plain:
    """An object whose state is said, pickled as torch's are: NEWOBJ and BUILD."""

    def __init__(
        self, module: str, name: str, state: Any = None, args: tuple[Any, ...] = ()
    ) -> None:
        self.place = Name(module, name)
        self.state = state
        self.args = args


class Wrapped:
    """A tensor subclass: what ``_rebuild_from_type_v2`` is given."""

    def __init__(self, module: str, name: str, like: torch.Tensor, state: Any) -> None:
        self.place = Name(module, name)
        self.like = like
        self.state = state


class Name(NamedTuple):
    """A class or function of a module."""

    module: str
    name: str


class Pickler(pickle._Pickler):
    """Writes `Plain`, `Wrapped` and `Name` under the names that they say, unseen by pickle."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> None:
        if isinstance(obj, Name):
            self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        elif isinstance(obj, Plain):
            self.save(obj.place)
            self.save(obj.args)
            self.write(pickle.NEWOBJ)
            if obj.state is not None:
                self.save(obj.state)
                self.write(pickle.BUILD)
        elif isinstance(obj, Wrapped):
            like = obj.like
            size = like.dtype, tuple(like.shape), like.stride(), 0, like.layout
            args = (obj.place, *size, torch.device("cpu"), False)
            rebuild = torch._utils._rebuild_wrapper_subclass
            self.save(torch._tensor._rebuild_from_type_v2)
            self.save((rebuild, obj.place, args, obj.state))
            self.write(pickle.REDUCE)
        else:
            super().save(obj, save_persistent_id)


def save(root: dict[str, Any], path: Path) -> None:
    """``torch.save`` of a tree with `Plain` and `Wrapped` in it."""
    module = SimpleNamespace(Pickler=Pickler, __name__="pickle")
    torch.save(root, path, pickle_module=module, pickle_protocol=2)


def shard(dim: int, module: str = f"{NEW}.placement_types") -> Plain:
    return Plain(module, "Shard", {"dim": dim})


def mesh_of_tensor(ranks: torch.Tensor, **more: Any) -> Plain:
    """A DeviceMesh until torch 2.9."""
    return Plain(
        "torch.distributed.device_mesh", "DeviceMesh", {"device_type": "cpu", "mesh": ranks, **more}
    )


def mesh_of_layout(shape: Any, stride: Any, ranks: torch.Tensor, **more: Any) -> Plain:
    """A DeviceMesh of torch 2.10 and 2.11: one layout for all dimensions."""
    return _mesh({"shape": shape, "stride": stride}, ranks, more)


def mesh_of_axes(axes: Sequence[tuple[Any, Any]], ranks: torch.Tensor, **more: Any) -> Plain:
    """A DeviceMesh of torch 2.13 and later: a layout for each dimension."""
    flat = tuple(
        Plain(LAYOUT, "_FlatLayout", {"shape": shape, "stride": stride}) for shape, stride in axes
    )
    return _mesh({"axes": flat}, ranks, more)


def _mesh(layout: dict[str, Any], ranks: torch.Tensor, more: dict[str, Any]) -> Plain:
    state = {
        "_device_type": "cpu", "_layout": Plain(LAYOUT, "_MeshLayout", layout), "_rank_map": ranks,
        "_mesh_dim_names": None, **more,
    }  # fmt: skip
    return Plain("torch.distributed.device_mesh", "DeviceMesh", state)


def dtensor(
    whole: torch.Tensor,
    local: torch.Tensor,
    mesh: Plain,
    placements: tuple[Plain, ...],
    *,
    old: bool = False,
    **spec: Any,
) -> Wrapped:
    """A DTensor: until torch 2.4 of another module."""
    module, inner = (
        (f"{OLD}.api", f"{OLD}.placement_types") if old else (NEW, f"{NEW}._dtensor_spec")
    )
    meta = (torch.Size(whole.shape), whole.stride(), whole.dtype)
    state = {"mesh": mesh, "placements": placements, "tensor_meta": meta, **spec}
    held = {"_local_tensor": local.clone(), "_spec": Plain(inner, "DTensorSpec", state)}
    return Wrapped(module, "DTensor", whole, (None, held))


def sharded_tensor(
    whole: torch.Tensor, rank: int, boxes: dict[int, tuple[int, int]], world: int, *, strides: bool
) -> Wrapped:
    """A ShardedTensor cut into rows, `boxes` by rank; its properties have six fields from torch
    2.15 on."""
    base = "torch.distributed._shard"

    def described(owner: int) -> Plain:
        start, stop = boxes[owner]
        place = {"_worker_name": None, "_rank": owner, "_device": torch.device("cpu")}
        state = {
            "shard_offsets": [start, *([0] * (whole.dim() - 1))],
            "shard_sizes": [stop - start, *whole.shape[1:]],
            "placement": Plain("torch.distributed.remote_device", "_remote_device", place),
        }
        return Plain(f"{base}.metadata", "ShardMetadata", (None, state))

    inner = f"{base}.sharded_tensor"
    memory = Plain(f"{inner}.metadata", "MEM_FORMAT_ENCODING", None, (0,))
    fields = (whole.dtype, whole.layout, False, memory, False)
    fields += (whole.stride(),) if strides else ()
    metadata = {
        "shards_metadata": [described(owner) for owner in boxes], "size": torch.Size(whole.shape),
        "tensor_properties": Plain(f"{inner}.metadata", "TensorProperties", fields),
    }  # fmt: skip
    local = []
    if rank in boxes:
        held = {"tensor": whole[slice(*boxes[rank])].clone(), "metadata": described(rank)}
        local = [Plain(f"{inner}.shard", "Shard", (None, held))]
    names = {"rank": rank, "world_size": world}
    group = {f"{each}_{name}": n for name, n in names.items() for each in ("local", "global")}
    state = (
        local, Plain(f"{inner}.metadata", "ShardedTensorMetadata", metadata),
        Plain(f"{inner}.api", "ProcessGroupState", group), None, False,
    )  # fmt: skip
    return Wrapped(f"{inner}.api", "ShardedTensor", whole, state)
