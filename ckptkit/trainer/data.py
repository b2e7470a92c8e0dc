"""Data sets.

``digits`` are the 1,797 handwritten digits that scikit-learn bundles (E. Alpaydin and C. Kaynak,
UCI, CC BY 4.0), enlarged from 8 x 8 to 32 x 32 pixels so that they fit every model. ``cifar10:DIR``
is the folder of CIFAR-10's python version. ``random`` is noise with random labels: nothing to
learn, but an input of any size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ckptkit
from ckptkit.trainer.config import DATA, Config, RequestError
from ckptkit.trainer.tasks import Task

CLASSES = 10
HELD_OUT = 5  # every fifth digit is one of the test set: both sets have all writers
RANDOM = 512, 128  # images to train on, to test with
TRAIN_FILES = tuple(f"data_batch_{n}" for n in range(1, 6))
TEST_FILE = "test_batch"

Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Data:
    """Inputs [n, ...] and targets [n, ...] of training and test set, and the number of classes."""

    train: Labelled
    test: Labelled
    classes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one input."""
        return tuple(self.train[0].shape[1:])


def load(config: Config, task: Task) -> Data:
    """Load the data of a config, prepared for `task`.

    Raises CkptkitError if it is missing or invalid.
    """
    kind, _, folder = config.data.partition(":")
    if config.data == "digits":
        train, test = _digits()
    elif config.data == "random":
        train, test = _random((1000,) if config.model == "mlp" else (3, 32, 32), config.seed)
    elif kind == "cifar10" and folder:
        train, test = _cifar10(Path(folder))
    else:
        raise RequestError(f"no data is called {config.data!r}", hint=f"--data {DATA}")
    return Data(task.prepare(*train), task.prepare(*test), CLASSES)


def _digits() -> tuple[Labelled, Labelled]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise RequestError(
            "the digits come with scikit-learn", hint="pip install scikit-learn, or --data random"
        ) from error
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    images = torch.nn.functional.interpolate(
        images, scale_factor=4, mode="bilinear", align_corners=False
    )
    labels = torch.tensor(bunch.target, dtype=torch.int64)
    test = torch.arange(len(images)) % HELD_OUT == 0
    return (images[~test], labels[~test]), (images[test], labels[test])


def _random(shape: tuple[int, ...], seed: int) -> tuple[Labelled, Labelled]:
    generator = torch.Generator().manual_seed(seed)

    def labelled(count: int) -> Labelled:
        images = torch.rand(count, *shape, generator=generator)
        return images, torch.randint(CLASSES, (count,), generator=generator)

    return labelled(RANDOM[0]), labelled(RANDOM[1])


def _cifar10(folder: Path) -> tuple[Labelled, Labelled]:
    needed = (*TRAIN_FILES, TEST_FILE)
    missing = [name for name in needed if not (folder / name).is_file()]
    if missing:
        raise ckptkit.CkptkitError(
            f"is not the folder of CIFAR-10: no {missing[0]}",
            where=str(folder),
            hint=_advice(folder),
        )
    batches = [_batch(folder / name) for name in needed]
    train = tuple(torch.cat(parts) for parts in zip(*batches[:-1], strict=True))
    return (train[0], train[1]), batches[-1]


def _advice(folder: Path) -> str:
    inner = folder / "cifar-10-batches-py"
    if inner.is_dir():
        return f"--data cifar10:{inner}"
    if (folder / "train").is_file() and (folder / "meta").is_file():
        return "that is CIFAR-100, which has other labels"
    files = f"{TRAIN_FILES[0]} to {TEST_FILE}"
    return f"unpack cifar-10-python.tar.gz, and name the folder that holds {files}"


def _batch(path: Path) -> Labelled:
    """Return images [n, 3, 32, 32] from 0 to 1 and labels [n].

    The pickle, written by Python 2, is read symbolically, not run.
    """
    tree: Any = ckptkit.load(path, whole=True)
    entries = {_text(key): value for key, value in tree.items()} if isinstance(tree, dict) else {}
    try:
        data, labels = (
            torch.from_numpy(entries["data"]),
            torch.tensor(entries["labels"], dtype=torch.int64),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ckptkit.CkptkitError(
            "holds no images and labels of CIFAR-10", where=str(path)
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
    """Split along dim 0 into parts of `size`, the last one smaller."""
    return [tensor[start : start + size] for start in range(0, len(tensor), size)]


def _text(key: object) -> object:
    return key.decode("latin-1") if isinstance(key, bytes) else key
