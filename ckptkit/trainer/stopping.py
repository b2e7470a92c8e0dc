"""Stop a run on SIGTERM, the signal of cluster schedulers, after saving its checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit import CkptkitError


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


@dataclass
class StopRequest:
    """A flag that is set when SIGTERM arrives. The training loop checks the flag after each
    step."""

    requested: bool = False


@contextmanager
def on_sigterm() -> Iterator[StopRequest]:
    """Record the first SIGTERM. A second SIGTERM calls the previous handler, and usually ends the
    process."""
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # only the main thread may set handlers
        return

    def note(number: int, frame: Any) -> None:
        stop.requested = True
        signal.signal(signal.SIGTERM, before)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)
