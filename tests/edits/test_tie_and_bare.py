"""tie and bare: what doctor needs and the other commands have no option for."""

from __future__ import annotations

import pytest
import torch

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CollisionError, UsageError
from ckptkit.edits import keys
from ckptkit.edits.keys import tie
from ckptkit.edits.structure import bare
from tests.edits.trees import from_torch, named


def test_tie_shares_the_tensor_and_keeps_the_rest() -> None:
    state = from_torch(torch.nn.Linear(2, 2).state_dict())
    done = tie(Checkpoint({"model": state, "epoch": 3}), {"head.weight": "weight"})
    assert done.weights["head.weight"].storage is done.weights["weight"].storage
    assert list(done.weights) == ["weight", "bias", "head.weight"]
    assert done.root["epoch"] == 3
    assert keys.paths_of(done.required.node) == keys.paths_of(state)
    assert "head.weight" not in state
    assert done.notes == ("tied head.weight to weight",)


def test_tie_refuses_names_that_are_taken_or_not_there() -> None:
    ck = Checkpoint(named("a", "b"))
    with pytest.raises(CollisionError):
        tie(ck, {"a": "b"})
    with pytest.raises(UsageError):
        tie(ck, {"c": "d"})


def test_bare_takes_the_weights_out_of_their_wrapper() -> None:
    inner = named("a", "b")
    done = bare(Checkpoint({"model": inner, "epoch": 3, "args": {}}, key="model"))
    assert done.root is inner
    assert done.key is None
    assert done.notes == ("extracted the weights from 'model'; dropped 2 other entries",)


def test_bare_without_weights() -> None:
    with pytest.raises(UsageError):
        bare(Checkpoint({"epoch": 3}))
