from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CollisionError, UsageError
from ckptkit.core.tree import Global, Node, Object
from ckptkit.edits import keys
from ckptkit.edits.keys import tie
from ckptkit.edits.structure import bare, extract, wrap
from tests.edits.trees import checkpoint, from_torch, named, tensor


def test_extract_and_wrap_are_inverse() -> None:
    inner = named("w")
    done = extract(Checkpoint({"model": inner, "epoch": 3}), "model")
    assert done.notes == ("extracted 'model'; dropped epoch",)
    assert list(done.weights) == ["w"]
    assert wrap(done, "model").root == {"model": inner}
    plain = wrap(done, "a.b")
    assert list(plain.root) == ["a.b"] and plain.required.path == ("a.b",)


TRAINER = Object(Global("a", "Trainer"), new=True)
TRAINER.steps.append(("build", {"model": (INNER := named("w"))}))


@pytest.mark.parametrize(
    ("root", "path"),
    [
        ({"model": INNER, "epoch": 3}, "model"),
        ({"a": [{"b.c": INNER}]}, "a.0.b.c"),
        ({"trainer": TRAINER}, "trainer.model"),
    ],
)
def test_extract_a_path(root: Node, path: str) -> None:
    assert extract(Checkpoint(root), path).root is INNER


def test_extract_a_bare_tensor() -> None:
    leaf = tensor()
    done = extract(Checkpoint({"w": leaf}), "w")
    assert done.root is leaf
    assert list(wrap(done, "v").weights) == ["v"]


ROOT = {"model": named("w"), "epoch": 3, "name": "n"}


@pytest.mark.parametrize(
    ("edit", "error", "said"),
    [
        (lambda: extract(Checkpoint(ROOT), "nowhere"), UsageError, "no entry"),
        (lambda: extract(Checkpoint(ROOT), "epoch"), UsageError, "'epoch' is a single int"),
        (lambda: extract(Checkpoint(ROOT), "name"), UsageError, "'name' is a single str"),
        (lambda: extract(Checkpoint(ROOT), "model.w.x"), UsageError, "no entry"),
        (lambda: wrap(checkpoint("w"), ""), UsageError, "key is empty"),
        (lambda: wrap(checkpoint("w"), "epoch", {"epoch": 3}), UsageError, "'epoch' is both"),
        (lambda: tie(checkpoint("a", "b"), {"a": "b"}), CollisionError, "'a' already exists"),
        (lambda: tie(checkpoint("a", "b"), {"c": "d"}), UsageError, "there is no key 'd'"),
        (lambda: bare(Checkpoint({"epoch": 3})), UsageError, "no mapping from names to tensors"),
    ],
)
def test_what_is_refused(edit: Callable[[], object], error: type[UsageError], said: str) -> None:
    with pytest.raises(error, match=said):
        edit()


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


def test_tie_shares_the_tensor_and_keeps_the_rest() -> None:
    state = from_torch(torch.nn.Linear(2, 2).state_dict())
    done = tie(Checkpoint({"model": state, "epoch": 3}), {"head.weight": "weight"})
    assert done.weights["head.weight"].storage is done.weights["weight"].storage
    assert list(done.weights) == ["weight", "bias", "head.weight"]
    assert done.root["epoch"] == 3
    assert keys.paths_of(done.required.node) == keys.paths_of(state)
    assert "head.weight" not in state
    assert done.notes == ("tied head.weight to weight",)


def test_bare_takes_the_weights_out_of_their_wrapper() -> None:
    inner = named("a", "b")
    done = bare(Checkpoint({"model": inner, "epoch": 3, "args": {}}, key="model"))
    assert done.root is inner
    assert done.key is None
    assert done.notes == ("extracted the weights from 'model'; dropped 2 other entries",)
