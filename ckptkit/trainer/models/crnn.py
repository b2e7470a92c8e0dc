"""A network that reads a line of text: convolutions, then a recurrent layer over the columns.

The batch stays in dim 0 from the first layer to the scores, because DataParallel splits and
concatenates in dim 0. If a model returned [time, batch, ...], DataParallel would concatenate time
steps: two halves of [65, 16, n] would become [130, 16, n].
"""

from __future__ import annotations

from torch import Tensor, nn

from ckptkit.trainer.models.cnn import scaled


class Crnn(nn.Module):
    """Map lines [batch, channels, height, width] to scores [batch, width / 4, 1 + classes].

    Class 0 is the blank.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, width: float = 1.0) -> None:
        super().__init__()
        channels, height, _ = shape
        first, second, third, hidden = (scaled(n, width) for n in (16, 32, 64, 64))
        self.features = nn.Sequential(
            *_block(channels, first, (2, 2)),
            *_block(first, second, (2, 2)),
            *_block(second, third, (2, 1)),
        )
        self.recurrent = nn.LSTM(
            third * (height // 8), hidden, batch_first=True, bidirectional=True
        )
        self.scores = nn.Linear(2 * hidden, 1 + classes)

    def forward(self, lines: Tensor) -> Tensor:
        columns = self.features(lines).flatten(1, 2).transpose(1, 2)  # [batch, time, features]
        self.recurrent.flatten_parameters()  # in replicas, weights are not contiguous
        read, _ = self.recurrent(columns)
        scores: Tensor = self.scores(read)
        return scores


def _block(inputs: int, outputs: int, pool: tuple[int, int]) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True), nn.MaxPool2d(pool)]
