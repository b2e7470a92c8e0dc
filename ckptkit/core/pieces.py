"""Pieces of tensors: what one process of a training holds of a DTensor or ShardedTensor, as boxes
of the whole.

:mod:`piece_forms` reads them from pickles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from ckptkit.core.dtypes import DType
from ckptkit.core.errors import CorruptError, UnsupportedError
from ckptkit.core.limits import check
from ckptkit.core.tensor import Shape, Tensor, contiguous_stride
from ckptkit.core.text import flatten

REPLICATE, SHARD, STRIDED, PARTIAL = "Replicate", "Shard", "_StridedShard", "Partial"
_KINDS = {
    REPLICATE: REPLICATE,
    SHARD: SHARD,
    STRIDED: STRIDED,
    PARTIAL: PARTIAL,
    "_Partial": PARTIAL,
}

Runs = tuple[
    tuple[int, int], ...
]  # begin and end of indices in one dimension, in the order of the piece


@dataclass(frozen=True, slots=True)
class Box:
    """A box of the whole tensor, in elements, and the tensor that holds its elements."""

    offsets: Shape
    sizes: Shape
    tensor: Tensor


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks on a grid: its shape, and the ranks in row-major order."""

    shape: Shape
    ranks: tuple[int, ...]
    names: tuple[str, ...] = ()

    def coordinates(self, rank: int) -> Shape:
        """Return the coordinates of a rank. Raises CorruptError if it is not on the mesh."""
        if rank not in self.ranks:
            raise CorruptError(f"rank {rank:,} is not on its mesh of {len(self.ranks):,} ranks")
        place = self.ranks.index(rank)
        return tuple(
            place // step % n for n, step in zip(self.shape, steps(self.shape), strict=True)
        )


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement of a tensor on one dimension of a mesh; `dim` and `factor` if it is split."""

    kind: str
    dim: int = 0
    factor: int = 1


@dataclass(frozen=True)
class Piece:
    """The part of a tensor of `shape` that one rank holds.

    ``rank`` is None where the pickle does not say it (DTensor until torch 2.9). ``ranks`` are those
    that hold the tensor together, ``world`` is their number, or that of the whole job where it is
    known.
    """

    dtype: DType
    shape: Shape
    rank: int | None
    ranks: tuple[int, ...]
    world: int

    def boxes(self, rank: int | None = None) -> list[Box]:
        """The boxes of a rank (of the one that the pickle names), none where it holds no
        elements."""
        raise NotImplementedError

    def local(self) -> list[Tensor]:
        """The tensors of this rank as they were saved."""
        raise NotImplementedError


@dataclass(frozen=True)
class MeshPiece(Piece):
    """The piece of a DTensor that a rank holds."""

    tensor: Tensor
    mesh: Mesh
    placements: tuple[Placement, ...]
    order: (
        Mapping[int, tuple[int, ...]] | None
    )  # tensor dim -> mesh dims in the order in which they cut it
    ordered: (
        bool  # whether the pickle is of a torch that would say another order than left to right
    )

    def local(self) -> list[Tensor]:
        return [self.tensor]

    def boxes(self, rank: int | None = None) -> list[Box]:
        """The boxes. Raises CorruptError where the local shape contradicts the placements,
        UnsupportedError for Partial and for an order that nothing says."""
        held = self.rank if rank is None else rank
        if held is None:
            raise CorruptError("nothing says which rank it is of")
        if any(each.kind == PARTIAL for each in self.placements):
            raise UnsupportedError(
                "holds a Partial placement: the value is a sum over ranks that was not carried out",
                hint="redistribute it in the training script before saving (parameters never "
                "have it)",
            )
        coordinates = self.mesh.coordinates(held)
        runs = [self._runs(dim, coordinates) for dim in range(len(self.shape))]
        derived = tuple(sum(b - a for a, b in each) for each in runs)
        if derived != self.tensor.shape:
            raise CorruptError(
                f"rank {held:,} holds {self.tensor.shape} of {self.shape}, its placements say "
                f"{derived}"
            )
        return list(_boxes(runs, self.tensor)) if self.tensor.numel else []

    def _runs(self, dim: int, coordinates: Shape) -> Runs:
        """The indices along a dimension of the tensor that belong to `coordinates` of the mesh."""
        cuts = [
            d
            for d, each in enumerate(self.placements)
            if each.kind != REPLICATE and each.dim == dim
        ]
        whole: Runs = ((0, self.shape[dim]),)
        if any(self.placements[d].kind == STRIDED for d in cuts):
            return self._strided(cuts, whole, coordinates)
        if self.order is not None and dim in self.order:
            cuts = list(self.order[dim])
        elif len(cuts) > 1 and not self.ordered:
            raise UnsupportedError(
                f"dimension {dim} is cut along {len(cuts)} dimensions of the mesh, in an order "
                "that the file does not say (FSDP with tensor parallelism of torch 2.4 and before)",
                hint="load it with the torch that wrote it, and save full_tensor() of each",
            )
        for d in cuts:
            whole = chunk(whole, self.mesh.shape[d], coordinates[d])
        return whole

    def _strided(self, cuts: list[int], whole: Runs, coordinates: Shape) -> Runs:
        """FSDP over tensor parallelism: the mesh dimensions cut from right to left, as the ranks'
        own sizes prove.

        Where a split factor is not the number of pieces to its right, the indices are split as
        torch documents it.
        """
        sizes = self.mesh.shape
        right = [prod(sizes[after] for after in cuts if after > d) for d in cuts]
        factors = [self.placements[d].factor for d in cuts]
        kinds = [self.placements[d].kind for d in cuts]
        plain = zip(kinds, factors, right, strict=True)
        if all(kind != STRIDED or factor == after for kind, factor, after in plain):
            for d in reversed(cuts):
                whole = chunk(whole, sizes[d], coordinates[d])
            return whole
        check("ranks", max(factors), "pieces of a strided shard")
        for d, kind, factor in zip(cuts, kinds, factors, strict=True):
            split = [chunk(whole, factor, n) for n in range(factor)] if kind == STRIDED else [whole]
            whole = joined(flatten(chunk(part, sizes[d], coordinates[d]) for part in split))
        return whole


@dataclass(frozen=True)
class ShardPiece(Piece):
    """The pieces of a ShardedTensor. Each file lists the boxes of all ranks, as numbers."""

    shards: tuple[Box, ...]
    listed: tuple[
        tuple[int, Shape, Shape], ...
    ]  # rank, offsets and sizes of every shard of the group

    def local(self) -> list[Tensor]:
        return [each.tensor for each in self.shards]

    def boxes(self, rank: int | None = None) -> list[Box]:
        """The boxes. Raises CorruptError where the pickle is of another rank, or a shard does not
        have the shape that is listed."""
        if rank is not None and rank != self.rank:
            raise CorruptError(f"it was written by rank {self.rank}, not by rank {rank}")
        for each in self.shards:
            if each.tensor.shape != each.sizes:
                raise CorruptError(
                    f"rank {self.rank} holds {each.tensor.shape}, its shard says {each.sizes}"
                )
            if (self.rank, each.offsets, each.sizes) not in self.listed:
                raise CorruptError(
                    f"the shard at {each.offsets} is not among those that the tensor lists"
                )
        return [each for each in self.shards if each.tensor.numel]


def chunk(runs: Runs, count: int, index: int) -> Runs:
    """The `index`-th of `count` pieces as torch.chunk cuts them: the last ones shorter, or
    empty."""
    total = sum(b - a for a, b in runs)
    width = -(-total // count)
    return tuple(_cut(runs, min(index * width, total), min((index + 1) * width, total)))


def _cut(runs: Runs, start: int, stop: int) -> Iterator[tuple[int, int]]:
    at = 0
    for begin, end in runs:
        low, high = max(start - at, 0), min(stop - at, end - begin)
        if low < high:
            yield begin + low, begin + high
        at += end - begin


def joined(runs: Iterator[tuple[int, int]]) -> Runs:
    """The same indices in as few runs as possible."""
    made: list[tuple[int, int]] = []
    for begin, end in runs:
        if made and made[-1][1] == begin:
            made[-1] = made[-1][0], end
        else:
            made.append((begin, end))
    return tuple(made)


def _boxes(runs: list[Runs], tensor: Tensor) -> Iterator[Box]:
    """One box for each combination of runs, with the part of the local tensor that is its own."""
    if all(len(each) == 1 for each in runs):
        yield Box(tuple(start for ((start, _),) in runs), tensor.shape, tensor)
        return
    starts = []
    for each in runs:
        at, begins = 0, []
        for begin, end in each:
            begins.append((begin, at, end - begin))
            at += end - begin
        starts.append(begins)
    check("chunk_visits", prod(map(len, starts)), "boxes of one tensor")
    for corner in product(*starts):
        sizes = tuple(size for _, _, size in corner)
        yield Box(
            tuple(begin for begin, _, _ in corner),
            sizes,
            part(tensor, tuple(at for _, at, _ in corner), sizes),
        )


def part(tensor: Tensor, start: Shape, sizes: Shape) -> Tensor:
    """The view of `sizes` elements from `start` on, which the caller knows to be there."""
    steps = zip(start, tensor.stride, strict=True)
    offset = tensor.offset + (sum(a * s for a, s in steps) if 0 not in sizes else 0)
    return Tensor(
        tensor.storage, tensor.dtype, sizes, tensor.stride, offset, conj=tensor.conj, neg=tensor.neg
    )


def steps(shape: Shape) -> Shape:
    """Return the strides of a row-major grid."""
    return contiguous_stride(shape) if shape else ()
