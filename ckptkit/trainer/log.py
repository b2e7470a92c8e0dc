"""The log of a run: a line per epoch, metrics as JSON lines, a plot."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from ckptkit.trainer.config import Files, RequestError
from ckptkit.trainer.run import Run


class Log:
    """``with Log(run, files, say) as log: log.epoch(...)``; the plot is drawn at the end."""

    def __init__(self, run: Run, files: Files, say: Callable[[str], None]) -> None:
        self.run, self.files, self.say = run, files, say
        self.accuracy = 0.0
        self.rows: list[dict[str, Any]] = []
        self.metrics: TextIO | None = None

    def __enter__(self) -> Log:
        if self.files.plot:
            _figure()  # missing? better known now
        if self.files.metrics and self.run.group.rank == 0:
            self.metrics = self.files.metrics.open(
                "a" if self.files.resume else "w", encoding="utf-8"
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self.metrics:
            self.metrics.close()
        if self.files.plot and self.rows and self.run.group.rank == 0:
            draw(self.rows, self.files.plot)

    def epoch(
        self, loss: float, test_loss: float, accuracy: float, rate: float, seconds: float
    ) -> None:
        """Log the results of a finished epoch."""
        self.accuracy = accuracy
        number, last = self.run.epoch, self.run.config.epochs
        row = {
            "epoch": number,
            "loss": loss,
            "test_loss": test_loss,
            "accuracy": accuracy,
            "lr": rate,
        }
        self.rows.append(row)
        self.say(
            f"epoch {number:>{len(str(last))}}/{last}  loss {loss:.4f}  test loss {test_loss:.4f}"
            f"  accuracy {accuracy:.4f}  lr {rate:.3g}  {seconds:.1f} s"
        )
        if self.metrics:
            print(json.dumps({**row, "seconds": round(seconds, 3)}), file=self.metrics, flush=True)


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw losses and accuracy over the epochs, as PNG."""
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
    right.set(ylabel="accuracy", ylim=(0, 1))
    left.legend(handles=lines, loc="center right")
    figure.savefig(path, format="png")


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RequestError("--plot needs matplotlib", hint="pip install matplotlib") from error
    return Figure(figsize=(7, 4), layout="constrained")
