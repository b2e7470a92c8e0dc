"""torch.save of torch 0.1.1 and before: a tar file of four records.

Source: torch/serialization.py, `legacy_load`.

    sys_info   pickle: {'protocol_version': 1000, 'little_endian', 'type_sizes'}
    pickle     pickle: the object; persistent ids are keys of tensors and storages, as text or
               integers, and (class, source file, source text)
    tensors    pickle: how many; for each a pickle: (key, key of its storage, class), then int32
               dimensions, 4 unused bytes, int64 sizes, int64 strides, int64 offset in elements
    storages   pickle: how many; for each a pickle: (key, location, class), then int64 elements,
               their bytes;
               pickle: [(key of the view, key of its root, offset in elements, elements), ...]

All is little-endian, nothing is aligned, nothing has a checksum. Keys are addresses. An empty
tensor has the storage None. torch 2.13 still reads such files, though not with `weights_only`: it
unpacks them into a folder first.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from struct import Struct

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
)
from ckptkit.core.limits import check
from ckptkit.core.tensor import Storage, Tensor, TypedStorage
from ckptkit.core.text import shown
from ckptkit.core.tree import Global, Node
from ckptkit.formats.common.zip_pickles import PICKLES
from ckptkit.formats.containers.tar import TarMember, first_name, is_tar, read_members
from ckptkit.formats.format import Probe
from ckptkit.formats.table import TORCH_TAR
from ckptkit.pickles.builders import check_class
from ckptkit.pickles.globals import strided
from ckptkit.pickles.module_sources import ModuleSources, endian_warning
from ckptkit.pickles.storages import dtype_of_storage
from ckptkit.pickles.streams import TORCH_LOAD, Found, Inner, PickleStream
from ckptkit.pickles.values import Unpickled, unpickle

RECORDS = ("sys_info", "pickle", "tensors", "storages")
_NOT_TRUSTED = "torch.load(weights_only=True) refuses tar files"
_OPTIONAL = RECORDS[:1]  # torch does not look at it


def matches(probe: Probe) -> bool:
    """Recognize any tar file, as torch does, even one that could be something else as well."""
    return is_tar(probe.head)


def is_archive(probe: Probe) -> bool:
    """Return whether a file is a tar file of other files, not one that torch wrote."""
    if not is_tar(probe.head):
        return False
    try:
        return first_name(probe.source) not in (b"", *map(str.encode, RECORDS))
    except CkptkitError:
        return False  # `read` raises it


def read(probe: Probe) -> Checkpoint:
    """Read the tree of the record `pickle` over the storages and tensors of the other records."""
    source = probe.source
    streams = {
        name: _Stream(source, member) for name, member in _records(read_members(source)).items()
    }
    system = streams["sys_info"].pickle() if "sys_info" in streams else None
    table = _Table()
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
    """Return the four records. Raises for one that is missing, and for any other record."""
    for name in RECORDS:
        if name not in members and name not in _OPTIONAL:
            raise CorruptError(f"the tar file has no record {name!r}")
    for name, member in members.items():
        if name not in RECORDS:
            raise AmbiguousError(
                f"the tar file has a member {shown(name)} that torch does not write"
            )
        if member.kind != "file":
            raise PathError(f"the record {name!r} is a {member.kind}")
    return members


class _Stream:
    """A record, read from its beginning to its end: pickles and numbers one after another."""

    def __init__(self, source: ByteSource, member: TarMember) -> None:
        self.source = source
        self.name = member.name
        self.at = member.data.offset
        self.end = member.data.offset + member.data.length
        self.globals: dict[Global, None] = {}

    def pickle(self, table: _Table | None = None) -> Unpickled:
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
        """Read how many entries follow: none of them is empty."""
        count = self.pickle().root
        if type(count) is not int or count < 0:
            raise FormatError(f"the record {self.name!r} does not say how many entries it has")
        if count > self.end - self.at:
            raise CorruptError(
                f"the record {self.name!r} is shorter than the number of its entries"
            )
        return count

    def entries(self) -> Iterator[tuple[Node, Node, Node]]:
        """Yield the pickled triple at the beginning of each entry."""
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


class _Table:
    """The referents of persistent ids, by key.

    Integers of the file are looked up as text, so that it cannot choose their hashes.
    """

    def __init__(self) -> None:
        self.storages: dict[str, TypedStorage] = {}
        self.tensors: dict[str, Tensor] = {}
        self.used: set[str] = set()
        self.sources = ModuleSources()

    def read_storages(self, stream: _Stream) -> None:
        for key, location, made in stream.entries():
            if not isinstance(location, str):
                raise FormatError("a storage has no device")
            check("name_bytes", len(location), "characters of a device's name")
            dtype = dtype_of_storage(made) if isinstance(made, Global) else None
            if dtype is None:
                raise FormatError("a storage has no element type")
            (elements,) = stream.numbers("<q")
            if elements < 0:
                raise CorruptError(f"storage {_key(key)} has {elements} elements")
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
                f"a view of {size} elements from {offset} of a storage of {root.elements}"
            )
        start = root.start + offset
        self.storages[self._new(key)] = TypedStorage(root.storage, root.dtype, start, start + size)

    def read_tensors(self, stream: _Stream) -> None:
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
        """Return the object of a persistent id."""
        if isinstance(pid, tuple) and len(pid) == 3:
            return self.sources.load(pid[0], pid[2])
        key = _key(pid)
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
            (f"nothing refers to {len(unused):,} of its tensors, which are not carried over",)
            if unused
            else ()
        )
        return (*self.sources.warnings, *unread)

    def _storage(self, node: Node) -> TypedStorage:
        found = self.storages.get(_key(node))
        if found is None:
            raise CorruptError(f"{_key(node)} is not a storage of the file")
        return found

    def _new(self, node: Node) -> str:
        key = _key(node)
        if key in self.storages or key in self.tensors:
            raise AmbiguousError(f"{key} is described twice")
        return key


def _key(node: Node) -> str:
    """Return a key as decimal text."""
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
    """Return an empty storage of the tensor's type for a tensor without one."""
    name = made.name.replace("Tensor", "Storage") if isinstance(made, Global) else ""
    dtype: DType | None = BY_STORAGE.get(name)
    return TypedStorage(Storage(Range(Memory(b""), 0, 0)), dtype)


def pickles(probe: Probe) -> Iterator[Found] | None:
    """Yield the pickles of the records and of any other member.

    In two of the records pickles and numbers alternate.
    """
    if not matches(probe):
        return None
    return _pickles(probe.source, read_members(probe.source, here=True))


def _pickles(source: ByteSource, members: dict[str, TarMember]) -> Iterator[Found]:
    for name, member in members.items():
        _, offset, length = member.data
        if name in RECORDS:
            count = None if name in RECORDS[2:] else 1
            yield PickleStream(name, source, offset, length, TORCH_LOAD, _NOT_TRUSTED, count)
        elif length:
            yield Inner(name, Section(source, offset, length), name.endswith(PICKLES))
