"""Rank files as older and newer torches pickle them: made by classes that stand for theirs.

A class here is pickled under the name of torch's, by an ``_rename`` of the module that the pickler
sees; what is in its state is what the wheels of those versions write.
"""

from __future__ import annotations

import pickle
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

NEW, OLD = "torch.distributed.tensor", "torch.distributed._tensor"


class Plain:
    """An object whose state is said; pickled through ``__reduce_ex__`` as torch's are: NEWOBJ and
    BUILD."""

    def __init__(
        self, module: str, name: str, state: Any = None, args: tuple[Any, ...] = ()
    ) -> None:
        self.place = module, name
        self.state = state
        self.args = args


class Wrapped:
    """A tensor subclass: what ``_rebuild_from_type_v2`` is given."""

    def __init__(self, module: str, name: str, like: torch.Tensor, state: Any) -> None:
        self.place = module, name
        self.like = like
        self.state = state


@contextmanager
def _standing_in(places: set[tuple[str, str]]) -> Iterator[dict[tuple[str, str], type]]:
    """Classes under the names of torch's, for as long as something is pickled."""
    made: dict[tuple[str, str], type] = {}
    replaced: list[tuple[Any, str, Any]] = []
    added = []
    missing = object()
    for module, name in sorted(places):
        parts = module.split(".")
        for count in range(1, len(parts) + 1):
            package = ".".join(parts[:count])
            if package not in sys.modules:
                sys.modules[package] = types.ModuleType(package)
                added.append(package)
        holder = sys.modules[module]
        replaced.append((holder, name, getattr(holder, name, missing)))
        made[module, name] = type(name, (), {"__module__": module})
        setattr(holder, name, made[module, name])
    try:
        yield made
    finally:
        for holder, name, old in replaced:
            if old is missing:
                delattr(holder, name)
            else:
                setattr(holder, name, old)
        for module in added:
            del sys.modules[module]


def save(root: dict[str, Any], path: Path) -> None:
    """``torch.save`` of a tree with `Plain` and `Wrapped` in it, under the names that they say."""
    with _standing_in(_places(root)) as classes:
        torch.save(_built(root, classes), path, pickle_protocol=2)


def _places(node: Any) -> set[tuple[str, str]]:
    found = {node.place} if isinstance(node, (Plain, Wrapped)) else set()
    for each in _inside(node):
        found |= _places(each)
    return found


def _inside(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node.values())
    if isinstance(node, (list, tuple)):
        return list(node)
    if isinstance(node, Plain):
        return [node.state, *node.args]
    return [node.state] if isinstance(node, Wrapped) else []


def _built(node: Any, classes: dict[tuple[str, str], type]) -> Any:
    if isinstance(node, dict):
        return {key: _built(value, classes) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(_built(value, classes) for value in node)
    if isinstance(node, Plain):
        args = tuple(_built(each, classes) for each in node.args)
        return _Reduced(classes[node.place], args, _built(node.state, classes))
    if isinstance(node, Wrapped):
        return _Rebuilt(classes[node.place], node.like, _built(node.state, classes))
    return node


class _Reduced:
    def __init__(self, made: type, args: tuple[Any, ...], state: Any) -> None:
        self._of = made, args, state

    def __reduce_ex__(self, protocol: Any) -> Any:
        import copyreg

        made, args, state = self._of
        return copyreg.__newobj__, (made, *args), state

    @property
    def __class__(self) -> Any:  # what copyreg.__newobj__ is checked against
        return self.__dict__["_of"][0]


class _Rebuilt:
    def __init__(self, made: type, like: torch.Tensor, state: Any) -> None:
        self._of = made, like, state

    def __reduce_ex__(self, protocol: Any) -> Any:
        made, like, state = self._of
        args = (
            made, like.dtype, tuple(like.shape), like.stride(), 0, like.layout, torch.device("cpu"), False,
        )  # fmt: skip
        rebuild = torch._utils._rebuild_wrapper_subclass
        return torch._tensor._rebuild_from_type_v2, (rebuild, made, args, state)


assert pickle.HIGHEST_PROTOCOL >= 2


def shard(dim: int, module: str = f"{NEW}.placement_types") -> Plain:
    return Plain(module, "Shard", {"dim": dim})


def mesh_of_tensor(ranks: torch.Tensor, **more: Any) -> Plain:
    """A DeviceMesh until torch 2.9."""
    return Plain(
        "torch.distributed.device_mesh", "DeviceMesh", {"device_type": "cpu", "mesh": ranks, **more}
    )


def mesh_of_layout(shape: Any, stride: Any, ranks: torch.Tensor, **more: Any) -> Plain:
    """A DeviceMesh of torch 2.10 and 2.11: one layout for all dimensions."""
    layout = Plain(
        "torch.distributed._mesh_layout", "_MeshLayout", {"shape": shape, "stride": stride}
    )
    return Plain(
        "torch.distributed.device_mesh", "DeviceMesh",
        {"_device_type": "cpu", "_layout": layout, "_rank_map": ranks, "_mesh_dim_names": None, **more},
    )  # fmt: skip


def mesh_of_axes(
    axes: list[tuple[tuple[int, ...], tuple[int, ...]]], ranks: torch.Tensor, **more: Any
) -> Plain:
    """A DeviceMesh of torch 2.13 and later: a layout for each dimension."""
    module = "torch.distributed._mesh_layout"
    flat = tuple(
        Plain(module, "_FlatLayout", {"shape": shape, "stride": stride}) for shape, stride in axes
    )
    layout = Plain(module, "_MeshLayout", {"axes": flat})
    return Plain(
        "torch.distributed.device_mesh", "DeviceMesh",
        {"_device_type": "cpu", "_layout": layout, "_rank_map": ranks, "_mesh_dim_names": None, **more},
    )  # fmt: skip


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
    place = (
        (f"{OLD}.placement_types", "DTensorSpec")
        if old
        else (f"{NEW}._dtensor_spec", "DTensorSpec")
    )
    meta = (torch.Size(whole.shape), whole.stride(), whole.dtype)
    state = {"mesh": mesh, "placements": placements, "tensor_meta": meta, **spec}
    module = f"{OLD}.api" if old else NEW
    return Wrapped(
        module,
        "DTensor",
        whole,
        (None, {"_local_tensor": local.clone(), "_spec": Plain(*place, state)}),
    )


def sharded_tensor(
    whole: torch.Tensor, rank: int, boxes: dict[int, tuple[int, int]], world: int, *, strides: bool
) -> Wrapped:
    """A ShardedTensor cut into rows, `boxes` by rank; its properties have six fields from torch
    2.15 on."""
    base = "torch.distributed._shard"

    def described(owner: int) -> Plain:
        start, stop = boxes[owner]
        place = Plain("torch.distributed.remote_device", "_remote_device",
                      {"_worker_name": None, "_rank": owner, "_device": torch.device("cpu")})  # fmt: skip
        offsets = [start, *([0] * (whole.dim() - 1))]
        state = {
            "shard_offsets": offsets,
            "shard_sizes": [stop - start, *whole.shape[1:]],
            "placement": place,
        }
        return Plain(f"{base}.metadata", "ShardMetadata", (None, state))

    memory = Plain(f"{base}.sharded_tensor.metadata", "MEM_FORMAT_ENCODING", None, (0,))
    fields = (
        whole.dtype,
        whole.layout,
        False,
        memory,
        False,
        *([whole.stride()] if strides else []),
    )
    properties = Plain(f"{base}.sharded_tensor.metadata", "TensorProperties", fields)
    metadata = Plain(
        f"{base}.sharded_tensor.metadata", "ShardedTensorMetadata",
        {"shards_metadata": [described(owner) for owner in boxes], "size": torch.Size(whole.shape),
         "tensor_properties": properties},
    )  # fmt: skip
    local = []
    if rank in boxes:
        start, stop = boxes[rank]
        held = {"tensor": whole[start:stop].clone(), "metadata": described(rank)}
        local = [Plain(f"{base}.sharded_tensor.shard", "Shard", (None, held))]
    group = Plain(
        f"{base}.sharded_tensor.api", "ProcessGroupState",
        {"local_rank": rank, "global_rank": rank, "local_world_size": world, "global_world_size": world},
    )  # fmt: skip
    return Wrapped(
        f"{base}.sharded_tensor.api", "ShardedTensor", whole, (local, metadata, group, None, False)
    )
