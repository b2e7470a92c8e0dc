"""Find the pickles of a DCP folder: the metadata, and the archives that the metadata locate.

A data file is one archive after another: without the metadata only the last one would be found.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from ckptkit.core.bytesource import Section
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.dcp.items import Files
from ckptkit.formats.dcp.metadata import is_metadata
from ckptkit.formats.dcp.reading import described, places
from ckptkit.formats.format import Probe
from ckptkit.pickles.streams import NOT_TORCH, Found, Inner, PickleStream


def pickles(probe: Probe) -> Iterator[Found] | None:
    """Yield the pickles of a DCP file; None for files without metadata beside them."""
    if probe.is_folder:
        return None
    name = os.path.basename(probe.name)
    if is_metadata(name) and probe.head.startswith(b"\x80"):
        loader = "torch.distributed.checkpoint"
        return iter((PickleStream("", probe.source, 0, probe.source.size, loader, NOT_TORCH),))
    place = probe.source.folder_and_name() if name.endswith(".distcp") else None
    if place is None:
        return None
    try:
        folder, name = place
        index = described(Files(folder), frozenset(folder.list()))
        wanted = {(each.offset, each.length) for each in places(index) if each.file == name}
        parts = [
            Inner(f"item at byte {at:,}", Section(probe.source, at, length))
            for at, length in sorted(wanted)
        ]
    except CkptkitError:
        return None
    return iter(parts) if parts else None
