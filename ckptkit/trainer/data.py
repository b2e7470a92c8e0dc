"""Load data sets, and define the learning tasks.

``digits`` are the 1,797 handwritten digits of scikit-learn (E. Alpaydin and C. Kaynak, UCI, CC BY
4.0), enlarged from 8 x 8 to 32 x 32 pixels to fit every model. ``cifar10:DIR`` is the folder of the
Python version of CIFAR-10. ``random`` is noise with random labels, for any input size. Models
cannot learn from noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, ctc_loss, interpolate, mse_loss
from torch.utils.data import DataLoader, Dataset

import ckptkit
from ckptkit.trainer.config import DATA, Config, RequestError

CLASSES = 10
HELD_OUT = 5  # every fifth digit goes into the test set, so both sets contain all writers
RANDOM = 512, 128  # `random`: number of training images and number of test images
TRAIN_FILES = tuple(f"data_batch_{n}" for n in range(1, 6))
TEST_FILE = "test_batch"
LINE = 4  # number of characters in a line of text

Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class LearningTask:
    """A learning task, defined by three functions.

    ``prepare(images [n, channels, height, width] from 0 to 1, labels [n])`` returns inputs and
    targets. ``loss(outputs, targets)`` returns the mean loss of a batch. ``correct(outputs,
    targets)`` returns a number from 0 to 1 for each output. The training set contains the real
    images `orders` times, each time in a different order.
    """

    prepare: Callable[[Tensor, Tensor], Labelled]
    loss: Callable[[Tensor, Tensor], Tensor]
    correct: Callable[[Tensor, Tensor], Tensor]
    orders: int = 1


def _as_lines(images: Tensor, labels: Tensor) -> Labelled:
    """Concatenate every four images to a line: [n / 4, channels, height, 4 * width].

    Remaining images are dropped.
    """
    lines = len(images) // LINE
    images = images[: lines * LINE].view(lines, LINE, *images.shape[1:])
    return images.permute(0, 2, 3, 1, 4).flatten(3), labels[: lines * LINE].view(lines, LINE)


def _ctc(scores: Tensor, texts: Tensor) -> Tensor:
    """Return the CTC loss of scores [batch, time, 1 + classes]. Class 0 is the blank.

    ``ctc_loss`` expects the time in dim 0.
    """
    steps = scores.float().log_softmax(2).transpose(0, 1)
    times, lengths = (torch.full((len(texts),), n) for n in (len(steps), texts.shape[1]))
    return ctc_loss(steps, texts + 1, times, lengths, zero_infinity=True)


def _reads(scores: Tensor, texts: Tensor) -> Tensor:
    """Return 1 for each line that the model reads correctly, and 0 for all other lines.

    A line is read correctly if its best path, without repetitions and blanks, equals its target.
    """
    best = scores.argmax(2).cpu()
    read = [[symbol - 1 for symbol in row.unique_consecutive().tolist() if symbol] for row in best]
    return torch.tensor([float(a == b) for a, b in zip(read, texts.tolist(), strict=True)])


def _same_side(paintings: Tensor, targets: Tensor) -> Tensor:
    """For each output, return the fraction of elements whose sign equals the sign in the target."""
    return ((paintings > 0) == (targets > 0)).float().flatten(1).mean(1)


CLASSIFY = LearningTask(
    lambda images, labels: (images, labels),
    cross_entropy,
    lambda scores, labels: (scores.argmax(1) == labels).float(),
)
# One order of the digits makes only 359 lines of text, too few to train a model.
READ = LearningTask(_as_lines, _ctc, _reads, orders=6)
REDRAW = LearningTask(  # inputs and targets are images from -1 to 1
    lambda images, labels: (images * 2 - 1, images * 2 - 1), mse_loss, _same_side
)
TASKS = {
    "cnn": CLASSIFY, "mlp": CLASSIFY, "crnn": READ, "densenet": CLASSIFY, "generator": REDRAW,
}  # fmt: skip


@dataclass(frozen=True)
class Data:
    """Inputs [n, ...] and targets [n, ...] of the training, test and validation set."""

    train: Labelled
    test: Labelled
    classes: int = CLASSES
    validation: Labelled | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train[0].shape[1:])


def load(config: Config) -> Data:
    """Load the data of a config, prepared for the task of its model.

    Raises CkptkitError if the data is missing or invalid.
    """
    kind, _, folder = config.data.partition(":")
    if config.data == "digits":
        train, test = _digits()
    elif config.data == "random":
        shape = (1000,) if config.model == "mlp" else (3, 32, 32)
        generator = torch.Generator().manual_seed(config.seed)
        train, test = (
            (
                torch.rand(count, *shape, generator=generator),
                torch.randint(CLASSES, (count,), generator=generator),
            )
            for count in RANDOM
        )
    elif kind == "cifar10" and folder:
        train, test = _cifar10(Path(folder))
    else:
        raise RequestError(f"unknown data set {config.data!r}", hint=f"use --data with {DATA}")
    task, validation = TASKS[config.model], None
    if config.held_out:
        held = torch.arange(len(train[0])) % config.held_out == config.held_out - 1
        validation = task.prepare(train[0][held], train[1][held])
        train = train[0][~held], train[1][~held]
        if not len(train[0]):
            raise RequestError(
                "--validation 1 holds out every image, so no training image is left",
                hint="use --validation 10",
            )
    if config.data != "random":
        train = _in_orders(train, task.orders)
    return Data(task.prepare(*train), task.prepare(*test), validation=validation)


def _in_orders(images: Labelled, orders: int) -> Labelled:
    """Return the images, followed by `orders` - 1 shuffled copies of the images."""
    generator, count = torch.Generator().manual_seed(0), len(images[0])
    shuffled = (torch.randperm(count, generator=generator) for _ in range(orders - 1))
    numbers = torch.cat([torch.arange(count), *shuffled])
    return images[0][numbers], images[1][numbers]


def _digits() -> tuple[Labelled, Labelled]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise RequestError(
            "the digits need scikit-learn", hint="pip install scikit-learn, or use --data random"
        ) from error
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    images = interpolate(images, scale_factor=4, mode="bilinear", align_corners=False)
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    test = torch.arange(len(images)) % HELD_OUT == 0
    return (images[~test], labels[~test]), (images[test], labels[test])


def _cifar10(folder: Path) -> tuple[Labelled, Labelled]:
    needed = (*TRAIN_FILES, TEST_FILE)
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        inner = folder / "cifar-10-batches-py"
        hint = (
            "unpack cifar-10-python.tar.gz, and use the folder that contains "
            f"{TRAIN_FILES[0]} to {TEST_FILE}"
        )
        if inner.is_dir():
            hint = f"use --data cifar10:{inner}"
        elif (folder / "train").is_file() and (folder / "meta").is_file():
            hint = "this is CIFAR-100, which has other labels"
        what = f"is not the folder of CIFAR-10: {missing[0]} is missing"
        raise ckptkit.CkptkitError(what, where=str(folder), hint=hint)
    *batches, test = (_batch(folder / name) for name in needed)
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return (images, labels), test


def _batch(path: Path) -> Labelled:
    """Return images [n, 3, 32, 32] from 0 to 1 and labels [n].

    ckptkit reads the pickle (written by Python 2) without executing it.
    """
    tree: Any = ckptkit.load(path, whole=True)
    entries = {}
    for key, value in tree.items() if isinstance(tree, dict) else ():
        entries[key.decode("latin-1") if isinstance(key, bytes) else key] = value
    try:
        data = torch.from_numpy(entries["data"])
        labels = torch.tensor(entries["labels"], dtype=torch.int64)
    except (KeyError, TypeError, ValueError) as error:
        raise ckptkit.CkptkitError(
            "contains no images and labels of CIFAR-10", where=str(path)
        ) from error
    right = (
        data.dtype == torch.uint8 and data.shape == (len(labels), 3 * 32 * 32) and labels.dim() == 1
    )
    if not right or not len(labels) or labels.min() < 0 or labels.max() >= CLASSES:
        raise ckptkit.CkptkitError(
            "the images and labels are not those of CIFAR-10", where=str(path)
        )
    return data.view(-1, 3, 32, 32).float() / 255, labels


def split(tensor: Tensor, size: int) -> list[Tensor]:
    """Split along dim 0 into parts of `size`. The last part may be smaller."""
    return [tensor[start : start + size] for start in range(0, len(tensor), size)]


class Batches(Dataset[Labelled]):
    """A dataset of whole batches: ``batches[numbers]`` returns the inputs and targets of the images
    with the indices `numbers`."""

    def __init__(self, labelled: Labelled) -> None:
        self.inputs, self.targets = labelled

    def __getitem__(self, numbers: Tensor) -> Labelled:
        return self.inputs[numbers], self.targets[numbers]


def loaded(labelled: Labelled, batches: list[Tensor], workers: int, pinned: bool) -> Iterator[Any]:
    """Yield the inputs and targets of each batch. `workers` processes load batches ahead.

    A GPU can copy from pinned memory while it computes: ``x.to(device, non_blocking=True)``.
    """
    loader: Any = DataLoader(
        Batches(labelled),
        batch_size=None,  # the sampler returns whole batches
        sampler=batches,
        num_workers=workers,
        pin_memory=pinned,
        # Without this generator, the loader would draw from the global generator.
        generator=torch.Generator(),
    )
    return iter(loader)
