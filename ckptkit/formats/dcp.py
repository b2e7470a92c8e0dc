"""Read and write folders of torch.distributed.checkpoint (DCP). Each rank writes its own shards.

    .metadata                  lists the entries, and the file and offset of each chunk
    __<rank>_<n>.distcp        contains chunks of tensors, and values that are not tensors
    meta.pt                    contains all other entries (a torch.save file that Lightning writes)

:mod:`dcp_metadata` describes ``.metadata``. If the ranks save without collectives, each rank writes
a separate ``__<rank>.metadata`` instead. HuggingFaceStorageWriter writes no metadata file, only
``shard-<rank>-model-<file>-of-<files>.safetensors``. An interrupted save leaves a
``.metadata.tmp``.

torch flattens a nested state_dict before saving. `read` restores the nesting. Like torch's
`dcp_to_torch_save`, `read` returns dicts, lists, and CPU tensors assembled from their chunks.
`read` returns all other values as saved.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from math import prod

from ckptkit.compute.arranged import Arranged, contiguous
from ckptkit.compute.strided import StridedCopy, in_bytes, of_box
from ckptkit.core.bytesource import Extent, Section
from ckptkit.core.checkpoint import Checkpoint, PartOf
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    InputError,
    UnsupportedError,
    placed,
    within,
)
from ckptkit.core.options import Options
from ckptkit.core.plan import Checksummed, ChecksumPlaceholder, OutputFile, Plan, Segment
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import shown, some
from ckptkit.core.tree import Global, Node, Object, join
from ckptkit.core.weights import as_tensor
from ckptkit.formats import safetensors, strict_json, torch_zip, whats_inside
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
from ckptkit.formats.distributed.reading import RankReader
from ckptkit.formats.format import CheckedPart, Defect, Probe
from ckptkit.formats.record import leftovers, refuse_pieces
from ckptkit.formats.table import DCP, is_torch_zip
from ckptkit.formats.zip_reader import MAGIC
from ckptkit.pickles.policy import without_objects
from ckptkit.pickles.streams import NOT_TORCH, Found, Inner, PickleStream
from ckptkit.pickles.writer import write_pickle

SHARD = re.compile(r"shard-[0-9]{5}-model-[0-9]{5}-of-[0-9]{5}\.safetensors")
EXTRA = "meta.pt"
_OURS = re.compile(rf"(__[0-9]{{1,9}})?\.metadata(\.tmp)?|.*\.distcp|{SHARD.pattern}")
_OF_RANK = re.compile(r"__([0-9]{1,9})\.metadata")
_SHARDING, _SAVED = "DCP_SHARDING_INFO", "saved_offsets"


def matches(probe: Probe) -> bool:
    """Return whether this is a complete or incomplete DCP folder, or a `.metadata` file."""
    if probe.is_folder:
        return any(map(_OURS.fullmatch, probe.names))
    return os.path.basename(probe.name) == NAME and probe.source.folder_and_name() is not None


# The data files.
#
# A file ``__<rank>_<n>.distcp`` consists of concatenated items. Each item is a complete torch.save
# archive of one value or one chunk of a tensor. The values come first. Offsets inside an archive
# count from the first byte of the archive.
#
# If torch saves in safetensors format, one safetensors file follows the values. The safetensors
# file contains all tensors, by their names in the state_dict. For each tensor, `.metadata` contains
# the offset of the safetensors file. The header of the safetensors file contains the offset of the
# tensor's bytes. The ``__metadata__`` of the safetensors file contains the position of each chunk
# in its tensor, as JSON: {name: {"saved_offsets": [...]}}.
# (torch/distributed/checkpoint/filesystem.py, `_write_item`)
#
# HuggingFaceStorageWriter writes only such safetensors files, with flat names. The files do not
# store the shape of a complete tensor. ckptkit computes the shape from the end of the last chunk.
# (torch/distributed/checkpoint/hf_storage.py)


# The tensors of a safetensors file, and the position of each chunk in its tensor. The positions are
# empty if the file does not store them.
ShardHeader = tuple[Mapping[Node, Node], Mapping[str, Shape]]


class ItemFiles:
    """The data files of a folder. Each file is opened when it is first needed."""

    def __init__(self, probe: Probe) -> None:
        place = None if probe.is_folder else probe.source.folder_and_name()
        self.folder = probe.folder if place is None else place[0]
        self.names = frozenset(self.folder.list())
        self._headers: dict[tuple[str, int], ShardHeader] = {}  # by file name and offset

    def index(self) -> DcpIndex:
        """Return the index of the folder.

        Read `.metadata`, or the metadata file of every rank, or the headers of safetensors files.
        """
        names = self.names
        ranks = sorted((int(n[1]), name) for name in names if (n := _OF_RANK.fullmatch(name)))
        if NAME in names and ranks:
            raise AmbiguousError(f"contains {NAME} and {ranks[0][1]}: two saves in one folder")
        found = []
        for name in [NAME] if NAME in names else [name for _, name in ranks]:
            source = self.folder.open(name)
            with placed(source.name):
                found.append(read_metadata(source))
        if found:
            return merged(found)
        shards = sorted(filter(SHARD.fullmatch, names))
        if not shards:
            raise FormatError(
                f"has no {NAME}: the save did not finish, or the file was not copied",
                hint="copy it if it exists: names that begin with a dot are easily overlooked",
            )
        tensors: dict[str, tuple[DType, list[Chunk]]] = {}
        for name in shards:
            with placed(self.folder.open(name).name):
                self._add_shard(tensors, name)
        entries: dict[str, Entry] = {}
        for name, (dtype, chunks) in tensors.items():
            ends = ([o + n for o, n in zip(*each[:2], strict=True)] for each in chunks)
            shape = tuple(map(max, zip(*ends, strict=True)))
            entries[name] = Whole(dtype, shape, tuple(c for c in chunks if 0 not in c.sizes))
        open_end = (
            "the shards do not store the shapes of whole tensors: ckptkit cannot detect a missing "
            "last shard"
        )
        return DcpIndex(entries, {}, (open_end,))

    def _add_shard(self, found: dict[str, tuple[DType, list[Chunk]]], file: str) -> None:
        tensors, positions = self.header(file)
        for name, node in tensors.items():
            tensor = as_tensor(node)
            if tensor is None:
                raise FormatError(f"contains {shown(name)}, which is not a tensor")
            rank = tensor.ndim
            offsets = positions.get(name, (0,) * rank)
            dtype, chunks = found.setdefault(name, (tensor.dtype, []))
            if dtype != tensor.dtype or any(len(each.sizes) != rank for each in chunks):
                raise CorruptError(
                    f"contains {shown(name)} with another dtype or number of dimensions than "
                    "earlier shards"
                )
            if len(offsets) != rank:
                raise CorruptError(
                    f"contains {shown(name)} with {rank} dimensions, but {len(offsets)} offsets"
                )
            chunks.append(Chunk(offsets, tensor.shape, Place(file, 0, tensor.nbytes)))

    def check(self, places: Iterable[Place]) -> None:
        """Raise CorruptError unless every item is inside its file and no two items overlap."""
        by_file: dict[str, set[Place]] = {}
        for place in places:
            by_file.setdefault(place.file, set()).add(place)
        missing = sorted(name for name in by_file if name not in self.folder)
        if missing:
            raise CorruptError(
                f"{len(missing):,} of {len(by_file):,} files are missing: {some(missing)}",
                hint="the save did not finish, or files were not copied: copy the missing ones",
            )
        for name, held in by_file.items():
            file = self.folder.open(name)
            end = start = -1
            for place in sorted(held):
                Section(file, place.offset, place.length)  # raises if the file is too short
                # In the metadata, all tensors of a safetensors file have the offset of that file.
                shared = place.offset == start and not self.is_archive(place)
                if place.offset < end and not shared:
                    what = f"two of its items overlap at byte {place.offset:,}"
                    raise CorruptError(what, where=file.name)
                start, end = place.offset, max(end, place.offset + place.length)

    def is_archive(self, place: Place) -> bool:
        """Return whether an item begins like a torch.save archive."""
        return self.folder.open(place.file).read(place.offset, min(4, place.length)) == MAGIC

    def at(self, name: str, place: Place) -> AbstractContextManager[None]:
        """Return a context that adds `name` and `place` to errors."""
        file = self.folder.open(place.file)
        return placed(file.name, f"{shown(name)}, at byte {place.offset:,}: ")

    def probe(self, place: Place) -> Probe:
        return Probe(Section(self.folder.open(place.file), place.offset, place.length))

    def value(self, place: Place) -> Checkpoint:
        """Return the value that torch.save wrote at `place`."""
        probe = self.probe(place)
        if not is_torch_zip(probe):
            raise CorruptError("the item is not a torch.save archive")
        return torch_zip.read(probe)

    def chunk(self, name: str, dtype: DType, chunk: Chunk) -> Tensor:
        """Return the tensor that contains a chunk.

        Raises CorruptError if the tensor contradicts the metadata.
        """
        place = chunk.place
        with self.at(name, place):
            if self.is_archive(place):
                node = self.value(place).root
            else:
                tensors, offsets = self.header(place.file, place.offset)
                if offsets.get(name, chunk.offsets) != chunk.offsets:
                    what = "the chunk has other offsets in the file than in the metadata"
                    raise CorruptError(what)
                node = tensors.get(name)
            tensor = as_tensor(node)
            if tensor is None:
                raise CorruptError("the tensor is missing from the file")
            if (tensor.dtype, tensor.shape) != (dtype, chunk.sizes):
                raise CorruptError(
                    f"the chunk is {tensor.dtype} {tensor.shape}, but the metadata lists "
                    f"{dtype} {chunk.sizes}"
                )
            if tensor.storage is None or tensor.layout != "strided":
                what = f"the item is a {tensor.layout} tensor without bytes of its own"
                raise UnsupportedError(what)
            return tensor

    def header(self, file: str, offset: int = 0) -> ShardHeader:
        """Return the header of the safetensors file that begins at `offset` of `file`."""
        if (file, offset) not in self._headers:
            source = self.folder.open(file)
            read = safetensors.read(Probe(Section(source, offset, source.size - offset)))
            sharding = strict_json.parse(read.extras.get(_SHARDING, "{}").encode(), _SHARDING)
            if not isinstance(sharding, dict):
                raise FormatError(f"{_SHARDING} is not an object")
            offsets: dict[str, Shape] = {}
            for name, entry in sharding.items():
                saved = entry.get(_SAVED) if isinstance(entry, dict) else None
                if not isinstance(saved, list) or not all(
                    type(n) is int and 0 <= n < 1 << 63 for n in saved
                ):
                    raise FormatError(f"{_SHARDING} has no {_SAVED}")
                offsets[name] = tuple(saved)
            tensors = read.root if isinstance(read.root, dict) else {}
            self._headers[file, offset] = tensors, offsets
        return self._headers[file, offset]


@dataclass(frozen=True, slots=True, eq=False)
class ChunkRecord:
    """The bytes of a chunk. The file is opened when the bytes are needed."""

    files: ItemFiles
    name: str
    dtype: DType
    chunk: Chunk

    @property
    def length(self) -> int:
        return self.dtype.nbytes(prod(self.chunk.sizes))

    def locate(self) -> Extent:
        return contiguous(self.files.chunk(self.name, self.dtype, self.chunk)).locate()


def _assembled(files: ItemFiles, name: str, entry: Whole) -> tuple[Arranged, Shape]:
    """Return the bytes of a complete tensor, assembled from its chunks, and the tensor's strides.

    If the saved tensor was dense in memory (channels_last, transposed), return the saved strides.
    Otherwise, for example for an expanded tensor, return row-major strides.
    """
    shape, dtype, saved = entry.shape, entry.dtype, entry.stride
    stride = contiguous_stride(shape)
    order = tuple(range(len(shape)))  # axes in memory order, the outermost axis first
    if saved is not None and 0 not in shape:
        by_stride = tuple(sorted(order, key=lambda axis: -saved[axis]))
        dense = contiguous_stride(tuple(shape[axis] for axis in by_stride))
        steps = zip(by_stride, dense, strict=True)
        if all(shape[axis] == 1 or saved[axis] == step for axis, step in steps):
            order, stride = by_stride, saved

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
        for number, chunk in enumerate(entry.chunks)
    ]
    itemsize = dtype.itemsize
    if dtype.bits % 8:
        found = in_bytes(copies, dtype.bits)
        if found is None:
            raise UnsupportedError(
                f"{shown(name)}: cannot read chunks of {dtype} that begin inside a byte"
            )
        copies, itemsize = found, 1
    records = tuple(ChunkRecord(files, name, dtype, chunk) for chunk in entry.chunks)
    return Arranged(records, tuple(copies), itemsize, dtype.nbytes(prod(shape))), stride


# Reading the nested state_dict


def read(probe: Probe) -> Checkpoint:
    """Read the metadata of all tensors in a DCP folder, and all values that are not tensors.

    The header of a chunk is read, and compared with the metadata, when the bytes of the chunk are
    needed.
    """
    files, nest = ItemFiles(probe), Nest()
    folder, names = files.folder, files.names
    index = files.index()
    globals_: dict[Global, None] = {}
    warnings = list(index.warnings)
    storages: dict[Whole, Storage] = {}
    files.check(_places(index))
    for name, entry in index.entries.items():
        if isinstance(entry, Place):
            with files.at(name, entry):
                item = files.value(entry)
            globals_ |= dict.fromkeys(item.globals)
            warnings += [within(name, warning) for warning in item.warnings]
            node = item.root
        else:
            entry = covered(name, entry)
            node = Tensor(None, entry.dtype, entry.shape, (), layout=entry.odd)
            if not entry.odd:
                record, stride = _assembled(files, name, entry)
                storage = Storage(record)
                known = storages.setdefault(entry, storage)
                # If two entries refer to the same bytes of the files, their tensors share a
                # storage.
                if entry.chunks and all(files.is_archive(each.place) for each in entry.chunks):
                    storage = known
                node = Tensor(storage, entry.dtype, entry.shape, stride)
        nest.put(index.paths.get(name, (name,)), node)
    if EXTRA in names:  # Lightning adds the entries of this file at the top level
        reader = RankReader(folder)
        extra = reader.read(EXTRA)
        globals_ |= reader.globals
        warnings += [within(EXTRA, warning) for warning in extra.warnings]
        if not isinstance(extra.root, dict):
            raise FormatError("does not contain a dict", where=extra.name)
        for key, node in extra.root.items():
            if key in nest.root:
                raise AmbiguousError(f"the entry {key!r} is in two files, {NAME} and {EXTRA}")
            nest.root[key] = node
    used = {place.file for place in _places(index)}
    unused = sorted(name for name in names if name.endswith(".distcp") and name not in used)
    if unused:
        warnings.append(
            f"the metadata does not refer to {len(unused):,} data files, which may be from other "
            f"saves: {some(unused)}"
        )
    if any(name.endswith(".metadata.tmp") for name in names):
        warnings.append("a later save was interrupted and may have overwritten some of the data")
    return Checkpoint(
        nest.finished(), DCP.name, folder, globals=tuple(globals_), warnings=tuple(warnings)
    )


def _places(index: DcpIndex) -> Iterator[Place]:
    """Yield the file, offset and length of every item in the metadata."""
    for entry in index.entries.values():
        if isinstance(entry, Place):
            yield entry
        else:
            yield from (chunk.place for chunk in entry.chunks)


def check(probe: Probe) -> Iterator[CheckedPart | Defect]:
    """For every item whose file exists, yield the byte ranges to verify, and the defects.

    A torch.save archive has a CRC-32 for each record. A safetensors file has no checksums. Raises
    the errors of `ItemFiles.index`.
    """
    files = ItemFiles(probe)
    index = files.index()
    there = {place for place in _places(index) if place.file in files.folder}
    for place in sorted(there):
        try:
            archive = files.probe(place).zip if files.is_archive(place) else None
            if archive is not None:
                yield from whats_inside.members(archive, place.file, f"at byte {place.offset:,}: ")
        except InputError as error:
            there.discard(place)
            yield Defect(f"at byte {place.offset:,}: {error.message}", place.file)
    for name, entry in index.entries.items():
        if isinstance(entry, Place):
            continue
        for chunk in entry.chunks:
            try:
                if chunk.place in there:
                    files.chunk(name, entry.dtype, chunk)
            except InputError as error:
                yield Defect(error.message, os.path.basename(error.where or ""), (name,))
    if EXTRA in files.names:
        extra = Probe(files.folder.open(EXTRA))
        if is_torch_zip(extra) and extra.zip is not None:
            yield from whats_inside.members(extra.zip, EXTRA)


def pickles(probe: Probe) -> Iterator[Found] | None:
    """Yield the pickles of a DCP file. Return None if its folder has no metadata.

    A data file consists of concatenated archives. Only the metadata locates all of these archives.
    """
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
        index = ItemFiles(probe).index()
        wanted = {(each.offset, each.length) for each in _places(index) if each.file == place[1]}
        parts = [
            Inner(f"item at byte {at:,}", Section(probe.source, at, length))
            for at, length in sorted(wanted)
        ]
    except CkptkitError:
        return None
    return iter(parts) if parts else None


# Writing a folder that torch.distributed.checkpoint loads with any number of ranks
#
#     .metadata         a pickle of protocol 2 that describes every tensor as one chunk
#     __0_0.distcp      one torch.save archive for each value, then one for each tensor
#
# The archives contain contiguous CPU tensors. If several tensors view the same elements of one
# storage, the file contains one archive for all of them.


DATA = "__0_0.distcp"
VERSION = "1.0.0"


def layout(checkpoint: Checkpoint, options: Options) -> Plan:
    """Plan a folder with the whole nested tree.

    Raises CollisionError if two entries have the same flat name (keys joined by dots). Raises
    UsageError if the root is not a dict and has no weights. Raises UnsupportedError if a tensor is
    only one rank's shard. Also raises the errors of the pickle writer.
    """
    root, notes = checkpoint.root, list[str]()
    if not isinstance(root, dict):
        values, left = leftovers(checkpoint)
        root, notes = dict(checkpoint.weights), [*left, *(f"dropped: {name}" for name in values)]
    if options.objects == "drop":
        root, dropped = without_objects(root)
        notes += dropped
    flat = Flat(root)
    refuse_pieces({name: node for name, (_, node) in flat.entries.items()})
    tensors = {
        name: tensor
        for name, (_, node) in flat.entries.items()
        if (tensor := as_tensor(node)) is not None and _is_saved_as_tensor(tensor)
    }
    places: dict[str, Place] = {}
    stored: dict[object, Place] = {}  # the archive of each tensor, by `Tensor.elements_key`
    segments: list[Segment] = []
    noted: list[str] = []
    size = sums = 0  # the next checksum gets the number `sums`
    for name in sorted(flat.entries, key=lambda name: name in tensors):  # values come first
        node = flat.entries[name][1]
        if name in tensors:
            tensor = tensors[name]
            same = tensor.elements_key
            if same in stored and options.ties == "alias":
                places[name] = stored[same]
                continue
            node = _plain(tensor)
        plan = torch_zip.layout(Checkpoint(node), options)
        (file,) = plan.files
        segments += _renumbered(file.segments, sums)
        sums += 1 + max((each.number for each in file.segments if isinstance(each, Checksummed)),
                        default=-1)  # fmt: skip
        places[name] = Place(DATA, size, file.size)
        if name in tensors:
            stored[same] = places[name]
        size += file.size
        noted += plan.notes
    notes += dict.fromkeys(noted)
    # The notes below name data that is dropped or changed when the tree is flattened.
    for what, paths in (
        ("dropped, as in torch: dicts without entries ({})", flat.empty),
        ("keys that are not strings were written as strings, as in torch: {}", flat.stringified),
        ("dropped: attributes such as _metadata of {}", flat.attributes),
        (
            "dropped: metadata of the input file ({})",
            [(name,) for name in checkpoint.extras if name != "format"],
        ),
    ):
        if paths:
            notes.append(what.format(some(join(path) or "the root" for path in paths)))
    metadata = write_pickle(_metadata(flat, tensors, places), lambda typed: ()).data
    files = OutputFile(NAME, (metadata,)), OutputFile(DATA, tuple(segments), keeps_sums=True)
    return Plan(files, tuple(notes), len(tensors))


def _is_saved_as_tensor(tensor: Tensor) -> bool:
    """Return whether torch saves the tensor as chunks of bytes, not as a pickled value."""
    plain = tensor.storage is not None and tensor.layout == "strided" and tensor.kind != "ndarray"
    return plain and tensor.dtype.kind != "quantized" and tensor.dtype.bits % 8 == 0


def _plain(tensor: Tensor) -> Tensor:
    """Return a row-major CPU tensor with the same elements and a separate storage."""
    record, storage = contiguous(tensor), tensor.storage
    crc = storage.crc32 if storage is not None and record is storage.record else None
    return Tensor(
        Storage(record, crc32=crc), tensor.dtype, tensor.shape, contiguous_stride(tensor.shape)
    )


def _renumbered(segments: Iterable[Segment], by: int) -> Iterator[Segment]:
    """Add `by` to the number of each checksum in the segments of an archive.

    The earlier archives of the file use the numbers below `by`.
    """
    for segment in segments:
        if isinstance(segment, Checksummed):
            yield Checksummed(segment.extent, segment.number + by)
        elif isinstance(segment, ChecksumPlaceholder):
            holes = tuple((position, number + by) for position, number in segment.holes)
            yield ChecksumPlaceholder(segment.template, holes)
        else:
            yield segment


def _metadata(flat: Flat, tensors: Mapping[str, Tensor], places: Mapping[str, Place]) -> Object:
    described: dict[Node, Node] = {}
    stored: dict[Node, Node] = {}
    for name in flat.entries:
        index: dict[str, Node] = {"fqn": name}
        if name in tensors:
            tensor = tensors[name]
            index |= {"offset": _size((0,) * len(tensor.shape)), "index": 0}
            layout = Object(Global("torch.serialization", "_get_layout"), ("torch.strided",))
            dtype = Global("torch", tensor.dtype.name)
            memory = Object(Global(METADATA, "_MEM_FORMAT_ENCODING"), (0,))
            state = (dtype, layout, tensor.requires_grad, memory, False)
            size = _size(tensor.shape)
            chunk = {"offsets": _size((0,) * len(tensor.shape)), "sizes": size}
            fields = {
                "properties": _object("TensorProperties", state),
                "size": size,
                "chunks": [_object("ChunkStorageMetadata", chunk)],
            }
            described[name] = _object("TensorStorageMetadata", fields)
        else:
            described[name] = _object("BytesStorageMetadata")
        info = dict(zip(("relative_path", "offset", "length"), places[name], strict=True))
        stored[_object("MetadataIndex", index)] = _object("_StorageInfo", info, STORAGE)
    whole = {
        "state_dict_metadata": described,
        "planner_data": {name: path for name, (path, _) in flat.entries.items()},
        "storage_data": stored,
        "storage_meta": None,
        "version": VERSION,
    }
    return _object("Metadata", whole)


def _size(shape: Shape) -> Object:
    return Object(Global("torch", "Size"), (shape,))


def _object(name: str, state: Node = None, module: str = METADATA) -> Object:
    """Return a pickled object of class `name` with the state `state`.

    Unpickling does not call __init__.
    """
    made = Object(Global(module, name), new=True)
    if state is not None:
        made.steps.append(("build", state))
    return made


# ckptkit refuses a single data file, because only the metadata of the folder locates the items.


_RANK = re.compile(r"__([0-9]{1,9})_[0-9]{1,9}\.distcp")


def matches_shard(probe: Probe) -> bool:
    return not probe.is_folder


def read_shard(probe: Probe) -> Checkpoint:
    """Raise UnsupportedError. The hint contains the command that converts the whole folder."""
    part = part_of(probe)
    missing = "" if part.folder else "; its folder has no .metadata with the offsets of tensors"
    raise part.refusal(f"its tensors cannot be read alone{missing}")


def part_of(probe: Probe) -> PartOf:
    """Describe the file as a shard of its folder.

    If the folder has no metadata, set the field `folder` to None.
    """
    found = _RANK.fullmatch(os.path.basename(probe.name))
    which = f"a data file of rank {int(found[1]):,}" if found else "a data file"
    place = probe.source.folder_and_name()
    try:
        has_metadata = place is not None and any(map(is_metadata, place[0].list()))
    except CkptkitError:
        has_metadata = False
    folder = folder_beside(probe.name) if has_metadata else None
    return PartOf(
        DCP.name, f"{which} of a torch.distributed.checkpoint folder", "", folder, alone=False
    )
