"""Copy the small files beside a model's weights: configuration, tokenizer, generation settings.

If a conversion changes the dtype of the weights, the dtype in the copy of config.json changes too.
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

# Names of configurations. The folder of a model contains a file with one of these names.
CONFIGS = frozenset({"config.json", "adapter_config.json"})
LARGEST = 64 << 20  # maximum size of a file in bytes; a large tokenizer takes 33 MB
# Names of the files to copy. Files with these names contain neither pickles nor code.
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
    """The files to copy, by name, and warnings about files that are not copied."""

    files: tuple[tuple[str, bytes], ...] = ()
    warnings: tuple[str, ...] = ()


def sidecars(folder: Folder, made: Collection[str] = ()) -> Sidecars:
    """Return the files to copy from the folder of a model.

    `made` contains the names of files to skip.

    Return no files if the folder contains no configuration.
    """
    try:
        names = folder.list()
    except CkptkitError:  # web servers do not list files
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


# Reading and updating the dtype in config.json


CONFIG = "config.json"
_FIELDS = ("torch_dtype", "dtype")  # the field of transformers before version 5, and since 5
_WEIGHTS = ("float64", "float32", "float16", "bfloat16")  # the dtypes that `of_weights` counts


def of_weights(checkpoint: Checkpoint) -> str | None:
    """Return the float dtype with the most bytes in the weights.

    Return None if no weight has a float dtype.
    """
    counts: Counter[str] = Counter()
    try:
        for tensor in checkpoint.weights.values():
            if tensor.dtype.name in _WEIGHTS:
                counts[tensor.dtype.name] += tensor.nbytes
    except CkptkitError:
        return None
    return counts.most_common(1)[0][0] if counts else None


def renewed(text: bytes, old: str | None, new: str) -> tuple[bytes, list[str]]:
    """Return a config.json with the dtype `new`, and the list of changes.

    In the dict of a submodel (``text_config``), change the dtype only if it is `old` or equals the
    dtype of the complete model. If the file has a ``quantization_config``, return `text` unchanged.
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
    """Set the dtype fields of a dict to `new`. Yield a description of each change.

    If `only` is given, change only fields with one of these dtypes.
    """
    for field in _FIELDS:
        plain = _plain(part.get(field))
        if plain is None or plain == new or (only is not None and plain not in only):
            continue
        part[field] = new
        yield f"{field} {plain} -> {new}"


def _plain(said: object) -> str | None:
    """Return the name of the dtype in a field of a configuration, or None for other values."""
    name = said.removeprefix("torch.") if isinstance(said, str) else None
    return name if name in dtypes.BY_NAME else None


def note(changed: list[str]) -> str:
    """Return the note that lists the changes in config.json."""
    return f"{CONFIG}: {some(changed, 3)}"
