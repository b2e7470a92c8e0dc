"""Define the models. Their inputs are images [batch, channels, height, width].

The models in :mod:`recomputing` can recompute activations instead of keeping them. The modules
:mod:`cnn` and :mod:`crnn` must keep their names, because fixtures contain pickled models from these
modules.
"""

from __future__ import annotations

from torch import nn

from ckptkit.trainer.config import Config
from ckptkit.trainer.models.cnn import Cnn
from ckptkit.trainer.models.crnn import Crnn
from ckptkit.trainer.models.recomputing import DenseNet, Generator, Mlp

__all__ = ["Cnn", "Crnn", "DenseNet", "Generator", "Mlp", "build"]


def build(config: Config, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build the model of a config, for inputs of `shape` (without the batch)."""
    width, preserve_rng = config.width, config.preserve_rng
    if config.model == "mlp":
        return Mlp(shape, classes, width, config.segments, preserve_rng)
    if config.model == "generator":
        return Generator(shape, width, config.segments, preserve_rng)
    if config.model == "densenet":
        return DenseNet(
            shape, classes, width, config.dropout, config.memory_efficient, preserve_rng
        )
    return (Cnn if config.model == "cnn" else Crnn)(shape, classes, width)
