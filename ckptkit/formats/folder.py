"""Choose the checkpoint to read in a folder of several files or folders.

The folder may contain:

    model.safetensors, last.ckpt                 a checkpoint with one of the file names below
    latest_checkpointed_iteration.txt            a file with the iteration of the latest save
    refs/main, snapshots/<revision>/             the Hugging Face cache of a model
                                                 (``models--<owner>--<name>``)

ckptkit warns about checkpoints that it does not read. If the folder contains several possible
checkpoints, ckptkit raises an error.

File names that identify checkpoints:

    model.safetensors.index.json                 an index of shards
    model-00002-of-00003.safetensors             a shard: stem, shard number, number of shards
    model.safetensors, last.ckpt                 a single file
    consolidated.00.pth, consolidated.01.pth     the shards of a Llama release, one per rank

If a folder contains a model as safetensors and as torch files (``model``, ``pytorch_model``),
ckptkit reads the safetensors files, as transformers does. ckptkit prefers an index to other files,
and any other file to a GGUF file. ckptkit reads training state (optimizer.pt, training_args.bin)
only if the folder contains no model.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

from ckptkit import formats
from ckptkit.core.bytesource import ByteSource, Folder
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import AmbiguousError, CorruptError, FormatError, SeveralError
from ckptkit.core.text import shell_word, some
from ckptkit.formats.format import CheckedPart, Defect, Probe
from ckptkit.formats.table import BY_SUFFIX

_REVISION = "main"
# Templates for the name of a save's folder. The iteration to insert is in the tracker file.
_TRACKED = ("iter_{:0>7}", "global_step_{}", "{}")


def matches(probe: Probe) -> bool:
    return probe.is_folder and (
        _is_cache(probe) or TRACKER in probe.names or bool(candidates(probe.names))
    )


def read(probe: Probe) -> Checkpoint:
    """Read the checkpoint in the folder.

    Raises AmbiguousError if the folder contains several checkpoints. Raises CorruptError if the
    revision of a Hugging Face cache is missing.
    """
    inner = _meant(probe)
    checkpoint = formats.read(inner, probe.options)
    if isinstance(inner, Folder):
        return checkpoint
    name = os.path.basename(inner.name)
    of_set = next(each.files for each in candidates(probe.names) if name in each.files)
    return replace(checkpoint, warnings=(*unread(probe.names, of_set), *checkpoint.warnings))


def check(probe: Probe) -> Iterator[CheckedPart | Defect]:
    """Yield the checksummed byte ranges of the checkpoint. Raises the errors of `read`."""
    inner = _meant(probe)
    within = "" if isinstance(inner, Folder) else os.path.basename(inner.name)
    return (
        each if each.file else replace(each, file=within) for each in formats.check(Probe(inner))
    )


def _meant(probe: Probe) -> ByteSource | Folder:
    """Return the file or folder to read."""
    if _is_cache(probe):
        return _snapshot(probe)
    if TRACKER in probe.names:
        return _tracked(probe)
    chosen = best(probe.names)
    if chosen is None:
        first = [each.files[0] for each in preferred(probe.names)]
        error = SeveralError(
            f"contains {len(first)} checkpoints: {some(first)}",
            where=probe.name,
            hint=f"name one, e.g. {shell_word(os.path.join(probe.name, first[0]))}",
        )
        error.files = tuple(first)
        raise error
    return probe.folder.open(chosen.files[0])  # the first file, if a GGUF model is split


# A training folder with a tracker file. The tracker file contains the iteration of the latest save.


def _tracked(probe: Probe) -> Folder:
    """Return the folder of the latest save, or the only checkpoint folder inside that folder."""
    word = _word(probe.folder, TRACKER) or ""
    there = probe.folder.folders()
    found = [name for each in _TRACKED if (name := each.format(word)) in there]
    if not found or not word.isalnum():
        raise CorruptError(
            f"{TRACKER} contains the iteration {word[:40]!r}, which has no folder here",
            hint=f"name one of these folders: {some(there)}" if there else None,
        )
    inner = probe.folder.sub(found[0])
    if formats.match(Probe(inner)) is not None:
        return inner
    below = [name for name in inner.folders() if formats.match(Probe(inner.sub(name))) is not None]
    if len(below) != 1:
        one = os.path.join(inner.name, *below[:1])
        raise AmbiguousError(
            f"its latest save {found[0]} contains {len(below)} checkpoints: {some(below)}",
            hint=f"name one, e.g. {shell_word(one)}",
        )
    return inner.sub(below[0])


# The cache of the Hugging Face hub


def _is_cache(probe: Probe) -> bool:
    return "snapshots" in probe.names and not probe.names.isdisjoint(("refs", "blobs"))


def _snapshot(probe: Probe) -> Folder:
    """Return the folder of the revision that ``refs/main`` names, or of the only revision."""
    snapshots = Folder(os.path.join(probe.folder.name, "snapshots"))
    revisions = snapshots.list()
    revision = _word(Folder(os.path.join(probe.folder.name, "refs")), _REVISION)
    if revision is None and len(revisions) != 1:
        raise AmbiguousError(
            f"contains {len(revisions)} revisions, none called {_REVISION}: {some(revisions)}",
            hint=f"name one of the folders in {snapshots.name}",
        )
    revision = revisions[0] if revision is None else revision
    if revision not in revisions:
        raise CorruptError(
            f"its revision {_REVISION} is {revision[:80]!r}, which was not downloaded",
            hint=f"name one of the folders in {snapshots.name}, or download the model again",
        )
    inner = Folder(os.path.join(snapshots.name, revision))
    if _is_cache(Probe(inner)):
        raise FormatError("is a cache inside a cache", where=inner.name)
    return inner


def _word(folder: Folder, name: str) -> str | None:
    """Return the beginning of a text file. Return None if there is no such file."""
    if name not in folder:
        return None
    source = folder.open(name)
    return source.read(0, min(source.size, 256)).decode("utf-8", "replace").strip()


# Names of files


SAFE, BIN, GGUF = ".safetensors", ".bin", ".gguf"
INDEX = ".index.json"
_NUMBERED = re.compile(r"(.+)-[0-9]{1,9}-of-([0-9]{1,9})", re.DOTALL)
_PARALLEL = re.compile(r"consolidated\.[0-9]{2}\.pth")
_STATE = re.compile(
    r"(optimizer|scheduler|sampler|scaler|rng_state|random_states|custom_checkpoint|dl_state_dict)"
    r"(_[0-9]+)?\.(bin|pt|pth|pkl)"
)
_BESIDE = re.compile(r"(training_args|distrib_optim|openvino_.*)\.(bin|pt|pth)")
TRACKER = "latest_checkpointed_iteration.txt"  # written by Megatron-LM, verl and similar trainers


class Candidate(NamedTuple):
    """A checkpoint in a folder."""

    form: str  # index, shards, parallel or file
    stem: str
    suffix: str
    total: str  # number of shards as in the file names, with leading zeros
    files: tuple[str, ...]  # sorted names; only the index if `form` is index


def candidates(names: Iterable[str]) -> list[Candidate]:
    """Return the checkpoints in a folder, recognized by their file names."""
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for name in sorted(names):
        base = name.removesuffix(INDEX)
        suffix = next((each for each in (*BY_SUFFIX, GGUF) if base.endswith(each)), None)
        if suffix is None or (base != name and suffix not in (SAFE, BIN)):
            continue
        stem = base.removesuffix(suffix)
        kind = ("index" if base != name else "file", stem, suffix, "")
        if base == name and (numbered := _NUMBERED.fullmatch(stem)):
            kind = ("shards", numbered[1], suffix, numbered[2])
        elif _PARALLEL.fullmatch(name):
            kind = ("parallel", "consolidated", suffix, "")
        groups.setdefault(kind, []).append(name)
    found = [Candidate(*kind, tuple(files)) for kind, files in groups.items()]
    found = [
        each._replace(form="file") if each.form == "parallel" and len(each.files) == 1 else each
        for each in found
    ]
    return [
        each for each in found if not (is_state(each.files[0]) or _BESIDE.fullmatch(each.files[0]))
    ] or found


def is_state(name: str) -> bool:
    """Return whether a file of this name contains training state, such as optimizer state."""
    return _STATE.fullmatch(name) is not None


def best(names: Iterable[str]) -> Candidate | None:
    """Return the preferred candidate. Return None unless exactly one candidate is preferred."""
    found = preferred(names)
    return found[0] if len(found) == 1 else None


def preferred(names: Iterable[str]) -> list[Candidate]:
    found = candidates(names)
    safe = {each.stem.removeprefix("pytorch_") for each in found if each.suffix == SAFE}
    found = [
        each
        for each in found
        if each.suffix == SAFE or each.stem.removeprefix("pytorch_") not in safe
    ]
    # A GGUF file beside other weights is usually converted from these weights.
    found = [each for each in found if each.suffix != GGUF] or found
    return [each for each in found if each.form == "index"] or found


def unread(names: Iterable[str], read: Collection[str]) -> tuple[str, ...]:
    """Return a warning that lists the files that were not read, or no warning if there are none.

    `names` contains the files of a folder. `read` contains the files that were read.
    """
    files = chain.from_iterable(each.files for each in candidates(names))
    left = [file for file in files if file not in read]
    return (f"the folder also contains {some(left)}, not read",) if left else ()
