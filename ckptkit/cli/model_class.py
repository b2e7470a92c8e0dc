"""The model that a command names: ``package.module:Class`` or ``path/to/file.py:Class``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

from ckptkit.cli import render

PATIENCE = 10.0  # seconds after which a note says what is running


def built(spec: str, args: Mapping[str, object] | None = None) -> Any:
    """Import and build the model, a torch.nn.Module. What its code prints goes to standard error.

    A note says so if that takes long: ckptkit does not end it. Raises ModelError.
    """
    from threading import Timer

    from ckptkit.loading.building import model_from

    text = f"{spec} is still being imported and built: ckptkit waits for it; Ctrl-C stops it"
    timer = Timer(PATIENCE, render.note, (text,))
    timer.daemon = True
    timer.start()
    try:
        with _output_to_stderr():
            return model_from(spec, args)
    finally:
        timer.cancel()


@contextmanager
def _output_to_stderr() -> Iterator[None]:
    """Send standard output to standard error: that of Python, of libraries and of child processes.

    Standard output is for the report of the command alone.
    """
    if sys.stdout is not None:
        sys.stdout.flush()
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # one of them is closed
        kept = None
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)
