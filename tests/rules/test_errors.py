"""Every error about rules: one row for each text, and a test that no text is without one."""

from __future__ import annotations

import ast
import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import ckptkit
from ckptkit.compute.arranged import RUNS, Arranged
from ckptkit.compute.operation import HELD, Inflate
from ckptkit.compute.strided import StridedCopy
from ckptkit.core.bytesource import Derived, Extent, Memory, Range
from ckptkit.core.errors import CkptkitError, CollisionError, LimitError
from ckptkit.core.text import flatten
from ckptkit.edits import config_file, rules
from ckptkit.edits import expect as expectations
from ckptkit.edits.expect import Expectations
from ckptkit.edits.rules import check_like
from ckptkit.rules import planner
from ckptkit.rules.from_transformers import Layouts, Moved, Unsayable, generated
from ckptkit.rules.notation import MisfitError, RuleError
from ckptkit.rules.planner import RuleSet, check_reversible
from tests.quantized.made import Row, ones
from tests.quantized.refusals import FP8, L
from tests.rules import test_grouped

Shapes = dict[str, tuple[int, ...]]


def experts(count: int, *parts: str) -> Shapes:
    return {f"l.{n}.{part}.w": (6, 4) for n in range(count) for part in parts}


# A rule by itself: the line, and a pattern of what is said.
LINES: list[tuple[str, str]] = [
    ("a [(h r)] -> b [h]", "axis r occurs on one side only"),
    ("a.{e} -> b", "index e occurs on one side only"),
    ("a [o o] -> b [o o]", "o occurs twice"),
    ("a.{l} [l] -> b.{l} [l]", "l occurs twice"),
    ("a [...] -> b [i]", "one side only"),
    ("a [... ...] -> b [...]", "... occurs twice"),
    ("a.{p:q|k} -> b.{p:x|y|z}", "is q.k on the left and x.y.z on the right"),
    ("a.{p:q|q} -> b.{p}", "twice"),
    ("a.{m:*} [i] -> b [m i]", "matches any string, and must occur in both names"),
    ("a.{m:*} -> b.{m:**}", "is \\* on the left and \\*\\* on the right"),
    ("{a:**}x{b:**}y{c:**} -> {a}{b}{c}", "more than 2 variables with \\*\\*"),
    ("{a:x*y|z} -> {a}", "a label cannot contain \\*"),
    ("a.{(m)} -> b.{m}", "two or more axis names"),
    ("a.{l:x|y+1} -> b.{l", "lacks a }"),
    ("a.} -> b", "without a {"),
    ("a.{l", "lacks a }"),
    ("a b", "no ->"),
    ("-> b", "lacks a name"),
    ("a ->", "lacks a name"),
    ("a [x -> b", "lacks a \\]"),
    ("a [2 i] -> b [i]", "2 is not an axis"),
    ("a [_ i] -> b [i]", "'_' is not an axis"),
    ("a [((x) y)] -> b [x y]", "each \\( needs a \\)"),
    ("a [(x] -> b [x]", "each \\( needs a \\)"),
    ("a [x)] -> b [x]", "each \\( needs a \\)"),
    ("a -> b with", "gives no size"),
    ("a -> b with h", "is incomplete"),
    ("a -> b with h=1 h=2", "gives h twice"),
    ("a -> b with h=(1", "without a"),
    ("a -> b with h=+", "not a size"),
    ("a -> b with h=1;", "unexpected|expected sizes"),
    ("a -> b h=1", "unexpected|expected sizes"),
    (f"a -> b with h={'9' * 30}", "digits"),
    ("a.{l}.{(l e)} -> b.{l}.{e}", "l occurs twice on the left"),
    ("a.{(m e)} [] -> {m:*}.b [e]", "m matches any string, not a digit of a number"),
    ("a.{p:x|y}.{p:z|w} -> b.{p}", "p has different labels in one name"),
    ("a.{l+1} -> b.{l:x|y}", "only a number can have an offset"),
    ("a [... i] -> b [i]", "\\.\\.\\. occurs on one side only"),
    ("a.{l!} -> b.{l}", "{l!} is not a variable"),
    ("a.{l+1:x|y} -> b.{l}", "a variable with labels or \\* cannot have an offset"),
    ("a -> b with 3=4", "'3' is not a size"),
    ("a.{m:*}.{n:*} -> {m}", "index n occurs on one side only"),
]

# A rule and a checkpoint: the lines, the shapes, what is said, the hint.
SHAPES: list[tuple[list[str], Shapes, str, str | None]] = [
    (["a.{e}.w -> b.{e}"], {"a.0.v": ()}, "rule 1 matches no key; nearest: a.0.v", "->?"),
    (["a.{m:*} -> b.{m}", "a.x -> c"], {"a.x": ()}, "matches no key, because rule 1 matches a.x first", None),
    (["a -> b"], {"a": (), "c": (), "d": ()}, "2 keys are matched by no rule: c, d", "keep: rest"),
    (["l.{e}.{m:gate|up}.w [o i] -> g [e (m o) i]"], {**experts(3, "gate"), **experts(2, "up")},
     "g lacks the source tensor with e=2 m=up (l.2.up.w)", None),
    (["q [(h r two) i] -> q2 [(h two r) i] with h=32 two=2"], {"q": (100, 4)},
     "rule 1: q: 100 rows are not divisible by h*r*two with h=32 two=2", None),
    (["q [(h r two) i] -> q2 [(h two r) i] with two=2"], {"q": (4096, 4)},
     "cannot infer how 4096 splits into (h r two): give all but one of h, r", "args={'h': 32}"),
    (["{p:q|k|v} [o i] -> qkv [(p o) i]"], {"q": (8, 4), "k": (2, 4), "v": (2, 4)},
     "rule 1: the size of o differs between source tensors (q: 8, k: 2)", "with o=_|_|_"),
    (["s.{n} [o] -> s [(n o)]"], {"s.0": (2,), "s.1": (1,)},
     "the size of o differs between source tensors (s.0: 2, s.1: 1)", "labels"),
    (["qkv [(p o) i] -> {p:q|k|v} [o i] with o=_|_|_"], {"qkv": (12, 4)},
     "cannot infer how 12 splits into (p o): give o for all labels but one", "o=8|8|8"),
    (["a [i] -> b [i]"], {"a": (2, 3)}, "a has 2 dimensions", None),
    (["a.{e} [... i] -> b [e ... i]"], {"a.0": (2,), "a.1": (2, 3)}, "have different numbers",
     None),
    (["a [1 i] -> b [i]"], {"a": (2, 3)}, "2 rows, but the rule requires 1", None),
    (["a [(x y)] -> b [x y] with x=2 y=2"], {"a": (6,)}, "with x=2 y=2 requires 4", None),
    (["a.{l} -> b.{l-3}"], {"a.1": ()}, "number -2", None),
    (["a [x] -> b.{x} []", "c -> b.1"], {"a": (2,), "c": ()}, "rule 1 and rule 2 both write b.1",
     None),
    (["e.{(t e)} [o] -> {t:a|b} [e o]"], {f"e.{n}": (1,) for n in range(3)}, "3 numbers",
     "args={'e': 32}"),
    (["e.{e} [o] -> x [e o] with e=2"], {f"e.{n}": (1,) for n in range(3)},
     "e=2 must be less than the size 2", None),
    (["e.{(t e)} [o] -> {t:a|b} [e o] with e=1"], {f"e.{n}": (1,) for n in range(3)}, "too large",
     None),
    (["a [(p d)] -> {p:x|y} [d] with d=1|2|3"], {"a": (3,)}, "no variable has 3 labels", None),
    (["a [d p] -> {p:x|y} [d] with d=1|2"], {"a": (3, 2)}, "must follow p in one", None),
    (["a [p d] -> b.{p} [d] with d=1|2"], {"a": (3, 2)}, "no variable has 2 labels", None),
    (["a [p d] -> {p:x|y} [d] with p=3"], {"a": (3, 2)}, "p has 2 labels, but the given size is p=3", None),
    (["{m:**}x -> {m}"], {"x": ()}, "rule 1: a target name is empty", None),
    (["a.{l+n} -> b.{l}"], {"a.1": ()}, "rule 1: the size of n is unknown", "args={'n': 32}"),
    (["a.{e}.{m:x|y} [o] -> b [(e m o)]"],
     {"a.0.x": (8,), "a.0.y": (4,), "a.1.x": (4,), "a.1.y": (4,)},
     "rule 1: the size of o differs between source tensors (a.0.x: 8, a.0.y: 4)", None),
    (["a [(p q d)] -> {p:x|y}.{q:z|w} [d] with d=1|2"], {"a": (6,)},
     "the 2 values of d: p and q each have", None),
    (["a.{p:-|y} [d] -> b [(p d)] with d=_|_"], {"a.y": (4,)}, "rule 1: the size of d is unknown",
     "args={'d': 32}"),
    (["a [(p x d)] -> {p:u|v}.{x} [d] with x=1|2 d=2"], {"a": (6,)},
     "rule 1: the size of x is unknown", "args={'x': 32}"),
    (["a [x y] -> b.{x}.{y} [] with x=2"], {"a": (3, 1)}, "with x=2 requires 2", None),
    (["a.*.w -> b.*.w"], {"a.0.w": ()}, "rule 1 matches no key; nearest: a.0.w", "{m:*}"),
    (["a -> c", "b [i] -> d [i]"], {"a": (2,), "bb": (2,)}, "rule 2 matches no key", "->?"),
    (["fc{n}.w -> a.{n}"], {"fc1.w": (), "fc1.b": ()}, "matched by no rule: fc1.b; nearest: rule 1, fc{n}.w", "keep"),
]  # fmt: skip

# Sizes: what is said of h in `x [(h b)] -> y [h b]`, and the pattern of what is said of it.
SIZES: list[tuple[str, str]] = [
    ("0", "the size h is 0"),
    ("1-2", "the size h is -1"),
    ("3/2", "3 is not divisible by 2"),
    ("config.x", "config.x: expected an integer, got"),
    ("h", "the size h depends on itself"),
    ("9999999999*9999999999", "is too large for a size"),
]


def lines(*lines: str, **given: Any) -> Callable[[], object]:
    """Rules that cannot be read."""
    return lambda: RuleSet.parse(lines, **given)


def plan(*lines: str, of: Shapes, **given: Any) -> Callable[[], object]:
    """Rules that do not fit the shapes `of`."""
    return lambda: RuleSet.parse(lines).plan(of, **given)


def back(*lines: str, of: Shapes, **given: Any) -> Callable[[], object]:
    """Rules that cannot be undone."""

    def check() -> None:
        rules = RuleSet.parse(lines)
        check_reversible(rules, of, rules.outcome(of, **given), **given)

    return check


A_TO_B = "a -> b"
OTHERS: list[tuple[Callable[[], object], str]] = [
    (lines(A_TO_B, sizes={"h": "1 2"}), "unexpected '2'"),
    (plan("a [(p d h)] -> {p:x|y} [d h] with d=1|2 h=d", of={"a": (3,)}),
     "rule 1: d has 2 values, but expressions need one value"),
    (plan(A_TO_B, of={"a": (), "b": ()}, keep="rest"), "rule 1 and `keep` both write b"),
    (plan("a [(heads d)] -> b [heads d]", of={"a": (4,)}, args={"head": 2}),
     "no rule uses args['head']"),
    (plan("a [(h d)] -> b [h d]", of={"a": (4,)}, args={"h": 0}), "rule 1: the size h is 0"),
    (back("a [(x v)] -> {x:e|-} [v] with v=2|2", of={"a": (4,)}), "rule 1 drops 2 elements"),
    (back("x.{w:*} -> y.{w}", "module.{r:**} -> {r}", of={"x.a": (), "module.y.b": ()}),
     "rule 1 would match y.b in reverse, but rule 2 made"),
    (back("a.{l} -> b.{l}", of={"a.0": (), "b.7": ()}, keep="rest"),
     "rule 1 would match b.7 in reverse, but b.7 was kept"),
    (back("{p:q|k} [o] -> qk [(p o)] with o=_|_", of={"q": (4,), "k": (2,)}),
     "in reverse: rule 1: cannot infer how 6 splits into (p o)"),
]  # fmt: skip


def apply(*lines: str, of: Mapping[Any, Any], **given: Any) -> Callable[[Path], object]:
    """Rules that a checkpoint with these entries does not fit."""
    return lambda _: ckptkit.apply_rules(of, list(lines), **given)


def expect(line: str, **state: torch.Tensor) -> Callable[[Path], object]:
    """An expectation that cannot be read, or is not met."""
    return lambda _: Expectations([line]).check(ckptkit.open(state))


def quantized(*lines: str, of: Mapping[str, Row]) -> Callable[[Path], object]:
    """Rules that quantized weights do not fit."""
    return lambda folder: ckptkit.apply_rules(
        test_grouped.opened(folder, of), list(lines), keep="rest"
    )


def configured(text: str) -> Callable[[Path], object]:
    """A config.json that cannot be read."""

    def read(folder: Path) -> None:
        (folder / "config.json").write_text(text)
        config_file.read(str(folder / "config.json"))

    return read


def copied(*dims: tuple[int, int, int], of: Extent) -> Callable[[Path], object]:
    """Copies, one for each of `dims`, that cannot be lowered to ranges of bytes."""
    copies = tuple(StridedCopy(0, 0, 0, (each,)) for each in dims)
    length = 4 * sum(n for n, _, _ in dims)
    return lambda _: Arranged((Made(of),), copies, 4, length).locate()


def of_two_devices(_: Path) -> None:
    state = ckptkit.open({name: torch.zeros(2, 3) for name in "ab"})
    there = ckptkit.remap(ckptkit.open({"b": torch.zeros(2, 3)}), "cuda:0")
    ckptkit.apply_rules({**state.weights, **there.weights}, JOIN)


class Made(NamedTuple):
    """A record of an extent."""

    extent: Extent

    @property
    def length(self) -> int:
        return self.extent.length

    def locate(self) -> Extent:
        return self.extent


A = torch.zeros(2, 3)
JOIN = "{p:a|b} [o i] -> c [(p o) i]"
TURN = "a [o i] -> a [i o]"
MOMENTS = {"state": {0: {"exp_avg": A}}, "param_groups": [{"params": [0]}]}
LARGE = Derived(Inflate(), (Range(Memory(b""), 0, 0),), 2 * HELD)
NAMES = ["{r:**}.w -> m.{r}", "x.{w:*} -> y.{w}"]
CHECKPOINTS: list[tuple[Callable[[Path], object], str]] = [
    (apply("", of={"a": A}), "no rule given"),
    (apply(*NAMES, of={"m.q": A, "y.w": A}, reverse=True), "not reversible: rule 1 would match"),
    (apply("a -> b", of={"a": A, "b": 3}), "a rule makes b, which already exists"),
    (apply(TURN, of={"a": A.to("meta")}), "a can only be renamed: it is sparse"),
    (apply(JOIN, of={"a": A, "b": A.half()}), "rule 1: a is float32, but b is float16"),
    (of_two_devices, "rule 1: a is on cpu, but b is on cuda:0"),
    (apply(TURN, of={"a": torch.zeros(2, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}),
     "rule 1: the rule splits bytes of a"),
    (apply(TURN, of={"model": {"a": A}, "optimizer": MOMENTS}), "the optimizer state fits only"),
    (quantized(f"{L}.weight -> fc.weight", of={**FP8, "fc.weight_scale_inv": ones([2, 2])}),
     "but fc.weight_scale_inv already exists"),
    (quantized(*test_grouped.STACK, of=test_grouped.experts(200)), "rule 1 would cut its blocks"),
    (quantized(test_grouped.STACK[0], of=test_grouped.experts(256)),
     "rule 1 separates codes and scales"),
    (configured(f'"{"x" * config_file.BYTES}"'), "is larger than 1,048,576 bytes"),
    (configured("{"), "is not JSON"),
    (configured("[]"), "is not a JSON object"),
    (expect(""), "an expectation is empty"),
    (expect("* what"), "'what' is not a condition"),
    (expect("* count"), "count needs a value"),
    (expect("* shape=6"), "shape=6 is not a shape"),
    (expect("* count=config.n", a=A), "the value of config.n is unknown"),
    (expect("b", a=A), "not as expected: b: no such tensor"),
    (lambda _: check_like(ckptkit.open({"a": A}), {"a": (3,)}, "other"), "differs from other"),
    (copied((RUNS + 2, 1, 2), (RUNS + 2, 1, 3), of=Range(Memory(b""), 0, 8 * RUNS + 16)), "many small pieces"),
    (copied((HELD // 4, 1, 2), (HELD // 4, 1, 1), of=LARGE), "compressed tensor cannot be read out"),
]  # fmt: skip


def unsayable(
    *operations: tuple[str, Mapping[str, Any]],
    old: tuple[tuple[str, ...], ...],
    new: tuple[str, ...],
) -> Callable[[], object]:
    """What rules cannot say of the two layouts of a model."""
    moved = [Moved(old, new, operations)]
    shapes = dict.fromkeys(flatten(old), (4, 4))
    return lambda: generated(Layouts("x", "1", old=shapes, moved=moved)).left


STACKED = ("MergeModulelist", {"dim": 0})
HALVES = ("Chunk", {"dim": 0})
PERMUTED = ("PermuteForRope", {"permute_layer_names": ["q"], "subconfig_key": "", "inverse": False})
TURNED = ("Interleave", {"dim": 0, "inverse": False})
UNSAYABLE: list[tuple[Callable[[], object], str]] = [
    (unsayable(("Fold", {}), old=(("a",),), new=("b",)),
     "b: rules cannot express the operation Fold"),
    (unsayable(PERMUTED, HALVES, old=(("a",),), new=("q", "k")),
     "q: one rule cannot permute only some parts"),
    (unsayable(TURNED, TURNED, old=(("a",),), new=("b",)), "b: rules cannot split an axis twice"),
    (unsayable(STACKED, old=(("a.x", "a.y"),), new=("b",)),
     "b: names must differ in exactly one number: a.x, a.y"),
    (unsayable(HALVES, old=(("a",),), new=("b", "b")),
     "b: one pattern with labels cannot match b, b"),
]  # fmt: skip


# What people may write who want it to take long


def many(kind: str) -> str:
    """A name with thousands of variables."""
    return "".join(f"{{v{n}{kind}}}." for n in range(3_000))


def planned(lines: list[str], of: Shapes, given: Mapping[str, Any]) -> None:
    RuleSet.parse(lines, given.get("sizes")).plan(of, config=given)


@cache
def hostile() -> list[Any]:
    stars = "".join(f"{{v{n}:*}}x" for n in range(12))
    back = "".join(f"{{v{n}}}" for n in range(12))
    digits = "".join(f"{{v{n}}}" for n in range(18))
    labels = "{a:" + "|".join("a" * n for n in range(1, 40)) + "}"
    four = "".join(labels.replace("{a", "{" + word) for word in "abcd")
    return [
        ([f"{stars}z{{w}}y -> {back}{{w}}"], {"x" * 4_000 + "y": ()}, {}),
        ([f"{digits}.{{e}}y -> {digits}{{e}}"], {"1" * 6_000 + ".y": ()}, {}),
        (["{a:**}x{b:**}x{c:*}z{d}y -> {a}{b}{c}{d}"], {"x" * 60_000 + "y": ()}, {}),
        ([four + "z{e}y -> {a}{b}{c}{d}{e}"], {"a" * 500 + "y": ()}, {}),
        (["x [(e o)] -> x.{e} [o] with e=config.e"], {"x": (0,)}, {"e": 10**9}),
        (["x [e o] -> x.{e} [o]"], {"x": (10**12, 0)}, {}),
        (["x [(a b c)] -> x.{a}.{b}.{c} [] with a=1000 b=1000 c=1000"], {"x": (10**9,)}, {}),
        (["x.{a}.{b} [i] -> x [a b i]"], {"x.99999999.0": (1,), "x.0.999999999": (1,)}, {}),
        (["x -> y with " + "h=" + "1+" * 200 + "1"], {"x": ()}, {}),
        (["x -> y with h=" + "(" * 300 + "1" + ")" * 300], {"x": ()}, {}),
        (["x -> y  # " + "x" * (1 << 20)], {"x": ()}, {}),
        (["x -> y"], {"x": ()}, {"sizes": {"h": "1" * (1 << 20)}}),
        ([f"{many('')}x -> {many('')}y"], {"1." * 3_000 + "x": ()}, {}),
        ([f"{many(':*')}x -> {many('')}y"], {"a." * 3_000 + "y": ()}, {}),
        (["x.{p:" + "|".join(map(str, range(11_000))) + "} -> x.{p}"], {"x.0": ()}, {}),
        (["x -> y with h=" + "|".join(["1"] * 11_000)], {"x": ()}, {}),
        (["x.{n} [a] -> y.{a} [n]"], {f"x.{n}": (5_000,) for n in range(1_000)}, {}),
        (["x.{l} [a] -> y.{l}.{a} []"], {f"x.{n}": (600_000,) for n in range(2)}, {}),
        ([f"x{n} -> y{n}" for n in range(10_001)], {"x0": ()}, {}),
    ]  # fmt: skip


@pytest.mark.parametrize(("line", "said"), LINES)
def test_a_rule_that_cannot_be(line: str, said: str) -> None:
    with pytest.raises(RuleError, match=f"rule 1: .*{said}"):
        RuleSet.parse([line])


@pytest.mark.parametrize(("lines", "of", "said", "hint"), SHAPES)
def test_a_checkpoint_that_a_rule_does_not_fit(
    lines: list[str], of: Shapes, said: str, hint: str | None
) -> None:
    with pytest.raises(CkptkitError) as caught:
        RuleSet.parse(lines).plan(of)
    assert said in caught.value.message
    assert hint is None or (caught.value.hint is not None and hint in caught.value.hint)
    assert isinstance(caught.value, (RuleError, MisfitError, CollisionError))


def of_size(size: str) -> Callable[[], object]:
    return plan(f"x [(h b)] -> y [h b] with h={size}", of={"x": (4,)}, config={"x": "4"})


@pytest.mark.parametrize(
    ("wrong", "said"), [*OTHERS, *((of_size(size), said) for size, said in SIZES)]
)
def test_what_else_is_wrong(wrong: Callable[[], object], said: str) -> None:
    with pytest.raises(CkptkitError) as caught:
        wrong()
    assert said in caught.value.message


@pytest.mark.parametrize(("wrong", "said"), CHECKPOINTS)
def test_a_checkpoint_or_what_is_beside_it(
    wrong: Callable[[Path], object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(CkptkitError) as caught:
        wrong(tmp_path)
    assert said in caught.value.message


@pytest.mark.parametrize(("wrong", "said"), UNSAYABLE)
def test_layouts_that_no_rule_says(wrong: Callable[[], list[str]], said: str) -> None:
    (left,) = wrong()
    assert said in left


@pytest.mark.usefixtures("own_heap")
@pytest.mark.parametrize("case", range(len(hostile())))
def test_hostile_rules_names_and_configurations_end_soon(case: int) -> None:
    lines, of, given = hostile()[case]
    begin = time.process_time()
    with pytest.raises((LimitError, MisfitError)) as caught:
        planned(lines, of, given)
    assert time.process_time() - begin < 1
    assert isinstance(caught.value, LimitError) or "lacks" in caught.value.message


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        (lines("a.{e} -> b"), "add {e} to the name on the right, or e to the shape on the right"),
        (lines("a [i] -> b [i j]"), "add {j} to the name on the left, or j to the shape on the left"),
        (lines("a (h d) i -> b [h d i]"), "write a shape in [ ]"),
        (lines("a [3 i] -> b [i]"), "`with n=3`"),
        (lines("a [h, i] -> b [h i]"), "separate the names of axes by spaces"),
        (lines("a.{i} [i] -> b.{i} [i]"), "in the name or in the shape"),
        (plan("a [(h d)] -> b [h d]", of={"a": (4,)}, args={"zzz": 2}), "rules use d, h"),
        (lambda: ckptkit.apply_rules({"a": A, "b": A.half()}, JOIN), "cast first"),
    ],
)  # fmt: skip
def test_slips_have_hints(wrong: Callable[[], object], hint: str) -> None:
    with pytest.raises(CkptkitError) as caught:
        wrong()
    assert hint in str(caught.value.hint)


MAKERS = ("check", "refuse", "Unsayable")  # functions that raise an error, beside the classes


def sites() -> Iterator[tuple[str, range]]:
    """Yield the places where the modules of rules make an error: file, lines."""
    applied = (rules.__file__, config_file.__file__, expectations.__file__)
    for path in sorted((*Path(planner.__file__).parent.glob("*.py"), *map(Path, applied))):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            if path.name == "from_transformers.py" and name_of(node) != "Unsayable":
                continue  # the others need transformers: tests/interop
            if name_of(node).endswith(("Error", *MAKERS)):
                yield str(path), range(node.lineno, (node.end_lineno or node.lineno) + 1)


def name_of(call: ast.Call) -> str:
    """The name of the function, or of the method of a module."""
    function = call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return "" if function.value.id == "self" else function.attr
    return function.id if isinstance(function, ast.Name) else ""


def rows(folder: Path) -> Iterator[Callable[[], object]]:
    """Yield all rows of this file, ready to be run."""
    yield from (lines(line) for line, _ in LINES)
    yield from (row[0] for row in (*OTHERS, *UNSAYABLE))
    yield from (plan(*row[0], of=row[1]) for row in SHAPES)
    yield from (of_size(row[0]) for row in SIZES)
    yield from (partial(row[0], folder) for row in CHECKPOINTS)
    yield from (partial(planned, *row) for row in hostile())


def test_every_error_has_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: set[tuple[str, int]] = set()
    for kind in (CkptkitError, Unsayable):
        plain = kind.__init__

        def noting(self: Exception, *args: Any, plain: Any = plain, **given: Any) -> None:
            for depth in (1, 2):
                frame = sys._getframe(depth)
                made.add((frame.f_code.co_filename, frame.f_lineno))
            plain(self, *args, **given)

        monkeypatch.setattr(kind, "__init__", noting)
    for row in rows(tmp_path):
        with contextlib.suppress(CkptkitError):
            row()
    assert [
        (path, place.start)
        for path, place in sites()
        if not any((path, line) in made for line in place)
    ] == []
