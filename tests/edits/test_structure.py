from __future__ import annotations

import pytest
import torch

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CollisionError, UsageError
from ckptkit.core.tree import Global, Object
from ckptkit.edits import keys
from ckptkit.edits.keys import tie
from ckptkit.edits.structure import bare, extract, wrap
from tests.edits.trees import checkpoint, from_torch, named, tensor


def test_extract_and_wrap_are_inverse() -> None:
    inner = named("w")
    ck = Checkpoint({"model": inner, "epoch": 3})
    done = extract(ck, "model")
    assert done.root is inner
    assert done.notes == ("extracted 'model'; dropped epoch",)
    assert list(done.weights) == ["w"]
    assert wrap(done, "model").root == {"model": inner}


def test_extract_a_path() -> None:
    inner = named("w")
    assert extract(Checkpoint({"a": [{"b.c": inner}]}), "a.0.b.c").root is inner


def test_extract_an_attribute_of_an_object() -> None:
    inner = named("w")
    made = Object(Global("a", "Trainer"), new=True)
    made.steps.append(("build", {"model": inner}))
    assert extract(Checkpoint({"trainer": made}), "trainer.model").root is inner


def test_extract_a_bare_tensor() -> None:
    leaf = tensor()
    done = extract(Checkpoint({"w": leaf}), "w")
    assert done.root is leaf
    assert list(wrap(done, "v").weights) == ["v"]


@pytest.mark.parametrize("key", ["nowhere", "epoch", "name", "model.w.x"])
def test_extract_what_is_no_checkpoint(key: str) -> None:
    with pytest.raises(UsageError):
        extract(Checkpoint({"model": named("w"), "epoch": 3, "name": "n"}), key)


def test_wrap_takes_one_plain_key() -> None:
    done = wrap(checkpoint("w"), "a.b")
    assert list(done.root) == ["a.b"]
    assert done.required.path == ("a.b",)


def test_wrap_without_a_name() -> None:
    with pytest.raises(UsageError):
        wrap(checkpoint("w"), "")


def test_the_chosen_weights_stay_chosen() -> None:
    root = {"ema": {"model": named("a")}, "other": named("b")}
    ck = Checkpoint(root).with_key("ema.model")
    assert list(ck.weights) == ["a"]
    assert list(wrap(ck, "run").weights) == ["a"]
    assert list(extract(ck, "ema").weights) == ["a"]
    assert list(extract(ck, "ema.model").weights) == ["a"]
    assert list(extract(ck, "other").weights) == ["b"]


def test_wrap_beside_values() -> None:
    inner = named("w")
    done = wrap(Checkpoint(inner), "state_dict", {"version": "2.0.0", "epoch": 3})
    assert done.root == {"state_dict": inner, "version": "2.0.0", "epoch": 3}
    assert done.notes == ("wrapped as 'state_dict' with 'version', 'epoch'",)
    with pytest.raises(UsageError, match="'epoch' is both"):
        wrap(Checkpoint(inner), "epoch", {"epoch": 3})


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
