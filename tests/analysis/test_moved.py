"""moved: norms of changes by layer and by block, in order, and what has no norm."""

from __future__ import annotations

import pytest
import torch

from ckptkit.analysis.diff import compare
from ckptkit.analysis.moved import ComparedTensor, MovedPart, layers, parts
from tests.analysis.made import tensor

A = {
    "emb.w": [1.0, 2.0],
    "l.0.x.w": [3.0, 4.0],
    "l.0.x.b": [1.0],
    "l.1.x.w": [5.0, 0.0],
    "l.1.x.b": [2.0],
}
B = {**A, "l.0.x.w": [3.0, 5.0], "l.0.x.b": [3.0], "l.1.x.b": [2.5]}


def compared(a: dict[str, list[float]], b: dict[str, list[float]]) -> list[ComparedTensor]:
    ours, theirs = ({key: tensor(*each) for key, each in side.items()} for side in (a, b))
    changed = dict(compare(ours, theirs).changed)
    return [
        ComparedTensor(key, "changed" if key in changed else "same", changed.get(key))
        for key in ours
    ]


def by_label(found: list[MovedPart]) -> dict[str, float | None]:
    return {each.label: each.relative for each in found}


def test_norms_over_all_changed_tensors() -> None:
    """They are those that torch computes of one vector of all elements."""
    before = torch.tensor([3.0, 4.0, 1.0, 2.0])  # l.1.x.w is the same, and does not count
    after = torch.tensor([3.0, 5.0, 3.0, 2.5])
    expected = ((after - before).norm() / before.norm()).item()
    found = layers(compared(A, B))
    assert by_label(found) == {"l.{0..1}.x": pytest.approx(expected), "emb": 0.0}
    assert found[0].states == {"changed": 3, "same": 1} and found[0].pattern == "l.*.x.*"
    assert [name for name, _ in found[0].blocks] == ["l.0", "l.1"] and found[1].blocks == ()
    assert found[0].blocks[1][1] == pytest.approx(0.25)


def test_blocks_in_the_order_of_the_file() -> None:
    found = parts(compared(A, B))
    assert [each.label for each in found] == ["emb", "l.0", "l.1"]
    assert by_label(found)["l.1"] == pytest.approx(0.25) and found[2].pattern == "l.1.*"


def test_a_change_from_zero_has_no_number_and_comes_first() -> None:
    found = layers(compared({**A, "lora.w": [0.0, 0.0]}, {**B, "lora.w": [0.0, 1.0]}))
    assert [each.label for each in found] == ["lora", "l.{0..1}.x", "emb"]
    assert found[0].relative is None


def test_numbers_that_are_not_finite() -> None:
    (large,) = layers(compared({"x.w": [2e38, 1.0]}, {"x.w": [-1e38, 1.0]}))
    assert large.relative == pytest.approx(1.5)
    (nan,) = layers(compared({"x.w": [1.0]}, {"x.w": [float("nan")]}))
    assert nan.states == {"changed": 1} and nan.relative is None


def test_other_differences_come_first_and_names_without_a_module() -> None:
    found = layers(
        [*compared(A, B), ComparedTensor("w", "missing"), ComparedTensor("", "unexpected")]
    )
    assert (found[0].label, found[0].states) == ("(root)", {"missing": 1, "unexpected": 1})
    assert found[0].relative == 0.0 and found[0].pattern == "*"


def test_experts_belong_to_their_block() -> None:
    names = [f"l.{n}.experts.{m}.w" for n in range(2) for m in range(3)]
    (found,) = layers(ComparedTensor(name, "same") for name in names)
    assert found.label == "l.{0..1}.experts.{0..2}"
    assert found.blocks == (("l.0", 0.0), ("l.1", 0.0))


def test_no_tensors() -> None:
    assert layers([]) == parts([]) == []
