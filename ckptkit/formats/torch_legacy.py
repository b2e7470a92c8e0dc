"""torch.save before 1.6 (and `_use_new_zipfile_serialization=False` since): one flat stream.

    pickle: 0x1950A86A20F9469CFC6C         the magic number, a literal
    pickle: 1001                           the protocol version
    pickle: {'protocol_version', 'little_endian', 'type_sizes'}
    pickle: the object; persistent ids ('storage', ...) and
            ('module', class, source file, source text)
    pickle: [storage key, ...]
    per key, in that order: int64 numel, numel * itemsize bytes

Nothing is aligned, nothing has a checksum, integers and payloads are little-endian on every host.
The places of storages are known only at the end, so they are bound late. (torch/serialization.py,
`_legacy_load`.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from struct import unpack

from ckptkit.core.bytesource import ByteSource, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    TruncatedError,
    UnsupportedError,
)
from ckptkit.core.tensor import Storage
from ckptkit.core.tree import Node
from ckptkit.formats.format import RECOVER, Probe, Recovered
from ckptkit.formats.table import TORCH_LEGACY
from ckptkit.pickles.module_sources import ModuleSources, endian_warning
from ckptkit.pickles.storages import StorageTable
from ckptkit.pickles.streams import TORCH_LOAD, Found, PickleStream
from ckptkit.pickles.values import Unpickled, unpickle

MAGIC_NUMBER = 0x1950A86A20F9469CFC6C
PROTOCOL_VERSION = 1001

# The magic number as protocols 0 to 5 spell it: LONG1, or the decimal LONG of protocols 0 and 1;
# perhaps framed.
_BINARY = MAGIC_NUMBER.to_bytes(10, "little")
_DECIMAL = str(MAGIC_NUMBER).encode()
_MAGIC = (
    rb"(?s)(\x80[\x02-\x05])?(\x95.{8})?"
    rb"(\x8a\x0a" + re.escape(_BINARY) + rb"|L" + _DECIMAL + rb"L?\n)\."
)


def matches(probe: Probe) -> bool:
    head = probe.head[:64]
    return (_BINARY in head or _DECIMAL in head) and re.match(_MAGIC, head) is not None


def read(probe: Probe) -> Checkpoint:
    """Read five pickles, then locate the storages."""
    return parse(probe.source)


def parse(source: ByteSource, lost: dict[str, str] | None = None) -> Checkpoint:
    """Parse the checkpoint of a stream.

    With `lost`, damaged storages are put there by key, with the reason.
    """
    magic = unpickle(source)
    version = unpickle(source, magic.stop)
    if type(version.root) is not int or version.root != PROTOCOL_VERSION:
        raise UnsupportedError(f"legacy stream of a protocol version other than {PROTOCOL_VERSION}")
    system = unpickle(source, version.stop)
    if not isinstance(system.root, dict):
        raise FormatError("the third pickle of a legacy stream does not describe a system")
    stream = _Stream(source, lost)
    table = StorageTable(stream.open)
    sources = ModuleSources()

    def persistent_load(pid: Node) -> Node:
        if pid.__class__ is tuple and len(pid) == 4 and pid[0] == "module":
            return sources.load(pid[1], pid[3])
        return table.load(pid)

    tree = unpickle(source, system.stop, persistent_load=persistent_load)
    keys = unpickle(source, tree.stop)
    end = stream.bind(keys, table.itemsizes())
    left = max(0, source.size - end)
    return Checkpoint(
        tree.root, TORCH_LEGACY.name, source, sources.metadata,
        globals=(*system.globals, *tree.globals, *keys.globals),
        warnings=(
            *tree.warnings, *endian_warning(system.root), *sources.warnings,
            *((f"{left:,} bytes after the last storage are unaccounted for",) if left else ()),
        ),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _LegacyRecord:
    """The bytes of a storage, whose place is known once the whole stream has been read."""

    places: dict[str, Range]
    itemsizes: dict[str, int]
    following: dict[str, str]  # the key of the next storage
    key: str
    length: int

    def locate(self) -> Range:
        place = self.places[self.key]
        if place.source.remote:
            _check_count(place, self.key, self.itemsizes[self.key])
        return place


class _Stream:
    """The storages after the pickles."""

    def __init__(self, source: ByteSource, lost: dict[str, str] | None) -> None:
        self.source = source
        self.lost = lost
        self.places: dict[str, Range] = {}
        self.lengths: dict[str, int] = {}
        self.itemsizes: dict[str, int] = {}
        self.following: dict[str, str] = {}

    def open(self, key: str, nbytes: int, location: str) -> Storage:
        if nbytes > self.source.size and self.lost is None:
            raise TruncatedError(
                f"storage {key!r} has {nbytes:,} bytes, the whole file {self.source.size:,}",
                hint="download or copy it again",
            )
        self.lengths[key] = nbytes
        return Storage(
            _LegacyRecord(self.places, self.itemsizes, self.following, key, nbytes), location
        )

    def bind(self, keys: Unpickled, itemsizes: dict[str, int]) -> int:
        """Locate every storage; return the offset of the end."""
        if not isinstance(keys.root, list) or not all(type(key) is str for key in keys.root):
            raise FormatError("the list of storage keys is not a list of strings")
        if len(set(keys.root)) != len(keys.root):
            raise AmbiguousError("a storage is listed twice")
        if set(keys.root) != set(self.lengths):
            odd = min(set(keys.root) ^ set(self.lengths))
            listed = "not listed, but used" if odd in self.lengths else "listed, but not used"
            raise CorruptError(f"storage {odd!r} is {listed}")
        self.itemsizes.update(itemsizes)
        if self.lost is not None:
            self.following.update(pairwise(keys.root))
        at = keys.stop
        for key in keys.root:
            try:
                self._place(key, at)
            except FormatError as error:
                if self.lost is None:
                    raise
                self.lost[key] = error.message
            at += 8 + self.lengths[key]
        return at

    def _place(self, key: str, at: int) -> None:
        length = self.lengths[key]
        if at + 8 + length > self.source.size:
            raise TruncatedError(
                f"ends inside storage {key!r}: "
                f"{at + 8 + length - self.source.size:,} bytes are missing",
                hint="download or copy it again",
            )
        self.places[key] = Range(self.source, at + 8, length)
        if (
            not self.source.remote
        ):  # where that would be a request for each, it is done when the bytes are needed
            _check_count(self.places[key], key, self.itemsizes[key])


def _check_count(place: Range, key: str, itemsize: int) -> None:
    """Check that the count before the bytes of a storage is what its tensors expect."""
    (numel,) = unpack("<q", place.source.read(place.offset - 8, 8))
    if numel * itemsize != place.length:
        raise CorruptError(
            f"storage {key!r} has {numel} elements, its tensors expect {place.length // itemsize}"
        )


def recover(probe: Probe, unverified: bool = False) -> Recovered | None:
    """Recover the tensors whose storages are between two right counts, or up to the file's end.

    Nothing has a checksum. A wrong count shows that bytes before it may be missing or shifted; with
    `unverified`, a storage needs only its own count. Raises CorruptError where one of the pickles
    is cut: the storages come after them.
    """
    if probe.is_folder or not matches(probe):
        return None
    from ckptkit.formats.common.recovering import (  # reading does not pay for it
        AGAIN,
        UNVERIFIED,
        recovered,
        unsummed,
        zeros_from,
    )

    reasons: dict[str, str] = {}
    try:
        checkpoint = parse(probe.source, reasons)
    except CkptkitError as error:
        raise CorruptError(
            f"the pickles before its tensors are damaged: {error.message}", hint=AGAIN
        ) from error
    checkpoint = replace(checkpoint, warnings=(*checkpoint.warnings, unsummed()))
    if unverified:
        return recovered(checkpoint, lambda storage: reasons.get(_key(storage)))
    zeros = zeros_from(probe.source)
    return recovered(checkpoint, partial(_why_lost, reasons=reasons, zeros=zeros), UNVERIFIED)


def _why_lost(storage: Storage, *, reasons: dict[str, str], zeros: int) -> str | None:
    """Return why a storage is lost, or may be; None if it is intact as far as can be known."""
    record = storage.record
    if not isinstance(record, _LegacyRecord):
        return None
    place = record.places.get(record.key)
    if record.key in reasons or place is None:
        return reasons.get(record.key, "it is not there")
    end = place.offset + place.length
    if place.length and end > zeros:
        return (
            f"the file ends in {place.source.size - zeros:,} zeros: it was not written to its end"
        )
    following = record.following.get(record.key)
    if following is None:
        return (
            None
            if end == place.source.size
            else f"{place.source.size - end:,} extra bytes follow it"
        )
    if following in reasons:
        return f"it may be shifted: the next storage is not in its place ({reasons[following]})"
    return None


def recoverable(probe: Probe) -> str:
    """Return the command that may recover something; "" unless the pickles can be read."""
    if not matches(probe):
        return ""
    try:
        parse(probe.source, {})
    except CkptkitError:
        return ""
    return RECOVER


def _key(storage: Storage) -> str:
    return storage.record.key if isinstance(storage.record, _LegacyRecord) else ""


def pickles(probe: Probe) -> Iterator[Found] | None:
    """Yield five pickles, one after the other; what follows are the bytes of storages."""
    if not matches(probe):
        return None
    return iter((PickleStream("", probe.source, 0, probe.source.size, TORCH_LOAD, None, count=5),))
