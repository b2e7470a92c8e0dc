"""An unpacked archive of torch.save: a folder with its records as files.

    <folder>/data.pkl, data/<key>, version, byteorder       as in :mod:`torch_zip`, no checksums

For weights under version control, and for archives that were unpacked by hand. The folder is named,
or its data.pkl. TorchScript (constants.pkl) needs its archive.
"""

from __future__ import annotations

from os.path import basename
from typing import NamedTuple

from ckptkit.core.bytesource import ByteSource, Folder, Range, Record
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.formats import table
from ckptkit.formats.format import Probe
from ckptkit.formats.torch_zip.reader import KNOWN, Archive

_PICKLE, _DATA, _TOP = "data.pkl", "data", "archive"
_PROGRAM = frozenset({"constants.pkl", "bytecode.pkl"})


def matches(probe: Probe) -> bool:
    return _folder(probe) is not None


def _folder(probe: Probe) -> Folder | None:
    """Return the folder of the records, None if some are missing."""
    if probe.is_folder:
        folder = probe.folder
    elif basename(probe.name) == _PICKLE and (place := probe.source.folder_and_name()) is not None:
        folder = place[0]
    else:
        return None
    names = frozenset(probe.names if probe.is_folder else folder.list())
    return folder if {_PICKLE, "version"} <= names and not names & _PROGRAM else None


class _File(NamedTuple):
    """A record."""

    source: ByteSource
    size: int


class _Records:
    """The files of the folder as the members of an archive."""

    top = _TOP

    def __init__(self, folder: Folder) -> None:
        self.source = folder.open(_PICKLE)
        inside = frozenset(folder.folders())
        opened = {name: folder.open(name) for name in folder.list() if name not in inside}
        if _DATA in inside:
            data = folder.sub(_DATA)
            opened |= {f"{_DATA}/{name}": data.open(name) for name in data.list()}
        self.entries = {
            f"{_TOP}/{name}": _File(source, source.size) for name, source in opened.items()
        }

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    def locate(self, name: str) -> Range:
        source, size = self.entries[name]
        return Range(source, 0, size)

    def record(self, name: str) -> tuple[Record, int | None]:
        return self.locate(name), None

    def read(self, name: str) -> bytes:
        return self.locate(name).read()

    def verify(self, name: str) -> None:
        """Verify nothing: there are no checksums."""


def read(probe: Probe) -> Checkpoint:
    """Read the tree of data.pkl over the files beside it. Raises what zip_reader raises."""
    folder = _folder(probe)
    assert folder is not None
    archive = Archive(_Records(folder))
    warnings = archive.check()
    tree = archive.unpickle(_DATA)
    warnings += archive.unused(KNOWN)
    return Checkpoint(
        tree.root, table.TORCH_UNPACKED.name, folder, {}, tree.globals, (*tree.warnings, *warnings)
    )
