"""Copy the small files beside a model's weights: configuration, tokenizer, generation settings.

If a conversion changes the dtype of the weights, the dtype in the copy of config.json changes too.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

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
    "added_tokens.json", "generation_config.json", "merges.txt", "preprocessor_config.json",
    "processor_config.json", "special_tokens_map.json", "spiece.model", "tokenizer.json",
    "tokenizer.model", "tokenizer_config.json", "video_preprocessor_config.json", "vocab.json",
    "vocab.txt",
}  # fmt: skip
_TEMPLATE = re.compile(r"chat_template[\w.-]*\.(json|jinja)")


def with_sidecars(checkpoint: Checkpoint, folder: Folder) -> tuple[Checkpoint, tuple[str, ...]]:
    """Add the files beside the weights in `folder` to the checkpoint. Also return their names.

    If the checkpoint has a file of the same name, keep the file of the checkpoint. If the folder
    contains no configuration, add no files.
    """
    try:
        names = folder.list()
    except CkptkitError:  # web servers do not list files
        names = []
    files: list[tuple[str, bytes]] = []
    warnings: list[str] = []
    for name in () if CONFIGS.isdisjoint(names) else names:
        if name in dict(checkpoint.companions) or not (name in _NAMES or _TEMPLATE.fullmatch(name)):
            continue
        try:
            source = folder.open(name)
            if source.size > LARGEST:
                warnings.append(f"{name} is larger than {size(LARGEST)}: not copied")
            else:
                files.append((name, source.read(0, source.size)))
        except CkptkitError as error:
            warnings.append(f"{name} is not copied: {error.message}")
    changed = replace(
        checkpoint,
        companions=(*checkpoint.companions, *files),
        warnings=(*checkpoint.warnings, *warnings),
    )
    return changed, tuple(name for name, _ in files)


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


def with_dtype(checkpoint: Checkpoint, old: str | None) -> Checkpoint:
    """Return the checkpoint with a config.json that contains the dtype of the weights.

    `old` is the dtype before the edits. If the edits did not change the dtype, or if the file has a
    ``quantization_config``, do not change the file. In the dict of a submodel (``text_config``),
    change the dtype only if it is `old` or equals the dtype of the complete model.
    """
    # imported here because most outputs are no folders
    from ckptkit.quantized.group import parsed, with_config

    config, new = parsed(dict(checkpoint.companions).get(CONFIG, b"")), of_weights(checkpoint)
    if new is None or new == old or "quantization_config" in config:
        return checkpoint
    said = next((_plain(config[field]) for field in _FIELDS if field in config), None)
    submodels = [part for part in config.values() if isinstance(part, dict)]
    changed: dict[str, None] = {}
    for part in (config, *submodels):
        for field in _FIELDS:
            plain = _plain(part.get(field))
            is_meant = part is config or plain in (said, old)
            if plain is not None and plain != new and is_meant:
                part[field] = new
                changed[f"{field} {plain} -> {new}"] = None
    if not changed:
        return checkpoint
    notes = (*checkpoint.notes, f"{CONFIG}: {some(changed, 3)}")
    return replace(with_config(checkpoint, config), notes=notes)


def _plain(said: object) -> str | None:
    """Return the name of the dtype in a field of a configuration, or None for other values."""
    name = said.removeprefix("torch.") if isinstance(said, str) else None
    return name if name in dtypes.BY_NAME else None
