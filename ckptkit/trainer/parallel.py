"""Several devices: the processes of a run, and the wrappers of a model.

DataParallel copies the model from the first device to the others for every batch, splits the batch
along dim 0 and gathers the outputs on the first device, where the loss is computed: that device
needs more memory than the others. Balanced, the outputs stay on their devices, each device computes
its loss, and only the losses are gathered. Both give the same gradients. On the CPU, and with one
GPU, nothing is split; the keys still get their ``module.`` prefix.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ckptkit.trainer.config import Config, RequestError
from ckptkit.trainer.devices import choose

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Group:
    """This process among those of the run. The first of its devices holds the model."""

    devices: tuple[torch.device, ...]
    rank: int = 0
    world: int = 1

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    def mean(self, value: float) -> float:
        """Return the mean of a value over all processes."""
        if self.world == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item() / self.world


@contextmanager
def group(config: Config) -> Iterator[Group]:
    """Join the processes that torchrun started, or use this process alone."""
    devices = choose(config)
    if config.parallel not in ("ddp", "fsdp"):
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise RequestError(
                f"torchrun started several processes, --parallel {config.parallel} needs one",
                hint="--parallel ddp",
            )
        yield Group(devices)
        return
    device = devices[int(os.environ.get("LOCAL_RANK", 0)) % len(devices)]
    _join(device, len(devices))
    try:
        yield Group((device,), dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def _join(device: torch.device, devices: int) -> None:
    """Join the process group: nccl if every process has its own GPU, else gloo."""
    own_gpu = device.type == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) <= devices
    backend = "nccl" if own_gpu else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]


def wrap(model: nn.Module, config: Config, group: Group) -> nn.Module:
    """Return the model wrapped for all devices, ready to be called with a batch."""
    if config.parallel in ("dp", "dp-balanced"):
        return Replicated(model, group.devices, balanced=config.parallel == "dp-balanced")
    if config.parallel == "ddp":
        ids = [group.device] if group.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids)
    return _sharded(model, group) if config.parallel == "fsdp" else model


def _sharded(model: nn.Module, group: Group) -> nn.Module:
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError as error:
        raise RequestError(
            f"torch {torch.__version__} has no fully_shard",
            hint="pip install 'torch>=2.6', or --parallel ddp",
        ) from error
    mesh = init_device_mesh(group.device.type, (group.world,))
    fully_shard(model, mesh=mesh)
    return model


class Replicated(nn.DataParallel[nn.Module]):
    """torch's DataParallel, which here also uses the CPU on machines with GPUs.

    Balanced and in training, it returns the outputs of the replicas as a list, not gathered.
    """

    def __init__(
        self, model: nn.Module, devices: tuple[torch.device, ...], balanced: bool = False
    ) -> None:
        if devices[0].type == "cuda":
            super().__init__(model, list(devices))
        else:
            nn.Module.__init__(self)
            self.module, self.device_ids = model, []
        self.balanced = balanced

    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        return (
            outputs if self.balanced and self.training else super().gather(outputs, output_device)
        )


def split_loss(loss: Loss) -> Callable[[Tensor | list[Tensor], Tensor], Tensor]:
    """Return `loss`, a mean over a batch, computed where each of several outputs is.

    Kernels on different devices run concurrently, since they are only queued here.
    """

    def where_they_are(outputs: Tensor | list[Tensor], targets: Tensor) -> Tensor:
        if isinstance(outputs, Tensor):
            return loss(outputs, targets)
        total, start = outputs[0].new_zeros(()), 0
        for output in outputs:
            part = targets[start : start + len(output)].to(output.device)
            total = total + (loss(output, part) * (len(part) / len(targets))).to(total.device)
            start += len(output)
        return total

    return where_they_are
