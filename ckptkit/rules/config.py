"""The numbers of a model beside its checkpoint: config.json, never executed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ckptkit.core.bytesource import ByteSource, Folder, LocalFile
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import PathError, UsageError

NAME = "config.json"
BYTES = 1 << 20


def read(path: str) -> Mapping[str, Any]:
    """The object in the JSON file at `path`. Raises PathError, UsageError."""
    source = LocalFile(path)
    try:
        return _parsed(source)
    finally:
        source.close()


def find(source: ByteSource | Folder | None) -> Mapping[str, Any] | None:
    """The object in config.json beside a checkpoint; None if there is none. Raises UsageError."""
    folder = _folder(source)
    try:
        if folder is None or NAME not in folder:
            return None
        return _parsed(folder.open(NAME))
    except PathError:
        return None


def is_beside(source: ByteSource | Folder | None) -> bool:
    """Return whether there is a config.json beside a checkpoint."""
    folder = _folder(source)
    return folder is not None and NAME in folder


def lazily(checkpoint: Checkpoint) -> Callable[[], Mapping[str, Any] | None]:
    """Return the configuration that a checkpoint brings along, else the one beside it, when asked
    for.
    """
    own = dict(checkpoint.companions).get(NAME)
    return lambda: find(checkpoint.source) if own is None else json.loads(own)


def _folder(source: ByteSource | Folder | None) -> Folder | None:
    if isinstance(source, Folder):
        return source
    place = None if source is None else source.folder_and_name()
    return None if place is None else place[0]


def _parsed(source: ByteSource) -> Mapping[str, Any]:
    if source.size > BYTES:
        raise UsageError(
            f"is larger than {BYTES:,} bytes: it is not a configuration", where=source.name
        )
    try:
        found = json.loads(source.read(0, source.size).decode(), object_hook=_number)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"is not JSON: {str(error)[:100]}", where=source.name) from error
    if not isinstance(found, dict):
        raise UsageError("is not a JSON object", where=source.name)
    return found


def _number(found: dict[str, Any]) -> Any:
    """Infinity and NaN, which transformers writes as ``{"__float__": "Infinity"}``."""
    if len(found) == 1 and found.get("__float__") in ("Infinity", "-Infinity", "NaN"):
        return float(found["__float__"])
    return found
