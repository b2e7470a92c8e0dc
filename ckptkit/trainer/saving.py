"""Write checkpoints, and resume runs from checkpoints.

A checkpoint has one of three forms:

- ``bare``: the state_dict
- ``wrapped``: ``{"model": state_dict, "epoch": n}``
- ``full``: also the optimizer, the scheduler, the states of random number generators, the arguments
  and the versions, so that a run resumes exactly

Sharded models are saved as a folder of ``torch.distributed.checkpoint``, all other models as a file
of ``torch.save``. ckptkit reads both.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from glob import escape
from pathlib import Path
from shlex import quote
from sys import intern
from typing import Any, NoReturn

import numpy
import torch
import torch.distributed as dist

import ckptkit
from ckptkit.core.text import some
from ckptkit.trainer.config import (
    CHANGEABLE,
    DEFAULTS,
    Config,
    RequestError,
    RunFiles,
    SavingError,
    typed,
)
from ckptkit.trainer.parallel import autocast, available
from ckptkit.trainer.run import Run, random_states, restore_random

NEEDED = ("optimizer", "scheduler", "epoch", "rng")
State = dict[str, Any]


def save(run: Run, path: Path) -> None:
    """Write the checkpoint in the form of the config.

    Rank 0 writes the checkpoint. If the model is sharded, all processes write.
    """
    states = run.group.all_gather(random_states())
    if run.config.parallel == "fsdp":
        _save_shards(run, path, states)
    elif run.group.rank == 0:
        weights = (run.wrapped if run.config.keep_module_prefix else run.model).state_dict()
        _save_file(_contents(run, weights, run.optimizer.state_dict(), states), path)
    if run.group.world > 1:
        dist.barrier()


def marked(out: Path, mark: str) -> Path:
    """Return the path of another checkpoint of a run: ``run.epoch3.pth`` or ``run.best.pth``."""
    return out.with_name(f"{out.stem}.{mark}{out.suffix}")


def remove_leftovers(out: Path) -> None:
    """Remove stale temporary files and folders of a killed run with the same OUT."""
    numbered = out.parent.glob(escape(f".{out.stem}.epoch") + "*" + escape(f"{out.suffix}.part"))
    for part in (_part(out), _part(marked(out, "best")), *numbered):
        _remove(part)


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _remove(part: Path) -> None:
    if part.is_dir():
        shutil.rmtree(part, ignore_errors=True)
    else:
        part.unlink(missing_ok=True)


def _contents(run: Run, weights: State, optimizer: State, states: list[State]) -> State:
    """Return the contents of a checkpoint. `states` contains the random states of each process."""
    if run.config.save_form == "bare":
        return weights
    averages = {"ema": run.average.state_dict()} if run.average else {}
    if run.config.save_form == "wrapped":
        return {"model": weights, **averages, "epoch": run.epoch}
    contents: State = {
        "model": weights,
        **averages,
        "optimizer": optimizer,
        "scheduler": run.scheduler.state_dict(),
        "epoch": run.epoch,
        "rng": states[0],
        "args": run.config.as_dict(),
        "versions": versions(),
    }
    if len(states) > 1:
        contents["rng_of_ranks"] = states
    # A pickle stores each string object once. Interning makes equal strings one object, so the
    # bytes of the pickle do not depend on how many objects these strings were before.
    contents["args"]["devices"] = [intern(name) for name in run.group.names]
    if run.config.save_best:
        contents["best_accuracy"] = run.best_accuracy
    if run.scaler.is_enabled():
        contents["scaler"] = run.scaler.state_dict()
    if run.step:  # in the middle of an epoch
        contents |= {"step": run.step, "order": run.order}
    return contents


def versions() -> dict[str, str | None]:
    """Return the versions of ckptkit, torch and other libraries."""
    backend: Any = torch.backends.cudnn  # torch.backends.cudnn has no type annotations
    cudnn = backend.version() if torch.cuda.is_available() else None
    return {
        "ckptkit": ckptkit.__version__,
        "torch": str(torch.__version__),  # weights_only=True refuses the type TorchVersion
        "numpy": numpy.__version__,
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "cudnn": str(cudnn) if cudnn else None,
    }


def _save_file(contents: State, path: Path) -> None:
    """Write a file atomically.

    torch.save gets an open file. With a path, torch.save would write the file name into the
    archive.
    """
    part = _part(path)
    with _part_removed(path, OSError, RuntimeError):
        with part.open("wb") as file:
            torch.save(contents, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)


def _save_shards(run: Run, path: Path, states: list[State]) -> None:
    """Write a folder atomically. Each process writes its shards."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.metadata import StorageMeta
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.state_dict_saver import save as save_shards

    class NamedWriter(FileSystemWriter):
        def storage_meta(self) -> StorageMeta | None:
            """Record the final name of the folder."""
            meta = super().storage_meta()
            return replace(meta, checkpoint_id=path) if meta else meta

    weights, optimizer = get_state_dict(run.model, run.optimizer)
    part = _part(path)
    with _part_removed(path, OSError, RuntimeError, CheckpointException):
        save_shards(_contents(run, weights, optimizer, states), storage_writer=NamedWriter(part))
        if run.group.rank == 0:
            _remove(path)  # os.replace cannot replace a non-empty folder, and `part` is complete
            os.replace(part, path)


@contextmanager
def _part_removed(path: Path, *errors: type[BaseException]) -> Iterator[None]:
    """If the ``with`` block fails, remove what it wrote. Turn `errors` into SavingError."""
    try:
        yield
    except BaseException as error:
        _remove(_part(path))
        if isinstance(error, errors):
            raise SavingError(f"cannot be written: {_why(error)}", where=str(path)) from error
        raise


def _why(error: BaseException) -> str:
    """Return the system's reason for a failed write.

    On a full disk, torch's writer fails a second time when it closes the file, so the first error
    in the chain is the reason. CheckpointException contains the errors of all processes.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        failures = getattr(cause, "failures", {})
        of_ranks = [each[0] for each in failures.values() if isinstance(each[0], OSError)]
        cause = next(iter(of_ranks), cause.__cause__ or cause.__context__)
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return str(cause or error).strip().splitlines()[-1]


def save_on_the_way(run: Run, out: Path, accuracy: float) -> None:
    """Save the checkpoint after an epoch, if --save-every or --save-best requires it.

    `accuracy` is the accuracy on the held-out images.
    """
    config = run.config
    accuracy = run.group.of_rank_0(torch.tensor(accuracy, dtype=torch.float64)).item()
    if accuracy > run.best_accuracy:
        run.best_accuracy = accuracy
        if config.save_best:
            save(run, marked(out, "best"))
    if config.save_every and run.epoch % config.save_every == 0 and run.epoch < config.epochs:
        save(run, marked(out, f"epoch{run.epoch}"))


def check_output(out: Path, files: RunFiles, config: Config, force: bool, after: int = 0) -> None:
    """Raise RequestError before training if an output cannot be written.

    `after` is the number of epochs that were finished before the run was resumed.
    """

    def refuse(path: Path, what: str, hint: str) -> NoReturn:
        raise RequestError(what, where=str(path), hint=hint)

    for path in (out, *files.written):
        if not path.parent.is_dir():
            hint = f"mkdir -p {quote(str(path.parent))}"
            refuse(path, "the folder of this file does not exist", hint)
    checkpoints = [out, *([marked(out, "best")] if config.save_best else [])]
    if config.save_every:
        epochs = range(after + 1, config.epochs)
        checkpoints += [marked(out, f"epoch{n}") for n in epochs if n % config.save_every == 0]
    places = [path.resolve() for path in (*checkpoints, *files.written)]
    resumed = [files.resume.resolve()] if files.resume else []
    for path in (*checkpoints, *files.written):
        taken = places + resumed if path in files.written else places
        if taken.count(path.resolve()) > 1:
            refuse(path, "would be written twice", "use another file")
    for path in checkpoints:
        if path.is_dir():
            if config.parallel != "fsdp":
                refuse(path, "is a folder", "use the path of a file")
            if not any(path.iterdir()):
                continue
            if not (path / ".metadata").is_file():
                refuse(path, "is a non-empty folder, but not a checkpoint", "use a new folder")
        if path.exists() and not force:
            refuse(path, "already exists", "--force replaces it")


def resume(run: Run, path: Path) -> str:
    """Resume from a full checkpoint. Return a line that lists the changed options.

    Raises CkptkitError if the file is not a full checkpoint, is for another model, or contradicts
    an option.
    """
    tree = _read(path)
    missing = [name for name in NEEDED if name not in tree]
    if missing:
        raise ckptkit.CkptkitError(
            f"cannot be resumed: the checkpoint has no {missing[0]}",
            where=str(path),
            hint="--save-form full saves checkpoints that can be resumed",
        )
    if tree["epoch"] >= run.config.epochs:
        raise RequestError(
            f"was already trained for {tree['epoch']} of {run.config.epochs} epochs",
            where=str(path),
            hint=f"use --epochs {tree['epoch'] + 1} or more: --epochs is the total number",
        )
    changed = _changed(run.config, tree.get("args", {}), path)
    settle_buckets(run)
    load_weights(run, path)
    _load_optimizer(run, tree["optimizer"])
    run.scheduler.load_state_dict(tree["scheduler"])
    run.epoch, run.step, run.order = tree["epoch"], tree.get("step", 0), tree.get("order")
    run.best_accuracy = tree.get("best_accuracy", run.best_accuracy)
    if run.scaler.is_enabled() and "scaler" in tree:
        run.scaler.load_state_dict(tree["scaler"])
    if run.average:
        run.average.load_state_dict(tree["ema"])
    states = tree.get("rng_of_ranks", [tree["rng"]])
    if run.group.rank < len(states):
        restore_random(states[run.group.rank])
    changed += _moved(run, tree.get("args", {}).get("devices", []), len(states))
    place = f"epoch {run.epoch}" + (f", step {run.step}" if run.step else "")
    return "; ".join([f"resuming {path} after {place}", *changed])


def _moved(run: Run, devices: list[str], processes: int) -> list[str]:
    """Describe changed devices and processes of a resumed run. The batches do not change."""
    moved, here, size = [], list(run.group.names), run.config.batch_size
    if devices and devices != here:
        moved.append(f"on {', '.join(here)} instead of {', '.join(devices)}")
        if len(devices) != len(here):
            moved.append(f"batches of {size} as before, but split differently")
    if processes != run.group.world:
        now, before = (f"{n} process{'es' * (n > 1)}" for n in (run.group.world, processes))
        moved.append(
            f"{now} instead of {before}, batches of {size} as before; the results are not bit-exact"
        )
    return moved


def settle_buckets(run: Run) -> None:
    """Run one batch through DDP before a run resumes, and drop the gradients.

    In the first backward pass, DDP learns the order of gradients and arranges its buckets. So from
    the second step on, sums are rounded differently than in the first step. A resumed run must
    start with the arranged buckets.
    """
    if run.group.world > 1 and run.config.parallel == "ddp":
        inputs, targets = (part[:2].to(run.group.device) for part in run.data.train)
        with autocast(run.config, run.group.device):
            loss = run.loss(run.wrapped(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        run.optimizer.zero_grad()


def _read(path: Path) -> State:
    """Load a checkpoint on the CPU. Return no items if it is not a dict."""
    tree: Any = ckptkit.load(path, map_location="cpu", whole=True)
    return tree if isinstance(tree, dict) else {}


def settings(path: Path) -> dict[str, Any]:
    """Return the options with which a full checkpoint was trained.

    If this machine has all devices of the run, the options include these devices.
    """
    made_with = _read(path).get("args", {})
    found = {name: value for name, value in made_with.items() if name in DEFAULTS}
    devices = found.pop("devices", [])
    if devices and set(devices) <= set(available()):
        found["devices"] = ",".join(devices)
    return found


def finished_epochs(path: Path) -> int:
    """Return the number of epochs recorded in a checkpoint, or 0 if the number is missing."""
    epochs = _read(path).get("epoch", 0)
    return epochs if isinstance(epochs, int) else 0


def _changed(config: Config, made_with: dict[str, Any], path: Path) -> list[str]:
    """Describe the options that differ from the options in a checkpoint.

    Raises RequestError for an option that a resumed run must not change.
    """
    changed = []
    for name, value in {**DEFAULTS, **config.as_dict()}.items():
        before = made_with.get(name, DEFAULTS[name])
        if not made_with or value == before or name == "devices":
            continue
        if name not in CHANGEABLE:
            option = name.replace("_", "-")
            if name == "validation" and config.validation is None:
                option = "save-best"  # --save-best implies --validation
            raise RequestError(
                f"{typed(name, value or 0)} contradicts the checkpoint, which was trained with "
                f"{typed(name, before or 0)}",
                where=str(path),
                hint=f"remove --{option}: --resume uses the value in the checkpoint",
            )
        changed.append(f"{typed(name, value)} instead of {typed(name, before)}")
    return changed


def load_weights(run: Run, path: Path) -> None:
    """Load the weights of a file or folder. Keys may start with ``module.``.

    Raises CkptkitError if the weights do not fit the model. The hint lists options that fit.
    """
    if run.config.parallel == "fsdp":
        faults = _load_sharded(run, path)
    else:
        report = ckptkit.load_into(run.wrapped, path, strict=False)
        faults = [] if report.complete else list(report.faults())
    if faults:
        text = "; ".join([f"does not fit {run.config.model}", *faults])
        raise ckptkit.CkptkitError(text, where=str(path), hint=_what_fits(path))


def _what_fits(path: Path) -> str:
    """Return a hint: the options of a model that fits the weights in a file."""
    made_with = _read(path).get("args")
    if not isinstance(made_with, dict):
        return "use --model, --data and --width of the run that saved the weights"
    names = [name for name in ("model", "data", "width") if name in made_with]
    return f"the run used {' '.join(typed(name, made_with[name]) for name in names)}"


def _load_sharded(run: Run, path: Path) -> list[str]:
    """Load the shards of this process. Return descriptions of the tensors that do not fit."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    checkpoint = ckptkit.open(path)
    if all(name.startswith("module.") for name in checkpoint.weights):
        checkpoint = ckptkit.strip_prefix(checkpoint, "module.")
    weights = ckptkit.load(checkpoint, map_location="cpu")
    expected = {name: tuple(value.shape) for name, value in run.model.state_dict().items()}
    found = {name: tuple(value.shape) for name, value in weights.items()}
    names = sorted({name for name, _ in found.items() ^ expected.items()})
    if names:
        return [f"missing, unexpected or with a different shape: {some(names, 4)}"]
    set_model_state_dict(run.model, weights, options=StateDictOptions(full_state_dict=True))
    return []


def _load_optimizer(run: Run, state: State) -> None:
    """Load the optimizer state. The keys are parameter numbers, or names if the run was sharded."""
    names = [name for name, _ in run.model.named_parameters()]
    by_name = isinstance(state["param_groups"][0]["params"][0], str)
    is_sharded = run.config.parallel == "fsdp"
    if by_name != is_sharded:
        pairs = enumerate(names)
        keys: dict[Any, Any] = {name: n for n, name in pairs} if by_name else dict(pairs)
        groups = [
            {**group, "params": [keys[key] for key in group["params"]]}
            for group in state["param_groups"]
        ]
        values = {keys[key]: value for key, value in state["state"].items()}
        state = {"state": values, "param_groups": groups}
    if not is_sharded:
        run.optimizer.load_state_dict(state)
        return
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(run.model, run.optimizer, state, options=options)
