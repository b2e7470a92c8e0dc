"""Shards as others load them: the index, then each file through safetensors or torch; and back into
one file."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.api import Conversion
from ckptkit.core.errors import OutputError, UnsafeGlobalError, UsageError
from ckptkit.core.options import Options
from tests.torch_equality import same

State = dict[str, torch.Tensor]
KINDS = {"sharded": ("model", ".safetensors"), "sharded-bin": ("pytorch_model", ".bin")}
both = pytest.mark.parametrize("kind", KINDS)


def sample() -> OrderedDict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = OrderedDict(
        (name, torch.randn(10, 10)) for name in ("l2.w", "l1.w", "l10.w")
    )  # not in alphabetical order
    state["l1.b"] = torch.arange(10)
    state._metadata = OrderedDict({"": {"version": 1}, "l1": {"version": 2}})  # type: ignore[attr-defined]
    return state


def saved(folder: Path, value: Any) -> Path:
    torch.save(value, folder / "run.pth")
    return folder / "run.pth"


def write(path: Path, out: Path, kind: str, size: int | None = None, **options: Any) -> Conversion:
    return ckptkit.save(
        ckptkit.open(path), out, format=kind, options=Options(shard_size=size, **options)
    )


def loaded(folder: Path) -> State:
    """As transformers does: each file that the index names, and from it what the index says."""
    (index,) = folder.glob("*.index.json")
    places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    state: State = {}
    for name in sorted(set(places.values())):
        read = load_file if name.endswith(".safetensors") else torch.load
        shard = read(folder / name)
        assert {key for key, place in places.items() if place == name} == shard.keys()
        state |= shard
    return {name: state[name] for name in places}


def index_of(folder: Path) -> dict[str, Any]:
    (index,) = folder.glob("*.index.json")
    found: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))
    return found


@both
def test_what_others_load(tmp_path: Path, kind: str) -> None:
    state = sample()
    done = write(saved(tmp_path, state), tmp_path / "out", kind, 800)
    stem, suffix = KINDS[kind]
    shards = [f"{stem}-{number:05}-of-00002{suffix}" for number in (1, 2)]
    assert sorted(os.listdir(tmp_path / "out")) == sorted([*shards, f"{stem}{suffix}.index.json"])
    assert [file.name for file in done.plan.files] == [*shards, f"{stem}{suffix}.index.json"]
    same(dict(state), loaded(tmp_path / "out"))
    assert index_of(tmp_path / "out")["metadata"]["total_size"] == 1280
    places = index_of(tmp_path / "out")["weight_map"]
    assert list(places.values()) == [shards[0], shards[0], shards[1], shards[1]]


def test_a_tie_called_like_the_total(tmp_path: Path) -> None:
    one = torch.ones(8)
    path = saved(tmp_path, {"a": one, "total_size": one, "b": torch.zeros(8)})
    write(path, tmp_path / "out", "sharded", 32)
    assert list(ckptkit.open(tmp_path / "out").weights) == ["a", "total_size", "b"]
    assert index_of(tmp_path / "out")["metadata"]["total_size"] == 96


def test_what_shares_memory_stays_in_one_file(tmp_path: Path) -> None:
    """And counts once; torch finds it shared again."""
    base = torch.arange(16.0)
    state = {
        "base": base,
        "other": torch.ones(16),
        "row": base[:4],
        "more": torch.ones(4),
        "tied": base.detach(),
    }
    write(saved(tmp_path, state), tmp_path / "out", "sharded-bin", 64)
    index = index_of(tmp_path / "out")
    groups: dict[str, list[str]] = {}
    for name, file in index["weight_map"].items():
        groups.setdefault(file, []).append(name)
    assert list(groups.values()) == [["base", "row", "tied"], ["other"], ["more"]]
    assert list(index["weight_map"]) == list(state)
    assert index["metadata"]["total_size"] == 64 + 64 + 16
    for names in groups.values():
        part = torch.load(tmp_path / "out" / index["weight_map"][names[0]], weights_only=True)
        same({name: state[name] for name in names}, part)
    assert ckptkit.open(tmp_path / "out").warnings == ()


@both
def test_one_shard_is_a_file_without_a_number(tmp_path: Path, kind: str) -> None:
    """And without an index, as the hub has it; the folder is read again."""
    state = sample()
    path = saved(tmp_path, {"model": state, "epoch": 1, "optimizer": {"m": torch.ones(3)}})
    write(path, tmp_path / "out", kind)
    (name,) = os.listdir(tmp_path / "out")
    assert name == "".join(KINDS[kind])
    read = load_file if kind == "sharded" else torch.load
    found = read(tmp_path / "out" / name)
    same(dict(state), {name: found[name] for name in state}, storages=kind != "sharded")
    same(state, ckptkit.load(tmp_path / "out"))


@both
def test_nothing_at_all(tmp_path: Path, kind: str) -> None:
    write(saved(tmp_path, {}), tmp_path / "out", kind, 1)
    assert os.listdir(tmp_path / "out") == ["".join(KINDS[kind])]
    assert dict(ckptkit.open(tmp_path / "out").weights) == {}


@both
def test_what_is_left_out_is_named(tmp_path: Path, kind: str) -> None:
    moments = {"m": torch.ones(10)}
    root = {"model": sample(), "optimizer": moments, "epoch": 3, "args": Fraction(1, 2)}
    path = saved(tmp_path, root)
    with pytest.raises(UnsafeGlobalError):
        write(path, tmp_path / "out", kind, 800, objects="error")
    assert not (tmp_path / "out").exists()
    done = write(path, tmp_path / "out", kind, 800)
    lost = ("optimizer (1 tensor, 40 bytes)", "args (fractions.Fraction)")
    assert done.plan.notes == tuple(f"dropped: {each}" for each in lost)
    metadata = ckptkit.open(tmp_path / "out").extras
    assert json.loads(metadata["ckptkit"])["values"] == {"epoch": 3}


def test_SH_10_names_are_our_own(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    odd = "--help $(x) -00001-of-00001.safetensors"
    save_file({"a": torch.ones(8), "b": torch.ones(8)}, folder / odd)
    index = folder / "evil.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": odd, "b": odd}}))
    write(folder, tmp_path / "out", "sharded", 32)
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    assert sorted(os.listdir(tmp_path / "out")) == [*shards, "model.safetensors.index.json"]


def test_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = saved(tmp_path, sample())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ckptkit.publish.publish._rename", full)
    with pytest.raises(OutputError):
        write(path, tmp_path / "out", "sharded", 800)
    assert os.listdir(tmp_path) == ["run.pth"]


# Which format is written


def test_safetensors_unless_something_says_otherwise(tmp_path: Path) -> None:
    path = saved(tmp_path, sample())

    def wrote(source: str, out: str, size: int | None = 800, format: str | None = None) -> str:
        options = Options(shard_size=size)
        checkpoint = ckptkit.open(tmp_path / source)
        return ckptkit.save(checkpoint, tmp_path / out, format=format, options=options).format

    assert wrote(path.name, "a") == "sharded"
    assert wrote(path.name, "b", format="sharded-bin") == "sharded-bin"
    assert wrote("b", "c") == "sharded-bin"
    assert wrote("a", "d", None) == "sharded"
    with pytest.raises(UsageError, match="name of a safetensors file") as caught:
        wrote(path.name, "a.safetensors")
    assert "omit shard_size" in str(caught.value.hint)
    with pytest.raises(UsageError, match="writes a single file") as caught:
        wrote(path.name, "e", format="safetensors")
    assert "sharded, sharded-bin" in str(caught.value.hint)
