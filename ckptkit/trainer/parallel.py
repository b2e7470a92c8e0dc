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
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from ckptkit.trainer.config import Config, RequestError

Loss = Callable[[Tensor, Tensor], Tensor]

# Models whose backward pass is not deterministic on GPUs, and the operation that is not. Source:
# torch.use_deterministic_algorithms.
NONDETERMINISTIC = {"generator": "backward pass of ReflectionPad2d", "crnn": "CTC loss"}


def available() -> list[str]:
    """Return the devices of this machine that CUDA_VISIBLE_DEVICES does not hide."""
    gpus = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    return ["cpu", *gpus, *["mps"] * torch.backends.mps.is_available()]


def choose(config: Config) -> tuple[torch.device, ...]:
    """Return the devices of a config, the one that holds the model first.

    Raises RequestError if one does not exist, or if they cannot share the work.
    """
    there = available()
    names = ["cuda:0" if name == "cuda" else name for name in config.devices]
    if not names:
        gpus = [name for name in there if name.startswith("cuda")]
        names = (gpus[:1] if config.parallel == "none" else gpus) or ["cpu"]
    missing = [name for name in names if name not in there]
    others = [name for name in names if not name.startswith("cuda")]
    simulated = config.parallel.startswith("dp") and set(names) == {"cpu"}
    if missing:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f" (CUDA_VISIBLE_DEVICES={visible} renumbers and hides GPUs)"
        hint = f"--devices {', '.join(there)}{'' if visible is None else hidden}"
        raise RequestError(f"there is no device {missing[0]} here", hint=hint)
    if config.deterministic and config.model in NONDETERMINISTIC and names[0].startswith("cuda"):
        raise RequestError(
            f"torch has no deterministic {NONDETERMINISTIC[config.model]} for GPUs",
            hint="--devices cpu, or without --deterministic",
        )
    if len(names) > 1 and config.parallel == "none":
        raise RequestError(
            f"one device is enough for --parallel none, not {len(names)}", hint="--parallel dp"
        )
    if len(set(names)) < len(names) and not simulated:
        raise RequestError(f"--devices names {max(names, key=names.count)} twice")
    if len(names) > 1 and others and not simulated:
        raise RequestError(
            f"{others[0]} cannot share the work with other devices",
            hint="--devices names GPUs only, or the CPU only",
        )
    return tuple(map(torch.device, names))


@dataclass(frozen=True)
class ProcessGroup:
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
def group(config: Config) -> Iterator[ProcessGroup]:
    """Join the processes that torchrun started, or use this process alone."""
    devices = choose(config)
    if config.parallel not in ("ddp", "fsdp"):
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise RequestError(
                f"torchrun started several processes, --parallel {config.parallel} needs one",
                hint="--parallel ddp",
            )
        yield ProcessGroup(devices)
        return
    device = devices[int(os.environ.get("LOCAL_RANK", 0)) % len(devices)]
    join(device, len(devices))
    try:
        yield ProcessGroup((device,), dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


def join(device: torch.device, devices: int) -> None:
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


def wrap(model: nn.Module, config: Config, group: ProcessGroup) -> nn.Module:
    """Return the model wrapped for all devices, ready to be called with a batch."""
    if config.parallel in ("dp", "dp-balanced"):
        return Replicated(
            model, group.devices, balanced=config.parallel == "dp-balanced", amp=config.amp
        )
    if config.parallel == "ddp":
        ids = [group.device] if group.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids)
    if config.parallel == "fsdp":
        try:
            from torch.distributed.fsdp import fully_shard
        except ImportError as error:
            raise RequestError(
                f"torch {torch.__version__} has no fully_shard",
                hint="pip install 'torch>=2.6', or --parallel ddp",
            ) from error
        fully_shard(model, mesh=init_device_mesh(group.device.type, (group.world,)))
    return model


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """Compute in bfloat16 if the config asks for it.

    It has the range of float32, so that no loss scaling is needed.
    """
    return torch.autocast(device.type, torch.bfloat16, enabled=config.amp)


def sync_gradients(wrapped: nn.Module, now: bool) -> AbstractContextManager[None]:
    """Exchange gradients in this backward pass, or (not `now`) only add them up.

    Without this, DDP exchanges them after every micro-batch: the same result, K times the traffic.
    """
    if isinstance(wrapped, nn.parallel.DistributedDataParallel) and not now:
        return cast("AbstractContextManager[None]", wrapped.no_sync())
    if hasattr(wrapped, "set_requires_gradient_sync"):  # FSDP
        sharded: Any = wrapped
        sharded.set_requires_gradient_sync(now)
    return nullcontext()


def sync_buffers(model: nn.Module, group: ProcessGroup) -> None:
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

        def cast_in(replica: nn.Module) -> Callable[..., Any]:
            def call(*inputs: Any, **kwargs: Any) -> Any:
                with torch.autocast(self.device_type, torch.bfloat16, enabled=self.amp):
                    return replica(*inputs, **kwargs)

            return call

        calls: Any = list(map(cast_in, replicas))
        outputs: list[Any] = super().parallel_apply(calls, inputs, kwargs)
        return outputs

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
