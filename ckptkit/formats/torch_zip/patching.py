"""Edit a torch zip archive in place: a new pickle and a new directory, and no storage moves.

    members as they are           the replaced record is renamed from ``data.pkl`` to ``data.old``
    new data.pkl                  where the directory began
    directory                     the old entries in their order, then the new one
    ends

A record that is the last one already, as after such an edit, is written over instead. The old name
is of equal length and stays listed, because a member that the directory does not know would be a
reason to refuse the file. So is a storage that nothing refers to any more. ``.format_version``
loses its name too: with it torch would compute where the storages are, from the order in which the
pickle meets them. (torch/serialization.py, `_get_offset`; loads, mapped and not, in every torch
since 1.6.)
"""

from __future__ import annotations

import struct

from ckptkit.core.bytesource import LocalFile, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.plan import Edit, Patch
from ckptkit.core.tensor import Storage
from ckptkit.formats.containers.zip_entries import REPLACED, read_rows
from ckptkit.formats.containers.zip_reader import ZipDirectory, read_directory
from ckptkit.formats.containers.zip_writer import END_BYTES, ends, record
from ckptkit.formats.format import WriteOptions
from ckptkit.formats.torch_zip import extra_records
from ckptkit.formats.torch_zip.writer import Numbering
from ckptkit.pickles.writer import write_pickle

_LENGTHS = struct.Struct(
    "<HHH"
).unpack_from  # of name, extra fields and comment, at byte 28 of a directory entry
_NAME, _LOCAL_NAME = 46, 30  # where the name is in a directory entry, and in a local header


def patch(before: Checkpoint, after: Checkpoint, options: WriteOptions) -> Patch | None:
    """Plan the edit of the file of `before` into `after`; None where a storage is not in that file.

    Raises what writing the pickle raises.
    """
    if not isinstance(before.source, LocalFile):
        return None
    directory = read_directory(before.source)
    if (
        not {f"{directory.top}/version", f"{directory.top}/.data/version"}
        & directory.entries.keys()
    ):
        return None  # without one, torch would refuse the file
    numbering = _Keys(directory)
    try:
        pickled = write_pickle(after.root, numbering, numbering.another, objects=options.objects)
    except _ElsewhereError:
        return None
    new = {f"{directory.top}/data.pkl": pickled.data}
    if after.extras != before.extras:
        new[f"{directory.top}/{extra_records.NAME}"] = extra_records.record(after.extras)
    archive = _Archive(directory)
    if not archive.replace(new):
        return None
    return archive.patch(before.source, pickled.notes)


class _ElsewhereError(Exception):
    """A storage whose bytes are not a record of the archive."""


class _Keys(Numbering):
    """Numbering that keeps the keys that storages have in the archive."""

    def __init__(self, directory: ZipDirectory) -> None:
        super().__init__()
        self._source = directory.source
        folder = f"{directory.top}/data/"
        self._keys = {
            entry.data: name.removeprefix(folder)
            for name, entry in directory.entries.items()
            if name.startswith(folder) and not entry.method
        }
        self._sizes = {entry.data: entry.size for entry in directory.entries.values()}

    def key(self, number: int) -> str:
        storage: Storage = self.storages[number]
        extent = storage.record.locate()
        if not isinstance(extent, Range) or extent.source is not self._source:
            raise _ElsewhereError
        if extent.offset not in self._keys or self._sizes[extent.offset] != extent.length:
            raise _ElsewhereError
        return self._keys[extent.offset]


class _Archive:
    """The members of an archive and its directory after the edit."""

    def __init__(self, directory: ZipDirectory) -> None:
        self.top = directory.top
        self.members = directory.entries
        self.start = directory.start  # where new bytes begin
        self.entries: dict[str, bytes] = {}  # each entry of the directory as it is to be, by name
        self.headers: dict[str, int] = {}  # offsets of the local headers
        self.names: list[Edit] = []  # the new ones in local headers
        self.tail = b""  # everything after `start`
        self.listed = self._read_entries(directory)  # where the old directory ends

    def _read_entries(self, directory: ZipDirectory) -> int:
        source, at = directory.source, 0
        data = source.read(directory.start, source.size - directory.start)
        for name in self.members:
            end = at + _NAME + sum(_LENGTHS(data, at + 28))
            self.entries[name] = data[at:end]
            at = end
        _, rows = read_rows(data[:at], len(self.members), directory.start)
        self.headers = {name: row[0] for name, row in zip(self.members, rows, strict=True)}
        return directory.start + at

    def replace(self, new: dict[str, bytes]) -> bool:
        """Replace the records of the same names; False if no name is free for the old ones."""
        self._remove_last(new)
        for name in (*new, f"{self.top}/.format_version"):
            if name in self.entries and not self._rename(name):
                return False
        tail = bytearray()
        for name, content in new.items():
            member, self.entries[name] = record(name, content, self.start + len(tail))
            tail += member
        listed = b"".join(self.entries.values())
        self.tail = (
            bytes(tail) + listed + ends(self.start + len(tail), len(listed), len(self.entries))
        )
        return True

    def _remove_last(self, new: dict[str, bytes]) -> None:
        """Remove records to be replaced that are last in the file: their place is free."""
        by_offset = sorted(self.members, key=self.headers.__getitem__)
        while len(by_offset) > 1 and by_offset[-1] in new:
            name = by_offset.pop()
            self.start = self.headers[name]
            del self.entries[name]

    def _rename(self, name: str) -> bool:
        """Give a record an unused name of equal length, in directory and local header."""
        taken = {each.lower() for each in self.members}
        other = next(
            (o for o in (name[:-4] + ending for ending in REPLACED) if o.lower() not in taken), None
        )
        if other is None:
            return False
        raw, entry = other.encode(), self.entries[name]
        self.names.append(Edit(self.headers[name] + _LOCAL_NAME, raw))
        renamed = entry[:_NAME] + raw + entry[_NAME + len(raw) :]
        # the entry keeps its place: the first decides what torch takes for the top folder
        self.entries = {
            (other if each == name else each): (renamed if each == name else kept)
            for each, kept in self.entries.items()
        }
        return True

    def patch(self, source: LocalFile, notes: tuple[str, ...]) -> Patch:
        """Plan the patch, which no reader accepts as a file before it is complete.

        The end record goes first, and its signature is written last.
        """
        tail, size = self.tail, self.start + len(self.tail)
        breaks = Edit(self.listed, bytes(source.size - self.listed))
        last = len(tail) - END_BYTES
        around = Edit(self.start, tail[:last]), Edit(self.start + last + 4, tail[last + 4 :])
        seal = Edit(self.start + last, tail[last : last + 4])
        return Patch(source, breaks, (*sorted(self.names), *around), seal, size, notes)
