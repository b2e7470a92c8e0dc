"""The config.json of a model, as edits change it: a file that the checkpoint brings along."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ckptkit.core.bytesource import Folder
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.edits.rules import CONFIG_NAME
from ckptkit.quantized.group import parsed, read_json_of


def config_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the configuration: as earlier edits made it, or as it is beside the weights.

    Empty where there is none.
    """
    own = dict(checkpoint.companions).get(CONFIG_NAME)
    folder: Folder | None = checkpoint.folder
    return read_json_of(folder or checkpoint.source, CONFIG_NAME) if own is None else parsed(own)


def with_config(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint with this configuration, which is written beside it into a folder."""
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    others = (each for each in checkpoint.companions if each[0] != CONFIG_NAME)
    data = text.encode("utf-8", "surrogatepass")
    return replace(checkpoint, companions=(*others, (CONFIG_NAME, data)))


def with_changes(
    checkpoint: Checkpoint, changes: Mapping[str, Any], *, instead_of: Iterable[Any] | None = None
) -> Checkpoint:
    """Return the checkpoint with changes of its configuration, and a note of them.

    Without a configuration, nothing is made up. If `instead_of` is given, only values that are one
    of these are changed.
    """
    config = config_of(checkpoint)
    old = None if instead_of is None else [*instead_of]
    changes = {
        word: value
        for word, value in changes.items()
        if config.get(word) != value and (old is None or config.get(word) in old)
    }
    if not config or not changes:
        return checkpoint
    said = ", ".join(f"{word} {json.dumps(value)}" for word, value in changes.items())
    made = with_config(checkpoint, {**config, **changes})
    return replace(made, notes=(*made.notes, f"{CONFIG_NAME}: {said}"))
