"""The small files of a model beside its weights: configuration, tokenizer, generation settings.

The dtype in a config.json is updated after the weights got another one.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from ckptkit.core import dtypes
from ckptkit.core.bytesource import Folder
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.text import size, some

CONFIGS = frozenset({"config.json", "adapter_config.json"})  # one is in every folder of a model
LARGEST = 64 << 20  # bytes of one file; tokenizers of large vocabularies take 33 MB
# Data alone: neither pickles nor code.
_NAMES = CONFIGS | {
    "added_tokens.json",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "video_preprocessor_config.json",
    "vocab.json",
    "vocab.txt",
}
_TEMPLATE = re.compile(r"chat_template[\w.-]*\.(json|jinja)")


class Sidecars(NamedTuple):
    """Files to copy, by name, and warnings about those that are not copied."""

    files: tuple[tuple[str, bytes], ...] = ()
    warnings: tuple[str, ...] = ()


def sidecars(folder: Folder, made: Collection[str] = ()) -> Sidecars:
    """Return the sidecars of a folder of a model, without those that are `made` anew.

    A folder without the configuration of a model has none.
    """
    try:
        names = folder.list()
    except CkptkitError:  # a web server does not list files
        return Sidecars()
    if CONFIGS.isdisjoint(names):
        return Sidecars()
    files: list[tuple[str, bytes]] = []
    warnings: list[str] = []
    for name in names:
        if name in made or not (name in _NAMES or _TEMPLATE.fullmatch(name)):
            continue
        try:
            source = folder.open(name)
            if source.size > LARGEST:
                warnings.append(f"{name} is larger than {size(LARGEST)}: not copied")
            else:
                files.append((name, source.read(0, source.size)))
        except CkptkitError as error:
            warnings.append(f"{name} is not copied: {error.message}")
    return Sidecars(tuple(files), tuple(warnings))


# The dtype in config.json


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
