"""The log of a run: a line per epoch, metrics as JSON lines, a plot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ckptkit.trainer.config import Files, RequestError
from ckptkit.trainer.run import Run


class Log:
    """``with Log(run, files, log) as rows: rows.epoch(...)``; the plot is drawn at the end."""

    def __init__(self, run: Run, files: Files, log: Callable[[str], None]) -> None:
        self.run, self.files, self.log = run, files, log
        self.epochs: list[dict[str, Any]] = []
        self.metrics: IO[str] | None = None

    def __enter__(self) -> Log:
        if self.files.plot:
            _figure()  # fail now if matplotlib is missing
        if self.files.metrics and self.run.group.rank == 0:
            mode = "a" if self.files.resume else "w"
            self.metrics = self.files.metrics.open(mode, encoding="utf-8")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self.metrics:
            self.metrics.close()
        if self.files.plot and self.epochs and self.run.group.rank == 0:
            draw(self.epochs, self.files.plot)

    def step(self, step: int, test_loss: float, accuracy: float) -> None:
        """Log an evaluation within an epoch (--eval-every)."""
        epoch = self.run.epoch + 1
        self.log(f"epoch {epoch} step {step}  test loss {test_loss:.4f}  accuracy {accuracy:.4f}")
        self._write({"epoch": epoch, "step": step, "test_loss": test_loss, "accuracy": accuracy})

    def epoch(
        self, loss: float, test_loss: float, accuracy: float, lr: float, seconds: float
    ) -> None:
        """Log the results of a finished epoch."""
        number, last = self.run.epoch, self.run.config.epochs
        row = {
            "epoch": number,
            "loss": loss,
            "test_loss": test_loss,
            "accuracy": accuracy,
            "lr": lr,
        }
        self.epochs.append(row)
        self.log(
            f"epoch {number:>{len(str(last))}}/{last}  loss {loss:.4f}  test loss {test_loss:.4f}"
            f"  accuracy {accuracy:.4f}  lr {lr:.3g}  {seconds:.1f} s"
        )
        self._write({**row, "seconds": round(seconds, 3)})

    def _write(self, row: dict[str, Any]) -> None:
        if self.metrics:
            print(json.dumps(row), file=self.metrics, flush=True)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw losses and accuracy over the epochs, as PNG."""
    from matplotlib.ticker import MaxNLocator

    figure = _figure()
    left = figure.subplots()
    right = left.twinx()
    epochs = [row["epoch"] for row in rows]
    lines = [
        *left.plot(epochs, [row["loss"] for row in rows], color="tab:blue", label="loss"),
        *left.plot(epochs, [row["test_loss"] for row in rows], color="tab:cyan", label="test loss"),
        *right.plot(
            epochs, [row["accuracy"] for row in rows], color="tab:orange", label="accuracy"
        ),
    ]
    left.set(xlabel="epoch", ylabel="loss")
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set(ylabel="accuracy", ylim=(0, 1))
    figure.legend(handles=lines, loc="outside upper center", ncols=len(lines))
    figure.savefig(path, format="png")


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RequestError("--plot needs matplotlib", hint="pip install matplotlib") from error
    return Figure(figsize=(7, 4), layout="constrained")
