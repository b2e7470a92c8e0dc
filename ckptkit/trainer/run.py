"""Build a training run. Seed, save and restore random number generators."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ckptkit.trainer import parallel
from ckptkit.trainer.config import Config
from ckptkit.trainer.data import TASKS, Data, LearningTask, load
from ckptkit.trainer.models import build


@dataclass
class Run:
    """The state of a training run.

    ``wrapped`` contains ``model`` and is called with batches. ``epoch`` counts finished epochs.
    ``step`` counts finished steps of the current epoch. ``order`` is the order of images in the
    current epoch, drawn at its start.
    """

    config: Config
    group: parallel.ProcessGroup
    data: Data
    task: LearningTask
    model: nn.Module
    wrapped: nn.Module
    loss: Callable[[Tensor | list[Tensor], Tensor], Tensor]
    optimizer: Optimizer
    scheduler: StepLR
    scaler: torch.amp.GradScaler
    average: AveragedModel | None = None
    epoch: int = 0
    step: int = 0
    order: Tensor | None = None
    best_accuracy: float = -1.0


def prepare(config: Config, group: parallel.ProcessGroup) -> Run:
    """Seed, load the data, and build and wrap the model. Return a run before its first epoch."""
    task, loaded = TASKS[config.model], load(config)
    seed(config)
    model = build(config, loaded.shape, loaded.classes).to(group.device)
    if config.torch_compile:
        # Compile in place, so that keys get no `_orig_mod.` prefix.
        model.compile(backend=config.torch_compile)
    if group.rank:
        seed(config, group.rank)  # weights must be equal in all processes, but dropout must differ
    wrapped = parallel.wrap(model, config, group)
    options: dict[str, Any] = {"lr": config.initial_lr}
    if not config.foreach:
        options["foreach"] = False
    if config.weight_decay is not None:
        options["weight_decay"] = config.weight_decay
    if config.optimizer == "sgd":
        options["momentum"] = config.momentum
    else:
        options["betas"] = config.momentum, 0.999
    kinds: dict[str, Any] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
    optimizer: Optimizer = kinds[config.optimizer](model.parameters(), **options)
    scheduler = StepLR(optimizer, config.epochs_per_lr or sys.maxsize, config.lr_gamma)
    loss = parallel.split_loss(task.loss)
    # In float16, small gradients become 0. So the scaler multiplies the loss before the backward
    # pass, and divides the gradients after the backward pass.
    is_scaled = config.amp and config.amp_dtype == "float16"
    scaler = torch.amp.GradScaler(group.device.type, enabled=is_scaled)
    run = Run(config, group, loaded, task, model, wrapped, loss, optimizer, scheduler, scaler)
    if config.ema:
        decay = get_ema_multi_avg_fn(config.ema)  # type: ignore[no-untyped-call]
        run.average = AveragedModel(model, multi_avg_fn=decay, use_buffers=True)
    return run


@contextmanager
def switches_restored() -> Iterator[None]:
    """Restore the global switches of torch that --deterministic and --benchmark change."""
    algorithms = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(algorithms, warn_only=warns)
        torch.backends.cudnn.benchmark = benchmark


def seed(config: Config, rank: int = 0) -> None:
    """Seed Python, NumPy, torch and all GPUs. Each rank gets a different seed.

    With ``deterministic``, torch refuses nondeterministic algorithms. With ``benchmark``, cuDNN
    times its algorithms for the first batch of each shape. Training is then faster if all batches
    have one shape, and slower otherwise. Such runs are not reproducible.
    """
    number = config.seed + rank
    random.seed(number)
    numpy.random.seed(number)
    torch.manual_seed(number)  # also seeds the GPUs
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    if config.benchmark:
        torch.backends.cudnn.benchmark = True


def random_states() -> dict[str, Any]:
    """Return the states of all random number generators, as plain values and tensors."""
    numpys: Any = numpy.random.get_state(legacy=False)
    key = torch.from_numpy(numpys["state"]["key"].astype("int64"))
    return {
        "python": random.getstate(),
        "numpy": {**numpys, "state": {**numpys["state"], "key": key}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_random(saved: dict[str, Any]) -> None:
    """Restore the states from :func:`random_states`. Ignore states of missing GPUs."""
    numpys = saved["numpy"]
    random.setstate(saved["python"])
    numpy.random.set_state(
        {**numpys, "state": {**numpys["state"], "key": numpys["state"]["key"].numpy()}}
    )
    torch.set_rng_state(saved["torch"])
    for device, cuda_state in enumerate(saved["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(cuda_state, device)
