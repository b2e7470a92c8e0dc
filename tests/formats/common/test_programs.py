"""Copies of programs: the plain state_dict, and a word about what stays behind. The program itself
is never touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ckptkit
from ckptkit.api import convert
from ckptkit.core.errors import UsageError
from ckptkit.edits.structure import extract
from tests.formats.torchscript.scripts import QUIET, by_torch, constants_by_torch, quantized, script
from tests.test_imports import spied

pytestmark = QUIET
BEHIND = "dropped: the program, and everything in it except its state_dict"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return script(net(), tmp_path / "net.pt")


@pytest.fixture
def frozen(tmp_path: Path) -> Path:
    torch.jit.save(torch.jit.freeze(torch.jit.script(net())), tmp_path / "frozen.pt")
    return tmp_path / "frozen.pt"


def check(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert list(got) == list(want)
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def load(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def test_a_copy_is_a_plain_state_dict(program: Path, tmp_path: Path) -> None:
    """Today's torch loads the copy, and into a model of the same class."""
    before = program.read_bytes()
    done = convert(program, tmp_path / "out.pth")
    check(load(tmp_path / "out.pth"), by_torch(program))
    assert done.plan.notes == (BEHIND,)
    net().load_state_dict(load(tmp_path / "out.pth"))
    assert program.read_bytes() == before
    assert not any(tensor.requires_grad for tensor in load(tmp_path / "out.pth").values())


def test_frozen(frozen: Path, tmp_path: Path) -> None:
    want = constants_by_torch(frozen)
    convert(frozen, tmp_path / "out.pth")
    got = load(tmp_path / "out.pth")
    check({name: got[name] for name in want}, want)


def test_packed_weights_are_named(tmp_path: Path) -> None:
    path = script(quantized(), tmp_path / "net.pt")
    notes = convert(path, tmp_path / "out.pth").plan.notes
    assert list(load(tmp_path / "out.pth")) == list(by_torch(path))
    assert any("2 packed quantized tensors; dequantize converts" in note for note in notes)
    convert(script(nn.ReLU(), path), tmp_path / "empty.pth")  # nothing to write
    assert load(tmp_path / "empty.pth") == {}


def test_not_in_place(program: Path) -> None:
    before = program.read_bytes()
    with pytest.raises(UsageError, match="a TorchScript program in place"):
        convert(program, None, lambda ck: ckptkit.add_prefix(ck), in_place=True)
    assert program.read_bytes() == before


def test_without_torch(program: Path, tmp_path: Path) -> None:
    """Neither reading nor copying imports it, and nothing unpickles."""
    commands = ["inspect", "--json", program], ["convert", program, "out.pth"]
    for report in spied(tmp_path, *commands):
        assert (report.code, report.unpicklers) == (0, 0)
        assert not {"torch", "numpy", "safetensors", "pickle"}.intersection(report.modules)


def test_wrapped_and_extracted(program: Path, frozen: Path, tmp_path: Path) -> None:
    for path in (program, frozen):
        checkpoint = ckptkit.wrap(ckptkit.open(path), "model")
        ckptkit.save(checkpoint, tmp_path / "wrapped.pth")
        got = load(tmp_path / "wrapped.pth")
        assert list(got) == ["model"] and list(got["model"]) == list(checkpoint.weights)
        (tmp_path / "wrapped.pth").unlink()
    ckptkit.save(extract(ckptkit.open(frozen), "CONSTANTS"), tmp_path / "constants.pth")
    assert set(constants_by_torch(frozen)) <= set(load(tmp_path / "constants.pth"))
