"""Read the zip files of checkpoints strictly. (PKWARE APPNOTE 6.3.10.)

A zip file consists of:

    members           for each member: local header (30 bytes), name, extra fields, data, and an
                      optional data descriptor
    directory         for each member an entry: 46 bytes, name, extra fields, comment
    zip64 end         56 bytes, and a locator of 20 bytes; required if a number does not fit into
                      its 16 or 32 bits in the end record. torch always writes both.
    end record        22 bytes and a comment

Integers are little-endian. The directory repeats the values in local headers and descriptors. Some
programs use the values in the headers, and other programs use the directory. This reader refuses a
file that two programs could read differently. If a non-empty member has the CRC 0, no CRC was
computed. torch has an option that disables CRCs.

    entry            PK 1 2, versions, flags, method, time, CRC-32, stored size, size, lengths,
                     disk, attributes, offset
    local header     PK 3 4, version, flags, method, time, CRC-32, stored size, size, lengths of
                     name and extra fields
    descriptor       [PK 7 8,] CRC-32, stored size, size. The sizes have 32 or 64 bits. The
                     descriptor follows the data if bit 3 of the flags is set.

torch writes zeros as CRC and sizes in local headers, and adds descriptors. torch aligns data with
an extra field ``FB``. This reader ignores versions, times and attributes, because it does not
unpack files. The folder attribute is an exception: torch reads a member with this attribute as
empty and returns uninitialized memory.

A `Row` describes a member: ``(offset of the local header, stored size, size, crc, method, flags)``.
A `Row` is a plain tuple, because Python creates a plain tuple 10x faster than a named tuple.
"""

from __future__ import annotations

import re
import struct
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, NoReturn

from ckptkit.compute.operation import Inflate, stream
from ckptkit.core.bytesource import ByteSource, Derived, Extent, Member, Range, Record, crc32
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    PathError,
    TruncatedError,
    UnsupportedError,
)
from ckptkit.core.limits import check, check_inflated
from ckptkit.core.text import mismatch, shown

MAGIC = b"PK\x03\x04"
DEFLATED = 8
# An in-place edit renames replaced records to names with one of these suffixes.
REPLACED = (".old", *(f".ol{n}" for n in range(10)))

CENTRAL_MAGIC, DESCRIPTOR_MAGIC = b"PK\x01\x02", b"PK\x07\x08"
CENTRAL = struct.Struct("<4s4xHH4xLLLHHHH2xB3xL")
LOCAL = struct.Struct("<4s2xHH4xLLLHH")
_local = LOCAL.unpack_from
_field = struct.Struct("<2sH").unpack_from  # reads the id and the length of an extra field
# Number of bytes of a local header without its name, plus 4 bytes. Every zip file contains at least
# 4 bytes after a local header.
_LEAST = 34
_DESCRIPTOR = struct.Struct("<4sLLL")
U32 = 0xFFFFFFFF
DESCRIBED = 0x0008
_REFUSED_FLAGS = ~0x080E  # all flags but UTF-8, data descriptor, and deflate's compression level
ENCRYPTED = 0x2041
_FOLDER = 0x10  # bit in the DOS attributes that marks a folder
_CONTROLS = bytes([*range(1, 32), 127])
ZIP64_FIELD, _UNICODE_PATH_FIELD = 0x0001, 0x7075
_STEP = 512  # minimum number of bytes to read at once

Row = Sequence[int]
Read = Callable[[int, int], bytes]  # (offset, length) -> bytes


def read_rows(data: bytes, count: int, limit: int) -> tuple[list[bytes], list[Row]]:
    """Return the names and the rows of all members.

    `limit` is the offset at which the members end. For speed, the loop over all members only
    detects errors. `_refuse_entry` then finds the cause of an error.
    """
    names: list[bytes] = []
    rows: list[Row] = []
    unpack = CENTRAL.unpack_from
    at = 0
    try:
        for _ in range(count):
            magic, flags, method, crc, stored, size, n, x, comment, disk, attributes, offset = (
                unpack(data, at)
            )
            end = at + 46 + n
            name = data[at + 46 : end]
            if magic != CENTRAL_MAGIC:
                raise CorruptError(f"zip directory is damaged at its byte {at:,}")
            if x or size == U32 or stored == U32 or offset == U32:
                size, stored, offset = _widen(data[end : end + x], name, size, stored, offset)
            wrong_size = method != DEFLATED if method else stored != size
            folder = attributes & _FOLDER and stored
            if (
                flags & _REFUSED_FLAGS
                or disk
                or wrong_size
                or folder
                or offset + 30 + n + stored > limit
            ):
                _refuse_entry(name, flags, method, disk, stored == size, bool(folder))
            names.append(name)
            rows.append((offset, stored, size, crc, method, flags))
            at = end + x + comment
    except struct.error as error:
        raise CorruptError(f"zip directory contains fewer than {count:,} entries") from error
    if at != len(data):
        raise CorruptError(
            f"zip directory has {len(data):,} bytes, but its {count:,} entries take {at:,}"
        )
    return names, rows


def _refuse_entry(
    name: bytes, flags: int, method: int, disk: int, same_size: bool, folder: bool
) -> NoReturn:
    if flags & _REFUSED_FLAGS:
        what = "is encrypted" if flags & ENCRYPTED else f"has unsupported flags: {flags:#06x}"
        raise UnsupportedError(f"record {shown(name)} {what}")
    if disk:
        raise UnsupportedError(_IN_PARTS)
    if method not in (0, DEFLATED):
        raise UnsupportedError(
            f"record {shown(name)} is compressed by method {method}, neither stored nor deflated"
        )
    if not same_size and not method:
        raise CorruptError(f"record {shown(name)} is stored, but has two sizes")
    if folder:
        raise AmbiguousError(
            f"record {shown(name)} has the attribute of a folder, but contains bytes"
        )
    raise CorruptError(f"record {shown(name)} reaches beyond the end of the members")


def extra_fields(extra: bytes, name: bytes) -> dict[int, bytes]:
    """Return the extra fields of a header by id."""
    found: dict[int, bytes] = {}
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == _UNICODE_PATH_FIELD or (kind == ZIP64_FIELD and kind in found):
            raise FormatError(f"record {shown(name)} has two names or two zip64 fields")
        found[kind] = extra[at + 4 : at + 4 + length]
        at += 4 + length
    if at != len(extra):
        raise FormatError(f"record {shown(name)} has malformed extra fields")
    return found


def _widen(extra: bytes, name: bytes, *values: int) -> list[int]:
    """Return size, stored size and offset.

    Read values of more than 32 bits from the zip64 field.
    """
    field = extra_fields(extra, name).get(ZIP64_FIELD, b"")
    if len(field) != 8 * values.count(U32):
        raise FormatError(
            f"record {shown(name)} has a zip64 field of wrong size ({len(field)} bytes)"
        )
    wide = iter(struct.unpack(f"<{len(field) // 8}Q", field))
    return [next(wide) if value == U32 else value for value in values]


def check_names(names: list[bytes], rows: list[Row]) -> list[str]:
    """Return the names as strings. Raises an InputError if a name is unsafe or not unique.

    For speed, all names are first checked together. If this check fails, each name is checked
    separately.
    """
    if not names:
        return []
    joined = b"\0".join(names)
    framed = b"\0" + joined + b"\0"
    odd = any(each in framed for each in (b"\\", b"..", b"\0/", b"\0\0"))
    odd = odd or joined.count(b"\0") >= len(names) or joined.translate(None, _CONTROLS) != joined
    for name in names if odd else ():
        if not name or b"\0" in name or name.translate(None, _CONTROLS) != name:
            raise FormatError(f"record name {shown(name)} is empty or contains control characters")
        if name.startswith(b"/") or b"\\" in name or b".." in name.split(b"/"):
            raise PathError(f"record name {shown(name)} leads out of the archive")
    try:
        texts = joined.decode().split("\0")
    except UnicodeDecodeError as error:
        bad = names[joined.count(b"\0", 0, error.start)]
        raise FormatError(f"record name {shown(bad)} is not UTF-8") from error
    numpy = all(name.endswith(b".npy") for name in names)
    # torch ignores the case of ASCII letters in names. numpy does not.
    folded = (joined if numpy else joined.lower()).split(b"\0")
    known = set(folded)
    if len(known) != len(names):
        twice = Counter(folded).most_common(1)[0][0]
        one, other, *_ = (name for name, key in zip(names, folded, strict=True) if key == twice)
        raise AmbiguousError(f"two records have the same name: {shown(one)}, {shown(other)}")
    for name, (_, stored, size, *_) in zip(names, rows, strict=True) if b"/\0" in framed else ():
        if name.endswith(b"/") and (stored or size or name[:-1].lower() in known):
            raise AmbiguousError(
                f"record {shown(name)} has the name of a folder, but contains bytes"
            )
    return texts


class HeaderWindow:
    """A reader of a source in blocks. The blocks grow while the reads are close to each other."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.data = b""
        self.base = 0
        self.step = _STEP

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`, or fewer at the end of the source."""
        if not 0 <= offset < self.source.size:
            return b""
        at = self.place(offset, length)
        return self.data[at : at + length]

    def place(self, offset: int, length: int) -> int:
        """Return the index in `data` of the byte at `offset`.

        Read more data unless `data` contains `length` bytes from this index on.
        """
        at = offset - self.base
        if at < 0 or at + length > len(self.data):
            near = 0 <= at <= len(self.data) + 8 * _STEP
            self.step = min(2 * self.step, 1 << 20) if near else _STEP
            self.base, at = offset, 0
            self.data = self.source.read(
                offset, min(max(length, self.step), self.source.size - offset)
            )
        return at


def check_members(
    source: ByteSource, names: list[bytes], rows: list[Row], directory: int
) -> list[int]:
    """Return the offset of each member's bytes.

    Raises an InputError if the local headers and the directory disagree, or if two members overlap.
    """
    window = HeaderWindow(source)
    read, place = window.read, window.place
    known = set(names)
    places = [0] * len(rows)
    previous = end = 0
    for i in sorted(range(len(rows)), key=[row[0] for row in rows].__getitem__):
        name, row = names[i], rows[i]
        offset = row[0]
        if offset != end:
            if offset < end:
                how = "begin at the same byte" if rows[previous][0] == offset else "overlap"
                both = f"{shown(names[previous])} and {shown(name)}"
                raise AmbiguousError(f"records {both} {how}")
            _check_gap(read, end, offset, known)
        at = place(offset, _LEAST + len(name))
        size, described = _check_header(window.data, at, read, name, row)
        places[i] = start = offset + size
        end = start + row[1]
        if described and end <= directory:
            at = place(end, 24)  # every zip file contains at least 24 bytes after a member's data
            mostly = (DESCRIPTOR_MAGIC, row[3], row[1], row[2])
            is_short = _DESCRIPTOR.unpack_from(window.data, at) == mostly
            end += 16 if is_short else _check_descriptor(window.data, at, name, row)
        if end > directory:
            raise CorruptError(f"record {shown(name)} reaches into the zip directory")
        previous = i
    if end != directory:
        _check_gap(read, end, directory, known)
    return places


def find_data(read: Read, name: bytes, row: Row) -> int:
    """Return the offset of a member's bytes. Raises the errors of `check_members`."""
    offset = row[0]
    head = read(offset, _LEAST + len(name))
    return offset + _check_header(head, 0, read, name, row[:6])[0]


def _check_header(data: bytes, at: int, read: Read, name: bytes, row: Row) -> tuple[int, bool]:
    """Return the size of a local header, and whether a data descriptor follows the member's bytes.

    If a descriptor follows the data, a value in the local header may be 0. torch writes three
    numbers into the zip64 field of a local header: the size, then 0 in place of the stored size,
    then the offset. The 32-bit sizes are also 0.

    Raises an InputError if header and directory differ in more than the descriptor flag.
    """
    offset, stored, size, crc, method, flags = row
    n = len(name)
    magic, own_flags, own_method, own_crc, own_stored, own_size, own_n, x = _local(data, at)
    if magic != MAGIC:
        raise CorruptError(
            f"record {shown(name)} does not begin at byte {offset:,}, its offset in the directory"
        )
    described = own_flags & DESCRIBED != 0
    alike = own_flags == flags or own_flags == flags | DESCRIBED
    end = at + 30 + n
    if not alike or own_method != method or own_n != n or data[at + 30 : end] != name:
        raise AmbiguousError(
            f"name, flags or method of record {shown(name)} differ between header and directory"
        )
    is_empty = described and not (own_crc or own_stored or own_size)
    same = is_empty or (own_crc == crc and own_stored == stored and own_size == size)
    if same and (not x or _field(data, end) == (b"FB", x - 4)):
        return 30 + n + x, described
    field = extra_fields(read(offset + 30 + n, x), name).get(ZIP64_FIELD, b"")
    wide = list(struct.unpack(f"<{len(field) // 8}Q", field)) if len(field) % 8 == 0 else [-1]
    own_size = wide.pop(0) if own_size == U32 and wide else own_size
    own_stored = wide.pop(0) if own_stored == U32 and wide else own_stored
    pairs = ((own_crc, crc), (own_stored, stored), (own_size, size))
    differ = any(own != listed and not (described and own == 0) for own, listed in pairs)
    if differ or any(value not in (0, size, stored, offset) for value in wide):
        raise AmbiguousError(
            f"CRC or sizes of record {shown(name)} differ between header and directory"
        )
    return 30 + n + x, described


def _check_descriptor(data: bytes, at: int, name: bytes, row: Row) -> int:
    """Return the size of the data descriptor at `at`.

    A descriptor contains the CRC and two sizes (of 32 or 64 bits), usually after a signature.
    """
    _, stored, size, crc, _, _ = row
    wide = struct.pack("<LQQ", crc, stored, size)
    narrow = struct.pack("<LLL", crc, stored & U32, size & U32) if size <= U32 else wide
    for expected in (DESCRIPTOR_MAGIC + wide, wide, narrow):
        if data.startswith(expected, at):
            return len(expected)
    raise CorruptError(f"the data descriptor of record {shown(name)} contradicts the directory")


def _check_gap(read: Read, start: int, end: int, known: set[bytes]) -> None:
    """Raise AmbiguousError if an unlisted record begins between two members.

    An old version of a listed record is allowed, because an in-place edit can leave such a version.
    """
    if end - start < 30:
        return
    head = read(start, 30)
    name = read(start + 30, min(int.from_bytes(head[26:28], "little"), end - start - 30))
    if head.startswith(MAGIC) and name not in known:
        raise AmbiguousError(f"record {shown(name)} at byte {start:,} is not in the directory")


# The directory


END_MAGIC, END64_MAGIC, _LOCATOR_MAGIC = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
END = struct.Struct("<4s4H2LH")
END64 = struct.Struct("<4sQ2H2L4Q")
LOCATOR = struct.Struct("<4sLQL")
U16 = 0xFFFF
_BATCH = 64  # number of local headers to fetch in one request
_HEADER = 256  # maximum size of a local header without the name; most bytes are padding
_IN_PARTS = "is one part of a zip file in several parts"
_AGAIN = "download or copy the file again"
_tuple = tuple.__new__  # creates a named tuple without the slow Python constructor


class StoredMember(NamedTuple):
    """A stored (uncompressed) member of a local file. Its local header has been checked.

    A StoredMember is also the `Record` of a storage. A separate Range would take more memory.
    """

    source: ByteSource
    data: int  # offset of the bytes
    length: int
    crc: int

    @property
    def method(self) -> int:
        return 0

    @property
    def stored(self) -> int:
        """Return the number of bytes in the file."""
        return self.length

    def locate(self) -> Range:
        return _tuple(Range, self[:3])


class ZipEntry(NamedTuple):
    """The directory entry of a member that is not a StoredMember. All offsets are in bytes."""

    offset: int  # offset of the local header
    stored: int  # number of bytes in the file
    length: int  # number of bytes after decompression
    crc: int
    method: int
    flags: int
    data: int  # offset of the bytes, -1 until the local header is read


Entry = StoredMember | ZipEntry


@dataclass(frozen=True, slots=True)
class ZipDirectory:
    """The members of a zip file in directory order, and the locations of their bytes."""

    source: ByteSource
    entries: Mapping[str, Entry] = field(repr=False)
    start: int  # offset of the directory; the members end there
    top: str  # top folder of the first member; torch calls it the archive name
    headers: LocalHeaders | None = field(repr=False, default=None)  # local headers of a remote file
    # A list of one item, the number of bytes decompressed so far.
    inflated: list[int] = field(repr=False, default_factory=lambda: [0])

    def crc(self, name: str) -> int | None:
        """Return the CRC-32 of a member's bytes, or None if the file contains no CRC-32."""
        entry = self.entries[name]
        return None if entry.crc == 0 and entry.length else entry.crc

    def record(self, name: str) -> tuple[Record, int | None]:
        """Return the record of a member's bytes, and the CRC-32 that `crc` returns.

        In a remote file, the local header of a member is read when its bytes are needed.
        """
        entry = self.entries[name]
        where = entry if isinstance(entry, StoredMember) else Unlocated(self, name, entry.length)
        return where, self.crc(name)

    def locate(self, name: str) -> Extent:
        """Return the extent of a member's bytes. The bytes of a deflated member are inflated."""
        entry = self.entries[name]
        if isinstance(entry, StoredMember):
            return entry.locate()
        start = entry.data if self.headers is None else self.headers.place(name)
        stored = Range(self.source, start, entry.stored)
        if entry.method != DEFLATED:
            return stored
        check(
            "inflate_ratio", entry.length // max(1, entry.stored), f"compression of {shown(name)}"
        )
        return Derived(Inflate(name, self.crc(name)), (stored,), entry.length)

    def read(self, name: str) -> bytes:
        """Return all bytes of a member.

        Raises CorruptError if the bytes do not match the CRC. Raises LimitError if the member is
        too large.
        """
        entry = self.entries[name]
        check("record_bytes", entry.length, f"record {shown(name)}")
        if entry.method == DEFLATED:
            self.inflated[0] += entry.length
            check_inflated(self.inflated[0], self.source.size)
        try:
            data = b"".join(stream(self.locate(name)))
        except CorruptError as error:
            error.message = f"record {shown(name)}: {error.message}"
            raise
        self._compare(name, zlib.crc32(data))
        return data

    def verify(self, name: str) -> None:
        """Raise CorruptError if the bytes of a member do not match their CRC."""
        total = 0
        for piece in stream(self.locate(name)):
            total = crc32(piece, total)
        self._compare(name, total)

    def _compare(self, name: str, crc: int) -> None:
        expected = self.crc(name)
        if expected is not None and crc != expected:
            raise CorruptError(
                mismatch(f"record {shown(name)}", crc, expected),
                where=self.source.name,
                hint=_AGAIN,
            )


class LocalHeaders:
    """A reader of local headers in a remote file. Finds the offset of each member's bytes."""

    def __init__(self, source: ByteSource, entries: dict[str, ZipEntry]) -> None:
        self._source = source
        self._entries = list(entries.items())
        self._numbers = {name: number for number, name in enumerate(entries)}
        self._places: dict[str, int] = {}

    def place(self, name: str) -> int:
        """Return the offset of a member's bytes. Raises an InputError for an invalid header."""
        if name in self._places:
            return self._places[name]
        entry = self._entries[self._numbers[name]][1]
        return find_data(self._source.read, name.encode(), entry)

    def prefetch(self, name: str) -> None:
        """Fetch the local headers of a member and of its neighbors in one request."""
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
            with suppress(CkptkitError):  # `place` raises the error again
                self._places[name] = find_data(self._source.read, name.encode(), entry)


class Unlocated(NamedTuple):
    """A member whose bytes are located when they are read."""

    directory: ZipDirectory
    name: str
    length: int

    def locate(self) -> Extent:
        if self.directory.headers is not None:
            self.directory.headers.prefetch(self.name)
        return self.directory.locate(self.name)


def read_directory(source: ByteSource) -> ZipDirectory:
    """Return the directory of a zip file. For a local file, also check all local headers.

    Raises TruncatedError if the end record is missing. Raises another InputError if the file is
    damaged, ambiguous or unsupported.
    """
    try:
        start, size, count = _find_end(source)
        names, rows = read_rows(source.read(start, size), count, start)
        texts = check_names(names, rows)
        source.members = partial(_stored_members, start, size, count)
        top = texts[0].partition("/")[0] if texts else ""
        if source.remote:
            # Local headers are read later, when the bytes of a member are needed.
            unread = {
                text: _tuple(ZipEntry, (*row, -1)) for text, row in zip(texts, rows, strict=True)
            }
            return ZipDirectory(source, unread, start, top, LocalHeaders(source, unread))
        places = check_members(source, names, rows, start)
    except CkptkitError as error:
        error.at(source.name)
        raise
    # This code is inlined, because a function call for each member would be slow.
    entries = {
        text: _tuple(ZipEntry, (*row, place))
        if row[4] == DEFLATED
        else _tuple(StoredMember, (source, place, row[1], row[3]))
        for text, row, place in zip(texts, rows, places, strict=True)
    }
    return ZipDirectory(source, entries, start, top)


def _stored_members(start: int, size: int, count: int, source: ByteSource) -> Iterator[Member]:
    """Yield the stored members that have a CRC-32. The directory begins at `start`.

    The directory is read again, because keeping the directory would take too much memory. For an
    .npy member, the local header is also read, to get the exact offset of the member's bytes. This
    offset differs from that of the array's elements, because the array's header precedes them.
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


# The end of the file


def _find_end(source: ByteSource) -> tuple[int, int, int]:
    """Return offset, size and number of entries of the directory, from the end records."""
    if source.read(0, min(4, source.size)) != MAGIC:
        raise FormatError("does not begin with a zip member")
    longest = END.size + U16 + LOCATOR.size + END64.size
    tail = source.read(max(0, source.size - longest), min(longest, source.size))
    at = _find_end_record(source, tail)
    _, disk, first_disk, here, count, size, start, _ = END.unpack_from(tail, at)
    stop = source.size - len(tail) + at  # end of the directory
    locator = max(0, at - LOCATOR.size)
    if tail[locator:at].startswith(_LOCATOR_MAGIC):
        stop -= LOCATOR.size + END64.size
        _, other_disk, place, disks = LOCATOR.unpack_from(tail, locator)
        if disk or first_disk or here != count or other_disk or disks > 1:
            raise UnsupportedError(_IN_PARTS)
        short = (start, size, count)
        magic, length, _, _, disk, first_disk, here, count, size, start = END64.unpack_from(
            tail, max(0, locator - END64.size)
        )
        wide = zip(short, (start, size, count), (U32, U32, U16), strict=True)
        differ = any(value not in (true, capped) for value, true, capped in wide)
        is_whole = place == stop and magic == END64_MAGIC and length == END64.size - 12
        if differ or not is_whole:
            raise FormatError("zip64 end record is malformed, or contradicts the end record")
    elif U32 in (size, start):
        raise FormatError("zip64 end record is missing")
    if disk or first_disk or here != count:
        raise UnsupportedError(_IN_PARTS)
    if start + size != stop:
        raise AmbiguousError(
            f"zip directory ends at byte {start + size:,}, but its end record is at {stop:,}"
        )
    check("zip_entries", count, "members of a zip file")
    check("zip_directory_bytes", size, "zip directory")
    return start, size, count


def _find_end_record(source: ByteSource, tail: bytes) -> int:
    """Return the offset in `tail` of the end record whose comment ends at the end of the file.

    Raises an InputError unless the tail contains exactly one such end record.
    """
    first = max(0, len(tail) - END.size - U16)
    found = [first + match.start() for match in re.finditer(END_MAGIC, tail[first:])]
    whole = [at for at in found if at + END.size <= len(tail)]
    # The end records of archives inside the file do not count.
    if all(_is_inner(source, tail, at) for at in whole):
        raise TruncatedError(
            "has no zip end record: the download or save is incomplete", hint=_AGAIN
        )
    exact = [at for at in whole if at + END.size + END.unpack_from(tail, at)[-1] == len(tail)]
    if not exact:
        after = len(tail) - whole[-1] - END.size
        raise AmbiguousError(f"{after:,} bytes after the zip end record belong to no member")
    if len(exact) > 1 or found[-1] != exact[0]:
        raise AmbiguousError("has more than one zip end record")
    return exact[0]


def _is_inner(source: ByteSource, tail: bytes, at: int) -> bool:
    """Return whether the end record at `at` belongs to an archive inside the file."""
    *_, size, start, _ = END.unpack_from(tail, at)
    end, locator = at, max(0, at - LOCATOR.size)
    if tail[locator:at].startswith(_LOCATOR_MAGIC):
        end = locator - END64.size
        if end < 0 or not tail.startswith(END64_MAGIC, end):
            return False  # the caller reports the damage
        size, start = END64.unpack_from(tail, end)[8:10]
    # The offsets in an end record count from the start of the archive.
    begin = source.size - len(tail) + end - size - start
    return 0 < begin <= source.size - 4 and source.read(begin, 4) == MAGIC
