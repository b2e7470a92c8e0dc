"""The reports of a run: a line per epoch, metrics, a plot, the memory of each step, shapes.

On the CPU, activations are the bytes that autograd keeps for the backward pass, counted by
saved-tensor hooks, each storage once, without parameters; the peak is the sum of all. On a GPU,
activations are what the forward pass leaves allocated there; the peak and the reserved bytes are
those of the allocator, for each device. (The first step includes what the CUDA libraries allocate
once.)
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from time import monotonic
from typing import IO, Any

import torch
from torch import Tensor, nn

from ckptkit.core.text import flatten
from ckptkit.trainer.config import RequestError, RunFiles
from ckptkit.trainer.parallel import Replicated
from ckptkit.trainer.run import Run

Print = Callable[[str], None]


class Log:
    """Print and record the results of a run: ``with logged(run, files, print) as log: ...``."""

    def __init__(self, run: Run, print_line: Print, metrics: IO[str] | None) -> None:
        self.run, self.print_line, self.metrics = run, print_line, metrics
        self.epochs: list[dict[str, Any]] = []

    def step(self, step: int, test_loss: float, accuracy: float) -> None:
        """Log an evaluation within an epoch (--eval-every)."""
        epoch = self.run.epoch + 1
        self._write(
            f"epoch {epoch} step {step}  test loss {test_loss:.4f}  accuracy {accuracy:.4f}",
            {"epoch": epoch, "step": step, "test_loss": test_loss, "accuracy": accuracy},
        )

    def epoch(
        self, loss: float, test_loss: float, accuracy: float, lr: float, seconds: float
    ) -> None:
        """Log the results of a finished epoch."""
        number, last = self.run.epoch, self.run.config.epochs
        results = {"loss": loss, "test_loss": test_loss, "accuracy": accuracy, "lr": lr}
        self.epochs.append({"epoch": number, **results})
        self._write(
            f"epoch {number:>{len(str(last))}}/{last}  loss {loss:.4f}  test loss {test_loss:.4f}"
            f"  accuracy {accuracy:.4f}  lr {lr:.3g}  {seconds:.1f} s",
            {**self.epochs[-1], "seconds": round(seconds, 3)},
        )

    def _write(self, line: str, row: dict[str, Any]) -> None:
        self.print_line(line)
        if self.metrics:
            print(json.dumps(row), file=self.metrics, flush=True)


@contextmanager
def logged(run: Run, files: RunFiles, print_line: Print) -> Iterator[Log]:
    """Yield the log of a run, which draws its plot at the end."""
    figure = _figure() if files.plot else None  # now: matplotlib may be missing
    metrics: AbstractContextManager[IO[str] | None] = nullcontext()
    is_first = run.group.rank == 0
    if files.metrics and is_first:
        metrics = files.metrics.open("a" if files.resume else "w", encoding="utf-8")
    with metrics as file:
        log = Log(run, print_line, file)
        try:
            yield log
        finally:
            if files.plot and log.epochs and is_first:
                _draw(figure, log.epochs, files.plot)


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RequestError("--plot needs matplotlib", hint="pip install matplotlib") from error
    return Figure(figsize=(7, 4), layout="constrained")


def _draw(figure: Any, rows: list[dict[str, Any]], path: Path) -> None:
    """Draw losses and accuracy over the epochs."""
    from matplotlib.ticker import MaxNLocator

    left = figure.subplots()
    right = left.twinx()
    epochs, lines = [row["epoch"] for row in rows], []
    for axes, name, color in (
        (left, "loss", "tab:blue"),
        (left, "test loss", "tab:cyan"),
        (right, "accuracy", "tab:orange"),
    ):
        values = [row[name.replace(" ", "_")] for row in rows]
        lines += axes.plot(epochs, values, color=color, label=name)
    left.set(xlabel="epoch", ylabel="loss")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set(ylabel="accuracy", ylim=(0, 1))
    figure.legend(handles=lines, loc="outside upper center", ncols=len(lines))
    figure.savefig(path, format="png")


class SavedBytes:
    """Count the bytes that autograd keeps, now and at the peak.

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
        """Count `tensor` as kept once more (1) or once less (-1)."""
        address = _address(tensor)
        if address in self._parameters:
            return
        before = self._held[address] > 0
        self._held[address] += times
        self.now += ((self._held[address] > 0) - before) * tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, self.now)


class _Held:
    """A reference to a tensor that lives as long as autograd keeps it."""

    def __init__(self, saved: SavedBytes, tensor: Tensor) -> None:
        self.saved, self.tensor = saved, tensor
        saved.hold(tensor, 1)

    def __del__(self) -> None:
        self.saved.hold(self.tensor, -1)


class AllocatedBytes:
    """Measure what a forward pass leaves allocated on a GPU, at most: activations and outputs.

    Gradients do not count: the backward pass allocates them.
    """

    def __init__(self, wrapped: nn.Module, device: torch.device) -> None:
        self.peak = self._before = 0
        self._wrapped, self._device = wrapped, device

    def __enter__(self) -> AllocatedBytes:
        def begin(*_: object) -> None:
            self._before = torch.cuda.memory_allocated(self._device)

        def end(*_: object) -> None:
            self.peak = max(self.peak, torch.cuda.memory_allocated(self._device) - self._before)

        self._hooks = [
            self._wrapped.register_forward_pre_hook(begin),
            self._wrapped.register_forward_hook(end),
        ]
        return self

    def __exit__(self, *error: object) -> None:
        for hook in self._hooks:
            hook.remove()


def activations(wrapped: nn.Module, device: torch.device) -> SavedBytes | AllocatedBytes:
    """Return a context manager whose ``peak`` is the bytes of activations on a device."""
    return AllocatedBytes(wrapped, device) if device.type == "cuda" else SavedBytes(wrapped)


Measure = Callable[[], AbstractContextManager[None]]


@contextmanager
def memory_report(run: Run, path: Path | None) -> Iterator[Measure]:
    """Yield a context manager for each step, which writes its memory as a JSON line.

    It does nothing without a file. Bytes are those on the first device, before the gradients are
    freed; peaks are given for each GPU.
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
        started = monotonic()
        with activations(run.wrapped, run.group.device) as kept:
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
            }
        row = {"step": next(steps), "seconds": seconds, **held, **peaks}
        print(json.dumps(row), file=file, flush=True)

    with path.open("w", encoding="utf-8") as file:
        yield step


def total_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of tensors; of sharded ones, those of the local part."""
    return sum(_local(each).nbytes for each in tensors if isinstance(each, Tensor))


def _address(tensor: Tensor) -> int:
    return _local(tensor).untyped_storage().data_ptr()


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


@contextmanager
def shapes_traced(run: Run, print_line: Print, requested: bool = True) -> Iterator[None]:
    """Print the shapes inside and outside the model, each combination once."""
    if not requested:
        yield
        return
    if isinstance(run.wrapped, Replicated):
        devices = len(run.group.devices)
        split = f"each batch is split over {devices} devices"
        if run.wrapped.simulated > 1:
            split = f"simulated: {devices} parts of each batch, one after the other on the CPU"
        elif devices == 1:
            split = "one device: nothing is split (--devices cpu,cpu simulates a split into two)"
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
