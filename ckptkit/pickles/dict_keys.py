"""Values of a file that may become keys of a dict: hashing them, one or all, is harmless."""

from __future__ import annotations

from ckptkit.core.limits import check
from ckptkit.core.text import flatten
from ckptkit.core.tree import Node, Pairs, SetNode, StoredBytes

_UNHASHABLE = (list, dict, SetNode, Pairs, StoredBytes, bytearray)


class KeyCheck:
    """Counts, over one file, the keys whose hashes the file could choose to be equal."""

    def __init__(self) -> None:
        self._odd = 0
        self._values = 0

    def hashable(self, key: Node) -> bool:
        """Return whether hashing is harmless: shallow, and few hashes that a file can choose."""
        if key.__class__ is str or (key.__class__ is int and -(2**60) < key < 2**60):
            return True
        if isinstance(key, (int, float, complex)) or (
            isinstance(key, tuple) and not _all_text(key)
        ):
            self._odd += 1
            check("odd_keys", self._odd, "dict keys that are large integers, floats or tuples")
        level, depth = [key], 0
        while level:
            if any(isinstance(each, _UNHASHABLE) and not _is_frozen(each) for each in level):
                return False
            check("key_depth", depth := depth + 1, "tuples nested in a dict key")
            self._values += sum(len(each) for each in level if isinstance(each, tuple))
            check("key_values", self._values, "values in tuples used as dict keys")
            level = list(flatten(each for each in level if isinstance(each, tuple)))
        return True


def _is_frozen(node: Node) -> bool:
    return isinstance(node, SetNode) and node.frozen


def _all_text(key: tuple[Node, ...]) -> bool:
    return all(each.__class__ is str for each in key)
