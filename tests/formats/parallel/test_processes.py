"""Rank files of the installed torch: written by 2, 3 and 4 processes (gloo), read against the whole
of torch. Forked processes write them, and once torchrun."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.core.checkpoint import Checkpoint
from tests.conftest import ENVIRONMENT, ROOT
from tests.formats.parallel import save_ranks
from tests.formats.parallel.trees import assert_same
from tests.ranks import run_ranks

CASES = [(world, form.__name__) for world, forms in save_ranks.FORMS.items() for form in forms]

CUT_BY = {"tp": "tensor parallelism", "fsdp2_tp": "FSDP and tensor parallelism"}


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of what so many processes saved."""

    @cache
    def save(world: int) -> Path:
        folder = tmp_path_factory.mktemp(f"ranks{world}")
        run_ranks(world, save_ranks.__name__, folder)
        return folder

    return save


@pytest.mark.processes
@pytest.mark.parametrize(("world", "form"), CASES)
def test_rank_files_of_torch_make_the_whole(
    world: int, form: str, saved: Any, tmp_path: Path
) -> None:
    """Weights and optimizer; a plain model goes on from them."""
    folder = saved(world)
    checkpoint = ckptkit.open(folder / form)
    title = f"rank files of {CUT_BY.get(form, 'FSDP')}: {world} of {world} ranks"
    assert checkpoint.format == "parallel" and checkpoint.about.startswith(title)
    made = check(checkpoint, folder, form, tmp_path)
    net = save_ranks.model()
    net.load_state_dict(made["model"])
    optimizer = torch.optim.AdamW(net.parameters())
    optimizer.load_state_dict(made["optimizer"])
    # The moments are those of one step with the gradients that were made up.
    for parameter, old in zip(net.parameters(), save_ranks.model().parameters(), strict=True):
        state, gradient = optimizer.state[parameter], old.detach() * 0.5 + 0.25
        torch.testing.assert_close(state["exp_avg"], gradient * 0.1)
        torch.testing.assert_close(state["exp_avg_sq"], gradient**2 * 0.001)


def check(checkpoint: Checkpoint, folder: Path, form: str, tmp_path: Path) -> Any:
    """Compare a form with the whole of torch. Return what torch loads of ckptkit's output."""
    ckptkit.save(checkpoint, tmp_path / "out.pth", force=True)
    made = torch.load(tmp_path / "out.pth", weights_only=True)
    assert_same(made["model"], torch.load(folder / f"{form}.full.pt", weights_only=True))
    assert form.startswith("fsdp1") != (folder / f"{form}.optim.pt").exists()
    if not form.startswith("fsdp1"):
        expected = torch.load(folder / f"{form}.optim.pt", weights_only=True)
        assert_same(made["optimizer"]["state"], expected["state"])
        assert made["optimizer"]["param_groups"] == expected["param_groups"]
    return made


@pytest.mark.processes
@pytest.mark.parametrize(("world", "form"), CASES)
def test_each_file_alone_is_a_part(world: int, form: str, saved: Any) -> None:
    for rank in range(world):
        part = ckptkit.open(saved(world) / form / f"model_world_size_{world}_rank_{rank}.pt").part
        whole = f"a checkpoint of {CUT_BY[form]}" if form in CUT_BY else "an FSDP checkpoint"
        assert part is not None and part.name == f"rank {rank} of {world} of {whole}"


@pytest.mark.processes
def test_torchrun_saves_the_same(tmp_path: Path) -> None:
    """Every form, by torchrun itself in place of processes that were forked."""
    world = 2
    words = ["--standalone", f"--nproc-per-node={world}", "-m", save_ranks.__name__]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *words, str(tmp_path)],
        cwd=ROOT, env=ENVIRONMENT, capture_output=True, encoding="utf-8", timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    for form in (each.__name__ for each in save_ranks.FORMS[world]):
        check(ckptkit.open(tmp_path / form), tmp_path, form, tmp_path)
