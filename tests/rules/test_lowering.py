"""Lowered copies give the same bytes as the copies, whatever the sources are made of."""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.compute import arranged
from ckptkit.compute.arranged import Arranged, how
from ckptkit.compute.operation import Concat, Inflate, stream
from ckptkit.compute.strided import StridedCopy, in_bytes
from ckptkit.core.bytesource import Derived, Memory, Range
from ckptkit.core.errors import UnsupportedError
from ckptkit.rules.planner import RuleSet
from tests.rules.arrays import carried_out, numbered, shapes
from tests.rules.test_properties import Case, cases, uneven

DTYPE = np.dtype("<i4")


def record(array: np.ndarray) -> Range:
    data = np.ascontiguousarray(array, DTYPE).tobytes()
    return Range(Memory(b"\xff" * 3 + data), 3, len(data))


def computed(plan: Any, arrays: dict[str, Any]) -> dict[str, Arranged]:
    """The targets of a plan as records over records, or over the extents of others."""
    found = {}
    for name, target in plan.items():
        sources = tuple(
            each if hasattr(each := arrays[source], "locate") else record(each)
            for source in target.sources
        )
        found[name] = Arranged(sources, target.copies, 4, 4 * prod(target.shape))
    return found


def values(found: dict[str, Arranged], like: dict[str, np.ndarray]) -> bool:
    for name, expected in like.items():
        data = b"".join(stream(found[name].locate()))
        if data != np.ascontiguousarray(expected, DTYPE).tobytes():
            return False
    return found.keys() == like.keys()


@pytest.mark.parametrize("run", [1, arranged.RUN])
@given(case=cases())
@settings(max_examples=50)
def test_lowered_copies_are_the_copies(run: int, case: Case) -> None:
    plan = RuleSet.parse([case.rule]).plan(shapes(case.left))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arranged, "RUN", run)
        assert values(computed(plan, case.left), case.right)


@given(case=uneven())
@settings(max_examples=40)
def test_uneven_parts_are_lowered(case: Any) -> None:
    rule, apart, joined = case
    assert values(computed(RuleSet.parse([rule]).plan(shapes(apart)), apart), joined)


@given(case=cases())
@settings(max_examples=50)
def test_there_and_back_is_seen_through(case: Case) -> None:
    rules = RuleSet.parse([case.rule])
    there = computed(rules.plan(shapes(case.left)), case.left)
    back = computed(rules.reversed().plan(shapes(case.right)), there)
    assert values(back, case.left)
    for made in back.values():
        assert _depth(made.locate()) <= 2


def _depth(extent: Any) -> int:
    return 0 if isinstance(extent, Range) else 1 + max(map(_depth, extent.inputs), default=0)


@given(
    st.lists(st.integers(1, 5), min_size=3, max_size=4),
    st.permutations(range(4)),
    st.permutations(range(4)),
    st.data(),
)
@settings(max_examples=50)
def test_a_step_sees_through_shards_and_permutes(
    sizes: list[int], first: list[int], second: list[int], data: st.DataObject
) -> None:
    """A tensor that is itself put together from shards of any sizes, then permuted, then
    permuted."""
    rows = data.draw(st.integers(1, 6))
    cut = sorted(data.draw(st.lists(st.integers(0, rows), max_size=3)))
    (array,) = numbered((rows, *sizes))
    ends = [0, *cut, rows]
    parts = [record(array[a:b]) for a, b in pairwise(ends)]
    whole: Any = Derived(Concat(), tuple(parts), 4 * array.size)
    rank = array.ndim
    for order in (first, second):
        axes = [axis for axis in order if axis < rank]
        axes += [axis for axis in range(rank) if axis not in axes]
        words = "abcdefg"[:rank]
        rule = f"x [{' '.join(words)}] -> x [{' '.join(words[axis] for axis in axes)}]"
        plan = RuleSet.parse([rule]).plan({"x": array.shape})
        array = carried_out(plan, {"x": array})["x"]
        target = plan["x"]
        whole = Arranged((whole,), target.copies, 4, 4 * array.size).locate()
    assert b"".join(stream(whole)) == array.astype(DTYPE).tobytes()
    assert _depth(whole) <= 2


def test_stacks_are_ranges_and_neighbours_are_one() -> None:
    (array,) = numbered((4, 6))
    whole = record(array)
    apart = RuleSet.parse(["x [(p o) i] -> {p:a|b} [o i]"])
    found = computed(apart.plan({"x": (4, 6)}), {"x": whole})
    assert [each.locate() for each in found.values()] == [whole.part(0, 48), whole.part(48, 48)]
    again = computed(apart.reversed().plan({"a": (2, 6), "b": (2, 6)}), found)
    assert again["x"].locate() == whole


@pytest.mark.parametrize(
    ("rule", "shape", "expected"),
    [
        ("x [(p o) i] -> {p:a|b} [o i]", (8, 4), "joined"),
        ("x [o i] -> y [i o]", (8, 4), "transposed"),
        ("x [(h r two) i] -> y [(h two r) i] with two=2 h=2", (8, 4), "gathered"),
        ("x [i (p o)] -> {p:a|b} [i o]", (8, 4), "gathered"),
    ],
)
def test_what_is_said_of_a_rule(rule: str, shape: tuple[int, ...], expected: str) -> None:
    made = RuleSet.parse([rule]).plan({"x": shape})
    assert {how(target.copies, 4) for target in made.values()} == {expected}


def test_elements_smaller_than_a_byte_move_in_whole_bytes() -> None:
    made = RuleSet.parse(["x [e o i] -> x.{e} [o i]"]).plan({"x": (2, 3, 4)})
    assert in_bytes(made["x.1"].copies, 4) == (StridedCopy(0, 6, 0, ((6, 1, 1),)),)
    turned = RuleSet.parse(["x [o i] -> x [i o]"]).plan({"x": (4, 4)})
    assert in_bytes(turned["x"].copies, 4) is None
    odd = RuleSet.parse(["x [e i] -> x.{e} [i]"]).plan({"x": (2, 3)})
    assert in_bytes(odd["x.1"].copies, 4) is None


def test_a_large_compressed_source_is_not_read_out_of_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inflate = Derived(Inflate(), (Range(Memory(bytes(10)), 0, 10),), 4 * 64)
    copies = RuleSet.parse(["x [o i] -> y [i o]"]).plan({"x": (8, 8)})["y"].copies
    Arranged((inflate,), copies, 4, 256).locate()
    monkeypatch.setattr(arranged, "HELD", 100)
    with pytest.raises(UnsupportedError, match="compressed"):
        Arranged((inflate,), copies, 4, 256).locate()
