"""Two convolutions and three linear layers, for ten classes of 32 x 32 images."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import relu


def scaled(channels: int, width: float) -> int:
    """Return `channels` times `width`, rounded, but at least 1."""
    return max(1, round(channels * width))


class Cnn(nn.Module):
    """Map images [batch, channels, 32, 32] (or larger) to scores [batch, classes]."""

    def __init__(self, shape: tuple[int, ...], classes: int, width: float = 1.0) -> None:
        super().__init__()
        channels, height, across = shape
        first, second, third, fourth = (scaled(n, width) for n in (6, 16, 120, 84))
        self.conv1 = nn.Conv2d(channels, first, 5)
        self.conv2 = nn.Conv2d(first, second, 5)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(second * _left(height) * _left(across), third)
        self.fc2 = nn.Linear(third, fourth)
        self.fc3 = nn.Linear(fourth, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.pool(relu(self.conv1(images)))
        features = self.pool(relu(self.conv2(features))).flatten(1)
        scores: Tensor = self.fc3(relu(self.fc2(relu(self.fc1(features)))))
        return scores


def _left(size: int) -> int:
    """Return `size` after two unpadded 5 x 5 convolutions and two 2 x 2 poolings."""
    return ((size - 4) // 2 - 4) // 2
