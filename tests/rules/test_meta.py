"""Sizes from the metadata of an architecture: `meta.PATH`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.rules.notation import RuleError, parse_rule
from ckptkit.rules.planner import RuleSet
from tests.conftest import Ok, Run

ROPE = "q [(h r two) i] -> q [(h two r) i] with h=meta.attention.head_count or config.heads two=2"
SHAPES = {"q": (16, 3)}


def test_notation() -> None:
    assert str(parse_rule(ROPE)) == ROPE
    sums = "q [(h d) i] -> q [h d i] with d=meta.a.key_length-meta.rope.dims"
    assert str(parse_rule(sums)) == sums
    assert parse_rule("meta.q -> q with h=meta").sizes[0][1][0][0].operator == "word"  # type: ignore[index]


def test_first_that_is_set() -> None:
    """A missing key means "not said": what follows `or` counts. Keys have their dots."""
    rules = RuleSet.parse([ROPE])
    metadata = {"attention.head_count": 4, "attention": {"head_count": 2}}
    assert rules.plan(SHAPES, meta=metadata) == rules.plan(SHAPES, args={"h": 4})
    assert rules.plan(SHAPES, meta=lambda: metadata) == rules.plan(SHAPES, args={"h": 4})
    assert rules.plan(SHAPES, meta={}, config={"heads": 8}) == rules.plan(SHAPES, args={"h": 8})
    taken = rules.outcome(SHAPES, meta=metadata).taken[0]
    assert taken.origins["h"] == "meta.attention.head_count"


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"attention.head_count": [4, 2]},
         "meta.attention.head_count: expected an integer, got a list"),
        ({"attention.head_count": "4"}, "meta.attention.head_count: expected an integer"),
        ({"attention.head_count": True},
         "meta.attention.head_count: expected an integer, got 'True'"),
        ({"attention.head_count": 0}, "the size h is 0"),
        ({"attention.head_count": 1 << 63}, "the size h is"),
        ({}, "cannot infer how 16 splits into (h r two)"),
    ],
)  # fmt: skip
def test_refused(metadata: dict[str, Any], said: str) -> None:
    with pytest.raises(RuleError) as caught:
        RuleSet.parse([ROPE]).plan(SHAPES, meta=metadata)
    assert said in caught.value.message
    if not metadata:
        assert caught.value.hint is not None
        assert "meta.attention.head_count or config.heads is not set" in caught.value.hint


def test_unset_parts_of_a_ragged_size() -> None:
    rule = "qkv [(p n d)] -> {p:q|k|v} [(n d)] with n=meta.heads|meta.kv|meta.kv d=meta.dim"
    with pytest.raises(RuleError) as caught:
        RuleSet.parse([rule]).plan({"qkv": (24,)}, meta={"heads": 2, "dim": 4})
    assert caught.value.hint is not None
    assert "meta.heads|meta.kv|meta.kv is not set" in caught.value.hint


def test_metadata_of_a_checkpoint(tmp_path: Path, run: Run, ok: Ok) -> None:
    """The keys of the architecture that the tree names, both ways; other keys do not count."""
    weight = torch.randn(16, 3)
    root = {
        "general.architecture": "llama",
        "llama.attention.head_count": 4,
        "attention.head_count": 2,
        "gemma.attention.head_count": 8,
        "tensors": {"q": weight},
    }
    torch.save(root, tmp_path / "a.pth")
    (tmp_path / "r.yaml").write_text(json.dumps({"steps": [{"rules": [ROPE]}]}))
    done = run("run", tmp_path / "r.yaml", tmp_path / "a.pth", tmp_path / "b.pth", "--dry-run")
    assert "h=4 (meta.attention.head_count)" in done.stdout
    assert "reversible: yes" in done.stdout
    ok("run", tmp_path / "r.yaml", tmp_path / "a.pth", tmp_path / "b.pth")
    turned = weight.view(4, 2, 2, 3).transpose(1, 2).reshape(16, 3)
    assert torch.equal(torch.load(tmp_path / "b.pth")["tensors"]["q"], turned)
    ok("run", tmp_path / "r.yaml", tmp_path / "b.pth", tmp_path / "c.pth", "--reverse")
    assert torch.equal(torch.load(tmp_path / "c.pth")["tensors"]["q"], weight)
