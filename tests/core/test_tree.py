from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.core import dtypes
from ckptkit.core.bytesource import Memory, Range
from ckptkit.core.errors import LimitError, UsageError
from ckptkit.core.limits import LIMITS
from ckptkit.core.tensor import Storage, Tensor, TypedStorage
from ckptkit.core.tree import (
    ByteString,
    Global,
    Node,
    Object,
    OrderedMapping,
    Pairs,
    SetNode,
    StoredBytes,
    children,
    find,
    join,
    key_text,
    module_versions,
    nodes,
    rebuild,
    versions_state,
    walk,
)

STORAGE = Storage(Range(Memory(bytes(64)), 0, 64))


def tensor() -> Tensor:
    return Tensor(STORAGE, dtypes.BY_NAME["float32"], (2,), (1,))


# Random graphs: a list of nodes, each made of earlier ones, so that sharing is common; cycles are
# tied afterwards.


KINDS = ("leaf", "dict", "ordered", "list", "tuple", "set", "pairs", "object")


@st.composite
def graphs(draw: st.DrawFn) -> Node:
    made: list[Node] = [draw(st.sampled_from([0, "text", None])), tensor(), Global("a", "B")]
    for _ in range(draw(st.integers(1, 12))):
        parts = draw(st.lists(st.integers(0, len(made) - 1), max_size=4))
        made.append(
            node(draw(st.sampled_from(KINDS)), [made[n] for n in parts], draw(st.booleans()))
        )
    for _ in range(draw(st.integers(0, 2))):
        tie(draw(st.sampled_from(made)), draw(st.sampled_from(made)))
    return made[-1]


def node(kind: str, parts: list[Node], flag: bool) -> Node:
    if kind == "leaf":
        return ByteString(b"\xff") if flag else TypedStorage(STORAGE, None)
    if kind == "dict":
        return {(n if flag else f"k{n}"): part for n, part in enumerate(parts)} | {
            ("key", 1): 1,
            Global("k", "K"): 2,
        }
    if kind == "ordered":
        return OrderedMapping(enumerate(parts), {"_metadata": parts[:1]} if flag else None)
    if kind == "list":
        return list(parts)
    if kind == "tuple":
        return tuple(parts)
    if kind == "set":
        return SetNode(list(parts), frozen=flag)
    if kind == "pairs":
        return Pairs([(part, part) for part in parts], parts[:1] if flag else None)
    return made_object(parts, flag)


def made_object(parts: list[Node], flag: bool) -> Object:
    new = Object(
        Global("m", "C"), tuple(parts), new=flag, kwargs={"k": parts[:1]} if flag else None
    )
    new.steps = [
        ("append", list(parts)),
        ("set", [(n, part) for n, part in enumerate(parts)]),
        ("add", parts[:1]),
    ]
    if flag:
        new.steps.append(("build", {"state": parts[-1:]}))
        new.tensor = tensor()
        new.value = 1.5
    return new


def tie(target: Node, value: Node) -> None:
    if isinstance(target, list):
        target.append(value)
    elif isinstance(target, dict):
        target["tied"] = value
    elif isinstance(target, Object):
        target.steps.append(("build", value))


def parts_of(each: Node) -> list[Node]:
    """Everything in a node, written down independently of the code under test."""
    if isinstance(each, OrderedMapping):
        return [*each.keys(), *each.values(), each.state]
    if isinstance(each, dict):
        return [*each.keys(), *each.values()]
    if isinstance(each, (list, tuple)):
        return list(each)
    if isinstance(each, SetNode):
        return list(each.items)
    if isinstance(each, Pairs):
        return [part for pair in each.pairs for part in pair] + [each.state]
    if isinstance(each, Object):
        steps = [p for step, value in each.steps for p in ([value] if step == "build" else value)]
        return [each.callable, each.args, each.kwargs, each.tensor] + [
            part for p in steps for part in (p if isinstance(p, tuple) and len(p) == 2 else [p])
        ]
    return []


def label(each: Node) -> object:
    if isinstance(each, SetNode):
        return each.frozen
    if isinstance(each, Object):
        steps = [(step, 0 if step == "build" else len(value)) for step, value in each.steps]
        return each.new, each.value, steps
    return each if isinstance(each, (str, int, type(None))) else None


def same_shape(a: Node, b: Node, leaf: type) -> None:
    """One walk over both graphs: equal types, labels and lengths, and a mapping between identities
    that is 1 to 1."""
    there: dict[int, int] = {}
    waiting = [(a, b)]
    keep = []
    while waiting:
        old, new = waiting.pop()
        keep.append((old, new))
        if isinstance(old, (Tensor, TypedStorage, Global, ByteString, StoredBytes)):
            assert isinstance(new, leaf)
            assert new.of is old
            assert there.setdefault(id(old), id(new)) == id(new)
            continue
        assert type(old) is type(new)
        if isinstance(old, (str, int, type(None))):
            assert old == new
            continue
        if id(old) in there:
            assert there[id(old)] == id(new)
            continue
        there[id(old)] = id(new)
        assert old is not new or old == ()
        assert label(old) == label(new)
        mine, theirs = parts_of(old), parts_of(new)
        assert len(mine) == len(theirs)
        waiting.extend(zip(mine, theirs, strict=True))
    mutable = [id(new) for old, new in keep if not isinstance(old, (tuple, str, int, type(None)))]
    assert len(set(mutable)) == len(
        {id(old) for old, _ in keep if not isinstance(old, (tuple, str, int, type(None)))}
    )


class Seen:
    """The result of the leaf function for a leaf."""

    def __init__(self, of: Node) -> None:
        self.of = of


@given(graphs())
def test_rebuild_copies_the_graph_as_it_is(root: Node) -> None:
    calls: list[int] = []

    def leaf(each: Node) -> Seen:
        calls.append(id(each))
        return Seen(each)

    same_shape(root, rebuild(root, leaf), Seen)
    assert len(calls) == len(set(calls)), "each leaf once"


@pytest.mark.parametrize("holder", [dict, list, tuple, OrderedMapping, SetNode, Pairs, Object])
def test_rebuild_swaps_wherever_the_node_is(holder: type) -> None:
    old, new = [1], {"new": (2,)}

    def hold(each: Node) -> Node:
        if holder is Pairs:
            return Pairs([(1, each)])
        if holder is Object:
            return Object(Global("a", "B"), (each,))
        return holder({"k": each} if issubclass(holder, dict) else [each])

    def held(each: Node) -> Node:
        if holder is Object:
            return each.args[0]
        return parts_of(each)[1 if holder in (dict, OrderedMapping, Pairs) else 0]

    done = rebuild([hold(old), hold(old), old], swap={id(old): new})
    assert done[2] == {"new": (2,)}
    assert held(done[0]) is held(done[1]) is done[2] is not new


@pytest.mark.parametrize("place", [lambda x: [x], lambda x: (x,), lambda x: {"k": (x, (x,))}])
def test_rebuild_exchanges_once(place: Node) -> None:
    """a stands for b and b for a: neither is exchanged back."""
    a, b = ["a"], ["b"]
    swap = {id(a): b, id(b): a}
    assert rebuild(place(a), swap=swap) == place(["b"])
    assert rebuild(place(b), swap=swap) == place(["a"])


@pytest.mark.parametrize("place", [lambda x: [x], lambda x: (x,), lambda x: {"k": x}])
def test_rebuild_exchanges_leaves_and_tuples(place: Node) -> None:
    leaf, pair = tensor(), (1, 2)
    assert rebuild(place(leaf), swap={id(leaf): "text"}) == place("text")
    assert rebuild(place(pair), swap={id(pair): ((3,),)}) == place(((3,),))
    assert rebuild(place([]), lambda _: "leaf", {}) == place([])
    assert rebuild(leaf, swap={id(leaf): 3}) == 3


def test_rebuild_asks_for_each_tensor_of_a_dict_once() -> None:
    """Also where it is replaced, met again, or met elsewhere before."""
    first, second, gone, new = tensor(), tensor(), tensor(), tensor()
    root = {"a": [first], "b": {"x": second, "y": first, "z": second, "w": gone}, "c": (second,)}
    asked: list[Node] = []

    def leaf(node: Node) -> Node:
        asked.append(node)
        return f"leaf {len(asked)}"

    found = rebuild(root, leaf, {id(gone): new})
    inner = found["b"]
    assert {id(each) for each in asked} == {id(each) for each in (first, second, new)}
    assert len(asked) == 3
    assert inner["x"] == inner["z"] == found["c"][0]
    assert inner["y"] == found["a"][0]
    assert len({inner["x"], inner["y"], inner["w"]}) == 3


def chain(kind: str, depth: int) -> Node:
    node: Node = tensor()
    for _ in range(depth):
        if kind == "object":
            node = Object(Global("a", "B"), (node,))
        elif kind == "build":
            outer = Object(Global("a", "B"))
            outer.steps.append(("build", node))
            node = outer
        else:
            node = {"dict": lambda n: {"k": n}, "ordered": lambda n: OrderedMapping({"k": n}), "list": lambda n: [n],
                    "tuple": lambda n: (n,), "set": lambda n: SetNode([n]), "pairs": lambda n: Pairs([(n, 1)]),
                    "state": lambda n: OrderedMapping({}, n)}[kind](node)  # fmt: skip
    return node


DEEP = ("dict", "ordered", "list", "tuple", "set", "pairs", "object", "build", "state")


@pytest.mark.parametrize("kind", DEEP)
def test_rebuild_any_depth(kind: str) -> None:
    old, depth = chain(kind, 20_000), 0
    new = rebuild(old)
    while not isinstance(new, Tensor):
        (new,) = (
            each
            for each in parts_of(new)
            if not isinstance(each, (str, int, Global, type(None))) and each != ()
        )
        depth += 1
    assert depth == (40_000 if kind == "object" else 20_000)


def test_rebuild_of_tuples_that_share() -> None:
    """2**60 paths, 60 tuples."""
    node: Node = (tensor(),)
    for _ in range(60):
        node = (node, node)
    new = rebuild(node)
    for _ in range(60):
        assert new[0] is new[1]
        new = new[0]


# walk


def paths(root: Node) -> list[str]:
    return [join(path) for path, _ in walk(root)]


def cycle() -> Node:
    root: dict[str, Node] = {"w": 1}
    root["self"] = root
    root["list"] = [root]
    return root


def stepped() -> Node:
    made = Object(Global("a", "B"), (1,), new=True)
    made.steps = [
        ("build", ({"x": 1}, {"slot": 2})),
        ("set", [("k", 3)]),
        ("append", [4, 5]),
        ("append", [6]),
    ]
    return made


SHARED = {"w": tensor()}


@pytest.mark.parametrize(
    ("root", "expected"),
    [
        (
            {"b": [1, {"x": 2}], "a": OrderedMapping({3: (4,)}), "s": SetNode([5])},
            "b b.0 b.1 b.1.x a a.3 a.3.0 s s.0",
        ),
        ({"a": SHARED, "b": SHARED}, "a a.w b b.w"),
        (cycle(), "w self list list.0"),
        ({"o": stepped()}, "o o.x o.slot o.k o.0 o.1 o.2"),
        ({"args": Object(Global("a", "f"), (7, 8))}, "args args.0 args.1"),
        ({"p": Pairs([("k", 9), ("k", 10)])}, "p p.k p.k"),
        (Object(Global("collections", "Counter"), ({"a": 1},)), "a"),
    ],
)
def test_walk_is_in_order_containers_first(root: Node, expected: str) -> None:
    assert [join(path) for path, _ in walk(root)] == ["", *expected.split()]


def test_walk_of_a_tree_made_to_explode_ends() -> None:
    """2**50 paths; and one wide node at many places."""
    node: Node = [1]
    for _ in range(50):
        node = [node, node]
    assert sum(1 for _ in walk(node)) < 4 * LIMITS.revisits
    assert sum(1 for _ in walk([list(range(10_000))] * 10_000)) < 3 * LIMITS.revisits


@pytest.mark.parametrize("kind", ["dict", "ordered", "list", "tuple", "set", "build"])
def test_walk_too_deep(kind: str) -> None:
    assert sum(1 for _ in walk(chain(kind, 900))) >= 901
    with pytest.raises(LimitError):
        list(walk(chain(kind, LIMITS.depth + 1)))


@given(graphs())
def test_walk_gives_the_path_of_each_node(root: Node) -> None:
    for path, found in walk(root):
        places = [root]
        for key in path:
            places = [child for place in places for name, child in children(place) if name is key]
        assert any(each is found for each in places)


@given(graphs())
def test_walk_meets_every_node_that_is_shown(root: Node) -> None:
    met = {id(each) for _, each in walk(root)}
    waiting, seen = [root], set()
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            assert id(each) in met
            waiting.extend(child for _, child in children(each))


# find


def test_find() -> None:
    leaf = tensor()
    root = {"a": [{"b.c": leaf}], "a.0": {"d": 1}, 7: {"e": 2}, "": {"": 3}}
    assert find(root, "") == ((), root)
    assert find(root, "a.0.b.c") == (("a", 0, "b.c"), leaf)
    assert find(root, "a.0.d") == (("a.0", "d"), 1)
    assert find(root, "7.e") == ((7, "e"), 2)
    assert find(root, ".") == (("", ""), 3)


def test_find_nothing_lists_what_there_is() -> None:
    with pytest.raises(UsageError) as caught:
        find({"model": {}, "epoch": 1}, "modle")
    assert caught.value.hint == "did you mean model? the entries are: model, epoch"


def test_find_in_a_cycle() -> None:
    root: dict[str, Node] = {}
    root["a"] = root
    root["a.a"] = root
    with pytest.raises(UsageError):
        find(root, "a." * 500 + "b")


# Names


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("a", "a"), (3, "3"), (True, "True"), (None, "None"), (1.5, "1.5"), (b"\xff", r"b'\xff'"),
        (("a", 1), "('a', 1)"), (("a",), "('a',)"),
        (ByteString(b"\xff"), "\xff"), (Global("m", "C"), "m.C"), ((("deep",),), "<tuple>"), (SetNode([]), "<SetNode>"),
        (10 ** (3 * LIMITS.int_bytes), "<integer of 10205 bits>"),
    ],
)  # fmt: skip
def test_key_text(key: Node, text: str) -> None:
    assert key_text(key) == text


def test_values_of_their_own_kind() -> None:
    assert Global("a", "b") == Global("a", "b") != Global("a", "c")
    assert len({Global("a", "b"), Global("a", "b")}) == 1
    assert ByteString(b"x") == ByteString(b"x") != ByteString(b"y")
    assert str(Global("a", "b.C")) == "a.b.C"
    assert Object(1) != Object(1)


def test_state_is_the_last_build() -> None:
    made = Object(Global("a", "B"))
    assert made.state is None
    made.steps = [("build", 1), ("append", [2]), ("build", 3)]
    assert made.state == 3


@pytest.mark.parametrize(
    "node",
    [{}, {"_metadata": {}}, None, OrderedMapping(), OrderedMapping({}, 5), OrderedMapping({}, {"_metadata": 5})],
)  # fmt: skip
def test_no_module_versions(node: Node) -> None:
    assert module_versions(node) is None


def test_module_versions_are_an_attribute() -> None:
    versions = {"": {"version": 1}, "a": {"version": 2}}
    found = module_versions(OrderedMapping({"a.w": 1}, versions_state(versions)))
    assert found == versions and isinstance(found, OrderedMapping)


def test_walk_leaves_out_what_is_skipped() -> None:
    """`skip` is asked where the walk would go on inside a container, after it was yielded."""
    cycle: list[Node] = [1]
    cycle.append(cycle)
    root = {"a": {"x": 1}, "b": [{"x": 2}, "text"], "c": cycle}
    events: list[tuple[Node, ...]] = []

    def skip(path: tuple[Node, ...], node: Node) -> bool:
        events.append(("asked", path))
        return bool(path) and path[-1] in ("a", 0)

    for path, _ in walk(root, skip):
        events.append(path)
    asked = [event[1] for event in events if event[:1] == ("asked",)]
    assert asked == [(), ("a",), ("b",), ("b", 0), ("c",)]
    assert [event for event in events if event[:1] != ("asked",)] == [
        *[(), ("a",), ("b",), ("b", 0), ("b", 1), ("c",), ("c", 0), ("c", 1)]
    ]
    assert all(events[events.index(("asked", path)) - 1] == path for path in asked)
    assert list(walk(root, lambda path, node: True)) == [((), root)]


# nodes


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
