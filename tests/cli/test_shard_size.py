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

from ckptkit.cli.options import size
from ckptkit.core.text import merge_all
from tests.cli.conftest import Ckptkit

STATE = {"a": torch.ones(100), "b": torch.zeros(100), "c": torch.ones(3)}


@pytest.fixture
def model() -> Path:
    torch.save(STATE, "model.pth")
    return Path("model.pth")


def places(folder: Path) -> dict[str, str]:
    (index,) = folder.glob("*.index.json")
    found: dict[str, str] = json.loads(index.read_text())["weight_map"]
    return found


# Three tensors of 400, 400 and 12 bytes: sizes, and the number of shards.
SIZES = {
    "400": 3, "400B": 3, "0.4KB": 3, "0.4 kb": 3, "0.5KiB": 2, "811": 2, "812": 1, "1KB": 1, "5GB": 1,
    "5GiB": 1, "1TB": 1, "4": 3, "411.9": 3, "412": 2, "400.9": 3,
}  # fmt: skip


@pytest.mark.parametrize("text", SIZES)
def test_sizes(ckptkit: Ckptkit, model: Path, text: str) -> None:
    ckptkit("convert model.pth out --shard-size", text, code=0)
    shards = sorted(Path("out").glob("*.safetensors"))
    assert len(shards) == SIZES[text]
    found = merge_all(map(load_file, shards))
    assert all(torch.equal(found[name], tensor) for name, tensor in STATE.items())


@pytest.mark.parametrize(
    "text", ["", "0", "0GB", "-1", "GB", "5G", "5 giga", "1e9", "nan", "5GB5", "0.1", "9" * 19]
)
def test_what_is_no_size(ckptkit: Ckptkit, model: Path, text: str) -> None:
    assert "5GB" in ckptkit("convert model.pth out", f"--shard-size={text}", code=2).stderr
    assert not Path("out").exists()


def test_units() -> None:
    sizes = {"5GB": 5 * 10**9, "5GiB": 5 << 30, "1.5MB": 1_500_000, "2KiB": 2048, "1TiB": 1 << 40, "7": 7}  # fmt: skip
    assert {text: size(text) for text in sizes} == sizes


def test_torch_shards_there_and_back(ckptkit: Ckptkit, model: Path) -> None:
    options = ("--shard-size", "400", "--format", "sharded-bin")
    assert ckptkit("convert", model, "bin", *options).exit_code == 0
    assert set(places(Path("bin")).values()) == {
        f"pytorch_model-{n:05}-of-00003.bin" for n in (1, 2, 3)
    }
    assert ckptkit("add-module bin ddp --shard-size 400").exit_code == 0
    assert list(places(Path("ddp"))) == ["module.a", "module.b", "module.c"]
    assert all(name.endswith(".bin") for name in places(Path("ddp")).values())
    assert ckptkit("strip-module ddp out.pth").exit_code == 0
    back = torch.load("out.pth", weights_only=True)
    assert list(back) == list(STATE) and all(torch.equal(back[name], STATE[name]) for name in STATE)


def test_unsharding(ckptkit: Ckptkit, model: Path) -> None:
    assert ckptkit("convert", model, "out", "--shard-size", "400").exit_code == 0
    assert ckptkit("convert out one.safetensors").exit_code == 0
    found = load_file("one.safetensors")
    assert all(torch.equal(found[name], STATE[name]) for name in STATE)


def test_json_and_dry_run(as_json: Callable[..., Any], model: Path) -> None:
    facts = as_json("convert", model, "out", "--shard-size", "400", "--dry-run")
    assert facts["format"] == "sharded" and facts["tensor_count"] == 3
    assert not Path("out").exists()


def test_a_folder_that_is_not_empty(ckptkit: Ckptkit, model: Path) -> None:
    Path("out").mkdir()
    assert ckptkit("convert", model, "out", "--shard-size", "400").exit_code == 0
    done = ckptkit("convert", model, "out", "--shard-size", "400", "--force", code=2)
    assert "not empty" in done.stderr


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
    assert hint in ckptkit("convert", model, *options, "--shard-size", "400", code=2).stderr
    assert os.listdir(model.parent) == ["model.pth"]
