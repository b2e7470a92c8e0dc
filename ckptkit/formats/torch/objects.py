"""Leaves out of a tree what `torch.load(weights_only=True)` would refuse."""

from __future__ import annotations

from collections.abc import Iterable

from ckptkit.limits import check
from ckptkit.tree import Global, Node, Object, OrderedDict, Path, SetNode, children, join, rebuild
from ckptkit.trust import describe, refused_by_weights_only

SHOWN = 8  # names in a note


def without_objects(root: Node) -> tuple[Node, tuple[str, ...]]:
    """The tree without its opaque values, and a note that names them.

    An entry of a mapping goes with its key; elsewhere None takes the place, so that the others keep theirs. An object
    that weights_only accepts goes all the same if it holds one that it refuses.
    """
    dropped, mappings = _find(root)
    if not dropped:
        return root, ()
    gone = {id(node) for _, node in dropped}
    swap: dict[int, Node] = dict.fromkeys(gone)
    for mapping in mappings:
        if any(id(each) in gone for pair in mapping.items() for each in pair):
            swap[id(mapping)] = _without(mapping, gone)
    pruned = rebuild(root, lambda leaf: None if id(leaf) in gone else leaf, swap)
    named = [f"{join(path) or '(root)'} ({_name(node)})" for path, node in dropped]
    more = ", ..." if len(named) > SHOWN else ""
    return pruned, (f"left out {len(named)} values that weights_only refuses: {', '.join(named[:SHOWN])}{more}",)


def _find(root: Node) -> tuple[list[tuple[Path, Node]], list[dict[Node, Node]]]:
    """The keys and values to leave out, with their paths, and the mappings that remain."""
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
                dropped += [((*path, key), key) for key in node if key.__class__ is not str and _is_refused(key)]
            waiting.extend([((*path, key), child) for key, child in _inside(node)][::-1])
        elif isinstance(node, (Object, Global, SetNode)) and _is_refused(node):
            dropped.append((path, node))
    return dropped, mappings


def _without(mapping: dict[Node, Node], gone: set[int]) -> dict[Node, Node]:
    kept = {key: value for key, value in mapping.items() if id(key) not in gone and id(value) not in gone}
    return OrderedDict(kept, mapping.state) if isinstance(mapping, OrderedDict) else kept


def _inside(node: Node) -> Iterable[tuple[Node, Node]]:
    yield from children(node)
    if isinstance(node, OrderedDict) and node.state is not None:
        yield "(attributes)", node.state


def _is_refused(node: Node) -> bool:
    """Whether the value names, anywhere in what makes it, something that weights_only refuses."""
    seen: set[int] = set()
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Global) and refused_by_weights_only(each):
            return True
        if isinstance(each, SetNode) and each.frozen:
            return True
        waiting.extend(_pieces(each))
    return False


def _pieces(node: Node) -> Iterable[Node]:
    if isinstance(node, Object):
        yield from (node.callable, node.args, node.kwargs)
        for step, value in node.steps:
            if step == "set":
                yield from (each for pair in value for each in pair)
            elif step == "build":
                yield value
            else:
                yield from value
    else:
        yield from (child for _, child in children(node))


def _name(node: Node) -> str:
    if isinstance(node, SetNode):
        return "frozenset"
    return describe(node.callable) if isinstance(node, Object) else str(node)
