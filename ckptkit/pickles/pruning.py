"""A tree without some of its values."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ckptkit.core.grouping import flatten
from ckptkit.core.limits import check
from ckptkit.core.tensor import Tensor, TypedStorage
from ckptkit.core.tree import Global, Node, Object, OrderedMapping, Path, SetNode, children, rebuild

_JUDGED = (Object, Global, SetNode, Tensor, TypedStorage)


def without(root: Node, gone: Callable[[Node], bool]) -> tuple[Node, list[tuple[Path, Node]]]:
    """Return the tree without the values that `gone` selects, and these with their paths.

    Objects, names, sets, tensors and storages are judged, each as a whole. An entry of a mapping
    goes with its key; elsewhere None takes the place, so that the others keep theirs.
    """
    dropped, mappings = _find(root, gone)
    if not dropped:
        return root, []
    ids = {id(node) for _, node in dropped}
    swap: dict[int, Node] = dict.fromkeys(ids)
    for mapping in mappings:
        if any(id(each) in ids for each in flatten(mapping.items())):
            swap[id(mapping)] = _without(mapping, ids)
    return rebuild(root, lambda leaf: None if id(leaf) in ids else leaf, swap), dropped


def _find(
    root: Node, gone: Callable[[Node], bool]
) -> tuple[list[tuple[Path, Node]], list[dict[Node, Node]]]:
    """Return the keys and values to leave out, with their paths, and the mappings that remain."""
    dropped: list[tuple[Path, Node]] = []
    mappings: list[dict[Node, Node]] = []
    seen: set[int] = set()
    waiting: list[tuple[Path, Node]] = [((), root)]
    while waiting:
        path, node = waiting.pop()
        check("depth", len(path), "levels of values")
        if isinstance(node, (dict, list, tuple)):
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, dict):
                mappings.append(node)
                keys = (key for key in node if key.__class__ is not str and gone(key))
                dropped += [((*path, key), key) for key in keys]
            waiting.extend([((*path, key), child) for key, child in _inside(node)][::-1])
        elif isinstance(node, _JUDGED) and gone(node):
            dropped.append((path, node))
    return dropped, mappings


def _without(mapping: dict[Node, Node], gone: set[int]) -> dict[Node, Node]:
    kept = {
        key: value
        for key, value in mapping.items()
        if id(key) not in gone and id(value) not in gone
    }
    return OrderedMapping(kept, mapping.state) if isinstance(mapping, OrderedMapping) else kept


def _inside(node: Node) -> Iterable[tuple[Node, Node]]:
    yield from children(node)
    if isinstance(node, OrderedMapping) and node.state is not None:
        yield "(attributes)", node.state
