from __future__ import annotations

import pytest

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import UsageError
from ckptkit.core.tree import Global, Object
from ckptkit.edits.structure import extract, wrap
from tests.edits.trees import checkpoint, named, tensor


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
