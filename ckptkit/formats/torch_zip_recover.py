"""Recover a damaged torch zip archive: every tensor whose bytes match a checksum in the file.

A file contains the CRC-32 of a member twice: in the directory entry, and in the local header or in
the data descriptor after the bytes. If the directory entry exists, ckptkit uses the CRC in the
entry. A member is lost if the file contains no CRC for the member, or if the bytes do not match the
CRC. Missing or inserted bytes shift all later bytes, and only a checksum reveals such a shift.
data.pkl contains the length of each storage. data.pkl must match its own checksum, too.

If all CRCs of a file are 0, the file has no checksums. In such a file, ckptkit keeps a member if
its header and its end are at the right place, and if the next member is the expected member.

If a save overwrote an older, longer file, the file may contain members of two saves. The directory
proves which members belong together. Without the directory, torch's serialization id is the proof,
because this id is a hash of all CRCs. If both are missing, a warning names the tensors that may
belong to the older file.

The strict reader (:mod:`zip_reader`) refuses a file whose headers and directory disagree. Recovery
accepts such files. Recovery searches a file for local headers and for the remaining directory
entries, and compares the CRCs in headers and entries with the bytes of the members.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import NamedTuple

from ckptkit.compute.operation import Inflate, stream
from ckptkit.core.bytesource import ByteSource, Derived, Extent, Memory, Range, crc32
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, CorruptError, UnsupportedError
from ckptkit.core.limits import LIMITS, check_inflated
from ckptkit.core.tensor import Storage
from ckptkit.core.text import plural, shown, some
from ckptkit.core.tree import Node, join, walk
from ckptkit.core.weights import as_tensor
from ckptkit.formats import table, torch_zip
from ckptkit.formats.format import RECOVER, UNVERIFIED, Probe, Recovered
from ckptkit.formats.recovering import AGAIN, recovered, unsummed
from ckptkit.formats.zip_reader import DEFLATED, MAGIC, HeaderWindow
from ckptkit.pickles.storages import StorageTable
from ckptkit.pickles.values import Unpickled, unpickle

_PICKLE, _ID = "/data.pkl", "/.data/serialization_id"
_LOCAL = struct.Struct("<4s2xHH4xLLLHH")
_CENTRAL = struct.Struct("<4s4xHH4xLLLHHHH2xB3xL")
_ENTRY, _DESCRIPTOR = b"PK\x01\x02", b"PK\x07\x08"
_END, _END64 = b"PK\x05\x06", b"PK\x06\x06"
_CLAIMS, _ENTRIES = re.compile(b"PK(?:\x03\x04|\x01\x02)"), re.compile(_ENTRY)
_DESCRIPTORS = (struct.Struct("<4sLLL"), struct.Struct("<4sLQQ"))
_DESCRIBED, _ENCRYPTED = 0x0008, 0x2041
_ZIP64 = 0x0001
_U32 = 0xFFFFFFFF
_TAIL = 16 << 20  # number of bytes to search for headers and entries at each end of the file
_REACH = 2 * LIMITS.name_bytes  # maximum size of a header with its name and extra fields
# If this number of bytes before an entry contain no other entry, a directory begins at this entry.
_GAP = 4 << 10
_TRIES = 4  # maximum number of headers to examine for each name
_READS = 4  # maximum number of bytes to read for checksums, in multiples of the file size
_SMALL = 1 << 20  # maximum size of a record to read at once
# Evidence that a storage is intact or lost:
# * LISTED: The bytes match a CRC-32 in the zip directory.
# * SUMMED: The bytes match a CRC-32 in the local header or data descriptor.
# * FRAMED: The file has no checksums, and the record is at the right place.
# * UNPROVEN: The storage cannot be verified.
# * DAMAGED: The storage is lost.
LISTED, SUMMED, FRAMED, UNPROVEN, DAMAGED = "listed", "summed", "framed", "unproven", "damaged"

Verdict = tuple[str, Extent | None, str]  # the evidence, the bytes, and the reason of a loss


def recover(probe: Probe, unverified: bool = False) -> Recovered | None:
    """Recover every intact tensor of a zip file. Return None if the file is not a zip file.

    If `unverified` is true, also recover tensors that cannot be verified. Raises CorruptError if
    the pickle is damaged, because the pickle contains the names and shapes. Raises UnsupportedError
    if torch.save did not write the archive.
    """
    return _DamagedArchive(probe.source, unverified).recover() if _is_zip(probe) else None


def recoverable(probe: Probe) -> str:
    """Return the command that may recover tensors, or "" if the pickle cannot be read."""
    if not _is_zip(probe):
        return ""
    for command in (RECOVER, UNVERIFIED):
        try:
            _DamagedArchive(probe.source, command == UNVERIFIED).open()
        except CorruptError:
            continue
        except CkptkitError:
            break
        return command
    return ""


def _is_zip(probe: Probe) -> bool:
    """Return whether a file is a zip file. Damaged bytes may precede the first zip member."""
    if probe.is_folder or probe.head.startswith(MAGIC):
        return not probe.is_folder
    claimed = any(format.matches(probe) for format in table.FORMATS)
    return not claimed and _first_header(probe.source) is not None


class Claim(NamedTuple):
    """The fields of a local header or directory entry. The fields may be wrong."""

    name: str
    at: int  # offset of the header or entry
    stop: int  # end of the header or entry
    header: int  # offset of the member's local header
    method: int
    stored: int | None  # number of bytes in the file, or None if the header does not contain it
    size: int | None
    crc: int | None
    is_entry: bool


def _claim(window: HeaderWindow, at: int, magic: bytes) -> Claim | None:
    """Return the header or entry that begins with `magic` at `at`, or None if it is invalid.

    A header with truncated extra fields is accepted.
    """
    layout = _CENTRAL if magic == _ENTRY else _LOCAL
    fixed = window.read(at, layout.size)
    if len(fixed) < layout.size or not fixed.startswith(magic):
        return None
    _, flags, method, crc, stored, size, n, x, *more = layout.unpack(fixed)
    comment, disk, _, header = more or (0, 0, 0, at)
    if method not in (0, DEFLATED) or flags & _ENCRYPTED or disk or not 0 < n <= LIMITS.name_bytes:
        return None
    raw = window.read(at + layout.size, n + x)
    try:
        name = raw[:n].decode()
    except UnicodeDecodeError:
        return None
    if len(raw) < n:
        return None
    stop = at + layout.size + n + x + comment
    if magic == MAGIC and flags & _DESCRIBED:
        return Claim(name, at, stop, header, method, None, None, None, False)
    wide: list[int] = []  # numbers in the zip64 field
    field = n
    while field + 4 <= len(raw):
        kind, length = struct.unpack_from("<HH", raw, field)
        if kind == _ZIP64:
            body = raw[field + 4 : field + 4 + length // 8 * 8]
            wide = list(struct.unpack_from(f"<{len(body) // 8}Q", body))
        field += 4 + length
    size, stored, header = (
        wide.pop(0) if value == _U32 and wide else value for value in (size, stored, header)
    )
    return Claim(name, at, stop, header, method, stored, size, crc, magic == _ENTRY)


def _search(
    source: ByteSource,
    sizes: Mapping[str, int],
    start: int = 0,
    stop: int | None = None,
    what: re.Pattern[bytes] = _CLAIMS,
) -> Iterator[Claim]:
    """Yield local headers and directory entries in file order.

    If a header or the directory follows the bytes of a member, skip these bytes. `sizes` maps the
    names of members to their sizes, for headers that do not contain the size.
    """
    window = HeaderWindow(source)
    at, count = start, 0
    stop = source.size if stop is None else stop
    while at + _LOCAL.size <= stop and count < 2 * LIMITS.zip_entries:
        place = window.place(at, _LOCAL.size)
        match = what.search(window.data, place)
        if match is None:
            at = window.base + len(window.data) - len(MAGIC) + 1
            continue
        at = window.base + match.start()
        found = _claim(window, at, match[0])
        if found is None:
            at += 1
            continue
        yield found
        count += 1
        if found.is_entry:
            at += 1  # the lengths in the entry may be damaged
            continue
        at = found.stop
        is_described = found.stored is None and found.method == 0
        size = sizes.get(found.name) if is_described else found.stored
        if size is not None and window.read(at + size, 2) == b"PK":
            at += size


def _first_header(source: ByteSource) -> Claim | None:
    """Return the first local header in the first `_TAIL` bytes of a file, or None."""
    found = _search(source, {}, stop=min(source.size, _TAIL))
    return next((each for each in found if not each.is_entry), None)


def _entries_at_end(source: ByteSource) -> list[Claim]:
    """Return the directory entries at the end of the file."""
    tail = 4 * _GAP
    while True:
        start = max(0, source.size - tail)
        found = [*_search(source, {}, start, what=_ENTRIES)]
        is_whole = found[0].at - start >= _GAP if found else tail >= _TAIL
        if is_whole or not start:
            return found
        tail *= 4


class SalvagedDirectory:
    """The surviving entries of one directory."""

    def __init__(self, at: int = 0) -> None:
        self.at = self.stop = at  # offsets of the first entry, and of the end of the last entry
        # Offset of the directory according to the end record. `at` if there is no end record.
        self.start = at
        self.entries: dict[str, list[Claim]] = {}
        self._order: list[tuple[int, str]] = []

    def following(self, entry: Claim) -> tuple[int, str | None]:
        """Return offset and name of the member after `entry`.

        For the last member, return the offset of the directory and None.
        """
        if not self._order:
            every = chain.from_iterable(self.entries.values())
            self._order = sorted((each.header, each.name) for each in every)
        number = bisect_right(self._order, entry.header, key=lambda row: row[0])
        return self._order[number] if number < len(self._order) else (self.start, None)


class RecordPlace(NamedTuple):
    """A possible location of a member's bytes. `crc` is the expected CRC-32, or None."""

    extent: Extent
    crc: int | None
    header: Claim
    entry: Claim | None


@dataclass(frozen=True, slots=True)
class _Late:
    """The bytes of a storage. Their location is known only after all members were examined."""

    places: dict[str, Extent]
    key: str
    length: int

    def locate(self) -> Extent:
        return self.places[self.key]


class _DamagedArchive:
    """A reader of a damaged archive."""

    def __init__(self, source: ByteSource, unverified: bool) -> None:
        self.source = source
        self.unverified = unverified
        self.window = HeaderWindow(source)
        self.first = _first_header(source)
        self.sequence: list[Claim] = []  # local headers in file order
        self.headers: dict[str, list[Claim]] = {}
        self.directories = self._assembled(_entries_at_end(source))
        self.directory = SalvagedDirectory()  # the directory that locates pickle and storages
        self.top = ""
        # The keys of the following dicts are the names of storage members.
        self.sizes: dict[str, int] = {}
        self.places: dict[str, Extent] = {}
        self.verdicts: dict[str, str] = {}
        self.reasons: dict[str, str] = {}  # reasons why storages are lost
        self.warnings: list[str] = []
        self._budget = _READS * source.size
        self._big_endian = False
        self._listed = False  # whether the pickle matches its entry in `directory`

    def recover(self) -> Recovered:
        tree = self.open()
        # First, locate storages by the directory. Then search the file for the lost storages.
        if lost := self._take(self.sizes, unverified=False):
            self._search(self.sizes)
            self._refuse_program()
            if self.directories and self.directories[0].at != self.directory.at:
                tree = self.open()  # another directory has the right CRC of more members
                lost = [*self.sizes]
            self._take(lost, unverified=self.unverified)
        if self._is_big_endian():
            self._big_endian = True
            tree = self._unpickled(*self._pickle)
        self._warn(tree.root)
        text = self._small(f"{self.top}/{torch_zip.METADATA}")
        checkpoint = Checkpoint(
            tree.root,
            "torch-zip",
            self.source,
            {} if text is None else torch_zip.parse_metadata(text),
            tree.globals,
            (*tree.warnings, *dict.fromkeys(self.warnings)),
        )
        # A storage that is not a member is inside the pickle. The pickle has been verified.
        return recovered(checkpoint, lambda storage: self.reasons.get(_member(storage)))

    # Headers and directories

    def _search(self, sizes: Mapping[str, int]) -> None:
        """Find all local headers and directories. Sort directories by `_agreement`, best first."""
        found = [*_search(self.source, sizes)]
        self.sequence, self.headers = [each for each in found if not each.is_entry], {}
        for header in self.sequence:
            same = self.headers.setdefault(header.name, [])
            if len(same) < _TRIES:
                same.append(header)
        self.directories = self._assembled(each for each in found if each.is_entry)
        self.directories.sort(key=self._agreement, reverse=True)

    def _agreement(self, directory: SalvagedDirectory) -> int:
        """Count the members whose entry in `directory` has the right CRC.

        The right CRC is the CRC in the local header or data descriptor.
        """
        return sum(
            (place := self._place(header, None, entry.size or 0)) is not None
            and place.crc == entry.crc
            for name, same in directory.entries.items()
            for header in self.headers.get(name, ())
            for entry in same
        )

    def _assembled(self, entries: Iterable[Claim]) -> list[SalvagedDirectory]:
        """Group entries by directory, in file order.

        Drop the directory of an archive inside this archive. The offsets in such a directory count
        from the start of the inner archive.
        """
        read = self.source.read
        found: list[SalvagedDirectory] = []
        for entry in entries:
            end = found[-1].stop if found else 0
            # Only damaged entries can be between two entries of one directory.
            gap = read(end, entry.at - end) if found and 0 < entry.at - end < _REACH else b""
            apart = any(each in gap for each in (MAGIC, _END, _END64))
            if not found or entry.at - end >= _REACH or apart:
                found.append(SalvagedDirectory(entry.at))
            found[-1].entries.setdefault(entry.name, []).append(entry)
            found[-1].stop = max(found[-1].stop, entry.stop)
        begin = 0 if self.first is None else self.first.at
        own: list[SalvagedDirectory] = []
        for each in found:
            end_record = self.window.read(each.stop, 56)
            if end_record.startswith(_END64) and len(end_record) == 56:
                each.start = int.from_bytes(end_record[48:], "little")
            elif end_record.startswith(_END) and len(end_record) >= 22:
                each.start = int.from_bytes(end_record[16:20], "little")
            start = each.at - each.start
            if start <= begin or _claim(self.window, start, MAGIC) is None:
                own.append(each)
        return own

    def _places(self, name: str, size: int) -> Iterator[RecordPlace]:
        """Yield the possible locations of a member, from the directory and the local headers."""
        known = [each for each in self.directory.entries.get(name, ()) if each.size == size]
        seen: set[int] = set()
        for header in self._candidates(name, known[:_TRIES]):
            if header.stop not in seen:
                seen.add(header.stop)
                for entry in known[:_TRIES] or (None,):
                    if (place := self._place(header, entry, size)) is not None:
                        yield place

    def _candidates(self, name: str, known: Iterable[Claim]) -> Iterator[Claim]:
        """Yield the headers of a member, and guesses for a header that is damaged.

        A guess assumes that the bytes of the member begin after the extra fields, or that they end
        before the data descriptor or the next member.
        """
        for entry in known:
            header = _claim(self.window, entry.header, MAGIC)
            if header is not None and header.name == name:
                yield header
        yield from self.headers.get(name, ())
        for entry in known:
            if not entry.crc:  # without a CRC, a guess cannot be verified
                continue
            at, stored = entry.header, entry.stored or 0
            padding = int.from_bytes(self.window.read(at, _LOCAL.size)[28:], "little")
            end = self.directory.following(entry)[0]
            sizes = [each.size for each in _DESCRIPTORS]
            there = [n for n in sizes if self.window.read(end - n, 4) == _DESCRIPTOR]
            starts = [at + _LOCAL.size + len(name.encode()) + padding]
            starts += [end - n - stored for n in there or (*sizes, 0)]
            for start in starts:
                if start > at:
                    yield Claim(name, at, start, at, entry.method, None, None, None, False)

    def _place(self, header: Claim, entry: Claim | None, size: int) -> RecordPlace | None:
        """Return the location of the bytes after a header, or None if the sizes are impossible."""
        method, stored = (entry or header).method, (entry or header).stored
        if method != DEFLATED:
            stored = size if entry is not None or stored in (None, size) else None
        if stored is None or header.stop + stored > self.source.size:
            return None
        extent: Extent = Range(self.source, header.stop, stored)
        if method == DEFLATED:
            if size // max(1, stored) > LIMITS.inflate_ratio:
                return None
            extent = Derived(Inflate(), (extent,), size)
        if entry is not None:
            return RecordPlace(extent, entry.crc, header, entry)
        crc = header.crc
        if crc is None and (found := self._descriptor(header.stop + stored, stored, size)):
            crc = found[0]
        return RecordPlace(extent, crc, header, None)

    def _descriptor(self, end: int, stored: int, size: int) -> tuple[int, int] | None:
        """Return the CRC and the end offset of the data descriptor at `end`.

        Return None if there is no descriptor. If the descriptor is truncated, or if its sizes
        differ from `stored` and `size`, return 0 as the end offset.
        """
        data = self.window.read(end, 24)
        if not data.startswith(_DESCRIPTOR) or len(data) < 8:
            return None
        fitting = (
            end + layout.size
            for layout in _DESCRIPTORS
            if len(data) >= layout.size and layout.unpack_from(data)[2:] == (stored, size)
        )
        return int.from_bytes(data[4:8], "little"), next(fitting, 0)

    def _end(self, place: RecordPlace, size: int) -> int | None:
        """Return the end of a stored member, including its data descriptor.

        Return None if the member is compressed, or if its descriptor contains different sizes.
        """
        end = place.header.stop + size
        if place.header.stored is not None:
            return end if isinstance(place.extent, Range) else None
        found = self._descriptor(end, size, size)
        return found[1] or None if found is not None else None

    def _is_framed(self, place: RecordPlace, size: int, order: Mapping[str, str]) -> bool:
        """Return whether the expected header or entry follows a stored member.

        `order` maps each storage to the next storage. If the expected member is unknown, the member
        that follows must not be a storage.
        """
        end = self._end(place, size)
        if end is None:
            return False
        if place.entry is None:
            followed = self._is_followed(place, size, order)
            return self.window.read(end, 4) == _ENTRY if followed is None else followed
        offset, name = self.directory.following(place.entry)
        at = place.header.at + offset - place.entry.header
        if name is None:
            return at >= end and self.window.read(at, 4) == _ENTRY
        following = _claim(self.window, at, MAGIC)
        return at >= end and following is not None and following.name == name

    def _is_followed(self, place: RecordPlace, size: int, order: Mapping[str, str]) -> bool | None:
        """Return whether the next header has the expected name, or None if no header follows."""
        end = self._end(place, size)
        following = None if end is None else _claim(self.window, end, MAGIC)
        if following is None:
            return None
        expected = order.get(place.header.name)
        return following.name == expected or (expected is None and following.name not in order)

    def _crc32(self, extent: Extent) -> int | None:
        """Return the CRC-32 of bytes, or None if reading them fails."""
        self._budget -= extent.length
        total = 0
        try:
            for piece in stream(extent):
                total = crc32(piece, total)
        except CkptkitError:
            return None
        return total

    def _small(self, name: str) -> bytes | None:
        """Return the bytes of a small record, or None if no bytes match its checksum."""
        known = [each.size or 0 for each in self.directory.entries.get(name, ())]
        for size in known or [each.stored or _SMALL for each in self.headers.get(name, ())]:
            for place in self._places(name, size) if size < _SMALL else ():
                if isinstance(place.extent, Range) and self._crc32(place.extent) == place.crc:
                    return place.extent.read()
        return None

    # The pickle

    def open(self) -> Unpickled:
        """Find and read the pickle.

        Raises CorruptError if the pickle is damaged, and UnsupportedError if torch.save did not
        write the archive.
        """
        name = self._find_pickle()
        self.top = name.removesuffix(_PICKLE)
        if self.directories and not self._listed_names():
            self._search({})  # the directory at the end belongs to another archive
            if self.directories and not (self.unverified or self._listed_names()):
                other = next(iter(self.directories[0].entries))
                raise CorruptError(
                    f"begins as the archive {shown(self.top)}, "
                    f"but its directory lists {shown(other)}",
                    hint=f"{AGAIN}; `ckptkit recover --unverified {{where}} {{new}}` "
                    "reads the archive at the beginning",
                )
        unproven: list[tuple[RecordPlace, SalvagedDirectory]] = []
        for is_last in (False, True):
            if is_last:
                self._search({})
            self._refuse_program()
            for place in self._pickle_places(name):
                if not self._is_pickle(place):
                    unproven.append((place, self.directory))
                    continue
                self._listed = place.entry is not None
                tree = self._read_pickle(place.extent, proven=True)
                if not place.crc:
                    folder = f"{self.top}/data/"
                    listed = [each for each in self.directory.entries if each.startswith(folder)]
                    if unused := [each for each in listed if each not in self.sizes]:
                        self._doubt_pickle(f"does not refer to the record {shown(unused[0])}")
                return tree
        if not unproven:
            raise self._no_pickle()
        place, self.directory = unproven[0]
        why = "does not match its checksum" if place.crc else "is not in its place"
        self._doubt_pickle("has lost its checksum" if place.crc is None else why)
        return self._read_pickle(place.extent, proven=False)

    def _listed_names(self) -> list[str]:
        """From all directories, return the names in the top folder of this archive."""
        names = chain.from_iterable(each.entries for each in self.directories)
        return [name for name in names if name.startswith(f"{self.top}/")]

    def _no_pickle(self) -> CkptkitError:
        first = self.first
        if first is None or first.name.endswith(_PICKLE):
            return CorruptError(
                "the names and shapes of its tensors are lost: data.pkl is missing", hint=AGAIN
            )
        if first.name.startswith(f"{self.top}/data/"):  # torch.save writes the pickle first
            return _program()
        return UnsupportedError(
            f"is a zip archive that begins with {shown(first.name)}, not a torch.save archive"
        )

    def _find_pickle(self) -> str:
        """Return the name of the pickle's record.

        Raises UnsupportedError if torch.save did not write the archive.
        """
        first = self.first
        listed = [name for each in self.directories for name in each.entries]
        every = chain.from_iterable(each.entries.values() for each in self.directories)
        known = next((each for each in chain.from_iterable(every) if each.header == 0), None)
        if first and known and first.at == 0 and len(first.name) != len(known.name):
            known = None  # the entry is from the directory of an inner archive
        names = [each.name for each in (known, first) if each is not None]
        tops = [name.partition("/")[0] for name in names if "/" in name]
        if tops:
            return tops[0] + _PICKLE
        if names:
            raise UnsupportedError(
                f"is a zip archive of other files, such as {shown(names[-1])}",
                hint="unpack the intact files (`zip -FF` repairs an archive) and read one of them",
            )
        at_top = [name for name in listed if name.endswith(_PICKLE) and name.count("/") == 1]
        if not at_top:
            raise CorruptError("its first header and its directory are damaged", hint=AGAIN)
        return at_top[0]

    def _refuse_program(self) -> None:
        """Raise UnsupportedError for a TorchScript archive."""
        telling = tuple(f"{self.top}/{name}" for name in ("constants.pkl", "bytecode.pkl"))
        telling += (f"{self.top}/model.json",)
        for name in (*self._listed_names(), *self.headers):
            if name in telling or name.startswith(f"{self.top}/code/"):
                raise _program()

    def _pickle_places(self, name: str) -> Iterator[RecordPlace]:
        """Yield the possible locations of the pickle.

        Use each directory that lists the pickle. If no directory lists the pickle, use the local
        headers of the pickle. Before this function yields a location, it sets `self.directory` to
        the directory of this location.
        """
        listing = [each for each in self.directories if name in each.entries]
        for directory in listing:
            self.directory = directory
            for size in dict.fromkeys(entry.size or 0 for entry in directory.entries[name]):
                yield from self._places(name, size)
        if listing:
            return
        self.directory = self.directories[0] if self.directories else SalvagedDirectory()
        own = [self.first] if self.first is not None and self.first.name == name else []
        for header in own or self.headers.get(name, []):
            if header.method == 0:
                stored = header.stored
                if stored is None:  # the size is missing: the pickle ends at its STOP opcode
                    found = self._unpickled(self.source, header.stop, self.source.size)
                    stored = found.stop - header.stop
                if (place := self._place(header, None, stored)) is not None:
                    yield place

    def _is_pickle(self, place: RecordPlace) -> bool:
        """Return whether the bytes at `place` match the checksum of the pickle.

        In a file without checksums, return whether the record is at the right place.
        """
        every = chain.from_iterable(each.entries.values() for each in self.directories)
        if place.crc == 0 and not any(entry.crc for entry in chain.from_iterable(every)):
            return self._is_framed(place, place.extent.length, {})
        return place.crc is not None and self._crc32(place.extent) == place.crc

    def _read_pickle(self, extent: Extent, *, proven: bool) -> Unpickled:
        if isinstance(extent, Derived):
            check_inflated(extent.length, self.source.size)
            data = b"".join(bytes(piece) for piece in stream(extent))
            extent = Range(Memory(data, self.source.name), 0, len(data))
        self._pickle = (extent.source, extent.offset, extent.offset + extent.length)
        self.sizes.clear()
        self.reasons.clear()
        tree = self._unpickled(*self._pickle, wrap=not proven)
        if any(name.module.startswith("__torch__") for name in tree.globals):
            raise _program()
        return tree

    def _doubt_pickle(self, why: str) -> None:
        """Raise CorruptError for a pickle that cannot be verified.

        If `unverified` is true, only add a warning.
        """
        if not self.unverified:
            raise CorruptError(
                f"names, shapes and values may have changed: data.pkl {why}",
                hint=f"{AGAIN}; `ckptkit recover --unverified {{where}} {{new}}` reads it anyway",
            )
        self.warnings.append("data.pkl is damaged: names, shapes and values may have changed")

    def _unpickled(self, source: ByteSource, start: int, stop: int, wrap: bool = True) -> Unpickled:
        try:
            known = StorageTable(self._open_storage)
            return unpickle(source, start, stop, persistent_load=known.load)
        except CkptkitError as error:
            if (
                not wrap
            ):  # `_is_pickle` accepted this data.pkl, so the error is not reported as damage
                raise
            raise CorruptError(
                "the names and shapes of its tensors are lost: "
                f"data.pkl is damaged: {error.message}",
                hint=AGAIN,
            ) from error

    def _open_storage(self, key: str, nbytes: int, location: str) -> Storage:
        name = f"{self.top}/data/{key}"
        self.sizes[name] = nbytes
        return Storage(_Late(self.places, name, nbytes), location, None, self._big_endian)

    # The storages

    def _take(self, names: Iterable[str], *, unverified: bool) -> list[str]:
        """Locate the intact storages of `names`. Return the names of all lost storages."""
        # If any storage of the file has a checksum, a CRC of 0 means damage.
        entries = (self.directory.entries.get(name, ()) for name in self.sizes)
        places = (self._places(name, size) for name, size in self.sizes.items() if size)
        are_summed = any(each.crc for each in chain.from_iterable(entries)) or any(
            place.crc for place in chain.from_iterable(places)
        )
        # torch writes storages in pickle order. Before about torch 2.6, torch sorted storages by
        # name.
        found = set(pairwise(header.name for header in self.sequence))
        orders = ([*pairwise(each)] for each in (self.sizes, sorted(self.sizes)))
        order = dict(max(orders, key=lambda pairs: sum(pair in found for pair in pairs)))
        for name in names:
            judge = self._judge if are_summed else self._judge_framed
            verdict, place, why = judge(name, self.sizes[name], order)
            self.verdicts[name] = verdict
            if place is not None and (verdict != UNPROVEN or unverified):
                self.places[name] = place
                self.reasons.pop(name, None)
            else:
                self.reasons[name] = why
        return list(self.reasons)

    def _judge(self, name: str, size: int, order: Mapping[str, str]) -> Verdict:
        """Judge a storage by its checksum. `order` maps each storage to the next storage."""
        if (found := self._judge_size(name, size)) is not None:
            return found
        known = self.directory.entries.get(name, ())
        best: Verdict = (DAMAGED, None, self._missing(name, size))
        for place in self._places(name, size):
            if place.crc is None:
                why = "its checksum is missing, so it cannot be verified"
                best = UNPROVEN, place.extent, why
                continue
            # True if the CRC is only in the data descriptor. A data descriptor contains no name.
            is_nameless = place.entry is None and place.header.crc is None
            if is_nameless and self._is_followed(place, size, order) is False:
                best = DAMAGED, None, "the checksum after its header belongs to another record"
                continue
            if self._budget < 0:
                return DAMAGED, None, "too many headers overlap"
            if self._crc32(place.extent) == place.crc:
                listed = self._listed and len({entry.crc for entry in known}) == 1
                return LISTED if listed else SUMMED, place.extent, ""
            best = DAMAGED, None, "its bytes do not match their checksum"
        return best

    def _judge_framed(self, name: str, size: int, order: Mapping[str, str]) -> Verdict:
        """Judge a storage without a checksum by the position of the next record."""
        if (found := self._judge_size(name, size)) is not None:
            return found
        places = [*self._places(name, size)]
        if not places:
            return DAMAGED, None, self._missing(name, size)
        framed = [place for place in places if self._is_framed(place, size, order)]
        at_home = [each for each in framed if each.entry and each.entry.header == each.header.at]
        if len(at_home or framed) == 1:
            return FRAMED, (at_home or framed)[0].extent, ""
        why = "several records have its name" if framed else "its record ends at the wrong place"
        return UNPROVEN, places[0].extent, f"it has no checksum, and {why}"

    def _judge_size(self, name: str, size: int) -> Verdict | None:
        """Judge a storage that is empty or has a wrong size. Return None for other storages."""
        known = self.directory.entries.get(name, ())
        if not size:
            return LISTED, Range(self.source, 0, 0), ""
        if known and all(entry.size != size for entry in known):
            return DAMAGED, None, f"its record has {known[0].size:,} bytes instead of {size:,}"
        return None

    def _missing(self, name: str, size: int) -> str:
        for header in self.headers.get(name, ()):
            if header.method == 0 and header.stop + size > self.source.size:
                lacking = header.stop + size - self.source.size
                return f"the file is truncated: {lacking:,} bytes are missing"
        return "its record is missing, or its header is damaged"

    # Warnings and byte order

    def _warn(self, root: Node) -> None:
        kept = [name for name in self.sizes if name not in self.reasons]
        verdicts = [self.verdicts[name] for name in kept]
        if FRAMED in verdicts:
            self.warnings.append(unsummed())
        if count := verdicts.count(UNPROVEN):
            self.warnings.append(
                f"{count:,} of its storages cannot be verified: their values may be garbage"
            )
        if SUMMED in verdicts:
            end = self._end_of_save()
            if any(self.places[name].length and _offset(self.places[name]) >= end for name in kept):
                self.warnings.append(self._of_two_saves(root))

    def _end_of_save(self) -> int:
        """Return an offset: all members before this offset come from one save.

        If the file contains no proof, return 0.

        The returned offset is that of torch's serialization id. This id consists of 40 digits. The
        last 20 digits are a hash of the CRCs of all members before the id. (c10::hash_combine;
        caffe2/serialize's inline_container.cc, writeSerializationId.)
        """
        total = 0
        for header, following in pairwise((*self.sequence, None)):
            assert header is not None
            if header.name == self.top + _ID:
                digits = self.window.read(header.stop, 40)[20:]
                return header.at if digits == b"%020d" % total else 0
            if following is None:
                break
            stop = following.at
            for layout in _DESCRIPTORS:
                size = stop - layout.size - header.stop
                found = self._descriptor(stop - layout.size, size, size)
                if found is not None and found[1] == stop:
                    total ^= (found[0] + 0x9E3779B9 + (total << 6) + (total >> 2)) % (1 << 64)
                    break
            else:
                break
        return 0

    def _of_two_saves(self, root: Node) -> str:
        """Return a warning that names the tensors that may come from an older save.

        Tensors after the first lost storage may come from an older save.
        """
        names = iter(self.sizes)
        all(name not in self.reasons for name in names)
        after = {name for name in names if self.verdicts[name] == SUMMED} - self.reasons.keys()
        tensors = ((join(path), as_tensor(node)) for path, node in walk(root) if after)
        older = [name for name, each in tensors if each and _member(each.storage) in after]
        which = f"{plural(len(older), 'tensor')} may come from that file: {some(older)}"
        return (
            "its directory is missing or damaged: nothing proves that its tensors come from one "
            "save; if it overwrote an older file, "
            f"{which if older else 'some tensors may come from that file'}"
        )

    def _is_big_endian(self) -> bool:
        """Return whether the record byteorder is "big".

        If the record is damaged, decide by its size in the directory, or by its first 3 bytes.
        """
        name = f"{self.top}/byteorder"
        if (text := self._small(name)) is not None:
            return text == b"big"
        if known := self.directory.entries.get(name):
            return all(entry.size == len(b"big") for entry in known)
        headers = self.headers.get(name, ())
        return any(self.window.read(header.stop, 3) == b"big" for header in headers)


def _offset(extent: Extent) -> int:
    while isinstance(extent, Derived):
        (extent,) = extent.inputs
    return extent.offset


def _member(storage: Storage | None) -> str:
    """Return the name of the member that contains a storage, or ""."""
    record = storage.record if storage is not None else None
    return record.key if isinstance(record, _Late) else ""


def _program() -> UnsupportedError:
    return UnsupportedError(
        "is a TorchScript program: ckptkit cannot recover damaged programs",
        hint=AGAIN,
    )
