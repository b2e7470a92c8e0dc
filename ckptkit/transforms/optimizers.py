"""Optimizers follow the names of the weights that they train.

torch's own state_dict of an optimizer numbers the parameters; those of FSDP, of
torch.distributed.checkpoint and of optimizers made of ``named_parameters()`` have their names: as
keys of ``state``, in the list ``params`` of each group, or in its list ``param_names``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from ckptkit.core.errors import CollisionError
from ckptkit.core.text import flatten, plural
from ckptkit.core.tree import Node, OrderedMapping, Path, join, walk
from ckptkit.core.weights import is_optimizer

_LISTS = ("params", "param_names")  # of a group

Names = Mapping[str, str]


def followed(root: Node, names: Names, edited: Iterable[Node]) -> tuple[dict[int, Node], list[str]]:
    """Return what replaces the nodes that name parameters, by their ids, and notes about it.

    `names` maps the old names of weights to the new ones, `edited` are the mappings that had them.
    Of several optimizers with these names, none is touched where another mapping has them as well:
    nothing tells which one trains what. Raises CollisionError.
    """
    found = [(path, node) for path, node in walk(root) if _names_any(node, names)]
    if len(found) > 1 and _is_elsewhere(root, names, found, edited):
        return {}, []
    swap: dict[int, Node] = {}
    for path, node in found:
        for old, new in _changes(node, names, path):
            swap[id(old)] = new
    return swap, [
        f"{plural(_count(node, names), 'name')} of {join(path)} follow" for path, node in found
    ]


def _names_any(node: Node, names: Names) -> bool:
    return isinstance(node, dict) and is_optimizer(node) and _count(node, names) > 0


def _count(node: dict[Node, Node], names: Names) -> int:
    """Return how many parameters of an optimizer are named by `names`."""
    lists = flatten(_lists(node))
    return len({text for text in (*_keys(node), *lists) if text in names})


def _keys(node: dict[Node, Node]) -> list[str]:
    state = node["state"]
    return [key for key in state if isinstance(key, str)] if isinstance(state, dict) else []


def _lists(node: dict[Node, Node]) -> Iterator[list[Node]]:
    """Yield the lists of names in the groups."""
    groups = node["param_groups"]
    for group in groups if isinstance(groups, list) else ():
        lists = (group.get(word) for word in _LISTS) if isinstance(group, dict) else ()
        for each in lists:
            if isinstance(each, list) and any(isinstance(text, str) for text in each):
                yield each


def _changes(node: dict[Node, Node], names: Names, path: Path) -> Iterator[tuple[Node, Node]]:
    """Yield each node that names parameters, and what replaces it."""
    for each in _lists(node):
        yield each, [_renamed(text, names) for text in each]
    if not any(key in names for key in _keys(node)):
        return
    state = node["state"]
    new = {_renamed(key, names): state[key] for key in state}
    if len(new) < len(state):
        raise CollisionError(f"two parameters of {join(path)}.state would have the same name")
    yield state, OrderedMapping(new, state.state) if isinstance(state, OrderedMapping) else new


def _renamed(key: Node, names: Names) -> Node:
    return names.get(key, key) if isinstance(key, str) else key


def _is_elsewhere(
    root: Node, names: Names, optimizers: list[tuple[Path, Node]], edited: Iterable[Node]
) -> bool:
    """Return whether a mapping that was not edited has one of the names, too."""
    known = {id(node) for node in edited} | {id(node["state"]) for _, node in optimizers}
    return any(
        isinstance(node, dict)
        and id(node) not in known
        and any(isinstance(key, str) and key in names for key in node)
        for _, node in walk(root)
    )
