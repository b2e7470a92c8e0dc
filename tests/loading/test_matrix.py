"""Every fixture into torch: what torch.load gives, in every value, and the weights into models."""

from __future__ import annotations

import pytest
import torch

import ckptkit
from ckptkit.trainer.parallel import Replicated
from fixtures.making import reading
from fixtures.making.training import empty_net
from tests.matrix import NAMES, Fixture, of_net
from tests.torch_equality import bits, same, ties

PLAIN = [name for name in NAMES if Fixture(name).facts.get("weights_only")]


@pytest.mark.parametrize("name", PLAIN)
def test_whole_tree(name: str) -> None:
    fixture = Fixture(name).needs_reader()
    same(fixture.load(), ckptkit.load(fixture.path, map_location="cpu", whole=True))


@pytest.mark.parametrize("name", NAMES)
def test_weights(name: str) -> None:
    fixture = Fixture(name).needs_reader()
    state = {key: value for key, value in fixture.state().items() if torch.is_tensor(value)}
    loaded = {
        key: value
        for key, value in ckptkit.load(fixture.path, map_location="cpu").items()
        if key in state
    }
    assert list(loaded) == list(state)
    for key, want in state.items():
        got = loaded[key]
        assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride()), key
        assert bits(got) == bits(want), key
    assert ties(loaded) == ties(state)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", of_net())
def test_into_a_model(name: str, wrapped: bool) -> None:
    """Whichever of the two has a prefix, and whatever it is."""
    fixture = Fixture(name).needs_reader()
    net = empty_net()
    report = ckptkit.load_into(
        Replicated(net, (torch.device("cpu"),)) if wrapped else net, fixture.path
    )
    assert report.complete
    want = reading.without_prefix(fixture.state())
    assert {key: bits(value) for key, value in net.state_dict().items()} == {
        key: bits(value.float()) for key, value in want.items()
    }
