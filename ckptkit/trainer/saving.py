"""Checkpoints: their contents, how they are written, and how a run resumes from one.

``bare`` is the state_dict; ``wrapped`` is ``{"model": state_dict, "epoch": n}``; ``full`` adds the
optimizer, the scheduler, the states of the random number generators, the arguments and the
versions: everything that an exact resume needs. Sharded models are saved as a folder of
``torch.distributed.checkpoint``, others as a file of ``torch.save``.
"""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

import ckptkit
from ckptkit.trainer import randomness
from ckptkit.trainer.config import MODELS, Config, RequestError, SavingError
from ckptkit.trainer.models import build
from ckptkit.trainer.run import Run

NEEDED = ("optimizer", "scheduler", "epoch", "rng")


def save(run: Run, path: Path) -> None:
    """Write the checkpoint in the form of the config.

    The first process writes; of a sharded model, all processes do.
    """
    if run.config.parallel == "fsdp":
        _save_shards(run, path)
    elif run.group.rank == 0:
        _save_file(_contents(run, _weights(run), run.optimizer.state_dict()), path)
    if run.group.world > 1:
        dist.barrier()


def _weights(run: Run) -> dict[str, Any]:
    return (run.wrapped if run.config.keep_module_prefix else run.model).state_dict()


def _contents(run: Run, weights: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, Any]:
    if run.config.save_form == "bare":
        return weights
    if run.config.save_form == "wrapped":
        return {"model": weights, "epoch": run.epoch}
    return {
        "model": weights,
        "optimizer": optimizer,
        "scheduler": run.scheduler.state_dict(),
        "epoch": run.epoch,
        "rng": randomness.state(),
        "args": run.config.as_dict(),
        "versions": versions(),
    }


def versions() -> dict[str, str | None]:
    """Return the versions that made a checkpoint; nothing about the machine."""
    cudnn = torch.backends.cudnn.version() if torch.cuda.is_available() else None  # type: ignore[no-untyped-call]
    return {
        "ckptkit": ckptkit.__version__,
        "torch": str(torch.__version__),  # a str of its own class, which weights_only refuses
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": str(cudnn) if cudnn else None,
    }


def _save_file(contents: dict[str, Any], path: Path) -> None:
    """Write a file atomically.

    torch gets an open file, so that the file's name is not written into it.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("wb") as file:
            torch.save(contents, file)
        os.replace(part, path)
    except (OSError, RuntimeError) as error:
        raise SavingError(f"cannot be written: {error}", where=str(path)) from error
    finally:
        part.unlink(missing_ok=True)


def _save_shards(run: Run, path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save as save_shards

    weights, optimizer = get_state_dict(run.model, run.optimizer)
    save_shards(_contents(run, weights, optimizer), checkpoint_id=path)


def resume(run: Run, path: Path) -> None:
    """Resume from a full checkpoint.

    Raises CkptkitError if it is not one, or not one of this model.
    """
    tree: Any = ckptkit.load(path, map_location="cpu", whole=True)
    missing = [name for name in NEEDED if not isinstance(tree, dict) or name not in tree]
    if missing:
        raise ckptkit.CkptkitError(
            f"holds weights but no {missing[0]}, so that training cannot go on",
            where=str(path),
            hint="--save-form full makes a checkpoint that it can",
        )
    if tree["epoch"] >= run.config.epochs:
        raise RequestError(
            f"has {tree['epoch']} of {run.config.epochs} epochs behind it",
            where=str(path),
            hint=f"--epochs {tree['epoch'] + 1} or more: they are counted from the beginning",
        )
    fit(run, path)
    run.optimizer.load_state_dict(tree["optimizer"])
    run.scheduler.load_state_dict(tree["scheduler"])
    run.epoch = tree["epoch"]
    randomness.restore(tree["rng"])


def fit(run: Run, path: Path) -> None:
    """Load the weights of a file, with or without ``module.``.

    Raises CkptkitError with the options that would fit.
    """
    if run.config.parallel == "fsdp":
        raise RequestError("--parallel fsdp cannot load a file", hint="--parallel none or ddp can")
    report = ckptkit.load_into(run.wrapped, path, strict=False)
    if not report.complete:
        raise ckptkit.CkptkitError(
            "; ".join([f"does not fit {run.config.model}", *report.faults()]),
            where=str(path),
            hint=_what_fits(run, path),
        )


def _what_fits(run: Run, path: Path) -> str:
    tree: Any = ckptkit.load(path, map_location="cpu", whole=True)
    made_with = tree.get("args") if isinstance(tree, dict) else None
    if isinstance(made_with, dict):
        options = (
            f"--{name} {made_with[name]}"
            for name in ("model", "data", "width")
            if name in made_with
        )
        return f"it was made with {' '.join(options)}"
    found = {
        name.removeprefix("module."): value.shape
        for name, value in ckptkit.load(path, map_location="cpu").items()
    }
    for option, config, shape in _candidates(run.config):
        with torch.device("meta"):
            model = build(config, shape, run.data.classes)
        if {name: value.shape for name, value in model.state_dict().items()} == found:
            return f"it fits {option}"
    return f"no model of this trainer has these weights at --width {run.config.width}"


def _candidates(config: Config) -> list[tuple[str, Config, tuple[int, ...]]]:
    """Return alternative configs, other models and data, to suggest in an error."""
    plain = replace(config, segments=0, memory_efficient=False)
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
