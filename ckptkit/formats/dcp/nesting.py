"""Flatten nested state_dicts to flat names and restore them, as torch does.

Dicts are flattened, and lists that hold a tensor or a dict, also inside a list; anything else is
one entry. The name of an entry is its path joined by dots, with keys as text; the path has texts
for keys and numbers for places in lists. Dicts without entries leave no trace.
(torch/distributed/checkpoint/_nested_dict.py, _traverse.py)

The state of an optimizer whose groups number the parameters is keyed by numbers again: torch's
``load_state_dict`` passes over keys that are strings, and training would go on without momentum.
"""

from __future__ import annotations

from itertools import pairwise

from ckptkit.core.errors import AmbiguousError, CollisionError, FormatError
from ckptkit.core.limits import LIMITS, check
from ckptkit.core.text import flatten
from ckptkit.core.tree import Node, OrderedMapping, Path, join, key_text
from ckptkit.core.weights import as_tensor


class _Places(dict[Node, Node]):
    """The items of a list, by index."""


class Nest:
    """A tree of dicts and lists under construction, path by path."""

    def __init__(self) -> None:
        self.root: dict[Node, Node] = {}
        self._open: dict[int, dict[Node, Node]] = {
            id(self.root): self.root
        }  # by id of each dict and list made here
        self._lists: list[tuple[list[Node], _Places]] = []

    def put(self, path: Path, node: Node) -> None:
        """Set one entry.

        Raises AmbiguousError where something is already, FormatError for a path through a leaf.
        """
        held = self.root
        for depth, (key, following) in enumerate(pairwise(path)):
            _check_key(held, key, path)
            if key not in held:
                held[key] = self._new_list() if type(following) is int else self._new_dict()
            inner = self._open.get(id(held[key]))
            if inner is None:
                raise AmbiguousError(f"{join(path)} is inside the entry {join(path[: depth + 1])}")
            held = inner
        _check_key(held, path[-1], path)
        if path[-1] in held:
            raise AmbiguousError(f"two entries are at {join(path)}")
        held[path[-1]] = node

    def _new_dict(self) -> dict[Node, Node]:
        made: dict[Node, Node] = {}
        self._open[id(made)] = made
        return made

    def _new_list(self) -> list[Node]:
        made: list[Node] = []
        self._open[id(made)] = places = _Places()
        self._lists.append((made, places))
        return made

    def finished(self) -> dict[Node, Node]:
        """Return the tree. Unfilled places in lists are None, as in torch."""
        gaps = sum(max(places) + 1 - len(places) for _, places in self._lists)
        check("list_gaps", gaps, "unfilled places of lists")
        for made, places in self._lists:
            made.extend(places.get(place) for place in range(max(places) + 1))
        for each in self._open.values():
            if "param_groups" in each:
                _number_state(each)
        return self.root


def _number_state(optimizer: dict[Node, Node]) -> None:
    """Key the state of an optimizer by the numbers that its groups have, where they have numbers.

    An optimizer without any state gets the empty dict that torch saves and then passes over.
    """
    groups, state = optimizer["param_groups"], optimizer.get("state", {})
    if not isinstance(groups, list) or not isinstance(state, dict):
        return
    params = [each.get("params") for each in groups if isinstance(each, dict)]
    listed = flatten(each for each in params if isinstance(each, list))
    numbers = {key_text(each): each for each in listed if type(each) is int}
    if numbers and state.keys() <= numbers.keys():
        optimizer["state"] = {numbers[key]: value for key, value in state.items()}


def _check_key(held: dict[Node, Node], key: Node, path: Path) -> None:
    """Check that texts are keys of dicts and numbers are places in lists."""
    if isinstance(held, _Places) != (type(key) is int and 0 <= key < 1 << 63):
        raise FormatError(f"the path {join(path)} uses a list as a dict, or a dict as a list")


class Flat:
    """A flattened tree: entries by flat name with their paths, and the paths that are not restored.

    ``empty``: dicts without entries, which torch passes over; ``texts``: keys that are text now and
    were not before; ``attributes``: state_dicts with attributes such as ``_metadata``. Raises
    CollisionError for two entries of one name, LimitError for a tree that does not end.
    """

    def __init__(self, root: dict[Node, Node]) -> None:
        self.entries: dict[str, tuple[Path, Node]] = {}
        self.empty: list[Path] = []
        self.texts: list[Path] = []
        self.attributes: list[Path] = []
        seen: set[int] = set()
        again = 0
        waiting: list[tuple[Path, Node]] = [((), root)]
        while waiting:
            path, node = waiting.pop()
            if not isinstance(node, dict) and not (isinstance(node, list) and _is_opened(node)):
                self._add(path, node)
                continue
            again += 1 + len(node) if id(node) in seen else 0
            check("depth", len(path), "levels of values")
            check("revisits", again, "repeated visits of values")
            seen.add(id(node))
            waiting.extend(reversed(self._below(path, node)))

    def _add(self, path: Path, node: Node) -> None:
        name = join(path)
        if name in self.entries:
            raise CollisionError(f"two entries are called {name!r}: torch joins their keys by dots")
        self.entries[name] = path, node

    def _below(self, path: Path, node: Node) -> list[tuple[Path, Node]]:
        if isinstance(node, list):
            return [((*path, place), value) for place, value in enumerate(node)]
        self.texts += [(*path, key) for key in node if not isinstance(key, str)]
        if isinstance(node, OrderedMapping) and node.state is not None:
            self.attributes.append(path)
        if not node and path:
            self.empty.append(path)
        return [((*path, key_text(key)), value) for key, value in node.items()]


def _is_opened(node: list[Node]) -> bool:
    """Return whether a list is flattened: it holds a tensor or a dict, or a list that does."""
    waiting = [node]
    seen: set[int] = set()
    while waiting and len(seen) <= LIMITS.revisits:
        inner = waiting.pop()
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        for each in inner:
            if isinstance(each, dict) or as_tensor(each) is not None:
                return True
            if isinstance(each, list):
                waiting.append(each)
    return False
