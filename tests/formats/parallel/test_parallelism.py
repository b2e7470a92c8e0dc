"""What cut the tensors of a training, by the names of meshes and by placements."""

from __future__ import annotations

import pytest

from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.tensor import Tensor
from ckptkit.formats.distributed.meshes import (
    REPLICATE,
    SHARD,
    STRIDED,
    Mesh,
    MeshPiece,
    Placement,
    ShardPiece,
    parallelism,
)

F32 = BY_NAME["float32"]
ROWS, COLUMNS, WHOLE = Placement(SHARD, 0), Placement(SHARD, 1), Placement(REPLICATE)
BLOCKS = Placement(STRIDED, 0, 2)


def laid(names: tuple[str, ...], *placements: Placement) -> MeshPiece:
    shape = (2,) * len(placements)
    ranks = tuple(range(2 ** len(placements)))
    tensor = Tensor(None, F32, (1, 1), (1, 1), 0)
    mesh = Mesh(shape, ranks, names)
    return MeshPiece(F32, (4, 4), 0, ranks, len(ranks), tensor, mesh, placements, {})


NAMED = {
    ("fsdp",): "FSDP",
    ("dp_shard_cp",): "FSDP",
    ("tp",): "tensor parallelism",
    ("tensor_parallel",): "tensor parallelism",
    ("ep",): "expert parallelism",
    ("x",): "FSDP",  # by its placement
}


@pytest.mark.parametrize("names", NAMED)
def test_a_mesh_with_names(names: tuple[str, ...]) -> None:
    assert parallelism([laid(names, ROWS)]) == NAMED[names]


UNNAMED: dict[str, list[tuple[Placement, ...]]] = {
    "FSDP": [(ROWS,), (ROWS,)],
    "tensor parallelism": [(ROWS,), (COLUMNS,), (WHOLE,)],
    "FSDP and tensor parallelism": [(BLOCKS, ROWS), (ROWS, COLUMNS), (ROWS, WHOLE)],
    "DTensor": [(ROWS,), (COLUMNS,)],  # either: FSDP2 can be told to cut columns
}


@pytest.mark.parametrize("what", UNNAMED)
def test_a_mesh_without_names(what: str) -> None:
    assert parallelism(laid((), *placements) for placements in UNNAMED[what]) == what


def test_replicas_are_not_a_cut() -> None:
    assert parallelism([laid(("ddp", "tp"), WHOLE, ROWS)]) == "tensor parallelism"
    assert parallelism([laid((), WHOLE, ROWS)]) == "FSDP"
    assert parallelism([laid(("dp",), WHOLE)]) == "DTensor"


def test_several_meshes() -> None:
    """Experts are on another mesh than the rest."""
    rest, experts = laid(("dp_shard",), ROWS), laid(("dp_shard_mod_ep", "ep"), ROWS, ROWS)
    assert parallelism([rest, experts]) == "FSDP and expert parallelism"


def test_a_sharded_tensor_is_of_fsdp() -> None:
    assert parallelism([ShardPiece(F32, (4,), 0, (0,), 1, ())]) == "FSDP"
