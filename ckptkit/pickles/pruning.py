"""A tree without some of its values."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ckptkit.core.limits import check
from ckptkit.core.tensor import Tensor, TypedStorage
from ckptkit.core.tree import (
    ByteString,
    Global,
    Node,
    Object,
    OrderedMapping,
    Path,
    SetNode,
    StoredBytes,
    children,
    held,
    rebuild,
)

_JUDGED = (
    *(Object, Global, SetNode, Tensor, TypedStorage),
    *(str, bytes, bytearray, ByteString, StoredBytes),
)


def without(root: Node, gone: Callable[[Node], bool]) -> tuple[Node, list[tuple[Path, Node]]]:
    """Return the tree without the values that `gone` selects, and these with their paths.

    Objects, names, sets, tensors, storages, texts and byte strings are judged, each as a whole. An
    entry of a mapping goes with its key; elsewhere None takes the place, so that the others keep
    theirs.
    """
    dropped, holders = _find(root, gone)
    if not dropped:
        return root, []
    ids = {id(node) for _, node in dropped}
    if id(root) in ids:
        return None, dropped
    swap: dict[int, Node] = dict.fromkeys(ids)
    for holder in holders:
        if any(id(each) in ids for each in held(holder)):
            swap[id(holder)] = _without(holder, ids)
    return rebuild(root, lambda leaf: None if id(leaf) in ids else leaf, swap), dropped


def _find(root: Node, gone: Callable[[Node], bool]) -> tuple[list[tuple[Path, Node]], list[Node]]:
    """Return the keys and values to leave out, with their paths, and the containers that remain."""
    dropped: list[tuple[Path, Node]] = []
    holders: list[Node] = []
    seen: set[int] = set()
    waiting: list[tuple[Path, Node]] = [((), root)]
    while waiting:
        path, node = waiting.pop()
        check("depth", len(path), "levels of values")
        if isinstance(node, (dict, list, tuple)):
            if id(node) in seen:
                continue
            seen.add(id(node))
            holders.append(node)
            if isinstance(node, dict):
                dropped += [((*path, key), key) for key in node if gone(key)]
            waiting.extend([((*path, key), child) for key, child in _inside(node)][::-1])
        elif isinstance(node, _JUDGED) and gone(node):
            dropped.append((path, node))
    return dropped, holders


def _without(holder: Node, gone: set[int]) -> Node:
    """Return a container without what it holds directly of these."""
    if not isinstance(holder, dict):
        return type(holder)(None if id(each) in gone else each for each in holder)
    kept = {
        key: value for key, value in holder.items() if id(key) not in gone and id(value) not in gone
    }
    return OrderedMapping(kept, holder.state) if isinstance(holder, OrderedMapping) else kept


def _inside(node: Node) -> Iterable[tuple[Node, Node]]:
    yield from children(node)
    if isinstance(node, OrderedMapping) and node.state is not None:
        yield "(attributes)", node.state
