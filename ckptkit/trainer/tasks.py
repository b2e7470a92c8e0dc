"""What a model is trained for: which images and targets it sees, its loss, and what counts as
right."""

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
    """Neighbouring images side by side: [n / 4, channels, height, 4 * width]; what is left over is
    dropped."""
    lines = len(images) // LINE
    images = images[: lines * LINE].view(lines, LINE, *images.shape[1:])
    return images.permute(0, 2, 3, 1, 4).flatten(3), labels[: lines * LINE].view(lines, LINE)


def _ctc(scores: Tensor, texts: Tensor) -> Tensor:
    """Scores [batch, time, 1 + classes], the blank first; ``ctc_loss`` alone wants the time in
    front."""
    steps = scores.float().log_softmax(2).transpose(0, 1)
    times, lengths = (torch.full((len(texts),), n) for n in (len(steps), texts.shape[1]))
    return ctc_loss(steps, texts + 1, times, lengths, zero_infinity=True)


def _reads(scores: Tensor, texts: Tensor) -> Tensor:
    """Whether the best path, without repetitions and blanks, is the whole line."""
    best = scores.argmax(2).cpu()
    read = [[symbol - 1 for symbol in row.unique_consecutive().tolist() if symbol] for row in best]
    return torch.tensor([float(a == b) for a, b in zip(read, texts.tolist(), strict=True)])


def _as_paintings(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The images themselves, from -1 to 1, are the targets."""
    return images * 2 - 1, images * 2 - 1


def _same_side(paintings: Tensor, targets: Tensor) -> Tensor:
    """The share of elements on the right side of grey."""
    return ((paintings > 0) == (targets > 0)).float().flatten(1).mean(1)


CLASSIFY = Task(_as_they_are, cross_entropy, _is_best)
READ = Task(_as_lines, _ctc, _reads)
REDRAW = Task(_as_paintings, mse_loss, _same_side)
