"""--shard-size, from the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.cli.conftest import Ckptkit

STATE = {"a": torch.ones(100), "b": torch.zeros(100), "c": torch.ones(3)}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.save(STATE, tmp_path / "model.pth")
    return tmp_path / "model.pth"


def places(folder: Path) -> dict[str, str]:
    (index,) = folder.glob("*.index.json")
    found: dict[str, str] = json.loads(index.read_text())["weight_map"]
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("400", 3),
        ("400B", 3),
        ("0.4KB", 3),
        ("0.4 kb", 3),
        ("0.5KiB", 2),
        ("811", 2),
        ("812", 1),
        ("1KB", 1),
        ("5GB", 1),
        ("5GiB", 1),
        ("1TB", 1),
        ("4", 3),
        ("411.9", 3),
        ("412", 2),
        ("400.9", 3),
    ],
)
def test_sizes(ckptkit: Ckptkit, model: Path, tmp_path: Path, text: str, expected: int) -> None:
    """Three tensors of 400, 400 and 12 bytes."""
    done = ckptkit("convert", model, tmp_path / "out", "--shard-size", text)
    assert done.exit_code == 0, done.stderr
    shards = sorted(name for name in os.listdir(tmp_path / "out") if name.endswith(".safetensors"))
    assert len(shards) == expected
    found = {
        name: tensor
        for shard in shards
        for name, tensor in load_file(tmp_path / "out" / shard).items()
    }
    assert all(torch.equal(found[name], tensor) for name, tensor in STATE.items())


@pytest.mark.parametrize(
    "text", ["", "0", "0GB", "-1", "GB", "5G", "5 giga", "1e9", "nan", "5GB5", "0.1", "9" * 19]
)
def test_what_is_no_size(ckptkit: Ckptkit, model: Path, tmp_path: Path, text: str) -> None:
    done = ckptkit("convert", model, tmp_path / "out", f"--shard-size={text}")
    assert done.exit_code == 2 and "5GB" in done.stderr
    assert not (tmp_path / "out").exists()


def test_units() -> None:
    from ckptkit.cli.options import size

    sizes = {
        "5GB": 5 * 10**9,
        "5GiB": 5 * 2**30,
        "1.5MB": 1_500_000,
        "2KiB": 2048,
        "1TiB": 2**40,
        "7": 7,
    }
    assert {text: size(text) for text in sizes} == sizes


def test_torch_shards_there_and_back(ckptkit: Ckptkit, model: Path, tmp_path: Path) -> None:
    options = ("--shard-size", "400", "--format", "sharded-bin")
    assert ckptkit("convert", model, tmp_path / "bin", *options).exit_code == 0
    assert set(places(tmp_path / "bin").values()) == {
        f"pytorch_model-{n:05}-of-00003.bin" for n in (1, 2, 3)
    }
    assert (
        ckptkit("add-module", tmp_path / "bin", tmp_path / "ddp", "--shard-size", "400").exit_code
        == 0
    )
    assert list(places(tmp_path / "ddp")) == ["module.a", "module.b", "module.c"]
    assert all(name.endswith(".bin") for name in places(tmp_path / "ddp").values())
    assert ckptkit("strip-module", tmp_path / "ddp", tmp_path / "out.pth").exit_code == 0
    back = torch.load(tmp_path / "out.pth", weights_only=True)
    assert list(back) == list(STATE) and all(torch.equal(back[name], STATE[name]) for name in STATE)


def test_unsharding(ckptkit: Ckptkit, model: Path, tmp_path: Path) -> None:
    assert ckptkit("convert", model, tmp_path / "out", "--shard-size", "400").exit_code == 0
    assert ckptkit("convert", tmp_path / "out", tmp_path / "one.safetensors").exit_code == 0
    found = load_file(tmp_path / "one.safetensors")
    assert all(torch.equal(found[name], STATE[name]) for name in STATE)


def test_json_and_dry_run(as_json: Callable[..., Any], model: Path, tmp_path: Path) -> None:
    facts = as_json("convert", model, tmp_path / "out", "--shard-size", "400", "--dry-run")
    assert facts["format"] == "sharded" and facts["tensor_count"] == 3
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_empty(ckptkit: Ckptkit, model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert ckptkit("convert", model, tmp_path / "out", "--shard-size", "400").exit_code == 0
    done = ckptkit("convert", model, tmp_path / "out", "--shard-size", "400", "--force")
    assert done.exit_code == 2 and "not empty" in done.stderr


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (["out.safetensors"], "name a folder"),
        (["out.pth"], "name a folder"),
        (["out", "--format", "npz"], "sharded, sharded-bin"),
        (["out", "--all"], "cannot store a whole checkpoint"),
        (["--in-place"], "the output is a folder"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be(
    ckptkit: Ckptkit, model: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], hint: str
) -> None:
    monkeypatch.chdir(model.parent)
    done = ckptkit("convert", model, *options, "--shard-size", "400")
    assert done.exit_code == 2 and hint in done.stderr
    assert os.listdir(model.parent) == ["model.pth"]
