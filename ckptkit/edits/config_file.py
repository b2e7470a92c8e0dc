"""Read and change config.json, the configuration file of a model next to its checkpoint."""

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
    """Return the configuration of the model as a dict.

    If an earlier edit set a configuration, return that configuration. Otherwise, return the content
    of the config.json next to the weights, or an empty dict if that file is missing.
    """
    own = dict(checkpoint.companions).get(CONFIG_NAME)
    folder: Folder | None = checkpoint.folder
    return read_json_of(folder or checkpoint.source, CONFIG_NAME) if own is None else parsed(own)


def with_config(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """Set the configuration of the checkpoint. If the output is a folder, ckptkit writes the
    configuration as config.json."""
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    others = (each for each in checkpoint.companions if each[0] != CONFIG_NAME)
    data = text.encode("utf-8", "surrogatepass")
    return replace(checkpoint, companions=(*others, (CONFIG_NAME, data)))


def changes_of(
    config: Mapping[str, Any], word: str, value: Any, instead_of: Iterable[Any] | None = None
) -> dict[str, Any]:
    """Return the changes that set `word` to `value` at the top and in ``text_config``.

    A part changes only if it contains the field `word`. If `instead_of` is given, a part changes
    only if `instead_of` contains the old value of the field.
    """
    old = None if instead_of is None else [*instead_of]

    def differs(part: Mapping[str, Any]) -> bool:
        return part.get(word, value) != value and (old is None or part[word] in old)

    text = config.get("text_config")
    changes: dict[str, Any] = {word: value} if differs(config) else {}
    if isinstance(text, dict) and differs(text):
        changes["text_config"] = {word: value}
    return changes


def with_changes(checkpoint: Checkpoint, changes: Mapping[str, Any]) -> Checkpoint:
    """Change values of the configuration and add a note. Without a configuration, do nothing.

    A dict in `changes` changes values in a part of the configuration.
    """
    config = config_of(checkpoint)
    changes = {word: value for word, value in changes.items() if config.get(word) != value}
    if not config or not changes:
        return checkpoint
    parts = {
        word: {**config[word], **value}
        for word, value in changes.items()
        if isinstance(value, dict) and isinstance(config.get(word), dict)
    }
    listed = ", ".join(f"{word} {json.dumps(value)}" for word, value in changes.items())
    made = with_config(checkpoint, {**config, **changes, **parts})
    return replace(made, notes=(*made.notes, f"{CONFIG_NAME}: {listed}"))
