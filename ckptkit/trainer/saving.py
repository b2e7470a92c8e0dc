"""Checkpoints: their contents, how they are written, and how a run resumes from one.

``bare`` is the state_dict; ``wrapped`` is ``{"model": state_dict, "epoch": n}``; ``full`` adds the
optimizer, the scheduler, the states of the random number generators, the arguments and the
versions: everything that an exact resume needs. Sharded models are saved as a folder of
``torch.distributed.checkpoint``, others as a file of ``torch.save``. ckptkit reads either.
"""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import replace
from glob import escape
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist

import ckptkit
from ckptkit.core.text import some
from ckptkit.trainer.config import (
    CHANGEABLE,
    DEFAULTS,
    MODELS,
    Config,
    RequestError,
    SavingError,
    typed,
)
from ckptkit.trainer.models import build
from ckptkit.trainer.run import Run, random_states, restore_random

NEEDED = ("optimizer", "scheduler", "epoch", "rng")
State = dict[str, Any]


def save(run: Run, path: Path) -> None:
    """Write the checkpoint in the form of the config.

    The first process writes; of a sharded model, all processes do.
    """
    states = run.group.all_gather(random_states())
    if run.config.parallel == "fsdp":
        _save_shards(run, path, states)
    elif run.group.rank == 0:
        weights = (run.wrapped if run.config.keep_module_prefix else run.model).state_dict()
        _save_file(_contents(run, weights, run.optimizer.state_dict(), states), path)
    if run.group.world > 1:
        dist.barrier()


def numbered(out: Path, epoch: int | str) -> Path:
    """Return the name of the checkpoint after an epoch: ``run.epoch3.pth``."""
    return out.with_name(f"{out.stem}.epoch{epoch}{out.suffix}")


def best(out: Path) -> Path:
    """Return the name of the checkpoint with the best accuracy: ``run.best.pth``."""
    return out.with_name(f"{out.stem}.best{out.suffix}")


def remove_leftovers(out: Path) -> None:
    """Remove the unfinished files and folders that a killed run with the same OUT left."""
    for path in (out, best(out)):
        _remove(_part(path))
    for part in out.parent.glob(escape(f".{out.stem}.epoch") + "*" + escape(f"{out.suffix}.part")):
        _remove(part)


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _remove(part: Path) -> None:
    if part.is_dir():
        shutil.rmtree(part, ignore_errors=True)
    else:
        part.unlink(missing_ok=True)


def _contents(run: Run, weights: State, optimizer: State, states: list[State]) -> State:
    """Return what is saved; `states` are those of the random generators of each process."""
    if run.config.save_form == "bare":
        return weights
    if run.config.save_form == "wrapped":
        return {"model": weights, "epoch": run.epoch}
    contents = {
        "model": weights,
        "optimizer": optimizer,
        "scheduler": run.scheduler.state_dict(),
        "epoch": run.epoch,
        "rng": states[0],
        "args": run.config.as_dict(),
        "versions": versions(),
    }
    if len(states) > 1:
        contents["rng_of_ranks"] = states
    if run.config.save_best:
        contents["best_accuracy"] = run.best_accuracy
    return contents


def versions() -> dict[str, str | None]:
    """Return the versions that made a checkpoint; nothing about the machine."""
    backend: Any = torch.backends.cudnn  # without types
    cudnn = backend.version() if torch.cuda.is_available() else None
    return {
        "ckptkit": ckptkit.__version__,
        "torch": str(torch.__version__),  # a str of its own class, which weights_only refuses
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": str(cudnn) if cudnn else None,
    }


def _save_file(contents: State, path: Path) -> None:
    """Write a file atomically.

    torch gets an open file, so that the file's name is not written into it.
    """
    part = _part(path)
    try:
        with part.open("wb") as file:
            torch.save(contents, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except (OSError, RuntimeError) as error:
        raise SavingError(f"cannot be written: {error}", where=str(path)) from error
    finally:
        part.unlink(missing_ok=True)


def _save_shards(run: Run, path: Path, states: list[State]) -> None:
    """Write a folder atomically; every process writes its shards."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import StorageMeta
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save as save_shards

    class NamedWriter(FileSystemWriter):
        def storage_meta(self) -> StorageMeta | None:
            """Record the name that the folder will have."""
            meta = super().storage_meta()
            return replace(meta, checkpoint_id=path) if meta else meta

    weights, optimizer = get_state_dict(run.model, run.optimizer)
    part = _part(path)
    try:
        save_shards(_contents(run, weights, optimizer, states), storage_writer=NamedWriter(part))
        if run.group.rank == 0:
            _remove(path)  # a folder that holds files cannot be replaced: only when `part` is whole
            os.replace(part, path)
    except (OSError, RuntimeError, CheckpointException) as error:
        _remove(part)
        why = str(error).strip().splitlines()[-1]
        raise SavingError(f"cannot be written: {why}", where=str(path)) from error


def resume(run: Run, path: Path) -> str:
    """Resume from a full checkpoint; return a line that says which options differ from its own.

    Raises CkptkitError if it is not one, not one of this model, or if an option contradicts it.
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
            f"is already trained for {tree['epoch']} of {run.config.epochs} epochs",
            where=str(path),
            hint=f"--epochs {tree['epoch'] + 1} or more: they are counted from the beginning",
        )
    changed = _changed(run.config, tree.get("args", {}), path)
    load_weights(run, path)
    _load_optimizer(run, tree["optimizer"])
    run.scheduler.load_state_dict(tree["scheduler"])
    run.epoch = tree["epoch"]
    run.best_accuracy = tree.get("best_accuracy", run.best_accuracy)
    states = tree.get("rng_of_ranks", [tree["rng"]])
    if run.group.rank < len(states):
        restore_random(states[run.group.rank])
    if len(states) != run.group.world:
        changed.append(f"{run.group.world} processes instead of {len(states)}")
    return "; ".join([f"resuming {path} after epoch {run.epoch}", *changed])


def settings(path: Path) -> dict[str, Any]:
    """Return the options that a full checkpoint was trained with; devices are left out."""
    tree: Any = ckptkit.load(path, map_location="cpu", whole=True)
    made_with = tree.get("args", {}) if isinstance(tree, dict) else {}
    return {
        name: value for name, value in made_with.items() if name in DEFAULTS and name != "devices"
    }


def _changed(config: Config, made_with: dict[str, Any], path: Path) -> list[str]:
    """Return the options that differ from those in a checkpoint.

    Raises RequestError for one that would make another run of it.
    """
    changed = []
    for name, value in {**DEFAULTS, **config.as_dict()}.items():
        before = made_with.get(name, DEFAULTS[name])
        if not made_with or value == before or name == "devices":
            continue
        if name not in CHANGEABLE:
            raise RequestError(
                f"{typed(name, value)} contradicts the checkpoint, which was trained with "
                f"{typed(name, before)}",
                where=str(path),
                hint=f"without --{name.replace('_', '-')}, --resume takes it from the checkpoint",
            )
        changed.append(f"{typed(name, value)} instead of {typed(name, before)}")
    return changed


def load_weights(run: Run, path: Path) -> None:
    """Load the weights of a file or folder, with or without ``module.``.

    Raises CkptkitError with the options that would fit.
    """
    if run.config.parallel == "fsdp":
        faults = _load_sharded(run, path)
    else:
        report = ckptkit.load_into(run.wrapped, path, strict=False)
        faults = [] if report.complete else list(report.faults())
    if faults:
        text = "; ".join([f"does not fit {run.config.model}", *faults])
        raise ckptkit.CkptkitError(text, where=str(path), hint=_what_fits(run, path))


def _what_fits(run: Run, path: Path) -> str:
    """Return the options with which the weights in a file fit the model."""
    tree: Any = ckptkit.load(path, map_location="cpu", whole=True)
    made_with = tree.get("args") if isinstance(tree, dict) else None
    if isinstance(made_with, dict):
        names = [name for name in ("model", "data", "width") if name in made_with]
        return f"it was made with {' '.join(typed(name, made_with[name]) for name in names)}"
    weights = ckptkit.load(path, map_location="cpu")
    found = {name.removeprefix("module."): value.shape for name, value in weights.items()}
    plain = replace(run.config, segments=0, memory_efficient=False, dropout=0.0)
    shapes = {"digits": (1, 32, 32), "random": (3, 32, 32), "cifar10:DIR": (3, 32, 32)}
    for name, data in product(MODELS, shapes):
        shape = (1000,) if (name, data) == ("mlp", "random") else shapes[data]
        with torch.device("meta"):
            model = build(replace(plain, model=name), shape, run.data.classes)
        if {name: value.shape for name, value in model.state_dict().items()} == found:
            return f"it fits --model {name} --data {data}"
    return f"no model of this trainer has these weights at --width {run.config.width}"


def _load_sharded(run: Run, path: Path) -> list[str]:
    """Give each process its shards of the weights; return what does not fit."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    checkpoint = ckptkit.open(path)
    if all(name.startswith("module.") for name in checkpoint.weights):
        checkpoint = ckptkit.strip_prefix(checkpoint, "module.")
    weights = ckptkit.load(checkpoint, map_location="cpu")
    expected = {name: tuple(value.shape) for name, value in run.model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    if found != expected:
        names = sorted(
            name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)
        )
        return [f"missing, unexpected or of another shape: {some(names, 4)}"]
    set_model_state_dict(run.model, weights, options=StateDictOptions(full_state_dict=True))
    return []


def _load_optimizer(run: Run, state: State) -> None:
    """Load the state of the optimizer, its parameters by number or, of a sharded run, by name."""
    names = [name for name, _ in run.model.named_parameters()]
    numbers = {name: number for number, name in enumerate(names)}
    by_name = isinstance(state["param_groups"][0]["params"][0], str)
    if run.config.parallel != "fsdp":
        run.optimizer.load_state_dict(_renamed(state, numbers) if by_name else state)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    named = state if by_name else _renamed(state, dict(enumerate(names)))
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(run.model, run.optimizer, named, options=options)


def _renamed(state: State, names: dict[Any, Any]) -> State:
    """Return an optimizer's state with other keys for its parameters."""
    return {
        "state": {names[key]: value for key, value in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[key] for key in group["params"]]}
            for group in state["param_groups"]
        ],
    }
