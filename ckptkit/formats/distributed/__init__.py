"""Read a folder of rank files as one checkpoint. Each rank wrote its own shards of the tensors.

The module :mod:`rank_files` reads rank files of FSDP and tensor parallelism. The pickles in such
rank files contain the offset and size of each shard. For all other layouts, the module :mod:`table`
describes how each tensor was split over the files. A single rank's file is not a complete
checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.formats.format import CheckedPart, Defect, Probe
from ckptkit.formats.table import PARALLEL

# This expression matches the names of rank files, and a few other names. If no name in a folder
# matches, ckptkit does not import the layout modules.
_SIGN = re.compile(
    r"mp_rank_|^tp_rank_|^fsdp_shard_|model-rank-|-dist-[0-9]|^metadata\.json$|^latest$|^optim$"
    r"|[0-9](?!-of-).*(?<!-of-[0-9]{5})\.(pt|pth|bin|ckpt|th)$"
)

# Names of the layout modules. `_layout` imports and tries these modules in this order.
_LAYOUTS = ("parts", "megatron", "llama", "pipeline", "fsdp_flat", "rank_files")


def matches(probe: Probe) -> bool:
    """Return whether the folder has a supported layout of rank files."""
    return probe.is_folder and any(map(_SIGN.search, probe.names)) and _layout(probe) is not None


def _layout(probe: Probe) -> ModuleType | None:
    """Return the module that reads the folder. If the option `parts` is set, return `table`."""
    if probe.options.parts is not None:
        return import_module(f"{__name__}.table")
    if PARALLEL not in probe.kept:
        modules = (import_module(f"{__name__}.{name}") for name in _LAYOUTS)
        probe.kept[PARALLEL] = next((each for each in modules if each.matches(probe)), None)
    found = probe.kept[PARALLEL]
    return found if isinstance(found, ModuleType) else None


def read(probe: Probe) -> Checkpoint:
    """Return the complete checkpoint, merged from all ranks.

    If a file is damaged, missing or unsupported, raises a CkptkitError.
    """
    layout = _layout(probe)
    assert layout is not None
    found: Checkpoint = layout.read(probe)
    return found


def check(probe: Probe) -> Iterator[CheckedPart | Defect]:
    """Yield the zip members of every rank file, so that `verify` checks their CRC-32."""
    from ckptkit.formats import whats_inside

    read(probe)
    for source in probe.folder.opened():
        inner = Probe(source)
        if inner.zip is not None:
            yield from whats_inside.members(
                inner.zip, source.name.removeprefix(probe.folder.name).lstrip("/")
            )
