"""The pickles of a DCP folder, file by file: the metadata, and the archives that the metadata say
where to find.

A data file is one archive after another: without the metadata only the last one would be found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from ckptkit.core.bytesource import Section
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.dcp.items import Files
from ckptkit.formats.dcp.reading import described, places
from ckptkit.formats.format import Probe
from ckptkit.pickles.streams import NOT_TORCH, Found, Inner, PickleStream

_METADATA = re.compile(r"(__[0-9]{1,9})?\.metadata")


def pickles(probe: Probe) -> Iterator[Found] | None:
    """None for files without metadata beside them, whatever their name."""
    if probe.is_folder:
        return None
    name = os.path.basename(probe.name)
    if _METADATA.fullmatch(name) and probe.head.startswith(b"\x80"):
        loader = "torch.distributed.checkpoint"
        return iter((PickleStream("", probe.source, 0, probe.source.size, loader, NOT_TORCH),))
    beside = probe.source.beside() if name.endswith(".distcp") else None
    if beside is None:
        return None
    try:
        folder, name = beside
        wanted = {(each.offset, each.length) for each in places(described(Files(folder), frozenset(folder.list())))
                  if each.file == name}  # fmt: skip
        parts = [
            Inner(f"item at byte {at:,}", Section(probe.source, at, length))
            for at, length in sorted(wanted)
        ]
    except CkptkitError:
        return None
    return iter(parts) if parts else None
