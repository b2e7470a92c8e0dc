"""Plan a folder that torch.distributed.checkpoint loads, in any number of processes.

    .metadata         protocol 2; every tensor is one chunk
    __0_0.distcp      archives of torch.save, one for each entry: values first, then tensors,
                      contiguous and on the CPU

Tensors that are the same elements of one storage are stored once, under all their names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ckptkit.compute import arranged
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.options import Options
from ckptkit.core.plan import Deferred, OutputFile, Plan, Segment, Summed
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.tree import Global, Node, Object, Path, join
from ckptkit.core.weights import as_tensor
from ckptkit.formats import torch_zip as zip_layout
from ckptkit.formats.dcp.metadata import METADATA, NAME, STORAGE, Place
from ckptkit.formats.dcp.nesting import Flat
from ckptkit.formats.record import leftovers, refuse_pieces
from ckptkit.pickles.objects import without_objects
from ckptkit.pickles.writer import write_pickle

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
