"""Build the model of --model: ``package.module:Class`` or ``path/to/file.py:Class``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

from ckptkit.cli import render

PATIENCE = 10.0  # seconds after which a note reports that the code still runs


def built(spec: str, args: Mapping[str, object] | None = None) -> Any:
    """Import the class and build the model, a torch.nn.Module.

    The output of the model's code goes to standard error.

    If building takes long, print a note. ckptkit never stops the code. Raises
    ModelError if the import or the constructor fails.
    """
    from threading import Timer

    from ckptkit.loading.building import model_from

    text = f"{spec} is still being imported and built; ckptkit waits, Ctrl-C stops it"
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
    """Redirect standard output to standard error, for Python, libraries and child processes.

    Standard output is only for the report of the command.
    """
    if sys.stdout is not None:
        sys.stdout.flush()
    try:
        kept = os.dup(1)
        os.dup2(2, 1)
    except OSError:  # one of the streams is closed
        kept = None
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)
