"""Train a model in one loop, from batches of images to a saved checkpoint. Start reading here.

:func:`train_epoch` is the loop. :func:`train` calls :func:`train_epoch` for each epoch, evaluates
and saves. The other modules are ``run.py`` (builds the parts of a run), ``data.py``,
``parallel.py`` (several devices and processes), ``saving.py`` (checkpoints and resuming) and
``log.py``. The options are the fields of ``config.Config``.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from math import isfinite
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DistributedSampler

from ckptkit import CkptkitError
from ckptkit.trainer import parallel, saving
from ckptkit.trainer.config import Config, RequestError, RunFiles
from ckptkit.trainer.data import Labelled, loaded, split
from ckptkit.trainer.log import Measure, logged, memory_report, memory_snapshot, shapes_traced
from ckptkit.trainer.run import Run, prepare, switches_restored


class Stopped(CkptkitError):
    """A run stopped early on SIGTERM, after saving its checkpoint."""

    exit_code = 128 + signal.SIGTERM

    def __init__(self, epoch: int, step: int, out: Path, form: str) -> None:
        hint = f"--resume {out} continues the run"
        if form != "full":
            hint = "next time, use --save-form full: then --resume can continue"
        super().__init__(
            f"stopped by SIGTERM in epoch {epoch} after step {step}; the checkpoint is saved",
            where=str(out),
            hint=hint,
        )


class Step(NamedTuple):
    """One optimizer step.

    `micro_batches` contains the indices of the images that this process computes. `images` is the
    number of images that all processes together compute.
    """

    micro_batches: list[Tensor]
    images: int


Bar = Callable[[list[Step], str], Iterable[Step]]


def silent(line: str) -> None:
    """Print nothing."""


def no_bar(steps: list[Step], title: str) -> Iterable[Step]:
    """Show no progress."""
    return steps


def train(
    config: Config,
    out: Path,
    files: RunFiles | None = None,
    *,
    trace_shapes: bool = False,
    log: Callable[[str], None] = print,
    bar: Bar = no_bar,
) -> float:
    """Train, save to `out`, and return the accuracy on the test set.

    `log` prints a line. `bar` wraps the steps and shows progress. Raises CkptkitError if the config
    cannot run. After a SIGTERM, saves the checkpoint and raises Stopped.
    """
    files = files or RunFiles()
    with switches_restored(), _explained(config), parallel.group(config) as group:
        run = prepare(config, group)
        log = log if group.rank == 0 else silent
        if group.rank == 0:
            saving.remove_leftovers(out)
        if files.resume:
            log(saving.resume(run, files.resume))
        with (
            on_sigterm() as stop,
            logged(run, files, log) as rows,
            shapes_traced(run, log, trace_shapes),
            memory_snapshot(run, files.memory_snapshot),
            memory_report(run, files.memory_report) as measure,
        ):
            held_out = run.data.validation or run.data.test
            while run.epoch < config.epochs:
                started, lr = monotonic(), run.optimizer.param_groups[0]["lr"]
                loss = train_epoch(
                    run, measure, bar, lambda step: rows.step(step, *test(run, held_out)), stop
                )
                if run.step:  # the run stopped in the middle of the epoch
                    saving.save(run, out)
                    raise Stopped(run.epoch + 1, run.step, out, config.save_form)
                run.scheduler.step()
                run.epoch += 1
                held_out_loss, accuracy = test(run, held_out)
                rows.epoch(loss, held_out_loss, accuracy, lr, monotonic() - started)
                saving.save_on_the_way(run, out, accuracy)
                if config.empty_cache and group.device.type == "cuda":
                    torch.cuda.empty_cache()
            if run.data.validation:  # evaluate the test set only once, at the end
                accuracy = rows.test(*test(run, run.data.test))
            if run.average:
                average = test(run, run.data.test, run.average)
                rows.test(*average, title="moving average: ", prefix="average_")
        saving.save(run, out)
        log(f"wrote {out}")
        if config.save_best and not saving.marked(out, "best").exists():
            log(f"no epoch was better than {run.best_accuracy:.4f}, the best before --resume")
        return accuracy


def train_epoch(
    run: Run,
    measure: Measure = nullcontext,
    bar: Bar = no_bar,
    evaluate: Callable[[int], None] = lambda step: None,
    stop: threading.Event | None = None,
) -> float:
    """Train one epoch. Return the mean loss.

    The loss of each micro-batch is weighted by its size. So the accumulated gradient equals the
    gradient of one batch with the images of all processes, even if the last batch is smaller. If a
    stop request ends the epoch early, ``run.step`` is greater than 0.
    """
    config, group, device = run.config, run.group, run.group.device
    steps = batches(run)[run.step :]
    numbers = [part for step in steps for part in step.micro_batches]
    data = loaded(run.data.train, numbers, config.workers, pinned=device.type == "cuda")
    total, seen = 0.0, 0
    for step in bar(steps, f"epoch {run.epoch + 1}"):
        run.wrapped.train()
        with measure():
            for number, micro_batch in enumerate(step.micro_batches, 1):
                x, y = next(data)
                x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
                # DDP and FSDP average gradients over processes
                share = len(micro_batch) * group.world / step.images
                with parallel.sync_gradients(run.wrapped, now=number == len(step.micro_batches)):
                    with parallel.autocast(config, device):
                        loss = run.loss(run.wrapped(x), y) * share
                    run.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                # Without item(), the tensor would keep the autograd graph in memory.
                total += loss.item() * step.images / group.world
            if config.clip_norm:
                run.scaler.unscale_(run.optimizer)
                clip_grad_norm_(run.model.parameters(), config.clip_norm, config.clip_norm_type)
            run.scaler.step(run.optimizer)
            run.scaler.update()
        run.optimizer.zero_grad()
        if run.average:
            run.average.update_parameters(run.model)
        run.step += 1
        seen += step.images
        if config.eval_every and run.step % config.eval_every == 0:
            evaluate(run.step)
        if stop and any(group.all_reduce_sum(stop.is_set())) and step is not steps[-1]:
            break
    else:
        run.step, run.order = 0, None
    mean = group.all_reduce_sum(total)[0] / max(seen, 1)
    if not isfinite(mean):
        raise CkptkitError(
            f"the loss is {mean} in epoch {run.epoch + 1}",
            hint="use a smaller --lr, or --clip-norm 1",
        )
    return mean


def batches(run: Run) -> list[Step]:
    """Return the steps of an epoch with shuffled images. Shuffle once per epoch.

    With ``--sampler hand``, each of N processes takes every Nth image of a batch. If the last
    micro-batch has fewer images than processes, drop the micro-batch. DistributedSampler repeats
    some images, so that all processes have equally many images. The order of DistributedSampler
    depends on the seed and the epoch.
    """
    config, rank, world = run.config, run.group.rank, run.group.world
    size, images = config.batch_size, len(run.data.train[0])
    if config.sampler == "distributed":
        data: Any = range(images)  # the sampler uses only the length
        sampler: Any = DistributedSampler(data, world, rank, seed=config.seed)
        sampler.set_epoch(run.epoch)  # otherwise all epochs have the same order
        own = split(torch.tensor(list(sampler)), size // world * config.accumulate)
        return [Step(split(batch, size // world), len(batch) * world) for batch in own]
    if run.order is None:
        run.order = run.group.of_rank_0(torch.randperm(images))
    steps = []
    for batch in split(run.order, size * config.accumulate):
        whole = [part for part in split(batch, size) if len(part) >= world]
        if whole:
            steps.append(Step([part[rank::world] for part in whole], sum(map(len, whole))))
    return steps


@torch.no_grad()
def test(
    run: Run,
    labelled: Labelled | None = None,
    model: nn.Module | None = None,
    batch_size: int = 256,
) -> tuple[float, float]:
    """Return the mean loss and the accuracy on the test set, or on `labelled`.

    Each process evaluates its share of the images, and the sums are added. All processes must call
    the model equally often, because DDP and FSDP communicate in each call. A process without images
    evaluates the first image of the batch and does not count it.
    """
    inputs, targets = labelled or run.data.test
    model, device, group = model or run.wrapped, run.group.device, run.group
    parallel.sync_buffers(run.model, group)
    model.eval()
    loss, right = 0.0, 0.0
    for numbers in split(torch.arange(len(inputs)), batch_size * group.world):
        own = numbers[group.rank :: group.world]
        counted, own = len(own), own if len(own) else numbers[:1]
        y = targets[own].to(device)
        with parallel.autocast(run.config, device):
            outputs = model(inputs[own].to(device))
            loss += run.loss(outputs, y).item() * counted
        right += run.task.correct(outputs, y)[:counted].sum().item()
    loss, right = group.all_reduce_sum(loss, right)
    return loss / len(inputs), right / len(inputs)


def evaluate(config: Config, path: Path, log: Callable[[str], None] = print) -> float:
    """Load weights from a file or folder. Print and return the accuracy on the test set.

    The evaluation runs on the devices of the config.
    """
    with switches_restored(), _explained(config), parallel.group(config) as group:
        run = prepare(config, group)
        saving.load_weights(run, path)
        accuracy = test(run)[1]
        if group.rank == 0:
            log(f"accuracy {accuracy:.4f}")
        return accuracy


@contextmanager
def on_sigterm() -> Iterator[threading.Event]:
    """Set the event when SIGTERM arrives, the signal of cluster schedulers.

    A second SIGTERM calls the previous handler, and usually ends the process.
    """
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may set handlers
        return

    def note(number: int, frame: Any) -> None:
        stop.set()
        signal.signal(signal.SIGTERM, before)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _explained(config: Config) -> Iterator[None]:
    """Turn out-of-memory errors and failures of torch.compile into errors with a hint."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        half, twice = max(1, config.batch_size // 2), config.accumulate * 2
        ways = "a smaller --width, --segments 4 or --memory-efficient"
        # Keep the first two sentences of torch's message: the memory is full, and torch needed N
        # bytes.
        what = ". ".join(str(error).split(". ")[:2]).rstrip(".")
        raise CkptkitError(
            f"the GPU does not have enough memory: {what}",
            hint=f"use --batch-size {half} --accumulate {twice}, {ways}",
        ) from error
    except RuntimeError as error:
        if not type(error).__module__.startswith("torch._dynamo"):
            raise
        raise RequestError(
            f"torch.compile: {str(error).strip().splitlines()[0]}",
            hint="use --torch-compile inductor, which needs a C++ compiler, or no --torch-compile",
        ) from error
