"""The models, a file each. All are batch first and take images [batch, channels, height, width]."""

from __future__ import annotations

from torch import nn

from ckptkit.trainer.config import Config
from ckptkit.trainer.models.cnn import Cnn
from ckptkit.trainer.models.crnn import Crnn
from ckptkit.trainer.models.densenet import DenseNet
from ckptkit.trainer.models.generator import Generator
from ckptkit.trainer.models.mlp import Mlp
from ckptkit.trainer.tasks import CLASSIFY, READ, REDRAW, Task

TASKS: dict[str, Task] = {
    "cnn": CLASSIFY,
    "mlp": CLASSIFY,
    "crnn": READ,
    "densenet": CLASSIFY,
    "generator": REDRAW,
}

__all__ = ["TASKS", "Cnn", "Crnn", "DenseNet", "Generator", "Mlp", "build"]


def build(config: Config, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build the model of a config, for inputs of `shape` (without the batch)."""
    width, preserve_rng = config.width, config.preserve_rng
    if config.model == "cnn":
        return Cnn(shape, classes, width)
    if config.model == "mlp":
        return Mlp(shape, classes, width, config.segments, preserve_rng=preserve_rng)
    if config.model == "crnn":
        return Crnn(shape, classes, width)
    if config.model == "densenet":
        return DenseNet(
            shape,
            classes,
            width,
            dropout=config.dropout,
            memory_efficient=config.memory_efficient,
            preserve_rng=preserve_rng,
        )
    return Generator(shape, width, config.segments, preserve_rng)
