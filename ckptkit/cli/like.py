"""Read the value of --like: a checkpoint, its index, or a model class."""

from __future__ import annotations

import json
import os
import re
from typing import Any

from ckptkit.core.errors import UsageError
from ckptkit.edits.rules import Shapes

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
        from ckptkit.cli.model_class import built
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
