"""An image to an image of the same size: downsampling, residual blocks, upsampling."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from ckptkit.trainer.models.scale import scaled

BLOCKS = 4


class Residual(nn.Module):
    """Features [batch, channels, height, width] plus two convolutions of them."""

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


class Generator(nn.Module):
    """Images [batch, channels, height, width] from -1 to 1 to images of that shape.

    Sides are multiples of 4. With ``segments`` the first and last part keep only their input for
    the backward pass, and so do the segments of the residual blocks in between. The images need no
    gradient for that, and get none.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        width: float = 1.0,
        segments: int = 0,
        preserve_rng: bool = True,
    ) -> None:
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
            *_normed(_upward(third, second), second),
            *_normed(_upward(second, first), first),
            nn.ReflectionPad2d(3),
            nn.Conv2d(first, channels, 7),
            nn.Tanh(),
        )
        self.segments, self.preserve_rng = segments, preserve_rng

    def forward(self, images: Tensor) -> Tensor:
        painted: Tensor
        if self.segments and self.training:
            how: dict[str, Any] = {
                "use_reentrant": False,
                "preserve_rng_state": self.preserve_rng,
            }
            features = checkpoint(self.initial, images, **how)
            features = checkpoint_sequential(  # type: ignore[no-untyped-call]
                self.residual, self.segments, features, **how
            )
            painted = checkpoint(self.upsampling, features, **how)
        else:
            painted = self.upsampling(self.residual(self.initial(images)))
        return painted


def _normed(layer: nn.Module, channels: int) -> list[nn.Module]:
    return [layer, nn.InstanceNorm2d(channels), nn.ReLU(inplace=True)]


def _upward(inputs: int, outputs: int) -> nn.Module:
    return nn.ConvTranspose2d(inputs, outputs, 3, stride=2, padding=1, output_padding=1)
