"""Recover a damaged torch zip archive: every tensor whose bytes match a checksum in the file.

The CRC-32 of a member is in its entry in the directory, and in its local header or the data
descriptor after its bytes. The entry counts where there is one. A member without a stored CRC, or
with another, is lost: bytes that are missing or inserted shift what follows, and only the checksum
shows it. data.pkl gives the length of each storage, and is verified by the same rule. Files written
without checksums (CRC 0 everywhere) keep what is exactly between two headers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from ckptkit import compute
from ckptkit.core.bytesource import ByteSource, Derived, Extent, Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, CorruptError, UnsupportedError
from ckptkit.core.limits import check_inflated
from ckptkit.core.tensor import Storage
from ckptkit.core.text import shown
from ckptkit.formats.common.recovering import AGAIN, recovered
from ckptkit.formats.containers.zip_entries import MAGIC
from ckptkit.formats.format import RECOVER, UNVERIFIED, Probe, Recovered
from ckptkit.formats.torch_zip import extra_records
from ckptkit.formats.torch_zip.evidence import Evidence, Place
from ckptkit.formats.torch_zip.reader import unsummed
from ckptkit.formats.torch_zip.remains import DirectoryEntry, Header, headers
from ckptkit.pickles.storages import StorageTable
from ckptkit.pickles.values import Unpickled, unpickle

_PICKLE = "/data.pkl"

WHOLE, UNSUMMED, UNPROVEN, DAMAGED = "whole", "unsummed", "unproven", "damaged"


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
    """Return whether a file begins as zip files do."""
    return not probe.is_folder and probe.head.startswith(MAGIC)


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
        self.found = Evidence(source)
        self.sizes: dict[str, int] = {}  # bytes of each member that a storage is in
        self.places: dict[str, Extent] = {}
        self.reasons: dict[str, str] = {}  # why others are lost
        self.warnings: list[str] = []
        self.verdicts: Counter[str] = Counter()
        self.top = ""
        self._big_endian = False
        self._members: dict[int, str] = {}  # by id of the storage

    def recover(self) -> Recovered:
        tree = self.open()
        if lost := self._take(
            self.sizes, unverified=False
        ):  # by the directory, or else wherever there are headers
            self.found.find_headers(self.sizes)
            self._refuse_program(self.found.headers)
            self._take({name: self.sizes[name] for name in lost}, unverified=self.unverified)
        self._warn()
        if self._is_big_endian():
            self._big_endian = True
            self._members.clear()
            tree = self._unpickled(*self._pickle)
        checkpoint = Checkpoint(
            tree.root,
            "torch-zip",
            self.source,
            self._metadata(),
            tree.globals,
            (*tree.warnings, *self.warnings),
        )
        return recovered(checkpoint, self._reason)

    def _reason(self, storage: Storage) -> str | None:
        """Return why a storage is lost; None if it is not, or if its bytes are in the pickle."""
        member = self._members.get(id(storage))
        return None if member is None else self.reasons.get(member)

    # The pickle

    def open(self) -> Unpickled:
        """Find the pickle and read it.

        Raises CorruptError, and UnsupportedError for zip files of another kind.
        """
        name = self._find_pickle()
        self.top = name.removesuffix(_PICKLE)
        self._refuse_program(self.found.entries)
        others = [each for each in self.found.entries if not each.startswith(f"{self.top}/")]
        if others and len(others) == len(self.found.entries) and not self.unverified:
            raise CorruptError(
                f"begins as the archive {shown(self.top)}, "
                f"but its directory lists {shown(others[0])}",
                hint=f"{AGAIN}; `ckptkit recover --unverified` trusts its beginning",
            )
        places = list(self._pickle_places(name))
        if not places:
            raise self._no_pickle()
        for place in places:
            if place.promised and self.found.crc32(place.extent) in place.promised:
                return self._read_pickle(place.extent, proven=True)
        self._doubt_pickle(places[0])
        return self._read_pickle(places[0].extent, proven=False)

    def _no_pickle(self) -> CkptkitError:
        first = self.found.first()
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
        first = self.found.first()
        entries = chain.from_iterable(self.found.entries.values())
        known = next((each for each in entries if each.offset == 0), None)
        if first is not None and known is not None and len(first.name) != len(known.name):
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
        pickles = [name for name in self.found.entries if name.endswith(_PICKLE)]
        at_top = [name for name in pickles if name.count("/") == 1]
        if not at_top:
            raise CorruptError("its first header and its directory are damaged", hint=AGAIN)
        return at_top[0]

    def _refuse_program(
        self, names: dict[str, list[Header]] | dict[str, list[DirectoryEntry]]
    ) -> None:
        """Raise UnsupportedError for TorchScript, whose tensors are in other records."""
        telling = (
            f"{self.top}/constants.pkl",
            f"{self.top}/bytecode.pkl",
            f"{self.top}/model.json",
        )
        if any(name in telling or name.startswith(f"{self.top}/code/") for name in names):
            raise _program()

    def _pickle_places(self, name: str) -> Iterator[Place]:
        """Yield places of the pickle: the directory's, else its own header's."""
        known = self.found.entries.get(name, ())
        starts = [header for header in self._pickle_headers(name) if header is not None]
        for header in starts:
            for entry in known:
                yield from self.found.place(header, entry, entry.size)
            if not known and header.method == 0:
                yield from self.found.place(header, None, self._length_of_pickle(header))

    def _pickle_headers(self, name: str) -> Iterator[Header | None]:
        for entry in self.found.entries.get(name, ()):
            yield self.found.header_of(entry)
        first = self.found.first()
        if first is not None and first.name == name:
            yield first
            return
        found = (header for header in headers(self.source, {}) if header.name == name)
        yield next(found, None)

    def _length_of_pickle(self, header: Header) -> int:
        """Return the length of the pickle: from its header, else up to its STOP."""
        if header.stored is not None:
            return header.stored
        return self._unpickled(self.source, header.start, self.source.size).stop - header.start

    def _read_pickle(self, extent: Extent, *, proven: bool) -> Unpickled:
        if isinstance(extent, Derived):
            check_inflated(extent.length, self.source.size)
            data = b"".join(bytes(piece) for piece in compute.stream(extent))
            extent = Range(Memory(data, self.source.name), 0, len(data))
        self._pickle = (extent.source, extent.offset, extent.offset + extent.length)
        self.sizes.clear()
        tree = self._unpickled(*self._pickle, wrap=not proven)
        if any(name.module.startswith("__torch__") for name in tree.globals):
            raise _program()
        return tree

    def _doubt_pickle(self, place: Place) -> None:
        """Refuse an unverified pickle, or warn; except in files without checksums."""
        entries = chain.from_iterable(self.found.entries.values())
        summed = any(place.promised) or any(entry.crc for entry in entries)
        if not summed and place.promised and place.framed:
            return
        if not self.unverified:
            why = "does not match its checksum" if place.promised else "has lost its checksum"
            raise CorruptError(
                f"names, shapes and values may have changed: data.pkl {why}",
                hint=f"{AGAIN}; `ckptkit recover --unverified` reads it anyway",
            )
        self.warnings.append("data.pkl is damaged: names, shapes and values may have changed")

    def _unpickled(self, source: ByteSource, start: int, stop: int, wrap: bool = True) -> Unpickled:
        try:
            table = StorageTable(self._open)
            return unpickle(source, start, stop, persistent_load=table.load)
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
        storage = Storage(_Late(self.places, name, nbytes), location, None, self._big_endian)
        self._members[id(storage)] = name
        return storage

    # The storages

    def _take(self, sizes: dict[str, int], *, unverified: bool) -> list[str]:
        """Keep the intact storages, record why others are lost; return the names of those."""
        for name, size in sizes.items():
            verdict, place, why = (
                self._judge(name, size) if size else (WHOLE, Range(self.source, 0, 0), "")
            )
            kept = verdict in (WHOLE, UNSUMMED) or (verdict == UNPROVEN and unverified)
            if kept and place is not None:
                self.verdicts[verdict] += 1
                self.places[name] = place
                self.reasons.pop(name, None)
            else:
                self.reasons[name] = why
        return list(self.reasons)

    def _warn(self) -> None:
        self.warnings += unsummed(self.verdicts[UNSUMMED])
        if count := self.verdicts[UNPROVEN]:
            self.warnings.append(
                f"{count:,} of its storages cannot be verified: they may be garbage"
            )

    def _judge(self, name: str, size: int) -> tuple[str, Extent | None, str]:
        """Return how well a storage is verified, its bytes, and why it is lost."""
        known = self.found.entries.get(name, ())
        if known and all(entry.size != size for entry in known):
            return DAMAGED, None, f"its record has {known[0].size:,} bytes instead of {size:,}"
        best: tuple[str, Extent | None, str] = (DAMAGED, None, self._missing(name, size))
        for place in self.found.places(name, size):
            if not place.promised:
                best = (
                    UNPROVEN,
                    place.extent,
                    "its checksum is missing, and nothing else proves that it is intact",
                )
                continue
            if self.found.is_spent:
                return DAMAGED, None, "too many headers overlap"
            crc = self.found.crc32(place.extent)
            if crc in place.promised:
                return WHOLE, place.extent, ""
            if 0 in place.promised and place.framed and not self._has_checksums():
                return UNSUMMED, place.extent, ""
            best = DAMAGED, None, "its bytes do not match their checksum"
        return best

    def _missing(self, name: str, size: int) -> str:
        for header in self.found.headers.get(name, ()):
            if header.method == 0 and header.start + size > self.source.size:
                lacking = header.start + size - self.source.size
                return f"the file is cut {lacking:,} bytes before its end"
        return "its record is missing, or its header is damaged"

    def _has_checksums(self) -> bool:
        """Return whether members that hold storages have checksums: then a CRC of 0 is damage."""
        entries = chain.from_iterable(self.found.entries.get(name, ()) for name in self.sizes)
        if any(entry.crc for entry in entries):
            return True
        places = (self.found.places(name, size) for name, size in self.sizes.items())
        return any(any(place.promised) for place in chain.from_iterable(places))

    def _is_big_endian(self) -> bool:
        """Return the byte order from its record, or from the record's length.

        It is "little" or "big".
        """
        name = f"{self.top}/byteorder"
        if (text := self.found.small(name)) is not None:
            return text == b"big"
        if name in self.found.entries:
            return all(entry.size == len(b"big") for entry in self.found.entries[name])
        return any(
            self.found.window.read(header.start, 3) == b"big"
            for header in self.found.headers.get(name, ())
        )

    def _metadata(self) -> dict[str, str]:
        text = self.found.small(f"{self.top}/{extra_records.NAME}")
        return {} if text is None else extra_records.read(text)


def _program() -> UnsupportedError:
    return UnsupportedError(
        "is a TorchScript program: ckptkit cannot recover a cut or damaged one",
        hint=AGAIN,
    )
