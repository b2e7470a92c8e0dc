"""Leaving out what weights_only refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckptkit.core.errors import LimitError, UsageError
from ckptkit.core.tree import Global, Node, Object, OrderedMapping, SetNode, walk
from ckptkit.pickles.policy import SHOWN, without_objects
from tests.pickles.making import Written, emit, isomorphic, machine, read_saved

SYSTEM = Object(Global("os", "system"), ("touch canary",))
PATH = Object(Global("pathlib", "PosixPath"), ("a",))


def pruned(root: Node) -> Node:
    return without_objects(root)[0]


def test_a_tree_without_such_values_is_itself() -> None:
    root = {
        "a": [1, (2,)], "d": Global("torch", "float16"), "s": SetNode([1]),
        "o": Object(Global("torch", "Size"), ((1,),)),
    }  # fmt: skip
    assert without_objects(root) == (root, ())
    assert pruned(root) is root


def test_entries_go_with_their_keys_and_items_leave_their_place() -> None:
    root = {
        "a": PATH, "b": [1, PATH, 2], "c": (PATH, 3), "d": {"x": {"y": SYSTEM, "z": 1}},
        "e": Global("mine", "Thing"),
    }  # fmt: skip
    new, notes = without_objects(root)
    assert isomorphic(new, {"b": [1, None, 2], "c": (None, 3), "d": {"x": {"z": 1}}})
    assert len(notes) == 1
    assert "dropped 5 values" in notes[0]
    for name in ("a (pathlib.PosixPath)", "b.1", "c.0", "d.x.y (os.system)", "e (mine.Thing)"):
        assert name in notes[0]


def test_the_first_few_are_named() -> None:
    _, notes = without_objects([1, *(Object(Global("mine", "Thing")) for _ in range(SHOWN + 1))])
    assert notes[0].count("mine.Thing") == SHOWN
    assert notes[0].endswith(" and 1 more")


def test_none_that_was_there_stays() -> None:
    assert isomorphic(pruned({"a": None, "b": PATH, "c": [None, 1]}), {"a": None, "c": [None, 1]})


def test_what_holds_a_refused_value_goes_whole() -> None:
    counter = Object(Global("collections", "Counter"), ({"x": PATH},))
    assert isomorphic(pruned({"a": counter, "b": 1}), {"b": 1})
    tensor = Object(
        Global("torch._tensor", "_rebuild_from_type_v2"),
        (Global("torch._utils", "_rebuild_tensor_v2"), PATH, (), {}),
    )
    assert isomorphic(pruned([tensor, 1]), [None, 1])
    state = Object(Global("torch.nn.parameter", "Parameter"), ())
    state.steps = [("set", [(PATH, 1)])]
    assert isomorphic(pruned([state, 1]), [None, 1])
    assert isomorphic(pruned([SetNode([1, PATH]), SetNode([1], frozen=True), 1]), [None, None, 1])


def test_keys_that_are_refused_take_their_entries_along() -> None:
    root = {
        PATH: 1, "a": 2, Global("mine", "Thing"): 3, (1, PATH): 4, (1, 2): 5,
        SetNode([1], frozen=True): 6,
    }  # fmt: skip
    new, notes = without_objects(root)
    assert isomorphic(new, {"a": 2, (1, 2): 5})
    assert "4 values" in notes[0]


def test_attributes_of_an_ordered_dict() -> None:
    root = OrderedMapping(
        {"a": 1}, {"_metadata": OrderedMapping({"": {"version": 1}}), "odd": PATH}
    )
    new = pruned(root)
    assert isomorphic(
        new, OrderedMapping({"a": 1}, {"_metadata": OrderedMapping({"": {"version": 1}})})
    )
    assert pruned(OrderedMapping({"a": 1}, SYSTEM)).state is None


def test_sharing_and_cycles_are_kept() -> None:
    shared: list[Node] = [1, PATH]
    root: dict[str, Node] = {"a": shared, "b": shared, "p": PATH}
    root["self"] = root
    new = pruned(root)
    assert list(new) == ["a", "b", "self"]
    assert new["a"] is new["b"]
    assert new["self"] is new
    assert new["a"] == [1, None]
    assert root["p"] is PATH  # the old tree is as it was
    assert shared == [1, PATH]


def test_nesting_is_limited() -> None:
    root: Node = PATH
    for _ in range(5_000):
        root = [root]
    with pytest.raises(LimitError, match="depth"):
        without_objects(root)


def test_a_hostile_file_becomes_harmless() -> None:
    root = machine(
        b"\x80\x02}(X\x01\0\0\0acos\nsystem\nX\x0c\0\0\0touch canary\x85RX\x01\0\0\0bK\x01u."
    )
    pickled = emit(root, objects="drop")
    assert machine(pickled.data) == {"b": 1}
    assert b"system" not in pickled.data


def test_a_module_leaves_what_is_beside_it(tmp_path: Path) -> None:

    folder = tmp_path
    root = read_saved({"epoch": 3, "model": torch.nn.Linear(2, 2), "w": torch.ones(2)}, folder).root
    written = Written(root, folder / "new.pt", objects="drop")
    loaded = written.load()
    assert list(loaded) == ["epoch", "w"]
    assert "model (torch.nn.modules.linear.Linear)" in written.pickled.notes[0]
    assert not [node for _, node in walk(pruned(root)) if isinstance(node, Object)]


@pytest.mark.parametrize(
    "root", [PATH, [PATH], {"a": PATH, "b": None}, {"m": Object(SYSTEM.callable, ()), "e": {}}]
)
def test_an_empty_result_is_an_error(root: Node) -> None:
    with pytest.raises(UsageError, match="nothing remains"):
        without_objects(root)


def test_a_result_without_the_tensors_is_an_error(tmp_path: Path) -> None:
    root = read_saved({"epoch": 3, "model": torch.nn.Linear(2, 2)}, tmp_path).root
    with pytest.raises(UsageError, match="nothing remains"):
        without_objects(root)
    assert without_objects({"args": PATH, "epoch": 3})[0] == {"epoch": 3}
