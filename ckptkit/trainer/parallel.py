"""Several devices: the processes of a run, and the wrappers of a model.

DataParallel copies the model from the first device to the others for every batch, splits the batch
along dim 0 and gathers the outputs on the first device, where the loss is computed: that device
needs more memory than the others. Balanced, the outputs stay on their devices, each device computes
its loss, and only the losses are gathered. Both give the same gradients. With one GPU nothing is
split; the keys still get their ``module.`` prefix. On a machine without GPUs, ``--devices cpu,cpu``
simulates the split: the parts of a batch pass through the model one after the other.

torch recommends DistributedDataParallel over DataParallel, also on one machine: each GPU has its
own process, so that Python's lock is not shared and no model is copied in each step. Small models
are slower on several GPUs than on one, either way: what is exchanged takes longer than what is
computed.
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
    missing += [config.output_device] if config.output_device not in ("", *there) else []
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
    if config.sync_batch_norm and not names[0].startswith("cuda"):
        raise RequestError(
            "torch's SyncBatchNorm computes on GPUs only", hint="without --sync-batch-norm"
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
    """This process among those of the run. The first of its devices holds the model.

    ``names`` are the devices of all processes, in the order of the ranks.
    """

    devices: tuple[torch.device, ...]
    rank: int = 0
    world: int = 1
    names: tuple[str, ...] = ()

    @property
    def device(self) -> torch.device:
        return self.devices[0]

    def all_reduce_sum(self, *values: float) -> list[float]:
        """Return the sums of values over all processes."""
        if self.world == 1:
            return list(values)
        totals = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(totals)
        sums: list[float] = totals.tolist()
        return sums

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
        yield ProcessGroup(devices, names=tuple(map(str, devices)))
        return
    device = devices[int(os.environ.get("LOCAL_RANK", 0)) % len(devices)]
    join(device, len(devices), is_sharded=config.parallel == "fsdp")
    try:
        joined = ProcessGroup((device,), dist.get_rank(), dist.get_world_size())
        if config.batch_size < joined.world:
            raise RequestError(
                f"--batch-size {config.batch_size} is less than an image for each of "
                f"{joined.world} processes",
                hint=f"--batch-size {joined.world}",
            )
        names = dict.fromkeys(map(str, joined.all_gather(str(device))))
        yield replace(joined, names=tuple(names))
    finally:
        dist.destroy_process_group()


def join(device: torch.device, devices: int, is_sharded: bool = False) -> None:
    """Join the process group: nccl if every process has its own GPU, else gloo.

    Raises RequestError if a sharded model would have to exchange GPU tensors through gloo.
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
                hint=f"--nproc-per-node {devices}, --parallel ddp, or --devices cpu",
            )
        torch.cuda.set_device(device)
    if "WORLD_SIZE" not in os.environ:
        store = dist.HashStore()  # type: ignore[attr-defined]
        options |= {"store": store, "rank": 0, "world_size": 1}
    dist.init_process_group(**options)


def wrap(model: nn.Module, config: Config, group: ProcessGroup) -> nn.Module:
    """Return the model wrapped for all devices, ready to be called with a batch."""
    if config.sync_batch_norm:
        layers: Any = nn.SyncBatchNorm  # without types
        model = layers.convert_sync_batchnorm(model)  # replaces the layers inside
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
    """Shard a model over all processes: block by block, the root last, as torch advises.

    Each block's parameters are gathered when it is called and freed after it; with the root alone,
    all would be gathered at once. With ``amp``, they are gathered and computed with in bfloat16,
    and their gradients are added up in float32.
    """
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    except ImportError as error:
        raise RequestError(
            f"torch {torch.__version__} has no fully_shard",
            hint="pip install 'torch>=2.6', or --parallel ddp",
        ) from error
    options: dict[str, Any] = {"mesh": init_device_mesh(group.device.type, (group.world,))}
    if config.amp:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in (*blocks(model), model):
        fully_shard(block, **options)


def blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of a model to shard: its children, and the items of lists and sequences.

    What is not called as a whole cannot be one: lists are looped over, segments of sequences are
    recomputed. A recurrent layer is none either: ``flatten_parameters`` reads it before it is
    called.
    """
    for child in model.children():
        if isinstance(child, (nn.Sequential, nn.ModuleList)):
            yield from blocks(child)
        elif next(child.parameters(), None) is not None and not isinstance(child, nn.RNNBase):
            yield child


def amp_dtype(config: Config) -> torch.dtype:
    """Return the dtype that `--amp` computes in.

    bfloat16 has the range of float32, so that no loss scaling is needed; float16 needs it.
    """
    return torch.float16 if config.amp_dtype == "float16" else torch.bfloat16


def autocast(config: Config, device: torch.device) -> torch.autocast:
    """Compute in 16 bits if the config asks for it."""
    return torch.autocast(device.type, amp_dtype(config), enabled=config.amp)


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

    Inputs are split and outputs gathered along `dim`. Balanced and in training, it returns the
    outputs of the replicas as a list, not gathered.
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
        # As on GPUs: each replica starts with the buffers from before the step, and only the first
        # one's updates (of BatchNorm's statistics) are kept.
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
        """Run each replica in its thread, inside an autocast of its own.

        torch opens autocast in these threads without a dtype, which means float16 on GPUs.
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
