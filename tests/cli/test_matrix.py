"""Every fixture through ``inspect --json --digest`` and ``strip-module``: against what torch finds
in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fixtures.making import reading
from tests.cli.conftest import Ckptkit
from tests.matrix import NAMES, Fixture
from tests.torch_equality import bits, sha256


@pytest.mark.parametrize("name", NAMES)
def test_inspect_says_what_torch_finds(name: str, as_json: Callable[..., Any]) -> None:
    fixture = Fixture(name).needs_reader()
    (file,) = as_json("inspect --digest", fixture.path)["files"]
    assert (file["format"], file["weights"]) == (fixture.facts["format"], fixture.facts["weights"])
    assert {each["device"] for each in file["tensors"] if each["kind"] != "ndarray"} == set(
        fixture.facts["devices"]
    )
    state = {key: value for key, value in fixture.state().items() if torch.is_tensor(value)}
    said = {each["name"]: each for each in file["tensors"] if each["name"] in state}
    assert list(said) == list(state)
    for key, tensor in state.items():
        assert said[key]["shape"] == list(tensor.shape)
        assert said[key]["stride"] == list(tensor.stride()) or not tensor.numel()
        assert said[key]["dtype"] == str(tensor.dtype).removeprefix("torch.")
        assert said[key]["sha256"] == sha256(tensor)
    if "epoch" in fixture.facts:
        assert fixture.facts["epoch"] in [
            each["value"] for each in file["values"] if each["path"] == "epoch"
        ]


@pytest.mark.parametrize("name", [name for name in NAMES if Fixture(name).facts.get("prefix")])
def test_prefixes_go_in_the_order_in_which_they_nest(name: str, ckptkit: Ckptkit) -> None:
    fixture = Fixture(name).needs_reader()
    prefixes = [part + "." for part in fixture.facts["prefix"].split(".")[:-1]]
    options = [word for prefix in prefixes for word in ("--prefix", prefix)]
    assert ckptkit("strip-module", fixture.path, "plain.pth", *options).exit_code == 0
    weights = fixture.facts["weights"]
    loaded = torch.load("plain.pth", map_location="cpu", weights_only=True)
    state = loaded[weights] if weights else loaded
    want = reading.without_prefix(fixture.state())
    assert {key: bits(value) for key, value in state.items()} == {
        key: bits(value) for key, value in want.items()
    }
