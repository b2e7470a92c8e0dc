"""Read folders to which several ranks wrote their shards of every tensor, as one checkpoint.

:mod:`rank_files` reads the rank files of FSDP and tensor parallelism, whose pickles contain the
offset and size of each shard. For the other layouts, a table (:mod:`table`) describes the rank of
each file and how each tensor was split. A single shard is not a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.formats.format import CheckedPart, Defect, Probe
from ckptkit.formats.table import PARALLEL

# File names that occur in folders of rank files, and also in other folders. If no file name in the
# folder matches, no layout is imported.
_SIGN = re.compile(
    r"mp_rank_|^tp_rank_|^fsdp_shard_|model-rank-|-dist-[0-9]|^metadata\.json$|^latest$|^optim$"
    r"|[0-9](?!-of-).*(?<!-of-[0-9]{5})\.(pt|pth|bin|ckpt|th)$"
)

# Layouts in the order in which `_layout` tries them. A layout is imported when it is tried.
_LAYOUTS = ("parts", "megatron", "llama", "pipeline", "fsdp_flat", "rank_files")


def matches(probe: Probe) -> bool:
    """Return whether a layout matches the folder."""
    return probe.is_folder and any(map(_SIGN.search, probe.names)) and _layout(probe) is not None


def _layout(probe: Probe) -> ModuleType | None:
    """Return the layout that matches the folder; with the option `parts`, the user's table."""
    if probe.options.parts is not None:
        return import_module(f"{__name__}.table")
    if PARALLEL not in probe.kept:
        modules = (import_module(f"{__name__}.{name}") for name in _LAYOUTS)
        probe.kept[PARALLEL] = next((each for each in modules if each.matches(probe)), None)
    found = probe.kept[PARALLEL]
    return found if isinstance(found, ModuleType) else None


def read(probe: Probe) -> Checkpoint:
    """Return the complete checkpoint of all ranks. Raises the errors of the layout."""
    layout = _layout(probe)
    assert layout is not None
    found: Checkpoint = layout.read(probe, PARALLEL.name)
    return found


def check(probe: Probe) -> Iterator[CheckedPart | Defect]:
    """Yield the records of every file that the layout reads."""
    from ckptkit.formats import whats_inside

    read(probe)
    for source in probe.folder.opened():
        inner = Probe(source)
        if inner.zip is not None:
            yield from whats_inside.members(
                inner.zip, source.name.removeprefix(probe.folder.name).lstrip("/")
            )
