"""Random rules: one tensor against einops, several against an index-built array."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.rules.notation import Rule, Shift, Side, Term, Variable, parse_rule
from ckptkit.rules.planner import RuleSet, check_reversible
from tests.rules.arrays import carried_out, numbered, same, shapes

AXES = ["a", "b", "c", "d", "e", "f"]


@st.composite
def grouped(draw: st.DrawFn, axes: list[str]) -> list[list[str]]:
    """The axes in any order, cut into dimensions."""
    order = draw(st.permutations(axes))
    cuts = draw(st.lists(st.booleans(), min_size=len(order), max_size=len(order)))
    found: list[list[str]] = []
    for axis, cut in zip(order, cuts, strict=True):
        if cut or not found:
            found.append([])
        found[-1].append(axis)
    if draw(st.booleans()):
        found.insert(draw(st.integers(0, len(found))), [])
    return found


def text(dimensions: list[list[str]]) -> str:
    words = [
        each[0] if len(each) == 1 else f"({' '.join(each)})" if each else "1" for each in dimensions
    ]
    return " ".join(words)


@given(st.data())
@settings(max_examples=60)
def test_one_tensor_is_what_einops_makes(data: st.DataObject) -> None:
    einops = pytest.importorskip("einops", reason="einops is not installed (extra: test)")
    axes = AXES[: data.draw(st.integers(1, 5))]
    sizes = {axis: data.draw(st.integers(1, 4)) for axis in axes}
    left, right = data.draw(grouped(axes)), data.draw(grouped(axes))
    (array,) = numbered(tuple(prod(sizes[each] for each in group) for group in left))
    said = {group[n]: sizes[group[n]] for group in left for n in range(1, len(group))}
    given = " ".join(f"{word}={size}" for word, size in said.items())
    rule = f"x [{text(left)}] -> y [{text(right)}]{' with ' * bool(given)}{given}"
    made = carried_out(RuleSet.parse([rule]).plan({"x": array.shape}), {"x": array})
    expected = einops.rearrange(array, f"{text(left)} -> {text(right)}", **said)
    assert same(made, {"y": expected})


@dataclass
class Case:
    """A rule with tensors on both sides."""

    rule: str
    left: dict[str, np.ndarray]
    right: dict[str, np.ndarray]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Loops, indices of either name alone, and free axes, in any order and grouping.

    The elements are one array with an axis for each word; both sides are cut out of it.
    """
    names = {
        "loop": draw(st.sampled_from([[], ["l"]])),
        "left": draw(st.sampled_from([[], ["p"], ["p", "q"]])),
        "right": draw(st.sampled_from([[], ["r"], ["r", "s"]])),
    }
    free = AXES[: draw(st.integers(0, 3))]
    words = [*names["loop"], *names["left"], *names["right"], *free]
    sizes = {word: draw(st.integers(1, 3)) for word in words}
    labelled = {word for word in words if word not in free and draw(st.booleans())}
    (whole,) = numbered(tuple(sizes[word] for word in words))
    sides = {}
    for here, there in (("left", "right"), ("right", "left")):
        indices = [*names["loop"], *names[here]]
        dimensions = draw(grouped([*names[there], *free])) if names[there] or free else []
        labels = {w: _labels(w, sizes, here) if w in labelled else "" for w in indices}
        name = "t" + "".join(f".{{{w}{label}}}" for w, label in labels.items())
        cut = _cut(whole, words, sizes, indices, dimensions, labelled, here)
        sides[here] = f"{name} [{text(dimensions)}]", cut
    axes = [word for word in words if word not in names["loop"]]
    given = " ".join(f"{word}={sizes[word]}" for word in axes)
    rule = f"{sides['left'][0]} -> {sides['right'][0]}{' with ' * bool(given)}{given}"
    return Case(rule, sides["left"][1], sides["right"][1])


def _labels(word: str, sizes: dict[str, int], side: str) -> str:
    return ":" + "|".join(f"{side[0]}{word}{n}" for n in range(sizes[word]))


def _cut(
    whole: np.ndarray, words: list[str], sizes: dict[str, int], indices: list[str],
    dimensions: list[list[str]], labelled: set[str], side: str,
) -> dict[str, np.ndarray]:  # fmt: skip
    order = [*indices, *(axis for group in dimensions for axis in group)]
    turned = whole.transpose([words.index(word) for word in order])
    shape = tuple(prod(sizes[axis] for axis in group) for group in dimensions)
    found = {}
    for values in product(*(range(sizes[word]) for word in indices)):
        parts = [
            f".{side[0]}{word}{n}" if word in labelled else f".{n}"
            for word, n in zip(indices, values, strict=True)
        ]
        found["t" + "".join(parts)] = np.ascontiguousarray(turned[values]).reshape(shape)
    return found


@given(cases())
@settings(max_examples=80)
def test_several_tensors_are_what_one_index_says(case: Case) -> None:
    rules = RuleSet.parse([case.rule])
    outcome = rules.outcome(shapes(case.left))
    assert same(carried_out(outcome.made, case.left), case.right)
    check_reversible(rules, shapes(case.left), outcome)
    back = rules.reversed()
    assert same(carried_out(back.plan(shapes(case.right)), case.right), case.left)
    assert back.reversed().rules == rules.rules


@st.composite
def uneven(draw: st.DrawFn) -> tuple[str, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Parts of different sizes inside of g, apart and joined."""
    g, d, i = (draw(st.integers(1, 3)) for _ in range(3))
    n = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    labels = "qkv"[: len(n)]
    parts = dict(zip(labels, numbered(*((g, each, d, i) for each in n)), strict=True))
    joined = np.concatenate([part.reshape(g, -1, i) for part in parts.values()], axis=1)
    sizes = "|".join(map(str, n))
    rule = f"{{p:{'|'.join(labels)}}} [(g n d) i] -> qkv [(g p n d) i] with n={sizes} g={g} d={d}"
    return (
        rule,
        {p: part.reshape(-1, i) for p, part in parts.items()},
        {"qkv": joined.reshape(-1, i)},
    )


@given(uneven())
@settings(max_examples=60)
def test_uneven_parts(case: tuple[str, dict[str, np.ndarray], dict[str, np.ndarray]]) -> None:
    rule, apart, joined = case
    rules = RuleSet.parse([rule])
    assert same(carried_out(rules.plan(shapes(apart)), apart), joined)
    assert same(carried_out(rules.reversed().plan(shapes(joined)), joined), apart)


words = st.sampled_from(["l", "e", "head_dim", "x2"])
literals = st.text("abc._0-", min_size=1, max_size=5)
shifts = st.builds(Shift, st.sampled_from([1, -1]), st.integers(0, 9) | words)
kinds = st.sampled_from(["*", "**", ("q", "k"), ("", "-", "a.b")])
variables = st.one_of(
    st.builds(Variable, st.tuples(words), st.none() | shifts),
    st.builds(Variable, st.tuples(words), st.none(), kinds),
    st.builds(Variable, st.lists(words, min_size=2, max_size=3).map(tuple)),
)  # fmt: skip


@st.composite
def side(draw: st.DrawFn) -> Side:
    name: list[Any] = [draw(literals)]
    for _ in range(draw(st.integers(0, 3))):
        name.append(draw(variables))
        if draw(st.booleans()):
            name.append(draw(literals))
    dims = st.one_of(st.just("..."), st.lists(words, max_size=3).map(tuple))
    return Side(tuple(name), draw(st.none() | st.lists(dims, max_size=3).map(tuple)))


terms = st.recursive(
    st.one_of(
        st.integers(0, 99).map(lambda n: Term("number", (n,))),
        words.map(lambda w: Term("word", (w,))),
        st.just(Term("config", ("blocks.0.dim",))),
    ),
    lambda inner: st.builds(
        lambda sign, a, b: Term(sign, (a, b)), st.sampled_from("+-*/"), inner, inner
    ),
    max_leaves=6,
)
choices = st.none() | st.lists(terms, min_size=1, max_size=2).map(tuple)
sizes = st.dictionaries(words, st.lists(choices, min_size=1, max_size=3).map(tuple))


@given(
    st.builds(Rule, side(), side(), st.booleans(), sizes.map(lambda found: tuple(found.items())))
)
@settings(max_examples=80)
def test_what_is_printed_reads_as_the_same_rule(rule: Rule) -> None:
    assert parse_rule(str(rule)) == rule
