"""The forms of rules, their effect on names and shapes, and each error in them."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ckptkit.compute.strided import ZEROS
from ckptkit.rules.notation import NotReversibleError, RuleError, UncoveredError, parse_rule
from ckptkit.rules.planner import RuleSet, check_reversible
from tests.rules.arrays import carried_out, numbered, shapes

Shapes = dict[str, tuple[int, ...]]


def plan(*lines: str, of: Shapes, sizes: Any = None, **given: Any) -> Shapes:
    """The shapes that rules make, by name."""
    made = RuleSet.parse(lines, sizes).plan(of, **given)
    return {name: target.shape for name, target in made.items()}


def experts(count: int, *parts: str) -> Shapes:
    return {f"l.{n}.{part}.w": (6, 4) for n in range(count) for part in parts}


# What rules do


def test_experts_are_in_the_order_of_their_numbers() -> None:
    keys = [f"experts.{n}.w" for n in range(12)]
    arrays = dict(zip(keys, numbered(*[(2,)] * 12), strict=True))
    made = RuleSet.parse(["experts.{e}.w [o] -> experts [e o]"]).plan(
        shapes(dict(sorted(arrays.items())))
    )
    assert carried_out(made, arrays)["experts"].tolist() == [arrays[key].tolist() for key in keys]


def test_labels_meet_by_position() -> None:
    made = plan("a.{p:q|k} -> b.{p:query|key}.{p}", of={"a.k": (1,), "a.q": (2,)})
    assert made == {"b.key.key": (1,), "b.query.query": (2,)}


def test_the_first_rule_takes_a_key() -> None:
    made = plan(
        "a.{l+n}.w -> m.{l} with n=2", "a.{l}.w -> b.{l}", of={f"a.{n}.w": () for n in range(4)}
    )
    assert list(made) == ["b.0", "b.1", "m.0", "m.1"]


def test_numbers_that_are_made_of_two_indices() -> None:
    of = {f"e.{n}": (3,) for n in range(6)}
    assert plan("e.{(t e)} [o] -> {t:text|vision} [e o]", of=of) == {
        "text": (3, 3),
        "vision": (3, 3),
    }
    made = plan("in.{(b k)+1} -> d.{b}.{k} with k=3", of={"in.1": (), "in.5": ()})
    assert list(made) == ["d.0.0", "d.1.1"]


def test_numbers_of_two_indices_count_apart_in_each_loop() -> None:
    of = {f"{n_loop}.{n}": (3,) for n_loop, count in ((0, 2), (1, 4)) for n in range(count)}
    made = plan("{l}.{(t e)} [o] -> {l}.{t:a|b} [e o]", of=of)
    assert made == {"0.a": (1, 3), "0.b": (1, 3), "1.a": (2, 3), "1.b": (2, 3)}


def test_any_text_is_as_short_as_it_can_be() -> None:
    assert list(plan("{a:**}.w.{b:**} -> {b}/{a}", of={"x.w.y.w.z": ()})) == ["y.w.z/x"]
    assert list(plan("{m:**}norm -> {m}n", of={"norm": ()})) == ["n"]


def test_one_component_is_not_empty_and_has_no_dot() -> None:
    for key in ("a.", "a.b.c"):
        with pytest.raises(UncoveredError):
            plan("a.{m:*} -> {m}", of={key: ()})


def test_labels_go_back_until_one_fits() -> None:
    assert list(plan("{p:q|qk}{m:**}_x -> {m}{p}", of={"qk_x": ()})) == ["kq"]
    assert list(plan("{p:q|qk}_x -> {p}", of={"qk_x": ()})) == ["qk"]


def test_numbers_have_no_leading_zero() -> None:
    with pytest.raises(UncoveredError):
        plan("a.{l} -> b.{l}", of={"a.01": ()})


def test_parts_that_are_dropped_come_back_as_zeros() -> None:
    rules = RuleSet.parse(["emb [(x v) i] -> {x:e|-} [v i] with v=5|_"])
    outcome = rules.outcome({"emb": (8, 2)})
    assert outcome.made["e"].shape == (5, 2)
    assert outcome.taken[0].dropped == 6
    with pytest.raises(RuleError, match="the size of v is unknown"):
        rules.reversed().plan({"e": (5, 2)})
    (array,) = numbered((5, 2))
    returned = RuleSet.parse(["{x:e|-} [v i] -> emb [(x v) i] with v=5|3"])
    made = carried_out(returned.plan({"e": (5, 2)}), {"e": array})
    assert made["emb"].tolist() == [*array.tolist(), [0, 0], [0, 0], [0, 0]]


def test_a_bias_that_is_not_there_is_zeros() -> None:
    rules = RuleSet.parse(["{p:q|-|v}_bias [o] -> qkv [(p o)]"])
    q, v = numbered((2,), (2,))
    outcome = rules.outcome({"q_bias": (2,), "v_bias": (2,)})
    assert outcome.taken[0].zeros == 2
    made = carried_out(outcome.made, {"q_bias": q, "v_bias": v})
    assert made["qkv"].tolist() == [1, 2, 0, 0, 3, 4]


def test_sizes_come_from_where_they_are_said_first() -> None:
    rule = "x [(h d)] -> y [h d] with h=config.heads or 3"
    assert plan(rule, of={"x": (12,)}, args={"h": 2}, config={"heads": 4}) == {"y": (2, 6)}
    assert plan(rule, of={"x": (12,)}, config={"heads": 4}) == {"y": (4, 3)}
    assert plan(rule, of={"x": (12,)}, config={"heads": None}) == {"y": (3, 4)}
    bare = "x [(h d)] -> y [h d]"
    assert plan(bare, of={"x": (12,)}, sizes={"h": 6}) == {"y": (6, 2)}


def test_sizes_are_computed() -> None:
    config = {"text": {"n": 12}, "blocks": [{"dim": 4}]}
    rule = "x [(a b)] -> y [a b] with a=(config.text.n-config.blocks.0.dim)/2"
    assert plan(rule, of={"x": (12,)}, config=config) == {"y": (4, 3)}


def test_a_size_that_differs_with_a_loop() -> None:
    of = {"text.q": (8,), "vision.q": (9,)}
    made = plan("{s:text|vision}.q [(h d)] -> {s}.q2 [h d] with h=2|3", of=of)
    assert made == {"text.q2": (2, 4), "vision.q2": (3, 3)}


def test_keys_that_no_rule_takes() -> None:
    of = {"a.w": (2,), "norm": (1,), "x.y": (3,)}
    rules = RuleSet.parse(["a.w -> b.w"])
    assert list(rules.outcome(of, keep="rest").targets) == ["b.w", "norm", "x.y"]
    assert rules.outcome(of, keep=["norm", "x.*"]).kept == ["norm", "x.y"]
    with pytest.raises(UncoveredError, match="1 key is matched by no rule: norm"):
        rules.outcome(of, keep="x.*")


def test_comments_and_empty_lines() -> None:
    rules = RuleSet.parse(["# names", "", "a -> b  # the first", "c [i] -> d [i] # y"])
    assert [str(rule) for rule in rules.rules] == ["a -> b", "c [i] -> d [i]"]


# What is wrong with a rule and a checkpoint (tests/rules/test_errors.py has each error)


def test_thirds_of_a_fused_matrix_need_a_word() -> None:
    """6144 rows of Llama-3-8B: 4096 + 1024 + 1024, of which thirds exist."""
    of = {"q": (4096, 8), "k": (1024, 8), "v": (1024, 8)}
    rules = RuleSet.parse(["{p:q|k|v} [o i] -> qkv [(p o) i] with o=_|_|_"])
    outcome = rules.outcome(of)
    assert outcome.made["qkv"].shape == (6144, 8)
    with pytest.raises(NotReversibleError, match="give o for all labels but one"):
        check_reversible(rules, of, outcome)
    said = RuleSet.parse(["{p:q|k|v} [o i] -> qkv [(p o) i] with o=4096|1024|_"])
    check_reversible(said, of, said.outcome(of))


PADDED = "w [(x v) i] -> {x:e|-} [v i] with v=vocab|pad"


@pytest.mark.parametrize("pad", [0, 2])
def test_padding_may_be_none_there_and_back(pad: int) -> None:
    rules = RuleSet.parse([PADDED])
    args = {"vocab": 6, "pad": pad}
    (made,) = rules.plan({"w": (6 + pad, 2)}, args=args).values()
    assert made.shape == (6, 2)
    back = rules.reversed().plan({"e": (6, 2)}, args=args)["w"]
    assert back.shape == (6 + pad, 2)
    assert sum(copy.source == ZEROS for copy in back.copies) == bool(pad)


@pytest.mark.parametrize(
    ("line", "args", "word"),
    [
        (PADDED, {"vocab": 0, "pad": 6}, "v"),
        ("w [(h d) i] -> e [h d i]", {"h": 0}, "h"),
        ("w [(p d) i] -> {p:a|b} [d i] with d=x|y", {"x": 0, "y": 6}, "d"),
        ("w.{l+n} -> e.{l}", {"n": 0}, "n"),
    ],
)
def test_nothing_else_has_a_size_of_0(line: str, args: dict[str, int], word: str) -> None:
    with pytest.raises(RuleError, match=f"rule 1: the size {word} is 0"):
        RuleSet.parse([line]).plan({"w": (6, 2), "w.1": (2,)}, keep="rest", args=args)


@pytest.mark.usefixtures("own_heap")
def test_many_keys_and_rules_are_planned_soon() -> None:
    parts = ["q", "k", "v", "o", "gate", "up", "down", "norm"]
    of = {f"model.layers.{n}.block.{part}.weight": (8, 8) for n in range(500) for part in parts}
    lines = [f"model.layers.{{l}}.block.{part}.weight -> h.{{l}}.{part}.w" for part in parts]
    lines += [f"model.other{n}.{{l}}.x.{{w:*}} ->? other{n}.{{l}}" + ".{w}" for n in range(32)]
    begin = time.process_time()
    assert len(plan(*lines, of=of)) == len(of)
    assert time.process_time() - begin < 1


def test_a_parsed_rule_keeps_its_text() -> None:
    text = "a.{ l }.{ p : q | k } [ (h  d) 1 ... ]->? b.{l} [p h d 1 ...] with h = 4 * 2   # heads"
    rule = parse_rule(text)
    assert rule.text == text
    assert str(rule) == "a.{l}.{p:q|k} [(h d) 1 ...] ->? b.{l} [p h d 1 ...] with h=4*2"
