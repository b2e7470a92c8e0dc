"""The names of the files of a folder: which of them are checkpoints, and which one to read.

    model.safetensors.index.json                 an index of shards
    model-00002-of-00003.safetensors             a shard: the stem, its number, how many there are
    model.safetensors, last.ckpt                 a file of its own
    consolidated.00.pth, consolidated.01.pth     the parts of a Llama release, one for each process

Of a model saved as safetensors and as torch files (``model``, ``pytorch_model``), the former are
taken, as transformers does. An index is preferred to other files. A trainer's other files
(optimizer.pt, training_args.bin) count only if there is no model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from itertools import chain
from typing import NamedTuple

from ckptkit.formats.table import BY_SUFFIX

SAFETENSORS, BIN = ".safetensors", ".bin"
INDEX = ".index.json"
_NUMBERED = re.compile(r"(.+)-[0-9]{1,9}-of-([0-9]{1,9})", re.DOTALL)
_PARALLEL = re.compile(r"consolidated\.[0-9]{2}\.pth")
_STATE = re.compile(
    r"(optimizer|scheduler|sampler|scaler|rng_state|random_states|custom_checkpoint|dl_state_dict)"
    r"(_[0-9]+)?\.(bin|pt|pth|pkl)"
)
_BESIDE = re.compile(r"(training_args|distrib_optim|openvino_.*)\.(bin|pt|pth)")
TRACKER = "latest_checkpointed_iteration.txt"  # of Megatron-LM, verl and their kin


class Candidate(NamedTuple):
    """A checkpoint that a folder holds."""

    form: str  # index, shards, parallel or file
    stem: str
    suffix: str
    total: str  # of the shards, as their names spell it
    files: tuple[str, ...]  # in order; of an index, itself alone


def candidates(names: Iterable[str]) -> list[Candidate]:
    """Return every checkpoint among the names of a folder."""
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for name in sorted(names):
        kind = _kind(name)
        if kind is not None:
            groups.setdefault(kind, []).append(name)
    found = [Candidate(*kind, tuple(files)) for kind, files in groups.items()]
    found = [
        each._replace(form="file") if each.form == "parallel" and len(each.files) == 1 else each
        for each in found
    ]
    return [each for each in found if not _is_beside(each.files[0])] or found


def _is_beside(name: str) -> bool:
    return is_state(name) or _BESIDE.fullmatch(name) is not None


def is_state(name: str) -> bool:
    """Return whether a file of this name is the state of a training, beside its weights."""
    return _STATE.fullmatch(name) is not None


def _kind(name: str) -> tuple[str, str, str, str] | None:
    """Return form, stem, suffix and total of a file; None if it is not named as a checkpoint."""
    base = name.removesuffix(INDEX)
    suffix = next((each for each in BY_SUFFIX if base.endswith(each)), None)
    if suffix is None:
        return None
    stem = base.removesuffix(suffix)
    if base != name:
        return ("index", stem, suffix, "") if suffix in (SAFETENSORS, BIN) else None
    numbered = _NUMBERED.fullmatch(stem)
    if numbered:
        return "shards", numbered[1], suffix, numbered[2]
    return (
        ("parallel", "consolidated", suffix, "")
        if _PARALLEL.fullmatch(name)
        else ("file", stem, suffix, "")
    )


def best(names: Iterable[str]) -> Candidate | None:
    """Choose one candidate; None if there is none, or if several are possible."""
    found = preferred(names)
    return found[0] if len(found) == 1 else None


def preferred(names: Iterable[str]) -> list[Candidate]:
    found = candidates(names)
    safe = {_model(each.stem) for each in found if each.suffix == SAFETENSORS}
    found = [each for each in found if each.suffix == SAFETENSORS or _model(each.stem) not in safe]
    return [each for each in found if each.form == "index"] or found


def _model(stem: str) -> str:
    return stem.removeprefix("pytorch_")


def unread(names: Iterable[str], read: Collection[str]) -> tuple[str, ...]:
    """Return a warning about checkpoints in a folder that were not read."""
    files = chain.from_iterable(each.files for each in candidates(names))
    left = [file for file in files if file not in read]
    return (f"the folder also holds {listed(left)}, not read",) if left else ()


def listed(files: Collection[str]) -> str:
    return ", ".join(list(files)[:4]) + (", ..." if len(files) > 4 else "")
