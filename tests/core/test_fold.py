"""Words of messages; fold: fewer rows that say the same."""

from __future__ import annotations

import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core.text import COUNTERS, Folded, Item, fold, guess, plural, quoted, unfolded


def labels(names: list[str]) -> list[str]:
    return [row.label for row in fold(Item(name, "same", 1) for name in names)]


def test_one_index() -> None:
    items = [Item(f"layers.{i}.{part}", "f32", 4) for i in range(32) for part in ("w", "b")]
    assert fold(items) == [
        Folded("layers.{0..31}.w", "f32", 128, 32),
        Folded("layers.{0..31}.b", "f32", 128, 32),
    ]


def test_two_indices() -> None:
    assert labels([f"l.{i}.e.{j}.w" for i in range(4) for j in range(8)]) == ["l.{0..3}.e.{0..7}.w"]


def test_only_equal_columns_fold() -> None:
    items = [Item("a.0", "f32", 1), Item("a.1", "f16", 1), Item("a.2", "f32", 1)]
    assert [row.label for row in fold(items)] == ["a.{0,2}", "a.1"]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.0.w"], ["a.0.w"]),
        (["a.0", "a.1", "a.3", "a.5", "a.6"], ["a.{0..1,3,5..6}"]),
        ([f"a.{n}" for n in range(0, 100, 2)], ["a.{0,2,4,..,98}"]),
        (["conv1.w", "conv2.w"], ["conv1.w", "conv2.w"]),
        (["a.01", "a.02", "a.00"], ["a.01", "a.02", "a.00"]),
        (["a.²", "a.³"], ["a.²", "a.³"]),
        (["0", "1"], ["{0..1}"]),
        (["", "."], ["", "."]),
        (["a.47514316048168", "a.3"], ["a.{3,47514316048168}"]),
        (["a.1" + "0" * 18, "a.2" + "0" * 18], ["a.1" + "0" * 18, "a.2" + "0" * 18]),
        (["0.0", "0.1", "1.0"], ["0.{0..1}", "1.0"]),
    ],
)
def test_names(names: list[str], expected: list[str]) -> None:
    assert labels(names) == expected


def test_order_is_that_of_the_first() -> None:
    assert labels(["z.0", "a", "z.1", "b"]) == ["z.{0..1}", "a", "b"]


def test_unfolded_keeps_all() -> None:
    assert unfolded([Item("a.0", "x", 4), Item("a.1", "x", 4)]) == [
        Folded("a.0", "x", 4, 1),
        Folded("a.1", "x", 4, 1),
    ]


def by_module(*rows: tuple[str, str]) -> list[str]:
    """Return the labels of names with dtypes, folded where their modules are of one kind."""
    return [row.label for row in fold([Item(*row, 1) for row in rows], lambda dtype: dtype)]


def test_modules_of_one_kind_fold() -> None:
    both = [(f"l.{i}.{part}", "f32") for i in range(3) for part in ("w", "b")]
    assert by_module(*both) == ["l.{0..2}.w", "l.{0..2}.b"]
    assert by_module(*reversed(both)) == ["l.{0..2}.b", "l.{0..2}.w"]


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (("l.1.b", "f32"), ["l.{0,2}.w", "l.1.w", "l.1.b"]),  # another part
        (("l.1.w", "f32"), ["l.{0,2}.w", "l.1.w"]),  # the same part twice
        (("l.1.w", "f16"), ["l.{0,2}.w", "l.1.w", "l.1.w"]),  # with another dtype
        (("l.1.0", "f32"), ["l.{0..2}.w", "l.1.0"]),  # the item of a list is no part
        (("l.1.00", "f32"), ["l.{0..2}.w", "l.1.00"]),
        (("l.1.deep.b", "f32"), ["l.{0..2}.w", "l.1.deep.b"]),  # of the module inside
        (("l.1.step", "f32"), ["l.{0,2}.w", "l.1.w", "l.1.step"]),
    ],
)
def test_modules_of_several_kinds_do_not(other: tuple[str, str], expected: list[str]) -> None:
    assert by_module(("l.0.w", "f32"), ("l.1.w", "f32"), ("l.2.w", "f32"), other) == expected


def test_lists_in_modules_of_several_kinds() -> None:
    lists = [(f"l.{i}.{j}", "f32") for i in range(3) for j in range(2)]
    assert by_module(*lists) == ["l.{0..2}.{0..1}"]
    assert by_module(*lists, ("l.1.b", "f32")) == ["l.{0,2}.{0..1}", "l.1.{0..1}", "l.1.b"]
    assert by_module(*lists, ("l.b", "f32")) == ["l.{0..2}.{0..1}", "l.b"]


def test_counters_are_alike_in_modules_of_all_kinds() -> None:
    counters = [(f"l.{i}.{name}", "i64") for i in range(2) for name in COUNTERS]
    assert by_module(*counters, ("l.1.b", "f32")) == [f"l.{{0..1}}.{n}" for n in COUNTERS] + [
        "l.1.b"
    ]


NAMES = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), unique=True, max_size=30)


@given(NAMES)
def test_folded_rows_stand_for_exactly_the_names(pairs: list[tuple[int, int]]) -> None:
    names = [f"m.{i}.x.{j}" for i, j in pairs]
    rows = fold(Item(name, "same", 1) for name in names)
    assert sorted(name for row in rows for name in spelled(row.label)) == sorted(names)
    assert all(row.rows == row.nbytes == len(spelled(row.label)) for row in rows)


def spelled(label: str) -> list[str]:
    """Every name that a folded label stands for."""
    parts = re.split(r"\{([0-9.,]+)\}", label)
    choices = [[part] if n % 2 == 0 else numbers(part) for n, part in enumerate(parts)]
    return ["".join(choice) for choice in product(*choices)]


def numbers(text: str) -> list[str]:
    found = []
    for run in text.split(","):
        first, _, last = run.partition("..")
        found += [str(n) for n in range(int(first), int(last or first) + 1)]
    return found


def test_words() -> None:
    assert [plural(1, "key"), plural(1_000, "key"), plural(2, "_metadata entry")] == [
        "1 key",
        "1,000 keys",
        "2 _metadata entries",
    ]
    assert quoted(list("abc")) == "'a', 'b', 'c'"
    assert quoted(list("abcdef")) == "'a', 'b', 'c', 'd' and 2 more"
    assert guess("wieght", ["weight", "bias"]) == "did you mean weight?"
    assert guess("xyz", ["weight"]) is None
