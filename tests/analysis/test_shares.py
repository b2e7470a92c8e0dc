"""shares: each parameter and byte counted once, whose it is, and the tree of the places."""

from __future__ import annotations

import pytest

from ckptkit.analysis.shares import (
    LEVELS,
    OPTIMIZER,
    OTHER,
    WEIGHTS,
    Share,
    branches,
    joined,
    shares,
)
from ckptkit.analysis.summary import summarize
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.tree import Pairs
from tests.analysis.made import checkpoint, module, tensor, view
from tests.matrix import NAMES, Fixture


def found(made: Checkpoint) -> list[Share]:
    return shares(summarize(made), made.root)


def test_a_training_file() -> None:
    weight = tensor(1, 2, 3, 4)
    root = {
        "model": {"a.weight": weight, "b.weight": weight, "a.bias": tensor(5)},
        "optimizer": {"state": {0: {"exp_avg": tensor(0, 0, 0, 0)}}, "param_groups": [{"lr": 0.1}]},
        "mean": tensor(7),
    }
    first, tied, bias, average, mean = found(checkpoint(root))
    assert (first.role, first.place, first.label, first.parameters, first.nbytes, first.same) == (
        WEIGHTS, "model.a.weight", "a.weight", 4, 16, None,
    )  # fmt: skip
    assert (tied.parameters, tied.nbytes, tied.same) == (0, 0, 0)
    assert bias.parameters == 1
    assert (average.role, average.parameters, average.nbytes) == (OPTIMIZER, 0, 16)
    assert (mean.role, mean.label, mean.nbytes) == (OTHER, "mean", 4)


def test_what_is_an_optimizer_lies_below_one() -> None:
    root = {"states": [{"state": {}, "param_groups": [], "x": tensor(1)}], "statesman": tensor(1)}
    root = {"model": {"w": tensor(1)}, **root}
    assert [each.role for each in found(checkpoint(root))] == [WEIGHTS, OPTIMIZER, OTHER]


def test_views_count_their_elements() -> None:
    whole = tensor(1, 2, 3, 4)
    parts = [view(whole, (2,)), view(whole, (2,), offset=2), view(whole, (2, 1))]
    made = checkpoint({str(n): part for n, part in enumerate(parts)})
    assert [each.parameters for each in found(made)] == [2, 2, 2]


def test_a_weight_that_is_somewhere_else_too_counts() -> None:
    weight = tensor(1, 2)
    root = {"best": [weight], "model": {"w": weight, "v": tensor(1), "again": weight}}
    elsewhere, named, _, again = found(checkpoint(root))
    assert (elsewhere.parameters, elsewhere.nbytes) == (0, 8)
    assert (named.parameters, named.nbytes, named.same) == (2, 0, 0)
    assert (again.parameters, again.nbytes, again.same) == (0, 0, 0)


def test_places_of_a_module_are_names() -> None:
    made = checkpoint({"net": module({}, {"conv": module({"weight": tensor(1)})})})
    assert [each.place for each in found(made)] == ["net.conv.weight"]


@pytest.mark.parametrize("name", NAMES)
def test_all_together_are_the_totals(name: str) -> None:
    from ckptkit.api import open_checkpoint

    made = open_checkpoint(Fixture(name).needs_reader().path)
    summary = summarize(made)
    all_ = shares(summary, made.root)
    assert sum(each.parameters for each in all_) == summary.totals.parameters
    assert sum(each.nbytes for each in all_) <= summary.totals.nbytes
    tree = branches(all_)
    assert (tree.tensors, tree.parameters) == (len(all_), summary.totals.parameters)
    assert tree.nbytes == sum(child.nbytes for child in tree.children.values())


def test_the_tree() -> None:
    root = {"enc.0.w": tensor(1, 2), "enc.1.w": tensor(1), "enc": tensor(1, 1, 1)}
    root["enc.1.w.x"] = tensor(9)
    tree = branches(found(checkpoint(root)))
    enc = tree.children["enc"]
    assert (enc.tensors, enc.parameters, enc.nbytes, enc.path) == (4, 7, 28, "enc")
    assert enc.share is not None and enc.share.parameters == 3
    last = enc.children["1"].children["w"]
    assert last.share is not None and last.children["x"].path == "enc.1.w.x"
    assert joined(tree) is enc
    assert joined(enc.children["0"]).path == "enc.0.w"


def test_keys_that_are_repeated_are_both_there() -> None:
    tree = branches(found(checkpoint({"list": Pairs([("w", tensor(1)), ("w", tensor(2, 3))])})))
    assert [child.nbytes for child in tree.children["list"].children.values()] == [4, 8]


def test_a_name_of_dots_alone_is_no_deep_tree() -> None:
    tree = branches(found(checkpoint({"." * 60_000: tensor(1)})))
    depth = 0
    while tree.children:
        (tree,), depth = tree.children.values(), depth + 1
    assert depth == LEVELS
