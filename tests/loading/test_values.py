"""The whole tree as Python values: torch.load on the same file is the oracle."""

from __future__ import annotations

import argparse
import collections
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import ckptkit
from ckptkit.core.bytesource import Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError, FormatError, PathError, UsageError
from ckptkit.core.tree import (
    ByteString,
    Global,
    Node,
    Object,
    OrderedMapping,
    Pairs,
    SetNode,
    StoredBytes,
)
from tests.torch_equality import same


def both(value: Any, folder: Path) -> tuple[Any, Any]:
    """Return what ckptkit and torch give of one file, which the test itself made."""
    path = folder / "a.pth"
    torch.save(value, path)
    return ckptkit.load(path, whole=True), torch.load(path, weights_only=False)


def test_plain_values(tmp_path: Path) -> None:
    factories = (list, dict, set, int, float, str, None)
    shared = [1]
    value = {
        "scalars": [
            None, True, 3, -(2**80), 1.5, float("inf"), 2 + 3j, "text", b"bytes", bytearray(b"array"),
        ],
        "nested": ({"a": (1, [2, {3: 4}])},),
        "sets": [{1, 2}, frozenset({("a", 1)}), set()],
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "counter": collections.Counter("abca"),
        "defaultdicts": [collections.defaultdict(factory, {"a": [1]}) for factory in factories],
        "size": torch.Size([2, 3]),
        "device": [torch.device("cuda", 1), torch.device("cpu")],
        "dtype": torch.bfloat16,
        (1, "key"): "tuple keys",
        torch.float16: "dtype keys",
        "shared": (shared, {"c": shared}),
    }  # fmt: skip
    ours, theirs = both(value, tmp_path)
    same(theirs, ours)
    assert ours == value
    assert [each.default_factory for each in ours["defaultdicts"]] == [*factories]
    assert [type(key) for key in ours] == [type(key) for key in theirs]


def test_tensors_storages_and_arrays(tmp_path: Path) -> None:
    weight = torch.arange(6.0).view(2, 3)
    value = {"w": weight, "view": weight[1], "p": nn.Parameter(weight), "typed": weight.storage()}
    value["array"] = np.arange(4, dtype=np.int16).reshape(2, 2)
    ours, theirs = both({**value, "scalar": np.float64(2.5)}, tmp_path)
    tensors = ("w", "view", "p")
    same([theirs[name] for name in tensors], [ours[name] for name in tensors])
    assert type(ours["typed"]) is type(theirs["typed"])
    assert ours["typed"].tolist() == theirs["typed"].tolist()
    assert ours["typed"].data_ptr() == ours["w"].data_ptr()
    assert (type(ours["array"]), ours["array"].dtype) == (np.ndarray, np.int16)
    assert ours["array"].tolist() == [[0, 1], [2, 3]]
    assert ours["scalar"] == 2.5
    # torch refuses to save an untyped storage next to a typed one
    ours, theirs = both({"s": torch.arange(3, dtype=torch.uint8).untyped_storage()}, tmp_path)
    assert type(ours["s"]) is type(theirs["s"])
    assert ours["s"].tolist() == [0, 1, 2]


def test_cycles(tmp_path: Path) -> None:
    inner: list[Any] = []
    inner.append((inner,))  # a tuple that holds itself
    root: dict[str, Any] = {"x": inner}
    root["self"] = root
    ours, _ = both(root, tmp_path)
    assert ours["self"] is ours
    assert ours["x"][0][0] is ours["x"]


def test_opaque_values_stay_objects_of_real_values(tmp_path: Path) -> None:
    namespace = argparse.Namespace(lr=0.1, weight=torch.ones(2))
    ours, _ = both({"args": namespace, "model": nn.Linear(2, 2)}, tmp_path)
    made, module = ours["args"], ours["model"]
    assert isinstance(made, Object) and isinstance(module, Object)
    assert made.callable == Global("argparse", "Namespace")
    assert made.state["lr"] == 0.1
    assert torch.equal(made.state["weight"], torch.ones(2))
    assert isinstance(module.state["_parameters"]["weight"], nn.Parameter)


def value_of(node: Node) -> Any:
    return ckptkit.load(Checkpoint({"x": node}), whole=True)["x"]


@pytest.mark.parametrize(
    "node",
    [
        Object(Global("torch", "Size"), (("a",),)),
        Object(Global("torch", "Size"), ()),
        Object(Global("torch", "device"), ("no such device",)),
        Object(Global("torch", "device"), ({},)),
        Object(Global("collections", "Counter"), (3,)),
        Object(Global("collections", "defaultdict"), (Global("os", "system"),)),
        Object(Global("collections", "defaultdict"), (3,)),
        Object(Global("os", "system"), ("echo",)),
        Object(Object(Global("a", "f")), ()),
    ],
)
def test_what_is_not_as_it_should_be_stays_an_object(node: Object) -> None:
    made = value_of(node)
    assert isinstance(made, Object)
    assert made is not node


def test_values_that_python_lacks() -> None:
    assert value_of(ByteString(b"\xff")) == b"\xff"
    blob = Range(Memory(b"abcdef"), 1, 3)
    assert value_of(StoredBytes(blob)) == b"bcd"
    assert value_of(StoredBytes(blob, "bytearray")) == bytearray(b"bcd")
    assert value_of(Global("a", "B")) == Global("a", "B")
    pairs = value_of(Pairs([("k", [1]), ("k", 2)]))
    assert pairs.pairs == [("k", [1]), ("k", 2)]
    with pytest.raises(FormatError, match="a set contains a list"):
        value_of(SetNode([[1]]))


def test_keys_that_would_meet_or_could_not_be_keys_stay_nodes() -> None:
    number = Object(Global("numpy", "scalar"))
    number.value = 1
    assert list(value_of({1: "int", number: "numpy"}).values()) == ["int", "numpy"]
    key = Object(Global("collections", "Counter"), ({},))
    assert value_of({key: 1}) == {key: 1}


def test_any_depth() -> None:
    node: Node = 1
    for _ in range(20_000):
        node = (OrderedMapping({"k": [node]}),)
    made = value_of(node)
    for _ in range(20_000):
        made = made[0]["k"][0]
    assert made == 1


def test_attributes_of_a_file_are_not_set() -> None:
    """Apart from `_metadata`: an attribute could stand for a method."""
    made = value_of(OrderedMapping({"a": 1}, {"_metadata": {"": 1}, "items": "mine"}))
    assert made._metadata == {"": 1}
    assert list(made.items()) == [("a", 1)]


def test_metadata_inside_metadata_without_end() -> None:
    node = OrderedMapping()
    for _ in range(10_000):
        node = OrderedMapping({"a": 1}, {"_metadata": node})
    assert value_of(node)["a"] == 1


def test_quantized_module(tmp_path: Path) -> None:
    """Its state_dict has tuples and dtypes among the weights, and all of them belong to it."""
    path = tmp_path / "a.pth"
    weight = torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)
    state = nn.Linear(1, 1).state_dict()
    state["q._packed_params._packed_params"] = (weight, None)
    state["q._packed_params.dtype"] = torch.qint8
    torch.save(state, path)
    ours = ckptkit.load(path)
    assert list(ours) == list(state)
    assert ours["q._packed_params.dtype"] is torch.qint8
    assert torch.equal(ours["q._packed_params._packed_params"][0].int_repr(), weight.int_repr())


def test_errors_say_which_file(tmp_path: Path) -> None:
    with pytest.raises(PathError):
        ckptkit.load(tmp_path / "nowhere.pth")
    torch.save({"epoch": 1}, tmp_path / "a.pth")
    with pytest.raises(CkptkitError) as caught:
        ckptkit.load(tmp_path / "a.pth")
    assert caught.value.where == str(tmp_path / "a.pth")


class Marked(torch.Tensor):
    """A class of tensors that ckptkit does not have."""


def test_attributes_of_tensors(tmp_path: Path) -> None:
    """torch.load gives them back, and so does load, in the tree and in a state_dict."""
    parameter = nn.Parameter(torch.ones(2))
    parameter.role, parameter.shards = "head", [torch.zeros(1), 3]  # type: ignore[attr-defined]
    tensor = torch.ones(3)
    tensor.foo = {"x": torch.ones(1)}  # type: ignore[attr-defined]
    ours, theirs = both({"p": parameter, "t": tensor, "b": nn.Buffer(torch.ones(1))}, tmp_path)
    for made in (ours, ckptkit.load(tmp_path / "a.pth")):
        assert {key: str(value.__dict__) for key, value in made.items()} == {
            key: str(value.__dict__) for key, value in theirs.items()
        }
        assert made["p"].role == "head" and made["p"].requires_grad


def test_names_of_attributes_are_no_more_than_names(tmp_path: Path) -> None:
    tensor = torch.ones(3)
    tensor.__dict__.update({"data": 1, "__class__": int, "requires_grad": 2})
    torch.save({"t": tensor}, tmp_path / "a.pth")
    made = ckptkit.load(tmp_path / "a.pth")["t"]
    assert type(made) is torch.Tensor and torch.equal(made, torch.ones(3))


@pytest.mark.parametrize("kind", ["attribute", "class", "jagged"])
def test_a_root_that_is_one_tensor_has_no_state_dict(tmp_path: Path, kind: str) -> None:
    """Neither its attributes nor what its class keeps inside are taken for one."""
    tensor = torch.ones(3)
    tensor.foo = {"x": torch.ones(1)}  # type: ignore[attr-defined]
    made = {
        "attribute": tensor,
        "class": torch.ones(2).as_subclass(Marked),
        "jagged": torch.nested.nested_tensor(
            [torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged
        ),
    }[kind]
    torch.save(made, tmp_path / "a.pth")
    with pytest.raises(UsageError, match="is one tensor of class"):
        ckptkit.load(tmp_path / "a.pth")
