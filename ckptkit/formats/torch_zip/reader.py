"""torch.save since 1.6: a zip archive of stored records under one top folder.

    <top>/data.pkl               pickle; persistent ids ('storage', class, key, location, numel)
    <top>/data/<key>             the bytes of one storage
    <top>/version                a number, 1 to 10 ("3\\n")
    <top>/byteorder              "little" or "big"; little where it is missing
    <top>/.format_version, .storage_alignment, .data/serialization_id
                                 since about 2.7; not needed to read
    <top>/.data/ckptkit.json     ckptkit's own: :mod:`extra_records`

<top> is the name of the first entry up to its first slash. (torch/serialization.py, `_load`;
caffe2/serialize.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Protocol

from ckptkit.core.bytesource import ByteSource, Extent, Memory, Range, Record
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import (
    NEWER_TORCH,
    NO_CHECKSUM,
    NO_VERSION,
    AmbiguousError,
    CorruptError,
    FormatError,
    Notice,
    UnsupportedError,
)
from ckptkit.core.tensor import Storage
from ckptkit.core.text import shown
from ckptkit.formats import table
from ckptkit.formats.containers.zip_entries import REPLACED
from ckptkit.formats.format import Probe
from ckptkit.formats.torch_zip import extra_records
from ckptkit.pickles.storages import StorageTable
from ckptkit.pickles.values import Unpickled, unpickle

VERSIONS = range(1, 11)
ALIGNMENTS = range(1, 1 << 16 | 1)
_CONTROL_BYTES = 64  # what version and its like may have
_READ_ONCE = (
    32 << 20
)  # bytes of a remote pickle that are kept, rather than read for its checksum and again
KNOWN = (
    "data.pkl", "version", ".data/version", "byteorder", ".format_version", ".storage_alignment",
    ".data/serialization_id", extra_records.NAME,
)  # fmt: skip


def read(probe: Probe) -> Checkpoint:
    """Read the pickle and locate the storages.

    Raises CorruptError, AmbiguousError, FormatError, UnsupportedError, LimitError, and what the
    pickle machine raises.
    """
    archive = probe.zip
    assert archive is not None
    return _read(Archive(archive))


def _read(archive: Archive) -> Checkpoint:
    warnings = archive.check()
    tree = archive.unpickle("data")
    warnings += [*archive.unverified(), *archive.unused(KNOWN)]
    source, metadata = archive.directory.source, _metadata(archive)
    return Checkpoint(
        tree.root, table.TORCH_ZIP.name, source, metadata, tree.globals, (*tree.warnings, *warnings)
    )


def _metadata(archive: Archive) -> dict[str, str]:
    """Return the metadata of another format and of ckptkit's own record."""
    name = archive.folder + extra_records.NAME
    return extra_records.read(archive.directory.read(name)) if name in archive.directory else {}


class _Entry(Protocol):
    @property
    def size(self) -> int: ...


class Directory(Protocol):
    """The records of an archive, mostly the members of a zip file."""

    @property
    def source(self) -> ByteSource: ...
    @property
    def top(self) -> str: ...
    @property
    def entries(self) -> Mapping[str, _Entry]: ...
    def __contains__(self, name: object) -> bool: ...
    def locate(self, name: str) -> Extent: ...
    def record(self, name: str) -> tuple[Record, int | None]: ...
    def read(self, name: str) -> bytes: ...
    def verify(self, name: str) -> None: ...


class Archive:
    """One archive while it is read: its control records, and pickles with their storages."""

    def __init__(self, directory: Directory) -> None:
        self.directory = directory
        self.folder = directory.top + "/"
        self.big_endian = False
        self._unsummed = 0  # storages without a checksum
        self._used: set[str] = set()
        self._keys: list[tuple[str, list[str]]] = []  # of storages in a folder that are used, too

    def check(self) -> list[str]:
        """Check the control records, and that all records are in one folder; return warnings.

        Raises AmbiguousError, FormatError, UnsupportedError.
        """
        for name in self.directory.entries:
            if not name.startswith(self.folder):
                raise AmbiguousError(
                    f"record {shown(name)} is outside the folder {shown(self.folder)}"
                )
        self._number(".format_version")
        alignment = self._number(".storage_alignment")
        if alignment is not None and alignment not in ALIGNMENTS:
            raise FormatError(
                f"storages are aligned to {alignment:,} bytes, not 1 to {ALIGNMENTS[-1]:,}"
            )
        order = self._control("byteorder")
        if order not in (None, b"little", b"big"):
            raise FormatError(f"byteorder is {order!r}, neither little nor big")
        self.big_endian = order == b"big"
        return self._check_version()

    def _check_version(self) -> list[str]:
        versions = {self._number("version"), self._number(".data/version")} - {None}
        if not versions:
            text = "it has no version record: torch refuses it; a copy written by ckptkit has one"
            return [Notice(NO_VERSION, text)]
        if len(versions) > 1:
            raise AmbiguousError("the records version and .data/version contradict each other")
        if not versions <= set(VERSIONS):
            raise UnsupportedError(
                f"archive version {versions.pop()}, not {VERSIONS[0]} to {VERSIONS[-1]}",
                code=NEWER_TORCH,
            )
        return []

    def _control(self, name: str) -> bytes | None:
        """Return the bytes of a small record, None if it is missing."""
        entry = self.directory.entries.get(self.folder + name)
        if entry is None:
            return None
        if entry.size > _CONTROL_BYTES:
            raise FormatError(
                f"record {name} has {entry.size:,} bytes, it should hold a word or a number"
            )
        return self.directory.read(self.folder + name)

    def _number(self, name: str) -> int | None:
        text = self._control(name)
        if text is not None and not re.fullmatch(rb"[0-9]{1,9}\n?", text):
            raise FormatError(f"record {name} is {text!r}, not a number")
        return None if text is None else int(text)

    def unpickle(self, name: str) -> Unpickled:
        """Read the pickle ``<name>.pkl``, whose storages are in the folder ``<name>``.

        Raises CorruptError, AmbiguousError, and what the pickle machine raises.
        """
        record = f"{self.folder}{name}.pkl"
        if record not in self.directory:
            raise CorruptError(f"there is no record {shown(record)}")
        place = self.directory.locate(record)
        if isinstance(place, Range) and not (place.source.remote and place.length <= _READ_ONCE):
            self.directory.verify(record)
        else:
            data = self.directory.read(record)
            place = Range(Memory(data, self.directory.source.name), 0, len(data))
        stop = place.offset + place.length
        folder = f"{self.folder}{name}/"
        storages = StorageTable(partial(self._open, folder))
        tree = unpickle(
            place.source, place.offset, stop,
            persistent_load=storages.load,
        )  # fmt: skip
        self._keys.append((folder, list(storages)))
        if tree.stop != stop:
            raise AmbiguousError(
                f"{name}.pkl goes on for {stop - tree.stop:,} bytes after its pickle has ended"
            )
        return tree

    def _open(self, folder: str, key: str, nbytes: int, location: str) -> Storage:
        name = folder + key
        entry = self.directory.entries.get(name)
        if entry is None:
            raise CorruptError(f"storage {shown(key)} has no record {shown(name)}")
        if entry.size != nbytes:
            raise CorruptError(
                f"record {shown(name)} has {entry.size:,} bytes, its tensors expect {nbytes:,}"
            )
        return self._storage(name, location)

    def storage(self, name: str, location: str) -> Storage:
        """Return the bytes of the record `name`, which the caller knows to exist."""
        self._used.add(name)
        return self._storage(name, location)

    def _storage(self, name: str, location: str) -> Storage:
        record, crc = self.directory.record(name)
        self._unsummed += crc is None
        return Storage(record, location, crc, self.big_endian)

    def unverified(self) -> list[str]:
        """A warning, if some of the storages that were opened have no checksum."""
        return unsummed(self._unsummed)

    def unused(self, known: Iterable[str]) -> list[str]:
        """Return a warning on records besides the opened storages and the `known` ones."""
        left = self.directory.entries.keys() - self._used
        left.difference_update([self.folder + name for name in known])
        for folder, keys in self._keys:
            left.difference_update(map(folder.__add__, keys))  # one name at a time: there are many
        unused = [
            name
            for name in (self.directory.entries if left else ())
            if name in left and not name.endswith(("/", *REPLACED))
        ]
        if not unused:
            return []
        some = ", ".join(map(shown, unused[:4])) + (", ..." if len(unused) > 4 else "")
        return [
            f"nothing refers to {len(unused):,} of its records, which are not carried over: {some}"
        ]


def unsummed(count: int) -> list[str]:
    """Return the warning about `count` storages without a checksum, none for 0."""
    text = f"{count:,} of its storages have no checksum: damage to them cannot be seen"
    return [Notice(NO_CHECKSUM, text, storages=count)] if count else []
