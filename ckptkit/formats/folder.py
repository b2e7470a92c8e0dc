"""A folder that holds one checkpoint among other files, or folders: choose what to read.

    model.safetensors, last.ckpt                 names as in :mod:`common.folder_names`
    latest_checkpointed_iteration.txt            names the latest of the folders beside it
    refs/main, snapshots/<revision>/             the Hugging Face cache of a model
                                                 (``models--<owner>--<name>``)

Files that are left out are a warning, and more than one checkpoint is an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace

from ckptkit import formats
from ckptkit.core.bytesource import ByteSource, Folder
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import AmbiguousError, CorruptError, FormatError
from ckptkit.core.text import shell_word
from ckptkit.formats.common.folder_names import (
    TRACKER,
    best,
    candidates,
    listed,
    preferred,
    unread,
)
from ckptkit.formats.format import CheckedPart, Finding, Probe

_REVISION = "main"
_TRACKED = ("iter_{:0>7}", "global_step_{}", "{}")  # the folders that it may mean


def matches(probe: Probe) -> bool:
    return probe.is_folder and (
        _is_cache(probe) or TRACKER in probe.names or bool(candidates(probe.names))
    )


def read(probe: Probe) -> Checkpoint:
    """Read the checkpoint of the folder, in its own format.

    Raises AmbiguousError where several could be meant, CorruptError for a cache without its
    revision.
    """
    inner = _meant(probe)
    checkpoint = formats.read(inner)
    if isinstance(inner, Folder):
        return checkpoint
    name = os.path.basename(inner.name)
    return replace(checkpoint, warnings=(*unread(probe.names, {name}), *checkpoint.warnings))


def check(probe: Probe) -> Iterator[CheckedPart | Finding]:
    """Yield the parts to check in the checkpoint of the folder. Raises like `read`."""
    inner = _meant(probe)
    within = "" if isinstance(inner, Folder) else os.path.basename(inner.name)
    return (
        each if each.file else replace(each, file=within) for each in formats.check(Probe(inner))
    )


def _meant(probe: Probe) -> ByteSource | Folder:
    """Return the one file to read, or the folder of a revision."""
    if _is_cache(probe):
        return _snapshot(probe)
    if TRACKER in probe.names:
        return _tracked(probe)
    chosen = best(probe.names)
    if chosen is None:
        raise _ambiguous(probe)
    (name,) = chosen.files
    return probe.folder.open(name)


def _ambiguous(probe: Probe) -> AmbiguousError:
    first = [each.files[0] for each in preferred(probe.names)]
    return AmbiguousError(
        f"holds {len(first)} checkpoints: {listed(first)}",
        where=probe.name,
        hint=f"name one of them, e.g. {shell_word(os.path.join(probe.name, first[0]))}",
    )


# The folder of a training that says which of its saves is the latest


def _tracked(probe: Probe) -> Folder:
    """The folder of the save that the tracker names; below it, the only folder with a
    checkpoint."""
    source = probe.folder.open(TRACKER)
    word = source.read(0, min(source.size, 64)).decode("utf-8", "replace").strip()
    there = probe.folder.folders()
    found = [name for each in _TRACKED if (name := each.format(word)) in there]
    if not found or not word.isalnum():
        raise CorruptError(
            f"{TRACKER} names {word[:40]!r}, which is not a folder there",
            hint=f"it holds {listed(there)}: name the folder that is meant" if there else None,
        )
    inner = probe.folder.sub(found[0])
    if formats.match(Probe(inner)) is not None:
        return inner
    below = [name for name in inner.folders() if formats.match(Probe(inner.sub(name))) is not None]
    if len(below) != 1:
        one = os.path.join(inner.name, *below[:1])
        raise AmbiguousError(
            f"its latest save {found[0]} holds {len(below)} checkpoints: {listed(below)}",
            hint=f"name the one that is meant, e.g. {shell_word(one)}",
        )
    return inner.sub(below[0])


# The cache of the Hugging Face hub


def _is_cache(probe: Probe) -> bool:
    return "snapshots" in probe.names and not probe.names.isdisjoint(("refs", "blobs"))


def _snapshot(probe: Probe) -> Folder:
    """Return the files of the revision that ``refs/main`` names, or of the only one."""
    snapshots = Folder(os.path.join(probe.folder.name, "snapshots"))
    revisions = snapshots.list()
    revision = _main(probe)
    if revision is None and len(revisions) != 1:
        raise AmbiguousError(
            f"holds {len(revisions)} revisions and none called {_REVISION}: {listed(revisions)}",
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


def _main(probe: Probe) -> str | None:
    if "refs" not in probe.names:
        return None
    refs = Folder(os.path.join(probe.folder.name, "refs"))
    if _REVISION not in refs:
        return None
    source = refs.open(_REVISION)
    try:
        return source.read(0, min(source.size, 256)).decode("utf-8", "replace").strip()
    finally:
        refs.close()
