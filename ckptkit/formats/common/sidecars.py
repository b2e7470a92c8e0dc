"""The small files of a model beside its weights: configuration, tokenizer, generation settings."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from ckptkit.core.bytesource import Folder
from ckptkit.core.errors import CkptkitError
from ckptkit.core.text import size

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
    for name in _known(names):
        if name in made:
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


def _known(names: Collection[str]) -> Iterator[str]:
    return (name for name in names if name in _NAMES or _TEMPLATE.fullmatch(name))
