"""A data file of a DCP folder, named alone: items in a row, which the folder's metadata locate."""

from __future__ import annotations

import os
import re

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.core.parts import PartOf, folder_beside
from ckptkit.formats.dcp.metadata import is_metadata
from ckptkit.formats.format import Probe
from ckptkit.formats.table import DCP

_RANK = re.compile(r"__([0-9]{1,9})_[0-9]{1,9}\.distcp")


def matches(probe: Probe) -> bool:
    return not probe.is_folder


def read(probe: Probe) -> Checkpoint:
    """Raise UnsupportedError with the command for the folder."""
    part = part_of(probe)
    missing = "" if part.folder else ", and no .metadata, which locates them, is beside it"
    raise part.refusal(f"its tensors cannot be read alone{missing}")


def part_of(probe: Probe) -> PartOf:
    """Return which part of which folder the file is; the folder is None without metadata."""
    found = _RANK.fullmatch(os.path.basename(probe.name))
    which = f"a data file of rank {int(found[1]):,}" if found else "a data file"
    folder = folder_beside(probe.name) if _has_metadata(probe) else None
    return PartOf(
        DCP.name, f"{which} of a torch.distributed.checkpoint folder", "", folder, alone=False
    )


def _has_metadata(probe: Probe) -> bool:
    place = probe.source.folder_and_name()
    try:
        return place is not None and any(map(is_metadata, place[0].list()))
    except CkptkitError:
        return False
