"""What torch's archives have no place for, in a record of our own that torch passes over:
``.data/ckptkit.json``.

    {"version": 1, "metadata": {text: text}}

The metadata of a checkpoint: what safetensors keeps beside its tensors, the source code that legacy
streams carry.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckptkit.containers import strict_json
from ckptkit.core.errors import FormatError
from ckptkit.formats.common.plain_json import dump

NAME = ".data/ckptkit.json"
VERSION = 1
_FRAMEWORK = "format"  # the hub's word for "of torch", which goes without saying


def write(metadata: Mapping[str, str]) -> bytes | None:
    """The record, None if there is nothing to record."""
    return record(metadata) if metadata.keys() - {_FRAMEWORK} else None


def record(metadata: Mapping[str, str]) -> bytes:
    """The record, even of nothing."""
    texts = {key: text for key, text in metadata.items() if key != _FRAMEWORK}
    return dump({"version": VERSION, "metadata": texts}).encode("utf-8", "replace")


def read(data: bytes) -> dict[str, str]:
    """The metadata of a record. Raises FormatError."""
    said = strict_json.parse(data, NAME)
    texts = (
        said.get("metadata") if isinstance(said, dict) and said.get("version") == VERSION else None
    )
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise FormatError(f"record {NAME} is not one that ckptkit wrote")
    return texts
