"""Read and change config.json, the configuration file of a model next to its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from ckptkit.core.bytesource import ByteSource, Folder, LocalFile
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import PathError, UsageError
from ckptkit.quantized.group import CONFIG, parsed, read_json_of, with_config

BYTES = 1 << 20  # maximum size of config.json in bytes


def read(path: str) -> Mapping[str, Any]:
    """Read a JSON object from the file `path`.

    Raises PathError if the file cannot be opened, and UsageError if it is too large or contains no
    JSON object.
    """
    with closing(LocalFile(path)) as source:
        return _parsed(source)


def find(source: ByteSource | Folder | None) -> Mapping[str, Any] | None:
    """Read the config.json next to a checkpoint. Return None if the file is missing.

    Raises UsageError if the file is too large or contains no JSON object.
    """
    folder = _folder(source)
    try:
        if folder is None or CONFIG not in folder:
            return None
        return _parsed(folder.open(CONFIG))
    except PathError:
        return None


def is_beside(source: ByteSource | Folder | None) -> bool:
    """Return True if there is a config.json next to a checkpoint."""
    folder = _folder(source)
    return folder is not None and CONFIG in folder


def lazily(checkpoint: Checkpoint) -> Callable[[], Mapping[str, Any] | None]:
    """Return a function that reads the configuration when it is called.

    If an earlier edit set a config.json on the checkpoint, the function returns the content of that
    config.json. Otherwise, the function reads the config.json next to the file.
    """
    own = dict(checkpoint.companions).get(CONFIG)
    return lambda: find(checkpoint.source) if own is None else json.loads(own)


def _folder(source: ByteSource | Folder | None) -> Folder | None:
    if isinstance(source, Folder):
        return source
    place = None if source is None else source.folder_and_name()
    return None if place is None else place[0]


def _parsed(source: ByteSource) -> Mapping[str, Any]:
    if source.size > BYTES:
        raise UsageError(
            f"is larger than {BYTES:,} bytes, too large for a configuration", where=source.name
        )
    try:
        found = json.loads(source.read(0, source.size).decode(), object_hook=_number)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"is not JSON: {str(error)[:100]}", where=source.name) from error
    if not isinstance(found, dict):
        raise UsageError("is not a JSON object", where=source.name)
    return found


def _number(found: dict[str, Any]) -> Any:
    """Decode ``{"__float__": "Infinity"}``, the notation of transformers for NaN and infinities."""
    if len(found) == 1 and found.get("__float__") in ("Infinity", "-Infinity", "NaN"):
        return float(found["__float__"])
    return found


def config_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the configuration of the model as a dict.

    If an earlier edit set a configuration, return that configuration. Otherwise, return the content
    of the config.json next to the weights, or an empty dict if that file is missing.
    """
    own = dict(checkpoint.companions).get(CONFIG)
    folder: Folder | None = checkpoint.folder
    return read_json_of(folder or checkpoint.source, CONFIG) if own is None else parsed(own)


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
    return replace(made, notes=(*made.notes, f"{CONFIG}: {listed}"))
