"""A strict reader of zip files as checkpoints use them.

Layout (PKWARE APPNOTE 6.3.10; integers little-endian):

    member*           local header (30 bytes), name, extra fields, data [, data descriptor]
    central entry*    the directory: 46 bytes, name, extra fields, comment for each member
    zip64 end         56 bytes, and a locator of 20 bytes: where 16 or 32 bits do not suffice;
                      torch always writes them
    end record        22 bytes and a comment

Several of these places repeat the same facts, and readers differ in which of them they use. This
one refuses all that two readers could understand differently. A CRC of 0 on a non-empty member
means that none was computed: torch has an option for that.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from ckptkit.core.bytesource import ByteSource, Derived, Extent, Member, Range, Record
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    TruncatedError,
    UnsupportedError,
)
from ckptkit.core.limits import check, check_inflated
from ckptkit.core.text import mismatch, shown
from ckptkit.formats.containers.zip_entries import (
    DEFLATED,
    MAGIC,
    Row,
    check_members,
    check_names,
    find_data,
    read_rows,
)

__all__ = ["MAGIC", "ZipDirectory", "ZipEntry", "read_directory"]

_END_MAGIC, _END64_MAGIC, _LOCATOR_MAGIC = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_U16, _U32 = 0xFFFF, 0xFFFFFFFF
_BATCH = 64  # members whose local headers are fetched together
_HEADER = 256  # bytes of a local header beside the name, most of them padding
_IN_PARTS = "is one part of a zip file in several parts"
_AGAIN = "download or copy the file again"
_tuple = tuple.__new__  # makes a named tuple without a call of Python's: there are many


class StoredMember(NamedTuple):
    """A stored member of a local file, found where the directory has it.

    It is the record of a storage, too: a Range of its own for each would take memory.
    """

    source: ByteSource
    data: int  # offset of the bytes
    length: int
    crc: int

    @property
    def method(self) -> int:
        return 0

    @property
    def size(self) -> int:
        return self.length

    @property
    def stored(self) -> int:
        """Bytes in the file."""
        return self.length

    def locate(self) -> Range:
        return _tuple(Range, self[:3])


class ZipEntry(NamedTuple):
    """The entry in the directory of any other member. Offsets are in the source, sizes in bytes."""

    offset: int  # of the local header
    stored: int  # bytes in the file
    size: int
    crc: int
    method: int
    flags: int
    data: int  # offset of the bytes, -1 until the local header is read


Entry = StoredMember | ZipEntry


@dataclass(frozen=True, slots=True)
class ZipDirectory:
    """The members of a zip file, in the order of its directory, and where their bytes are."""

    source: ByteSource
    entries: Mapping[str, Entry] = field(repr=False)
    start: int  # offset of the directory, the end of the members
    headers: LocalHeaders | None = field(repr=False, default=None)  # of a remote file
    inflated: list[int] = field(repr=False, default_factory=lambda: [0])  # bytes, in all, when read

    def __contains__(self, name: object) -> bool:
        return name in self.entries

    @property
    def names(self) -> list[str]:
        return list(self.entries)

    @property
    def top(self) -> str:
        """The first folder of the first member: torch uses it as the name of the archive."""
        return next(iter(self.entries), "").partition("/")[0]

    def crc(self, name: str) -> int | None:
        """Return the CRC-32 of a member's bytes, None if the file does not have it."""
        entry = self.entries[name]
        return None if entry.crc == 0 and entry.size else entry.crc

    def record(self, name: str) -> tuple[Record, int | None]:
        """Return the record of a member's bytes, and their CRC-32 as in `crc`.

        In a remote file the location is determined when it is needed.
        """
        entry = self.entries[name]
        known = None if entry.crc == 0 and entry.size else entry.crc
        if isinstance(entry, StoredMember):
            return entry, known
        if entry.data < 0:
            return Unlocated(self, name, entry.size), known
        return self.locate(name), known

    def locate(self, name: str) -> Extent:
        """Return the extent of a member's bytes in the file, or the inflation of it if deflated."""
        entry = self.entries[name]
        stored = Range(self.source, self._data(name, entry), entry.stored)
        if entry.method != DEFLATED:
            return stored
        check("inflate_ratio", entry.size // max(1, entry.stored), f"compression of {shown(name)}")
        return Derived("inflate", (stored,), (name, self.crc(name)), entry.size)

    def read(self, name: str) -> bytes:
        """Return all bytes of a member.

        Raises CorruptError where they contradict the directory, LimitError.
        """
        entry = self.entries[name]
        check("record_bytes", entry.size, f"record {shown(name)}")
        if entry.method == DEFLATED:
            self.inflated[0] += entry.size
            check_inflated(self.inflated[0], self.source.size)
        extent = self.locate(name)
        data = extent.read() if isinstance(extent, Range) else self._inflate(name, entry)
        self._compare(name, zlib.crc32(data))
        return data

    def verify(self, name: str) -> None:
        """Raise CorruptError unless a stored member's bytes have their CRC, if known. Any size."""
        from ckptkit.core.bytesource import crc32

        entry = self.entries[name]
        start, total, piece = self._data(name, entry), 0, 1 << 20
        for at in range(start, start + entry.stored, piece):
            total = crc32(self.source.read(at, min(piece, start + entry.stored - at)), total)
        self._compare(name, total)

    def _data(self, name: str, entry: Entry) -> int:
        return entry.data if self.headers is None else self.headers.place(name)

    def _inflate(self, name: str, entry: Entry) -> bytes:
        machine = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            data = machine.decompress(
                self.source.read(self._data(name, entry), entry.stored), entry.size + 1
            )
        except zlib.error as error:
            raise CorruptError(
                f"record {shown(name)} cannot be inflated: {error}", where=self.source.name
            ) from error
        if len(data) != entry.size or not machine.eof or machine.unused_data:
            raise CorruptError(
                f"record {shown(name)} does not inflate to {entry.size:,} bytes",
                where=self.source.name,
            )
        return data

    def _compare(self, name: str, crc: int) -> None:
        expected = self.crc(name)
        if expected is not None and crc != expected:
            raise CorruptError(
                mismatch(f"record {shown(name)}", crc, expected),
                where=self.source.name,
                hint=_AGAIN,
            )


class LocalHeaders:
    """Offsets of the members' bytes in a remote file, read from their local headers."""

    def __init__(self, source: ByteSource, entries: dict[str, ZipEntry]) -> None:
        self._source = source
        self._entries = list(entries.items())
        self._numbers = {name: number for number, name in enumerate(entries)}
        self._places: dict[str, int] = {}

    def place(self, name: str) -> int:
        """Return the offset of the bytes of the member `name`. Raises if its header is invalid."""
        if name in self._places:
            return self._places[name]
        return self._find(*self._entries[self._numbers[name]])

    def prefetch(self, name: str) -> None:
        """Fetch the header of a member that is about to be read, together with its neighbors'."""
        if name in self._places:
            return
        first = self._numbers[name] // _BATCH * _BATCH
        members = self._entries[first : first + _BATCH]
        limit = self._source.size
        heads = ((entry.offset, _HEADER + len(name)) for name, entry in members)
        self._source.will_read(
            sorted((offset, min(length, limit - offset)) for offset, length in heads)
        )
        for name, entry in members:
            with suppress(CkptkitError):  # raised again when this member itself is read
                self._places[name] = self._find(name, entry)

    def _find(self, name: str, entry: ZipEntry) -> int:
        return find_data(self._source.read, name.encode(), entry)


class Unlocated(NamedTuple):
    """A member whose local header is not read yet."""

    directory: ZipDirectory
    name: str
    length: int

    def locate(self) -> Extent:
        if self.directory.headers is not None:
            self.directory.headers.prefetch(self.name)
        return self.directory.locate(self.name)


def read_directory(source: ByteSource) -> ZipDirectory:
    """Return the directory of a zip file; a local file's is checked against the local headers.

    Raises TruncatedError (no end), FormatError, CorruptError, AmbiguousError, UnsupportedError,
    LimitError.
    """
    try:
        start, size, count = _find_end(source)
        names, rows = read_rows(source.read(start, size), count, start)
        texts = check_names(names, rows)
        if source.remote:
            source.members = partial(_stored_members, start, size, count)
            return _unlocated(source, dict(zip(texts, rows, strict=True)), start)
        places = check_members(source, names, rows, start)
    except CkptkitError as error:
        error.at(source.name)
        raise
    source.members = partial(_stored_members, start, size, count)
    # Put together here without a call for each.
    entries = {
        text: _tuple(ZipEntry, (*row, place))
        if row[4] == DEFLATED
        else _tuple(StoredMember, (source, place, row[1], row[3]))
        for text, row, place in zip(texts, rows, places, strict=True)
    }
    return ZipDirectory(source, entries, start)


def _stored_members(start: int, size: int, count: int, source: ByteSource) -> Iterator[Member]:
    """Yield the stored members of a zip file that have a CRC-32; its directory begins at `start`.

    The directory is read again: it takes too much memory to be kept. Arrays, of whose members only
    the end is elements, are located.
    """
    names, rows = read_rows(source.read(start, size), count, start)
    stops = [*sorted(row[0] for row in rows), start]
    for name, row in zip(names, rows, strict=True):
        offset, _, length, crc, method, _ = row
        if crc and method != DEFLATED:
            stop = stops[bisect_right(stops, offset)]
            if name.endswith(b".npy"):
                offset = find_data(source.read, name, row)
                stop = offset + length
            yield _tuple(Member, (name.decode(), offset, stop, length, crc))


def _unlocated(source: ByteSource, rows: dict[str, Row], start: int) -> ZipDirectory:
    """Return the directory of a remote file, whose local headers are read when they are needed."""
    entries = {name: _tuple(ZipEntry, (*row, -1)) for name, row in rows.items()}
    return ZipDirectory(source, entries, start, LocalHeaders(source, entries))


# The end of the file


def _find_end(source: ByteSource) -> tuple[int, int, int]:
    """Return offset, size and number of entries of the directory, from the end records."""
    if source.read(0, min(4, source.size)) != MAGIC:
        raise FormatError("does not begin with a zip member")
    longest = _END.size + _U16 + _LOCATOR.size + _END64.size
    tail = source.read(max(0, source.size - longest), min(longest, source.size))
    at = _find_end_record(source, tail)
    _, disk, first_disk, here, count, size, start, _ = _END.unpack_from(tail, at)
    if disk or first_disk or here != count:
        raise UnsupportedError(_IN_PARTS)
    stop = source.size - len(tail) + at
    if tail[max(0, at - _LOCATOR.size) : at].startswith(_LOCATOR_MAGIC):
        stop -= _LOCATOR.size + _END64.size
        start, size, count = _read_end64(
            tail[: at - _LOCATOR.size], tail[at - _LOCATOR.size :], stop, (start, size, count)
        )
    elif _U32 in (size, start):
        raise FormatError("zip64 end record is missing")
    if start + size != stop:
        raise AmbiguousError(
            f"zip directory ends at byte {start + size:,}, but its end record is at {stop:,}"
        )
    check("zip_entries", count, "members of a zip file")
    check("zip_directory_bytes", size, "zip directory")
    return start, size, count


def _find_end_record(source: ByteSource, tail: bytes) -> int:
    """Return the offset in `tail` of the only end record that, with its comment, ends the file."""
    found = []
    at = tail.find(_END_MAGIC, max(0, len(tail) - _END.size - _U16))
    while at >= 0:
        found.append(at)
        at = tail.find(_END_MAGIC, at + 1)
    whole = [at for at in found if at + _END.size <= len(tail)]
    exact = [
        at
        for at in whole
        if at + _END.size + int.from_bytes(tail[at + 20 : at + 22], "little") == len(tail)
    ]
    if all(_is_inside(source, tail, at) for at in whole):
        raise TruncatedError("no end record: the download or save is incomplete", hint=_AGAIN)
    if not exact:
        after = len(tail) - whole[-1] - _END.size
        raise AmbiguousError(f"{after:,} bytes after the zip end record do not belong to it")
    if len(exact) > 1 or found[-1] != exact[0]:
        raise AmbiguousError("has more than one zip end record")
    return exact[0]


def _is_inside(source: ByteSource, tail: bytes, at: int) -> bool:
    """Return whether an end record is that of an archive inside the file.

    Its offsets count from where that archive begins.
    """
    size, start = _END.unpack_from(tail, at)[5:7]
    end = at
    if tail[max(0, at - _LOCATOR.size) : at].startswith(_LOCATOR_MAGIC):
        end = at - _LOCATOR.size - _END64.size
        if end < 0 or not tail.startswith(_END64_MAGIC, end):
            return False  # reported where it is read
        size, start = _END64.unpack_from(tail, end)[8:10]
    begin = source.size - len(tail) + end - size - start
    return 0 < begin <= source.size - len(MAGIC) and source.read(begin, len(MAGIC)) == MAGIC


def _read_end64(
    before: bytes, locator: bytes, place: int, short: tuple[int, int, int]
) -> tuple[int, int, int]:
    """Return start, size and count from the zip64 end record at `place`.

    The `short` ones must not contradict them.
    """
    _, disk, offset, disks = _LOCATOR.unpack_from(locator)
    if disk or disks > 1:
        raise UnsupportedError(_IN_PARTS)
    if offset != place or len(before) < _END64.size:
        raise FormatError("zip64 locator does not point at the record before it")
    magic, length, _, _, disk, first_disk, here, count, size, start = _END64.unpack_from(
        before[-_END64.size :]
    )
    if magic != _END64_MAGIC or length != _END64.size - 12:
        raise FormatError("zip64 end record is malformed")
    if disk or first_disk or here != count:
        raise UnsupportedError(_IN_PARTS)
    if (
        short[0] not in (start, _U32)
        or short[1] not in (size, _U32)
        or short[2] not in (count, _U16)
    ):
        raise FormatError("zip64 end record and end record contradict each other")
    return start, size, count
