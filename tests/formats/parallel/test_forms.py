"""The pickled forms of pieces: torch 2.1 to 2.15, by files made after their sources; and which box
a rank holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch

import ckptkit
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.tensor import Tensor
from ckptkit.formats.distributed.meshes import (
    REPLICATE,
    SHARD,
    STRIDED,
    Mesh,
    MeshPiece,
    Piece,
    Placement,
    ShardPiece,
    parallelism,
)
from tests.formats.parallel.old_forms import (
    OLD,
    Plain,
    dtensor,
    mesh_of_axes,
    mesh_of_layout,
    mesh_of_tensor,
    save,
    shard,
    sharded_tensor,
)
from tests.formats.parallel.trees import assert_same

WHOLE = torch.arange(35, dtype=torch.float32).reshape(7, 5)
ROWS = {0: (0, 4), 1: (4, 7)}


def pair(folder: Path, make: Any) -> Path:
    """Two rank files of one tensor, by what `make` gives for each rank."""
    folder.mkdir(exist_ok=True)
    for rank in range(2):
        save({"w": make(rank)}, folder / f"rank{rank}.pt")
    return folder


def local(rank: int) -> torch.Tensor:
    return WHOLE[slice(*ROWS[rank])]


RANKS = torch.tensor([0, 1], dtype=torch.int32)
FORMS = {
    "2.1": lambda rank: dtensor(
        WHOLE, local(rank), Plain(f"{OLD}.device_mesh", "DeviceMesh", {"device_type": "cpu", "mesh": RANKS}),
        (shard(0, f"{OLD}.placement_types"),), old=True,
    ),
    "2.3": lambda rank: dtensor(
        WHOLE, local(rank), mesh_of_tensor(RANKS, mesh_dim_names=None, _flatten_mesh_list=(0, 1), _thread_id=7,
                                           _dim_group_infos=[("ptd:0", [0, 1], "0")]),
        (shard(0, f"{OLD}.placement_types"),), old=True,
    ),
    "2.4": lambda rank: dtensor(
        WHOLE, local(rank), mesh_of_tensor(RANKS.long(), mesh_dim_names=("fsdp",), _flatten_mesh_list=(0, 1)),
        (shard(0, f"{OLD}.placement_types"),), old=True,
    ),
    "2.5": lambda rank: dtensor(
        WHOLE, local(rank), mesh_of_tensor(RANKS, _coordinate_on_dim=[rank], _dim_group_infos=[("", [0, 1], "0")]),
        (shard(0),),
    ),
    "2.7, of a mesh of several": lambda rank: dtensor(
        WHOLE, local(rank), mesh_of_tensor(RANKS, _coordinate_on_dim=[rank], mesh_dim_names=("dp",),
                                           _root_mesh=mesh_of_tensor(torch.arange(4).reshape(2, 2))),
        (shard(0),),
    ),
    "2.9": lambda rank: dtensor(
        WHOLE, local(rank), mesh_of_tensor(RANKS, _coordinate_on_dim=[rank], _dim_group_names=["0"]), (shard(0),)
    ),
    "2.10": lambda rank: dtensor(
        WHOLE, local(rank), mesh_of_layout((2,), (1,), RANKS, _rank=rank), (shard(0),), shard_order=None
    ),
    "2.11 of one number": lambda rank: dtensor(
        WHOLE, local(rank), mesh_of_layout(2, 1, RANKS, _rank=rank), (shard(0),), shard_order=None
    ),
    "2.13": lambda rank: dtensor(
        WHOLE, local(rank), mesh_of_axes([((2,), (1,))], RANKS, _rank=rank, _coordinate_on_dim=(rank,)), (shard(0),),
        shard_order=(Plain("torch.distributed.tensor._dtensor_spec", "ShardOrderEntry", None, (0, (0,))),),
    ),
    "2.15": lambda rank: dtensor(
        WHOLE, local(rank), mesh_of_axes([((2,), (1,))], RANKS, _rank=rank, _coordinate_on_dim=(rank,),
                                         _preserve_rank_order=False), (shard(0),),
        shard_order=(Plain("torch.distributed.tensor._dtensor_spec", "ShardOrderEntry", None, (0, (0,))),),
        use_strided_shard_as_shard_order=False, _hash=None,
    ),
    "negative dimension": lambda rank: dtensor(
        WHOLE, local(rank), mesh_of_tensor(RANKS, _coordinate_on_dim=[rank]), (shard(-2),)
    ),
    "ShardedTensor": lambda rank: sharded_tensor(WHOLE, rank, ROWS, 2, strides=False),
    "ShardedTensor of 2.15": lambda rank: sharded_tensor(WHOLE, rank, ROWS, 2, strides=True),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read(form: str, tmp_path: Path) -> None:
    assert_same(ckptkit.load(pair(tmp_path / "x", FORMS[form])), {"w": WHOLE})


def test_a_rank_without_rows(tmp_path: Path) -> None:
    whole = WHOLE[:1]
    folder = pair(
        tmp_path / "x", lambda rank: sharded_tensor(whole, rank, {0: (0, 1)}, 2, strides=False)
    )
    assert_same(ckptkit.load(folder), {"w": whole})


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_cuts_of_one_dimension_in_the_order_that_is_said(
    order: tuple[int, int], tmp_path: Path
) -> None:
    """Since torch 2.10: 7 rows are cut along the first dimension of the mesh first, or last."""
    whole = torch.arange(7.0)
    entry = Plain("torch.distributed.tensor._dtensor_spec", "ShardOrderEntry", None, (0, order))
    axes = [((2,), (2,)), ((2,), (1,))]
    (tmp_path / "x").mkdir()
    for rank in range(4):
        held = whole
        for dim in order:
            held = held.chunk(2)[(rank // 2, rank % 2)[dim]]
        mesh = mesh_of_axes(axes, torch.arange(4), _rank=rank)
        piece = dtensor(whole, held, mesh, (shard(0), shard(0)), shard_order=(entry,))
        save({"w": piece}, tmp_path / "x" / f"rank{rank}.pt")
    assert_same(ckptkit.load(tmp_path / "x"), {"w": whole})


def test_copies_of_the_same_bits_are_equal_though_not_numbers(tmp_path: Path) -> None:
    """Also where the checksums of the records differ, by bytes that are not of the tensor."""
    replicate = Plain("torch.distributed.tensor.placement_types", "Replicate", {})
    odd = torch.tensor([float("nan"), -0.0, 1.0])
    (tmp_path / "x").mkdir()
    for rank in range(2):
        mesh = mesh_of_tensor(RANKS, _coordinate_on_dim=[rank])
        pad = torch.ones(3 + rank)  # the records have other checksums
        held = torch.cat([odd, pad])[:3]
        save({"w": dtensor(odd, odd, mesh, (replicate,)), "b": held}, tmp_path / f"x/rank{rank}.pt")
    assert torch.equal(ckptkit.load(tmp_path / "x")["b"].isnan(), odd.isnan())


def test_a_split_factor_of_another_size_gives_several_boxes() -> None:
    """8 rows in 4 splits, each cut in 2 over dp: rank (0, 0) has row 0 of each split, then half of
    them."""
    dtype, ranks = BY_NAME["float32"], (0, 1, 2, 3)
    tensor, mesh = Tensor(None, dtype, (2,), (1,)), Mesh((2, 2), ranks)
    placements = Placement(STRIDED, 0, 4), Placement(SHARD, 0)
    found = MeshPiece(dtype, (8,), 0, ranks, 4, tensor, mesh, placements, {}).boxes()
    assert [(box.offsets, box.sizes) for box in found] == [((0,), (1,)), ((2,), (1,))]


def test_a_mesh_in_a_deflated_record_is_read(tmp_path: Path) -> None:
    for path in pair(tmp_path, FORMS["2.1"]).iterdir():
        with ZipFile(path) as old:
            held = {name: old.read(name) for name in old.namelist()}
        with ZipFile(path, "w", ZIP_DEFLATED) as new:
            for name, data in held.items():
                new.writestr(name, data)
    assert_same(ckptkit.load(tmp_path), {"w": WHOLE})


def test_a_missing_rank_whose_replica_is_there(tmp_path: Path) -> None:
    """Replicate over two ranks: either has all."""
    replicate = Plain("torch.distributed.tensor.placement_types", "Replicate", {})

    def make(rank: int) -> Any:
        return dtensor(WHOLE, WHOLE, mesh_of_tensor(RANKS, _coordinate_on_dim=[rank]), (replicate,))

    folder = pair(tmp_path / "x", make)
    (folder / "rank1.pt").unlink()
    checkpoint = ckptkit.open(folder)
    assert_same(ckptkit.load(folder), {"w": WHOLE})
    assert any("rank1.pt" in each and "missing" in each for each in checkpoint.warnings)


# What cut the tensors of a training, by the names of meshes and by placements

F32 = BY_NAME["float32"]
ROWS_OF, COLUMNS, ALL = Placement(SHARD, 0), Placement(SHARD, 1), Placement(REPLICATE)
BLOCKS = Placement(STRIDED, 0, 2)
TP, EP = "tensor parallelism", "expert parallelism"


def laid(names: tuple[str, ...], *placements: Placement) -> MeshPiece:
    ranks = tuple(range(2 ** len(placements)))
    tensor = Tensor(None, F32, (1, 1), (1, 1), 0)
    mesh = Mesh((2,) * len(placements), ranks, names)
    return MeshPiece(F32, (4, 4), 0, ranks, len(ranks), tensor, mesh, placements, {})


CUT_BY: list[tuple[list[Piece], str]] = [
    *(([laid((name,), ROWS_OF)], "FSDP") for name in ("fsdp", "dp_shard_cp", "x")),  # x: by its placement
    *(([laid((name,), ROWS_OF)], TP) for name in ("tp", "tensor_parallel")),
    ([laid(("ep",), ROWS_OF)], EP),
    # without names
    ([laid((), ROWS_OF), laid((), ROWS_OF)], "FSDP"),
    ([laid((), each) for each in (ROWS_OF, COLUMNS, ALL)], TP),
    ([laid((), *each) for each in ((BLOCKS, ROWS_OF), (ROWS_OF, COLUMNS), (ROWS_OF, ALL))], f"FSDP and {TP}"),
    ([laid((), ROWS_OF), laid((), COLUMNS)], "DTensor"),  # either: FSDP2 can be told to cut columns
    # replicas are not a cut
    ([laid(("ddp", "tp"), ALL, ROWS_OF)], TP), ([laid((), ALL, ROWS_OF)], "FSDP"), ([laid(("dp",), ALL)], "DTensor"),
    # experts are on another mesh than the rest
    ([laid(("dp_shard",), ROWS_OF), laid(("dp_shard_mod_ep", "ep"), ROWS_OF, ROWS_OF)], f"FSDP and {EP}"),
    ([ShardPiece(F32, (4,), 0, (0,), 1, ())], "FSDP"),
]  # fmt: skip


def test_what_cut_the_tensors() -> None:
    assert [parallelism(pieces) for pieces, _ in CUT_BY] == [what for _, what in CUT_BY]
