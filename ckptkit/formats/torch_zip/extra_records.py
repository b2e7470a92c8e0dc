"""ckptkit's own record in torch's archives, which torch passes over: ``.data/ckptkit.json``.

    {"version": 1, "metadata": {text: text}}

It holds the metadata of a checkpoint: what safetensors keeps besides its tensors, and the source
code that legacy streams carry.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptkit.core.errors import FormatError
from ckptkit.formats.common.plain_json import dump
from ckptkit.formats.containers import strict_json

NAME = ".data/ckptkit.json"
VERSION = 1
_FRAMEWORK = "format"  # the hub's key for the framework: needless in a file of torch


def write(metadata: Mapping[str, str]) -> bytes | None:
    """Return the record, None if there is nothing to record."""
    return record(metadata) if metadata.keys() - {_FRAMEWORK} else None


def record(metadata: Mapping[str, str]) -> bytes:
    """Return the record, even an empty one."""
    texts = {key: text for key, text in metadata.items() if key != _FRAMEWORK}
    return dump({"version": VERSION, "metadata": texts}).encode("utf-8", "replace")


def read(data: bytes) -> dict[str, str]:
    """Parse the metadata of a record. Raises FormatError."""
    parsed = strict_json.parse(data, NAME)
    texts = (
        parsed.get("metadata")
        if isinstance(parsed, dict) and parsed.get("version") == VERSION
        else None
    )
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise FormatError(f"record {NAME} is not one that ckptkit wrote")
    return texts
