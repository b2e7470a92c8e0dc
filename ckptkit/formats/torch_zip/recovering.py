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
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise

from ckptkit import compute
from ckptkit.core.bytesource import ByteSource, Derived, Extent, Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, CorruptError, UnsupportedError
from ckptkit.core.limits import check_inflated
from ckptkit.core.tensor import Storage
from ckptkit.core.text import plural, shown, some
from ckptkit.core.tree import Node, join, walk
from ckptkit.core.weights import as_tensor
from ckptkit.formats import table
from ckptkit.formats.common.recovering import AGAIN, recovered, unsummed
from ckptkit.formats.containers.zip_entries import MAGIC
from ckptkit.formats.format import RECOVER, UNVERIFIED, Probe, Recovered
from ckptkit.formats.torch_zip import extra_records
from ckptkit.formats.torch_zip.zip_salvage import Directory, Place, Salvage, first_header
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
    return _Archive(probe.source, unverified).recover()


def recoverable(probe: Probe) -> str:
    """Return the command that may recover something; "" unless its pickle can be read."""
    if not is_zip(probe):
        return ""
    for command in (RECOVER, UNVERIFIED):
        try:
            _Archive(probe.source, command == UNVERIFIED).open()
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


class _Archive:
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
        checkpoint = Checkpoint(
            tree.root,
            "torch-zip",
            self.source,
            self._metadata(),
            tree.globals,
            (*tree.warnings, *dict.fromkeys(self.warnings)),
        )
        return recovered(checkpoint, self._reason)

    def _reason(self, storage: Storage) -> str | None:
        """Return why a storage is lost; None if it is not, or if its bytes are in the pickle."""
        return self.reasons.get(_member(storage))

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
        places: list[tuple[Place, Directory]] = []
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

    def _pickle_places(self, name: str) -> Iterator[Place]:
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
        self.found.directory = directories[0] if directories else Directory(self.source)
        first = self.found.first
        own = [first] if first is not None and first.name == name else []
        for header in own or self.found.headers.get(name, []):
            if header.method == 0:
                size = self._length_of_pickle(header.start, header.stored)
                if (place := self.found.place(header, None, size)) is not None:
                    yield place

    def _searched_pickles(self, name: str) -> Iterator[Place]:
        self.found.search({})
        self._refuse_program(self.found.headers)
        yield from self._pickle_places(name)

    def _length_of_pickle(self, start: int, stored: int | None) -> int:
        """Return the length of the pickle: from its header, else up to its STOP."""
        if stored is not None:
            return stored
        return self._unpickled(self.source, start, self.source.size).stop - start

    def _is_pickle(self, place: Place) -> bool:
        """Return whether its checksum proves a pickle; in a file without any, its place."""
        if place.crc == 0 and not self._has_sums():
            return self.found.is_framed(place, place.extent.length, {})
        return place.crc is not None and self.found.crc32(place.extent) == place.crc

    def _has_sums(self) -> bool:
        entries = (each.entries.values() for each in self.found.directories)
        return any(entry.crc for same in chain.from_iterable(entries) for entry in same)

    def _read_pickle(self, extent: Extent, *, proven: bool) -> Unpickled:
        if isinstance(extent, Derived):
            check_inflated(extent.length, self.source.size)
            data = b"".join(bytes(piece) for piece in compute.stream(extent))
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

    def _metadata(self) -> dict[str, str]:
        text = self.found.small(f"{self.top}/{extra_records.NAME}")
        return {} if text is None else extra_records.read(text)


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
