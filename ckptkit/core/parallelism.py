"""The parallelism that split tensors into pieces: FSDP, tensor or expert parallelism.

The names of a mesh say it ("fsdp", "tp"). Where it has none, the placements do: FSDP cuts every
tensor along the same dimension of the mesh, tensor parallelism leaves some of them whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ckptkit.core.pieces import REPLICATE, SHARD, STRIDED, MeshPiece, Piece, Placement, ShardPiece

FSDP, TENSOR, EXPERT = "FSDP", "tensor parallelism", "expert parallelism"
DTENSOR = "DTensor"  # pieces of which nothing says why they were cut
# Names of dimensions of a mesh: those of torch's tutorials, torchtitan, verl, accelerate.
_NAMES = {
    TENSOR: re.compile(r"tp|mp|.*tensor.*|model|model_parallel"),
    EXPERT: re.compile(r"ep|.*expert.*"),
    FSDP: re.compile(r".*fsdp.*|.*shard.*|ddp|dp.*|data.*"),
}


def named(pieces: Iterable[Piece]) -> str:
    """Name what cut the pieces: one way or several ("FSDP and tensor parallelism")."""
    laid: dict[tuple[str, int], set[Placement]] = {}
    found: dict[str, None] = {}
    for piece in pieces:
        if isinstance(piece, ShardPiece):
            found[FSDP] = None
        elif isinstance(piece, MeshPiece):
            for number, placement in enumerate(piece.placements):
                laid.setdefault(_dimension(piece, number), set()).add(placement)
    for (name, _), placements in sorted(laid.items(), key=lambda each: each[0][1]):
        if any(each.kind != REPLICATE for each in placements):
            found[_by_name(name) or _by_placements(placements)] = None
    *others, last = found or (DTENSOR,)
    return f"{', '.join(others)} and {last}" if others else last


def _dimension(piece: MeshPiece, number: int) -> tuple[str, int]:
    """The name of a dimension of a mesh and its place, counted from the end."""
    names = piece.mesh.names
    count = len(piece.mesh.shape)
    return (names[number] if len(names) == count else ""), number - count


def _by_name(name: str) -> str | None:
    return next((kind for kind, names in _NAMES.items() if names.fullmatch(name)), None)


def _by_placements(placements: set[Placement]) -> str:
    kinds = {each.kind for each in placements}
    if STRIDED in kinds:
        return FSDP
    if kinds == {SHARD}:
        return FSDP if {each.dim for each in placements} == {0} else DTENSOR
    return TENSOR
