"""Training: fetch, forward, backward, step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import isfinite
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor

from ckptkit import CkptkitError
from ckptkit.trainer import memory, parallel, saving, shapes
from ckptkit.trainer.config import Config, Files, RequestError
from ckptkit.trainer.data import cut
from ckptkit.trainer.log import Log
from ckptkit.trainer.run import Run, autocast, prepare

Bar = Callable[[Iterable[Tensor], str], Iterable[Tensor]]
Say = Callable[[str], None]


def train(
    config: Config,
    out: Path,
    files: Files | None = None,
    *,
    trace_shapes: bool = False,
    say: Say = print,
    bar: Bar = lambda steps, title: steps,
) -> float:
    """Train, save to `out`, and return the accuracy on the test set.

    `say` prints a line; `bar` wraps an iterable and shows its progress. Raises CkptkitError if the
    config cannot be run.
    """
    files = files or Files()
    with parallel.group(config) as group:
        run = prepare(config, group)
        if files.resume:
            saving.resume(run, files.resume)
        tell = say if group.rank == 0 else _silent
        tables = memory.tables(run) if files.memory_report else []
        with (
            Log(run, files, tell) as log,
            shapes.trace(run, tell, trace_shapes),
            memory.tracker(run, files) as tracker,
        ):
            for line in tables:
                tell(line)
            while run.epoch < config.epochs:
                _epoch(run, log, tracker, bar)
                if (
                    config.save_every
                    and run.epoch % config.save_every == 0
                    and run.epoch < config.epochs
                ):
                    saving.save(run, _numbered(out, run.epoch))
        saving.save(run, out)
        tell(f"wrote {out}")
        return log.accuracy


def evaluate(config: Config, file: Path, say: Say = print) -> float:
    """Print and return the accuracy of the weights in `file` on the test set of the config.

    Runs on the devices of the config.
    """
    with parallel.group(config) as group:
        run = prepare(config, group)
        saving.fit(run, file)
        accuracy = test(run)[1]
        if group.rank == 0:
            say(f"accuracy {accuracy:.4f}")
        return accuracy


def _epoch(run: Run, log: Log, tracker: memory.Tracker, bar: Bar) -> None:
    started = monotonic()
    loss = train_epoch(run, tracker, bar)
    if not isfinite(loss):
        raise CkptkitError(
            f"the loss is {loss} in epoch {run.epoch + 1}", hint="a smaller --lr, or --clip-norm 1"
        )
    rate = run.optimizer.param_groups[0]["lr"]
    run.scheduler.step()
    run.epoch += 1
    test_loss, accuracy = test(run)
    log.epoch(loss, test_loss, accuracy, rate, monotonic() - started)


def train_epoch(run: Run, tracker: memory.Tracker, bar: Bar = lambda steps, title: steps) -> float:
    """Train one epoch; return the mean loss.

    A step is taken every ``accumulate`` batches. Losses of the parts are weighted by their sizes,
    so that the gradient is that of one large batch, also for a last, smaller one.
    """
    config, group = run.config, run.group
    inputs, targets = run.data.train
    run.wrapped.train()
    total, seen = 0.0, 0
    order = torch.randperm(len(inputs))
    for big in bar(
        cut(order, config.batch_size * config.accumulate * group.world), f"epoch {run.epoch + 1}"
    ):
        share = big[: len(big) // group.world * group.world][
            group.rank :: group.world
        ]  # as many for every process
        with tracker.step():
            for part in cut(share, config.batch_size):
                batch, wanted = inputs[part].to(group.device), targets[part].to(group.device)
                with autocast(run):
                    loss = run.loss(run.wrapped(batch), wanted) * (len(part) / len(share))
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.item() * len(share)  # a number: the tensor would keep the graph alive
            if config.clip_norm:
                torch.nn.utils.clip_grad_norm_(run.model.parameters(), config.clip_norm)
            run.optimizer.step()
        run.optimizer.zero_grad()
        seen += len(share)
    return group.mean(total / max(seen, 1))


@torch.no_grad()
def test(run: Run, batch_size: int = 256) -> tuple[float, float]:
    """Return the mean loss and the accuracy on the test set.

    Every process computes them itself, without communication.
    """
    inputs, targets = run.data.test
    run.wrapped.eval()
    loss, right = 0.0, 0.0
    for batch, wanted in zip(cut(inputs, batch_size), cut(targets, batch_size), strict=True):
        wanted = wanted.to(run.group.device)
        with autocast(run):
            outputs = run.wrapped(batch.to(run.group.device))
            loss += run.loss(outputs, wanted).item() * len(batch)
        right += run.task.correct(outputs, wanted).sum().item()
    return loss / len(inputs), right / len(inputs)


def check_output(out: Path, files: Files, parallel: str, force: bool) -> None:
    """Raise an error for an output that could not be written, before training starts."""
    for path in (out, *files.written):
        if not path.parent.is_dir():
            raise RequestError(
                "there is no folder for it", where=str(path), hint=f"mkdir -p {path.parent}"
            )
    if parallel == "fsdp" and out.is_dir() and any(out.iterdir()):
        raise RequestError("is a folder that is not empty", where=str(out))
    if parallel != "fsdp" and out.is_dir():
        raise RequestError("is a folder", where=str(out), hint="OUT is the file to write")
    if out.exists() and not out.is_dir() and not force:
        raise RequestError("exists already", where=str(out), hint="--force replaces it")


def _numbered(out: Path, epoch: int) -> Path:
    return out.with_name(f"{out.stem}.epoch{epoch}{out.suffix}")


def _silent(line: str) -> None:
    """Print nothing; used by all processes except the first."""
