"""Training tasks: inputs and targets, the loss, and the measure of accuracy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, ctc_loss, mse_loss

LINE = 4  # characters in a line of text


@dataclass(frozen=True)
class Task:
    """Three functions.

    ``prepare(images [n, channels, height, width] of 0 to 1, labels [n])`` gives inputs and targets,
    one for each input; ``loss(outputs, targets)`` the mean over a batch; ``correct(outputs,
    targets)`` a number from 0 to 1 for each output.
    """

    prepare: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    correct: Callable[[Tensor, Tensor], Tensor]


def _as_they_are(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return images, labels


def _is_best(scores: Tensor, labels: Tensor) -> Tensor:
    return (scores.argmax(1) == labels).float()


def _as_lines(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenate neighboring images to lines: [n / 4, channels, height, 4 * width].

    Left-over images are dropped.
    """
    lines = len(images) // LINE
    images = images[: lines * LINE].view(lines, LINE, *images.shape[1:])
    return images.permute(0, 2, 3, 1, 4).flatten(3), labels[: lines * LINE].view(lines, LINE)


def _ctc(scores: Tensor, texts: Tensor) -> Tensor:
    """Return the CTC loss of scores [batch, time, 1 + classes], the blank first.

    Only ``ctc_loss`` wants the time in dim 0.
    """
    steps = scores.float().log_softmax(2).transpose(0, 1)
    times, lengths = (torch.full((len(texts),), n) for n in (len(steps), texts.shape[1]))
    return ctc_loss(steps, texts + 1, times, lengths, zero_infinity=True)


def _reads(scores: Tensor, texts: Tensor) -> Tensor:
    """Return 1 for each line whose best path, without repetitions and blanks, equals the text."""
    best = scores.argmax(2).cpu()
    read = [[symbol - 1 for symbol in row.unique_consecutive().tolist() if symbol] for row in best]
    return torch.tensor([float(a == b) for a, b in zip(read, texts.tolist(), strict=True)])


def _as_paintings(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the images themselves, scaled to -1 to 1, as inputs and targets."""
    return images * 2 - 1, images * 2 - 1


def _same_side(paintings: Tensor, targets: Tensor) -> Tensor:
    """Return the share of elements with the right sign."""
    return ((paintings > 0) == (targets > 0)).float().flatten(1).mean(1)


CLASSIFY = Task(_as_they_are, cross_entropy, _is_best)
READ = Task(_as_lines, _ctc, _reads)
REDRAW = Task(_as_paintings, mse_loss, _same_side)
