"""The parts of a training run, put together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from ckptkit.trainer import data, parallel, randomness
from ckptkit.trainer.config import Config
from ckptkit.trainer.models import TASKS, build
from ckptkit.trainer.tasks import Task


@dataclass
class Run:
    """The state of a training run.

    ``wrapped`` is called with batches and contains ``model``; ``epoch`` counts finished epochs.
    """

    config: Config
    group: parallel.Group
    data: data.Data
    task: Task
    model: nn.Module
    wrapped: nn.Module
    loss: Callable[[Tensor | list[Tensor], Tensor], Tensor]
    optimizer: Optimizer
    scheduler: StepLR
    epoch: int = 0
    best_accuracy: float = -1.0


def prepare(config: Config, group: parallel.Group) -> Run:
    """Seed, load the data, build and wrap the model: a run before its first epoch."""
    task = TASKS[config.model]
    loaded = data.load(config, task)
    randomness.seed(config)
    model = build(config, loaded.shape, loaded.classes).to(group.device)
    if group.rank:
        randomness.seed(config, group.rank)  # equal weights in all processes, but not equal dropout
    wrapped = parallel.wrap(model, config, group)
    optimizer = build_optimizer(model, config)
    scheduler = StepLR(optimizer, config.lr_step or sys.maxsize, config.lr_gamma)
    loss = parallel.split_loss(task.loss)
    return Run(config, group, loaded, task, model, wrapped, loss, optimizer, scheduler)


def build_optimizer(model: nn.Module, config: Config) -> Optimizer:
    """Return the optimizer of a config; ``momentum`` is the first beta of Adam."""
    options: dict[str, Any] = {"lr": config.initial_lr}
    if config.weight_decay is not None:
        options["weight_decay"] = config.weight_decay
    if config.optimizer == "sgd":
        return SGD(model.parameters(), momentum=config.momentum, **options)
    kind = Adam if config.optimizer == "adam" else AdamW
    return kind(model.parameters(), betas=(config.momentum, 0.999), **options)


def autocast(run: Run) -> torch.autocast:
    """Compute in bfloat16 if the config asks for it.

    It has the range of float32, so that no loss scaling is needed.
    """
    return parallel.autocast(run.config, run.group.device)
