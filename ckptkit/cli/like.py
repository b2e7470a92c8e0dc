"""Values of --like: a checkpoint, the index of one, or a model class."""

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
    """Names and shapes. Raises InputError, UsageError; of a model, its code is imported and run."""
    if _MODEL.fullmatch(name) and not os.path.exists(name):
        from ckptkit.cli.model_class import built
        from ckptkit.loading.building import model_shapes

        return {key: shape for key, (_, shape) in model_shapes(built(name)).items()}
    if name.endswith(_INDEX) and not _has_shards(name):
        return dict.fromkeys(_index(name))
    from ckptkit.api import open_checkpoint

    checkpoint = open_checkpoint(name)
    try:
        return {key: tensor.shape for key, tensor in checkpoint.weights.items()}
    finally:
        checkpoint.close()


def _has_shards(name: str) -> bool:
    folder = os.path.dirname(name)
    return all(
        os.path.exists(os.path.join(folder, os.path.basename(file)))
        for file in set(_index(name).values())
    )


def _index(name: str) -> dict[str, str]:
    """The weight_map of an index: key to file."""
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
