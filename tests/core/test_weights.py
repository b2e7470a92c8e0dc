from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ckptkit
from ckptkit.core import dtypes
from ckptkit.core.bytesource import Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import AmbiguousError, UsageError
from ckptkit.core.limits import LIMITS
from ckptkit.core.tensor import Storage, Tensor
from ckptkit.core.tree import Global, Node, Object, OrderedMapping, Pairs, SetNode
from ckptkit.core.weights import WELL_KNOWN, Weights, as_tensor, locate, module_state


def tensor(kind: str = "tensor") -> Tensor:
    return Tensor(
        Storage(Range(Memory(bytes(8)), 0, 8)), dtypes.BY_NAME["float32"], (2,), (1,), kind=kind
    )


def found(root: Node, key: str | None = None) -> Weights:
    weights = locate(root, key)
    assert weights is not None
    return weights


W = tensor()
OPTIMIZER = {"state": {0: {"exp_avg": tensor()}}, "param_groups": [{"params": [0]}]}


@pytest.mark.parametrize("mapping", [dict, OrderedMapping])
def test_the_root(mapping: type) -> None:
    weights = found(mapping({"a": W, "b": tensor("parameter")}))
    assert weights.path == ()
    assert list(weights.tensors) == ["a", "b"]
    assert weights.tensors["a"] is W


def test_names_and_dtypes_that_differ() -> None:
    half = Tensor(W.storage, dtypes.BY_NAME["float16"], (4,), (1,))
    other = Object(Global("torch._utils", "_rebuild_qtensor"), tensor=tensor())
    weights = found({"a.weight": W, "b.weight": half, "b.bias": tensor(), "b.packed": other})
    assert weights.endings == {"weight", "bias", "packed"}
    assert weights.dtypes == (W.dtype, half.dtype)
    assert weights.tensors == {**weights.nodes, "b.packed": other.tensor}
    pure = found({"a": W})
    assert pure.tensors == pure.nodes and pure.tensors is not pure.nodes


def test_extra_state_does_not_count() -> None:
    weights = found({"a": W, "_extra_state": {"x": 1}, "b._extra_state": None})
    assert weights.path == ()
    assert list(weights.nodes) == ["a"]


@pytest.mark.parametrize("key", WELL_KNOWN)
def test_well_known_entries(key: str) -> None:
    assert found({"epoch": 3, key: {"a": W}, "something": {"a": W}}).path == (key,)


SHARED: Node = {"a": W}
ARRAY = tensor("ndarray")


@pytest.mark.parametrize(
    ("root", "path", "others"),
    [
        ({"a": 1, "run": [{"deep": {"a": W}}]}, ("run", 0, "deep"), ()),
        ({"ema": {"a": W}, "model": {"a": W}, "state_dict": {"a": W}}, ("state_dict",), (("ema",), ("model",))),
        # two names for one mapping
        ({"mine": SHARED, "ema": SHARED, "model": SHARED, "other": {"a": W}}, ("model",), (("other",),)),
        ({"x": SHARED, "y": SHARED}, ("x",), ()),
        # torch.save((model.state_dict(), optimizer.state_dict()), path)
        (({"a": W}, OPTIMIZER), (0,), ()),
        ({"all": ({"a": W},)}, ("all", 0), ()),
        ({"net1": {"a": W}, "optimizer": OPTIMIZER}, ("net1",), ()),
        # beside the only mapping, and what is mixed or arrays if there is nothing better
        ({"generator": {"a": W}, "accuracy": W}, ("generator",), ()),
        ({"epoch": 3, "a": W}, (), ()),
        ({"epoch": 3, "a": W, "net": {"b": W}}, ("net",), ()),
        ({"a": ARRAY}, (), ()),
        ({"a": ARRAY, "stats": {"m": ARRAY}, "net": {"b": W}}, ("net",), ()),
    ],
)  # fmt: skip
def test_what_is_chosen(root: Node, path: tuple[Node, ...], others: tuple[Node, ...]) -> None:
    weights = found(root)
    assert weights.path == path and set(weights.others) == {*others}


def test_names_of_a_mixed_root() -> None:
    assert list(found({"epoch": 3, "a": W}).nodes) == ["a"]


@pytest.mark.parametrize("state", [OPTIMIZER, {**OPTIMIZER, "defaults": {"lr": 0.1}}])
def test_a_pickled_optimizer_holds_no_weights(state: Node) -> None:
    optimizer = Object(Global("torch.optim.sgd", "SGD"), (), new=True)
    optimizer.steps.append(("build", {**state, "state": {W: {"exp_avg": W}, 1: {"exp_avg": W}}}))
    assert found({"generator": {"a": W}, "optimizer": optimizer}).path == ("generator",)
    assert locate({"optimizer": optimizer}) is None


def test_several_are_ambiguous() -> None:
    root = {"generator": {"a": W}, "critic": {"a": W}}
    with pytest.raises(AmbiguousError) as caught:
        locate(root)
    assert "generator, critic" in str(caught.value)
    assert caught.value.hint is not None
    assert "key='generator'" in caught.value.hint
    assert found(root, "critic").path == ("critic",)


def test_a_mapping_among_the_tensors_of_the_root_is_ambiguous() -> None:
    root = {"conv.weight": W, "conv.bias": W, "config": {"mean": W, "std": W}}
    with pytest.raises(AmbiguousError, match=r"\(root\), config") as caught:
        locate(root)
    assert caught.value.hint == "choose one, e.g. key=''"
    assert list(found(root, "").tensors) == ["conv.weight", "conv.bias"]
    assert list(found(root, "config").tensors) == ["mean", "std"]


NO_WEIGHTS: list[Node] = [
    *(None, 3, "text", {"optimizer": OPTIMIZER}, [], {"epoch": 3}),
    *(W, [W, W], {1: W}, Pairs([("a", W)]), SetNode([W])),
]


@pytest.mark.parametrize("root", NO_WEIGHTS)
def test_no_weights(root: Node) -> None:
    assert locate(root) is None
    with pytest.raises(UsageError):
        Checkpoint(root).required


def test_an_empty_state_dict_is_one() -> None:
    """torch.save({}) of a model without parameters."""
    assert found(OrderedMapping()).tensors == {}


@pytest.mark.parametrize("key", ["nowhere", "epoch", "text", "list"])
def test_a_key_that_names_no_weights(key: str) -> None:
    with pytest.raises(UsageError):
        locate({"a": W, "epoch": 3, "text": "t", "list": [W]}, key)


def test_a_cycle() -> None:
    root: dict[str, Node] = {"epoch": 1}
    root["self"] = [root]
    assert locate(root) is None
    root["net"] = {"a": W}
    assert found(root).path == ("net",)


def test_deep_trees_are_searched_to_the_limit() -> None:
    node: Node = {"a": W}
    for _ in range(5 * LIMITS.depth):
        node = [node]
    assert locate(node) is None


def test_objects_that_are_tensors() -> None:
    made = Object(Global("torch._utils", "_rebuild_sparse_tensor"), (), tensor=W)
    weights = found({"a": made, "b": W})
    assert weights.nodes["a"] is made
    assert weights.tensors["a"] is W
    assert as_tensor(Object(Global("a", "B"))) is None


def test_module_by_slots() -> None:
    made = Object(Global("a", "B"), (), new=True)
    attributes = {"_parameters": {"w": W, "none": None}, "_buffers": {"b": W}, "_modules": {}}
    made.steps = [("build", (attributes, {"slot": 1}))]
    assert list(found(made).tensors) == ["w", "b"]


def test_what_is_no_module() -> None:
    assert module_state(Object(Global("a", "B"))) is None
    made = Object(Global("a", "B"))
    made.steps.append(("build", {"_parameters": {}, "_buffers": {}, "_modules": 3}))
    assert module_state(made) is None


@pytest.mark.parametrize("has_scores", [True, False])
def test_an_array_of_objects_holds_weights_if_all_in_it_are_arrays(
    has_scores: bool, tmp_path: Path
) -> None:
    """numpy.savez of a dict: of arrays, as old converters write them, or of metrics."""
    held = {"precision": np.ones(3), "recall": np.zeros(3), **({"mAP": 0.5} if has_scores else {})}
    np.savez(tmp_path / "m.npz", metrics=np.array(held, dtype=object))
    found = ckptkit.open(tmp_path / "m.npz").selection
    assert (found is None) == has_scores
