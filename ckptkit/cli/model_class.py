"""Build the model of --model, and read the value of --like: a checkpoint, an index, or a model."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any

from ckptkit.cli import render
from ckptkit.core.errors import UsageError
from ckptkit.edits.rules import Shapes

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


_MODEL = re.compile(r"(.+\.py|[A-Za-z_][\w.]*):[A-Za-z_]\w*")
_INDEX = ".index.json"
_BYTES = 64 << 20


def expected(name: str) -> Shapes:
    """Return the names and shapes of the tensors of a checkpoint, an index or a model.

    Import and run the code of a model. If shards of an index are missing, all shapes are None.

    Raises InputError if the checkpoint cannot be read or the model cannot be built, and UsageError
    for an invalid index.
    """
    if _MODEL.fullmatch(name) and not os.path.exists(name):
        from ckptkit.loading.building import model_shapes

        return {key: shape for key, (_, shape) in model_shapes(built(name)).items()}
    if name.endswith(_INDEX):
        names, folder = _index(name), os.path.dirname(name)
        shards = [os.path.join(folder, os.path.basename(file)) for file in names.values()]
        if not all(map(os.path.exists, set(shards))):
            return dict.fromkeys(names)
    from ckptkit.api import open_checkpoint

    with open_checkpoint(name) as checkpoint:
        return {key: tensor.shape for key, tensor in checkpoint.weights.items()}


def _index(name: str) -> dict[str, str]:
    """Return the ``weight_map`` of an index, which maps tensor names to file names."""
    try:
        with open(name, "rb") as file:
            found: Any = json.loads(file.read(_BYTES))
    except OSError as error:
        raise UsageError(f"cannot be read: {error.strerror}", where=name) from error
    except (ValueError, RecursionError) as error:
        raise UsageError("is not an index of a sharded checkpoint", where=name) from error
    places = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise UsageError("has no weight_map", where=name)
    return places
