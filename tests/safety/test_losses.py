"""Values that another format cannot hold are stored elsewhere, named in the report, or refused."""

from __future__ import annotations

import json
from collections import OrderedDict
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from tests.conftest import Run
from tests.safety.works import Bench


class Config:
    """A class that only this file has."""


def tied() -> OrderedDict[str, torch.Tensor]:
    weight = torch.arange(6.0)
    return OrderedDict({"a": weight, "b": weight, "t": torch.ones(2, 3).t()})


SHARED = torch.arange(6.0)
KEPT: dict[str, Any] = {
    "values": {"model": {"w": torch.ones(2)}, "epoch": 3, "name": "x", "losses": [0.5, 0.25]},
    "ties and strides": tied(),
    "requires_grad": {"w": torch.nn.Parameter(torch.ones(2))},
}
NAMED: dict[str, tuple[Any, str]] = {
    "an optimizer": (
        {"model": {"w": torch.ones(2)}, "optimizer": {"state": {0: {"m": torch.ones(2)}}}},
        "optimizer",
    ),
    "random numbers": ({"model": {"w": torch.ones(2)}, "epoch": 3, "rng": torch.ones(5)}, "rng"),
    "an object": ({"model": {"w": torch.ones(2)}, "config": Config()}, "config"),
    "a view": (OrderedDict(w=SHARED, v=SHARED[2:4]), "share memory"),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "a dtype": ({"w": torch.ones(2, dtype=torch.complex128)}, "safetensors cannot store"),
    "quantized": (
        {"w": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)},
        "--dequantize",
    ),
    "names that meet": ({"module.w": torch.ones(2), "w": torch.ones(1)}, "module.w"),
}


@pytest.mark.parametrize("name", KEPT)
def test_DS_26_what_is_kept_beside(name: str, tmp_path: Path, run: Run) -> None:
    torch.save(KEPT[name], tmp_path / "run.pth")
    done = run("convert", "run.pth", "out.safetensors", "--json", cwd=tmp_path)
    assert done.code == 0 and json.loads(done.stdout)["left_out"] == [], done
    assert run("convert", "out.safetensors", "back.pth", cwd=tmp_path).code == 0
    state, given = torch.load(tmp_path / "back.pth", weights_only=True), KEPT[name]
    expected = given.get("model", given)
    assert {key: value.tolist() for key, value in state.items()} == {
        key: value.tolist() for key, value in expected.items()
    }
    with closing(ckptkit.open(tmp_path / "out.safetensors")) as there:
        beside = json.loads(there.extras.get("ckptkit", "{}"))
    if name == "values":
        assert beside["values"] == {"epoch": 3, "name": "x", "losses": [0.5, 0.25]}
    elif name == "requires_grad":
        assert isinstance(state["w"], torch.nn.Parameter) and state["w"].requires_grad
    else:
        assert state["a"].data_ptr() == state["b"].data_ptr()


@pytest.mark.parametrize("name", NAMED)
def test_TM_11_DS_26_what_is_left_out_is_named(name: str, tmp_path: Path, run: Run) -> None:
    root, what = NAMED[name]
    torch.save(root, tmp_path / "run.pth")
    done = run("convert", "run.pth", "out.safetensors", "--json", cwd=tmp_path)
    assert done.code == 0
    said = json.loads(done.stdout)
    lines = [*said["left_out"], *said["warnings"]]
    assert any(what in line for line in lines) and not any("epoch" in line for line in lines), said
    assert what in done.stderr
    assert run("convert", "run.pth", "whole.safetensors", "--all", cwd=tmp_path).code == 0
    if name == "an object":
        refused = run("convert", "run.pth", "none.safetensors", "--objects", "error", cwd=tmp_path)
        assert refused.code == 3 and not (tmp_path / "none.safetensors").exists()


@pytest.mark.parametrize("name", REFUSED)
def test_DS_26_what_would_change_is_refused(name: str, tmp_path: Path, run: Run) -> None:
    root, says = REFUSED[name]
    torch.save(root, tmp_path / "run.pth")
    done = run("convert", "run.pth", "out.safetensors", "--strip", "module.", cwd=tmp_path)
    assert done.code == 3 and says in done.stderr, done
    assert [path.name for path in tmp_path.iterdir()] == ["run.pth"]


def test_DS_24_what_is_verified_may_come_from_the_cache(small: Path, tmp_path: Path) -> None:
    """The output is read back before it is brought to the disk and gets its name; a disk that lies
    is not found out."""
    bench = Bench("durable", small, tmp_path)
    seen = bench.calls(("read", "write", "fsync", "link", "fadvise64"))
    steps = [call.name for call in seen if ".tmp" in call.shown]
    assert steps.index("read") > len(steps) - 1 - steps[::-1].index("write")
    assert steps[-2:] == ["fsync", "link"] and "fadvise64" not in steps
