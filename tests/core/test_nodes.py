from __future__ import annotations

import pytest

from ckptkit.core.text import guess, plural, quoted
from ckptkit.core.tree import Global, Node, Object, OrderedMapping, Pairs, SetNode, nodes
from tests.edits.trees import tensor


def built(leaf: Node) -> Object:
    made = Object(None)
    made.steps = [("build", leaf)]
    return made


def filled(leaf: Node) -> Object:
    made = Object(None)
    made.steps = [("set", [(1, leaf)]), ("append", [leaf])]
    return made


@pytest.mark.parametrize(
    "hold",
    [
        lambda x: [x], lambda x: (x,), lambda x: {"k": x}, lambda x: {x: "v"}, lambda x: OrderedMapping({}, {"state": x}),
        lambda x: SetNode([x]), lambda x: Pairs([(x, 1)]), lambda x: Pairs([], x), lambda x: Object(x),
        lambda x: Object(None, (x,)), lambda x: Object(None, kwargs={"k": x}), lambda x: Object(None, tensor=x),
        built, filled,
    ],
)  # fmt: skip
def test_nodes_are_found_wherever_they_are(hold: Node) -> None:
    leaf = tensor()
    found = list(nodes([hold(leaf), leaf]))
    assert [each for each in found if each is leaf] == [leaf]
    assert len({id(each) for each in found}) == len(found)


def test_nodes_of_cycles_and_deep_trees() -> None:
    root: list[Node] = []
    root.append((root, Global("a", "B")))
    assert len(list(nodes(root))) == 3
    deep: Node = tensor()
    for _ in range(100_000):
        deep = [deep]
    assert sum(1 for _ in nodes(deep)) == 100_001


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
