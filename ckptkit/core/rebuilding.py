"""Copy a tree, with other leaves or other nodes; sharing and cycles are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ckptkit.core.tensor import Tensor
from ckptkit.core.tree import (
    LEAVES,
    PLAIN_TYPES,
    Node,
    Object,
    OrderedMapping,
    Pairs,
    SetNode,
)


class Rebuild:
    """Copy a tree, leaf by leaf through a function, keeping all sharing and all cycles.

    ``swap`` maps the id of a node to the node that replaces it wherever it occurs (and which is
    copied in its turn, but not replaced again). Iterative: shells of mutable nodes are made at once
    and filled from a queue; only tuples wait for what they hold, and a tuple can reach itself only
    through a mutable node.
    """

    def __init__(
        self, leaf: Callable[[Node], Node], swap: Mapping[int, Node] | None = None
    ) -> None:
        self._leaf = leaf
        self._swap = swap or {}
        self._made: dict[int, Node] = {}
        self._keep: list[Node] = []  # ids in _made stay taken
        self._queue: list[Node] = []  # old and new in turns: a tuple for each takes memory

    def __call__(self, root: Node) -> Node:
        new_root = self._copy(root)
        while self._queue:
            new, old = self._queue.pop(), self._queue.pop()
            self._fill(old, new)
        return new_root

    def _copy(self, node: Node) -> Node:
        if node.__class__ in PLAIN_TYPES:
            return node
        return self._place(self._swap.get(id(node), node))

    def _place(self, node: Node) -> Node:
        """Return the copy of a node that is not to be replaced (any more)."""
        if id(node) in self._made:
            return self._made[id(node)]
        if node.__class__ in PLAIN_TYPES:
            return node
        if node.__class__ is dict:
            return self._shell(node)
        if node.__class__ is not Tensor:  # most are
            if isinstance(node, tuple):
                return self._tuple(node)
            if not isinstance(node, LEAVES):
                return self._shell(node)
        self._keep.append(node)
        self._made[id(node)] = made = self._leaf(node)
        return made

    def _shell(self, node: Node) -> Node:
        new: Node
        if isinstance(node, OrderedMapping):
            new = OrderedMapping()
        elif isinstance(node, dict):
            new = {}
        elif isinstance(node, list):
            new = []
        elif isinstance(node, SetNode):
            new = SetNode([], frozen=node.frozen)
        elif isinstance(node, Pairs):
            new = Pairs([])
        else:
            new = Object(None, new=node.new)
        self._keep.append(node)
        self._made[id(node)] = new
        self._queue += (node, new)
        return new

    def _fill(self, old: Node, new: Node) -> None:
        copy = self._copy
        if isinstance(old, dict):
            self._fill_dict(old, new)
        elif isinstance(old, list):
            new.extend(map(copy, old))
        elif isinstance(old, SetNode):
            new.items.extend(map(copy, old.items))
        elif isinstance(old, Pairs):
            new.pairs.extend((copy(key), copy(value)) for key, value in old.pairs)
            new.state = copy(old.state)
        else:
            self._fill_object(old, new)

    def _fill_dict(self, old: dict[Node, Node], new: Node) -> None:
        """Copy the items of a dict; its tensors without a call for each but that of the leaf."""
        copy, plain, made, swap = self._copy, PLAIN_TYPES, self._made, self._swap
        leaf, keep = self._leaf, self._keep.append
        for key, value in old.items():
            place = id(value)
            if value.__class__ in plain:
                other = value
            elif value.__class__ is not Tensor or place in made or place in swap:
                other = copy(value)
            else:
                keep(value)
                other = made[place] = leaf(value)
            new[key if key.__class__ in plain else copy(key)] = other
        if isinstance(old, OrderedMapping):
            new.state = copy(old.state)

    def _fill_object(self, old: Object, new: Object) -> None:
        copy = self._copy
        new.callable, new.args, new.kwargs = copy(old.callable), copy(old.args), copy(old.kwargs)
        for step, value in old.steps:
            if step == "build":
                new.steps.append((step, copy(value)))
            elif step == "set":
                new.steps.append((step, [(copy(key), copy(item)) for key, item in value]))
            else:
                new.steps.append((step, [copy(item) for item in value]))
        new.tensor = None if old.tensor is None else copy(old.tensor)
        new.value = old.value

    def _tuple(self, root: tuple[Node, ...]) -> tuple[Node, ...]:
        """Copy nested tuples in post-order; all else in them has a copy or a shell at once."""
        waiting = [root]
        while waiting:
            node = waiting[-1]
            if id(node) in self._made:
                waiting.pop()
                continue
            inner = [
                each if each.__class__ in PLAIN_TYPES else self._swap.get(id(each), each)
                for each in node
            ]
            missing = [
                each for each in inner if isinstance(each, tuple) and id(each) not in self._made
            ]
            if missing:
                waiting.extend(missing)
                continue
            items = [
                self._made[id(each)] if isinstance(each, tuple) else self._place(each)
                for each in inner
            ]
            self._keep.append(node)
            self._made[id(node)] = tuple(items)
            waiting.pop()
        made: tuple[Node, ...] = self._made[id(root)]
        return made


def rebuild(
    root: Node,
    leaf: Callable[[Node], Node] = lambda node: node,
    swap: Mapping[int, Node] | None = None,
) -> Node:
    """Copy the tree with `leaf` applied to each leaf once, and nodes replaced as in `swap` (by id).

    Numbers, strings, bytes and None are neither passed to `leaf` nor replaced.
    """
    return Rebuild(leaf, swap)(root)
