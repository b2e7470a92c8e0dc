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
from ckptkit.trainer.models.recomputing import DenseNet, Generator, Mlp, Recomputing

__all__ = ["Cnn", "Crnn", "DenseNet", "Generator", "Mlp", "build"]


def build(config: Config, shape: tuple[int, ...], classes: int) -> nn.Module:
    """Build the model of a config, for inputs of `shape` (without the batch)."""
    model: nn.Module
    if config.model == "generator":
        model = Generator(shape, config.width)
    elif config.model == "densenet":
        model = DenseNet(shape, classes, config.width, config.dropout)
    else:
        model = {"cnn": Cnn, "crnn": Crnn, "mlp": Mlp}[config.model](shape, classes, config.width)
    for each in model.modules():
        if isinstance(each, Recomputing):
            each.segments, each.preserve_rng = config.segments, config.preserve_rng
            each.memory_efficient = config.memory_efficient
    return model
