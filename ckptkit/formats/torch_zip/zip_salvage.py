"""Find the members of a damaged zip file: local headers, directories, and the bytes they describe.

The strict reader (:mod:`zip_reader`) refuses a file whose headers and directory disagree. Here
nothing has to agree: headers are searched for, and entries of directories are read wherever some
are left. Their fields are claims, which the caller compares with the bytes. A file that was written
over an older one can have the headers and directories of both.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from ckptkit import compute
from ckptkit.core.bytesource import ByteSource, Derived, Extent, Range, crc32
from ckptkit.core.errors import CkptkitError
from ckptkit.core.limits import LIMITS
from ckptkit.formats.containers.zip_entries import DEFLATED, MAGIC

_LOCAL = struct.Struct("<4s2xHH4xLLLHH")
_CENTRAL = struct.Struct("<4s4xHH4xLLLHHHH2xB3xL")
_ENTRY, _DESCRIPTOR = b"PK\x01\x02", b"PK\x07\x08"
_END, _END64 = b"PK\x05\x06", b"PK\x06\x06"
_FOUND = re.compile(b"PK(?:\x03\x04|\x01\x02)")
_DESCRIPTORS = (struct.Struct("<4sLLL"), struct.Struct("<4sLQQ"))
_DESCRIBED, _ENCRYPTED = 0x0008, 0x2041
_ZIP64 = 0x0001
_U32 = 0xFFFFFFFF
_SMALLEST, _STEP = 1 << 12, 1 << 20  # bytes of a read, while searching
_TAIL = 16 << 20  # bytes of either end of the file among which its first piece is searched for
_REACH = 2 * LIMITS.name_bytes  # bytes of a header, its name and its extra fields
_TRIES = 4  # headers of one name that are looked at
_READS = 4  # times the bytes of the file that are read for checksums
_SMALL = 1 << 20  # bytes of a record that is read at once


class Header(NamedTuple):
    """A local header. ``stored`` and ``crc`` are None where they are in a descriptor."""

    name: str
    offset: int
    start: int  # of the bytes
    method: int
    stored: int | None
    crc: int | None


class DirectoryEntry(NamedTuple):
    """A directory entry of a member."""

    name: str
    offset: int  # of the local header
    method: int
    stored: int
    size: int
    crc: int


class Listed(NamedTuple):
    """A directory entry, and where it begins and ends in the file."""

    at: int
    stop: int
    entry: DirectoryEntry


class Directory:
    """The entries of one directory, or those that are left of it."""

    def __init__(self, source: ByteSource, at: int = 0) -> None:
        self.at = at  # where it begins in the file
        self.stop = at
        self._window = Window(source)
        self.entries: dict[str, list[DirectoryEntry]] = {}

    def add(self, listed: Listed) -> None:
        """Add the next entry."""
        self.entries.setdefault(listed.entry.name, []).append(listed.entry)
        self.stop = max(self.stop, listed.stop)

    def following(self, entry: DirectoryEntry) -> tuple[int, str | None]:
        """Return offset and name of the member after an entry's; the directory has no name."""
        number = bisect_right(self._order[0], entry.offset)
        if number == len(self._order[0]):
            return self.start, None
        return self._order[0][number], self._order[1][number]

    @cached_property
    def start(self) -> int:
        """Where it begins by its end record, else where it begins in the file."""
        end = self._window.read(self.stop, 56)
        if end.startswith(_END64) and len(end) == 56:
            return int.from_bytes(end[48:], "little")
        found = end.startswith(_END) and len(end) >= 22
        return int.from_bytes(end[16:20], "little") if found else self.at

    def is_inside(self, begin: int) -> bool:
        """Return whether it is of an archive inside the one that begins at `begin`."""
        own = self.at - self.start
        return own > begin and header_at(self._window, own) is not None

    @cached_property
    def _order(self) -> tuple[list[int], list[str]]:
        rows = sorted((each.offset, name) for name, same in self.entries.items() for each in same)
        return [offset for offset, _ in rows], [name for _, name in rows]


class Place(NamedTuple):
    """Bytes that a member may have, and the CRC-32 that they should have; None if unknown."""

    extent: Extent
    crc: int | None
    header: Header
    entry: DirectoryEntry | None


class Window:
    """Forward reads of a source, in steps that grow from one to the next."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.base = 0
        self.data = b""
        self._step = _SMALLEST

    def seek(self, at: int) -> None:
        """Load the bytes from `at` on: a small piece after a jump, more when the search goes on."""
        stop = self.base + len(self.data)
        if self.base <= at and at + _LOCAL.size <= stop:
            return
        near = self.base <= at <= stop
        self._step = min(4 * self._step, _STEP) if near else _SMALLEST
        self.base = at
        self.data = self.source.read(at, min(self._step + _LOCAL.size, self.source.size - at))

    def read(self, at: int, length: int) -> bytes:
        """Return up to `length` bytes from `at`, fewer at the end of the file."""
        length = min(length, self.source.size - at)
        if length <= 0 or at < 0:
            return b""
        start = at - self.base
        if start >= 0 and start + length <= len(self.data):
            return self.data[start : start + length]
        return self.source.read(at, length)


# Headers and directories


def entries_at_end(source: ByteSource) -> list[Listed]:
    """Return the directory entries that can be read at the end of the file."""
    found: list[Listed] = []
    stop, step = source.size, _SMALLEST
    while stop > 0 and (found or source.size - stop < _TAIL) and len(found) < LIMITS.zip_entries:
        start = max(0, stop - step)
        step = min(2 * step, _STEP)
        piece = source.read(start, min(source.size, stop + min(step, _REACH)) - start)
        here = list(_entries(piece, start, stop))
        if found and not here:
            break
        found = here + found
        stop = start
    return found


def _entries(piece: bytes, start: int, stop: int) -> Iterator[Listed]:
    at = piece.find(_ENTRY)
    while 0 <= at < stop - start:
        if (found := _entry(piece, at, start)) is not None:
            yield found
        at = piece.find(_ENTRY, at + 1)


def _entry(data: bytes, at: int, base: int) -> Listed | None:
    """Return the directory entry at `at`, None if there is no valid one."""
    if at + _CENTRAL.size > len(data):
        return None
    _, flags, method, crc, stored, size, n, x, comment, disk, _, offset = _CENTRAL.unpack_from(
        data, at
    )
    name = _name(data[at + 46 : at + 46 + n], n)
    if name is None or method not in (0, DEFLATED) or flags & _ENCRYPTED or disk:
        return None
    extra = data[at + 46 + n : at + 46 + n + x]
    size, stored, offset = _widened(extra, size, stored, offset)
    entry = DirectoryEntry(name, offset, method, stored, size, crc)
    return Listed(base + at, base + at + 46 + n + x + comment, entry)


def _name(raw: bytes, length: int) -> str | None:
    try:
        return raw.decode() if len(raw) == length and raw else None
    except UnicodeDecodeError:
        return None


def _widened(extra: bytes, *values: int) -> list[int]:
    """Replace those of `values` that do not fit 32 bits by the zip64 field's, where it has them."""
    wide: list[int] = []
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == _ZIP64:
            body = extra[at + 4 : at + 4 + length]
            wide = list(struct.unpack(f"<{len(body) // 8}Q", body[: len(body) // 8 * 8]))
        at += 4 + length
    return [wide.pop(0) if value == _U32 and wide else value for value in values]


def header_at(window: Window, at: int) -> Header | None:
    """Return the local header at `at`, None if there is no valid one."""
    fixed = window.read(at, _LOCAL.size)
    if len(fixed) < _LOCAL.size:
        return None
    magic, flags, method, crc, stored, size, n, x = _LOCAL.unpack(fixed)
    if magic != MAGIC or method not in (0, DEFLATED) or flags & _ENCRYPTED or n > LIMITS.name_bytes:
        return None
    name = _name(window.read(at + _LOCAL.size, n), n)
    if name is None:
        return None
    start = at + _LOCAL.size + n + x
    if flags & _DESCRIBED:
        return Header(name, at, start, method, None, None)
    if _U32 in (stored, size):
        size, stored = _widened(window.read(start - x, x), size, stored)
    return Header(name, at, start, method, stored, crc)


def first_header(source: ByteSource) -> Header | None:
    """Return the first local header near the beginning of a file."""
    found = search(source, {}, min(source.size, _TAIL))
    return next((each for each in found if isinstance(each, Header)), None)


def search(
    source: ByteSource, sizes: Mapping[str, int], stop: int | None = None
) -> Iterator[Header | Listed]:
    """Yield local headers and directory entries in the order of the file.

    Skip members' bytes where another header or the directory follows. `sizes` are the bytes of
    stored members that do not store them.
    """
    window = Window(source)
    at = count = 0
    stop = source.size if stop is None else stop
    while at + _LOCAL.size <= stop and count < 2 * LIMITS.zip_entries:
        window.seek(at)
        match = _FOUND.search(window.data, at - window.base)
        if match is None:
            at = window.base + len(window.data) - len(MAGIC) + 1
            continue
        at = window.base + match.start()
        if match[0] == MAGIC:
            found: Header | Listed | None = header_at(window, at)
        else:
            found = _entry(window.read(at, _CENTRAL.size + _REACH), 0, at)
        if found is None:
            at += 1
            continue
        yield found
        count += 1
        at = found.stop if isinstance(found, Listed) else _after(window, found, sizes)


def _after(window: Window, header: Header, sizes: Mapping[str, int]) -> int:
    """Return where to look for the next header."""
    size = sizes.get(header.name) if header.stored is None and header.method == 0 else header.stored
    if size is None:
        return header.start
    end = header.start + size
    return end if window.read(end, 2) == b"PK" else header.start


def directories(source: ByteSource, found: Iterable[Listed], begin: int) -> list[Directory]:
    """Return the directories that entries belong to, in the order of the file.

    Without those of archives inside the one that begins at `begin`.
    """
    result: list[Directory] = []
    for listed in found:
        if not result or not _is_joined(source, result[-1].stop, listed.at):
            result.append(Directory(source, listed.at))
        result[-1].add(listed)
    return [each for each in result if not each.is_inside(begin)]


def _is_joined(source: ByteSource, end: int, at: int) -> bool:
    """Return whether nothing but damaged entries lies between two entries of directories."""
    between = source.read(end, at - end) if 0 < at - end < _REACH else b""
    return at - end < _REACH and not any(each in between for each in (MAGIC, _END, _END64))


class Described(NamedTuple):
    """A data descriptor: the checksum, whether its sizes are the expected ones, and its end."""

    crc: int
    fits: bool
    end: int


def descriptor(window: Window, end: int, stored: int, size: int) -> Described | None:
    """Return the data descriptor at `end`, None if there is none.

    One cut after its checksum counts.
    """
    data = window.read(end, 24)
    if not data.startswith(_DESCRIPTOR) or len(data) < 8:
        return None
    crc = int.from_bytes(data[4:8], "little")
    for layout in _DESCRIPTORS:
        if len(data) >= layout.size and layout.unpack_from(data)[2:] == (stored, size):
            return Described(crc, True, end + layout.size)
    return Described(crc, False, end)


class Salvage:
    """The members that were found in a damaged file."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.window = Window(source)
        self.first = first_header(source)
        self.begin = 0 if self.first is None else self.first.offset
        self.directories = directories(source, entries_at_end(source), self.begin)
        self.directory = Directory(source)  # the one that counts
        self.sequence: list[Header] = []  # in the order of the file
        self.headers: dict[str, list[Header]] = {}
        self._budget = _READS * source.size

    def search(self, sizes: dict[str, int]) -> None:
        """Search for every local header and directory.

        `sizes` are the bytes of members that do not store them.
        """
        listed: list[Listed] = []
        self.sequence, self.headers = [], {}
        for found in search(self.source, sizes):
            if isinstance(found, Listed):
                listed.append(found)
                continue
            self.sequence.append(found)
            same = self.headers.setdefault(found.name, [])
            if len(same) < _TRIES:
                same.append(found)
        self.directories = directories(self.source, listed, self.begin)
        self.directories.sort(key=self._agreement, reverse=True)

    def _agreement(self, directory: Directory) -> int:
        """Count the members whose own checksum is that of the directory."""
        return sum(
            (place := self.place(header, None, entry.size)) is not None and place.crc == entry.crc
            for name, same in directory.entries.items()
            for header in self.headers.get(name, ())
            for entry in same
        )

    @property
    def is_spent(self) -> bool:
        """True once so much was read for checksums that headers must overlap each other."""
        return self._budget < 0

    def places(self, name: str, size: int) -> Iterator[Place]:
        """Yield the bytes that a member may have: by the directory, by headers, by neighbors."""
        known = [each for each in self.directory.entries.get(name, ()) if each.size == size]
        seen: set[int] = set()
        for header in self._candidates(name, known[:_TRIES]):
            if header.start not in seen:
                seen.add(header.start)
                for entry in known[:_TRIES] or (None,):
                    if (place := self.place(header, entry, size)) is not None:
                        yield place

    def _candidates(self, name: str, known: Iterable[DirectoryEntry]) -> Iterator[Header]:
        for entry in known:
            if (header := header_at(self.window, entry.offset)) and header.name == name:
                yield header
        yield from self.headers.get(name, ())
        for entry in known:
            if entry.crc:  # which proves them
                yield from self._guesses(entry)

    def _guesses(self, entry: DirectoryEntry) -> Iterator[Header]:
        """Yield headers as a member may have had, from what it is between, if its own is damaged.

        The bytes begin after the extra fields, and end before a descriptor and the next member.
        """
        fixed = self.window.read(entry.offset, _LOCAL.size)
        name = len(entry.name.encode())
        starts = [entry.offset + _LOCAL.size + name + int.from_bytes(fixed[28:], "little")]
        end = self.directory.following(entry)[0]
        sizes = [each.size for each in _DESCRIPTORS]
        there = [n for n in sizes if self.window.read(end - n, 4) == _DESCRIPTOR]
        starts += [end - n - entry.stored for n in there or (*sizes, 0)]
        for start in starts:
            if start > entry.offset:
                yield Header(entry.name, entry.offset, start, entry.method, None, None)

    def place(self, header: Header, entry: DirectoryEntry | None, size: int) -> Place | None:
        """Return the bytes after a header, if the file has them."""
        method = header.method if entry is None else entry.method
        stored = header.stored if entry is None else entry.stored
        if method != DEFLATED:
            stored = size if entry is not None or header.stored in (None, size) else None
        if stored is None or header.start + stored > self.source.size:
            return None
        extent: Extent = Range(self.source, header.start, stored)
        if method == DEFLATED:
            if size // max(1, stored) > LIMITS.inflate_ratio:
                return None
            extent = Derived("inflate", (extent,), (), size)
        if entry is not None:
            return Place(extent, entry.crc, header, entry)
        described = (
            descriptor(self.window, header.start + stored, stored, size)
            if header.crc is None
            else None
        )
        return Place(extent, header.crc if described is None else described.crc, header, None)

    def is_framed(self, place: Place, size: int, successors: Mapping[str, str]) -> bool:
        """Return whether a stored member lies where it should between its header and the next one.

        `successors` maps each storage to the next one. Where neither it nor the directory has
        another, no storage may follow.
        """
        end = self._end(place, size)
        if end is None:
            return False
        if place.entry is None:
            is_next = self.is_followed(place, size, successors)
            return self.window.read(end, 4) == _ENTRY if is_next is None else is_next
        offset, name = self.directory.following(place.entry)
        at = place.header.offset + offset - place.entry.offset
        if name is None:
            return at >= end and self.window.read(at, 4) == _ENTRY
        following = header_at(self.window, at)
        return at >= end and following is not None and following.name == name

    def is_followed(self, place: Place, size: int, successors: Mapping[str, str]) -> bool | None:
        """Return whether the right record follows one with a descriptor; None if no record does."""
        following = header_at(self.window, self._end(place, size) or self.source.size)
        if following is None:
            return None
        expected = successors.get(place.header.name)
        return following.name == expected or (expected is None and following.name not in successors)

    def _end(self, place: Place, size: int) -> int | None:
        """Return the end of a stored member and its descriptor, None if that does not fit."""
        end = place.header.start + size
        if place.header.stored is not None:
            return end if isinstance(place.extent, Range) else None
        described = descriptor(self.window, end, size, size)
        return described.end if described is not None and described.fits else None

    def crc32(self, extent: Extent) -> int | None:
        """Return the CRC-32 of bytes, None where they cannot be computed."""
        self._budget -= extent.length
        total = 0
        try:
            for piece in compute.stream(extent):
                total = crc32(piece, total)
        except CkptkitError:
            return None
        return total

    def small(self, name: str) -> bytes | None:
        """Return a small record that matches its checksum, None if there is none."""
        known = [each.size for each in self.directory.entries.get(name, ())]
        sizes = known or [each.stored or _SMALL for each in self.headers.get(name, ())]
        for size in sizes:
            for place in self.places(name, size) if size < _SMALL else ():
                if isinstance(place.extent, Range) and self.crc32(place.extent) == place.crc:
                    return place.extent.read()
        return None

    def end_of_save(self, name: str) -> int:
        """Return the offset before which all members are of one save, 0 if nothing proves it.

        It is that of the record `name`, torch's serialization id: 20 digits, and 20 of a hash of
        the CRCs of all members before it. (c10::hash_combine; caffe2/serialize's
        inline_container.cc, writeSerializationId.)
        """
        total = 0
        for header, following in pairwise((*self.sequence, None)):
            assert header is not None
            if header.name == name:
                digits = self.window.read(header.start, 40)[20:]
                return header.offset if digits == b"%020d" % total else 0
            crc = None if following is None else self._crc_before(header.start, following.offset)
            if crc is None:
                break
            total ^= (crc + 0x9E3779B9 + (total << 6) + (total >> 2)) & 0xFFFFFFFFFFFFFFFF
        return 0

    def _crc_before(self, start: int, stop: int) -> int | None:
        """Return the CRC in the descriptor between two offsets, None if there is none that fits."""
        for layout in _DESCRIPTORS:
            size = stop - layout.size - start
            found = descriptor(self.window, stop - layout.size, size, size)
            if found is not None and found.end == stop:
                return found.crc
        return None
