"""Rows that differ in an index alone are one row, if their modules are of one kind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.cli.conftest import Ckptkit


def mixed() -> nn.Sequential:
    """Modules of four kinds whose parameters have equal shapes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8)
    )


@pytest.fixture
def mixed_pth() -> Path:
    model = mixed()
    optimizer = torch.optim.AdamW(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    history = {
        "losses": [0.5 / (epoch + 1) for epoch in range(500)],
        "pairs": [[epoch, 0.5 / (epoch + 1)] for epoch in range(100)],
        "epochs": [{"accuracy": epoch / 10, "lr": 0.1} for epoch in range(10)],
    }
    run = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "history": history}
    torch.save(run, "mixed.pth")
    return Path("mixed.pth")


BIASES = ["{0,2}.bias", "1.bias", "{3..4}.bias"]


def names(text: str, ending: str) -> list[str]:
    """Return the first words of the lines that end so."""
    firsts = [line.split()[0] for line in text.splitlines() if line.strip()]
    return [first for first in firsts if first.endswith(ending)]


@pytest.mark.parametrize("options", [[], ["--keys", "*.bias"]])
def test_inspect(options: list[str], ckptkit: Ckptkit, mixed_pth: Path) -> None:
    """Also where only a part of each module is selected."""
    assert names(ckptkit("inspect", mixed_pth, *options).stdout, ".bias") == BIASES


def test_stats(ckptkit: Ckptkit, mixed_pth: Path) -> None:
    shown = ckptkit("stats", mixed_pth, "--fold").stdout
    assert names(shown, ".bias") == BIASES
    assert len(names(shown, "running_mean")) == 1
    assert names(ckptkit(f"stats {mixed_pth} --keys '*.bias' --fold").stdout, ".bias") == BIASES


def test_diff(ckptkit: Ckptkit, mixed_pth: Path) -> None:
    for name, change in (("other.pth", lambda t: t + 1), ("wide.pth", lambda t: t.double())):
        torch.save({n: change(t) for n, t in mixed().state_dict().items()}, name)
    torch.save({"x": torch.ones(1)}, "x.pth")
    changed = ckptkit("diff", mixed_pth, "other.pth", "--values").stdout
    assert sorted(names(changed, ".bias")) == sorted(BIASES)
    assert names(ckptkit("diff", mixed_pth, "wide.pth").stdout, ".bias") == BIASES
    assert names(ckptkit("diff", mixed_pth, "x.pth").stdout, ".bias") == BIASES
    assert names(ckptkit("diff x.pth", mixed_pth).stdout, ".bias") == BIASES


def test_counters_and_histories_are_folded(ckptkit: Ckptkit, mixed_pth: Path) -> None:
    shown = ckptkit("inspect", mixed_pth).stdout
    assert names(shown, ".step") == [] and names(shown, "optimizer") == ["optimizer"]
    selected = ckptkit("inspect", mixed_pth, "--keys", "optimizer*").stdout
    assert names(selected, ".step") == ["optimizer.state.{0..9}.step"]
    assert names(shown, "num_batches_tracked") == ["{3..4}.num_batches_tracked"]
    for line in (
        "  history.losses.{0..499}: 0.5, 0.25, ",
        "  history.pairs.{0..99}.{0..1}: 0, 0.5, 1, 0.25, ",
        "  history.epochs.{0..9}.accuracy: 0.0, 0.1, 0.2, ",
        "  history.epochs.{0..9}.lr: 0.1\n",
    ):
        assert line in shown
    assert shown.count("history.") == 4
