"""summary: every tensor, value and object at its place, named and counted right."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.masked import MaskedTensor, masked_tensor

import ckptkit
from ckptkit.analysis.summary import Summary, summarize
from ckptkit.core.bytesource import Memory, Range
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import RUNS_CODE, LimitError, UsageError, coded
from ckptkit.core.tensor import TypedStorage
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
from tests.analysis.made import checkpoint, module, opaque, storage, tensor, view
from tests.conftest import Ok, Run


def values(summary: Summary) -> dict[tuple[Node, ...], tuple[str, object]]:
    return {each.path: (each.type, each.value) for each in summary.values}


def test_names_and_paths_of_a_wrapped_state_dict() -> None:
    weight, moment = tensor(1, 2), tensor(3, 4)
    root = {
        "model": OrderedMapping({"fc.weight": weight}),
        "optimizer": {"state": {0: {"exp_avg": moment}}},
        "epoch": 3,
    }
    found = summarize(checkpoint(root))
    assert found.weights == ("model",)
    assert [(row.name, row.path, row.place) for row in found.rows] == [
        ("fc.weight", ("model", "fc.weight"), "model.fc.weight"),
        (None, ("optimizer", "state", 0, "exp_avg"), "optimizer.state.0.exp_avg"),
    ]
    assert values(found) == {("epoch",): ("int", 3)}


def test_tensors_that_follow_the_weights_have_no_name() -> None:
    found = summarize(checkpoint({"model": {"a": tensor(1)}, "last": [tensor(2)], "a": tensor(3)}))
    assert [row.name for row in found.rows] == ["a", None, None]


def test_a_whole_pickled_module_is_named_as_its_state_dict() -> None:
    inner = module({"weight": tensor(1, 2), "bias": None})
    found = summarize(checkpoint(module({"scale": tensor(3)}, {"fc": inner})))
    assert found.is_module
    assert [row.name for row in found.rows] == ["scale", "fc.weight"]
    assert found.rows[1].path == ("_modules", "fc", "_parameters", "weight")
    assert [each.path for each in found.objects] == [(), ("_modules", "fc")]


def test_storages_are_numbered_and_shared_ones_are_equal() -> None:
    base = tensor(1, 2, 3, 4)
    found = summarize(checkpoint({"a": base, "b": tensor(5), "c": view(base, (2,), offset=2)}))
    assert [row.storage for row in found.rows] == [0, 1, 0]


def test_totals() -> None:
    base = tensor(1, 2, 3, 4)
    root = {
        "model": {"a": base, "tied": base, "part": view(base, (2,))},
        "optimizer": [tensor(*range(10))],
    }
    totals = summarize(checkpoint(root)).totals
    assert totals.tensors == 4
    assert totals.parameters == 4 + 2  # the tied one counts once, the optimizer not
    assert totals.nbytes == 16 + 16 + 8 + 40
    assert totals.storage_nbytes == 16 + 40
    assert totals.unused_nbytes == 0


def test_unused_bytes_of_a_storage() -> None:
    found = summarize(checkpoint({"a": view(tensor(*range(100)), (10,))}))
    assert found.totals.unused_nbytes == 360


@pytest.mark.parametrize(
    ("node", "expected"),
    [
        (None, ("none", None)),
        (True, ("bool", True)),
        (-7, ("int", -7)),
        (0.5, ("float", 0.5)),
        ("text", ("str", "text")),
        (2 + 1j, ("complex", "(2+1j)")),
        (b"a\xff\n", ("bytes", r"a\xff\n")),
        (bytes(2_000), ("bytes", "2,000 bytes")),
        (ByteString(b"\xe9t\xe9"), ("str", "été")),
        (StoredBytes(Range(Memory(bytes(10)), 0, 10)), ("bytes", "10 bytes")),
        (TypedStorage(storage((1, 2)), BY_NAME["float32"]), ("storage", "2 x float32 on cpu")),
        (Global("torch", "bfloat16"), ("torch.dtype", "torch.bfloat16")),
        (opaque("torch.device", "cuda", 1), ("torch.device", "cuda:1")),
        (opaque("torch.Size", (2, 3)), ("torch.Size", "(2, 3)")),
        (opaque("torch.serialization._get_layout", "torch.strided"),
         ("torch.layout", "torch.strided")),
        (1 << 63, ("int", 1 << 63)),
        (-(1 << 8191), ("int", -(1 << 8191))),
        ((1 << 63) - 1, ("int", (1 << 63) - 1)),
        (1 << 8_200, ("int", "<integer of 8,201 bits>")),
    ],
)  # fmt: skip
def test_values(node: Node, expected: tuple[str, object]) -> None:
    assert values(summarize(checkpoint({"x": node}))) == {("x",): expected}


def test_numpy_scalars_are_values() -> None:
    dtype = opaque("numpy.dtype", "f8", False, True)
    scalar = opaque("numpy.core.multiarray.scalar", dtype, b"\0" * 8)
    scalar.value = 0.25
    found = summarize(checkpoint({"best": scalar}))
    assert values(found) == {("best",): ("numpy.scalar", 0.25)}
    assert found.objects == []


def test_objects_and_classes_are_listed_and_entered() -> None:
    args = opaque("argparse.Namespace", state={"lr": 0.1, "inner": opaque("my.Config")})
    found = summarize(checkpoint({"args": args, "class": Global("torch.optim", "Adam")}))
    assert [(each.path, each.global_) for each in found.objects] == [
        (("args",), "argparse.Namespace"),
        (("args", "inner"), "my.Config"),
        (("class",), "torch.optim.Adam"),
    ]
    assert values(found) == {("args", "lr"): ("float", 0.1)}


def test_an_object_that_is_a_tensor_is_one_row() -> None:
    inside = tensor(1, 2)
    subclass = Object(Global("my", "rebuild"), (inside, 5), tensor=inside)
    found = summarize(checkpoint({"a": subclass, "b": tensor(3)}))
    assert [(row.name, row.path) for row in found.rows] == [("a", ("a",)), ("b", ("b",))]
    assert (found.values, found.objects) == ([], [])


def test_calls_that_no_checkpoint_needs_are_pointed_out() -> None:
    root = {"a": opaque("posix.system", "id"), "b": [opaque("posix.system", "ls")]}
    root["c"] = opaque("argparse.Namespace")
    (warning,) = summarize(checkpoint(root)).warnings
    call = "posix.system (the value at a) and 1 more"
    assert warning == f"loading this file with pickle would call {call}"
    (found,) = coded([warning], RUNS_CODE)
    assert found.facts == {"call": "posix.system", "values": 2}


def test_ambiguous_weights_are_a_warning_that_names_them() -> None:
    found = summarize(checkpoint({"first": {"a": tensor(1)}, "second": {"a": tensor(2)}}))
    assert found.weights is None
    assert [row.name for row in found.rows] == [None, None]
    assert "first" in found.warnings[0] and "second" in found.warnings[0]


def test_a_key_chooses() -> None:
    root = {"first": {"a": tensor(1)}, "second": {"a": tensor(2)}}
    found = summarize(checkpoint(root, key="second"))
    assert [row.name for row in found.rows] == [None, "a"]
    with pytest.raises(UsageError, match="third"):
        summarize(checkpoint(root, key="third"))


def test_the_same_weights_at_two_places_are_named_once() -> None:
    shared = {"a": tensor(1)}
    found = summarize(checkpoint({"model": shared, "copy": shared}))
    rows = [(row.name, row.path) for row in found.rows]
    assert rows == [("a", ("model", "a")), (None, ("copy", "a"))]


def test_a_cycle_ends() -> None:
    root: dict[str, Node] = {"a": tensor(1)}
    root["self"] = root
    assert [row.path for row in summarize(checkpoint(root)).rows] == [("a",)]


def test_RS_05_depth_is_an_error_of_ours() -> None:
    root: list[Node] = []
    for _ in range(5_000):
        root = [root]
    with pytest.raises(LimitError, match="depth"):
        summarize(checkpoint({"deep": root}))


def test_RS_05_keys_that_compare_for_ever_are_not_compared() -> None:
    """Two paths through keys that are equal and very deep: comparing them recurses in C."""

    def deep() -> Node:
        made: list[Node] = []
        for _ in range(200_000):
            made = [made]
        return made

    weights = {"w": tensor(1)}
    root = {"x": Pairs([(deep(), {"w": weights}), (deep(), {"w": weights})]), "weights": weights}
    assert [row.name for row in summarize(checkpoint(root)).rows] == [None, None, "w"]


@pytest.mark.parametrize("make", [dict, OrderedMapping, lambda pairs: Pairs(list(pairs))])
def test_containers_are_walked(make: Callable[[object], Node]) -> None:
    root = {"x": make([("n", [1, (2, SetNode([3]))])])}
    paths = [each.path for each in summarize(checkpoint(root)).values]
    assert paths == [("x", "n", 0), ("x", "n", 1, 0), ("x", "n", 1, 1, 0)]


def test_what_the_checkpoint_says_of_itself() -> None:
    names = (Global("collections", "OrderedDict"),)
    found = summarize(checkpoint({}, extras={"format": "pt"}, globals=names, warnings=("odd",)))
    assert (found.path, found.format, found.size) == ("run.pth", "torch-zip", 8)
    assert (found.extras, found.globals, found.warnings) == ({"format": "pt"}, names, ("odd",))


@pytest.fixture
def masked(tmp_path: Path) -> Path:
    """A tensor subclass that torch has itself: data of 16 bytes, and a mask of 4."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = masked_tensor(torch.ones(4), torch.tensor([True, False, True, True]))
    torch.save({"w": made, "b": torch.ones(2)}, tmp_path / "a.pth")
    return tmp_path / "a.pth"


def test_a_tensor_subclass_shows_what_it_is_made_of(masked: Path) -> None:
    found = summarize(ckptkit.open(masked))
    rows = {row.place: row for row in found.rows}
    assert {place: row.nbytes for place, row in rows.items()} == {
        "w": 20, "w.3._masked_data": 16, "w.3._masked_mask": 4, "b": 8,
    }  # fmt: skip
    assert [row.name for row in found.rows] == ["w", None, None, "b"]
    assert (rows["w"].device, rows["w"].tensor.shape) == ("cpu", (4,))
    totals = found.totals
    assert (totals.nbytes, totals.storage_nbytes, totals.parameters) == (28, 28, 6)


def test_nothing_advises_to_drop_a_tensor_subclass(
    masked: Path, run: Run, ok: Ok, tmp_path: Path
) -> None:
    for command in ("inspect", "doctor"):
        assert "--objects" not in run(command, masked).stdout
    done = run("convert", masked, tmp_path / "a.safetensors")
    assert (done.code, "--drop" in done.stderr, "--all" in done.stderr) == (3, False, True)
    ok("convert", "--all", masked, tmp_path / "a.safetensors")
    ok("convert", tmp_path / "a.safetensors", tmp_path / "b.pth")
    with torch.serialization.safe_globals([MaskedTensor]):
        again = torch.load(tmp_path / "b.pth")["w"]
    assert torch.equal(again.get_mask(), torch.tensor([True, False, True, True]))
