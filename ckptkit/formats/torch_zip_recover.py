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
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

from ckptkit.compute.operation import Inflate, stream
from ckptkit.core.bytesource import ByteSource, Derived, Extent, Memory, Range, crc32, leaves
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, CorruptError, FormatError, UnsupportedError
from ckptkit.core.limits import LIMITS, check_inflated
from ckptkit.core.tensor import Storage
from ckptkit.core.text import plural, shown, some
from ckptkit.core.tree import Node
from ckptkit.formats import table, torch_zip, zip_reader
from ckptkit.formats.format import Probe, Recovered
from ckptkit.formats.recovering import AGAIN, recovered, tensors, unsummed
from ckptkit.formats.zip_reader import DEFLATED, MAGIC, HeaderWindow
from ckptkit.pickles.storages import StorageTable
from ckptkit.pickles.values import Unpickled, unpickle

_PICKLE, _ID = "/data.pkl", "/.data/serialization_id"
_CLAIMS, _ENTRIES = re.compile(b"PK(?:\x03\x04|\x01\x02)"), re.compile(zip_reader.CENTRAL_MAGIC)
_DESCRIPTORS = (struct.Struct("<4sLLL"), struct.Struct("<4sLQQ"))
_TAIL = 16 << 20  # number of bytes to search for headers and entries at each end of the file
_GAP = 4 << 10  # number of bytes without an entry before the directory at the end
_REACH = 2 * LIMITS.name_bytes  # maximum size of a header with its name and extra fields
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


class Verdict(NamedTuple):
    """The evidence for a storage, its bytes (None if it is lost), and the reason of a loss."""

    evidence: str
    extent: Extent | None
    why: str = ""


def recover(probe: Probe, unverified: bool = False) -> Recovered | None:
    """Recover every intact tensor of a zip file. Return None if the file is not a zip file.

    If `unverified` is true, also recover tensors that cannot be verified. Raises CorruptError if
    the pickle is damaged, because the pickle contains the names and shapes. Raises UnsupportedError
    if torch.save did not write the archive.
    """
    return _DamagedArchive(probe.source, unverified).recover() if _is_zip(probe) else None


def recoverable(probe: Probe, unverified: bool) -> Unpickled | None:
    """Return the pickle that `recover` uses, or None if the file is not a zip file.

    Raises the errors of `recover`.
    """
    return _DamagedArchive(probe.source, unverified).open() if _is_zip(probe) else None


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
    stored: int | None = None  # number of bytes in the file, or None if the header lacks it
    size: int | None = None
    crc: int | None = None
    is_entry: bool = False


def _claim(window: HeaderWindow, at: int, magic: bytes = MAGIC) -> Claim | None:
    """Return the header or entry that begins with `magic` at `at`, or None if it is invalid.

    A header with truncated extra fields is accepted.
    """
    layout = zip_reader.LOCAL if magic == MAGIC else zip_reader.CENTRAL
    fixed = window.read(at, layout.size)
    if len(fixed) < layout.size or not fixed.startswith(magic):
        return None
    _, flags, method, crc, stored, size, n, x, *more = layout.unpack(fixed)
    comment, disk, _, header = more or (0, 0, 0, at)
    raw = window.read(at + layout.size, n + x)
    is_whole = 0 < n <= min(len(raw), LIMITS.name_bytes)
    if method not in (0, DEFLATED) or flags & zip_reader.ENCRYPTED or disk or not is_whole:
        return None
    try:
        name = raw[:n].decode()
    except UnicodeDecodeError:
        return None
    stop = at + layout.size + n + x + comment
    if magic == MAGIC and flags & zip_reader.DESCRIBED:
        return Claim(name, at, stop, header, method)
    try:
        body = zip_reader.extra_fields(raw[n:], raw[:n]).get(zip_reader.ZIP64_FIELD, b"")
    except FormatError:
        body = b""
    wide = iter(struct.unpack_from(f"<{len(body) // 8}Q", body))
    size, stored, header = (
        next(wide, value) if value == zip_reader.U32 else value for value in (size, stored, header)
    )
    return Claim(
        name, at, stop, header, method, stored, size, crc, magic == zip_reader.CENTRAL_MAGIC
    )


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
    while at + zip_reader.LOCAL.size <= stop and count < 2 * LIMITS.zip_entries:
        place = window.place(at, zip_reader.LOCAL.size)
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
    """Return the directory entries at the end of the file. Read as few bytes as possible."""
    tail = 4 * _GAP
    while True:
        start = max(0, source.size - tail)
        found = [*_search(source, {}, start, what=_ENTRIES)]
        is_whole = found[0].at - start >= _GAP if found else tail >= _TAIL
        if is_whole or not start:
            return found
        tail *= 4


@dataclass
class SalvagedDirectory:
    """The surviving entries of one directory."""

    at: int = 0  # offset of the first entry
    stop: int = 0  # end of the last entry
    start: int = 0  # offset of the directory according to the end record, otherwise `at`
    entries: dict[str, list[Claim]] = field(default_factory=dict)

    @cached_property
    def _order(self) -> list[tuple[int, str]]:
        every = chain.from_iterable(self.entries.values())
        return sorted((each.header, each.name) for each in every)

    def following(self, entry: Claim) -> tuple[int, str | None]:
        """Return offset and name of the member after `entry`.

        For the last member, return the offset of the directory and None.
        """
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

    verdicts: dict[str, Verdict]
    key: str
    length: int

    def locate(self) -> Extent:
        extent = self.verdicts[self.key].extent
        assert extent is not None  # no tree contains a lost storage
        return extent


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
        self.verdicts: dict[str, Verdict] = {}
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
            tree.root, "torch-zip", self.source,
            {} if text is None else torch_zip.parse_metadata(text),
            tree.globals, (*tree.warnings, *dict.fromkeys(self.warnings)),
        )  # fmt: skip
        # A storage that is not a member is inside the pickle. The pickle has been verified.
        reasons = {name: each.why for name, each in self.verdicts.items() if each.extent is None}
        return recovered(checkpoint, lambda storage: reasons.get(_member(storage)))

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
        found: list[SalvagedDirectory] = []
        for entry in entries:
            gap = entry.at - found[-1].stop if found else _REACH
            # Only damaged entries can be between two entries of one directory.
            between = self.window.read(found[-1].stop, gap) if 0 < gap < _REACH else b""
            if gap >= _REACH or any(
                each in between for each in (MAGIC, zip_reader.END_MAGIC, zip_reader.END64_MAGIC)
            ):
                found.append(SalvagedDirectory(entry.at, entry.at, entry.at))
            found[-1].entries.setdefault(entry.name, []).append(entry)
            found[-1].stop = max(found[-1].stop, entry.stop)
        begin = 0 if self.first is None else self.first.at
        own: list[SalvagedDirectory] = []
        for each in found:
            end_record = self.window.read(each.stop, 56)
            if end_record.startswith(zip_reader.END64_MAGIC) and len(end_record) == 56:
                each.start = int.from_bytes(end_record[48:], "little")
            elif end_record.startswith(zip_reader.END_MAGIC) and len(end_record) >= 22:
                each.start = int.from_bytes(end_record[16:20], "little")
            start = each.at - each.start
            if start <= begin or _claim(self.window, start) is None:
                own.append(each)
        return own

    def _places(self, name: str, size: int) -> Iterator[RecordPlace]:
        """Yield the possible locations of a member, from the directory and the local headers."""
        known = [each for each in self.directory.entries.get(name, ()) if each.size == size]
        known = known[:_TRIES]
        listed = (_claim(self.window, entry.header) for entry in known)
        headers = chain(
            (each for each in listed if each is not None and each.name == name),
            self.headers.get(name, ()),
            chain.from_iterable(map(self._guesses, known)),
        )
        seen: set[int] = set()
        for header in headers:
            if header.stop not in seen:
                seen.add(header.stop)
                found = (self._place(header, entry, size) for entry in known or (None,))
                yield from (place for place in found if place is not None)

    def _guesses(self, entry: Claim) -> Iterator[Claim]:
        """Yield guesses for the header of a member, in case that the header is damaged.

        A guess assumes that the bytes of the member end before the data descriptor or the next
        member.
        """
        end = self.directory.following(entry)[0] - (entry.stored or 0)
        for size in (*(each.size for each in _DESCRIPTORS), 0):
            if entry.crc and end - size > entry.header:  # the CRC verifies a guess
                yield Claim(entry.name, entry.header, end - size, entry.header, entry.method)

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
        crc = header.crc if entry is None else entry.crc
        if crc is None and (found := self._descriptor(header.stop + stored, stored, size)):
            crc = found[0]
        return RecordPlace(extent, crc, header, entry)

    def _descriptor(self, end: int, stored: int, size: int) -> tuple[int, int] | None:
        """Return the CRC and the end offset of the data descriptor at `end`.

        Return None if there is no descriptor. If the descriptor is truncated, or if its sizes
        differ from `stored` and `size`, return 0 as the end offset.
        """
        data = self.window.read(end, 24)
        if not data.startswith(zip_reader.DESCRIPTOR_MAGIC) or len(data) < 8:
            return None
        fitting = (
            end + layout.size
            for layout in _DESCRIPTORS
            if len(data) >= layout.size and layout.unpack_from(data)[2:] == (stored, size)
        )
        return int.from_bytes(data[4:8], "little"), next(fitting, 0)

    def _is_framed(self, place: RecordPlace, size: int, order: Mapping[str, str]) -> bool | None:
        """Return whether the expected header or entry follows a stored member.

        Return None if the end of the member is unknown, or if neither a header nor the directory
        follows. `order` maps each storage to the next storage. If the expected member is unknown,
        the member that follows must not be a storage.
        """
        end = place.header.stop + size
        if place.header.stored is None:
            end = (self._descriptor(end, size, size) or (0, 0))[1]
        if not end or isinstance(place.extent, Derived):
            return None
        at, expected = end, order.get(place.header.name)
        if place.entry is not None:
            offset, expected = self.directory.following(place.entry)
            at = place.header.at + offset - place.entry.header
        if at < end:
            return False
        following = _claim(self.window, at)
        if following is None:
            may_end = expected is None or place.entry is None
            is_end = may_end and self.window.read(at, 4) == zip_reader.CENTRAL_MAGIC
            return True if is_end else None
        if expected is None and place.entry is None:
            return following.name not in order
        return following.name == expected

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
        self.top = self._find_top()
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
            for place in self._pickle_places():
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

    def _entries(self) -> Iterator[Claim]:
        """Yield the entries of all directories."""
        every = chain.from_iterable(each.entries.values() for each in self.directories)
        return chain.from_iterable(every)

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

    def _find_top(self) -> str:
        """Return the top folder of the archive.

        Raises UnsupportedError if torch.save did not write the archive.
        """
        first = self.first
        known = next((each for each in self._entries() if each.header == 0), None)
        if first and known and first.at == 0 and len(first.name) != len(known.name):
            known = None  # the entry is from the directory of an inner archive
        names = [each.name for each in (known, first) if each is not None]
        tops = [name.partition("/")[0] for name in names if "/" in name]
        if names and not tops:
            raise UnsupportedError(
                f"is a zip archive of other files, such as {shown(names[-1])}",
                hint="unpack the intact files (`zip -FF` repairs an archive) and read one of them",
            )
        listed = (
            each.name.removesuffix(_PICKLE)
            for each in self._entries()
            if each.name.endswith(_PICKLE)
        )
        tops += [top for top in listed if "/" not in top]
        if not tops:
            raise CorruptError("its first header and its directory are damaged", hint=AGAIN)
        return tops[0]

    def _refuse_program(self) -> None:
        """Raise UnsupportedError for a TorchScript archive."""
        inside = f"{self.top}/"
        telling = {inside + name for name in ("constants.pkl", "bytecode.pkl", "model.json")}
        for name in (*self._listed_names(), *self.headers):
            if name in telling or name.startswith(f"{inside}code/"):
                raise _program()

    def _pickle_places(self) -> Iterator[RecordPlace]:
        """Yield the possible locations of the pickle.

        Use each directory that lists the pickle. If no directory lists the pickle, use the local
        headers of the pickle. Before this function yields a location, it sets `self.directory` to
        the directory of this location.
        """
        name = self.top + _PICKLE
        listing = [each for each in self.directories if name in each.entries]
        for self.directory in listing:
            for size in dict.fromkeys(entry.size or 0 for entry in self.directory.entries[name]):
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
        if place.crc == 0 and not any(entry.crc for entry in self._entries()):
            return self._is_framed(place, place.extent.length, {}) is True
        return place.crc is not None and self._crc32(place.extent) == place.crc

    def _read_pickle(self, extent: Extent, *, proven: bool) -> Unpickled:
        if isinstance(extent, Derived):
            check_inflated(extent.length, self.source.size)
            data = b"".join(bytes(piece) for piece in stream(extent))
            extent = Range(Memory(data, self.source.name), 0, len(data))
        self._pickle = (extent.source, extent.offset, extent.offset + extent.length)
        self.sizes.clear()
        self.verdicts.clear()
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
            if not wrap:  # the pickle matches its checksum, so the error is not reported as damage
                raise
            raise CorruptError(
                "the names and shapes of its tensors are lost: "
                f"data.pkl is damaged: {error.message}",
                hint=AGAIN,
            ) from error

    def _open_storage(self, key: str, nbytes: int, location: str) -> Storage:
        name = f"{self.top}/data/{key}"
        self.sizes[name] = nbytes
        return Storage(_Late(self.verdicts, name, nbytes), location, None, self._big_endian)

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
            verdict = self._judge_size(name) or judge(name, self.sizes[name], order)
            is_kept = verdict.evidence != UNPROVEN or unverified
            self.verdicts[name] = verdict if is_kept else verdict._replace(extent=None)
        return [name for name, verdict in self.verdicts.items() if verdict.extent is None]

    def _judge_size(self, name: str) -> Verdict | None:
        """Judge a storage that is empty, missing or of a wrong size. Return None for others."""
        size, known = self.sizes[name], self.directory.entries.get(name, ())
        if not size:
            return Verdict(LISTED, Range(self.source, 0, 0))
        if known and all(entry.size != size for entry in known):
            why = f"its record has {known[0].size:,} bytes instead of {size:,}"
            return Verdict(DAMAGED, None, why)
        if next(self._places(name, size), None) is not None:
            return None
        for header in self.headers.get(name, ()):
            lacking = header.stop + size - self.source.size
            if header.method == 0 and lacking > 0:
                why = f"the file is truncated: {lacking:,} bytes are missing"
                return Verdict(DAMAGED, None, why)
        return Verdict(DAMAGED, None, "its record is missing, or its header is damaged")

    def _judge(self, name: str, size: int, order: Mapping[str, str]) -> Verdict:
        """Judge a storage by its checksum. `order` maps each storage to the next storage."""
        sums = {entry.crc for entry in self.directory.entries.get(name, ())}
        evidence = LISTED if self._listed and len(sums) == 1 else SUMMED
        best = Verdict(DAMAGED, None)
        for place in self._places(name, size):
            # The CRC may be only in the data descriptor. A data descriptor contains no name.
            is_nameless = place.entry is None and place.header.crc is None
            if place.crc is None:
                why = "its checksum is missing, so it cannot be verified"
                best = Verdict(UNPROVEN, place.extent, why)
            elif is_nameless and self._is_framed(place, size, order) is False:
                why = "the checksum after its header belongs to another record"
                best = Verdict(DAMAGED, None, why)
            elif self._budget < 0:
                return Verdict(DAMAGED, None, "too many headers overlap")
            elif self._crc32(place.extent) == place.crc:
                return Verdict(evidence, place.extent)
            else:
                best = Verdict(DAMAGED, None, "its bytes do not match their checksum")
        return best

    def _judge_framed(self, name: str, size: int, order: Mapping[str, str]) -> Verdict:
        """Judge a storage without a checksum by the position of the next record."""
        places = [*self._places(name, size)]
        framed = [place for place in places if self._is_framed(place, size, order)]
        at_home = [each for each in framed if each.entry and each.entry.header == each.header.at]
        if len(at_home or framed) == 1:
            return Verdict(FRAMED, (at_home or framed)[0].extent)
        why = "several records have its name" if framed else "its record ends at the wrong place"
        return Verdict(UNPROVEN, places[0].extent, f"it has no checksum, and {why}")

    # Warnings and byte order

    def _warn(self, root: Node) -> None:
        kept = {name: each for name, each in self.verdicts.items() if each.extent is not None}
        evidence = [each.evidence for each in kept.values()]
        if FRAMED in evidence:
            self.warnings.append(unsummed())
        if count := evidence.count(UNPROVEN):
            self.warnings.append(
                f"{count:,} of its storages cannot be verified: their values may be garbage"
            )
        if SUMMED not in evidence:
            return
        end = self._end_of_save()
        extents = (each.extent for each in kept.values() if each.extent is not None)
        if not any(place.length and place.offset >= end for place in chain(*map(leaves, extents))):
            return
        # Tensors after the first lost storage may come from an older save.
        names = iter(self.sizes)
        all(name in kept for name in names)
        after = {name for name in names if name in kept and kept[name].evidence == SUMMED}
        older = [name for name, each in tensors(root) if after and _member(each.storage) in after]
        which = "some tensors may come from that file"
        if older:
            which = f"{plural(len(older), 'tensor')} may come from that file: {some(older)}"
        self.warnings.append(
            "its directory is missing or damaged: nothing proves that its tensors come from one "
            f"save; if it overwrote an older file, {which}"
        )

    def _end_of_save(self) -> int:
        """Return an offset: all members before this offset come from one save.

        If the file contains no proof, return 0.

        The returned offset is that of torch's serialization id. This id consists of 40 digits. The
        last 20 digits are a hash of the CRCs of all members before the id. (c10::hash_combine;
        caffe2/serialize's inline_container.cc, writeSerializationId.)
        """
        total = 0
        for number, header in enumerate(self.sequence):
            if number:  # the data descriptor of the member before ends at this header
                places = (header.at - layout.size for layout in _DESCRIPTORS)
                read = (self.window.read(place, 8) for place in places)
                magic = zip_reader.DESCRIPTOR_MAGIC
                descriptor = next((each for each in read if each.startswith(magic)), b"")
                if not descriptor:
                    break
                crc = int.from_bytes(descriptor[4:], "little")
                total ^= (crc + 0x9E3779B9 + (total << 6) + (total >> 2)) % (1 << 64)
            if header.name == self.top + _ID:
                digits = self.window.read(header.stop, 40)[20:]
                return header.at if digits == b"%020d" % total else 0
        return 0

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


def _member(storage: Storage | None) -> str:
    """Return the name of the member that contains a storage, or ""."""
    record = storage.record if storage is not None else None
    return record.key if isinstance(record, _Late) else ""


def _program() -> UnsupportedError:
    return UnsupportedError(
        "is a TorchScript program: ckptkit cannot recover damaged programs", hint=AGAIN
    )
