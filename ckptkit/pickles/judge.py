"""Decide by the allowlist whether the names, calls and states of a pickle are harmless.

ckptkit calls a pickle harmless under three conditions.

The allowlist contains every class and function that the pickle uses as a value.
The allowlist contains every class and function that the pickle calls.
The arguments and the BUILD state of every call match the patterns in the allowlist.

Under these conditions, loading never runs code from the file. `ckptkit scan` applies the conditions
to a pickle that it reads. `ckptkit.pickles.policy` applies the conditions to a tree that ckptkit
writes. No function in this module calls anything that a pickle names.

`SORTS` lists the categories of values, such as ``int``, ``list`` and ``tensor``. Each category is
one bit. A `Shape` is a function that returns whether a value matches a pattern. ``allowlist.txt``
contains patterns like these.

``int|none`` matches an integer or None.
``[int]`` matches a list of integers.
``(int*)`` matches a tuple of any number of integers.
``(text int?)`` matches a tuple of a string and an optional integer.
``{text: tensor}`` matches a dict that maps strings to tensors.
``{a=int *=any}`` matches a dict with string keys in which the value of the key ``a`` is an integer.
``<scalar list>`` matches a scalar, and a list whose items are scalars or such lists again.
``%name`` matches a class or function from the set ``name``.
A single word is the name of another pattern, or of a function in `_TESTS`.
"""

from __future__ import annotations

import re
import sys
from _compat_pickle import IMPORT_MAPPING
from collections.abc import Callable, Iterable, Iterator
from functools import cache, lru_cache, partial, reduce
from itertools import chain, product, repeat
from math import prod
from operator import or_
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ckptkit.core.dtypes import TABLE
from ckptkit.core.text import flatten
from ckptkit.core.tree import Global, Node

Name = tuple[str, str]

# Levels of a call or another operation in a pickle, from harmless to harmful

# `torch.load(weights_only=True)` accepts the operation.
ACCEPTED = "accepted"
# The operation is allowlisted with these arguments, and only returns a value.
HARMLESS = "harmless"
# The operation makes an object of a class that is not allowlisted. The effect depends on the class.
CLASS = "class"
# The operation loads a file inside this file. ckptkit judges the inner file separately.
LOADS = "loads"
# The callable is allowlisted, but not with these arguments or this state.
UNSURE = "unsure"
# The operation calls a function or class of a package other than Python, torch and numpy.
CALLED = "unknown"
HARMFUL = "harmful"
LEVELS = (ACCEPTED, HARMLESS, CLASS, LOADS, UNSURE, CALLED, HARMFUL)
WRITTEN = (ACCEPTED, HARMLESS, CLASS)  # levels of operations that ckptkit writes

# Packages whose functions are harmful unless allowlisted, like those of Python's standard library.
TORCH = {"functorch", "numpy", "torch", "torchgen"}
_SCRIPT = "__torch__"  # package of classes whose code is inside a TorchScript archive

# Functions that call one of their arguments, or return an attribute of an argument
FROM_TYPE: frozenset[Name] = frozenset((
    ("torch._tensor", "_rebuild_from_type_v2"), ("torch._tensor", "_rebuild_from_type"),
    ("torch.tensor", "_rebuild_from_type"),
))  # fmt: skip
_NEW_CALLS: frozenset[Name] = frozenset((("copyreg", "__newobj__"), ("copyreg", "__newobj_ex__")))
# Protocols 0 and 1 make an object by the call _reconstructor(class, base, state).
_RECONSTRUCT: Name = ("copyreg", "_reconstructor")
# Protocols below 4 name a nested class by the call getattr(Outer, "Inner").
_GETATTR: Name = ("builtins", "getattr")
# pickle.dump saves a torch storage as the call _load_from_bytes(bytes).
_LOAD: Name = ("torch.storage", "_load_from_bytes")
_SPECIAL = FROM_TYPE | _NEW_CALLS | {_RECONSTRUCT, _GETATTR, _LOAD}
# C++ classes whose memory is uninitialized until BUILD sets the state. The first operation on such
# an object must be BUILD.
_PLACEMENTS = "torch.distributed.tensor.placement_types"
_UNFINISHED = frozenset((_PLACEMENTS, name) for name in ("Partial", "Shard", "_StridedShard"))


class NumpyType(NamedTuple):
    """A NumPy dtype. ``kind`` is the letter of the dtype. ``size`` is the bytes per element.

    If ``objects`` is True, the elements contain Python objects.
    """

    kind: str
    size: int
    objects: bool = False


class Judged(NamedTuple):
    """The verdict on a call, BUILD or other operation.

    ``kind`` is one of `LEVELS`. ``sort`` is the category of the result, from `SORTS`. If the result
    is a NumPy dtype, ``type`` describes the dtype.
    """

    kind: str
    sort: int
    type: NumpyType | None = None


# Categories of values


NONE, FLAG, INT, FLOAT, TEXT, BYTES = (1 << bit for bit in range(6))
LIST, TUPLE, DICT, SET, MAPPING, DEFAULTS = (1 << bit for bit in range(6, 12))
STORAGE, TENSOR, DRESSED, ARRAY, NPDTYPE, SIZE = (1 << bit for bit in range(12, 18))
TIME, DEVICE, LAYOUT, GENERATOR, OFFSET, OTHER = (1 << bit for bit in range(18, 24))
CONSTANT, FUNCTION, NAME, BAG, LISTED, OBJECT, UNKNOWN = (1 << bit for bit in range(24, 31))
SCALAR = NONE | FLAG | INT | FLOAT | TEXT | BYTES
LITERAL = LIST | TUPLE | DICT | SET
CONTAINERS = LITERAL | MAPPING | DEFAULTS
ANY = UNKNOWN - 1

SORTS: dict[str, int] = {
    "none": NONE, "bool": FLAG, "flag": FLAG | INT, "int": INT, "float": FLOAT | INT, "text": TEXT,
    "bytes": BYTES, "list": LIST, "tuple": TUPLE, "dict": DICT, "set": SET,
    "mapping": MAPPING,  # an OrderedDict or a Counter
    "defaults": DEFAULTS,  # a defaultdict whose factory returns an empty value
    "storage": STORAGE, "bare": TENSOR,
    "dressed": DRESSED,  # a tensor with attributes from the file
    "tensor": TENSOR | DRESSED,
    "array": ARRAY, "npdtype": NPDTYPE, "size": SIZE, "time": TIME, "device": DEVICE,
    "layout": LAYOUT, "generator": GENERATOR, "offset": OFFSET,
    # The result of an allowlisted call, if no call accepts this result as an argument.
    "other": OTHER,
    "constant": CONSTANT,  # A named value that is not callable, such as torch.float32.
    "function": FUNCTION,  # An allowlisted class or function that is harmless for any arguments.
    "name": NAME,  # Any other class or function. A pickle must not use such a name as a value.
    "bag": BAG,  # An argparse.Namespace, which may have arbitrary attributes.
    "listed": LISTED,  # An object of an allowlisted class.
    "object": OBJECT,  # An object of a class that is not allowlisted.
    "scalar": SCALAR, "literal": LITERAL, "any": ANY,
}  # fmt: skip
PLAIN: dict[type, int] = {
    type(None): NONE, bool: FLAG, int: INT, float: FLOAT, str: TEXT, bytes: BYTES, tuple: TUPLE,
}  # fmt: skip
"""Maps each plain Python type to its category in `SORTS`."""
KEYS = (
    SCALAR | TUPLE | STORAGE | TENSOR | DRESSED | SIZE | TIME | DEVICE | LAYOUT | OTHER | CONSTANT
) | (FUNCTION | NAME | OBJECT)
"""Categories of values that may be dict keys or items of a set."""


class View(Protocol):
    """Methods that return facts about a value.

    `ckptkit scan` implements the methods for traced values. `ckptkit.pickles.policy` implements the
    methods for the nodes of a tree.
    """

    def sort(self, value: Any) -> int:
        """Return the category of a value, which is a bit of `SORTS`."""

    def items(self, value: Any) -> Iterable[Any] | None:
        """Return the items of a container, or None if the items are unknown.

        For a dict, return keys and values alternately.
        """

    def numpy(self, value: Any) -> NumpyType | None:
        """Return the element type if the value is a complete numpy.dtype, otherwise None."""


# Patterns of values


Shape = Callable[[View, Any], bool]
MOST_VISITED = 1_000_000  # maximum number of nested values that `deep` examines


class Mask:
    """Matches values of the given categories, which are bits of `SORTS`."""

    def __init__(self, sorts: int) -> None:
        self.sorts = sorts

    def __call__(self, view: View, value: Any) -> bool:
        return bool(view.sort(value) & self.sorts)


class Tuple:
    """Matches tuples whose items match `shapes`.

    The last `optional` items may be missing. All further items must match `rest`. By default, no
    further item matches.
    """

    def __init__(self, shapes: list[Shape], optional: int, rest: Shape) -> None:
        self.shapes, self.needed, self.rest = shapes, len(shapes) - optional, rest

    def __call__(self, view: View, value: Any) -> bool:
        if not isinstance(value, tuple) or len(value) < self.needed:
            return False
        shapes = chain(self.shapes, repeat(self.rest))
        return all(fits(view, each) for fits, each in zip(shapes, value, strict=False))


class AnyOf:
    def __init__(self, shapes: list[Shape]) -> None:
        self.shapes = shapes

    def __call__(self, view: View, value: Any) -> bool:
        return any(fits(view, value) for fits in self.shapes)


def _list(inner: Shape, view: View, value: Any) -> bool:
    items = view.items(value) if view.sort(value) == LIST else None
    return items is not None and all(inner(view, each) for each in items)


def pairs(view: View, value: Any) -> list[tuple[Any, Any]] | None:
    """Return the (key, value) pairs of a dict.

    Return None if `value` is not a dict, or if the items of the dict are unknown.
    """
    items = view.items(value) if view.sort(value) & (DICT | MAPPING | DEFAULTS) else None
    if items is None:
        return None
    flat = list(items)
    return None if len(flat) % 2 else list(zip(flat[0::2], flat[1::2], strict=True))


def _dict(sorts: int, key: Shape, inner: Shape, view: View, value: Any) -> bool:
    found = pairs(view, value) if view.sort(value) & sorts else None
    return found is not None and all(key(view, k) and inner(view, v) for k, v in found)


def _fields(shapes: dict[str, Shape], rest: Shape | None, view: View, value: Any) -> bool:
    found = pairs(view, value) if view.sort(value) == DICT else None
    if found is None:
        return False
    for key, inner in found:
        fits = shapes.get(key, rest) if isinstance(key, str) else None
        if fits is None or not fits(view, inner):
            return False
    return True


def deep(sorts: int, view: View, value: Any) -> bool:
    """Return whether a value and all values inside, at any depth, have one of the categories.

    `sorts` contains the bits of the categories.
    """
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if not view.sort(each) & sorts:
            return False
        if view.sort(each) & CONTAINERS and id(each) not in seen:
            seen.add(id(each))
            items = view.items(each)
            if items is None or len(waiting) > MOST_VISITED or len(seen) > MOST_VISITED:
                return False
            waiting.extend(items)
    return True


def _member(names: frozenset[Name], view: View, value: Any) -> bool:
    return isinstance(value, Global) and (value.module, value.name) in names


def _by_sorts(shape: Shape, depth: int = 2) -> bool:
    """Return whether the pattern `shape` checks only categories of values and of tuple items.

    The caller may cache the results of such a pattern for values that contain no lists, dicts or
    sets. Return False if the pattern nests tuples more than `depth` levels deep.
    """
    if isinstance(shape, AnyOf):
        return all(_by_sorts(each, depth) for each in shape.shapes)
    if isinstance(shape, Tuple):
        inner = (*shape.shapes, shape.rest)
        return depth > 0 and all(_by_sorts(each, depth - 1) for each in inner)
    if isinstance(shape, partial):
        sorts = shape.args[0] if shape.func in (_dict, deep) else 0
        return shape.func is not _member and not sorts & (MAPPING | DEFAULTS)
    return isinstance(shape, Mask)


_WORD = re.compile(r"[\[\](){}<>|*?=:]|%?[A-Za-z_]\w*|\S")


def _read_shape(text: str, known: dict[str, Shape]) -> Shape:
    """Parse a pattern of ``allowlist.txt``. Raises ValueError for a malformed pattern."""
    words = ["", *_WORD.findall(text)[::-1]]
    shape = _alternatives(words, known)
    if len(words) > 1:
        raise ValueError(f"{text!r}: unexpected {words[-1]!r} after the pattern")
    return shape


def _alternatives(words: list[str], known: dict[str, Shape]) -> Shape:
    """Parse a pattern such as ``int|none``, and remove its words from `words`.

    `words` contains the words in reverse order.
    """
    found = [_one(words, known)]
    while words[-1] == "|":
        words.pop()
        found.append(_one(words, known))
    masks = [each.sorts for each in found if isinstance(each, Mask)]
    others = [each for each in found if not isinstance(each, Mask)]
    if masks:
        others.insert(0, Mask(reduce(or_, masks)))
    return others[0] if len(others) == 1 else AnyOf(others)


def _one(words: list[str], known: dict[str, Shape]) -> Shape:
    word = words.pop()
    inner = partial(_alternatives, words, known)
    if word == "[":
        items = inner()
        _end(words, "]")
        return partial(_list, items)
    if word == "(":
        shapes: list[Shape] = []
        optional, rest = 0, None
        while words[-1] != ")" and rest is None:
            shapes.append(inner())
            if words[-1] == "?":
                optional += 1
                words.pop()
            elif words[-1] == "*":
                rest = shapes.pop()
                words.pop()
        _end(words, ")")
        return Tuple(shapes, optional, rest or Mask(0))
    if word == "<":
        sorts = 0
        while words[-1] != ">":
            sorts |= SORTS[words.pop()]
        _end(words, ">")
        return partial(deep, sorts)
    if word in ("mapping", "defaults") and words[-1] == "{":
        words.pop()
    elif word != "{":
        return known[word]
    elif words[-2] == "=":
        fields: dict[str, Shape] = {}
        while words[-1] != "}":
            key = words.pop()
            _end(words, "=")
            fields[key] = inner()
        _end(words, "}")
        return partial(_fields, fields, fields.pop("*", None))
    key_shape = inner()
    _end(words, ":")
    value = inner()
    _end(words, "}")
    return partial(_dict, DICT if word == "{" else SORTS[word], key_shape, value)


def _end(words: list[str], expected: str) -> None:
    if words.pop() != expected:
        raise ValueError(f"expected {expected!r} in a shape")


# States of NumPy dtypes and arrays. NumPy does not validate a state. A forged state could make
# NumPy use raw bytes as pointers, or read memory outside the array. ckptkit therefore accepts only
# states that NumPy writes. A dtype must get its state once, before an array uses the dtype.

_SIZES = {"b": (1,), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8), "f": (2, 4, 8, 12, 16),
          "c": (8, 16, 24, 32), "M": (8,), "m": (8,), "O": (4, 8)}  # fmt: skip
_TYPE_TEXT = re.compile(r"[<>|=]?([biufcMmO])(\d\d?)|[<>|=]?([SUV])(\d{1,9})")
# Flags of NumPy for a dtype with objects: ITEM_REFCOUNT, LIST_PICKLE, NEEDS_INIT and NEEDS_PYAPI
_NEEDS_OBJECTS = 27
_FLAGS = {"O": 63, "U": 8}  # of other dtypes: 0
_HARMLESS = 8 | 16 | 128  # NEEDS_INIT, NEEDS_PYAPI and ALIGNED_STRUCT
# Maximum size in bytes of an element with objects. The data of an array with objects is a list, and
# NumPy allocates one element for each item of the list.
_LARGEST = 1 << 16


def named(text: Node) -> NumpyType | None:
    """Parse a dtype name such as ``f4``. Return None for a name that NumPy does not write."""
    found = _TYPE_TEXT.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        return None
    kind, size = found[1] or found[3], int(found[2] or found[4])
    if kind in _SIZES and size not in _SIZES[kind]:
        return None
    return NumpyType(kind, 4 * size if kind == "U" else size)


def built_dtype(view: View, fresh: NumpyType | None, state: Node) -> NumpyType | None:
    """Return the dtype after BUILD with `state`.

    Return None for a state that NumPy does not write.
    """
    if fresh is None or not isinstance(state, tuple) or len(state) not in (8, 9):
        return None
    version, order, subarray, names, fields, size, align, flags = state[:8]
    if not all(type(each) is int for each in (version, size, align, flags)):
        return None
    if version not in (3, 4) or order not in ("<", ">", "|", "="):
        return None
    metadata = state[8] if len(state) == 9 else None
    if fresh.kind in "Mm":  # for a datetime dtype, the ninth item contains the time unit
        if not _is_unit(view, metadata):
            return None
    elif metadata is not None and pairs(view, metadata) is None:
        return None
    is_plain = subarray is None and names is None and fields is None
    if fresh.kind != "V":
        sizes = (fresh.size, (1, 4)) if fresh.kind in "SU" else (-1, (-1,))
        fits = size == sizes[0] and align in sizes[1] and flags == _FLAGS.get(fresh.kind, 0)
        return fresh._replace(objects=fresh.kind == "O") if fits and is_plain else None
    if size != fresh.size or not 1 <= align <= 64:
        return None
    if is_plain:
        return fresh if flags == 0 else None
    if subarray is None:  # a record
        inside = _fields_of(view, names, fields, size)
    elif names is None and fields is None:
        inside = _element_of(view, subarray, size)
    else:
        inside = None
    if inside is None or not any(each.objects for each in inside):
        return fresh if inside is not None and not flags & ~_HARMLESS else None
    fits = flags & _NEEDS_OBJECTS == _NEEDS_OBJECTS and flags <= 255 and size <= _LARGEST
    return fresh._replace(objects=True) if fits else None


def _element_of(view: View, subarray: Node, size: int) -> list[NumpyType] | None:
    """Return the type of the elements of a subarray dtype. Return None for an invalid one."""
    base, shape = subarray if isinstance(subarray, tuple) and len(subarray) == 2 else (None, ())
    found = view.numpy(base)
    if found is None or found.objects or not is_shape(shape):
        return None
    return [found] if found.size * prod(shape) == size else None


def _is_unit(view: View, value: Node) -> bool:
    """Return whether `value` is the tuple (metadata, unit) of a datetime dtype."""
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[1], tuple):
        return False
    unit = value[1]
    counts = len(unit) in (4, 5) and all(type(each) is int for each in unit[1:4])
    plain = value[0] is None or pairs(view, value[0]) == []
    return counts and plain and isinstance(unit[0], (bytes, str)) and unit[4:] in ((), (None,))


def _fields_of(view: View, names: Node, fields: Node, size: int) -> list[NumpyType] | None:
    """Return the types of the fields of a structured dtype. Return None for invalid fields."""
    found = pairs(view, fields)
    if found is None or not isinstance(names, tuple) or not names:
        return None
    keys = [key for key, _ in found]
    if not all(isinstance(key, str) for key in (*keys, *names)) or sorted(keys) != sorted(names):
        return None
    types = []
    for _, field in found:
        if not isinstance(field, tuple) or len(field) != 2 or type(field[1]) is not int:
            return None
        kind = view.numpy(field[0])
        if kind is None or not 0 <= field[1] <= size - kind.size:
            return None
        types.append(kind)
    return types


def is_shape(value: Node, size: int = 1) -> bool:
    """Return whether `value` is the shape of an array with fewer than 2**63 bytes.

    `size` is the number of bytes per element. NumPy does not check the number of bytes of a larger
    array.
    """
    if not isinstance(value, tuple):
        return False
    if not all(type(each) is int and each >= 0 for each in value):
        return False
    nbytes: int = max(size, 1) * prod(max(each, 1) for each in value)
    return nbytes < 1 << 63


def array(view: View, state: Node) -> NumpyType | None:
    """Return the element type of an array with this state. Return None for an invalid state.

    The last item of a valid state is a byte string. For a dtype of objects, this item is a list.
    """
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
    """Return whether a value is a byte string or a string. Python 2 pickles bytes as strings."""
    return bool(view.sort(value) & (BYTES | TEXT))


# Names


def key_of(name: Global) -> Name:
    return name.module, name.name


def top_of(name: Global) -> str:
    return name.module.partition(".")[0]


def describe(made: Node) -> str:
    """Return the name of a class or function for a message."""
    return str(made) if isinstance(made, Global) else "the result of another call"


@lru_cache(maxsize=4096)
def name_sort(name: Global) -> int:
    """Return the category of a class or function that a pickle uses as a value."""
    key = key_of(name)
    outer, _, last = name.name.rpartition(".")
    if key in allowlist().constants or (
        (name.module, outer) in allowlist().enums and not _special(last)
    ):
        return CONSTANT
    return FUNCTION if key in allowlist().functions else NAME


def refused_by_weights_only(name: Global) -> bool:
    """Return whether `torch.load(weights_only=True)` rejects files that contain this name."""
    return key_of(name) not in weights_only()


def is_known(name: Global) -> bool:
    """Return whether the allowlist contains this name, as a callable or as a value."""
    key = key_of(name)
    row = allowlist().rows.get(key)
    return (
        row is not None or key in _SPECIAL or key in allowlist().enums or name_sort(name) != NAME
    ) or any(key in names for names in allowlist().sets.values())


def out_of_place(name: Global) -> str | None:
    """Return the reason why a checkpoint must not contain this name as a value.

    Return None if a checkpoint may contain the name.
    """
    if name_sort(name) != NAME or top_of(name) == _SCRIPT:
        return None
    if is_own(name):
        return "is your own code"
    if top_of(name) in standard() | TORCH:
        return "is not allowlisted"
    return "does not look like the name of a class"


@lru_cache(maxsize=4096)
def is_own(name: Global) -> bool:
    """Return whether the name may be a class or function of the user's code or another package.

    Return False for names of Python, torch and numpy.
    """
    if top_of(name) == _SCRIPT:
        return True
    *outer, last = name.name.split(".")
    parts = (*name.module.split("."), *outer, last)
    if not all(map(str.isidentifier, parts)) or any(map(_special, (*outer, last))):
        return False
    if not all(each.lstrip("_")[:1].isupper() for each in outer):
        return False
    return top_of(name) not in standard() and top_of(name) not in TORCH


def _special(part: str) -> bool:
    return part.startswith("__") and part.endswith("__")


def is_guarded(name: str) -> bool:
    """Return whether a full name is malformed or belongs to Python, torch or numpy.

    A user cannot tell ckptkit to trust all names of such a package.
    """
    top = name.partition(".")[0]
    return top in standard() or top in TORCH or not top.isidentifier()


def is_foreign(name: Global) -> bool:
    """Return True if no harmless checkpoint contains this name.

    Such a name is not allowlisted. The name belongs to Python, or is a function of torch or numpy.
    """
    last = name.name.rpartition(".")[2]
    function = top_of(name) in TORCH and not last.lstrip("_")[:1].isupper()
    return not is_known(name) and (function or top_of(name) in standard())


# Calls


def judge_call(
    view: View, made: Node, args: Node, *, new: bool = False, kwargs: Node = None
) -> Judged:
    """Judge the call ``made(*args, **kwargs)``.

    If `new` is True, judge ``made.__new__(made, *args, **kwargs)`` instead.
    """
    if not isinstance(made, Global) or not isinstance(args, tuple):
        return Judged(HARMFUL, UNKNOWN)
    name = key_of(made)
    if name in _SPECIAL and not new:
        return _special_call(view, name, args)
    row = allowlist().rows.get(name)
    if row is None or not (row.new if new else row.called):
        return _outside(view, made, args, new, kwargs)
    has_keywords = kwargs is not None and pairs(view, kwargs) != []
    if has_keywords or not any(fits(view, args) for fits in row.takes):
        return Judged(UNSURE, row.gives)
    kind = ACCEPTED if name in weights_only() else HARMLESS
    if row.of_class and not _is_listed_class(args[0]):
        kind = CLASS  # the call returns an object of the class in its first argument
    return Judged(kind, row.gives, named(args[0]) if row.gives == NPDTYPE else None)


@lru_cache(maxsize=4096)
def by_sorts(made: Global) -> bool:
    """Return whether the verdict on a call depends only on the categories of the arguments.

    See `_by_sorts`.
    """
    row = allowlist().rows.get(key_of(made))
    if row is None or not row.called or key_of(made) in _SPECIAL:
        return False
    return all(map(_by_sorts, row.takes))


def is_final(made: Global) -> bool:
    """Return True if the allowlist permits neither BUILD nor added items after a call of `made`."""
    row = allowlist().rows[key_of(made)]
    return row.state is None and not row.fill


def consumed(made: Node, args: Node) -> tuple[Global, ...]:
    """Return the classes and functions that an allowlisted call may have as arguments.

    `out_of_place` need not check the returned names.
    """
    if not isinstance(made, Global) or not isinstance(args, tuple):
        return ()
    name = key_of(made)
    inner: tuple[Global, ...] = ()
    if name in _SPECIAL:
        places: tuple[int, ...] = (0,) if name in _NEW_CALLS or name == _GETATTR else (0, 1)
        if name in FROM_TYPE and len(args) > 2:
            inner = consumed(args[0], args[2])
    else:
        row = allowlist().rows.get(name)
        places = () if row is None else row.consumed
    found = (args[n] for n in places if n < len(args) and isinstance(args[n], Global))
    return (*found, *inner)


def contents(view: View, sort: int, args: tuple[Node, ...]) -> list[Any] | None:
    """Return the items of the container that a call returns for the arguments `args`.

    `sort` is the category of the container.

    For a dict, return keys and values alternately. Return None if the items are unknown.
    """
    found: list[Any] = []
    for arg in args:
        kind = view.sort(arg)
        items = view.items(arg) if kind & CONTAINERS else ()
        if items is None:
            return None
        if sort & (DICT | MAPPING | DEFAULTS) and kind & (LIST | TUPLE):  # pairs
            for pair in items:
                inner = view.items(pair) if view.sort(pair) & (LIST | TUPLE) else None
                if inner is None or len(flat := list(inner)) != 2:
                    return None
                found += flat
        else:
            found += items
    return found


def _outside(view: View, made: Global, args: tuple[Node, ...], new: bool, kwargs: Node) -> Judged:
    """Judge a call of a class or function that has no line in the allowlist."""
    if key_of(made) in allowlist().enums and not new:
        plain = len(args) == 1 and view.sort(args[0]) & SCALAR
        return Judged(HARMLESS if plain else UNSURE, OTHER)
    if not new:
        return Judged(HARMFUL if top_of(made) in standard() | TORCH else CALLED, OBJECT)
    if not is_own(made):
        return Judged(HARMFUL if top_of(made) in standard() else UNSURE, OBJECT)
    given = [*args]
    if kwargs is not None:
        named = pairs(view, kwargs)
        if named is None or not all(isinstance(key, str) for key, _ in named):
            return Judged(UNSURE, OBJECT)
        given += [value for _, value in named]
    # Some classes, such as those of sympy, evaluate a string argument as code.
    is_plain = all(deep(ANY & ~(TEXT | BYTES), view, each) for each in given)
    return Judged(CLASS if is_plain else UNSURE, OBJECT)


def _special_call(view: View, name: Name, args: tuple[Node, ...]) -> Judged:
    """Judge a call of a function in `_SPECIAL`."""
    wrong = Judged(HARMFUL, UNKNOWN)
    if name == _LOAD:  # _load_from_bytes(bytes): ckptkit judges the bytes as a separate file
        return Judged(LOADS, STORAGE) if len(args) == 1 else wrong
    if name == _GETATTR:  # getattr(Class, "Inner"): ckptkit judges each use of the nested class
        inner = args[1] if len(args) == 2 and isinstance(args[0], Global) else None
        return Judged(HARMLESS, NAME) if isinstance(inner, str) and inner.isidentifier() else wrong
    if not args:
        return wrong
    if name == ("copyreg", "__newobj__"):  # (class, argument...)
        return judge_call(view, args[0], args[1:], new=True)
    if name in _NEW_CALLS:  # __newobj_ex__(class, arguments, keywords)
        given = args[1] if len(args) > 1 else None
        kwargs = args[2] if len(args) > 2 else None
        return judge_call(view, args[0], given, new=True, kwargs=kwargs)
    if name == _RECONSTRUCT:  # the call equals NEWOBJ if base is `object` and state is None
        judged = judge_call(view, args[0], (), new=True)
        if args[1:] == (Global("builtins", "object"), None):
            return judged
        return Judged(max(judged.kind, UNSURE, key=LEVELS.index), UNKNOWN)
    return _from_type(view, name, args)


def _from_type(view: View, name: Name, args: tuple[Node, ...]) -> Judged:
    """Judge the call _rebuild_from_type_v2(function, class, args, state).

    The function _rebuild_from_type_v2 calls function(*args).
    """
    called = args[0]
    made = isinstance(called, Global) and key_of(called) not in _SPECIAL
    if not made or not 3 <= len(args) <= 4 or not isinstance(args[2], tuple):
        return Judged(HARMFUL, UNKNOWN)
    inner = judge_call(view, called, args[2])
    state = args[3] if len(args) > 3 else None
    known = _is_tensor_class(view, args[1]) and inner.sort & (TENSOR | DRESSED)
    known = known and allowlist().shapes["attributes"](view, state)
    own = ACCEPTED if name in weights_only() else HARMLESS
    kinds = (own, inner.kind, CLASS if not _is_listed_class(args[1]) else own,
             own if known else UNSURE)  # fmt: skip
    return Judged(max(kinds, key=LEVELS.index), DRESSED)


def _is_tensor_class(view: View, value: Any) -> bool:
    return isinstance(value, Global) and (_is_listed_class(value) or is_own(value))


def _is_listed_class(value: Node) -> bool:
    row = allowlist().rows.get(key_of(value)) if isinstance(value, Global) else None
    return row is not None and (not row.called or bool(row.gives & TENSOR))


def is_unfinished(made: Node) -> bool:
    """Return whether BUILD must be the first operation on an object of this class."""
    return isinstance(made, Global) and key_of(made) in _UNFINISHED


def target_of(made: Node, args: Node) -> Node:
    """Return the class or function whose allowlist line permits BUILD and other later operations.

    If the call creates an object of the class in its first argument, return this class. Otherwise
    return `made`.
    """
    name = key_of(made) if isinstance(made, Global) else None
    is_maker = name in _NEW_CALLS or name == _RECONSTRUCT
    return args[0] if is_maker and isinstance(args, tuple) and args else made


# BUILD and other operations that change the result of a call


def judge_step(view: View, made: Node, step: str, value: Node, before: Judged) -> Judged:
    """Judge an operation that changes the result of a call of `made`.

    `step` is ``build``, ``append``, ``set`` or ``add``. `before` is the verdict on the call.
    """
    unsure = before._replace(kind=UNSURE)
    if not isinstance(made, Global) or before.sort == UNKNOWN:
        return unsure
    row = allowlist().rows.get(key_of(made))
    if row is None:
        if key_of(made) in FROM_TYPE and step == "build":
            known = allowlist().shapes["attributes"](view, value)
        # An object of a class that is not allowlisted may get any items, and any state that matches
        # `own_state`.
        else:
            known = before.sort == OBJECT and (
                step != "build" or allowlist().shapes["own_state"](view, value)
            )
        return before._replace(kind=CLASS) if known else unsure
    if step != "build":
        return before._replace(kind=ACCEPTED) if step in row.fill else unsure
    if row.state == "dtype_state":
        type_ = built_dtype(view, before.type, value)
        if type_ is None:
            return unsure
        return Judged(ACCEPTED, OTHER if type_.objects else NPDTYPE, type_)
    if row.state in ("array_state", "masked_state"):
        sort = _array_sort(view, row.state, value)
        return Judged(UNSURE, OTHER) if sort is None else Judged(ACCEPTED, sort)
    if row.state is None or not allowlist().shapes[row.state](view, value):
        return unsure
    dressed = row.gives == TENSOR and row.state == "attributes" and value is not None
    return before._replace(kind=ACCEPTED, sort=DRESSED if dressed else before.sort)


def _array_sort(view: View, word: str, state: Node) -> int | None:
    """Return the category of an array with this state.

    Return None for a state that NumPy does not write.
    """
    masked = word == "masked_state"
    if masked:
        if not isinstance(state, tuple) or len(state) != 7 or not is_bytes(view, state[5]):
            return None
        if not view.sort(state[6]) & (SCALAR | ARRAY):
            return None
        state = state[:5]
    type_ = array(view, state)
    if type_ is None or (masked and type_.objects):
        return None
    return OTHER if type_.objects else ARRAY


def is_key(view: View, value: Node) -> bool:
    """Return whether Python can hash and compare a value without running code from the file."""
    return deep(KEYS, view, value)


# Patterns that a separate function checks


def _keys(view: View, state: Node) -> list[str] | None:
    """Return the names of the attributes that a state sets. Return None for unknown names."""
    if state is None:
        return []
    if isinstance(state, tuple):
        parts = [_keys(view, each) for each in state if not isinstance(each, tuple)]
        if len(state) != 2 or len(parts) != 2 or None in parts:
            return None
        return [key for part in parts for key in part or ()]
    found = pairs(view, state) if view.sort(state) == DICT else None
    if found is None or not all(isinstance(key, str) for key, _ in found):
        return None
    return [key for key, _ in found]


def _own_state(view: View, state: Node) -> bool:
    """Return whether an object of a class that is not allowlisted may get this state.

    The state must be a plain value, tensor or container, and must not set special attributes such
    as ``__class__``. A state that is itself an object is rejected, because unpacking it would run
    code of the object's class.
    """
    if not view.sort(state) & (SCALAR | CONTAINERS | TENSOR | DRESSED | ARRAY | OTHER | STORAGE):
        return False
    keys = _keys(view, state)
    return keys is None or not any(map(_special, keys))


def is_plain_fields(view: View, state: Node) -> bool:
    """Return whether a state is a dict that sets no special attributes such as ``__class__``."""
    keys = None if isinstance(state, tuple) and state[1:] != (None,) else _keys(view, state)
    return keys is not None and not any(map(_special, keys))


def _attributes(view: View, state: Node) -> bool:
    """Return whether a state sets only attributes that are not methods of torch.Tensor."""
    keys = _keys(view, state)
    if keys is None:
        return False
    return not any(_special(key) or key in allowlist().tensor_attributes for key in keys)


def _quantizer(view: View, value: Node) -> bool:
    """Return whether a value is a tuple of a quantization scheme and numbers or tensors."""
    if not isinstance(value, tuple) or not value or view.sort(value[0]) != CONSTANT:
        return False
    return all(view.sort(each) & (FLOAT | INT | TENSOR) for each in value[1:])


def _matching(pattern: str) -> Shape:
    compiled = re.compile(pattern, re.ASCII)
    return lambda view, value: isinstance(value, str) and compiled.fullmatch(value) is not None


_TESTS: dict[str, Shape] = {
    "attributes": _attributes,
    "byte": lambda view, value: isinstance(value, (str, bytes)) and value in ("b", b"b"),
    "decimal": _matching(
        r"[+-]?[0-9.]{0,1000}([eE][+-]?[0-9]{1,19})?|[+-]?s?NaN[0-9]{0,99}|[+-]?Infinity"
    ),
    # (False,) == (0,) is True in Python, so `empty_shape` also checks the type of the item.
    "empty_shape": lambda view, value: value == (0,) and type(value[0]) is int,
    "fraction": _matching(r"[+-]?[0-9]{1,1000}(/[0-9]{1,1000})?"),
    "latin1": _matching("latin-?1"),
    "own_state": _own_state,
    "plain_fields": is_plain_fields,
    "quantizer": _quantizer,
    "tensor_class": _is_tensor_class,
    "type_text": lambda view, value: named(value) is not None,
    **dict.fromkeys(("dtype_state", "array_state", "masked_state"), lambda view, value: False),
}  # fmt: skip


# The allowlist


class Row(NamedTuple):
    """A line of the allowlist for a class or function.

    A call is allowed if the arguments match a pattern in ``takes``. The category of the result is
    ``gives``.
    """

    takes: tuple[Shape, ...]
    gives: int
    new: bool  # If True, a pickle may call ``__new__`` of the class.
    called: bool  # If True, a pickle may call the class or function.
    state: str | None  # Name of the pattern of BUILD states. None forbids BUILD.
    fill: tuple[str, ...]  # Operations allowed after the call: append, set or add.
    consumed: tuple[int, ...]  # Positions of arguments that are classes or functions.
    of_class: bool  # If True, the result is an object of the class in the first argument.


_TENSORS = ["BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short"]
_STORAGES = [row.storage for row in TABLE if row.storage]
_NOT_ON_CUDA = ("QInt8Storage", "QInt32Storage", "QUInt8Storage", "QUInt4x2Storage",
                "QUInt2x4Storage")  # fmt: skip
_DTYPES = [row.name for row in TABLE]
_QSCHEMES = ("affine", "affine_float_qparams", "symmetric")
_PLACEHOLDERS: dict[str, list[str]] = {
    "@storages": _STORAGES,
    "@cuda_storages": [each for each in _STORAGES if each not in _NOT_ON_CUDA],
    "@tensors": [f"{kind}Tensor" for kind in _TENSORS],
    "@sparse": [f"{kind}Tensor" for kind in _TENSORS if kind != "Bool"],
    "@dtypes": _DTYPES,
    "@weights_only_dtypes": [name for name in _DTYPES if not name.startswith("float6_")],
    "@qschemes": [f"per_channel_{each}" for each in _QSCHEMES]
    + ["per_tensor_affine", "per_tensor_symmetric"],
}
# New and old names of the modules that torch 1.13 renamed
_OLDER = (("torch.ao.nn.", "torch.nn."), ("torch.ao.quantization", "torch.quantization"))
_ROW = re.compile(
    r"(?P<names>(?:[^({\s]|\{[^}]*\})+)(?: (?P<takes>\(.*?\)))?"
    r"(?: -> (?P<gives>\w+))?(?P<new> new)?(?: build (?P<state>.+?))?(?: fill (?P<fill>[a-z ]+))?"
)


@cache
def _sections() -> dict[str, list[str]]:
    """Return the lines of each section of ``allowlist.txt``.

    An indented line continues the line above.
    """
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in Path(__file__).with_name("allowlist.txt").read_text("utf-8").splitlines():
        if line.startswith("["):
            lines = found[line[1:-1]] = []
        elif line.startswith("    "):
            lines[-1] += f" {line.strip()}"
        elif line and not line.startswith("#"):
            lines.append(line)
    return found


def _expanded(text: str) -> list[str]:
    """Expand braces and placeholders to names: ``a.{b c}`` becomes a.b and a.c."""
    parts = re.split(r"\{([^}]*)\}", text)
    choices = [each.split() if number % 2 else [each] for number, each in enumerate(parts)]
    choices = [list(flatten(_PLACEHOLDERS.get(word, [word]) for word in each)) for each in choices]
    return ["".join(each) for each in product(*choices)]


def _split(name: str) -> Name:
    """Split a full name into module and name. A colon separates the module of a nested name."""
    module, _, last = name.partition(":") if ":" in name else name.rpartition(".")
    return module, last


def _listed(lines: list[str], rows: dict[Name, Row] | None = None) -> Iterator[Name]:
    """Yield the names in lines of the form ``module: name name``.

    A line ``module: @`` means all names of this module that `rows` contains.
    """
    for line in lines:
        modules, _, names = line.partition(": ")
        found = list(_expanded(f"{{{names}}}"))
        if names == "@":
            found = [name for module, name in rows or () if module == modules]
        yield from _also_older(product(_expanded(modules), found))


def _also_older(names: Iterable[Name]) -> Iterator[Name]:
    for module, name in names:
        yield module, name
        for new, old in _OLDER:
            if module.startswith(new):
                yield module.replace(new, old, 1), name


class Allowlist:
    """The content of ``allowlist.txt``. Raises ValueError for a malformed or repeated line."""

    def __init__(self, sections: dict[str, list[str]]) -> None:
        self.sets = {
            name: frozenset(map(_split, names.split()))
            for name, _, names in (line.partition(": ") for line in sections["sets"])
        }
        self.shapes: dict[str, Shape] = {name: Mask(sorts) for name, sorts in SORTS.items()}
        self.shapes |= _TESTS
        self.shapes |= {f"%{name}": partial(_member, names) for name, names in self.sets.items()}
        for line in sections["shapes"]:
            name, equals, shape = line.partition(" = ")
            if not equals or name in self.shapes:
                raise ValueError(f"expected `name = pattern` with a new name: {line!r}")
            self.shapes[name] = _read_shape(shape, self.shapes)
        self.rows: dict[Name, Row] = {}
        for line in sections["calls"]:
            self._add(line, called=True)
        for line in sections["classes"]:
            self._add(line, called=False)
        self.enums = frozenset(_listed(sections["enums"]))
        self.constants = frozenset(_listed(sections["constants"]))
        self.functions = frozenset(_listed(sections["functions"], self.rows))
        self.tensor_attributes = {name for _, name in _listed(sections["tensor_attributes"])}

    def _add(self, line: str, called: bool) -> None:
        found = _ROW.fullmatch(line)
        if found is None:
            raise ValueError(f"not a row: {line!r}")
        names: Iterable[Name] = map(_split, _expanded(found["names"]))
        takes, state = found["takes"] or "()", found["state"]
        if not called:
            names = _also_older(names)
            is_module = line.startswith(("torch.nn.", "torch.ao."))
            state = state or ("module" if is_module else "fields")
        if state is not None and state not in self.shapes:  # `state` is a pattern, not a name
            self.shapes[state] = _read_shape(state, self.shapes)
        shapes: list[Shape] = []
        rest = ["", *_WORD.findall(takes)[::-1]]
        while rest[-1] == "(":
            shapes.append(_one(rest, self.shapes))
        if len(rest) > 1:
            raise ValueError(f"{takes!r}: expected tuples of arguments")
        words = takes.strip("()").split()
        default = OTHER if called else LISTED
        row = Row(
            tuple(shapes),
            SORTS[found["gives"]] if found["gives"] else default,
            not called or bool(found["new"]),
            called,
            state,
            tuple((found["fill"] or "").split()),
            tuple(n for n, word in enumerate(words) if "%" in word or word == "tensor_class"),
            words[:1] == ["tensor_class"],
        )
        for name in names:
            if name in self.rows:
                raise ValueError(f"two rows for {name}")
            self.rows[name] = row


@cache
def allowlist() -> Allowlist:
    """Return the allowlist. The first call reads ``allowlist.txt``."""
    return Allowlist(_sections())


@cache
def standard() -> frozenset[str]:
    """Return the top-level modules of the standard libraries of Python 2 and 3.11 to 3.14.

    Python 2 is included because pickles of protocol 2 contain module names of Python 2.
    """
    old = {name for name in IMPORT_MAPPING if "." not in name}
    return sys.stdlib_module_names | old | set(" ".join(_sections()["standard"]).split())


@cache
def weights_only() -> frozenset[Name]:
    """Return the names that `torch.load(weights_only=True)` accepts."""
    return frozenset(_listed(_sections()["weights_only"]))
