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
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from struct import Struct, unpack

from ckptkit.core.bytesource import ByteSource, Memory, Range, Section
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_STORAGE
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
from ckptkit.formats.format import Probe, Recovered
from ckptkit.formats.tar import first_name, is_tar, read_members
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


@dataclass(frozen=True, slots=True)
class _LegacyRecord:
    """The bytes of a storage. Their location is known only after all pickles have been read.

    `places` maps each key to the place of the storage and its number of elements.
    """

    places: dict[str, tuple[Range, int]]
    key: str
    length: int

    def locate(self) -> Range:
        place, numel = self.places[self.key]
        if place.source.remote:
            _check_count(place, numel, self.key)
        return place


_Places = dict[str, tuple[Range, int]]


def read(probe: Probe) -> Checkpoint:
    """Read the five pickles, then locate the storages."""
    return _parse(probe.source)[0]


def _parse(source: ByteSource, lost: dict[str, str] | None = None) -> tuple[Checkpoint, _Places]:
    """Return the checkpoint of a stream, and its storages in file order.

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
    places: _Places = {}
    lengths: dict[str, int] = {}
    sources = ModuleSources()

    def opened(key: str, nbytes: int, location: str) -> Storage:
        lengths[key] = nbytes
        return Storage(_LegacyRecord(places, key, nbytes), location)

    storages = StorageTable(opened)

    def persistent_load(pid: Node) -> Node:
        if pid.__class__ is tuple and len(pid) == 4 and pid[0] == "module":
            return sources.load(pid[1], pid[3])
        return storages.load(pid)

    tree = unpickle(source, system.stop, persistent_load=persistent_load)
    keys = unpickle(source, tree.stop)
    if not isinstance(keys.root, list) or not all(type(key) is str for key in keys.root):
        raise FormatError("the list of storage keys is not a list of strings")
    if len(set(keys.root)) != len(keys.root):
        raise AmbiguousError("a storage is listed twice")
    if odd := set(keys.root) ^ lengths.keys():
        first = min(odd)
        listed = "used, but missing from" if first in lengths else "not used, but in"
        raise CorruptError(f"storage {first!r} is {listed} the list of storage keys")
    at, itemsizes = keys.stop, storages.itemsizes()
    for key in keys.root:
        place = Range(source, at + 8, lengths[key])
        places[key] = place, place.length // itemsizes[key]
        at += 8 + place.length
        try:
            if at > source.size:
                raise TruncatedError(
                    f"ends inside storage {key!r}: {at - source.size:,} bytes are missing",
                    hint="download or copy it again",
                )
            if not source.remote:  # for a remote file, `locate` checks the count
                _check_count(*places[key], key)
        except FormatError as error:
            if lost is None:
                raise
            lost[key] = error.message
    warnings = [*tree.warnings, *endian_warning(system.root), *sources.warnings]
    if at < source.size:
        warnings.append(f"{source.size - at:,} bytes after the last storage are unaccounted for")
    names = (*system.globals, *tree.globals, *keys.globals)
    return Checkpoint(
        tree.root, table.TORCH_LEGACY.name, source, sources.metadata, names, tuple(warnings)
    ), places


def _check_count(place: Range, numel: int, key: str) -> None:
    """Raise CorruptError unless the element count before a storage matches the pickle."""
    (found,) = unpack("<q", place.source.read(place.offset - 8, 8))
    if found != numel:
        raise CorruptError(f"storage {key!r} has {found} elements, but its tensors need {numel}")


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

    source = probe.source
    damaged: dict[str, str] = {}
    try:
        checkpoint, places = _parse(source, damaged)
    except CkptkitError as error:
        raise CorruptError(
            f"the pickles before its tensors are damaged: {error.message}", hint=AGAIN
        ) from error
    checkpoint = replace(checkpoint, warnings=(*checkpoint.warnings, unsummed()))
    reasons = dict(damaged)
    zeros = zeros_from(source)
    next_keys = dict(pairwise(places))
    for key, (place, _) in () if unverified else places.items():
        following, end = next_keys.get(key), place.offset + place.length
        if place.length and end > zeros:
            why = f"the file ends in {source.size - zeros:,} zeros; the save may be incomplete"
        elif following is None and end != source.size:
            why = f"{source.size - end:,} extra bytes follow it"
        elif following in damaged:
            why = f"the next storage is at the wrong offset ({damaged[following]})"
            why = f"it may be shifted: {why}"
        else:
            continue
        reasons.setdefault(key, why)

    def why_lost(storage: Storage) -> str | None:
        record = storage.record
        return reasons.get(record.key) if isinstance(record, _LegacyRecord) else None

    return recovered(checkpoint, why_lost, AGAIN if unverified else UNVERIFIED)


def pickles(probe: Probe) -> Iterator[Found] | None:
    """Yield the five pickles of a stream. The bytes after the pickles are storages."""
    if not matches(probe):
        return None
    return iter((PickleStream("", probe.source, 0, probe.source.size, TORCH_LOAD, None, count=5),))


# Tar files of torch 0.1.1 and before


RECORDS = ("sys_info", "pickle", "tensors", "storages")
_NOT_TRUSTED = "torch.load(weights_only=True) refuses tar files"


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
    members = read_members(probe.source)
    for name in RECORDS[1:]:  # torch does not read sys_info
        if name not in members:
            raise CorruptError(f"the tar file lacks the record {name!r}")
    for name, member in members.items():
        if name not in RECORDS:
            raise AmbiguousError(
                f"the tar file has a member {shown(name)} that torch does not write"
            )
        if member.kind != "file":
            raise PathError(f"the record {name!r} is a {member.kind}")
    streams = {name: _TarRecord(name, member.data) for name, member in members.items()}
    system = streams["sys_info"].pickle().root if "sys_info" in streams else None
    table_of_file = _TarTable()
    table_of_file.read_storages(streams["storages"])
    table_of_file.read_tensors(streams["tensors"])
    tree = streams["pickle"].pickle(table_of_file)
    for name, stream in streams.items():
        if stream.at != stream.end:
            raise AmbiguousError(
                f"{stream.end - stream.at:,} bytes of the record {name!r} are unaccounted for"
            )
    named = chain.from_iterable(stream.globals for stream in streams.values())
    return Checkpoint(
        tree.root, table.TORCH_TAR.name, probe.source, table_of_file.sources.metadata,
        globals=tuple(dict.fromkeys(named)),
        warnings=(*tree.warnings, *endian_warning(system), *table_of_file.warnings()),
    )  # fmt: skip


class _TarRecord:
    """A reader of one record, from start to end. Pickles, numbers and bytes alternate."""

    def __init__(self, name: str, data: Range) -> None:
        self.name = name
        self.source, self.at, length = data
        self.end = self.at + length
        self.globals: list[Global] = []

    def pickle(self, table: _TarTable | None = None) -> Unpickled:
        load = table.load if table else None
        found = unpickle(self.source, self.at, self.end, persistent_load=load)
        self.at = found.stop
        self.globals += found.globals
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

    def entries(self) -> Iterator[tuple[Node, Node, Node]]:
        """Yield the pickled tuple at the start of each entry.

        The tuple is (key, storage key, class) for tensors, and (key, location, class) for storages.
        """
        count = self.pickle().root  # each entry takes at least one byte
        if type(count) is not int or not 0 <= count <= self.end - self.at:
            raise FormatError(f"the record {self.name!r} has no valid number of entries")
        for _ in range(count):
            entry = self.pickle().root
            if not isinstance(entry, tuple) or len(entry) != 3:
                raise FormatError(
                    f"an entry of the record {self.name!r} does not begin with a triple"
                )
            yield entry


class _TarTable:
    """The tensors and storages to which persistent ids refer, by key.

    Integer keys become strings, because a hostile file could contain many integers with equal
    hashes, which make a dict slow.
    """

    def __init__(self) -> None:
        self.found: dict[str, TypedStorage | Tensor] = {}
        self.used: set[str] = set()
        self.sources = ModuleSources()

    def read_storages(self, stream: _TarRecord) -> None:
        for key, location, made in stream.entries():
            dtype = dtype_of_storage(made) if isinstance(made, Global) else None
            if dtype is None or not isinstance(location, str):
                raise FormatError("a storage has no device or no element type")
            check("name_bytes", len(location), "characters of a device's name")
            (elements,) = stream.numbers("<q")
            if elements < 0:
                raise CorruptError(
                    f"storage {_decimal(key)} has a negative number of elements: {elements}"
                )
            place = stream.bytes(elements * dtype.itemsize)
            self._add(key, TypedStorage(Storage(place, location), dtype))
        views = stream.pickle().root
        if not isinstance(views, list):
            raise FormatError("the views of storages are not a list")
        for view in views:
            shape = [type(each) for each in view[2:]] if isinstance(view, tuple) else []
            if shape != [int, int]:
                raise FormatError(
                    "a view of a storage is not a tuple of key, root, offset and size"
                )
            key, root_key, offset, size = view
            root = self._storage(root_key)
            if not 0 <= offset <= offset + size <= root.elements:
                raise TensorError(
                    f"a view of {size} elements at offset {offset} exceeds its storage of "
                    f"{root.elements} elements"
                )
            start = root.start + offset
            self._add(key, TypedStorage(root.storage, root.dtype, start, start + size))

    def read_tensors(self, stream: _TarRecord) -> None:
        for key, storage_key, made in stream.entries():
            (rank,) = stream.numbers("<i4x")
            check("rank", rank, "dimensions of a tensor")
            if rank < 0:
                raise TensorError(f"a tensor of {rank} dimensions")
            numbers = stream.numbers(f"<{2 * rank + 1}q")
            if storage_key is None:  # an empty tensor
                name = made.name.replace("Tensor", "Storage") if isinstance(made, Global) else ""
                empty = Storage(Range(Memory(b""), 0, 0))
                typed = TypedStorage(empty, BY_STORAGE.get(name))
            else:
                typed = self._storage(storage_key)
            check_class(made, typed.dtype)
            view = (typed, numbers[-1], numbers[:rank], numbers[rank:-1])
            self._add(key, strided(typed, typed.dtype, view)[0])

    def load(self, pid: Node) -> Node:
        """Return the object to which a persistent id refers."""
        if isinstance(pid, tuple) and len(pid) == 3:
            return self.sources.load(pid[0], pid[2])
        key = _decimal(pid)
        if key not in self.found:
            raise CorruptError(
                f"the pickle refers to {key}, which is neither a tensor nor a storage of the file"
            )
        self.used.add(key)
        return self.found[key]

    def warnings(self) -> tuple[str, ...]:
        unused = sum(
            isinstance(each, Tensor) and key not in self.used for key, each in self.found.items()
        )
        unread = f"nothing refers to {unused:,} of its tensors; ckptkit does not copy them"
        return (*self.sources.warnings, *([unread] if unused else ()))

    def _storage(self, node: Node) -> TypedStorage:
        found = self.found.get(_decimal(node))
        if not isinstance(found, TypedStorage):
            raise CorruptError(f"{_decimal(node)} is not a storage of the file")
        return found

    def _add(self, node: Node, made: TypedStorage | Tensor) -> None:
        key = _decimal(node)
        if key in self.found:
            raise AmbiguousError(f"two entries have the key {key}")
        self.found[key] = made


def _decimal(node: Node) -> str:
    """Return a key as a decimal string. Raises FormatError if the key is not a number."""
    text = str(node) if type(node) is int else node
    if not isinstance(text, str) or not re.fullmatch("-?[0-9]+", text):
        raise FormatError("the key of a tensor or storage is not a number")
    return text


def pickles_of_tar(probe: Probe) -> Iterator[Found] | None:
    """Yield the pickles of the records and of any other member.

    In the records `tensors` and `storages`, numbers follow each pickle.
    """
    if not matches_tar(probe):
        return None
    members = read_members(probe.source, here=True).items()
    return (_tar_pickle(name, *member.data) for name, member in members if member.data.length)


def _tar_pickle(name: str, source: ByteSource, offset: int, length: int) -> Found:
    if name not in RECORDS:
        return Inner(name, Section(source, offset, length), name.endswith(PICKLES))
    count = None if name in RECORDS[2:] else 1
    return PickleStream(name, source, offset, length, TORCH_LOAD, _NOT_TRUSTED, count)


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
        return ends and _unpickled(source)[0].stop == source.size
    except CkptkitError:
        return False


def read_pickle(probe: Probe) -> Checkpoint:
    """Read the object of the pickle."""
    source = probe.source
    try:
        pickled, names = _unpickled(source)
    except FormatError as error:
        if b"NumpyArrayWrapper" in source.read(0, min(source.size, 1 << 20)):
            raise UnsupportedError(
                "is a joblib file, which has the bytes of arrays between the opcodes of a pickle",
                hint="if you trust it, load it with joblib, and save its arrays with numpy.savez",
            ) from error
        error.hint = (
            error.hint
            or "the file begins like a pickle; if it is not a pickle, ckptkit cannot read it"
        )
        raise
    if pickled.stop != source.size:
        follow = f"{source.size - pickled.stop:,} bytes follow the pickle"
        if _is_pickle(source, pickled.stop):
            raise AmbiguousError(
                f"contains several pickles: {follow}",
                hint="if you trust it, read each pickle with pickle.load and save it separately",
            )
        raise AmbiguousError(f"{follow}; other readers may read these bytes")
    return Checkpoint(
        pickled.root, table.PICKLE.name, source, globals=names, warnings=pickled.warnings
    )


def _is_pickle(source: ByteSource, start: int) -> bool:
    """Return whether a complete pickle of protocol 2 or later begins at `start`."""
    if source.read(start, 1) != b"\x80":
        return False
    try:
        unpickle(source, start)
    except CkptkitError:
        return False
    return True


def _unpickled(source: ByteSource) -> tuple[Unpickled, tuple[Global, ...]]:
    """Return the value of a plain pickle, and all globals in it.

    Each storage is a torch.save file inside the pickle.
    """
    inside: list[Global] = []

    def load(made: Global, args: tuple[Node, ...]) -> Node:
        """Return the storage that torch's `_load_from_bytes` would return.

        If the argument is not a torch.save file of a storage, return the call as an Object.
        """
        data = args[0] if len(args) == 1 else None
        inner: ByteSource | None = None
        if isinstance(data, StoredBytes) and isinstance(data.extent, Range):
            inner = Section(*data.extent)
        elif isinstance(data, bytes):
            inner = Memory(data, "a storage")
        if inner is None or not matches(Probe(inner)):
            return Object(made, args)
        held = _parse(inner)[0]
        if not isinstance(held.root, TypedStorage):
            return Object(made, args)
        inside.extend(held.globals)
        return held.root

    found = unpickle(source, reducers={**REDUCERS, ("torch.storage", "_load_from_bytes"): load})
    return found, tuple(dict.fromkeys((*found.globals, *inside)))


def plain_pickles(probe: Probe) -> Iterator[Found] | None:
    """Yield the single pickle. The scanner reports bytes after the pickle."""
    if not matches_pickle(probe):
        return None
    return iter((PickleStream("", probe.source, 0, probe.source.size, weak=True),))
