"""torch.save since 1.6: a zip archive of stored records under one top folder.

    <top>/data.pkl               pickle; persistent ids ('storage', class, key, location, numel)
    <top>/data/<key>             the bytes of one storage
    <top>/version                a number, 1 to 10 ("3\\n")
    <top>/byteorder              "little" or "big"; little where it is missing
    <top>/.format_version, .storage_alignment, .data/serialization_id        since about 2.7; not needed to read
    <top>/.data/ckptkit.json     ours: :mod:`beside`

<top> is what stands before the first slash of the first entry. (torch/serialization.py, `_load`; caffe2/serialize.)
"""

from __future__ import annotations

import re

from ckptkit.bytesource import Memory, Range
from ckptkit.checkpoint import Checkpoint
from ckptkit.errors import AmbiguousError, CorruptError, FormatError, UnsupportedError
from ckptkit.formats.format import Format, Probe, WriteOptions
from ckptkit.formats.torch import beside
from ckptkit.formats.torch.storages import StorageTable
from ckptkit.formats.torch.unpickle import Unpickled, unpickle
from ckptkit.formats.torch.zip_container import ZipDirectory
from ckptkit.formats.torch.zip_members import shown
from ckptkit.plan import Plan
from ckptkit.tensor import Storage

VERSIONS = range(1, 11)
ALIGNMENTS = range(1, 1 << 16 | 1)
_CONTROL_BYTES = 64  # what version and its like may have
_KNOWN = (
    "data.pkl", "version", ".data/version", "byteorder", ".format_version", ".storage_alignment",
    ".data/serialization_id", beside.NAME,
)  # fmt: skip


def matches(probe: Probe) -> bool:
    archive = probe.zip
    if archive is None:
        return False
    return {name for name in ("data", "constants", "bytecode") if f"{archive.top}/{name}.pkl" in archive} == {"data"}


def read(probe: Probe) -> Checkpoint:
    """The pickle and the places of the storages. Raises CorruptError, AmbiguousError, FormatError, UnsupportedError,
    LimitError, and what the pickle machine raises."""
    archive = probe.zip
    assert archive is not None
    return _Archive(archive).read()


class _Archive:
    """One archive being read."""

    def __init__(self, directory: ZipDirectory) -> None:
        self.directory = directory
        self.folder = directory.top + "/"
        self.storages = self.folder + "data/"
        self.big_endian = False
        self.unverified = 0  # storages without a checksum
        self.used = {self.folder + name for name in _KNOWN}

    def read(self) -> Checkpoint:
        warnings = self._check_records()
        tree = self._unpickle()
        return Checkpoint(
            tree.root, FORMAT.name, self.directory.source, self._metadata(), tree.globals, origin=self.directory,
            warnings=(*tree.warnings, *warnings, *self._noticed()),
        )  # fmt: skip

    def _metadata(self) -> dict[str, str]:
        """What another format kept beside the tree, and ckptkit in a record of its own."""
        name = self.folder + beside.NAME
        return beside.read(self.directory.read(name)) if name in self.directory else {}

    def _check_records(self) -> list[str]:
        """Everything but the pickle and the storages; what is worth a warning."""
        for name in self.directory.entries:
            if not name.startswith(self.folder):
                raise AmbiguousError(f"record {shown(name)} is outside the folder {shown(self.folder)}")
        self._number(".format_version")
        alignment = self._number(".storage_alignment")
        if alignment is not None and alignment not in ALIGNMENTS:
            raise FormatError(f"storages are aligned to {alignment:,} bytes, not 1 to {ALIGNMENTS[-1]:,}")
        order = self._control("byteorder")
        if order not in (None, b"little", b"big"):
            raise FormatError(f"byteorder is {order!r}, neither little nor big")
        self.big_endian = order == b"big"
        return self._check_version()

    def _check_version(self) -> list[str]:
        versions = {self._number("version"), self._number(".data/version")} - {None}
        if not versions:
            return ["it has no version record: torch refuses it; a copy written by ckptkit has one"]
        if len(versions) > 1:
            raise AmbiguousError("the records version and .data/version contradict each other")
        if not versions <= set(VERSIONS):
            raise UnsupportedError(f"archive version {versions.pop()}, not {VERSIONS[0]} to {VERSIONS[-1]}")
        return []

    def _control(self, name: str) -> bytes | None:
        """The whole of a small record, None if there is none."""
        entry = self.directory.entries.get(self.folder + name)
        if entry is None:
            return None
        if entry.size > _CONTROL_BYTES:
            raise FormatError(f"record {name} has {entry.size:,} bytes, it should hold a word or a number")
        return self.directory.read(self.folder + name)

    def _number(self, name: str) -> int | None:
        text = self._control(name)
        if text is not None and not re.fullmatch(rb"[0-9]{1,9}\n?", text):
            raise FormatError(f"record {name} is {text!r}, not a number")
        return None if text is None else int(text)

    def _unpickle(self) -> Unpickled:
        name = self.folder + "data.pkl"
        place = self.directory.locate(name)
        if isinstance(place, Range):
            self.directory.verify(name)
        else:
            data = self.directory.read(name)
            place = Range(Memory(data, self.directory.source.name), 0, len(data))
        stop = place.offset + place.length
        tree = unpickle(place.source, place.offset, stop, persistent_load=StorageTable(self._open).load)
        if tree.stop != stop:
            raise AmbiguousError(f"data.pkl goes on for {stop - tree.stop:,} bytes after its pickle has ended")
        return tree

    def _open(self, key: str, nbytes: int, location: str) -> Storage:
        name = self.storages + key
        entry = self.directory.entries.get(name)
        if entry is None:
            raise CorruptError(f"storage {shown(key)} has no record {shown(name)}")
        if entry.size != nbytes:
            raise CorruptError(f"record {shown(name)} has {entry.size:,} bytes, its tensors expect {nbytes:,}")
        self.used.add(name)
        crc = self.directory.crc(name)
        self.unverified += crc is None
        return Storage(self.directory.record(name), location, crc, self.big_endian)

    def _noticed(self) -> list[str]:
        said = []
        if self.unverified:
            said.append(f"{self.unverified:,} of its storages have no checksum: damage to them cannot be seen")
        unused = [name for name in self.directory.entries if name not in self.used and not name.endswith("/")]
        if unused:
            some = ", ".join(map(shown, unused[:4])) + (", ..." if len(unused) > 4 else "")
            said.append(f"nothing refers to {len(unused):,} of its records, which are not carried over: {some}")
        return said


def layout(checkpoint: Checkpoint, options: WriteOptions) -> Plan:
    """One file with the whole tree and the storages that it refers to. See :mod:`zip_layout`."""
    from ckptkit.formats.torch import zip_layout  # reading does not pay for writing

    return zip_layout.layout(checkpoint, options)


FORMAT = Format(
    name="torch-zip",
    title="torch.save since 1.6: a zip archive",
    matches=matches,
    read=read,
    suffixes=(".pth", ".pt", ".bin", ".ckpt", ".pth.tar", ".pt.tar", ".th"),
    layout=layout,
)
