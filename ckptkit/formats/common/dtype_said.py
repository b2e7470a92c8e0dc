"""Update the dtype in a config.json after the weights got another one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

from ckptkit.core import dtypes
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.text import some

CONFIG = "config.json"
_FIELDS = ("torch_dtype", "dtype")  # transformers before 5, and since
_WEIGHTS = ("float64", "float32", "float16", "bfloat16")  # what models compute in


def of_weights(checkpoint: Checkpoint) -> str | None:
    """Return the dtype of most bytes of the weights that are plain floats, None without any."""
    counts: Counter[str] = Counter()
    try:
        for tensor in checkpoint.weights.values():
            if tensor.dtype.name in _WEIGHTS:
                counts[tensor.dtype.name] += tensor.nbytes
    except CkptkitError:
        return None
    return counts.most_common(1)[0][0] if counts else None


def renewed(text: bytes, old: str | None, new: str) -> tuple[bytes, list[str]]:
    """Return a config.json that says the dtype `new`, and what was changed.

    The parts of a model (``text_config``) may have another dtype: they get the new one where they
    had that of the whole, or `old`. What quantized weights are computed in stays.
    """
    try:
        config: Any = json.loads(text)
    except (ValueError, RecursionError):
        return text, []
    if not isinstance(config, dict) or "quantization_config" in config:
        return text, []
    said = next((_plain(config[field]) for field in _FIELDS if field in config), None)
    changed = list(_changes(config, new, None))
    for part in config.values():
        if isinstance(part, dict):
            changed += _changes(part, new, {said, old})
    if not changed:
        return text, []
    made = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return made.encode("utf-8", "surrogatepass"), list(dict.fromkeys(changed))


def _changes(part: dict[str, Any], new: str, only: set[str | None] | None) -> Iterator[str]:
    """Set the fields of a mapping; yield each change. `only`: those of these dtypes."""
    for field in _FIELDS:
        plain = _plain(part.get(field))
        if plain is None or plain == new or (only is not None and plain not in only):
            continue
        part[field] = new
        yield f"{field} {plain} -> {new}"


def _plain(said: object) -> str | None:
    """Return the name of a dtype that a configuration says, None for anything else."""
    name = said.removeprefix("torch.") if isinstance(said, str) else None
    return name if name in dtypes.BY_NAME else None


def note(changed: list[str]) -> str:
    """Return the words about the changes for the summary."""
    return f"{CONFIG}: {some(changed, 3)}"
