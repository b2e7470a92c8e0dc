"""Run on several devices: join the processes of a run, and wrap the model.

For every batch, DataParallel copies the model from the first device to all devices, and splits the
batch along dim 0. DataParallel then gathers the outputs on the first device. The first device
computes the loss. So the first device needs more memory than the other devices. With
``dp-balanced``, each device computes the loss of its outputs, and only the losses are gathered.
Both modes compute the same gradients. With one GPU, batches are not split, but the keys still get
the prefix ``module.``. On a machine without GPUs, ``--devices cpu,cpu`` simulates the split: the
parts of a batch pass through the model one after the other.

torch recommends DistributedDataParallel over DataParallel, even on one machine. Each GPU has its
own process with its own interpreter lock, and no step copies the model. Small models train slower
on several GPUs than on one GPU, because communication takes longer than computing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from ckptkit.core.text import plural
from ckptkit.trainer.config import Config, RequestError

Loss = Callable[[Tensor, Tensor], Tensor]

# Maps each model without a deterministic backward pass on GPUs to its nondeterministic operation.
# Source: documentation of torch.use_deterministic_algorithms.
NONDETERMINISTIC = {"generator": "backward pass of ReflectionPad2d", "crnn": "CTC loss"}


def available() -> list[str]:
    """Return the devices of this machine, except those that CUDA_VISIBLE_DEVICES hides."""
    gpus = [f"cuda:{n}" for n in range(torch.cuda.device_count())]
    return ["cpu", *gpus, *["mps"] * torch.backends.mps.is_available()]


def choose(config: Config) -> tuple[torch.device, ...]:
    """Return the devices of a config. The model is on the first device.

    Raises RequestError if a device does not exist, or if the devices cannot be combined.
    """
    there = available()
    names = ["cuda:0" if name == "cuda" else name for name in config.devices]
    if not names:
        gpus = [name for name in there if name.startswith("cuda")]
        names = (gpus[:1] if config.parallel == "none" else gpus) or ["cpu"]
    missing = [name for name in names if name not in there]
    others = [name for name in names if not name.startswith("cuda")]
    simulated = config.parallel.startswith("dp") and set(names) == {"cpu"}
    missing += [config.output_device] if config.output_device not in ("", *there) else []
    if missing:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        hidden = f" (CUDA_VISIBLE_DEVICES={visible} renumbers and hides GPUs)"
        hint = f"use --devices with {', '.join(there)}{'' if visible is None else hidden}"
        raise RequestError(f"this machine has no device {missing[0]}", hint=hint)
    if config.deterministic and config.model in NONDETERMINISTIC and names[0].startswith("cuda"):
        raise RequestError(
            f"torch has no deterministic {NONDETERMINISTIC[config.model]} for GPUs",
            hint="use --devices cpu, or remove --deterministic",
        )
    if config.sync_batch_norm and not names[0].startswith("cuda"):
        raise RequestError(
            "SyncBatchNorm of torch works only on GPUs", hint="remove --sync-batch-norm"
        )
    if len(names) > 1 and config.parallel == "none":
        raise RequestError(
            f"--parallel none uses one device, got {len(names)}", hint="use --parallel dp"
        )
    if len(set(names)) < len(names) and not simulated:
        raise RequestError(f"--devices contains {max(names, key=names.count)} twice")
    if len(names) > 1 and others and not simulated:
        raise RequestError(
            f"{others[0]} cannot be combined with other devices",
            hint="use only GPUs in --devices, or only the CPU",
        )
    return tuple(map(torch.device, names))


@dataclass(frozen=True)
class ProcessGroup:
    """One process in the group of processes of a run. The model is on the first of `devices`.

    ``names`` contains the devices of all processes, in the order of ranks.
    """

    devices: tuple[torch.device, ...]
    rank: int = 0
    world: int = 1
    names: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    def all_reduce_sum(self, *values: float) -> list[float]:
        """Return the sum of each value over all processes."""
        if self.world == 1:
            return list(values)
        totals = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(totals)
        sums: list[float] = totals.tolist()
        return sums

    def of_rank_0(self, value: Tensor) -> Tensor:
        """Return the tensor that rank 0 passed, on the device of `value`."""
        if self.world == 1:
            return value
        shared = value.to(self.device)
        dist.broadcast(shared, 0)
        return shared.to(value.device)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the values that all processes passed, in order of ranks."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values


@contextmanager
def group(config: Config) -> Iterator[ProcessGroup]:
    """Join the processes that torchrun started. Without torchrun, yield a group of one process."""
    devices = choose(config)
    if config.parallel not in ("ddp", "fsdp"):
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            raise RequestError(
                f"torchrun started several processes, but --parallel {config.parallel} uses one",
                hint="use --parallel ddp",
            )
        yield ProcessGroup(devices, names=tuple(map(str, devices)))
        return
    device = devices[int(os.environ.get("LOCAL_RANK", 0)) % len(devices)]
    join(device, len(devices), is_sharded=config.parallel == "fsdp")
    try:
        joined = ProcessGroup((device,), dist.get_rank(), dist.get_world_size())
        if config.batch_size < joined.world:
            raise RequestError(
                f"--batch-size {config.batch_size} is less than one image for each of the "
                f"{joined.world} processes",
                hint=f"use --batch-size {joined.world}",
            )
        names = dict.fromkeys(map(str, joined.all_gather(str(device))))
        yield replace(joined, names=tuple(names))
    finally:
        dist.destroy_process_group()


def join(device: torch.device, devices: int, is_sharded: bool = False) -> None:
    """Join the process group: with nccl if every process has its own GPU, otherwise with gloo.

    Raises RequestError if a sharded model on GPUs would need gloo.
    """
    options: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if processes <= devices:
            options = {"backend": "nccl", "device_id": device}
        elif is_sharded:
            raise RequestError(
                f"FSDP needs a GPU for each process: {processes} processes, "
                f"{plural(devices, 'GPU')}",
                hint=f"use --nproc-per-node {devices}, --parallel ddp, or --devices cpu",
            )
        torch.cuda.set_device(device)
    if "WORLD_SIZE" not in os.environ:
        store = dist.HashStore()  # type: ignore[attr-defined]
        options |= {"store": store, "rank": 0, "world_size": 1}
    dist.init_process_group(**options)


def wrap(model: nn.Module, config: Config, group: ProcessGroup) -> nn.Module:
    """Wrap the model for all devices. The result takes a complete batch."""
    if config.sync_batch_norm:
        layers: Any = nn.SyncBatchNorm  # SyncBatchNorm has no type annotations
        # convert_sync_batchnorm replaces the layers of the model in place.
        model = layers.convert_sync_batchnorm(model)
    if config.parallel in ("dp", "dp-balanced"):
        return Replicated(
            model,
            group.devices,
            balanced=config.parallel == "dp-balanced",
            amp=amp_dtype(config) if config.amp else None,
            output_device=config.output_device or None,
        )
    if config.parallel == "ddp":
        ids = [group.device] if group.device.type == "cuda" else None
        return nn.parallel.DistributedDataParallel(model, device_ids=ids)
    if config.parallel == "fsdp":
        shard(model, config, group)
    return model


def shard(model: nn.Module, config: Config, group: ProcessGroup) -> None:
    """Shard a model over all processes: each block, then the root, as torch recommends.

    FSDP gathers the parameters of a block when the block is called, and frees them afterwards. If
    only the root were sharded, FSDP would gather all parameters at once. With ``amp``, blocks
    gather and compute in bfloat16, and reduce gradients in float32.
    """
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError as error:
        raise RequestError(
            f"torch {torch.__version__} has no fully_shard",
            hint="pip install 'torch>=2.6', or use --parallel ddp",
        ) from error
    options: dict[str, Any] = {"mesh": init_device_mesh(group.device.type, (group.world,))}
    if config.amp:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in (*blocks(model), model):
        fully_shard(block, **options)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks of a model that FSDP shards.

    A block is a child of the model. If a child is a list or sequence, its items are blocks instead.

    FSDP gathers the parameters of a block when the block is called. Lists and sequences are not
    called: the model loops over their items or recomputes segments. Recurrent layers cannot be
    blocks, because ``flatten_parameters`` reads their parameters before the call.
    """
    for child in model.children():
        if isinstance(child, (nn.Sequential, nn.ModuleList)):
            yield from blocks(child)
        elif next(child.parameters(), None) is not None and not isinstance(child, nn.RNNBase):
            yield child


def amp_dtype(config: Config) -> torch.dtype:
    """Return the dtype of `--amp`.

    bfloat16 has the range of float32, so it needs no loss scaling. float16 needs loss scaling.
    """
    return torch.float16 if config.amp_dtype == "float16" else torch.bfloat16


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """Return an autocast context, which is enabled if the config has `amp`."""
    return torch.autocast(device.type, amp_dtype(config), enabled=config.amp)


def sync_gradients(wrapped: nn.Module, now: bool) -> AbstractContextManager[None]:
    """Return a context for a backward pass. The pass syncs gradients only if `now` is true.

    Without this context, DDP syncs after each of K micro-batches. The context does not change the
    gradients, but it divides the traffic by K.
    """
    if isinstance(wrapped, nn.parallel.DistributedDataParallel) and not now:
        return cast("AbstractContextManager[None]", wrapped.no_sync())
    if hasattr(wrapped, "set_requires_gradient_sync"):  # FSDP
        sharded: Any = wrapped
        sharded.set_requires_gradient_sync(now)
    return nullcontext()


def sync_buffers(model: nn.Module, group: ProcessGroup) -> None:
    """Copy the buffers of rank 0 (running statistics of BatchNorm) to all processes.

    DDP copies buffers before each forward pass, so buffers differ again after the last forward
    pass. FSDP never copies buffers.
    """
    for buffer in model.buffers():
        buffer.copy_(group.of_rank_0(buffer))


class Replicated(nn.DataParallel[nn.Module]):
    """A subclass of torch's DataParallel that can also simulate several devices on the CPU.

    Inputs are split and outputs gathered along `dim`. If `balanced`, the model returns the outputs
    of the replicas as a list during training.
    """

    def __init__(
        self,
        model: nn.Module,
        devices: tuple[torch.device, ...],
        balanced: bool = False,
        amp: torch.dtype | None = None,
        output_device: str | None = None,
        dim: int = 0,
    ) -> None:
        if devices[0].type == "cuda":
            place = torch.device(output_device) if output_device else None
            super().__init__(model, list(devices), place, dim)
        else:
            nn.Module.__init__(self)
            self.module, self.device_ids, self.dim = model, [], dim
        self.simulated = 0 if devices[0].type == "cuda" else len(devices)
        self.device_type, self.balanced, self.amp = devices[0].type, balanced, amp

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self.simulated < 2:
            return super().forward(*inputs, **kwargs)
        chunks = (tensor.chunk(self.simulated, self.dim) for tensor in inputs)
        first, *others = zip(*chunks, strict=True)
        # As on GPUs, each replica starts with the buffers from before the step. Only the first
        # replica updates the buffers of the model (BatchNorm statistics).
        buffers = [
            {name: buffer.clone() for name, buffer in self.module.named_buffers()} for _ in others
        ]
        outputs = [self.module(*first, **kwargs)]
        for own, part in zip(buffers, others, strict=True):
            outputs.append(functional_call(self.module, own, part, kwargs))
        return self.gather(outputs, "cpu")

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Any
    ) -> list[Any]:
        """Run each replica in its own thread, inside an autocast with the right dtype.

        torch opens autocast in these threads without a dtype. On GPUs, replicas would then compute
        in float16.
        """

        def cast_in(replica: nn.Module) -> Callable[..., Any]:
            def call(*inputs: Any, **kwargs: Any) -> Any:
                is_used, dtype = self.amp is not None, self.amp or torch.bfloat16
                with torch.autocast(self.device_type, dtype, enabled=is_used):
                    return replica(*inputs, **kwargs)

            return call

        calls: Any = list(map(cast_in, replicas))
        outputs: list[Any] = super().parallel_apply(calls, inputs, kwargs)
        return outputs

    def gather(self, outputs: Any, output_device: Any) -> Any:
        if self.balanced and self.training:
            return outputs
        return (
            torch.cat(outputs, self.dim)
            if self.simulated
            else super().gather(outputs, output_device)
        )


def split_loss(loss: Loss) -> Callable[[Tensor | list[Tensor], Tensor], Tensor]:
    """Return a loss that accepts a list of outputs, and computes the loss of each output on its
    device.

    `loss` is the mean over a batch. Kernels on different devices run concurrently, because a call
    only queues its kernels.
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
