"""Values that a format of weights alone leaves out, and those that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import ckptkit
from ckptkit.core.options import Options
from tests.formats.dcp.making import alone


@pytest.fixture
def piece(tmp_path: Path) -> Path:
    """A state_dict of FSDP2, saved by torch.save as it is."""
    with alone():
        store = f"file://{tmp_path / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            shard = distribute_tensor(torch.randn(4, 3), mesh, [Shard(0)])
            torch.save({"model": {"a": shard, "b": torch.randn(2)}}, tmp_path / "piece.pth")
        finally:
            dist.destroy_process_group()
    return tmp_path / "piece.pth"


@pytest.mark.parametrize(
    ("name", "format"),
    [("x.safetensors", "safetensors"), ("x.npz", "npz"), ("folder", "sharded"), ("folder", "dcp")],
)
def test_pieces_that_are_whole_are_weights(
    piece: Path, tmp_path: Path, name: str, format: str
) -> None:
    """Of one rank alone: nothing is elsewhere."""
    ckptkit.save(ckptkit.open(piece), tmp_path / name, format=format)
    whole = torch.load(piece, weights_only=False)["model"]
    found = ckptkit.load(tmp_path / name)
    assert torch.equal(found["a"], whole["a"].to_local()) and torch.equal(found["b"], whole["b"])


def test_pieces_of_ranks_are_kept_where_everything_is(piece: Path, tmp_path: Path) -> None:
    ckptkit.save(ckptkit.open(piece), tmp_path / "x.pth")
    ckptkit.save(ckptkit.open(piece), tmp_path / "x.safetensors", options=Options(all=True))
    ckptkit.save(ckptkit.open(tmp_path / "x.safetensors"), tmp_path / "back.pth")
    assert (tmp_path / "back.pth").read_bytes() == (tmp_path / "x.pth").read_bytes()


@pytest.mark.parametrize("suffix", [".safetensors", ".npz"])
def test_what_python_adds_to_tensors_is_said_to_be_left_out(tmp_path: Path, suffix: str) -> None:
    weight, parameter = torch.ones(3), torch.nn.Parameter(torch.ones(2))
    weight.scale = torch.tensor(0.1)  # type: ignore[attr-defined]
    parameter.tag = "x"  # type: ignore[attr-defined]
    torch.save(
        {"weight": weight, "parameter": parameter, "plain": torch.ones(1)}, tmp_path / "x.pth"
    )
    done = ckptkit.save(ckptkit.open(tmp_path / "x.pth"), tmp_path / f"x{suffix}")
    said = "dropped: the Python class or attributes of tensors: 'weight', 'parameter'"
    assert said in done.plan.notes
