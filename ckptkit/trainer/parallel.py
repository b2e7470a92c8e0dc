"""Several devices: the processes of a run, and the wrappers of a model.

DataParallel copies the model from the first device to the others for every batch, splits the batch
along dim 0 and gathers the outputs on the first device, where the loss is computed: that device
needs more memory than the others. Balanced, the outputs stay on their devices, each device computes
its loss, and only the losses are gathered. Both give the same gradients. With one GPU nothing is
split; the keys still get their ``module.`` prefix. On a machine without GPUs, ``--devices cpu,cpu``
simulates the split: the parts of a batch pass through the model one after the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
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

    def all_reduce_mean(self, value: float) -> float:
        """Return the mean of a value over all processes."""
        if self.world == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.device)
        dist.all_reduce(total)
        return total.item() / self.world

    def of_rank_0(self, value: Tensor) -> Tensor:
        """Return the tensor of the first process, on the device of `value`."""
        if self.world == 1:
            return value
        shared = value.to(self.device)
        dist.broadcast(shared, 0)
        return shared.to(value.device)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values of all processes."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values


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
    options: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if int(os.environ.get("LOCAL_WORLD_SIZE", 1)) <= devices:
            options = {"backend": "nccl", "device_id": device}
    if "WORLD_SIZE" not in os.environ:
        store = dist.HashStore()  # type: ignore[attr-defined]
        options |= {"store": store, "rank": 0, "world_size": 1}
    dist.init_process_group(**options)


def wrap(model: nn.Module, config: Config, group: Group) -> nn.Module:
    """Return the model wrapped for all devices, ready to be called with a batch."""
    if config.parallel in ("dp", "dp-balanced"):
        return Replicated(
            model, group.devices, balanced=config.parallel == "dp-balanced", amp=config.amp
        )
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


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """Compute in bfloat16 if the config asks for it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=config.amp)


def sync_gradients(wrapped: nn.Module, now: bool) -> AbstractContextManager[None]:
    """Exchange gradients in this backward pass, or (not `now`) only add them up.

    Without this, DDP exchanges them after every micro-batch: the same result, K times the traffic.
    """
    if isinstance(wrapped, nn.parallel.DistributedDataParallel) and not now:
        waiting: AbstractContextManager[None] = wrapped.no_sync()
        return waiting
    if hasattr(wrapped, "set_requires_gradient_sync"):  # FSDP
        sharded: Any = wrapped
        sharded.set_requires_gradient_sync(now)
    return nullcontext()


def sync_buffers(model: nn.Module, group: Group) -> None:
    """Give all processes the buffers of the first: the running statistics of BatchNorm.

    DDP does it before each forward pass, which leaves them unequal after the last one; FSDP never
    does it.
    """
    for buffer in model.buffers():
        buffer.copy_(group.of_rank_0(buffer))


class Replicated(nn.DataParallel[nn.Module]):
    """torch's DataParallel, which here also uses the CPU, and splits a batch for simulated devices.

    Balanced and in training, it returns the outputs of the replicas as a list, not gathered.
    """

    def __init__(
        self,
        model: nn.Module,
        devices: tuple[torch.device, ...],
        balanced: bool = False,
        amp: bool = False,
    ) -> None:
        if devices[0].type == "cuda":
            super().__init__(model, list(devices))
        else:
            nn.Module.__init__(self)
            self.module, self.device_ids = model, []
        self.simulated = 0 if devices[0].type == "cuda" else len(devices)
        self.device_type, self.balanced, self.amp = devices[0].type, balanced, amp

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.simulated < 2:
            return super().forward(*inputs, **kwargs)
        parts = zip(*(tensor.chunk(self.simulated) for tensor in inputs), strict=True)
        return self.gather([self.module(*part, **kwargs) for part in parts], "cpu")

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Run each replica in its thread, inside an autocast of its own.

        torch opens autocast in these threads without a dtype, which means float16 on GPUs.
        """
        calls: Any = [self._cast(replica) for replica in replicas]
        outputs: list[Any] = super().parallel_apply(calls, inputs, kwargs)
        return outputs

    def _cast(self, replica: nn.Module) -> Callable[..., Any]:
        def call(*inputs: Any, **kwargs: Any) -> Any:
            with torch.autocast(self.device_type, torch.bfloat16, enabled=self.amp):
                return replica(*inputs, **kwargs)

        return call

    def gather(self, outputs: Any, output_device: Any) -> Any:
        if self.balanced and self.training:
            return outputs
        return torch.cat(outputs) if self.simulated else super().gather(outputs, output_device)


def split_loss(loss: Loss) -> Callable[[Tensor | list[Tensor], Tensor], Tensor]:
    """Return `loss`, a mean over a batch, computed where each of several outputs is.

    Kernels on different devices run concurrently, since they are only queued here.
    """

    def on_each_device(outputs: Tensor | list[Tensor], targets: Tensor) -> Tensor:
        if isinstance(outputs, Tensor):
            return loss(outputs, targets)
        total, start = outputs[0].new_zeros(()), 0
        for output in outputs:
            part = targets[start : start + len(output)].to(output.device)
            total = total + (loss(output, part) * (len(part) / len(targets))).to(total.device)
            start += len(output)
        return total

    return on_each_device
