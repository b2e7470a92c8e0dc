"""The checkable parts of a zip file: every member has a CRC-32, or 0 where none was computed."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.core.text import shown
from ckptkit.formats.containers.zip_reader import Unlocated, ZipDirectory
from ckptkit.formats.format import CheckedPart, Probe


def check(probe: Probe) -> Iterator[CheckedPart]:
    """Yield every member that has bytes, referenced or not."""
    assert probe.zip is not None
    return members(probe.zip)


def members(directory: ZipDirectory, file: str = "", item: str = "") -> Iterator[CheckedPart]:
    """Yield the members of an archive that is the `item` of a `file` in a folder."""
    for name, entry in directory.entries.items():
        if entry.size or entry.stored:
            what = f"{item}record {shown(name)}"
            yield CheckedPart(
                what, Unlocated(directory, name, entry.size), directory.crc(name), file
            )
