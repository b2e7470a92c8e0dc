"""Every error about rules: one row for each text, and a test that no text is without one."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ckptkit.core.errors import CkptkitError, CollisionError
from ckptkit.rules import planner
from ckptkit.rules.errors import MisfitError, RuleError
from ckptkit.rules.planner import Rules
from ckptkit.rules.reversal import check_reversible

Shapes = dict[str, tuple[int, ...]]


def experts(count: int, *parts: str) -> Shapes:
    return {f"l.{n}.{part}.w": (6, 4) for n in range(count) for part in parts}


# A rule by itself: the line, and a pattern of what is said.
LINES: list[tuple[str, str]] = [
    ("a [(h r)] -> b [h]", "axis r stands on one side only"),
    ("a.{e} -> b", "index e stands on one side only"),
    ("a [o o] -> b [o o]", "o stands twice"),
    ("a.{l} [l] -> b.{l} [l]", "l stands twice"),
    ("a [...] -> b [i]", "one side only"),
    ("a [... ...] -> b [...]", "... stands twice"),
    ("a.{p:q|k} -> b.{p:x|y|z}", "2 labels on the left and 3"),
    ("a.{p:q|q} -> b.{p}", "twice"),
    ("a.{m:*} [i] -> b [m i]", "any text, and must stand in both names"),
    ("a.{m:*} -> b.{m:**}", "is \\* on the left and \\*\\* on the right"),
    ("{a:**}x{b:**}y{c:**} -> {a}{b}{c}", "more than 2 \\*\\*"),
    ("{a:x*y|z} -> {a}", "a label has no \\*"),
    ("a.{(m)} -> b.{m}", "two words"),
    ("a.{l:x|y+1} -> b.{l", "no }"),
    ("a.} -> b", "without its {"),
    ("a.{l", "no }"),
    ("a b", "no ->"),
    ("-> b", "lacks a name"),
    ("a ->", "lacks a name"),
    ("a [x -> b", "no \\]"),
    ("a [2 i] -> b [i]", "2 is not an axis"),
    ("a [_ i] -> b [i]", "'_' is not an axis"),
    ("a [((x) y)] -> b [x y]", "inside"),
    ("a [(x] -> b [x]", "without its \\)"),
    ("a [x)] -> b [x]", "without its \\("),
    ("a -> b with", "gives no size"),
    ("a -> b with h", "too early"),
    ("a -> b with h=1 h=2", "gives h twice"),
    ("a -> b with h=(1", "without its"),
    ("a -> b with h=+", "not a size"),
    ("a -> b with h=1;", "not understood"),
    ("a -> b h=1", "not understood"),
    (f"a -> b with h={'9' * 30}", "digits"),
    ("a.{l}.{(l e)} -> b.{l}.{e}", "alone and in"),
    ("a.{(m e)} [] -> {m:*}.b [e]", "m is any text, and no digit of a number"),
    ("a.{p:x|y}.{p:z|w} -> b.{p}", "p has two kinds in one name"),
    ("a.{l+1} -> b.{l:x|y}", "only a number can be shifted"),
    ("a [... i] -> b [i]", "\\.\\.\\. stands on one side only"),
    ("a.{l!} -> b.{l}", "{l!} is not a variable"),
    ("a.{l+1:x|y} -> b.{l}", "only a number can be shifted or made of several words"),
    ("a -> b with 3=4", "'3' is not a size"),
    ("a.{m:*}.{n:*} -> {m}", "index n stands on one side only"),
]

# A rule and a checkpoint: the lines, the shapes, what is said, the hint.
SHAPES: list[tuple[list[str], Shapes, str, str | None]] = [
    (["a.{e}.w -> b.{e}"], {"a.0.v": ()}, "rule 1 matches no key; nearest: a.0.v", "->?"),
    (["a.{m:*} -> b.{m}", "a.x -> c"], {"a.x": ()}, "matches no key that rule 1 leaves", None),
    (["a -> b"], {"a": (), "c": (), "d": ()}, "2 keys are in no rule: c, d", "keep: rest"),
    (
        ["l.{e}.{m:gate|up}.w [o i] -> g [e (m o) i]"],
        {**experts(3, "gate"), **experts(2, "up")},
        "g lacks e=2 m=up (l.2.up.w)",
        None,
    ),
    (
        ["q [(h r two) i] -> q2 [(h two r) i] with h=32 two=2"],
        {"q": (100, 4)},
        "rule 1: q: 100 rows are no multiple of h r two with h=32 two=2",
        None,
    ),
    (
        ["q [(h r two) i] -> q2 [(h two r) i] with two=2"],
        {"q": (4096, 4)},
        "nothing says how 4096 falls into (h r two): give all but one of h, r",
        "--arg h",
    ),
    (
        ["{p:q|k|v} [o i] -> qkv [(p o) i]"],
        {"q": (8, 4), "k": (2, 4), "v": (2, 4)},
        "rule 1: o differs with p (q: 8, k: 2, v: 2)",
        "with o=_|_|_",
    ),
    (
        ["s.{n} [o] -> s [(n o)]"],
        {"s.0": (2,), "s.1": (1,)},
        "o differs with n (0: 2, 1: 1)",
        "labels",
    ),
    (
        ["qkv [(p o) i] -> {p:q|k|v} [o i] with o=_|_|_"],
        {"qkv": (12, 4)},
        "nothing says how 12 falls into (p o): give o for all labels but one",
        "o=N|N|N",
    ),
    (["a [i] -> b [i]"], {"a": (2, 3)}, "a has 2 dimensions", None),
    (
        ["a.{e} [... i] -> b [e ... i]"],
        {"a.0": (2,), "a.1": (2, 3)},
        "differ in the number",
        None,
    ),
    (["a [1 i] -> b [i]"], {"a": (2, 3)}, "2 rows where the rule has 1", None),
    (["a [(x y)] -> b [x y] with x=2 y=2"], {"a": (6,)}, "with x=2 y=2 are 4", None),
    (["a.{l} -> b.{l-3}"], {"a.1": ()}, "number -2", None),
    (
        ["a [x] -> b.{x} []", "c -> b.1"],
        {"a": (2,), "c": ()},
        "b.1 is written by rule 1 and rule 2",
        None,
    ),
    (
        ["e.{(t e)} [o] -> {t:a|b} [e o]"],
        {f"e.{n}": (1,) for n in range(3)},
        "3 numbers",
        "--arg e",
    ),
    (
        ["e.{e} [o] -> x [e o] with e=2"],
        {f"e.{n}": (1,) for n in range(3)},
        "e=2, and the size e is 2",
        None,
    ),
    (
        ["e.{(t e)} [o] -> {t:a|b} [e o] with e=1"],
        {f"e.{n}": (1,) for n in range(3)},
        "too large",
        None,
    ),
    (["a [(p d)] -> {p:x|y} [d] with d=1|2|3"], {"a": (3,)}, "no variable has 3 labels", None),
    (["a [d p] -> {p:x|y} [d] with d=1|2"], {"a": (3, 2)}, "must follow it in one", None),
    (["a [p d] -> b.{p} [d] with d=1|2"], {"a": (3, 2)}, "no variable has 2 labels", None),
    (["a [p d] -> {p:x|y} [d] with p=3"], {"a": (3, 2)}, "p has 2 labels, and p=3", None),
    (["{m:**}x -> {m}"], {"x": ()}, "rule 1: a name is empty", None),
    (["a.{l+n} -> b.{l}"], {"a.1": ()}, "rule 1: nothing says n", "--arg n=N"),
    (
        ["a.{e}.{m:x|y} [o] -> b [(e m o)]"],
        {"a.0.x": (8,), "a.0.y": (4,), "a.1.x": (4,), "a.1.y": (4,)},
        "rule 1: o differs (a.0.x: 8, a.0.y: 4)",
        None,
    ),
    (
        ["a [(p q d)] -> {p:x|y}.{q:z|w} [d] with d=1|2"],
        {"a": (6,)},
        "d has 2 values, and so many labels have p and q",
        None,
    ),
    (
        ["a.{p:-|y} [d] -> b [(p d)] with d=_|_"],
        {"a.y": (4,)},
        "rule 1: nothing says the size of d",
        "--arg d=N",
    ),
    (
        ["a [(p x d)] -> {p:u|v}.{x} [d] with x=1|2 d=2"],
        {"a": (6,)},
        "rule 1: nothing says how many x there are",
        "--arg x=N",
    ),
    (["a [x y] -> b.{x}.{y} [] with x=2"], {"a": (3, 1)}, "with x=2 are 2", None),
    (["a -> c", "b [i] -> d [i]"], {"a": (2,), "bb": (2,)}, "rule 2 matches no key", "->?"),
    (["fc{n}.w -> a.{n}"], {"fc1.w": (), "fc1.b": ()}, "in no rule: fc1.b; nearest: rule 1, fc{n}.w", "keep"),
]  # fmt: skip

# Sizes: what is said of h in `x [(h b)] -> y [h b]`, and the pattern of what is said of it.
SIZES: list[tuple[str, str]] = [
    ("0", "the size h would be 0"),
    ("1-2", "the size h would be -1"),
    ("3/2", "3 / 2 is not a whole number"),
    ("config.x", "config.x is '4', which is not a whole number"),
    ("h", "the size h is given by itself"),
    ("9999999999*9999999999", "is too large for a size"),
]


def lines(*lines: str, **given: Any) -> Callable[[], object]:
    """Rules that cannot be read."""
    return lambda: Rules.parse(lines, **given)


def plan(*lines: str, of: Shapes, **given: Any) -> Callable[[], object]:
    """Rules that do not fit the shapes `of`."""
    return lambda: Rules.parse(lines).plan(of, **given)


def back(*lines: str, of: Shapes, **given: Any) -> Callable[[], object]:
    """Rules that cannot be undone."""

    def check() -> None:
        rules = Rules.parse(lines)
        check_reversible(rules, of, rules.outcome(of, **given), **given)

    return check


A_TO_B = "a -> b"
OTHERS: list[tuple[Callable[[], object], str]] = [
    (lines(A_TO_B, sizes={"h": "1 2"}), "'2' is not understood"),
    (
        plan("a [(p d h)] -> {p:x|y} [d h] with d=1|2 h=d", of={"a": (3,)}),
        "rule 1: d has 2 values, and one is needed",
    ),
    (plan(A_TO_B, of={"a": (), "b": ()}, keep="rest"), "b is written by rule 1 and kept by `keep`"),
    (plan("a [(heads d)] -> b [heads d]", of={"a": (4,)}, args={"head": 2}), "--arg head: no rule"),
    (plan("a [(h d)] -> b [h d]", of={"a": (4,)}, args={"h": 0}), "rule 1: the size h would be 0"),
    (back("a [(x v)] -> {x:e|-} [v] with v=2|2", of={"a": (4,)}), "rule 1 drops 2 elements"),
    (
        back("x.{w:*} -> y.{w}", "module.{r:**} -> {r}", of={"x.a": (), "module.y.b": ()}),
        "rule 1 would take y.b, which rule 2 made",
    ),
    (
        back("a.{l} -> b.{l}", of={"a.0": (), "b.7": ()}, keep="rest"),
        "rule 1 would take b.7, which was kept",
    ),
    (
        back("{p:q|k} [o] -> qk [(p o)] with o=_|_", of={"q": (4,), "k": (2,)}),
        "on the way back, rule 1: nothing says how 6 falls into (p o)",
    ),
]


@pytest.mark.parametrize(("line", "said"), LINES)
def test_a_rule_that_cannot_be(line: str, said: str) -> None:
    with pytest.raises(RuleError, match=f"rule 1: .*{said}"):
        Rules.parse([line])


@pytest.mark.parametrize(("lines", "of", "said", "hint"), SHAPES)
def test_a_checkpoint_that_a_rule_does_not_fit(
    lines: list[str], of: Shapes, said: str, hint: str | None
) -> None:
    with pytest.raises(CkptkitError) as caught:
        Rules.parse(lines).plan(of)
    assert said in caught.value.message
    assert hint is None or (caught.value.hint is not None and hint in caught.value.hint)
    assert isinstance(caught.value, (RuleError, MisfitError, CollisionError))


def of_size(size: str) -> Callable[[], object]:
    return plan(f"x [(h b)] -> y [h b] with h={size}", of={"x": (4,)}, config={"x": "4"})


@pytest.mark.parametrize(("size", "said"), SIZES)
def test_sizes_that_are_none(size: str, said: str) -> None:
    with pytest.raises(RuleError) as caught:
        of_size(size)()
    assert caught.value.message.startswith("rule 1: ")
    assert said in caught.value.message


@pytest.mark.parametrize(("wrong", "said"), OTHERS)
def test_what_else_is_wrong(wrong: Callable[[], object], said: str) -> None:
    with pytest.raises(CkptkitError) as caught:
        wrong()
    assert said in caught.value.message


def test_words_that_no_rule_uses_are_answered_with_those_that_are() -> None:
    rules = Rules.parse(["a [(h d)] -> b [h d]"])
    with pytest.raises(RuleError) as caught:
        rules.plan({"a": (4,)}, args={"zzz": 2})
    assert caught.value.hint == "rules use d, h"


PLANNING = [
    *("checks", "copies", "names", "notation", "parsing", "planner", "ready", "reversal", "sizes"),
]


def sites() -> Iterator[tuple[str, range]]:
    """Yield the places where the modules of planning make an error: file name, lines."""
    for module in PLANNING:
        path = Path(planner.__file__).with_name(f"{module}.py")
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id.endswith("Error")
            ):
                yield path.name, range(node.lineno, (node.end_lineno or node.lineno) + 1)


def test_every_error_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    made: set[tuple[str, int]] = set()
    plain = CkptkitError.__init__

    def noting(self: CkptkitError, *args: Any, **given: Any) -> None:
        frame = sys._getframe(1)
        made.add((Path(frame.f_code.co_filename).name, frame.f_lineno))
        plain(self, *args, **given)

    monkeypatch.setattr(CkptkitError, "__init__", noting)
    rows = [*(lines(line) for line, _ in LINES), *(row[0] for row in OTHERS)]
    rows += [*(plan(*row[0], of=row[1]) for row in SHAPES), *(of_size(row[0]) for row in SIZES)]
    for row in rows:
        with pytest.raises(CkptkitError):
            row()
    assert [
        (name, place.start)
        for name, place in sites()
        if not any((name, line) in made for line in place)
    ] == []
