"""Saves of several processes with torch.distributed.checkpoint: run by each of four.

run_ranks(4, "tests.formats.dcp.ranks", FOLDER)
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import Shard as LocalShard
from torch.distributed._shard.sharded_tensor import init_from_local_shards
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

Save = Callable[[str, dict[str, Any]], None]


def tensors() -> dict[str, torch.Tensor]:
    """The same in every process: sizes that the number of processes divides, and sizes that it does
    not."""
    torch.manual_seed(0)
    return {
        "even": torch.randn(8, 12),
        "odd": torch.randn(5, 7, 3, dtype=torch.float64),
        "few": torch.arange(2, dtype=torch.int16),
        "half": torch.randn(4, 6).to(torch.bfloat16),
        "scalar": torch.tensor(3),
    }


def sharded(mesh: Any, placements: list[Any], whole: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Each tensor sharded over the mesh, those without the dimension replicated."""
    made: dict[str, Any] = {}
    for name, tensor in whole.items():
        dims = tensor.dim()
        fit = [each if getattr(each, "dim", 0) < dims else Replicate() for each in placements]
        made[name] = distribute_tensor(tensor, mesh, fit, src_data_rank=None)
    return made


def meshes(save: Save) -> None:
    whole = tensors()
    one = init_device_mesh("cpu", (4,))
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    config = {"lr": [0.1, 0.2], "name": "x"}
    save("rows", {"model": sharded(one, [Shard(0)], whole), "step": 3, "config": config})
    save("columns", sharded(one, [Shard(1)], whole))
    save("grid", sharded(two, [Shard(0), Shard(1)], whole))
    save("cuts_twice", sharded(two, [Shard(0), Shard(0)], whole))
    save("part_replicated", sharded(two, [Replicate(), Shard(1)], whole))
    local = {
        name: distribute_tensor(
            t.transpose(0, -1).contiguous(), one, [Shard(0)], src_data_rank=None
        )
        for name, t in whole.items()
        if t.dim() > 1
    }
    save("transposed", {name: tensor.transpose(0, -1) for name, tensor in local.items()})


def checkerboard(save: Save) -> None:
    """A ShardedTensor of four boxes that no mesh gives: cut along rows first, and each half
    elsewhere."""
    rank = dist.get_rank()
    whole = tensors()["even"]
    boxes = [((0, 0), (3, 5)), ((0, 5), (3, 7)), ((3, 0), (5, 8)), ((3, 8), (5, 4))]
    (row, column), (height, width) = boxes[rank]
    piece = whole[row : row + height, column : column + width].contiguous()
    shard = LocalShard.from_tensor_and_offsets(piece, [row, column], rank)
    save("boxes", {"even": init_from_local_shards([shard], 8, 12)})


def fully_sharded(save: Save) -> None:
    """FSDP2 with its optimizer, and FSDP1."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Linear(9, 3))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 6)).sum().backward()
    optimizer.step()
    states = get_state_dict(model, optimizer)
    save("fsdp2", {"model": states[0], "optim": states[1], "epoch": 1})
    torch.manual_seed(1)
    old = FullyShardedDataParallel(nn.Linear(6, 9), device_id=torch.device("cpu"))
    with FullyShardedDataParallel.state_dict_type(old, StateDictType.SHARDED_STATE_DICT):
        save("fsdp1", {"state_dict": old.state_dict()})


def writers(folder: Path) -> None:
    """The same tensors through every other writer."""
    mesh = init_device_mesh("cpu", (4,))
    state = sharded(mesh, [Shard(0)], tensors())
    floats = {name: each for name, each in state.items() if each.is_floating_point()}
    safe = {"serialization_format": SerializationFormat.SAFETENSORS}
    hub, both = (str(folder / name) for name in ("hub", "both"))
    for held, writer in (
        (state, dcp.FileSystemWriter(folder / "items", single_file_per_rank=False)),
        (state, dcp.FileSystemWriter(folder / "threads", thread_count=2)),
        ({"model": state}, dcp.FileSystemWriter(folder / "safe", **safe)),
        (state, dcp.HuggingFaceStorageWriter(hub, save_distributed=True)),
        (floats, dcp.HuggingFaceStorageWriter(both, save_distributed=True, enable_consolidation=True)),
    ):  # fmt: skip
        dcp.save(held, storage_writer=writer)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "alone"), use_collectives=False)


def main(place: str) -> None:
    folder = Path(place)
    dist.init_process_group("gloo")

    def save(name: str, state: dict[str, Any]) -> None:
        dcp.save(state, checkpoint_id=folder / name)

    meshes(save)
    checkerboard(save)
    fully_sharded(save)
    writers(folder)
    dist.destroy_process_group()
