"""The manifest against the fixtures: nothing more, nothing less, and what it says of them holds through torch."""

from __future__ import annotations

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fixtures.digits_model import DigitsNet
from fixtures.make import accuracy
from tests.conftest import tags

FOLDER = Path(__file__).parent.parent / "fixtures"
ENTRIES: dict[str, Any] = json.loads((FOLDER / "manifest.json").read_text())["fixtures"]
DIGITS = [name for name, entry in ENTRIES.items() if "accuracy" in entry["facts"]]


def load(name: str) -> Any:
    """A fixture as those who made its format read it."""
    path = FOLDER / name
    if path.is_dir():
        return {
            key: value for part in sorted(path.glob("*-of-*")) for key, value in load(f"{name}/{part.name}").items()
        }
    if path.suffix == ".safetensors":
        return load_file(path)
    if path.suffix == ".pkl":
        return pickle.loads(path.read_bytes())
    return torch.load(path, map_location="cpu", weights_only="module" not in name)


def state_of(loaded: Any) -> dict[str, torch.Tensor]:
    if isinstance(loaded, torch.nn.Module):
        return loaded.state_dict()
    state: dict[str, torch.Tensor] = loaded.get("model", loaded)
    return state


def test_every_file_is_in_the_manifest() -> None:
    listed = {name for entry in ENTRIES.values() for name in entry["sha256"]}
    folders = [place for place in FOLDER.iterdir() if place.is_dir() and place.name != "__pycache__"]
    there = {path.relative_to(FOLDER).as_posix() for folder in folders for path in folder.rglob("*") if path.is_file()}
    assert listed == there


@pytest.mark.parametrize("name", ENTRIES)
def test_bytes_are_those_of_the_manifest(name: str) -> None:
    for file, digest in ENTRIES[name]["sha256"].items():
        assert hashlib.sha256((FOLDER / file).read_bytes()).hexdigest() == digest, file


@pytest.mark.parametrize("name", DIGITS)
def test_digits_hold_what_the_manifest_says(name: str) -> None:
    facts = ENTRIES[name]["facts"]
    loaded = load(name)
    state = state_of(loaded)
    assert len(state) == facts["tensors"]
    assert all(key.startswith(facts["prefix"]) for key in state)
    assert ("epoch" in facts) == (isinstance(loaded, dict) and "epoch" in loaded)
    if "epoch" in facts:
        assert loaded["epoch"] == facts["epoch"]


@pytest.mark.parametrize("name", DIGITS)
def test_the_net_is_as_good_as_the_manifest_says(name: str) -> None:
    model = DigitsNet()
    prefix = ENTRIES[name]["facts"]["prefix"]
    model.load_state_dict({key.removeprefix(prefix): value for key, value in state_of(load(name)).items()})
    held_out = load("safetensors/digits_held_out.safetensors")
    assert accuracy(model, held_out["images"], held_out["labels"]) == ENTRIES[name]["facts"]["accuracy"]


@pytest.mark.parametrize("name", [each for each in ENTRIES if "cuda1" in each])
def test_simulated_tags_are_in_the_file_and_called_simulated(name: str) -> None:
    assert "simulated" in ENTRIES[name]["device"]
    assert tags(FOLDER / name) == {"cuda:1"}


def test_ties_are_ties() -> None:
    name = "torch-zip/views_ties_dtypes.pth"
    loaded = load(name)
    for group in ENTRIES[name]["facts"]["ties"]:
        assert len({loaded["state_dict"][key].untyped_storage().data_ptr() for key in group}) == 1
    assert len(loaded["state_dict"]) + len(loaded["dtypes"]) == ENTRIES[name]["facts"]["tensors"]
    assert all(str(tensor.dtype) == f"torch.{key}" for key, tensor in loaded["dtypes"].items())


def test_arrays_are_arrays() -> None:
    loaded = load("pickle/arrays.pkl")
    arrays = [value for value in loaded.values() if getattr(value, "ndim", 0)]
    assert len(arrays) == ENTRIES["pickle/arrays.pkl"]["facts"]["arrays"]
