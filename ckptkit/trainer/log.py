"""Report a run: a line per epoch, metrics, a plot, the memory of each step, shapes.

On the CPU, activations are the bytes that autograd keeps for the backward pass. Saved-tensor hooks
count each storage once, and do not count parameters. The peak is the sum of activations,
parameters, gradients and optimizer state.

On a GPU, activations are the bytes that the forward pass leaves allocated. The allocator of each
device reports peak and reserved bytes. Used bytes are the bytes that nvidia-smi shows. The first
step includes one-time allocations of the CUDA libraries.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from math import nan
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import IO, Any

import torch
from torch import Tensor, nn

from ckptkit.core.text import flatten
from ckptkit.trainer.config import RequestError, RunFiles
from ckptkit.trainer.parallel import Replicated
from ckptkit.trainer.run import Run

Print = Callable[[str], None]


class Log:
    """Print and record the results of a run: ``with logged(run, files, print) as log: ...``.

    `held_out` is the set on which epochs are evaluated: "validation" or "test".
    """

    def __init__(self, run: Run, print_line: Print, metrics: IO[str] | None) -> None:
        self.run, self.print_line, self.metrics = run, print_line, metrics
        self.held_out = "validation" if run.data.validation else "test"
        self.epochs: list[dict[str, Any]] = []

    def step(self, step: int, loss: float, accuracy: float) -> None:
        """Log an evaluation within an epoch (--eval-every)."""
        epoch = self.run.epoch + 1
        self._write(
            f"epoch {epoch} step {step}  {self.held_out} loss {loss:.4f}  accuracy {accuracy:.4f}",
            {"epoch": epoch, "step": step, f"{self.held_out}_loss": loss, "accuracy": accuracy},
        )

    def epoch(
        self, loss: float, held_out_loss: float, accuracy: float, lr: float, seconds: float
    ) -> None:
        """Log the results of a finished epoch."""
        number, last = self.run.epoch, self.run.config.epochs
        losses = {"loss": loss, f"{self.held_out}_loss": held_out_loss}
        row = {"epoch": number, **losses, "accuracy": accuracy, "lr": lr}
        self.epochs.append(row)
        self._write(
            f"epoch {number:>{len(str(last))}}/{last}  loss {loss:.4f}  {self.held_out} loss "
            f"{held_out_loss:.4f}  accuracy {accuracy:.4f}  lr {lr:.3g}  {seconds:.1f} s",
            {**row, "seconds": round(seconds, 3)},
        )

    def test(self, loss: float, accuracy: float, title: str = "", prefix: str = "") -> float:
        """Log an evaluation on the test set at the end: of the model, or of the average (--ema)."""
        self._write(
            f"{title}test loss {loss:.4f}  accuracy {accuracy:.4f}",
            {f"{prefix}test_loss": loss, f"{prefix}test_accuracy": accuracy},
        )
        return accuracy

    def _write(self, line: str, row: dict[str, Any]) -> None:
        self.print_line(line)
        if self.metrics:
            print(json.dumps(row), file=self.metrics, flush=True)


@contextmanager
def logged(run: Run, files: RunFiles, print_line: Print) -> Iterator[Log]:
    """Yield the log of a run. At the end, draw the plot of the run.

    A resumed run appends to its metrics file. Its plot also contains the earlier epochs in that
    file.
    """
    # Create the figure now: if matplotlib is missing, fail before training.
    figure = _figure() if files.plot else None
    metrics: AbstractContextManager[IO[str] | None] = nullcontext()
    is_first, earlier = run.group.rank == 0, _earlier(run, files)
    if files.metrics and is_first:
        metrics = files.metrics.open("a" if files.resume else "w", encoding="utf-8")
    if files.plot and files.resume and not earlier:
        print_line(
            f"the plot starts with epoch {run.epoch + 1}, because --metrics names no file with "
            "earlier epochs"
        )
    with metrics as file:
        log = Log(run, print_line, file)
        try:
            yield log
        finally:
            if files.plot and log.epochs and is_first:
                _draw(figure, [*earlier, *log.epochs], log.held_out, files.plot)


def _earlier(run: Run, files: RunFiles) -> list[dict[str, Any]]:
    """Read the metrics file of a resumed run. Return the rows of the epochs finished before the run
    was resumed."""
    if not (files.resume and files.plot and files.metrics and files.metrics.is_file()):
        return []
    rows = (json.loads(line) for line in files.metrics.read_text(encoding="utf-8").splitlines())
    epochs = {row["epoch"]: row for row in rows if "loss" in row and row["epoch"] <= run.epoch}
    return [epochs[number] for number in sorted(epochs)]


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RequestError("--plot needs matplotlib", hint="pip install matplotlib") from error
    return Figure(figsize=(7, 4), layout="constrained")


def _draw(figure: Any, rows: list[dict[str, Any]], held_out: str, path: Path) -> None:
    """Draw losses and accuracy over the epochs."""
    from matplotlib.ticker import MaxNLocator

    left = figure.subplots()
    right = left.twinx()
    epochs, lines = [row["epoch"] for row in rows], []
    for axes, name, color in (
        (left, "loss", "tab:blue"),
        (left, f"{held_out} loss", "tab:cyan"),
        (right, "accuracy", "tab:orange"),
    ):
        values = [row.get(name.replace(" ", "_"), nan) for row in rows]
        lines += axes.plot(epochs, values, color=color, label=name)
    left.set(xlabel="epoch", ylabel="loss")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set(ylabel="accuracy", ylim=(0, 1))
    figure.legend(handles=lines, loc="outside upper center", ncols=len(lines))
    figure.savefig(path, format="png")


class SavedBytes:
    """Count the bytes that autograd keeps, currently and at the peak.

    ``with SavedBytes(model) as saved: model(inputs)``
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self.now = self.peak = 0
        self._parameters = {_address(each) for each in model.parameters()} if model else set()
        self._held: Counter[int] = Counter()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda tensor: _Held(self, tensor), lambda held: held.tensor
        )

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__()

    def hold(self, tensor: Tensor, times: int) -> None:
        """Add `times` (1 or -1) to the number of references that autograd keeps to `tensor`."""
        address = _address(tensor)
        if address in self._parameters:
            return
        before = self._held[address] > 0
        self._held[address] += times
        self.now += ((self._held[address] > 0) - before) * tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, self.now)


class _Held:
    """A reference to a tensor. Autograd deletes this reference when it no longer needs the
    tensor."""

    def __init__(self, saved: SavedBytes, tensor: Tensor) -> None:
        self.saved, self.tensor = saved, tensor
        saved.hold(tensor, 1)

    def __del__(self) -> None:
        self.saved.hold(self.tensor, -1)


@contextmanager
def allocated_bytes(wrapped: nn.Module, device: torch.device) -> Iterator[SimpleNamespace]:
    """Measure ``peak``: the maximum number of bytes that a forward pass leaves allocated on a GPU.

    The number includes activations and outputs, but no gradients. The backward pass allocates
    gradients.
    """
    found = SimpleNamespace(peak=0, before=0)

    def begin(*_: object) -> None:
        found.before = torch.cuda.memory_allocated(device)

    def end(*_: object) -> None:
        found.peak = max(found.peak, torch.cuda.memory_allocated(device) - found.before)

    hooks = wrapped.register_forward_pre_hook(begin), wrapped.register_forward_hook(end)
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


Measure = Callable[[], AbstractContextManager[None]]


@contextmanager
def memory_report(run: Run, path: Path | None) -> Iterator[Measure]:
    """Yield a function that returns a context manager. The context manager writes a JSON line about
    each step.

    Without a file, the context manager does nothing. Bytes are measured on the first device before
    gradients are freed. Peaks are written for each GPU.
    """
    if path is None or run.group.rank:
        yield nullcontext
        return
    gpus = [device for device in run.group.devices if device.type == "cuda"]
    steps = count(1)

    @contextmanager
    def step() -> Iterator[None]:
        for device in gpus:
            torch.cuda.reset_peak_memory_stats(device)
        started, device = monotonic(), run.group.device
        counted: AbstractContextManager[Any]
        if device.type == "cuda":
            counted = allocated_bytes(run.wrapped, device)
        else:
            counted = SavedBytes(run.wrapped)
        with counted as kept:
            yield
        for device in gpus:
            torch.cuda.synchronize(device)
        seconds = round(monotonic() - started, 6)
        states = (state.values() for state in run.optimizer.state.values())
        held = {
            "parameters": total_bytes((*run.model.parameters(), *run.model.buffers())),
            "gradients": total_bytes(each.grad for each in run.model.parameters()),
            "optimizer": total_bytes(flatten(states)),
            "activations": kept.peak,
        }
        peaks: dict[str, Any] = {"peak": {"cpu": sum(held.values())}}
        if gpus:
            peaks = {
                "peak": {str(each): torch.cuda.max_memory_allocated(each) for each in gpus},
                "reserved": {str(each): torch.cuda.memory_reserved(each) for each in gpus},
                "used": {str(each): _used(each) for each in gpus},
            }
        row = {"step": next(steps), "seconds": seconds, **held, **peaks}
        print(json.dumps(row), file=file, flush=True)

    with path.open("w", encoding="utf-8") as file:
        yield step


def _used(device: torch.device) -> int:
    """Return the bytes in use on a GPU as nvidia-smi shows them.

    The number includes the memory of all processes, memory reserved by allocators, and the memory
    of CUDA.
    """
    free, total = torch.cuda.mem_get_info(device)
    return total - free


@contextmanager
def memory_snapshot(run: Run, path: Path | None) -> Iterator[None]:
    """Record all allocations on the GPUs. At the end, or after an error, write a file.

    https://pytorch.org/memory_viz displays the file.
    """
    if path is None or run.group.rank:
        yield
        return
    if run.group.device.type != "cuda":
        raise RequestError(
            "--memory-snapshot records the allocator of a GPU, but this run is on the CPU",
            hint="--memory-report counts the bytes of tensors on the CPU",
        )
    torch.cuda.memory._record_memory_history()
    try:
        yield
    finally:
        torch.cuda.memory._dump_snapshot(str(path))  # type: ignore[no-untyped-call]
        torch.cuda.memory._record_memory_history(enabled=None)


def total_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the size of tensors in bytes. For a sharded tensor, count only the local shard."""
    return sum(_local(each).nbytes for each in tensors if isinstance(each, Tensor))


def _address(tensor: Tensor) -> int:
    return _local(tensor).untyped_storage().data_ptr()


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


@contextmanager
def shapes_traced(run: Run, print_line: Print, requested: bool = True) -> Iterator[None]:
    """Print the shapes of the inputs and outputs of the model, and of its wrapper. Print no line
    twice."""
    if not requested:
        yield
        return
    if isinstance(run.wrapped, Replicated):
        devices = len(run.group.devices)
        split = f"each batch is split over {devices} devices"
        if run.wrapped.simulated > 1:
            split = f"simulated: {devices} parts of each batch, one after the other on the CPU"
        elif devices == 1:
            split = "one device: batches are not split (--devices cpu,cpu simulates two devices)"
        print_line(split)
    seen: set[str] = set()

    def printer(where: str) -> Callable[..., None]:
        def print_shapes(_: nn.Module, inputs: Any, output: Tensor | list[Tensor]) -> None:
            outputs = [output] if isinstance(output, Tensor) else output
            shapes = " + ".join(f"{list(each.shape)} on {each.device}" for each in outputs)
            line = f"{where}: input {list(inputs[0].shape)}, output {shapes}"
            if line not in seen:
                seen.add(line)
                print_line(line)

        return print_shapes

    hooks = [run.model.register_forward_hook(printer("in the model"))]
    if run.wrapped is not run.model:
        hooks.append(run.wrapped.register_forward_hook(printer("outside")))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
