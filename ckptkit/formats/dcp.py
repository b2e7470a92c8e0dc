"""torch.distributed.checkpoint (DCP): a folder where each process writes its part of the tensors.

    .metadata                  the entries, their chunks and the place of each: :mod:`dcp_metadata`
    __<rank>_<n>.distcp        the chunks and values
    meta.pt                    written by Lightning next to them: a torch file with all the rest

Without collectives each rank writes a ``__<rank>.metadata`` of its own instead.
HuggingFaceStorageWriter writes nothing but ``shard-<rank>-model-<file>-of-<files>.safetensors``:
no metadata. A ``.metadata.tmp`` remains after an interrupted save.

A state_dict is flattened to be saved: :mod:`dcp_metadata`. Read back, it is what torch's
`dcp_to_torch_save` gives: dicts and lists, and tensors on the CPU, assembled from their chunks.
Values that are not tensors are as they were saved.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from os.path import basename
from typing import NamedTuple

from ckptkit.compute import arranged
from ckptkit.compute.arranged import Arranged, contiguous
from ckptkit.compute.strided import StridedCopy, in_bytes, of_box
from ckptkit.core.bytesource import ByteSource, Extent, Folder, Section
from ckptkit.core.checkpoint import Checkpoint, PartOf
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    InputError,
    UnsupportedError,
    within,
)
from ckptkit.core.options import Options
from ckptkit.core.plan import Deferred, OutputFile, Plan, Segment, Summed
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import shown
from ckptkit.core.tree import Global, Node, Object, Path, join
from ckptkit.core.weights import as_tensor
from ckptkit.formats import safetensors, strict_json, whats_inside
from ckptkit.formats import torch_zip as zip_archive
from ckptkit.formats import torch_zip as zip_layout
from ckptkit.formats.dcp_metadata import (
    METADATA,
    NAME,
    STORAGE,
    Chunk,
    DcpIndex,
    Entry,
    Flat,
    Nest,
    Place,
    Whole,
    covered,
    is_metadata,
    merged,
    read_metadata,
)
from ckptkit.formats.distributed.parts import folder_beside
from ckptkit.formats.format import CheckedPart, Defect, Probe
from ckptkit.formats.record import leftovers, refuse_pieces
from ckptkit.formats.table import DCP, TORCH_LEGACY, TORCH_ZIP, is_torch_zip
from ckptkit.formats.zip_reader import MAGIC
from ckptkit.pickles.objects import without_objects
from ckptkit.pickles.streams import NOT_TORCH, Found, Inner, PickleStream
from ckptkit.pickles.writer import write_pickle

# torch.distributed.checkpoint (DCP): a folder where each process writes its part of the tensors.
#
#     .metadata                  the entries, their chunks and the place of each:
# :mod:`dcp_metadata`
#     __<rank>_<n>.distcp        the chunks and values
#     meta.pt                    written by Lightning next to them: a torch file with all the rest
#
# Without collectives each rank writes a ``__<rank>.metadata`` of its own instead.
# HuggingFaceStorageWriter writes nothing but ``shard-<rank>-model-<file>-of-<files>.safetensors``:
# no metadata. A ``.metadata.tmp`` remains after an interrupted save.
#
# A state_dict is flattened to be saved: :mod:`dcp_metadata`. Read back, it is what torch's
# `dcp_to_torch_save` gives: dicts and lists, and tensors on the CPU, assembled from their chunks.
# Values that are not tensors are as they were saved.


_OURS = re.compile(
    r"(__[0-9]{1,9})?\.metadata(\.tmp)?|.*\.distcp"
    r"|shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors"
)


def matches(probe: Probe) -> bool:
    """Return whether this is a DCP folder, finished or not, or the `.metadata` in it."""
    if probe.is_folder:
        return any(map(_OURS.fullmatch, probe.names))
    return os.path.basename(probe.name) == NAME and probe.source.folder_and_name() is not None


# The files of a torch.distributed.checkpoint folder that hold the data.
#
#     __<rank>_<n>.distcp        items one after another, values first; each item is a whole archive
#                                of torch.save of one tensor (a chunk of one) or value, its offsets
#                                relative to its own first byte
#
# With safetensors as the serialization, values are followed by one safetensors file with all
# tensors
# instead, each under its name in the state_dict. `.metadata` then gives the offset of that file for
# each of them and not their own, which its header has; the place of a chunk is in
# ``__metadata__``, as JSON: {name: {"saved_offsets": [...]}}.
# (torch/distributed/checkpoint/filesystem.py, `_write_item`)


_SHARDING = "DCP_SHARDING_INFO"
_SAVED = "saved_offsets"


class Header(NamedTuple):
    """The tensors of a safetensors file, and their offsets in the whole where the file has them."""

    tensors: Mapping[str, Node]
    offsets: Mapping[str, Shape]


@dataclass(eq=False)
class Files:
    """The data files of a folder, opened on demand."""

    folder: Folder
    _headers: dict[tuple[str, int], Header] = field(
        default_factory=dict
    )  # of safetensors files, by place

    def check(self, places: Iterable[Place]) -> None:
        """Raise CorruptError unless every item is inside its file and overlaps no other."""
        by_file: dict[str, set[Place]] = {}
        for place in places:
            by_file.setdefault(place.file, set()).add(place)
        missing = sorted(name for name in by_file if name not in self.folder)
        if missing:
            some = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
            raise CorruptError(
                f"{len(missing):,} of {len(by_file):,} files are missing: {some}",
                hint="the save did not finish, or not every file was copied: copy the missing ones",
            )
        for name, held in by_file.items():
            self._check_file(self.folder.open(name), sorted(held))

    def _check_file(self, file: ByteSource, places: list[Place]) -> None:
        end = start = -1
        for place in places:
            Section(file, place.offset, place.length)  # which must be there
            shared = place.offset == start and not self.is_archive(
                place
            )  # the tensors of a safetensors file
            if place.offset < end and not shared:
                raise CorruptError(
                    f"two of its items overlap at byte {place.offset:,}", where=file.name
                )
            start, end = place.offset, max(end, place.offset + place.length)

    def is_archive(self, place: Place) -> bool:
        """Return whether the item begins like an archive of torch.save."""
        return self.folder.open(place.file).read(place.offset, min(4, place.length)) == MAGIC

    @contextmanager
    def reading(self, name: str, place: Place) -> Iterator[None]:
        """Name the item in errors raised inside."""
        try:
            yield
        except CkptkitError as error:
            error.message = f"{shown(name)}, at byte {place.offset:,}: {error.message}"
            raise error.at(self.folder.open(place.file).name) from error.__cause__

    def value(self, place: Place) -> Checkpoint:
        """Return the value that torch.save wrote at a place."""
        probe = Probe(Section(self.folder.open(place.file), place.offset, place.length))
        if not is_torch_zip(probe):
            raise CorruptError("an archive of torch.save is missing there")
        return zip_archive.read(probe)

    def chunk(self, name: str, dtype: DType, chunk: Chunk) -> Tensor:
        """Return the tensor that holds a chunk.

        Raises CorruptError where it contradicts the metadata.
        """
        place = chunk.place
        archive = self.is_archive(place)
        tensor = as_tensor(
            self.value(place).root if archive else self._named(place, name, chunk.offsets)
        )
        if tensor is None:
            raise CorruptError("it is not there")
        if (tensor.dtype, tensor.shape) != (dtype, chunk.sizes):
            raise CorruptError(
                f"it is {tensor.dtype} {tensor.shape}, but {dtype} {chunk.sizes} in .metadata"
            )
        if tensor.storage is None or tensor.layout != "strided":
            raise UnsupportedError(f"it is a {tensor.layout} tensor without bytes of its own")
        return tensor

    def _named(self, place: Place, name: str, offsets: Shape) -> Node:
        """Return the named tensor of a safetensors file, which must be the chunk at `offsets`."""
        held = self.header(place.file, place.offset)
        if held.offsets.get(name, offsets) != offsets:
            raise CorruptError("the file holds another chunk of it")
        return held.tensors.get(name)

    def header(self, file: str, offset: int = 0) -> Header:
        """Return the header of the safetensors file from an offset to the end of a file."""
        key = file, offset
        if key not in self._headers:
            source = self.folder.open(file)
            read = safetensors.read(Probe(Section(source, offset, source.size - offset)))
            tensors = read.root if isinstance(read.root, dict) else {}
            self._headers[key] = Header(tensors, _saved_offsets(read.extras.get(_SHARDING, "{}")))
        return self._headers[key]


def _saved_offsets(text: str) -> dict[str, Shape]:
    sharding = strict_json.parse(text.encode(), _SHARDING)
    if not isinstance(sharding, dict):
        raise FormatError(f"{_SHARDING} is not an object")
    return {name: _offsets(entry) for name, entry in sharding.items()}


def _offsets(entry: object) -> Shape:
    found = entry.get(_SAVED) if isinstance(entry, dict) else None
    if not isinstance(found, list) or not all(type(n) is int and 0 <= n < 1 << 63 for n in found):
        raise FormatError(f"{_SHARDING} has no {_SAVED}")
    return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRecord:
    """The plain bytes of a chunk, whose file is opened when they are needed."""

    files: Files
    name: str
    dtype: DType
    chunk: Chunk

    @property
    def length(self) -> int:
        return self.dtype.nbytes(prod(self.chunk.sizes))

    def locate(self) -> Extent:
        with self.files.reading(self.name, self.chunk.place):
            found = self.files.chunk(self.name, self.dtype, self.chunk)
        return contiguous(found).locate()


def assembled(
    files: Files, name: str, dtype: DType, shape: Shape, chunks: Sequence[Chunk], order: Shape
) -> Arranged:
    """Return the bytes of a whole tensor made of chunks.

    `order` lists the axes from the outermost in memory to the innermost.
    """

    def permuted(sizes: Shape) -> Shape:
        return tuple(sizes[axis] for axis in order)

    copies: Sequence[StridedCopy] = [
        of_box(
            permuted(shape),
            permuted(chunk.offsets),
            permuted(chunk.sizes),
            permuted(contiguous_stride(chunk.sizes)),
            source=number,
        )
        for number, chunk in enumerate(chunks)
    ]
    itemsize = dtype.itemsize
    if dtype.bits % 8:
        found = in_bytes(copies, dtype.bits)
        if found is None:
            raise UnsupportedError(f"{shown(name)}: chunks of {dtype} begin inside a byte")
        copies, itemsize = found, 1
    records = tuple(ChunkRecord(files, name, dtype, chunk) for chunk in chunks)
    return Arranged(records, tuple(copies), itemsize, dtype.nbytes(prod(shape)))


def memory_order(shape: Shape, stride: Shape | None) -> tuple[Shape, Shape]:
    """Return the axes from the outermost in memory to the innermost, and their strides.

    They are those of the tensor that was saved, where it is dense in memory (channels_last,
    transposed); row-major for anything else, such as an expanded tensor.
    """
    axes = tuple(range(len(shape)))
    if stride is not None and 0 not in shape:
        order = tuple(sorted(axes, key=lambda axis: -stride[axis]))
        dense = contiguous_stride(tuple(shape[axis] for axis in order))
        if all(
            shape[axis] == 1 or stride[axis] == step
            for axis, step in zip(order, dense, strict=True)
        ):
            return order, stride
    return axes, contiguous_stride(shape)


# The folder that HuggingFaceStorageWriter of torch.distributed.checkpoint writes unconsolidated.
#
#     shard-<rank>-model-<file>-of-<files>.safetensors        five digits each, ranks from 1
#
# Each is a safetensors file whose ``__metadata__`` locate its chunks (:mod:`items`). Names are
# flat.
# The size of a tensor is not stored: it reaches as far as its chunks do.
# (torch/distributed/checkpoint/hf_storage.py)


SHARD = re.compile(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors")
_OPEN = (
    "the shards do not store the shapes of whole tensors: a missing last shard would not be noticed"
)


def describe(files: Files, names: Iterable[str]) -> DcpIndex:
    """Return the index that the headers of the shards give.

    Raises CorruptError where they contradict each other.
    """
    found: dict[str, tuple[DType, list[Chunk]]] = {}
    for file in names:
        try:
            _add_shard(found, files, file)
        except CkptkitError as error:
            raise error.at(files.folder.open(file).name) from error.__cause__
    entries: dict[str, Entry] = {}
    for name, (dtype, chunks) in found.items():
        entries[name] = Whole(
            dtype, _shape(chunks), tuple(chunk for chunk in chunks if 0 not in chunk.sizes)
        )
    return DcpIndex(entries, {}, (_OPEN,))


def _add_shard(found: dict[str, tuple[DType, list[Chunk]]], files: Files, file: str) -> None:
    shard = files.header(file)
    for name, node in shard.tensors.items():
        tensor = as_tensor(node)
        if tensor is None:
            raise FormatError(f"holds {shown(name)}, which is not a tensor")
        offsets = shard.offsets.get(name, (0,) * len(tensor.shape))
        dtype, chunks = found.setdefault(name, (tensor.dtype, []))
        if dtype != tensor.dtype or any(len(each.sizes) != len(tensor.shape) for each in chunks):
            raise CorruptError(
                f"holds {shown(name)} with another dtype or rank than earlier shards"
            )
        if len(offsets) != len(tensor.shape):
            raise CorruptError(
                f"holds {shown(name)} of {len(tensor.shape)} dimensions at {offsets}"
            )
        chunks.append(Chunk(offsets, tensor.shape, Place(file, 0, tensor.nbytes)))


def _shape(chunks: list[Chunk]) -> Shape:
    """Return the shape of a tensor: as far as its chunks reach in each dimension."""
    ends = [[o + n for o, n in zip(chunk.offsets, chunk.sizes, strict=True)] for chunk in chunks]
    return tuple(map(max, zip(*ends, strict=True)))


# Read a torch.distributed.checkpoint folder as the nested state_dict, tensors on demand.


EXTRA = "meta.pt"
_OF_RANK = re.compile(r"__([0-9]{1,9})\.metadata")


def read(probe: Probe) -> Checkpoint:
    """Read a DCP folder: open every file and read all values; of the tensors, the metadata alone.

    The header of a chunk is compared with the metadata when its bytes are located.
    """
    folder = folder_of(probe)
    names = frozenset(folder.list())
    tree = _Tree(folder)
    found = covered(described(tree.files, names))
    tree.build(found)
    if EXTRA in names:
        tree.add(_read_extra(folder))
    warnings = (*found.warnings, *tree.warnings, *_noticed(found, names))
    return Checkpoint(
        tree.nest.finished(), DCP.name, folder, globals=tuple(tree.globals), warnings=warnings
    )


def folder_of(probe: Probe) -> Folder:
    """Return the folder, or the folder of the `.metadata` that was named."""
    if probe.is_folder:
        return probe.folder
    place = probe.source.folder_and_name()
    assert place is not None
    return place[0]


def described(files: Files, names: frozenset[str]) -> DcpIndex:
    """Return the index: from the one `.metadata`, those of all ranks, or safetensors headers."""
    ranks = sorted((int(found[1]), name) for name in names if (found := _OF_RANK.fullmatch(name)))
    if NAME in names and ranks:
        raise AmbiguousError(f"has a {NAME} and a {ranks[0][1]}: two saves in one folder")
    if NAME in names or ranks:
        sources = [NAME] if NAME in names else [name for _, name in ranks]
        return merged([_read_one(files.folder, name) for name in sources])
    if shards := sorted(filter(SHARD.fullmatch, names)):
        return describe(files, shards)
    raise FormatError(
        f"has no {NAME}: the save did not finish, or the file was not copied",
        hint="copy it if it exists: names that begin with a dot are easily missed",
    )


def _read_one(folder: Folder, name: str) -> DcpIndex:
    source = folder.open(name)
    try:
        return read_metadata(source)
    except CkptkitError as error:
        raise error.at(source.name) from error.__cause__


class _Tree:
    """The tree under construction, with the warnings found on the way."""

    def __init__(self, folder: Folder) -> None:
        self.files = Files(folder)
        self.nest = Nest()
        self.globals: dict[Global, None] = {}
        self.warnings: list[str] = []
        self._storages: dict[Whole, Storage] = {}

    def build(self, described: DcpIndex) -> None:
        """Put every entry in its place.

        Two tensors that are the same bytes of the files share a storage.
        """
        self.files.check(places(described))
        for name, entry in described.entries.items():
            node = (
                self._tensor(name, entry) if isinstance(entry, Whole) else self._value(name, entry)
            )
            self.nest.put(described.paths.get(name, (name,)), node)

    def _tensor(self, name: str, entry: Whole) -> Tensor:
        if entry.odd:
            return Tensor(None, entry.dtype, entry.shape, (), layout=entry.odd)
        order, stride = memory_order(entry.shape, entry.stride)
        storage = Storage(
            assembled(self.files, name, entry.dtype, entry.shape, entry.chunks, order)
        )
        known = self._storages.setdefault(entry, storage)
        if (
            known is not storage
            and entry.chunks
            and all(self.files.is_archive(chunk.place) for chunk in entry.chunks)
        ):
            storage = known
        return Tensor(storage, entry.dtype, entry.shape, stride)

    def _value(self, name: str, place: Place) -> Node:
        with self.files.reading(name, place):
            return self._root(name, self.files.value(place))

    def _root(self, name: str, item: Checkpoint) -> Node:
        """Return the root of a file in the folder; keep its globals and warnings."""
        self.globals |= dict.fromkeys(item.globals)
        self.warnings += [within(name, warning) for warning in item.warnings]
        return item.root

    def add(self, extra: Checkpoint) -> None:
        """Add the entries of Lightning's own file at the top level, as Lightning does."""
        root = self._root(EXTRA, extra)
        if not isinstance(root, dict):
            raise FormatError("does not hold a dict", where=extra.name)
        for key, node in root.items():
            if key in self.nest.root:
                raise AmbiguousError(f"the entry {key!r} is in two files, {NAME} and {EXTRA}")
            self.nest.root[key] = node


def _read_extra(folder: Folder) -> Checkpoint:
    probe = Probe(folder.open(EXTRA))
    try:
        for each in (TORCH_ZIP, TORCH_LEGACY):
            if each.matches(probe):
                return each.read(probe)
        raise FormatError("is not a file of torch.save")
    except CkptkitError as error:
        raise error.at(probe.name) from error.__cause__


def places(described: DcpIndex) -> Iterator[Place]:
    """Yield the places of all items that the metadata describe."""
    for entry in described.entries.values():
        if isinstance(entry, Place):
            yield entry
        else:
            yield from (chunk.place for chunk in entry.chunks)


def _noticed(described: DcpIndex, names: frozenset[str]) -> Iterator[str]:
    used = {place.file for place in places(described)}
    unused = sorted(name for name in names if name.endswith(".distcp") and name not in used)
    if unused:
        some = ", ".join(unused[:3]) + (", ..." if len(unused) > 3 else "")
        yield (
            f"nothing refers to {len(unused):,} of its data files, of other saves or empty: {some}"
        )
    if any(name.endswith(".metadata.tmp") for name in names):
        yield "a later save was interrupted, and may have replaced some of the data"


# Check a torch.distributed.checkpoint folder: items against the metadata, and checksums.
#
# Items are archives of torch.save, with a CRC-32 for each record, or are in a safetensors file,
# which
# has none.


def check(probe: Probe) -> Iterator[CheckedPart | Defect]:
    """Yield every item whose file exists. Raises what is wrong with the metadata."""
    folder = folder_of(probe)
    files = Files(folder)
    found = described(files, frozenset(folder.list()))
    there = {place for place in places(found) if place.file in folder}
    for place in sorted(there):
        for each in _records(files, place):
            yield each
            if isinstance(each, Defect):
                there.discard(place)
    for name, entry in found.entries.items():
        if isinstance(entry, Whole):
            yield from _chunks(files, name, entry, there)
    if EXTRA in folder:
        extra = Probe(folder.open(EXTRA))
        if is_torch_zip(extra) and extra.zip is not None:
            yield from whats_inside.members(extra.zip, EXTRA)


def _records(files: Files, place: Place) -> Iterator[CheckedPart | Defect]:
    """Yield the records of the archive at a place; nothing for another kind of item."""
    try:
        if not files.is_archive(place):
            return
        inner = Probe(Section(files.folder.open(place.file), place.offset, place.length))
        if inner.zip is not None:
            yield from whats_inside.members(inner.zip, place.file, f"at byte {place.offset:,}: ")
    except InputError as error:
        yield Defect(f"at byte {place.offset:,}: {error.message}", place.file)


def _chunks(files: Files, name: str, entry: Whole, there: set[Place]) -> Iterator[Defect]:
    """Yield the findings on chunks whose own headers contradict the metadata."""
    for chunk in entry.chunks:
        if chunk.place in there and (why := _contradiction(files, name, entry, chunk)) is not None:
            yield Defect(
                f"{shown(name)}, at byte {chunk.place.offset:,}: {why.message}",
                _file(why, chunk),
                (name,),
            )


def _contradiction(files: Files, name: str, entry: Whole, chunk: Chunk) -> CkptkitError | None:
    try:
        files.chunk(name, entry.dtype, chunk)
    except InputError as error:
        return error
    return None


def _file(error: CkptkitError, chunk: Chunk) -> str:
    return basename(error.where) if error.where else chunk.place.file


# Find the pickles of a DCP folder: the metadata, and the archives that the metadata locate.
#
# A data file is one archive after another: without the metadata only the last one would be found.


def pickles(probe: Probe) -> Iterator[Found] | None:
    """Yield the pickles of a DCP file; None for files without metadata beside them."""
    if probe.is_folder:
        return None
    name = os.path.basename(probe.name)
    if is_metadata(name) and probe.head.startswith(b"\x80"):
        loader = "torch.distributed.checkpoint"
        return iter((PickleStream("", probe.source, 0, probe.source.size, loader, NOT_TORCH),))
    place = probe.source.folder_and_name() if name.endswith(".distcp") else None
    if place is None:
        return None
    try:
        folder, name = place
        index = described(Files(folder), frozenset(folder.list()))
        wanted = {(each.offset, each.length) for each in places(index) if each.file == name}
        parts = [
            Inner(f"item at byte {at:,}", Section(probe.source, at, length))
            for at, length in sorted(wanted)
        ]
    except CkptkitError:
        return None
    return iter(parts) if parts else None


# Plan a folder that torch.distributed.checkpoint loads, in any number of processes.
#
#     .metadata         protocol 2; every tensor is one chunk
#     __0_0.distcp      archives of torch.save, one for each entry: values first, then tensors,
#                       contiguous and on the CPU
#
# Tensors that are the same elements of one storage are stored once, under all their names.


DATA = "__0_0.distcp"
VERSION = "1.0.0"
_SHOWN = 4  # names in a note


def layout(checkpoint: Checkpoint, options: Options) -> Plan:
    """Plan a folder with the whole tree, nested as it is.

    Raises CollisionError for two entries whose keys, joined by dots, are one name; UsageError for a
    root that is not a dict and holds no weights; UnsupportedError for pieces of ranks; and what the
    pickle writer raises.
    """
    root, notes = _root(checkpoint)
    if options.objects == "drop":
        root, dropped = without_objects(root)
        notes += dropped
    flat = Flat(root)
    refuse_pieces({name: node for name, (_, node) in flat.entries.items()})
    tensors = {
        name: tensor
        for name, (_, node) in flat.entries.items()
        if (tensor := _tensor(node)) is not None
    }
    data = _Data(options)
    for name, (_, node) in flat.entries.items():
        if name not in tensors:
            data.add(name, node)
    for name, tensor in tensors.items():
        data.add_tensor(name, tensor)
    metadata = write_pickle(_metadata(flat, tensors, data.places), lambda typed: ()).data
    files = OutputFile(NAME, (metadata,)), OutputFile(DATA, tuple(data.segments), keeps_sums=True)
    return Plan(files, (*notes, *dict.fromkeys(data.notes), *_lost(checkpoint, flat)), len(tensors))


def _root(checkpoint: Checkpoint) -> tuple[dict[Node, Node], list[str]]:
    """Return the root if it is a dict, else the weights, and the notes on what is left out."""
    if isinstance(checkpoint.root, dict):
        return checkpoint.root, []
    values, left = leftovers(checkpoint)
    return dict(checkpoint.weights), [*left, *(f"left out: {name}" for name in values)]


def _tensor(node: Node) -> Tensor | None:
    """Return the node as a tensor if torch would save it as one.

    Others, whose bytes are not the whole value, are values.
    """
    tensor = as_tensor(node)
    if (
        tensor is None
        or tensor.storage is None
        or tensor.layout != "strided"
        or tensor.kind == "ndarray"
    ):
        return None
    return None if tensor.dtype.kind == "quantized" or tensor.dtype.bits % 8 else tensor


class _Data:
    """The data file: its segments so far, and the place of each entry."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.segments: list[Segment] = []
        self.places: dict[str, Place] = {}
        self.notes: list[str] = []
        self._size = 0
        self._sums = 0  # checksums with a number
        self._stored: dict[object, Place] = {}

    def add_tensor(self, name: str, tensor: Tensor) -> None:
        """Add a tensor as torch writes it, unless its elements are there already."""
        same = tensor.elements_key
        if same in self._stored and self.options.ties == "alias":
            self.places[name] = self._stored[same]
            return
        self.add(name, _plain(tensor))
        self._stored[same] = self.places[name]

    def add(self, name: str, node: Node) -> None:
        """Add one archive."""
        plan = zip_layout.layout(Checkpoint(node), self.options)
        (file,) = plan.files
        self.segments += _renumbered(file.segments, self._sums)
        self._sums += 1 + max(
            (each.number for each in file.segments if isinstance(each, Summed)), default=-1
        )
        self.places[name] = Place(DATA, self._size, file.size)
        self._size += file.size
        self.notes += plan.notes


def _plain(tensor: Tensor) -> Tensor:
    """Copy the elements in row-major order into a storage of their own on the CPU."""
    record, storage = arranged.contiguous(tensor), tensor.storage
    crc = storage.crc32 if storage is not None and record is storage.record else None
    return Tensor(
        Storage(record, crc32=crc), tensor.dtype, tensor.shape, contiguous_stride(tensor.shape)
    )


def _renumbered(segments: Iterable[Segment], by: int) -> Iterator[Segment]:
    """Shift the checksum numbers of an archive's segments to those of the whole file."""
    for segment in segments:
        if isinstance(segment, Summed):
            yield Summed(segment.extent, segment.number + by)
        elif isinstance(segment, Deferred):
            yield Deferred(
                segment.template,
                tuple((position, number + by) for position, number in segment.holes),
            )
        else:
            yield segment


def _lost(checkpoint: Checkpoint, flat: Flat) -> Iterator[str]:
    """Describe everything that torch's flattening cannot represent, one line each."""
    if flat.empty:
        yield f"left out, as torch does: dicts without entries ({_some(flat.empty)})"
    if flat.texts:
        yield f"keys that are not texts were written as texts, as torch does: {_some(flat.texts)}"
    if flat.attributes:
        yield f"left out: attributes such as _metadata of {_some(flat.attributes)}"
    if names := [(name,) for name in checkpoint.extras if name != "format"]:
        yield f"left out: the metadata of the container ({_some(names)})"


def _some(paths: list[Path]) -> str:
    return ", ".join(join(path) or "the root" for path in paths[:_SHOWN]) + (
        ", ..." if len(paths) > _SHOWN else ""
    )


# The .metadata


def _metadata(flat: Flat, tensors: Mapping[str, Tensor], places: Mapping[str, Place]) -> Object:
    described: dict[Node, Node] = {}
    stored: dict[Node, Node] = {}
    for name in flat.entries:
        tensor = tensors.get(name)
        index = (
            {"fqn": name} if tensor is None else {"fqn": name, "offset": _start(tensor), "index": 0}
        )
        info = dict(zip(("relative_path", "offset", "length"), places[name], strict=True))
        described[name] = _object("BytesStorageMetadata") if tensor is None else _whole(tensor)
        stored[_object("MetadataIndex", index)] = _object("_StorageInfo", info, STORAGE)
    fields = {
        "state_dict_metadata": described,
        "planner_data": {name: path for name, (path, _) in flat.entries.items()},
        "storage_data": stored,
        "storage_meta": None,
        "version": VERSION,
    }
    return _object("Metadata", fields)


def _whole(tensor: Tensor) -> Object:
    """Return the TensorStorageMetadata of a tensor in one chunk."""
    layout = Object(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    contiguous = Object(Global(METADATA, "_MEM_FORMAT_ENCODING"), (0,))
    state = (Global("torch", tensor.dtype.name), layout, tensor.requires_grad, contiguous, False)
    size = _size(tensor.shape)
    chunk = _object("ChunkStorageMetadata", {"offsets": _start(tensor), "sizes": size})
    properties = _object("TensorProperties", state)
    return _object(
        "TensorStorageMetadata", {"properties": properties, "size": size, "chunks": [chunk]}
    )


def _start(tensor: Tensor) -> Object:
    return _size((0,) * len(tensor.shape))


def _size(shape: Shape) -> Object:
    return Object(Global("torch", "Size"), (shape,))


def _object(name: str, state: Node = None, module: str = METADATA) -> Object:
    """Make an object as pickle does: without its constructor, then filled."""
    made = Object(Global(module, name), new=True)
    if state is not None:
        made.steps.append(("build", state))
    return made


# A data file of a DCP folder, named alone: items in a row, which the folder's metadata locate.


_RANK = re.compile(r"__([0-9]{1,9})_[0-9]{1,9}\.distcp")


def matches_shard(probe: Probe) -> bool:
    return not probe.is_folder


def read_shard(probe: Probe) -> Checkpoint:
    """Raise UnsupportedError with the command for the folder."""
    part = part_of(probe)
    missing = "" if part.folder else ", and no .metadata, which locates them, is beside it"
    raise part.refusal(f"its tensors cannot be read alone{missing}")


def part_of(probe: Probe) -> PartOf:
    """Return which part of which folder the file is; the folder is None without metadata."""
    found = _RANK.fullmatch(os.path.basename(probe.name))
    which = f"a data file of rank {int(found[1]):,}" if found else "a data file"
    folder = folder_beside(probe.name) if _has_metadata(probe) else None
    return PartOf(
        DCP.name, f"{which} of a torch.distributed.checkpoint folder", "", folder, alone=False
    )


def _has_metadata(probe: Probe) -> bool:
    place = probe.source.folder_and_name()
    try:
        return place is not None and any(map(is_metadata, place[0].list()))
    except CkptkitError:
        return False
