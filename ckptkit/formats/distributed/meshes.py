"""Parse DTensors and ShardedTensors in a rank's file. Supports the pickles of torch 2.1 to 2.15.

To create an object of either class, a pickle calls ``_rebuild_wrapper_subclass`` with the dtype and
shape of the complete tensor. The states of the objects are:

* The state of a DTensor is a dict. ``_local_tensor`` is the local tensor. ``_spec`` is a
  DTensorSpec with the attributes mesh, placements and shard_order.
* The state of a ShardedTensor is a tuple of five values: local shards, ShardedTensorMetadata,
  ProcessGroupState, spec and a flag.

Until torch 2.9, a mesh contains a tensor of ranks. Since torch 2.10, a mesh contains a list of
ranks and a layout with sizes and strides. A pickle stores the attributes of an object as a dict, or
as a tuple (dict, slots). This module reads no tensor bytes except the tensor of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, product
from math import prod
from typing import NamedTuple

from ckptkit.compute.arranged import contiguous
from ckptkit.compute.operation import stream
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import CkptkitError, CorruptError, FormatError, UnsupportedError
from ckptkit.core.limits import check
from ckptkit.core.tensor import Shape, Tensor, contiguous_stride
from ckptkit.core.text import flatten
from ckptkit.core.tree import Node, Object, Path, walk

REPLICATE, SHARD, STRIDED, PARTIAL = "Replicate", "Shard", "_StridedShard", "Partial"
CLASSES = ("DTensor", "ShardedTensor")
_KINDS = {**{kind: kind for kind in (REPLICATE, SHARD, STRIDED, PARTIAL)}, "_Partial": PARTIAL}
# What the functions of this module raise for a pickled state of an unknown form.
_ODD = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
_RANK_BYTES = 1 << 20  # maximum number of bytes in a mesh's tensor of ranks

Runs = tuple[tuple[int, int], ...]  # sorted ranges (begin, end) of indices in one dimension


class LocalShard(NamedTuple):
    """A rectangular block of a complete tensor, and a tensor that consists of this block.

    ``offsets`` and ``sizes`` give the block's location in each dimension of the complete tensor.
    """

    offsets: Shape
    sizes: Shape
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Mesh:
    """The shape and dimension names of a device mesh, and its ranks in row-major order."""

    shape: Shape
    ranks: tuple[int, ...]
    names: tuple[str, ...] = ()

    def coordinates(self, rank: int) -> Shape:
        """Return the coordinates of a rank. Raises CorruptError if the mesh lacks the rank."""
        if rank not in self.ranks:
            raise CorruptError(f"rank {rank:,} is not on its mesh of {len(self.ranks):,} ranks")
        place = self.ranks.index(rank)
        steps = contiguous_stride(self.shape)
        return tuple(place // step % n for n, step in zip(self.shape, steps, strict=True))


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of a tensor on one mesh dimension.

    A sharded placement has ``dim``, the dimension along which the tensor is split. A strided shard
    also has ``factor``, torch's ``split_factor``.
    """

    kind: str
    dim: int = 0
    factor: int = 1


@dataclass(frozen=True)
class _OfRank:
    """The shards of a tensor in one rank's file. `shape` is the shape of the complete tensor.

    ``rank`` is None if the pickle omits the rank (DTensor until torch 2.9). ``ranks`` lists the
    ranks that have shards of the tensor. ``world`` is the total number of ranks, or the length of
    ``ranks`` if the total number is unknown.
    """

    dtype: DType
    shape: Shape
    rank: int | None
    ranks: tuple[int, ...]
    world: int


@dataclass(frozen=True)
class MeshPiece(_OfRank):
    """The shard of a DTensor in one rank's file.

    ``order`` maps a tensor dimension to the mesh dimensions that shard this dimension, in the order
    of the splits. All tensor dimensions that ``order`` omits were split in the order of the mesh
    dimensions. ``order`` is None if the pickle records no order (until torch 2.9).
    """

    tensor: Tensor
    mesh: Mesh
    placements: tuple[Placement, ...]
    order: Mapping[int, tuple[int, ...]] | None

    def local(self) -> list[Tensor]:
        """Return the tensors of this rank, as saved."""
        return [self.tensor]

    def boxes(self, rank: int | None = None) -> list[LocalShard]:
        """Return the blocks of a rank. The default is the rank that the pickle contains.

        The list is empty if the rank has no elements. Raises CorruptError if the shape of the local
        tensor contradicts the placements. Raises UnsupportedError for Partial placements, and if
        the order of several splits is unknown.
        """
        held = self.rank if rank is None else rank
        if held is None:
            raise CorruptError("its rank is unknown")
        if any(each.kind == PARTIAL for each in self.placements):
            raise UnsupportedError(
                "has a Partial placement: its value is a sum over ranks that was not computed",
                hint="redistribute it in the training script before saving (parameters never "
                "have this placement)",
            )
        coordinates = self.mesh.coordinates(held)
        runs = [self._runs(dim, coordinates) for dim in range(len(self.shape))]
        derived = tuple(sum(b - a for a, b in each) for each in runs)
        if derived != self.tensor.shape:
            raise CorruptError(
                f"rank {held:,} has a shard of shape {self.tensor.shape} of a tensor of shape "
                f"{self.shape}, but its placements give {derived}"
            )
        if not self.tensor.numel:
            return []
        check("chunk_visits", prod(map(len, runs)), "boxes of one tensor")
        boxes = []
        for corner in product(*(zip(each, _starts(each), strict=False) for each in runs)):
            sizes = tuple(end - begin for (begin, end), _ in corner)
            local = view(self.tensor, tuple(at for _, at in corner), sizes)
            boxes.append(LocalShard(tuple(begin for (begin, _), _ in corner), sizes, local))
        return boxes

    def _runs(self, dim: int, coordinates: Shape) -> Runs:
        """Return the index ranges that the rank at `coordinates` has along tensor dimension `dim`.

        FSDP with tensor parallelism splits a tensor along the last mesh dimension first. For such a
        tensor, the split factor of each _StridedShard equals the number of shards along all later
        mesh dimensions. With other split factors, the indices are split as documented for torch's
        _StridedShard.
        """
        placed = enumerate(self.placements)
        cuts = [d for d, each in placed if each.kind != REPLICATE and each.dim == dim]
        strided = [d for d in cuts if self.placements[d].kind == STRIDED]
        factors = {d: self.placements[d].factor for d in cuts}
        sizes = self.mesh.shape
        if strided and all(
            factors[d] == prod(sizes[after] for after in cuts if after > d) for d in strided
        ):
            cuts.reverse()
            factors = dict.fromkeys(cuts, 1)
        elif not strided and self.order is not None:
            cuts = list(self.order.get(dim, cuts))
        elif not strided and len(cuts) > 1:
            raise UnsupportedError(
                f"dimension {dim} is sharded along {len(cuts)} mesh dimensions, in an order "
                "that the file does not record (FSDP with tensor parallelism of torch 2.4 and "
                "before)",
                hint="load it with the torch that wrote it; save full_tensor() of each DTensor",
            )
        runs: Runs = ((0, self.shape[dim]),)
        for d in cuts:
            check("ranks", factors[d], "shards of a strided shard")
            split = [chunk(runs, factors[d], n) for n in range(factors[d])]
            runs = _merged(chunk(part, sizes[d], coordinates[d]) for part in split)
        return runs


@dataclass(frozen=True)
class ShardPiece(_OfRank):
    """The shards of a ShardedTensor in one rank's file."""

    shards: tuple[LocalShard, ...]

    def local(self) -> list[Tensor]:
        """Return the tensors of this rank, as saved."""
        return [each.tensor for each in self.shards]

    def boxes(self, rank: int | None = None) -> list[LocalShard]:
        """Return the blocks of this rank. `rank` is ignored, because the pickle contains it."""
        return [each for each in self.shards if each.tensor.numel]


Piece = MeshPiece | ShardPiece


def chunk(runs: Runs, count: int, index: int) -> Runs:
    """Split `runs` into `count` chunks like torch.chunk, and return chunk number `index`.

    The last chunks may be empty.
    """
    starts = _starts(runs)
    width = -(-starts[-1] // count)
    found = []
    for (begin, end), at in zip(runs, starts, strict=False):
        low, high = max(index * width - at, 0), min((index + 1) * width - at, end - begin)
        if low < high:
            found.append((begin + low, begin + high))
    return tuple(found)


def _starts(runs: Runs) -> list[int]:
    """Return the start index of each run in the concatenation of all runs, and its length."""
    return list(accumulate((end - begin for begin, end in runs), initial=0))


def _merged(parts: Iterable[Runs]) -> Runs:
    """Concatenate lists of runs. Merge adjacent runs."""
    made: list[tuple[int, int]] = []
    for begin, end in flatten(parts):
        if made and made[-1][1] == begin:
            made[-1] = made[-1][0], end
        else:
            made.append((begin, end))
    return tuple(made)


def view(tensor: Tensor, start: Shape, sizes: Shape) -> Tensor:
    """Return a view of the block of `tensor` with offset `start` and shape `sizes`.

    The block must be inside the tensor.
    """
    steps = zip(start, tensor.stride, strict=True)
    offset = tensor.offset + (sum(a * s for a, s in steps) if 0 not in sizes else 0)
    return replace(tensor, shape=sizes, offset=offset, requires_grad=False, kind="tensor")


# Parsing pickled DTensors and ShardedTensors


def piece_of(node: Node, meshes: dict[int, Mesh] | None = None) -> Piece | None:
    """Parse a DTensor or ShardedTensor. Return None for any other node.

    `meshes` caches parsed meshes by the id of their node. The caller must keep the nodes alive.
    Raises FormatError if the pickled state does not have a form that torch writes. The functions
    below raise an ordinary exception in this case.
    """
    name = _class_of(node)
    if name is None:
        return None
    assert isinstance(node, Object) and node.tensor is not None
    whole, state = node.tensor, node.args[3]
    try:
        if name == "DTensor":
            return _mesh_piece(whole, state, {} if meshes is None else meshes)
        return _shard_piece(whole, state)
    except CkptkitError:
        raise
    except _ODD as error:
        raise FormatError(f"contains a {name} in a form that ckptkit does not know") from error


def _class_of(node: Node) -> str | None:
    """Return the class name of a node: "DTensor", "ShardedTensor", or None for other classes."""
    if not isinstance(node, Object) or node.global_ is None or node.tensor is None:
        return None
    if node.global_.name != "_rebuild_from_type_v2" or len(node.args) != 4:
        return None
    name, module = (getattr(node.args[1], each, "") for each in ("name", "module"))
    return name if name in CLASSES and module.startswith("torch.distributed.") else None


def is_piece(node: Node) -> bool:
    """Return whether a node is a DTensor or ShardedTensor."""
    return _class_of(node) is not None


def pieces_in(root: Node) -> Iterator[tuple[Path, Node]]:
    """Yield (path, node) of each DTensor and ShardedTensor in a tree, in order.

    Nodes inside a DTensor or ShardedTensor are not searched.
    """
    found = walk(root, lambda path, node: is_piece(node))
    return ((path, node) for path, node in found if is_piece(node))


def attributes(node: Node) -> dict[str, Node]:
    """Return the attributes of a pickled object from its dict, slots or __setstate__ argument."""
    state = node.state if isinstance(node, Object) else node
    if isinstance(state, tuple) and len(state) == 2:
        return {**attributes(state[0]), **attributes(state[1])}
    return dict(state) if isinstance(state, dict) else {}


def argument(node: Node) -> Node:
    """If the node is a call with one argument (a torch.Size), return the argument.

    Otherwise, return the node.
    """
    is_call = isinstance(node, Object) and isinstance(node.args, tuple) and len(node.args) == 1
    return node.args[0] if is_call else node


def _mesh_piece(whole: Tensor, state: Node, meshes: dict[int, Mesh]) -> MeshPiece:
    held = attributes(state)
    spec = attributes(held["_spec"])
    tensor = held["_local_tensor"]
    if isinstance(tensor, Object):
        tensor = tensor.tensor
    mesh = meshes.get(id(spec["mesh"])) or _mesh(attributes(spec["mesh"]))
    meshes[id(spec["mesh"])] = mesh
    placements = tuple(_placement(each, len(whole.shape)) for each in spec["placements"])
    if not isinstance(tensor, Tensor) or tensor.dtype != whole.dtype:
        raise ValueError
    if len(placements) != len(mesh.shape):
        raise ValueError
    order: dict[int, tuple[int, ...]] = {}
    for entry in spec.get("shard_order") or ():  # (tensor dimension, mesh dimensions)
        inner = attributes(entry)
        args = entry.args if isinstance(entry, Object) else entry
        dim, dims = (inner["tensor_dim"], inner["mesh_dims"]) if inner else args
        order[_integer(dim)] = tuple(map(_integer, dims))
    return MeshPiece(
        whole.dtype, whole.shape, _rank(attributes(spec["mesh"]), mesh), mesh.ranks,
        len(mesh.ranks), tensor, mesh, placements, order if "shard_order" in spec else None,
    )  # fmt: skip


def _mesh(held: Mapping[str, Node]) -> Mesh:
    names = held.get("_mesh_dim_names", held.get("mesh_dim_names")) or ()
    names = tuple(name for name in names if isinstance(name, str))
    if isinstance(held.get("mesh"), Tensor):  # until torch 2.9
        return Mesh(held["mesh"].shape, _integers(held["mesh"]), names)
    ranks = _integers(held["_rank_map"])
    # `layout` contains the size and stride of each mesh dimension. If several dimensions were
    # flattened into one dimension, `layout` contains tuples of sizes and strides for this
    # dimension.
    layout = attributes(held["_layout"])
    if not layout and isinstance(held["_layout"], Object):
        layout = dict(zip(("shape", "stride"), held["_layout"].args, strict=False))
    if "axes" in layout:  # torch 2.13
        inner = [attributes(axis) for axis in layout["axes"]]
        pairs = [(each["shape"], each["stride"]) for each in inner]
    else:
        shapes, strides = layout["shape"], layout["stride"]
        is_list = isinstance(shapes, (tuple, list))
        pairs = list(zip(shapes, strides, strict=True)) if is_list else [(shapes, strides)]
    axes = [list(zip(_flat(shape), _flat(stride), strict=True)) for shape, stride in pairs]
    shape = tuple(prod(n for n, _ in axis) for axis in axes)
    steps = list(flatten(axes))
    check("ranks", prod(max(n, 1) for n, _ in steps), "ranks of a mesh")
    offsets = [sum(corner) for corner in product(*([i * s for i in range(n)] for n, s in steps))]
    # If several sub-meshes have this layout, use the one that contains the rank that wrote the
    # file.
    rank = held.get("_rank")
    place = ranks.index(rank) if type(rank) is int else 0
    base = place - sum(place // step % n * step for n, step in steps)
    return Mesh(shape, tuple(ranks[base + offset] for offset in offsets), names)


def _flat(value: Node) -> list[int]:
    """Flatten nested tuples of integers."""
    if isinstance(value, (tuple, list)):
        return list(flatten(map(_flat, value)))
    return [_integer(value)]


def _placement(node: Node, rank: int) -> Placement:
    made = node.global_ if isinstance(node, Object) else None
    kind = _KINDS.get(made.name if made is not None else "")
    if kind is None:
        raise UnsupportedError(f"contains a tensor with the unsupported placement {made}")
    if kind in (REPLICATE, PARTIAL):
        return Placement(kind)
    state = attributes(node)
    dim = state["dim"] if "dim" in state else node.args[0]
    factor = state.get("split_factor", 1)
    if type(dim) is not int or not -rank <= dim < rank or type(factor) is not int or factor < 1:
        raise ValueError
    return Placement(kind, dim % rank, factor)


def _rank(held: Mapping[str, Node], mesh: Mesh) -> int | None:
    """Return the rank that wrote a mesh. Return None if the pickle omits the rank.

    Until torch 2.9, a mesh shows this rank only if it has `_coordinate_on_dim`.
    """
    rank = held.get("_rank")
    if type(rank) is int:
        return rank
    place = held.get("_coordinate_on_dim")
    if not isinstance(place, (list, tuple)) or len(place) != len(mesh.shape):
        return None
    if any(i not in range(n) for i, n in zip(place, mesh.shape, strict=True)):
        raise ValueError
    steps = zip(place, contiguous_stride(mesh.shape), strict=True)
    index: int = sum(i * step for i, step in steps)
    return mesh.ranks[index]


def _integers(tensor: Node) -> tuple[int, ...]:
    """Return the elements of a small integer tensor."""
    is_tensor = isinstance(tensor, Tensor) and tensor.storage is not None
    if not is_tensor or tensor.dtype.kind != "int" or tensor.nbytes > _RANK_BYTES:
        raise ValueError
    data, size = b"".join(stream(contiguous(tensor).locate())), tensor.dtype.itemsize
    numbers = (data[at : at + size] for at in range(0, len(data), size))
    return tuple(int.from_bytes(number, "little", signed=True) for number in numbers)


def _shard_piece(whole: Tensor, state: Node) -> ShardPiece:
    local, metadata, group, *_ = state
    described, process = attributes(metadata), attributes(group)
    listed = list(map(_listed, described["shards_metadata"]))
    rank, world = _integer(process["global_rank"]), _integer(process["global_world_size"])
    shards = []
    for each in local:
        held = attributes(each)
        _, offsets, sizes = _listed(held["metadata"])
        tensor = held["tensor"]
        if not isinstance(tensor, Tensor) or (tensor.dtype, tensor.shape) != (whole.dtype, sizes):
            raise ValueError
        if (rank, offsets, sizes) not in listed or _sizes(described["size"]) != whole.shape:
            raise ValueError
        shards.append(LocalShard(offsets, sizes, tensor))
    ranks = tuple(sorted({rank for rank, _, _ in listed}))
    return ShardPiece(whole.dtype, whole.shape, rank, ranks, world, tuple(shards))


def _listed(node: Node) -> tuple[int, Shape, Shape]:
    """Return the rank, offsets and sizes in a ShardMetadata object."""
    held = attributes(node)
    rank = _integer(attributes(held["placement"])["_rank"])
    return rank, _sizes(held["shard_offsets"]), _sizes(held["shard_sizes"])


def _sizes(node: Node) -> Shape:
    node = argument(node)
    check("rank", len(node), "dimensions of a tensor")
    return tuple(map(_integer, node))


def _integer(node: Node) -> int:
    if type(node) is not int or node < 0 or node >> 63:
        raise ValueError
    return node


# The kind of parallelism that sharded a tensor: FSDP, tensor parallelism or expert parallelism.
#
# The name of a mesh dimension ("fsdp", "tp") shows the kind of parallelism. If a mesh dimension has
# no name, ckptkit infers the kind from the placements on this mesh dimension. FSDP shards all
# tensors along its mesh dimension, but tensor parallelism replicates some tensors along its mesh
# dimension.


FSDP, TENSOR, EXPERT = "FSDP", "tensor parallelism", "expert parallelism"
DTENSOR = "DTensor"  # the name in messages if the kind of parallelism is unknown
# Mesh dimension names that torch's tutorials, torchtitan, verl and accelerate use.
_NAMES = {
    TENSOR: re.compile(r"tp|mp|.*tensor.*|model|model_parallel"),
    EXPERT: re.compile(r"ep|.*expert.*"),
    FSDP: re.compile(r".*fsdp.*|.*shard.*|ddp|dp.*|data.*"),
}


def parallelism(pieces: Iterable[Piece]) -> str:
    """Return the kinds of parallelism that sharded `pieces` ("FSDP and tensor parallelism")."""
    # Keys are (name of the mesh dimension, its position counted from the end).
    laid: dict[tuple[str, int], set[Placement]] = {}
    found: dict[str, None] = {}
    for piece in pieces:
        if isinstance(piece, ShardPiece):
            found[FSDP] = None
            continue
        count = len(piece.mesh.shape)
        named = piece.mesh.names if len(piece.mesh.names) == count else ("",) * count
        for number, (name, placement) in enumerate(zip(named, piece.placements, strict=True)):
            laid.setdefault((name, number - count), set()).add(placement)
    for (name, _), placements in sorted(laid.items(), key=lambda each: each[0][1]):
        kinds = {each.kind for each in placements}
        if kinds == {REPLICATE}:
            continue
        said = next((kind for kind, names in _NAMES.items() if names.fullmatch(name)), None)
        if said is None and STRIDED in kinds:
            said = FSDP
        elif said is None and kinds == {SHARD}:
            said = FSDP if {each.dim for each in placements} == {0} else DTENSOR
        found[said or TENSOR] = None
    *others, last = found or (DTENSOR,)
    return f"{', '.join(others)} and {last}" if others else last
