"""72 linear layers of 1000 units: deep enough to make saving activations worthwhile.

There is nothing between the layers, so the model is a very deep linear classifier. With torch's own
initialization each layer shrinks its input to 1/sqrt(3) and no gradient reaches the first one;
initialized as an identity, each passes its input on, and the model trains.
"""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from ckptkit.trainer.models.scale import scaled

LAYERS, UNITS = 72, 1000


class Mlp(nn.Module):
    """Inputs [batch, ...] to scores [batch, classes].

    With ``segments`` the layers are run in that many parts, which keep only their inputs and are
    run again in the backward pass (except the last part, whose backward pass comes first).
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        width: float = 1.0,
        segments: int = 0,
        layers: int = LAYERS,
        preserve_rng: bool = True,
    ) -> None:
        super().__init__()
        units, inputs = scaled(UNITS, width), 1
        for size in shape:
            inputs *= size
        sizes = [inputs, *[units] * (layers - 1), classes]
        self.layers = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))
        for layer in list(self.layers)[1:-1]:
            nn.init.eye_(layer.get_parameter("weight"))
            nn.init.zeros_(layer.get_parameter("bias"))
        self.segments, self.preserve_rng = segments, preserve_rng

    def forward(self, inputs: Tensor) -> Tensor:
        inputs = inputs.flatten(1)
        scores: Tensor
        if self.segments and self.training:
            # The reentrant kind would lose the gradients of every part whose input needs none: all
            # but the last.
            scores = checkpoint_sequential(  # type: ignore[no-untyped-call]
                self.layers,
                self.segments,
                inputs,
                use_reentrant=False,
                preserve_rng_state=self.preserve_rng,
            )
        else:
            scores = self.layers(inputs)
        return scores
