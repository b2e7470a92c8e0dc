"""The parts of a training run, put together."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import SGD
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
    optimizer: SGD
    scheduler: StepLR
    epoch: int = 0


def prepare(config: Config, group: parallel.Group) -> Run:
    """Seed, load the data, build and wrap the model: a run before its first epoch."""
    task = TASKS[config.model]
    loaded = data.load(config, task)
    randomness.seed(config)
    model = build(config, loaded.shape, loaded.classes).to(group.device)
    wrapped = parallel.wrap(model, config, group)
    optimizer = SGD(model.parameters(), lr=config.rate, momentum=config.momentum)
    scheduler = StepLR(optimizer, config.lr_step or sys.maxsize, config.lr_gamma)
    loss = parallel.split_loss(task.loss)
    return Run(config, group, loaded, task, model, wrapped, loss, optimizer, scheduler)


def autocast(run: Run) -> torch.autocast:
    """Use bfloat16 if the config asks for it.

    It has the range of float32, so that no loss scaling is needed.
    """
    return torch.autocast(run.group.device.type, torch.bfloat16, enabled=run.config.amp)
