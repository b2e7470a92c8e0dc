"""Recover a damaged torch zip archive: every tensor whose bytes match a checksum in the file.

The CRC-32 of a member is in its entry in the directory, and in its local header or the data
descriptor after its bytes. The entry counts where there is one. A member without a stored CRC, or
with another, is lost: bytes that are missing or inserted shift what follows, and only the checksum
shows it. data.pkl gives the length of each storage, and is verified by the same rule.

Files written without checksums (CRC 0 everywhere) keep the members whose header, name and end are
in place, and are followed by the member that was written after them.

A file that was written over an older one has members of both. The directory proves which belong
together; without it, torch's serialization id does, which hashes all CRCs. Else a warning says
which tensors may be of the older file.

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
from dataclasses import dataclass
from functools import cached_property
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
from ckptkit.formats.zip_reader import DEFLATED, MAGIC
from ckptkit.pickles.storages import StorageTable
from ckptkit.pickles.values import Unpickled, unpickle

_PICKLE, _ID = "/data.pkl", "/.data/serialization_id"
# What proves a storage: the directory, its own checksum, its place in a file without checksums.
LISTED, SUMMED, FRAMED, UNPROVEN, DAMAGED = "listed", "summed", "framed", "unproven", "damaged"


def recover(probe: Probe, unverified: bool = False) -> Recovered | None:
    """Recover every intact tensor; with `unverified`, also those that cannot be verified.

    None for other files. Raises CorruptError where the pickle, which has the names and shapes, is
    damaged, and UnsupportedError for zip files of another kind.
    """
    if not is_zip(probe):
        return None
    return _DamagedArchive(probe.source, unverified).recover()


def recoverable(probe: Probe) -> str:
    """Return the command that may recover something; "" unless its pickle can be read."""
    if not is_zip(probe):
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


def is_zip(probe: Probe) -> bool:
    """Return whether a file is a zip file, perhaps behind bytes that no format claims."""
    if probe.is_folder or probe.head.startswith(MAGIC):
        return not probe.is_folder
    claimed = any(format.matches(probe) for format in table.FORMATS)
    return not claimed and first_header(probe.source) is not None


@dataclass(frozen=True, slots=True)
class _Late:
    """The bytes of a storage, whose place is known once all members have been examined."""

    places: dict[str, Extent]
    key: str
    length: int

    def locate(self) -> Extent:
        return self.places[self.key]


class _DamagedArchive:
    """A damaged archive, and what was found of it."""

    def __init__(self, source: ByteSource, unverified: bool) -> None:
        self.source = source
        self.unverified = unverified
        self.found = Salvage(source)
        self.sizes: dict[str, int] = {}  # bytes of each member that a storage is in
        self.places: dict[str, Extent] = {}
        self.verdicts: dict[str, str] = {}
        self.reasons: dict[str, str] = {}  # why others are lost
        self.warnings: list[str] = []
        self.top = ""
        self._big_endian = False
        self._summed = False  # whether members that hold storages have checksums
        self._listed = False  # whether the directory proves the pickle

    def recover(self) -> Recovered:
        tree = self.open()
        # By the directory, or else wherever there are headers.
        if lost := self._take(self.sizes, unverified=False):
            self.found.search(self.sizes)
            self._refuse_program(self.found.headers)
            directories = self.found.directories
            if directories and directories[0].at != self.found.directory.at:
                tree = self.open()  # of a save of which more is left
                lost = [*self.sizes]
            self._take(lost, unverified=self.unverified)
        if self._is_big_endian():
            self._big_endian = True
            tree = self._unpickled(*self._pickle)
        self._warn(tree.root)
        text = self.found.small(f"{self.top}/{torch_zip.METADATA}")
        checkpoint = Checkpoint(
            tree.root,
            "torch-zip",
            self.source,
            {} if text is None else torch_zip.parse_metadata(text),
            tree.globals,
            (*tree.warnings, *dict.fromkeys(self.warnings)),
        )
        # A storage that is in no member is in the pickle itself.
        return recovered(checkpoint, lambda storage: self.reasons.get(_member(storage)))

    # The pickle

    def open(self) -> Unpickled:
        """Find the pickle and read it.

        Raises CorruptError, and UnsupportedError for zip files of another kind.
        """
        name = self._find_pickle()
        self.top = name.removesuffix(_PICKLE)
        if self.found.directories and not self._listed_names():
            self.found.search({})  # the one at the end is another archive's
            if self.found.directories and not (self.unverified or self._listed_names()):
                other = next(iter(self.found.directories[0].entries))
                raise CorruptError(
                    f"begins as the archive {shown(self.top)}, "
                    f"but its directory lists {shown(other)}",
                    hint=f"{AGAIN}; `ckptkit recover --unverified {{where}} {{new}}` "
                    "trusts its beginning",
                )
        self._refuse_program(self._listed_names())
        places: list[tuple[RecordPlace, SalvagedDirectory]] = []
        for place in chain(self._pickle_places(name), self._searched_pickles(name)):
            if self._is_pickle(place):
                self._listed = place.entry is not None
                tree = self._read_pickle(place.extent, proven=True)
                if not place.crc and (unused := self._unused()):
                    self._doubt_pickle(f"does not refer to the record {shown(unused[0])}")
                return tree
            places.append((place, self.found.directory))
        if not places:
            raise self._no_pickle()
        place, self.found.directory = places[0]
        why = "does not match its checksum" if place.crc else "is not in its place"
        self._doubt_pickle("has lost its checksum" if place.crc is None else why)
        return self._read_pickle(place.extent, proven=False)

    def _listed_names(self) -> list[str]:
        """Return the names of this archive that directories list."""
        names = chain.from_iterable(each.entries for each in self.found.directories)
        return [name for name in names if name.startswith(f"{self.top}/")]

    def _no_pickle(self) -> CkptkitError:
        first = self.found.first
        if first is None or first.name.endswith(_PICKLE):
            return CorruptError(
                "the names and shapes of its tensors are lost: data.pkl is missing", hint=AGAIN
            )
        if first.name.startswith(f"{self.top}/data/"):  # torch.save writes the pickle first
            return _program()
        return UnsupportedError(
            f"is a zip archive that begins with {shown(first.name)}, not one of torch.save"
        )

    def _find_pickle(self) -> str:
        """Return the name of the pickle's record.

        Raises UnsupportedError where no torch archive has one.
        """
        first = self.found.first
        directories = [each.entries for each in self.found.directories]
        entries = chain.from_iterable(chain.from_iterable(each.values() for each in directories))
        known = next((each for each in entries if each.offset == 0), None)
        is_first = first is not None and first.offset == 0
        if first is not None and is_first and known and len(first.name) != len(known.name):
            known = None  # of the directory of an archive inside this one
        names = [each.name for each in (known, first) if each is not None]
        tops = [name.partition("/")[0] for name in names if "/" in name]
        if tops:
            return tops[0] + _PICKLE
        if names:
            raise UnsupportedError(
                f"is a zip archive of other files, such as {shown(names[-1])}",
                hint="unpack the intact ones (zip -FF repairs a cut archive) and name one of them",
            )
        listed = chain.from_iterable(directories)
        at_top = [name for name in listed if name.endswith(_PICKLE) and name.count("/") == 1]
        if not at_top:
            raise CorruptError("its first header and its directory are damaged", hint=AGAIN)
        return at_top[0]

    def _refuse_program(self, names: Iterable[str]) -> None:
        """Raise UnsupportedError for TorchScript, whose tensors are in other records."""
        telling = (
            f"{self.top}/constants.pkl",
            f"{self.top}/bytecode.pkl",
            f"{self.top}/model.json",
        )
        if any(name in telling or name.startswith(f"{self.top}/code/") for name in names):
            raise _program()

    def _pickle_places(self, name: str) -> Iterator[RecordPlace]:
        """Yield places of the pickle by each directory that has it, else by its own header.

        While a place is looked at, its directory is the one that counts.
        """
        directories = self.found.directories
        for directory in [each for each in directories if name in each.entries]:
            self.found.directory = directory
            for size in dict.fromkeys(entry.size for entry in directory.entries[name]):
                yield from self.found.places(name, size)
        if any(name in each.entries for each in directories):
            return
        self.found.directory = directories[0] if directories else SalvagedDirectory(self.source)
        first = self.found.first
        own = [first] if first is not None and first.name == name else []
        for header in own or self.found.headers.get(name, []):
            if header.method == 0:
                stored = header.stored
                if stored is None:  # it ends with its STOP
                    found = self._unpickled(self.source, header.start, self.source.size)
                    stored = found.stop - header.start
                if (place := self.found.place(header, None, stored)) is not None:
                    yield place

    def _searched_pickles(self, name: str) -> Iterator[RecordPlace]:
        self.found.search({})
        self._refuse_program(self.found.headers)
        yield from self._pickle_places(name)

    def _is_pickle(self, place: RecordPlace) -> bool:
        """Return whether its checksum proves a pickle; in a file without any, its place."""
        listed = (each.entries.values() for each in self.found.directories)
        entries = chain.from_iterable(chain.from_iterable(listed))
        if place.crc == 0 and not any(entry.crc for entry in entries):
            return self.found.is_framed(place, place.extent.length, {})
        return place.crc is not None and self.found.crc32(place.extent) == place.crc

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

    def _unused(self) -> list[str]:
        """Return the listed storages that the pickle does not refer to."""
        listed = self.found.directory.entries
        folder = f"{self.top}/data/"
        return [name for name in listed if name.startswith(folder) and name not in self.sizes]

    def _doubt_pickle(self, why: str) -> None:
        """Refuse an unverified pickle; with `unverified`, warn."""
        if not self.unverified:
            raise CorruptError(
                f"names, shapes and values may have changed: data.pkl {why}",
                hint=f"{AGAIN}; `ckptkit recover --unverified {{where}} {{new}}` reads it anyway",
            )
        self.warnings.append("data.pkl is damaged: names, shapes and values may have changed")

    def _unpickled(self, source: ByteSource, start: int, stop: int, wrap: bool = True) -> Unpickled:
        try:
            known = StorageTable(self._open)
            return unpickle(source, start, stop, persistent_load=known.load)
        except CkptkitError as error:
            if not wrap:  # it was written like that
                raise
            raise CorruptError(
                "the names and shapes of its tensors are lost: "
                f"data.pkl is damaged: {error.message}",
                hint=AGAIN,
            ) from error

    def _open(self, key: str, nbytes: int, location: str) -> Storage:
        name = f"{self.top}/data/{key}"
        self.sizes[name] = nbytes
        return Storage(_Late(self.places, name, nbytes), location, None, self._big_endian)

    # The storages

    def _take(self, names: Iterable[str], *, unverified: bool) -> list[str]:
        """Keep the intact storages, record why others are lost; return the names of those."""
        self._summed = self._storages_have_sums()
        order = self._order()
        for name in names:
            verdict, place, why = self._judge(name, self.sizes[name], order)
            self.verdicts[name] = verdict
            if place is not None and (verdict != UNPROVEN or unverified):
                self.places[name] = place
                self.reasons.pop(name, None)
            else:
                self.reasons[name] = why
        return list(self.reasons)

    def _judge(self, name: str, size: int, order: dict[str, str]) -> tuple[str, Extent | None, str]:
        """Return how well a storage is verified, its bytes, and why it is lost."""
        if not size:
            return LISTED, Range(self.source, 0, 0), ""
        known = self.found.directory.entries.get(name, ())
        if known and all(entry.size != size for entry in known):
            return DAMAGED, None, f"its record has {known[0].size:,} bytes instead of {size:,}"
        if not self._summed:
            return self._judge_framed(name, size, order)
        best: tuple[str, Extent | None, str] = (DAMAGED, None, self._missing(name, size))
        for place in self.found.places(name, size):
            if place.crc is None:
                why = "its checksum is missing, and nothing else proves that it is intact"
                best = UNPROVEN, place.extent, why
                continue
            nameless = place.entry is None and place.header.crc is None  # the checksum, that is
            if nameless and self.found.is_followed(place, size, order) is False:
                best = DAMAGED, None, "the end of another record follows its header"
                continue
            if self.found.is_spent:
                return DAMAGED, None, "too many headers overlap"
            if self.found.crc32(place.extent) == place.crc:
                listed = self._listed and len({entry.crc for entry in known}) == 1
                return LISTED if listed else SUMMED, place.extent, ""
            best = DAMAGED, None, "its bytes do not match their checksum"
        return best

    def _judge_framed(
        self, name: str, size: int, order: dict[str, str]
    ) -> tuple[str, Extent | None, str]:
        """Judge a storage without a checksum by what is before and after it."""
        places = [*self.found.places(name, size)]
        if not places:
            return DAMAGED, None, self._missing(name, size)
        framed = [place for place in places if self.found.is_framed(place, size, order)]
        at_home = [
            each for each in framed if each.entry and each.entry.offset == each.header.offset
        ]
        if len(at_home or framed) == 1:
            return FRAMED, (at_home or framed)[0].extent, ""
        why = "several records have its name" if framed else "its record does not end in its place"
        return UNPROVEN, places[0].extent, f"it has no checksum, and {why}"

    def _missing(self, name: str, size: int) -> str:
        for header in self.found.headers.get(name, ()):
            if header.method == 0 and header.start + size > self.source.size:
                lacking = header.start + size - self.source.size
                return f"the file is cut {lacking:,} bytes before its end"
        return "its record is missing, or its header is damaged"

    def _storages_have_sums(self) -> bool:
        """Return whether members that hold storages have checksums: then a CRC of 0 is damage."""
        entries = (self.found.directory.entries.get(name, ()) for name in self.sizes)
        if any(entry.crc for entry in chain.from_iterable(entries)):
            return True
        places = (self.found.places(name, size) for name, size in self.sizes.items() if size)
        return any(place.crc for place in chain.from_iterable(places))

    def _order(self) -> dict[str, str]:
        """Map each storage to the one that was written after it.

        Torch writes them as the pickle meets them; before 2.6 or so, sorted by name.
        """
        found = set(pairwise(header.name for header in self.found.sequence))
        orders = ([*pairwise(names)] for names in (self.sizes, sorted(self.sizes)))
        return dict(max(orders, key=lambda pairs: sum(pair in found for pair in pairs)))

    # The rest

    def _warn(self, root: Node) -> None:
        verdicts = [self.verdicts[name] for name in self.sizes if name not in self.reasons]
        if FRAMED in verdicts:
            self.warnings.append(unsummed())
        if count := verdicts.count(UNPROVEN):
            self.warnings.append(
                f"{count:,} of its storages cannot be verified: they may be garbage"
            )
        if SUMMED in verdicts:
            end = self.found.end_of_save(self.top + _ID)
            places = (self.places[name] for name in self.sizes if name not in self.reasons)
            if any(place.length and (_offset(place) >= end) for place in places):
                self.warnings.append(self._of_two_saves(root))

    def _of_two_saves(self, root: Node) -> str:
        """Describe what may be of an older save: what follows the first damaged storage."""
        names = iter(self.sizes)
        all(name not in self.reasons for name in names)
        after = {name for name in names if self.verdicts[name] == SUMMED} - self.reasons.keys()
        tensors = ((join(path), as_tensor(node)) for path, node in walk(root) if after)
        older = [name for name, each in tensors if each and _member(each.storage) in after]
        which = f"{plural(len(older), 'tensor')} may be of that: {some(older)}"
        return (
            "its directory is missing or damaged: nothing proves that its tensors are of one save; "
            f"if it was written over an older file, {which if older else 'some may be of that'}"
        )

    def _is_big_endian(self) -> bool:
        """Return the byte order from its record, or from the record's length.

        It is "little" or "big".
        """
        name = f"{self.top}/byteorder"
        if (text := self.found.small(name)) is not None:
            return text == b"big"
        if known := self.found.directory.entries.get(name):
            return all(entry.size == len(b"big") for entry in known)
        return any(
            self.found.window.read(header.start, 3) == b"big"
            for header in self.found.headers.get(name, ())
        )


def _offset(extent: Extent) -> int:
    while isinstance(extent, Derived):
        (extent,) = extent.inputs
    return extent.offset


def _member(storage: Storage | None) -> str:
    """Return the name of the member that a storage is in; "" if it is in none."""
    record = storage.record if storage is not None else None
    return record.key if isinstance(record, _Late) else ""


def _program() -> UnsupportedError:
    return UnsupportedError(
        "is a TorchScript program: ckptkit cannot recover a cut or damaged one",
        hint=AGAIN,
    )


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


class LocalHeader(NamedTuple):
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


class SalvagedDirectory:
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


class RecordPlace(NamedTuple):
    """Bytes that a member may have, and the CRC-32 that they should have; None if unknown."""

    extent: Extent
    crc: int | None
    header: LocalHeader
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


def header_at(window: Window, at: int) -> LocalHeader | None:
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
        return LocalHeader(name, at, start, method, None, None)
    if _U32 in (stored, size):
        size, stored = _widened(window.read(start - x, x), size, stored)
    return LocalHeader(name, at, start, method, stored, crc)


def first_header(source: ByteSource) -> LocalHeader | None:
    """Return the first local header near the beginning of a file."""
    found = search(source, {}, min(source.size, _TAIL))
    return next((each for each in found if isinstance(each, LocalHeader)), None)


def search(
    source: ByteSource, sizes: Mapping[str, int], stop: int | None = None
) -> Iterator[LocalHeader | Listed]:
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
            found: LocalHeader | Listed | None = header_at(window, at)
        else:
            found = _entry(window.read(at, _CENTRAL.size + _REACH), 0, at)
        if found is None:
            at += 1
            continue
        yield found
        count += 1
        at = found.stop if isinstance(found, Listed) else _after(window, found, sizes)


def _after(window: Window, header: LocalHeader, sizes: Mapping[str, int]) -> int:
    """Return where to look for the next header."""
    size = sizes.get(header.name) if header.stored is None and header.method == 0 else header.stored
    if size is None:
        return header.start
    end = header.start + size
    return end if window.read(end, 2) == b"PK" else header.start


def directories(source: ByteSource, found: Iterable[Listed], begin: int) -> list[SalvagedDirectory]:
    """Return the directories that entries belong to, in the order of the file.

    Without those of archives inside the one that begins at `begin`.
    """
    result: list[SalvagedDirectory] = []
    for listed in found:
        if not result or not _is_joined(source, result[-1].stop, listed.at):
            result.append(SalvagedDirectory(source, listed.at))
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
        self.directory = SalvagedDirectory(source)  # the one that counts
        self.sequence: list[LocalHeader] = []  # in the order of the file
        self.headers: dict[str, list[LocalHeader]] = {}
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

    def _agreement(self, directory: SalvagedDirectory) -> int:
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

    def places(self, name: str, size: int) -> Iterator[RecordPlace]:
        """Yield the bytes that a member may have: by the directory, by headers, by neighbors."""
        known = [each for each in self.directory.entries.get(name, ()) if each.size == size]
        seen: set[int] = set()
        for header in self._candidates(name, known[:_TRIES]):
            if header.start not in seen:
                seen.add(header.start)
                for entry in known[:_TRIES] or (None,):
                    if (place := self.place(header, entry, size)) is not None:
                        yield place

    def _candidates(self, name: str, known: Iterable[DirectoryEntry]) -> Iterator[LocalHeader]:
        for entry in known:
            if (header := header_at(self.window, entry.offset)) and header.name == name:
                yield header
        yield from self.headers.get(name, ())
        for entry in known:
            if entry.crc:  # which proves them
                yield from self._guesses(entry)

    def _guesses(self, entry: DirectoryEntry) -> Iterator[LocalHeader]:
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
                yield LocalHeader(entry.name, entry.offset, start, entry.method, None, None)

    def place(
        self, header: LocalHeader, entry: DirectoryEntry | None, size: int
    ) -> RecordPlace | None:
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
            extent = Derived(Inflate(), (extent,), size)
        if entry is not None:
            return RecordPlace(extent, entry.crc, header, entry)
        described = (
            descriptor(self.window, header.start + stored, stored, size)
            if header.crc is None
            else None
        )
        return RecordPlace(extent, header.crc if described is None else described.crc, header, None)

    def is_framed(self, place: RecordPlace, size: int, successors: Mapping[str, str]) -> bool:
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

    def is_followed(
        self, place: RecordPlace, size: int, successors: Mapping[str, str]
    ) -> bool | None:
        """Return whether the right record follows one with a descriptor; None if no record does."""
        following = header_at(self.window, self._end(place, size) or self.source.size)
        if following is None:
            return None
        expected = successors.get(place.header.name)
        return following.name == expected or (expected is None and following.name not in successors)

    def _end(self, place: RecordPlace, size: int) -> int | None:
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
            for piece in stream(extent):
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
