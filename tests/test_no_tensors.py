"""A write of no tensors where tensors exist is an error; of an entry without any, it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import ckptkit
from ckptkit.core.errors import UsageError


def dropped(ck: ckptkit.Checkpoint) -> ckptkit.Checkpoint:
    return ck.without("model").without("optimizer")


WRITES: dict[str, Callable[[Path, Path], object]] = {
    "a step": lambda src, out: ckptkit.convert(src, out / "o.pth", dropped),
    "in place": lambda src, out: ckptkit.convert(src, None, dropped, in_place=True),
    "an empty entry": lambda src, out: ckptkit.convert(src, out / "o.safetensors", key="empty"),
    "of several": lambda src, out: ckptkit.average(
        [ckptkit.open(src, key="empty"), ckptkit.open(src, key="empty")]
    ),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    state = {
        "model": {"weight": torch.ones(2, 3)},
        "empty": {},
        "optimizer": {"state": {0: {"exp_avg": torch.zeros(2, 3)}}},
        "args": {"lr": 1.0},
    }
    (tmp_path / "in").mkdir()
    torch.save(state, tmp_path / "in" / "run.pth")
    return tmp_path / "in" / "run.pth"


@pytest.mark.parametrize("way", WRITES)
def test_a_write_of_no_tensors_is_an_error(way: str, saved: Path, tmp_path: Path) -> None:
    before = saved.read_bytes()
    with pytest.raises(UsageError, match=r"no tensor|drop all tensors"):
        WRITES[way](saved, tmp_path)
    assert saved.read_bytes() == before and [each.name for each in tmp_path.iterdir()] == ["in"]


def test_an_entry_of_values_is_extracted(saved: Path, tmp_path: Path) -> None:
    ckptkit.convert(saved, tmp_path / "args.pth", lambda ck: ckptkit.extract(ck, "args"))
    assert torch.load(tmp_path / "args.pth") == {"lr": 1.0}


def test_values_alone_are_written(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "args": {}}, tmp_path / "in.pth")
    ckptkit.convert(tmp_path / "in.pth", tmp_path / "out.pth", lambda ck: ck.without("args"))
    assert torch.load(tmp_path / "out.pth") == {"epoch": 3}
