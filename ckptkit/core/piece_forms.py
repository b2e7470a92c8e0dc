"""The pickled forms of pieces: DTensor and ShardedTensor, as torch 2.1 to 2.15 write them.

Both are made by ``_rebuild_wrapper_subclass`` with the dtype and shape of the whole as arguments;
their state differs:

    DTensor          {"_local_tensor": tensor,
                      "_spec": DTensorSpec(mesh, placements, shard_order...)}
    ShardedTensor    (local shards, ShardedTensorMetadata, ProcessGroupState, spec, flag)

A mesh is a tensor of ranks (until torch 2.9), or a layout over a row of ranks (2.10 and later):
these few integers are the only bytes that are read here. Attributes come as a dict, or as (dict,
slots).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod
from typing import Literal

from ckptkit.core.bytesource import Range
from ckptkit.core.errors import CkptkitError, FormatError, UnsupportedError
from ckptkit.core.limits import check
from ckptkit.core.pieces import (
    PARTIAL,
    REPLICATE,
    SHARD,
    STRIDED,
    Box,
    Mesh,
    MeshPiece,
    Piece,
    Placement,
    ShardPiece,
    steps,
)
from ckptkit.core.tensor import Shape, Tensor
from ckptkit.core.tree import Node, Object, Pairs, Path, children

CLASSES = ("DTensor", "ShardedTensor")
_RANK_BYTES = 1 << 20  # of the ranks of a mesh
_KINDS = {
    REPLICATE: REPLICATE,
    SHARD: SHARD,
    STRIDED: STRIDED,
    PARTIAL: PARTIAL,
    "_Partial": PARTIAL,
}


def piece_of(node: Node, meshes: dict[int, Mesh] | None = None) -> Piece | None:
    """The piece that a node is, None for anything else. Raises FormatError for one that is not as
    torch writes it.

    `meshes` keeps those that were read, by the id of their node, for as long as the nodes live.
    """
    found = _wrapped(node)
    if found is None:
        return None
    name, whole, state = found
    try:
        if name == "DTensor":
            return _mesh_piece(whole, state, {} if meshes is None else meshes)
        return _shard_piece(whole, state)
    except CkptkitError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise FormatError(f"holds a {name} in a form that no known torch writes") from error


def is_piece(node: Node) -> bool:
    """Return whether a node is a DTensor or ShardedTensor."""
    return isinstance(node, Object) and node.tensor is not None and _wrapped(node) is not None


def pieces_in(root: Node) -> Iterator[tuple[Path, Node]]:
    """The nodes of a tree that are pieces, in order, at each of their places; what they are made of
    is not entered."""
    waiting: list[tuple[Path, Node]] = [((), root)]
    seen: set[int] = set()
    while waiting:
        path, node = waiting.pop()
        if is_piece(node):
            yield path, node
        elif isinstance(node, (dict, list, tuple, Object, Pairs)) and id(node) not in seen:
            seen.add(id(node))
            check("depth", len(path), "levels of values")
            waiting.extend([((*path, key), child) for key, child in children(node)][::-1])


def _wrapped(node: Node) -> tuple[str, Tensor, Node] | None:
    """Class, tensor of the whole, and state."""
    if not isinstance(node, Object) or node.global_ is None or node.tensor is None:
        return None
    if node.global_.name != "_rebuild_from_type_v2" or len(node.args) != 4:
        return None
    made = getattr(node.args[1], "name", "")
    module = getattr(node.args[1], "module", "")
    if made not in CLASSES or not module.startswith("torch.distributed."):
        return None
    return made, node.tensor, node.args[3]


def attributes(node: Node) -> dict[str, Node]:
    """Return the attributes that ``__setstate__`` or the dict and slots of an object would set."""
    state = node.state if isinstance(node, Object) else node
    if isinstance(state, tuple) and len(state) == 2:
        return {**attributes(state[0]), **attributes(state[1])}
    return dict(state) if isinstance(state, dict) else {}


def _mesh_piece(whole: Tensor, state: Node, meshes: dict[int, Mesh]) -> MeshPiece:
    held = attributes(state)
    spec = attributes(held["_spec"])
    tensor = held["_local_tensor"]
    if isinstance(tensor, Object):
        tensor = tensor.tensor
    if not isinstance(tensor, Tensor) or tensor.dtype != whole.dtype:
        raise FormatError("holds a DTensor whose local tensor is none, or of another type")
    mesh = meshes.get(id(spec["mesh"])) or _mesh(spec["mesh"])
    meshes[id(spec["mesh"])] = mesh
    placements = tuple(_placement(each, len(whole.shape)) for each in spec["placements"])
    if len(placements) != len(mesh.shape):
        raise FormatError(
            f"holds {len(placements)} placements for a mesh of {len(mesh.shape)} dimensions"
        )
    order = spec.get("shard_order")
    return MeshPiece(
        whole.dtype, whole.shape, _rank(spec["mesh"], mesh), mesh.ranks, len(mesh.ranks),
        tensor, mesh, placements, None if order is None else dict(map(_order, order)),
        "shard_order" in spec,
    )  # fmt: skip


def _order(entry: Node) -> tuple[int, tuple[int, ...]]:
    """A ShardOrderEntry: tensor dimension, and the mesh dimensions that cut it, in order."""
    state = attributes(entry)
    args = entry.args if isinstance(entry, Object) else entry
    dim, dims = (state["tensor_dim"], state["mesh_dims"]) if state else args
    return _integer(dim), tuple(_integer(d) for d in dims)


def _mesh(node: Node) -> Mesh:
    held = attributes(node)
    names = held.get("_mesh_dim_names", held.get("mesh_dim_names")) or ()
    names = tuple(name for name in names if isinstance(name, str))
    if isinstance(held.get("mesh"), Tensor):  # until torch 2.9
        ranks = integers(held["mesh"])
        return Mesh(held["mesh"].shape, ranks, names)
    ranks = integers(held["_rank_map"])
    axes = list(_axes(held["_layout"]))
    shape = tuple(prod(n for n, _ in axis) for axis in axes)
    check("ranks", prod(shape), "ranks of a mesh")
    offsets = [sum(corner) for corner in product(*(_offsets(axis) for axis in axes))]
    base = _base(ranks, offsets, held.get("_rank"))
    return Mesh(shape, tuple(ranks[base + offset] for offset in offsets), names)


def _base(ranks: Shape, offsets: list[int], rank: Node) -> int:
    """Return the first rank of the mesh of `rank`, among all ranks: there may be several sub-meshes
    of the same layout.
    """
    place = ranks.index(rank) if type(rank) is int else 0
    taken: set[int] = set()
    for base in range(len(ranks)):
        if base in taken:
            continue
        mine = [base + offset for offset in offsets]
        if place in mine or type(rank) is not int:
            return base
        taken.update(mine)
    return 0


def _axes(layout: Node) -> Iterator[list[tuple[int, int]]]:
    """Sizes and strides of each dimension of a mesh: one pair, or several of a flattened one."""
    held = attributes(layout)
    if not held and isinstance(layout, Object):
        held = dict(zip(("shape", "stride"), layout.args, strict=False))
    if "axes" in held:  # torch 2.13
        inner = [attributes(axis) for axis in held["axes"]]
        pairs = [(each["shape"], each["stride"]) for each in inner]
    else:
        shape, stride = held["shape"], held["stride"]
        several = isinstance(shape, (tuple, list))
        pairs = list(zip(shape, stride, strict=True)) if several else [(shape, stride)]
    for shape, stride in pairs:
        yield list(zip(_flat(shape), _flat(stride), strict=True))


def _flat(value: Node) -> list[int]:
    """The integers of a tuple of tuples, in order."""
    waiting, found = [value], []
    while waiting:
        each = waiting.pop(0)
        if isinstance(each, (tuple, list)):
            waiting[:0] = each
        else:
            found.append(_integer(each))
    return found


def _offsets(axis: list[tuple[int, int]]) -> list[int]:
    corners = product(*(range(0, n * step, step) if step else [0] * n for n, step in axis))
    return [sum(corner) for corner in corners]


def _placement(node: Node, rank: int) -> Placement:
    made = node.global_ if isinstance(node, Object) else None
    kind = _KINDS.get(made.name if made is not None else "")
    if kind is None:
        raise UnsupportedError(f"holds a tensor that is laid on its mesh in a way called {made}")
    state = attributes(node)
    if kind in (REPLICATE, PARTIAL):
        return Placement(kind)
    dim = state["dim"] if "dim" in state else node.args[0]
    factor = state.get("split_factor", 1)
    if type(dim) is not int or not -rank <= dim < rank or type(factor) is not int or factor < 1:
        raise FormatError("holds a tensor that is cut along a dimension that it does not have")
    return Placement(kind, dim % rank, factor)


def _rank(node: Node, mesh: Mesh) -> int | None:
    """The rank that wrote a mesh, None where it does not say (until torch 2.9)."""
    held = attributes(node)
    rank = held.get("_rank")
    if type(rank) is int:
        return rank
    place = held.get("_coordinate_on_dim")
    if not isinstance(place, (list, tuple)) or len(place) != len(mesh.shape):
        return None
    axes = zip(place, mesh.shape, steps(mesh.shape), strict=True)
    return mesh.ranks[sum(_within(i, n) * step for i, n, step in axes)]


def _within(index: Node, size: int) -> int:
    if type(index) is not int or not 0 <= index < size:
        raise FormatError("holds a mesh whose coordinates are not on it")
    return index


def integers(tensor: Node) -> tuple[int, ...]:
    """The elements of a small tensor of integers."""
    if not isinstance(tensor, Tensor) or tensor.storage is None or tensor.dtype.kind != "int":
        raise FormatError("holds a mesh whose ranks are not integers")
    if not tensor.is_contiguous or tensor.nbytes > _RANK_BYTES:
        raise FormatError(f"holds a mesh of {tensor.numel:,} ranks that are not in a row")
    size = tensor.dtype.itemsize
    order: Literal["big", "little"] = "big" if tensor.storage.big_endian else "little"
    place = tensor.storage.record.locate()
    if not isinstance(place, Range):
        raise UnsupportedError("holds a mesh that is compressed")
    data = place.part(tensor.offset * size, tensor.nbytes).read()
    return tuple(
        int.from_bytes(data[at : at + size], order, signed=True) for at in range(0, len(data), size)
    )


def _shard_piece(whole: Tensor, state: Node) -> ShardPiece:
    local, metadata, group, *_ = state
    state, process = attributes(metadata), attributes(group)
    listed = tuple(map(_listed, state["shards_metadata"]))
    size = _sizes(state["size"])
    if size != whole.shape:
        raise FormatError(f"holds a ShardedTensor of {whole.shape} whose metadata say {size}")
    shards = []
    for each in local:
        held = attributes(each)
        _, offsets, sizes = _listed(held["metadata"])
        tensor = held["tensor"]
        if not isinstance(tensor, Tensor) or tensor.dtype != whole.dtype:
            raise FormatError(
                "holds a shard that is not a tensor, or of another type than the whole"
            )
        shards.append(Box(offsets, sizes, tensor))
    ranks = tuple(sorted({rank for rank, _, _ in listed}))
    rank, world = _integer(process["global_rank"]), _integer(process["global_world_size"])
    return ShardPiece(whole.dtype, whole.shape, rank, ranks, world, tuple(shards), listed)


def _listed(node: Node) -> tuple[int, Shape, Shape]:
    """Rank, offsets and sizes of a ShardMetadata."""
    held = attributes(node)
    place = attributes(held["placement"])
    return _integer(place["_rank"]), _sizes(held["shard_offsets"]), _sizes(held["shard_sizes"])


def _sizes(node: Node) -> Shape:
    if isinstance(node, Object) and len(node.args) == 1:  # torch.Size
        node = node.args[0]
    check("rank", len(node), "dimensions of a tensor")
    return tuple(_integer(n) for n in node)


def _integer(node: Node) -> int:
    if type(node) is not int or node < 0 or node >> 63:
        raise FormatError("holds a piece of a tensor whose sizes are not numbers from 0 to 2**63")
    return node
