"""Read a folder of rank files as one checkpoint. Each rank wrote its own shards of the tensors.

In rank files of FSDP and tensor parallelism, the pickles contain the offset and size of each shard.
:mod:`rank_files` reads these files. For the other layouts, :mod:`table` describes how each tensor
was split over the files. A single rank's file is not a complete checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.formats.format import CheckedPart, Defect, Probe
from ckptkit.formats.table import PARALLEL

# Matches the names of rank files. It also matches some names in other folders. If it matches no
# name in a folder, ckptkit does not import the layout modules.
_SIGN = re.compile(
    r"mp_rank_|^tp_rank_|^fsdp_shard_|model-rank-|-dist-[0-9]|^metadata\.json$|^latest$|^optim$"
    r"|[0-9](?!-of-).*(?<!-of-[0-9]{5})\.(pt|pth|bin|ckpt|th)$"
)

# Modules of the layouts. `_layout` imports and tries one module after the other, in this order.
_LAYOUTS = ("parts", "megatron", "llama", "pipeline", "fsdp_flat", "rank_files")


def matches(probe: Probe) -> bool:
    """Return whether the folder has one of the layouts of rank files."""
    return probe.is_folder and any(map(_SIGN.search, probe.names)) and _layout(probe) is not None


def _layout(probe: Probe) -> ModuleType | None:
    """Return the module of the folder's layout. If `parts` is set, this is :mod:`table`."""
    if probe.options.parts is not None:
        return import_module(f"{__name__}.table")
    if PARALLEL not in probe.kept:
        modules = (import_module(f"{__name__}.{name}") for name in _LAYOUTS)
        probe.kept[PARALLEL] = next((each for each in modules if each.matches(probe)), None)
    found = probe.kept[PARALLEL]
    return found if isinstance(found, ModuleType) else None


def read(probe: Probe) -> Checkpoint:
    """Return the complete checkpoint, merged from all ranks. Raises the errors of the layout."""
    layout = _layout(probe)
    assert layout is not None
    found: Checkpoint = layout.read(probe, PARALLEL.name)
    return found


def check(probe: Probe) -> Iterator[CheckedPart | Defect]:
    """Yield the zip records to verify, from every file that the layout reads."""
    from ckptkit.formats import whats_inside

    read(probe)
    for source in probe.folder.opened():
        inner = Probe(source)
        if inner.zip is not None:
            yield from whats_inside.members(
                inner.zip, source.name.removeprefix(probe.folder.name).lstrip("/")
            )
