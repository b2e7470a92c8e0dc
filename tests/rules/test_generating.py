"""Rules that are written from what is known of two layouts: names, shapes, operations."""

from __future__ import annotations

from typing import Any

import numpy as np

from ckptkit.rules.from_transformers import Layouts, Moved, generated, recipe_text
from ckptkit.rules.planner import RuleSet
from tests.rules.arrays import carried_out, numbered, same, shapes

NAMES = ("attn.q", "attn.k", "attn.v")


def layouts(operations: Any, old: dict[str, Any], new: dict[str, Any]) -> Layouts:
    """Two layouts, of which one operation or several make the other."""
    moved = [Moved(tuple((name,) for name in old), tuple(new), operations)]
    return Layouts("made", "1", old=shapes(old), new=shapes(new), moved=moved)


def test_parts_that_are_permuted_alone_take_two_steps() -> None:
    (fused,) = numbered((24, 5))
    parts = np.split(fused, 3)
    turned = [each.reshape(2, 2, 2, 5).swapaxes(1, 2).reshape(8, 5) for each in parts[:2]]
    new = dict(zip(NAMES, [*turned, parts[2]], strict=True))
    permute = {"permute_layer_names": ["q", "k"], "subconfig_key": None, "inverse": False}
    operations = (("Chunk", {"dim": 0}), ("PermuteForRope", {**permute, "heads": "config.heads"}))
    found = generated(layouts(operations, {"qkv": fused}, new))
    assert found.left == []
    first, second = map(RuleSet.parse, found.steps)
    made = carried_out(first.plan({"qkv": (24, 5)}), {"qkv": fused})
    plan = second.plan(shapes(made), keep="rest", config={"heads": 2})
    assert same({**made, **carried_out(plan, made)}, new)
    text = recipe_text(layouts(operations, {"qkv": fused}, new), found)
    assert text.count("- rules:") == 2


def test_parts_of_different_sizes_have_their_numbers() -> None:
    (fused,) = numbered((12, 5))
    new = dict(zip(NAMES, np.split(fused, [8, 10]), strict=True))
    found = generated(layouts((("Split", {"dim": 0}),), {"qkv": fused}, new))
    assert (found.left, found.steps) == (
        [],
        [["qkv [(m a) b] -> attn.{m:q|k|v} [a b] with a=8|2|2"]],
    )
    rules = RuleSet.parse(found.steps[0])
    assert same(carried_out(rules.plan({"qkv": (12, 5)}), {"qkv": fused}), new)
    assert same(carried_out(rules.reversed().plan(shapes(new)), new), {"qkv": fused})
