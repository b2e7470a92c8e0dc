"""A torch zip archive without its directory: what is whole between the first local header and where the file ends.

torch writes data.pkl first and leaves sizes out of the local headers, so that the end of a member stands only in the
directory, at the end of the file, which is what a cut takes away. But the pickle says how long each storage is; every
member begins with its header and its name; and the descriptor behind a member has its checksum.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from typing import NamedTuple

from ckptkit import compute
from ckptkit.containers.zip_entries import MAGIC
from ckptkit.containers.zip_reader import ZipDirectory
from ckptkit.core.bytesource import ByteSource, Extent, Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, CorruptError
from ckptkit.core.limits import LIMITS
from ckptkit.core.tensor import Storage
from ckptkit.formats.common.recovering import salvaged
from ckptkit.formats.format import Probe, Salvaged
from ckptkit.pickles.machine import Unpickled, unpickle
from ckptkit.pickles.storages import StorageTable

_LOCAL = struct.Struct("<4s2xHH4xLLLHH")
_DIRECTORY, _DESCRIPTOR = b"PK\x01\x02", b"PK\x07\x08"
_DESCRIBED = 0x0008
_U32 = 0xFFFFFFFF
_STEP = 1 << 20
_DESCRIPTORS = (struct.Struct("<4sLLL"), struct.Struct("<4sLQQ"))


class Member(NamedTuple):
    """What a local header says, and the descriptor where one was found."""

    name: str
    start: int  # of the bytes
    size: int | None  # None: it does not say
    crc: int | None
    compressed: bool


def salvage(probe: Probe) -> Salvaged | None:
    """Every tensor whose bytes are there and have their checksum, if the file has that. None for other zip files.

    Raises CorruptError where the pickle, which has the names and shapes, is not whole.
    """
    if probe.is_folder or not probe.head.startswith(MAGIC):
        return None
    try:
        directory = probe.zip
    except CkptkitError:
        return _without_directory(probe.source)
    assert directory is not None
    return _by_directory(directory)


class _Storages:
    """What the pickle says of the storages, and what was found of them."""

    def __init__(self, source: ByteSource, top: str, pickle: Range) -> None:
        self.source = source
        self.sizes: dict[str, int] = {}  # bytes of each member that a storage is in
        self.places: dict[str, Extent] = {}
        self.reasons: dict[str, str] = {}  # why others are lost
        self.byteorder = b""
        self.missing = "its record is not there"
        self.warnings: tuple[str, ...] = ()
        self._top = top
        self._pickle = pickle
        self._members: dict[int, str] = {}  # by id of the storage
        self.tree = self._unpickle()

    def _unpickle(self) -> Unpickled:
        source, start, length = self._pickle
        stop = start + length
        try:
            return unpickle(source, start, stop, persistent_load=StorageTable(self._open).load)
        except CkptkitError as error:
            raise CorruptError(
                f"the names and shapes of its tensors are lost: data.pkl is damaged: {error.message}",
                hint="fetch it again from where it came from",
            ) from error

    def _open(self, key: str, nbytes: int, location: str) -> Storage:
        name = f"{self._top}/data/{key}"
        self.sizes[name] = nbytes
        storage = Storage(_Late(self.places, name, nbytes), location, None, self.byteorder == b"big")
        self._members[id(storage)] = name
        return storage

    def check_pickle(self, crc: int | None) -> None:
        """Warn if the pickle does not have its checksum: it can be read, but who knows what it said."""
        if crc is not None and _crc32(self._pickle._replace(length=self.tree.stop - self._pickle.offset)) != crc:
            self.warnings = ("data.pkl is damaged: names, shapes and values may be others than they were",)

    def keep(self, name: str, place: Extent, crc: int | None) -> bool:
        """Take the bytes of a member, unless they do not have their checksum. The first of that name decides."""
        if name in self.places or name in self.reasons:
            return False
        if crc is not None and _crc32(place) != crc:
            self.reasons[name] = "its bytes do not have their checksum"
            return False
        self.places[name] = place
        return True

    def result(self) -> Salvaged:
        """The tree over what was found."""
        if self.byteorder == b"big":
            self.tree = self._unpickle()
        for name, size in self.sizes.items():
            if not size:
                self.places.setdefault(name, Range(self.source, 0, 0))
        tree = self.tree
        checkpoint = Checkpoint(tree.root, "torch-zip", self.source, {}, tree.globals, (*tree.warnings, *self.warnings))
        return salvaged(checkpoint, lambda storage: self._why(self._members[id(storage)]))

    def _why(self, name: str) -> str | None:
        return None if name in self.places else self.reasons.get(name, self.missing)


@dataclass(frozen=True, slots=True)
class _Late:
    """The bytes of a storage, whose place is known once all members have been looked at."""

    places: dict[str, Extent]
    key: str
    length: int

    def locate(self) -> Extent:
        return self.places[self.key]


# With a directory


def _by_directory(directory: ZipDirectory) -> Salvaged | None:
    """All headers agree, so that what is damaged is bytes of members."""
    name = f"{directory.top}/data.pkl"
    if name not in directory or f"{directory.top}/constants.pkl" in directory:  # a program of TorchScript
        return None
    pickle = directory.locate(name)
    if not isinstance(pickle, Range):
        data = directory.read(name)
        pickle = Range(Memory(data, directory.source.name), 0, len(data))
    storages = _Storages(directory.source, directory.top, pickle)
    storages.check_pickle(directory.crc(name))
    order = f"{directory.top}/byteorder"
    if order in directory and directory.entries[order].size <= len(b"little"):
        storages.byteorder = directory.read(order)
    for member, size in storages.sizes.items():
        entry = directory.entries.get(member)
        if entry is not None and entry.size == size:
            storages.keep(member, directory.locate(member), directory.crc(member))
        elif entry is not None:
            storages.reasons[member] = f"its record has {entry.size:,} bytes instead of {size:,}"
    return storages.result()


# Without


def _without_directory(source: ByteSource) -> Salvaged | None:
    """From each member to the next by its size; by searching where that fails."""
    headers = _Headers(source)
    pickle = headers.find(0, "/data.pkl")
    if pickle is None:
        return None
    top = pickle.name.removesuffix("/data.pkl")
    storages = _Storages(source, top, Range(source, pickle.start, source.size - pickle.start))
    storages.missing = "it is not before the cut, or its header is damaged"
    at = 0
    while (member := headers.find(at)) is not None:
        if member == pickle:
            at = _pass_pickle(storages, member)
        elif member.name in storages.sizes:
            at = _take(storages, member, storages.sizes[member.name])
        else:
            if member.name == f"{top}/byteorder" and member.start + 3 <= source.size:
                storages.byteorder = source.read(member.start, 3)
            at = member.start + (member.size or 0)
    return storages.result()


def _pass_pickle(storages: _Storages, member: Member) -> int:
    """Check what is known of the pickle; where to look for the next member."""
    end = storages.tree.stop
    crc, after = _described(storages.source, end, end - member.start) if member.crc is None else (member.crc, end)
    storages.check_pickle(crc)
    return after


def _take(storages: _Storages, member: Member, size: int) -> int:
    """Keep a storage's bytes, if they are there and whole; where to look for the next member."""
    source, end = storages.source, member.start + size
    if member.size not in (None, size) or member.compressed:
        storages.reasons[member.name] = "its record is compressed, or of another size than its tensors expect"
        return member.start
    if end > source.size:
        storages.reasons[member.name] = f"the file is cut {end - source.size:,} bytes before its end"
        return member.start
    crc, after = (member.crc, end) if member.crc is not None else _described(source, end, size)
    whole = storages.keep(member.name, Range(source, member.start, size), crc)
    return after if whole else member.start


def _described(source: ByteSource, end: int, size: int) -> tuple[int | None, int]:
    """CRC and end of the data descriptor at `end`, if there is one. A CRC of 0 beside bytes is none."""
    data = source.read(end, min(24, source.size - end))
    for layout in _DESCRIPTORS:
        if len(data) >= layout.size:
            magic, crc, stored, plain = layout.unpack_from(data)
            if magic == _DESCRIPTOR and stored == plain == size:
                return (None if crc == 0 and size else crc), end + layout.size
    return None, end


class _Headers:
    """Looks for local headers, in the piece of the file that it read last while it can."""

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self._base = -_STEP
        self._piece = b""

    def find(self, at: int, suffix: str = "") -> Member | None:
        """The first local header from `at` on that has a name as torch writes it, ending in `suffix`.

        None if the directory or the end comes first.
        """
        while at < self._source.size:
            if not self._base <= at < self._base + _STEP:
                self._read(at)
            found = self._piece.find(b"PK", at - self._base, _STEP + 3)
            if found < 0:
                at = self._base + _STEP
                continue
            if self._piece.startswith(_DIRECTORY, found):
                return None
            member = _header(self._piece, found, self._base) if self._piece.startswith(MAGIC, found) else None
            if member is not None and member.name.endswith(suffix):
                return member
            at = self._base + found + 1
        return None

    def _read(self, at: int) -> None:
        length = min(_STEP + 30 + LIMITS.name_bytes, self._source.size - at)
        self._base, self._piece = at, self._source.read(at, length)


def _header(data: bytes, at: int, base: int) -> Member | None:
    """The local header at `at` of `data`, which begins at byte `base` of the file; None if it is none of torch's."""
    if at + _LOCAL.size > len(data):
        return None
    _, flags, method, crc, stored, size, n, x = _LOCAL.unpack_from(data, at)
    raw = data[at + 30 : at + 30 + n]
    if len(raw) < n or b"/" not in raw or method not in (0, 8):
        return None
    try:
        name = raw.decode()
    except UnicodeDecodeError:
        return None
    said = None if flags & _DESCRIBED or size == _U32 or stored == _U32 else stored
    known = None if flags & _DESCRIBED or (crc == 0 and size) else crc
    return Member(name, base + at + 30 + n + x, said, known, method != 0)


def _crc32(place: Extent) -> int | None:
    """None where the bytes cannot be computed."""
    crc = 0
    try:
        for piece in compute.stream(place):
            crc = zlib.crc32(piece, crc)
    except CkptkitError:
        return None
    return crc
