"""Errors that say what would help: memory that is not enough, a checkpoint that does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

import ckptkit
from ckptkit.trainer.config import MODELS, SEGMENTED, Config, option
from ckptkit.trainer.models import build
from ckptkit.trainer.run import Run


@contextmanager
def on_memory(config: Config) -> Iterator[None]:
    """Turn the out-of-memory error of a GPU into one that names the options that need less."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise ckptkit.CkptkitError(
            f"the GPU does not have enough memory: {str(error).split('. ')[0]}",
            hint=_needs_less(config),
        ) from error


def _needs_less(config: Config) -> str:
    """Return options for smaller micro-batches with the same steps, and for recomputing."""
    ways = []
    if config.batch_size > 1:
        half, twice = config.batch_size // 2, config.accumulate * 2
        ways.append(f"--batch-size {half} --accumulate {twice}")
    if config.model in SEGMENTED and not config.segments:
        ways.append("--segments 4")
    if config.model == "densenet" and not config.memory_efficient:
        ways.append("--memory-efficient")
    return ", or ".join([*ways, "a smaller --width"])


def what_fits(run: Run, path: Path) -> str:
    """Return the options with which the weights in a file fit the model."""
    tree: Any = ckptkit.load(path, map_location="cpu", whole=True)
    made_with = tree.get("args") if isinstance(tree, dict) else None
    if isinstance(made_with, dict):
        names = [name for name in ("model", "data", "width") if name in made_with]
        return f"it was made with {' '.join(option(name, made_with[name]) for name in names)}"
    weights = ckptkit.load(path, map_location="cpu")
    found = {name.removeprefix("module."): value.shape for name, value in weights.items()}
    for options, config, shape in _candidates(run.config):
        with torch.device("meta"):
            model = build(config, shape, run.data.classes)
        if {name: value.shape for name, value in model.state_dict().items()} == found:
            return f"it fits {options}"
    return f"no model of this trainer has these weights at --width {run.config.width}"


def _candidates(config: Config) -> list[tuple[str, Config, tuple[int, ...]]]:
    """Return alternative configs, other models and data, to suggest in an error."""
    plain = replace(config, segments=0, memory_efficient=False, dropout=0.0)
    shapes: dict[str, tuple[int, ...]] = {
        "digits": (1, 32, 32),
        "random": (3, 32, 32),
        "cifar10:DIR": (3, 32, 32),
    }
    found = []
    for name, data in product(MODELS, shapes):
        shape = (1000,) if (name, data) == ("mlp", "random") else shapes[data]
        found.append((f"--model {name} --data {data}", replace(plain, model=name), shape))
    return found
