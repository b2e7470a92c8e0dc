"""Training: one loop, from a batch of images to a saved checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from math import isfinite
from pathlib import Path
from shlex import quote
from time import monotonic

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from ckptkit import CkptkitError
from ckptkit.trainer import parallel, saving
from ckptkit.trainer.config import SEGMENTED, Config, RequestError, RunFiles
from ckptkit.trainer.data import split
from ckptkit.trainer.log import Measure, logged, memory_report, shapes_traced
from ckptkit.trainer.run import Run, prepare

Bar = Callable[[Iterable[Tensor], str], Iterable[Tensor]]


def silent(line: str) -> None:
    """Print nothing."""


def train(
    config: Config,
    out: Path,
    files: RunFiles | None = None,
    *,
    trace_shapes: bool = False,
    log: Callable[[str], None] = print,
    bar: Bar = lambda batches, title: batches,
) -> float:
    """Train, save to `out`, and return the accuracy on the test set.

    `log` prints a line; `bar` wraps an iterable and shows its progress. Raises CkptkitError if the
    config cannot be run.
    """
    files = files or RunFiles()
    with _out_of_memory(config), parallel.group(config) as group:
        run = prepare(config, group)
        log = log if group.rank == 0 else silent
        if group.rank == 0:
            saving.remove_leftovers(out)
        if files.resume:
            log(saving.resume(run, files.resume))
        with (
            logged(run, files, log) as rows,
            shapes_traced(run, log, trace_shapes),
            memory_report(run, files.memory_report) as measure,
        ):
            while run.epoch < config.epochs:
                started, lr = monotonic(), run.optimizer.param_groups[0]["lr"]
                loss = train_epoch(run, measure, bar, lambda step: rows.step(step, *test(run)))
                run.scheduler.step()
                run.epoch += 1
                test_loss, accuracy = test(run)
                rows.epoch(loss, test_loss, accuracy, lr, monotonic() - started)
                _save_on_the_way(run, out, accuracy)
        saving.save(run, out)
        log(f"wrote {out}")
        return accuracy


def train_epoch(
    run: Run,
    measure: Measure = nullcontext,
    bar: Bar = lambda batches, title: batches,
    evaluate: Callable[[int], None] = lambda step: None,
) -> float:
    """Train one epoch, a step per batch; return the mean loss.

    The losses of the micro-batches are weighted by their sizes, so that the gradient is that of the
    whole batch, also for a last, smaller one.
    """
    config, group = run.config, run.group
    inputs, targets = run.data.train
    total, seen = 0.0, 0
    for step, batch in enumerate(bar(batches(run), f"epoch {run.epoch + 1}"), 1):
        run.wrapped.train()
        with measure():
            micro_batches = split(batch, config.batch_size)
            for number, micro_batch in enumerate(micro_batches, 1):
                x, y = inputs[micro_batch].to(group.device), targets[micro_batch].to(group.device)
                with parallel.sync_gradients(run.wrapped, now=number == len(micro_batches)):
                    with parallel.autocast(config, group.device):
                        loss = run.loss(run.wrapped(x), y) * (len(micro_batch) / len(batch))
                    loss.backward()  # type: ignore[no-untyped-call]
                total += loss.item() * len(batch)  # a number: the tensor would keep the graph alive
            if config.clip_norm:
                clip_grad_norm_(run.model.parameters(), config.clip_norm)
            run.optimizer.step()
        run.optimizer.zero_grad()
        seen += len(batch)
        if config.eval_every and step % config.eval_every == 0:
            evaluate(step)
    mean = group.all_reduce_mean(total / max(seen, 1))
    if not isfinite(mean):
        raise CkptkitError(
            f"the loss is {mean} in epoch {run.epoch + 1}", hint="a smaller --lr, or --clip-norm 1"
        )
    return mean


def batches(run: Run) -> list[Tensor]:
    """Return the numbers of the images of each step, shuffled, as many for every process."""
    config, group = run.config, run.group
    order = group.of_rank_0(torch.randperm(len(run.data.train[0])))
    world = group.world
    whole = split(order, config.batch_size * config.accumulate * world)
    return [batch[: len(batch) // world * world][group.rank :: world] for batch in whole]


@torch.no_grad()
def test(run: Run, batch_size: int = 256) -> tuple[float, float]:
    """Return the mean loss and the accuracy on the test set; every process computes both."""
    inputs, targets = run.data.test
    parallel.sync_buffers(run.model, run.group)
    run.wrapped.eval()
    loss, right = 0.0, 0.0
    for x, y in zip(split(inputs, batch_size), split(targets, batch_size), strict=True):
        y = y.to(run.group.device)
        with parallel.autocast(run.config, run.group.device):
            outputs = run.wrapped(x.to(run.group.device))
            loss += run.loss(outputs, y).item() * len(x)
        right += run.task.correct(outputs, y).sum().item()
    return loss / len(inputs), right / len(inputs)


def evaluate(config: Config, path: Path, log: Callable[[str], None] = print) -> float:
    """Print and return the accuracy of the weights in a file or folder on the test set.

    Runs on the devices of the config.
    """
    with _out_of_memory(config), parallel.group(config) as group:
        run = prepare(config, group)
        saving.load_weights(run, path)
        accuracy = test(run)[1]
        if group.rank == 0:
            log(f"accuracy {accuracy:.4f}")
        return accuracy


def _save_on_the_way(run: Run, out: Path, accuracy: float) -> None:
    """Save after some epochs, and the best so far, as the config says."""
    config = run.config
    accuracy = run.group.of_rank_0(torch.tensor(accuracy, dtype=torch.float64)).item()
    if accuracy > run.best_accuracy:
        run.best_accuracy = accuracy
        if config.save_best:
            saving.save(run, saving.best(out))
    if config.save_every and run.epoch % config.save_every == 0 and run.epoch < config.epochs:
        saving.save(run, saving.numbered(out, run.epoch))


def check_output(out: Path, files: RunFiles, config: Config, force: bool) -> None:
    """Raise an error for an output that could not be written, before training starts."""
    for path in (out, *files.written):
        if not path.parent.is_dir():
            raise RequestError(
                "there is no folder for it",
                where=str(path),
                hint=f"mkdir -p {quote(str(path.parent))}",
            )
    if config.parallel == "fsdp":
        epochs = range(1, config.epochs) if config.save_every else ()
        for path in (out, saving.best(out), *(saving.numbered(out, epoch) for epoch in epochs)):
            if path.is_dir() and any(path.iterdir()):
                raise RequestError("is a folder that is not empty", where=str(path))
    elif out.is_dir():
        raise RequestError("is a folder", where=str(out), hint="name the file to write")
    if out.exists() and not out.is_dir() and not force:
        raise RequestError("exists already", where=str(out), hint="--force replaces it")


@contextmanager
def _out_of_memory(config: Config) -> Iterator[None]:
    """Turn the out-of-memory error of a GPU into one that names the options that need less."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        ways = []
        if config.batch_size > 1:
            half, twice = config.batch_size // 2, config.accumulate * 2
            ways.append(f"--batch-size {half} --accumulate {twice}")  # the steps stay the same
        if config.model in SEGMENTED and not config.segments:
            ways.append("--segments 4")
        if config.model == "densenet" and not config.memory_efficient:
            ways.append("--memory-efficient")
        raise CkptkitError(
            f"the GPU does not have enough memory: {str(error).split('. ')[0]}",
            hint=", or ".join([*ways, "a smaller --width"]),
        ) from error
