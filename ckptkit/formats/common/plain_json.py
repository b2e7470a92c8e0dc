"""Encode plain values as JSON and decode them: values outside the weights that are kept as text.

Null, booleans, integers of up to 19 digits, finite floats, texts, lists, and dicts whose keys are
texts that do not begin with ``$`` are themselves. Otherwise a value is an object with one key:

    {"$float": "nan" | "inf" | "-inf"}    {"$tuple": [...]}    {"$dict": [[key, value], ...]}
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

from ckptkit.core.errors import FormatError
from ckptkit.core.tree import Node, Object, children

_SCALARS = frozenset({bool, int, float, str, type(None)})
_DEPTH = 32
_ROOM = 250_000
_INT = 10**19


def is_plain(root: Node, room: int = _ROOM) -> bool:
    """Return whether `root` is scalars, lists, tuples and dicts, at most `room` in all.

    A value counts as one and a text also by its characters, on every path that leads to it, so that
    a cycle runs into the limits.
    """
    waiting = [(root, 0)]
    while waiting:
        node, depth = waiting.pop()
        node = _unwrapped(node)
        room -= 1 + (len(node) if isinstance(node, str) else 0)
        if room < 0 or depth > _DEPTH or not _is_plain_node(node):
            return False
        for pair in children(node):
            waiting.extend((child, depth + 1) for child in pair)
    return True


def _unwrapped(node: Node) -> Node:
    """Return the value of a numpy scalar, other nodes unchanged."""
    return node.value if isinstance(node, Object) and node.value is not None else node


def _is_plain_node(node: Node) -> bool:
    kind = node.__class__
    if kind is dict:
        return all(key.__class__ in _SCALARS for key in node)
    if kind is int:
        return bool(-_INT < node < _INT)
    if kind is str:
        return is_utf8(node)
    return kind is list or kind is tuple or kind in _SCALARS


def is_utf8(text: str) -> bool:
    """Return whether the text has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def dump(value: Any) -> str:
    """Return compact JSON, the same for the same value."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def encode(node: Node) -> Any:
    """Encode a plain value as JSON. Recursive: plain values are at most 32 deep."""
    node = _unwrapped(node)
    if isinstance(node, float) and not math.isfinite(node):
        return {"$float": str(node)}
    if isinstance(node, tuple):
        return {"$tuple": [encode(each) for each in node]}
    if isinstance(node, list):
        return [encode(each) for each in node]
    if not isinstance(node, dict):
        return node
    if all(isinstance(key, str) and not key.startswith("$") for key in node):
        return {key: encode(value) for key, value in node.items()}
    return {"$dict": [[encode(key), encode(value)] for key, value in node.items()]}


def decode(value: Any) -> Node:
    """Decode the plain value that `encode` wrote.

    Raises FormatError. Recursive: strict JSON is at most 128 deep.
    """
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode(each) for key, each in value.items()}
    if len(value) != 1 or tag not in _TAGS:
        raise FormatError(f"unknown kind of value {tag[:40]!r}")
    return _TAGS[tag](value[tag])


def _float(text: Any) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise FormatError("not a float")
    return float(text)


def _tuple(items: Any) -> tuple[Node, ...]:
    return tuple(decode(each) for each in _list(items))


def _dict(items: Any) -> dict[Node, Node]:
    pairs = [_tuple(each) for each in _list(items)]
    if not all(len(pair) == 2 and pair[0].__class__ in _SCALARS for pair in pairs):
        raise FormatError("not a list of keys and values")
    return dict(pairs)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError("not a list")
    return value


_TAGS: dict[str, Callable[[Any], Node]] = {"$float": _float, "$tuple": _tuple, "$dict": _dict}
