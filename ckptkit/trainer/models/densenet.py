"""A small DenseNet whose bottlenecks can be recomputed instead of kept.

Each layer of a block gets the concatenated outputs of all layers before it; kept for the backward
pass, these take memory quadratic in the number of layers. With ``memory_efficient``, concatenation,
norm, ReLU and the 1 x 1 convolution are computed again in the backward pass. The second computation
must not update the running statistics of the norm a second time: :func:`_recompute` prevents that,
so that both ways give the same gradients and the same checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, relu
from torch.utils.checkpoint import checkpoint

from ckptkit.trainer.models.scale import scaled

GROWTH, LAYERS = 12, (4, 4, 4)
BOTTLENECK = 4  # channels between the convolutions, as a multiple of the growth


class DenseLayer(nn.Module):
    """Earlier outputs, a list of [batch, channels, height, width], to `growth` new channels."""

    def __init__(
        self,
        inputs: int,
        growth: int,
        dropout: float,
        memory_efficient: bool,
        preserve_rng: bool = True,
    ) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, BOTTLENECK * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(BOTTLENECK * growth)
        self.conv2 = nn.Conv2d(BOTTLENECK * growth, growth, 3, padding=1, bias=False)
        self.dropout = dropout
        self.memory_efficient, self.preserve_rng = memory_efficient, preserve_rng

    def forward(self, before: list[Tensor]) -> Tensor:
        if self.memory_efficient and self.training:
            middle = checkpoint(
                self._bottleneck,
                *before,
                use_reentrant=False,
                preserve_rng_state=self.preserve_rng,
                context_fn=self._contexts,
            )
        else:
            middle = self._bottleneck(*before)
        new: Tensor = self.conv2(relu(self.norm2(middle)))
        return new

    def _bottleneck(self, *before: Tensor) -> Tensor:
        features = dropout(torch.cat(before, 1), self.dropout, self.training)
        middle: Tensor = self.conv1(relu(self.norm1(features)))
        return middle

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _recompute(self.norm1)


@contextmanager
def _recompute(norm: nn.BatchNorm2d) -> Iterator[None]:
    """Compute the same again, without updating the running statistics."""
    momentum, counted = norm.momentum, norm.num_batches_tracked
    norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        yield
    finally:
        norm.momentum, norm.num_batches_tracked = momentum, counted


class DenseNet(nn.Module):
    """Images [batch, channels, height, width] to scores [batch, classes]."""

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        width: float = 1.0,
        *,
        dropout: float = 0.0,
        memory_efficient: bool = False,
        preserve_rng: bool = True,
    ) -> None:
        super().__init__()
        growth = scaled(GROWTH, width)
        channels = 2 * growth
        self.stem = nn.Conv2d(shape[0], channels, 3, stride=2, padding=1, bias=False)
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        for number in LAYERS:
            starts = range(channels, channels + number * growth, growth)
            self.blocks.append(
                nn.ModuleList(
                    DenseLayer(n, growth, dropout, memory_efficient, preserve_rng) for n in starts
                )
            )
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
