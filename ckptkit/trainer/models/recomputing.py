"""Models that can recompute activations in the backward pass to use less memory.

All models use non-reentrant checkpointing. Reentrant checkpointing would lose the gradients of a
segment if its inputs need no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, relu
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ckptkit.trainer.models.cnn import scaled

LAYERS, UNITS = 72, 1000  # Mlp: number of layers, number of units in each layer
BLOCKS = 4  # Generator: number of residual blocks
GROWTH = 12  # DenseNet: number of new channels per layer
DENSE = 4, 4, 4  # DenseNet: number of layers of each block
BOTTLENECK = 4  # DenseNet: number of channels between the two convolutions, divided by GROWTH


class Recomputing(nn.Module):
    """A model or layer that can recompute activations.

    ``segments`` is the number of segments, 0 for none. ``memory_efficient`` recomputes bottlenecks.
    ``preserve_rng`` restores the random state before recomputing. Only training recomputes.
    """

    segments = 0
    memory_efficient = False
    preserve_rng = True

    def checkpointed(self, function: Callable[..., Tensor], *inputs: Tensor, **how: Any) -> Tensor:
        """Call a function that keeps only its inputs for the backward pass."""
        how |= {"use_reentrant": False, "preserve_rng_state": self.preserve_rng}
        outputs: Tensor = checkpoint(function, *inputs, **how)
        return outputs

    def in_segments(self, layers: nn.Sequential, inputs: Tensor) -> Tensor:
        """Run the layers in segments.

        Each segment except the last keeps only its inputs for the backward pass. The last segment
        keeps all activations, because its backward pass comes first.
        """
        how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": self.preserve_rng}
        run: Any = checkpoint_sequential  # has no type annotations
        outputs: Tensor = run(layers, self.segments, inputs, **how)
        return outputs


class Mlp(Recomputing):
    """Map inputs [batch, ...] to scores [batch, classes] by 72 linear layers of 1000 units.

    There are no activation functions, so the model is a very deep linear classifier. With torch's
    default initialization, each layer scales its input by 1/sqrt(3), and no gradient reaches the
    first layer. If layers are initialized as identities, the model trains.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, width: float = 1.0) -> None:
        super().__init__()
        sizes = [prod(shape), *[scaled(UNITS, width)] * (LAYERS - 1), classes]
        self.layers = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))
        for layer in list(self.layers)[1:-1]:
            nn.init.eye_(layer.get_parameter("weight"))
            nn.init.zeros_(layer.get_parameter("bias"))

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.flatten(1)
        if self.segments and self.training:
            return self.in_segments(self.layers, inputs)
        scores: Tensor = self.layers(inputs)
        return scores


def _normed(layer: nn.Module, channels: int) -> list[nn.Module]:
    return [layer, nn.InstanceNorm2d(channels), nn.ReLU(inplace=True)]


def _upward(inputs: int, outputs: int) -> list[nn.Module]:
    layer = nn.ConvTranspose2d(inputs, outputs, 3, stride=2, padding=1, output_padding=1)
    return _normed(layer, outputs)


class Residual(nn.Module):
    """Return features [batch, channels, height, width] plus the output of two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.change = nn.Sequential(
            nn.ReflectionPad2d(1),
            *_normed(nn.Conv2d(channels, channels, 3), channels),
            nn.ReflectionPad2d(1),
            nn.Conv2d(channels, channels, 3),
            nn.InstanceNorm2d(channels),
        )

    def forward(self, features: Tensor) -> Tensor:
        changed: Tensor = features + self.change(features)
        return changed


class Generator(Recomputing):
    """Map images [batch, channels, height, width] from -1 to 1 to images of the same shape.

    The model downsamples, runs residual blocks, and upsamples. Height and width must be divisible
    by 4. With ``segments``, the residual blocks are split into segments. The downsampling layers,
    the upsampling layers, and each segment except the last keep only their inputs for the backward
    pass.
    """

    def __init__(self, shape: tuple[int, ...], width: float = 1.0) -> None:
        super().__init__()
        channels = shape[0]
        first, second, third = (scaled(n, width) for n in (16, 32, 64))
        self.initial = nn.Sequential(
            nn.ReflectionPad2d(3),
            *_normed(nn.Conv2d(channels, first, 7), first),
            *_normed(nn.Conv2d(first, second, 3, stride=2, padding=1), second),
            *_normed(nn.Conv2d(second, third, 3, stride=2, padding=1), third),
        )
        self.residual = nn.Sequential(*(Residual(third) for _ in range(BLOCKS)))
        self.upsampling = nn.Sequential(
            *_upward(third, second),
            *_upward(second, first),
            nn.ReflectionPad2d(3),
            nn.Conv2d(first, channels, 7),
            nn.Tanh(),
        )

    def forward(self, images: Tensor) -> Tensor:
        painted: Tensor
        if self.segments and self.training:
            features = self.checkpointed(self.initial, images)
            features = self.in_segments(self.residual, features)
            painted = self.checkpointed(self.upsampling, features)
        else:
            painted = self.upsampling(self.residual(self.initial(images)))
        return painted


class DenseLayer(Recomputing):
    """Map a list of earlier outputs [batch, channels, height, width] to `growth` new channels."""

    def __init__(self, inputs: int, growth: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, BOTTLENECK * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(BOTTLENECK * growth)
        self.conv2 = nn.Conv2d(BOTTLENECK * growth, growth, 3, padding=1, bias=False)
        self.dropout = dropout

    def forward(self, before: list[Tensor]) -> Tensor:
        if self.memory_efficient and self.training:
            middle = self.checkpointed(
                self._bottleneck, *before, context_fn=lambda: (nullcontext(), self._again())
            )
        else:
            middle = self._bottleneck(*before)
        new: Tensor = self.conv2(relu(self.norm2(middle)))
        return new

    def _bottleneck(self, *before: Tensor) -> Tensor:
        features = dropout(torch.cat(before, 1), self.dropout, self.training)
        middle: Tensor = self.conv1(relu(self.norm1(features)))
        return middle

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Recompute without a second update of the running statistics of BatchNorm."""
        norm = self.norm1
        momentum, counted = norm.momentum, norm.num_batches_tracked
        norm.momentum, norm.num_batches_tracked = 0.0, None
        try:
            yield
        finally:
            norm.momentum, norm.num_batches_tracked = momentum, counted


class DenseNet(nn.Module):
    """Map images [batch, channels, height, width] to scores [batch, classes].

    Each layer of a block gets the concatenated outputs of all earlier layers. If the concatenated
    outputs are kept for the backward pass, their memory is quadratic in the number of layers. With
    ``memory_efficient``, concatenation, norm, ReLU and the 1 x 1 convolution are recomputed in the
    backward pass. Gradients and checkpoints do not depend on ``memory_efficient``.
    """

    def __init__(
        self, shape: tuple[int, ...], classes: int, width: float = 1.0, dropout: float = 0.0
    ) -> None:
        super().__init__()
        growth = scaled(GROWTH, width)
        channels = 2 * growth
        self.stem = nn.Conv2d(shape[0], channels, 3, stride=2, padding=1, bias=False)
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        for number in DENSE:
            starts = range(channels, channels + number * growth, growth)
            self.blocks.append(nn.ModuleList(DenseLayer(n, growth, dropout) for n in starts))
            channels += number * growth
            self.transitions.append(
                nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), nn.AvgPool2d(2))
            )
        self.classifier = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stem(images)
        for block, transition in zip(self.blocks, self.transitions, strict=True):
            made = [features]
            for layer in block:  # type: ignore[attr-defined]
                made.append(layer(made))
            features = transition(torch.cat(made, 1))
        scores: Tensor = self.classifier(features.mean((2, 3)))
        return scores
