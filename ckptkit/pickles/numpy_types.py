"""Element types and arrays of numpy that a state may describe: numpy does not check a state.

A dtype is built once, before anything uses it. What is not exactly what numpy writes is not known:
flags that deny objects make pointers of raw bytes, fields beyond the element read what lies behind
it.
"""

from __future__ import annotations

import re
from math import prod
from typing import NamedTuple

from ckptkit.core.tree import Node
from ckptkit.pickles.shapes import BYTES, LIST, TEXT, View, pairs


class NumpyType(NamedTuple):
    """An element type: its letter, its size in bytes, and whether it holds pointers to objects."""

    kind: str
    size: int
    objects: bool = False


_SIZES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8, 12, 16),
          "c": (8, 16, 24, 32), "M": (8,), "m": (8,), "O": (4, 8)}  # fmt: skip
_TEXT = re.compile(r"[<>|=]?([biufcMmO])(\d\d?)|[<>|=]?([SUV])(\d{1,9})")
_NEEDS_OBJECTS = 27  # flags of numpy: ITEM_REFCOUNT, LIST_PICKLE, NEEDS_INIT, NEEDS_PYAPI
_OBJECT = 63
_HARMLESS = 8 | 16 | 128  # NEEDS_INIT, NEEDS_PYAPI, ALIGNED_STRUCT
_LARGEST = 1 << 16  # bytes of an element that holds objects: made for each one of a list


def named(text: Node) -> NumpyType | None:
    """Return the type that a text such as ``f4`` names, None for what numpy does not write."""
    found = _TEXT.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    kind, size = found[1] or found[3], int(found[2] or found[4])
    if kind in _SIZES and size not in _SIZES[kind]:
        return None
    return NumpyType(kind, 4 * size if kind == "U" else size)


def built(view: View, fresh: NumpyType | None, state: Node) -> NumpyType | None:
    """Return what the state makes of a new dtype, None for what numpy does not write."""
    if fresh is None or not isinstance(state, tuple) or not _is_state(state):
        return None
    if len(state) == 9 and not _is_metadata(view, fresh, state[8]):
        return None
    if len(state) == 8 and fresh.kind in "Mm":  # numpy reads the unit from the ninth item
        return None
    if fresh.kind == "V":
        return _built_void(view, fresh, state)
    return _built_plain(fresh, state)


def _is_state(state: tuple[Node, ...]) -> bool:
    """Return whether a tuple has the length, the version and the kinds of values of a state."""
    if len(state) not in (8, 9):
        return False
    version, order, _, _, _, size, align, flags = state[:8]
    numbers = all(type(each) is int for each in (version, size, align, flags))
    return numbers and version in (3, 4) and order in ("<", ">", "|", "=")


def _built_plain(fresh: NumpyType, state: tuple[Node, ...]) -> NumpyType | None:
    """Return what the state makes of a dtype without fields and subarrays."""
    parts, (size, align, flags) = state[2:5], state[5:8]
    if any(part is not None for part in parts):
        return None
    if fresh.kind == "O":
        return fresh._replace(objects=True) if (size, align, flags) == (-1, -1, _OBJECT) else None
    if fresh.kind in "SU":
        fits = size == fresh.size and flags == (8 if fresh.kind == "U" else 0)
        return fresh if fits and align in (1, 4) else None
    return fresh if (size, align, flags) == (-1, -1, 0) else None


def _is_metadata(view: View, fresh: NumpyType, value: Node) -> bool:
    """Return whether it is the ninth item: a unit of time, or nothing."""
    if fresh.kind not in "Mm":
        return value is None or pairs(view, value) is not None
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[1], tuple):
        return False
    unit = value[1]
    counts = len(unit) in (4, 5) and all(type(each) is int for each in unit[1:4])
    plain = value[0] is None or pairs(view, value[0]) == []
    return counts and plain and isinstance(unit[0], (bytes, str)) and unit[4:] in ((), (None,))


def _built_void(view: View, fresh: NumpyType, state: tuple[Node, ...]) -> NumpyType | None:
    """Return what raw bytes, a record or a subarray is."""
    _, _, subarray, names, fields, size, align, flags = state[:8]
    if size != fresh.size or not 1 <= align <= 64:
        return None
    if subarray is not None:
        return _subarray(view, fresh, subarray, flags) if names is None and fields is None else None
    if names is None and fields is None:
        return fresh if flags == 0 else None
    objects = _holds_objects(view, names, pairs(view, fields), size)
    return (
        None
        if objects is None or not _agree(objects, flags, size)
        else fresh._replace(objects=objects)
    )


def _agree(objects: bool, flags: int, size: int) -> bool:
    if objects:
        return flags & _NEEDS_OBJECTS == _NEEDS_OBJECTS and flags <= 255 and size <= _LARGEST
    return not flags & ~_HARMLESS


def _subarray(view: View, fresh: NumpyType, subarray: Node, flags: int) -> NumpyType | None:
    if not isinstance(subarray, tuple) or len(subarray) != 2:
        return None
    base, shape = view.numpy(subarray[0]), subarray[1]
    if base is None or base.objects or not is_shape(shape) or flags & ~_HARMLESS:
        return None
    return fresh if base.size * prod(shape) == fresh.size else None


def _holds_objects(
    view: View, names: Node, found: list[tuple[Node, Node]] | None, size: int
) -> bool | None:
    """Return whether fields hold objects, None if they are not what a record has."""
    if found is None or not isinstance(names, tuple) or not names:
        return None
    keys = [key for key, _ in found]
    if not all(isinstance(key, str) for key in (*keys, *names)) or sorted(keys) != sorted(names):
        return None
    objects = False
    for _, field in found:
        type_ = _field(view, field, size)
        if type_ is None:
            return None
        objects |= type_.objects
    return objects


def _field(view: View, field: Node, size: int) -> NumpyType | None:
    if not isinstance(field, tuple) or len(field) != 2 or type(field[1]) is not int:
        return None
    found = view.numpy(field[0])
    return found if found is not None and 0 <= field[1] <= size - found.size else None


def is_shape(value: Node, size: int = 1) -> bool:
    """Return whether it is a tuple of sizes, of elements of `size` bytes that numpy can count.

    Where it cannot, it raises MemoryError instead of comparing with the bytes that there are.
    """
    if not isinstance(value, tuple):
        return False
    if not all(type(each) is int and each >= 0 for each in value):
        return False
    nbytes: int = max(size, 1) * prod(max(each, 1) for each in value)
    return nbytes < 1 << 63


def array(view: View, state: Node) -> NumpyType | None:
    """Return the element type of an array with this state: bytes, or a list where it has
    objects."""
    if not isinstance(state, tuple) or len(state) != 5 or type(state[0]) is not int:
        return None
    _, shape, dtype, order, data = state
    found = view.numpy(dtype)
    if found is None or not is_shape(shape, found.size) or type(order) not in (bool, int):
        return None
    if not found.objects:
        return found if is_bytes(view, data) else None
    items = view.items(data) if view.sort(data) == LIST else None
    fits = found.kind == "O" and items is not None and len(list(items)) == prod(shape)
    return found if fits else None


def is_bytes(view: View, value: Node) -> bool:
    """Return whether it is a byte string, or the text that Python 2 had for one."""
    return bool(view.sort(value) & (BYTES | TEXT))
