"""Choose the file of each tensor: planned from sizes alone, the same each time.

As huggingface_hub does it: in the order of the state_dict, a file is full where the next tensor
would bring it over the limit, and a tensor that is larger than the limit has a file to itself.
Tensors that share memory count once and stay together. A checkpoint that fits into one file is
written as one file without number and index. Source: https://github.com/huggingface/huggingface_hub
(serialization/_base.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ckptkit.core.errors import TensorError
from ckptkit.core.limits import check
from ckptkit.core.plan import OutputFile
from ckptkit.formats.common.folder_names import INDEX
from ckptkit.formats.common.plain_json import is_utf8

DEFAULT_SIZE = 5 * 10**9  # bytes


def split(sizes: Mapping[str, int], limit: int | None) -> list[list[str]]:
    """Return names by file, from the bytes of each and a file's limit (None: `DEFAULT_SIZE`)."""
    limit = DEFAULT_SIZE if limit is None else limit
    files: list[list[str]] = []
    current: list[str] = []
    reached = 0
    for name, size in sizes.items():
        if size > limit:
            files.append([name])
            continue
        if reached + size > limit:
            files.append(current)
            current, reached = [], 0
        current.append(name)
        reached += size
    return [*files, current] if current or not files else files


def shard_names(stem: str, suffix: str, count: int) -> list[str]:
    """Return ``model-00001-of-00002.safetensors``..., or ``model.safetensors`` for one file."""
    if count == 1:
        return [stem + suffix]
    return [f"{stem}-{number:05}-of-{count:05}{suffix}" for number in range(1, count + 1)]


def index_file(name: str, places: Mapping[str, str], metadata: Mapping[str, Any]) -> OutputFile:
    """Return the index of the shards whose files `places` names.

    Raises LimitError for one too large to read.
    """
    odd = [place for place in places if not is_utf8(place)]
    if odd:
        raise TensorError(
            f"an index cannot hold the name {odd[0]!r:.100}", hint="`rename` changes it"
        )
    text = (
        json.dumps({"metadata": metadata, "weight_map": places}, indent=2, ensure_ascii=False)
        + "\n"
    )
    data = text.encode()
    check("index_bytes", len(data), "bytes of the index")
    return OutputFile(name + INDEX, (data,))
