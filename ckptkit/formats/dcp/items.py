"""The files of a torch.distributed.checkpoint folder that hold the data.

    __<rank>_<n>.distcp        items one after another, values first; each item is a whole archive
                               of torch.save of one tensor (a chunk of one) or value, its offsets
                               relative to its own first byte

With safetensors as the serialization, values are followed by one safetensors file with all tensors
instead, each under its name in the state_dict. `.metadata` then gives the offset of that file for
each of them and not their own, which its header has; the place of a chunk is in
``__metadata__``, as JSON: {name: {"saved_offsets": [...]}}.
(torch/distributed/checkpoint/filesystem.py, `_write_item`)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from ckptkit.compute.arranged import Arranged, contiguous
from ckptkit.compute.strided import StridedCopy, in_bytes, of_box
from ckptkit.core.bytesource import ByteSource, Extent, Folder, Section
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import CkptkitError, CorruptError, FormatError, UnsupportedError
from ckptkit.core.tensor import Shape, Tensor, contiguous_stride
from ckptkit.core.text import shown
from ckptkit.core.tree import Node
from ckptkit.core.weights import as_tensor
from ckptkit.formats import safetensors, strict_json
from ckptkit.formats import torch_zip as zip_archive
from ckptkit.formats.dcp.metadata import Chunk, Place
from ckptkit.formats.format import Probe
from ckptkit.formats.table import is_torch_zip
from ckptkit.formats.zip_reader import MAGIC

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
