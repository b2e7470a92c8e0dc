"""Read streams (torch.save before 1.6), tar files (torch.save before 0.1.2) and plain pickles.

torch.save before 1.6 writes one flat stream. Later versions write such a stream if
`_use_new_zipfile_serialization` is False. (torch/serialization.py, `_legacy_load`.)

    pickle 1   0x1950A86A20F9469CFC6C, the magic number
    pickle 2   1001, the protocol version
    pickle 3   {'protocol_version', 'little_endian', 'type_sizes'}
    pickle 4   the object. The pickle contains persistent ids ('storage', ...) and
               ('module', class, source file, source code).
    pickle 5   [storage key, ...]
    storages   for each key: int64 number of elements, bytes of the elements

The stream has no alignment and no checksums. Integers and elements are little-endian on every host.
The offsets of storages are known only after the last pickle. Therefore ckptkit locates the
storages after it has read all pickles.

torch.save of torch 0.1.1 and before writes a tar file of four records. (torch/serialization.py,
`legacy_load`.)

    sys_info   a pickle: {'protocol_version': 1000, 'little_endian', 'type_sizes'}
    pickle     a pickle of the object. A persistent id is the key of a tensor or storage (a string
               or integer), or (class, source file, source code).
    tensors    a pickle of the number of tensors. For each tensor follow:
               * a pickle: (key, key of its storage, class)
               * int32 number of dimensions, 4 unused bytes
               * int64 sizes, int64 strides, int64 offset in elements
    storages   a pickle of the number of storages. For each storage follow:
               * a pickle: (key, location, class)
               * int64 number of elements, bytes of the elements
               The last pickle lists views of storages:
               [(key of the view, key of the storage, offset and size in elements), ...]

All numbers are little-endian. The records have no alignment and no checksums. Keys are memory
addresses. The storage of an empty tensor is None. torch 2.13 still reads such files, but not with
`weights_only`. torch first unpacks the tar file into a folder.

A plain pickle contains numpy arrays, or tensors and modules that ``pickle.dump`` stored. The file
is one pickle of protocol 0 to 5. Protocols 2 and later begin with 0x80 and the protocol number.
Earlier protocols have no signature. ckptkit reads such a file as a pickle if the file ends with
STOP (".") and can be unpickled. Arrays of any size stay in the file.

pickle.dump stores each torch storage as a call of ``torch.storage._load_from_bytes``. The argument
is a torch.save file: a legacy stream whose object is the storage. (torch/storage.py,
`TypedStorage.__reduce__`)
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from struct import Struct, unpack

from ckptkit.core.bytesource import ByteSource, Memory, Range, Section
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_STORAGE, DType
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    PathError,
    TensorError,
    TruncatedError,
    UnsupportedError,
)
from ckptkit.core.limits import check
from ckptkit.core.tensor import Storage, Tensor, TypedStorage
from ckptkit.core.text import shown
from ckptkit.core.tree import Global, Node, Object, StoredBytes
from ckptkit.formats import table
from ckptkit.formats.format import RECOVER, Probe, Recovered
from ckptkit.formats.table import TORCH_LEGACY, TORCH_TAR
from ckptkit.formats.tar import TarMember, first_name, is_tar, read_members
from ckptkit.formats.whats_inside import PICKLES
from ckptkit.pickles.globals import REDUCERS, check_class, strided
from ckptkit.pickles.storages import ModuleSources, StorageTable, dtype_of_storage, endian_warning
from ckptkit.pickles.streams import MAGIC_NUMBER, TORCH_LOAD, Found, Inner, PickleStream
from ckptkit.pickles.values import Unpickled, unpickle

PROTOCOL_VERSION = 1001

# Pattern for a pickle of the magic number in protocols 0 to 5. Protocols 0 and 1 store the number
# with the opcode LONG in decimal, later protocols with LONG1. A FRAME may precede the opcode.
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
    """Read the five pickles, then locate the storages."""
    return parse(probe.source)


def parse(source: ByteSource, lost: dict[str, str] | None = None) -> Checkpoint:
    """Parse the checkpoint of a stream.

    If `lost` is given, a damaged storage raises no error. Instead, `lost` gets the reason, under
    the key of the storage.
    """
    magic = unpickle(source)
    version = unpickle(source, magic.stop)
    if type(version.root) is not int or version.root != PROTOCOL_VERSION:
        raise UnsupportedError(
            f"is a legacy stream whose protocol version is not {PROTOCOL_VERSION}"
        )
    system = unpickle(source, version.stop)
    if not isinstance(system.root, dict):
        raise FormatError("the third pickle of a legacy stream is not a dict of system properties")
    places, sources = _StoragePlaces(), ModuleSources()

    def opened(key: str, nbytes: int, location: str) -> Storage:
        if nbytes > source.size and lost is None:
            raise TruncatedError(
                f"storage {key!r} has {nbytes:,} bytes, but the file has only {source.size:,}",
                hint="download or copy it again",
            )
        places.lengths[key] = nbytes
        return Storage(_LegacyRecord(places, key, nbytes), location)

    storages = StorageTable(opened)

    def persistent_load(pid: Node) -> Node:
        if pid.__class__ is tuple and len(pid) == 4 and pid[0] == "module":
            return sources.load(pid[1], pid[3])
        return storages.load(pid)

    tree = unpickle(source, system.stop, persistent_load=persistent_load)
    keys = unpickle(source, tree.stop)
    places.itemsizes = storages.itemsizes()
    end = _bind(source, places, keys, lost)
    left = max(0, source.size - end)
    return Checkpoint(
        tree.root, TORCH_LEGACY.name, source, sources.metadata,
        globals=(*system.globals, *tree.globals, *keys.globals),
        warnings=(
            *tree.warnings, *endian_warning(system.root), *sources.warnings,
            *((f"{left:,} bytes after the last storage are unaccounted for",) if left else ()),
        ),
    )  # fmt: skip


@dataclass(slots=True)
class _StoragePlaces:
    """The storages of a stream, by key. `parse` fills the dicts while it reads the stream."""

    lengths: dict[str, int] = field(default_factory=dict)
    itemsizes: dict[str, int] = field(default_factory=dict)
    ranges: dict[str, Range] = field(default_factory=dict)
    # Maps the key of each storage to the key of the next storage in the file.
    following: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _LegacyRecord:
    """The bytes of a storage. Their location is known only after all pickles have been read."""

    places: _StoragePlaces
    key: str
    length: int

    def locate(self) -> Range:
        place = self.places.ranges[self.key]
        if place.source.remote:
            _check_count(place, self.key, self.places.itemsizes[self.key])
        return place


def _bind(
    source: ByteSource, places: _StoragePlaces, keys: Unpickled, lost: dict[str, str] | None
) -> int:
    """Locate every storage after the list of keys. Return the offset after the last storage."""
    if not isinstance(keys.root, list) or not all(type(key) is str for key in keys.root):
        raise FormatError("the list of storage keys is not a list of strings")
    if len(set(keys.root)) != len(keys.root):
        raise AmbiguousError("a storage is listed twice")
    if odd := set(keys.root) ^ places.lengths.keys():
        first = min(odd)
        listed = "used, but missing from" if first in places.lengths else "not used, but in"
        raise CorruptError(f"storage {first!r} is {listed} the list of storage keys")
    if lost is not None:
        places.following.update(pairwise(keys.root))
    at = keys.stop
    for key in keys.root:
        length = places.lengths[key]
        end = at + 8 + length
        try:
            if end > source.size:
                raise TruncatedError(
                    f"ends inside storage {key!r}: {end - source.size:,} bytes are missing",
                    hint="download or copy it again",
                )
            place = places.ranges[key] = Range(source, at + 8, length)
            if not source.remote:  # for a remote file, `locate` checks the count
                _check_count(place, key, places.itemsizes[key])
        except FormatError as error:
            if lost is None:
                raise
            lost[key] = error.message
        at = end
    return at


def _check_count(place: Range, key: str, itemsize: int) -> None:
    """Raise CorruptError unless the element count before a storage matches the pickle."""
    (numel,) = unpack("<q", place.source.read(place.offset - 8, 8))
    if numel * itemsize != place.length:
        raise CorruptError(
            f"storage {key!r} has {numel} elements, but its tensors need {place.length // itemsize}"
        )


def recover(probe: Probe, unverified: bool = False) -> Recovered | None:
    """Recover each storage that is between two correct element counts.

    The format has no checksums. The element count before a storage, and the element count of the
    next storage, must be right. If a count is wrong, bytes before the count may be missing or
    shifted. If `unverified` is true, only the count before the storage must be right. Raises
    CorruptError if one of the pickles before the storages is damaged.
    """
    if probe.is_folder or not matches(probe):
        return None
    from ckptkit.formats.recovering import AGAIN, UNVERIFIED, recovered, unsummed, zeros_from

    reasons: dict[str, str] = {}
    try:
        checkpoint = parse(probe.source, reasons)
    except CkptkitError as error:
        raise CorruptError(
            f"the pickles before its tensors are damaged: {error.message}", hint=AGAIN
        ) from error
    checkpoint = replace(checkpoint, warnings=(*checkpoint.warnings, unsummed()))
    zeros = None if unverified else zeros_from(probe.source)
    why = partial(_why_lost, reasons=reasons, zeros=zeros)
    return recovered(checkpoint, why, AGAIN if unverified else UNVERIFIED)


def _why_lost(storage: Storage, *, reasons: dict[str, str], zeros: int | None) -> str | None:
    """Return why a storage is or may be lost, or None if nothing suggests damage.

    `zeros` is the offset at which the zeros at the end of the file begin. If `zeros` is None, check
    only the element count before the storage.
    """
    record = storage.record
    if not isinstance(record, _LegacyRecord):
        return None
    place = record.places.ranges.get(record.key)
    if record.key in reasons or place is None:
        return reasons.get(record.key, "it is missing")
    if zeros is None:
        return None
    end = place.offset + place.length
    if place.length and end > zeros:
        return f"the file ends in {place.source.size - zeros:,} zeros; the save may be incomplete"
    following = record.places.following.get(record.key)
    if following is None:
        return (
            None
            if end == place.source.size
            else f"{place.source.size - end:,} extra bytes follow it"
        )
    if following in reasons:
        return f"it may be shifted: the next storage is at the wrong offset ({reasons[following]})"
    return None


def recoverable(probe: Probe) -> str:
    """Return the command that may recover tensors, or "" if the pickles cannot be read."""
    if not matches(probe):
        return ""
    try:
        parse(probe.source, {})
    except CkptkitError:
        return ""
    return RECOVER


def pickles(probe: Probe) -> Iterator[Found] | None:
    """Yield the five pickles of a stream. The bytes after the pickles are storages."""
    if not matches(probe):
        return None
    return iter((PickleStream("", probe.source, 0, probe.source.size, TORCH_LOAD, None, count=5),))


# Tar files of torch 0.1.1 and before


RECORDS = ("sys_info", "pickle", "tensors", "storages")
_NOT_TRUSTED = "torch.load(weights_only=True) refuses tar files"
_OPTIONAL = RECORDS[:1]  # torch does not read sys_info


def matches_tar(probe: Probe) -> bool:
    """Return whether a file is a tar file. torch.load takes every tar file for this format."""
    return is_tar(probe.head)


def is_archive(probe: Probe) -> bool:
    """Return whether a file is a tar file that torch did not write."""
    if not is_tar(probe.head):
        return False
    try:
        return first_name(probe.source) not in (b"", *map(str.encode, RECORDS))
    except CkptkitError:
        return False  # `read` raises the error


def read_tar(probe: Probe) -> Checkpoint:
    """Read the object in the record `pickle`, and its tensors in the other records."""
    source = probe.source
    streams = {
        name: _TarRecord(source, member) for name, member in _records(read_members(source)).items()
    }
    system = streams["sys_info"].pickle() if "sys_info" in streams else None
    table = _TarTable()
    table.read_storages(streams["storages"])
    table.read_tensors(streams["tensors"])
    tree = streams["pickle"].pickle(table)
    for stream in streams.values():
        stream.finish()
    named = chain.from_iterable(stream.globals for stream in streams.values())
    return Checkpoint(
        tree.root, TORCH_TAR.name, source, table.sources.metadata,
        globals=tuple(dict.fromkeys(named)),
        warnings=(*tree.warnings, *endian_warning(system and system.root), *table.warnings()),
    )  # fmt: skip


def _records(members: dict[str, TarMember]) -> dict[str, TarMember]:
    """Return the records by name.

    Raises CorruptError if a required record is missing. Raises AmbiguousError if the file has other
    members. Raises PathError if a record is a folder or a link.
    """
    for name in RECORDS:
        if name not in members and name not in _OPTIONAL:
            raise CorruptError(f"the tar file lacks the record {name!r}")
    for name, member in members.items():
        if name not in RECORDS:
            raise AmbiguousError(
                f"the tar file has a member {shown(name)} that torch does not write"
            )
        if member.kind != "file":
            raise PathError(f"the record {name!r} is a {member.kind}")
    return members


class _TarRecord:
    """A reader of one record, from start to end. Pickles, numbers and bytes alternate."""

    def __init__(self, source: ByteSource, member: TarMember) -> None:
        self.source = source
        self.name = member.name
        self.at = member.data.offset
        self.end = member.data.offset + member.data.length
        self.globals: dict[Global, None] = {}

    def pickle(self, table: _TarTable | None = None) -> Unpickled:
        found = unpickle(
            self.source, self.at, self.end, persistent_load=table.load if table else None
        )
        self.at = found.stop
        self.globals.update(dict.fromkeys(found.globals))
        return found

    def bytes(self, length: int) -> Range:
        if length > self.end - self.at:
            raise CorruptError(
                f"the record {self.name!r} ends {length - self.end + self.at:,} bytes too early"
            )
        self.at += length
        return Range(self.source, self.at - length, length)

    def numbers(self, layout: str) -> tuple[int, ...]:
        packed = Struct(layout)
        return packed.unpack(self.bytes(packed.size).read())

    def count(self) -> int:
        """Read the number of entries that follow. Each entry takes at least one byte."""
        count = self.pickle().root
        if type(count) is not int or count < 0:
            raise FormatError(f"the record {self.name!r} has no valid number of entries")
        if count > self.end - self.at:
            raise CorruptError(f"the record {self.name!r} is too short for its number of entries")
        return count

    def entries(self) -> Iterator[tuple[Node, Node, Node]]:
        """Yield the pickled tuple at the start of each entry.

        The tuple is (key, storage key, class) for tensors, and (key, location, class) for storages.
        """
        for _ in range(self.count()):
            entry = self.pickle().root
            if not isinstance(entry, tuple) or len(entry) != 3:
                raise FormatError(
                    f"an entry of the record {self.name!r} does not begin with a triple"
                )
            yield entry

    def finish(self) -> None:
        if self.at != self.end:
            raise AmbiguousError(
                f"{self.end - self.at:,} bytes of the record {self.name!r} are unaccounted for"
            )


class _TarTable:
    """The tensors and storages to which persistent ids refer, by key.

    Integer keys become strings, because a hostile file could contain many integers with equal
    hashes, which make a dict slow.
    """

    def __init__(self) -> None:
        self.storages: dict[str, TypedStorage] = {}
        self.tensors: dict[str, Tensor] = {}
        self.used: set[str] = set()
        self.sources = ModuleSources()

    def read_storages(self, stream: _TarRecord) -> None:
        for key, location, made in stream.entries():
            if not isinstance(location, str):
                raise FormatError("a storage has no device")
            check("name_bytes", len(location), "characters of a device's name")
            dtype = dtype_of_storage(made) if isinstance(made, Global) else None
            if dtype is None:
                raise FormatError("a storage has no element type")
            (elements,) = stream.numbers("<q")
            if elements < 0:
                raise CorruptError(
                    f"storage {_decimal(key)} has a negative number of elements: {elements}"
                )
            place = stream.bytes(elements * dtype.itemsize)
            self.storages[self._new(key)] = TypedStorage(Storage(place, location), dtype)
        views = stream.pickle().root
        if not isinstance(views, list):
            raise FormatError("the views of storages are not a list")
        for view in views:
            self._view(view)

    def _view(self, view: Node) -> None:
        if (
            not isinstance(view, tuple)
            or len(view) != 4
            or type(view[2]) is not int
            or type(view[3]) is not int
        ):
            raise FormatError("a view of a storage is not a tuple of key, root, offset and size")
        key, root_key, offset, size = view
        root = self._storage(root_key)
        if not 0 <= offset <= offset + size <= root.elements:
            raise TensorError(
                f"a view of {size} elements at offset {offset} exceeds its storage of "
                f"{root.elements} elements"
            )
        start = root.start + offset
        self.storages[self._new(key)] = TypedStorage(root.storage, root.dtype, start, start + size)

    def read_tensors(self, stream: _TarRecord) -> None:
        for key, storage_key, made in stream.entries():
            (rank,) = stream.numbers("<i4x")
            check("rank", rank, "dimensions of a tensor")
            if rank < 0:
                raise TensorError(f"a tensor of {rank} dimensions")
            numbers = stream.numbers(f"<{2 * rank + 1}q")
            typed = _nothing(made) if storage_key is None else self._storage(storage_key)
            check_class(made, typed.dtype)
            view = (typed, numbers[-1], numbers[:rank], numbers[rank:-1])
            self.tensors[self._new(key)] = strided(typed, typed.dtype, view)[0]

    def load(self, pid: Node) -> Node:
        """Return the object to which a persistent id refers."""
        if isinstance(pid, tuple) and len(pid) == 3:
            return self.sources.load(pid[0], pid[2])
        key = _decimal(pid)
        found = self.tensors.get(key) or self.storages.get(key)
        if found is None:
            raise CorruptError(
                f"the pickle refers to {key}, which is neither a tensor nor a storage of the file"
            )
        self.used.add(key)
        return found

    def warnings(self) -> tuple[str, ...]:
        unused = self.tensors.keys() - self.used
        unread = (
            (f"nothing refers to {len(unused):,} of its tensors; ckptkit does not copy them",)
            if unused
            else ()
        )
        return (*self.sources.warnings, *unread)

    def _storage(self, node: Node) -> TypedStorage:
        found = self.storages.get(_decimal(node))
        if found is None:
            raise CorruptError(f"{_decimal(node)} is not a storage of the file")
        return found

    def _new(self, node: Node) -> str:
        key = _decimal(node)
        if key in self.storages or key in self.tensors:
            raise AmbiguousError(f"two entries have the key {key}")
        return key


def _decimal(node: Node) -> str:
    """Return a key as a decimal string. Raises FormatError if the key is not a number."""
    text = str(node) if type(node) is int else node
    if (
        not isinstance(text, str)
        or not text.isascii()
        or not text.removeprefix("-").isdigit()
        or text != text.strip()
    ):
        raise FormatError("the key of a tensor or storage is not a number")
    return text


def _nothing(made: Node) -> TypedStorage:
    """Return an empty storage with the dtype of the tensor class `made`."""
    name = made.name.replace("Tensor", "Storage") if isinstance(made, Global) else ""
    dtype: DType | None = BY_STORAGE.get(name)
    return TypedStorage(Storage(Range(Memory(b""), 0, 0)), dtype)


def pickles_of_tar(probe: Probe) -> Iterator[Found] | None:
    """Yield the pickles of the records and of any other member.

    In the records `tensors` and `storages`, numbers follow each pickle.
    """
    if not matches_tar(probe):
        return None
    return _tar_pickles(probe.source, read_members(probe.source, here=True))


def _tar_pickles(source: ByteSource, members: dict[str, TarMember]) -> Iterator[Found]:
    for name, member in members.items():
        _, offset, length = member.data
        if name in RECORDS:
            count = None if name in RECORDS[2:] else 1
            yield PickleStream(name, source, offset, length, TORCH_LOAD, _NOT_TRUSTED, count)
        elif length:
            yield Inner(name, Section(source, offset, length), name.endswith(PICKLES))


# Plain pickles


# Maximum size of a file that ckptkit unpickles to recognize a pickle of protocol 0 or 1.
TEXT_LIMIT = 64 << 20
_FIRST = b"(]}lctdNIJKMLFGSTUVX"  # opcodes that can begin a pickle of protocol 0 or 1


def matches_pickle(probe: Probe) -> bool:
    head = probe.head
    if len(head) < 2:
        return False
    if head[0] == 0x80:
        return 2 <= head[1] <= 5
    source = probe.source
    if head[0] not in _FIRST or source.size > TEXT_LIMIT:
        return False
    try:
        ends = source.read(source.size - 1, 1) == b"."
        return ends and _machine(source, _Stored()).stop == source.size
    except CkptkitError:
        return False


def read_pickle(probe: Probe) -> Checkpoint:
    """Read the object of the pickle."""
    source = probe.source
    stored = _Stored()
    pickled = _unpickled_file(probe, stored)
    if pickled.stop != source.size:
        follow = f"{source.size - pickled.stop:,} bytes follow the pickle"
        if _is_pickle(source, pickled.stop):
            raise AmbiguousError(
                f"contains several pickles: {follow}",
                hint="if you trust it, read each pickle with pickle.load and save it separately",
            )
        raise AmbiguousError(f"{follow}; other readers may read these bytes")
    names = tuple(dict.fromkeys((*pickled.globals, *stored.globals)))
    return Checkpoint(
        pickled.root, table.PICKLE.name, source, globals=names, warnings=pickled.warnings
    )


def _is_pickle(source: ByteSource, start: int) -> bool:
    """Return whether a complete pickle of protocol 2 or later begins at `start`."""
    if source.read(start, min(2, source.size - start))[:1] != b"\x80":
        return False
    try:
        unpickle(source, start)
    except CkptkitError:
        return False
    return True


class _Stored:
    """The storages in one plain pickle. Each storage is a torch.save file inside the pickle."""

    def __init__(self) -> None:
        self.globals: dict[Global, None] = {}

    def load(self, made: Global, args: tuple[Node, ...]) -> Node:
        """Return the storage that torch's `_load_from_bytes` would return.

        If the argument is not a torch.save file of a storage, return the call as an Object.
        """
        inner = _inner(args[0]) if len(args) == 1 else None
        if inner is None or not matches(Probe(inner)):
            return Object(made, args)
        held = parse(inner)
        if not isinstance(held.root, TypedStorage):
            return Object(made, args)
        self.globals |= dict.fromkeys(held.globals)
        return held.root


def _inner(data: Node) -> ByteSource | None:
    """Return a byte string in a pickle as a source. Return None for other values."""
    if isinstance(data, StoredBytes) and isinstance(data.extent, Range):
        return Section(*data.extent)
    return Memory(data, "a storage") if isinstance(data, bytes) else None


def _machine(source: ByteSource, stored: _Stored) -> Unpickled:
    known = {**REDUCERS, ("torch.storage", "_load_from_bytes"): stored.load}
    return unpickle(source, reducers=known)


def _unpickled_file(probe: Probe, stored: _Stored) -> Unpickled:
    try:
        return _machine(probe.source, stored)
    except FormatError as error:
        if b"NumpyArrayWrapper" in probe.source.read(0, min(probe.source.size, 1 << 20)):
            raise UnsupportedError(
                "is a joblib file, which has the bytes of arrays between the opcodes of a pickle",
                hint="if you trust it, load it with joblib, and save its arrays with numpy.savez",
            ) from error
        error.hint = (
            error.hint
            or "the file begins like a pickle; if it is not a pickle, ckptkit cannot read it"
        )
        raise


def plain_pickles(probe: Probe) -> Iterator[Found] | None:
    """Yield the single pickle. The scanner reports bytes after the pickle."""
    return (
        iter((PickleStream("", probe.source, 0, probe.source.size, weak=True),))
        if matches_pickle(probe)
        else None
    )
