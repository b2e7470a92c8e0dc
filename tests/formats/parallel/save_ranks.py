"""Run by tests.ranks and by torchrun: train one step with each way of cutting a model, and save what each rank has,
and the whole.

FOLDER/<form>/model_world_size_<W>_rank_<R>.pt, optim_world_size_<W>_rank_<R>.pt
FOLDER/<form>.full.pt, FOLDER/<form>.optim.pt        the whole, put together by torch
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

warnings.simplefilter("ignore")


class Block(nn.Module):
    """Two projections, and a norm whose size no world divides evenly."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 11)
        self.down = nn.Linear(11, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, blocks, a head that is tied if asked, a scalar and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        width = 6
        self.embed = nn.Embedding(13, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("steps", torch.tensor(7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = h + layer(h)
        is_plain = not isinstance(self.embed.weight, DTensor)
        return (h @ self.embed.weight.T if is_plain else h) * self.scale


def model() -> Net:
    torch.manual_seed(5)
    return Net()


def trained(net: nn.Module) -> torch.optim.Optimizer:
    """The optimizer after a step with gradients that are made up: those of a model in parallel take
    kernels."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    torch.manual_seed(9)
    for parameter in net.parameters():
        if parameter.numel():  # FSDP1 gives no gradient to what a rank holds nothing of
            parameter.grad = parameter.detach().clone() * 0.5 + 0.25
    optimizer.step()
    return optimizer


def whole(node: Any) -> Any:
    """The tree with every DTensor as one tensor; all ranks must ask."""
    if isinstance(node, DTensor):
        return node.full_tensor().clone()
    if isinstance(node, dict):
        return {key: whole(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(map(whole, node))
    return node


def write(
    folder: Path, form: str, state: Any, optimizer: Any, full: Any, full_optimizer: Any
) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    (folder / form).mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / form / f"model_world_size_{world}_rank_{rank}.pt")
    torch.save(optimizer, folder / form / f"optim_world_size_{world}_rank_{rank}.pt")
    if rank == 0:
        torch.save(full, folder / f"{form}.full.pt")
        if full_optimizer is not None:
            torch.save(full_optimizer, folder / f"{form}.optim.pt")


def second(folder: Path, form: str, net: nn.Module) -> None:
    """Of models whose parameters are DTensors."""
    optimizer = trained(net)
    state, optim = net.state_dict(), optimizer.state_dict()
    write(folder, form, state, optim, whole(dict(state)), whole(optim))


def fsdp2(folder: Path) -> None:
    net = model()
    for layer in net.layers:
        fully_shard(layer)
    second(folder, "fsdp2", fully_shard(net))


def hsdp2(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("ddp", "fsdp"))
    second(folder, "hsdp2", fully_shard(model(), mesh=mesh))


PLAN = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}


def tp(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    second(folder, "tp", parallelize_module(model(), mesh, dict(PLAN)))


def fsdp2_tp(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    net = parallelize_module(model(), mesh["tp"], dict(PLAN))
    for layer in net.layers:
        fully_shard(layer, mesh=mesh["dp"])
    second(folder, "fsdp2_tp", fully_shard(net, mesh=mesh["dp"]))


def first(folder: Path, form: str, *, flat: bool = True, **how: Any) -> None:
    """FSDP1: sharded state_dicts, and the optimizer's own, in flat pieces."""
    how |= {"use_orig_params": not flat, "device_id": torch.device("cpu")}
    net = FullyShardedDataParallel(model(), **how)
    optimizer = trained(net)

    def state(kind: StateDictType, config: Any) -> dict[str, Any]:
        with FullyShardedDataParallel.state_dict_type(net, kind, config):
            return dict(net.state_dict())

    sharded = state(StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(offload_to_cpu=False))
    full = state(StateDictType.FULL_STATE_DICT, FullStateDictConfig())
    full = {name: tensor.clone() for name, tensor in full.items()}
    write(folder, form, sharded, optimizer.state_dict(), full, None)


def fsdp1(folder: Path) -> None:
    first(folder, "fsdp1")


def fsdp1_orig(folder: Path) -> None:
    first(folder, "fsdp1_orig", flat=False)


def fsdp1_mesh(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    first(folder, "fsdp1_mesh", device_mesh=mesh)


def fsdp1_hybrid(folder: Path) -> None:
    """Without a mesh: each group of replicas lists its own ranks."""
    assert dist.get_world_size() == 4
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    how = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    first(folder, "fsdp1_hybrid", process_group=(groups[rank // 2], across[rank % 2]), **how)


FORMS: dict[int, tuple[Callable[[Path], None], ...]] = {
    2: (fsdp2, tp, fsdp1, fsdp1_orig, fsdp1_mesh),
    3: (fsdp2, tp, fsdp1, fsdp1_orig, fsdp1_mesh),
    4: (fsdp2, hsdp2, tp, fsdp2_tp, fsdp1, fsdp1_orig, fsdp1_hybrid, fsdp1_mesh),
}


def main(place: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = Path(place)
    for form in FORMS[dist.get_world_size()]:
        form(folder)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
