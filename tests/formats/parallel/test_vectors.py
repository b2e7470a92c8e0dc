"""Folders with the whole beside them, made by torch and by the rules of the layouts:
CKPTKIT_VECTORS names them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit.core.errors import CkptkitError, CorruptError, UnsupportedError
from tests.formats.parallel.trees import assert_same

REFUSED: dict[str, tuple[type[CkptkitError], str]] = {
    "bad_rank_missing": (CorruptError, "model_world_size_3_rank_1.pt"),
    "bad_two_saves_mixed": (CorruptError, "inv_freq"),
    "bad_tp_w2_replicas_differ": (CorruptError, "input_layernorm"),
    "bad_fsdp1dt_hsdp_replicas_differ": (CorruptError, "elements differ"),
    "fsdp1local_w2_accelerate": (UnsupportedError, "flat parameters"),
}
NAMES = (
    "ds_mprank_tp2", "fsdp1dt_hsdp_2x2_f32", "fsdp1dt_w2_bf16", "fsdp1st_w2_f32", "fsdp1st_w2_orig_wrap",
    "fsdp2_w2_f32", "fsdp2_w2_otherseed", "fsdp2_w2_tied_bf16", "fsdp2_w3_f32", "fsdp2_w4_bf16_empty",
    "fsdp2tp_2x2_f32", "hsdp2_2x2_f32", "mega_gpt_v0_release_tp2", "mega_gpt_v3_tp2_pp1", "mega_llama_tp1_pp1",
    "mega_llama_tp1_pp2", "mega_llama_tp2_pp1", "mega_llama_tp2_pp2", "mega_moe_tp1_ep2", "meta_llama2_mp2",
    "meta_llama3_mp2", "neox_pipe_tp2", "tp_w2_f32",
)  # fmt: skip


def vector(name: str) -> Path:
    folder = Path(os.environ.get("CKPTKIT_VECTORS", "")) / "parallel" / name
    if not folder.is_dir():
        pytest.skip("CKPTKIT_VECTORS does not name a folder with them")
    return folder


def parts(name: str, tmp_path: Path) -> Path:
    """The folder without the whole, which would be a checkpoint by its name."""
    folder = tmp_path / name
    shutil.copytree(vector(name), folder, ignore=shutil.ignore_patterns("full*.pt", "facts.json"))
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    folder.chmod(0o755)
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_parts_make_the_whole(name: str, tmp_path: Path) -> None:
    truth = vector(name)
    checkpoint = ckptkit.open(parts(name, tmp_path))
    ckptkit.save(checkpoint, tmp_path / "out.pth")
    whole = ckptkit.load(
        tmp_path / "out.pth", key=checkpoint.required.path[0] if checkpoint.required.path else None
    )
    assert_same(whole, torch.load(truth / "full.pt", weights_only=True))
    if (truth / "full_optim.pt").exists():
        made = torch.load(tmp_path / "out.pth", weights_only=True)
        expected = torch.load(truth / "full_optim.pt", weights_only=True)
        assert_same(made["optimizer"]["state"], expected["state"])


def test_an_optimizer_with_a_replica_whose_rank_is_missing(tmp_path: Path) -> None:
    """The other replica of HYBRID_SHARD is complete."""
    folder = parts("fsdp1dt_hsdp_2x2_f32", tmp_path)
    for path in folder.glob("*_rank_3.pt"):
        path.unlink()
    ckptkit.save(ckptkit.open(folder), tmp_path / "out.pth")
    made = torch.load(tmp_path / "out.pth", weights_only=True)
    expected = torch.load(vector(folder.name) / "full_optim.pt", weights_only=True)
    assert_same(made["optimizer"]["state"], expected["state"])


def test_every_vector_is_here() -> None:
    assert {path.name for path in vector(".").iterdir()} == {*NAMES, *REFUSED}
