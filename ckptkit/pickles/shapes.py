"""Shapes of values: which arguments, states and items an allowlisted call may take.

A value has a sort, one bit of `SORTS`. A shape is a predicate over values, written as text in
``allowlist.txt`` and compiled here:

    int|none         a value of one of these sorts
    [int]  (int*)    a list, a tuple of any number of integers; (text int?) a tuple of one or two
    {text: tensor}   a dict with keys and values of these shapes
    {a=int *=any}    a dict of strings: what the value under `a`, and every other one, must be
    <scalar list>    a value that has these sorts itself and at every depth inside
    %name            one of the classes and functions of the set `name`
    word             a shape, or a test of `TESTS`, that has this name
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial
from itertools import repeat
from typing import Any, Protocol

from ckptkit.core.tree import Global

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
    "defaults": DEFAULTS,  # a defaultdict whose factory makes an empty value
    "storage": STORAGE, "bare": TENSOR,
    "dressed": DRESSED,  # a tensor with attributes that the file chooses
    "tensor": TENSOR | DRESSED,
    "array": ARRAY, "npdtype": NPDTYPE, "size": SIZE, "time": TIME, "device": DEVICE,
    "layout": LAYOUT, "generator": GENERATOR, "offset": OFFSET,
    "other": OTHER,  # made by a row, and taken by no other
    "constant": CONSTANT,  # a name that is no callable: torch.float32
    "function": FUNCTION,  # a listed function or class, which computes on any arguments
    "name": NAME,  # any other class or function, which no file may hold
    "bag": BAG,  # attributes that the file chooses: argparse.Namespace
    "listed": LISTED,  # an object of a class of the allowlist
    "object": OBJECT,  # an object of another class, whose own code decides
    "scalar": SCALAR, "literal": LITERAL, "any": ANY,
}  # fmt: skip
KEYS = (
    SCALAR | TUPLE | STORAGE | TENSOR | DRESSED | SIZE | TIME | DEVICE | LAYOUT | OTHER | CONSTANT
) | (FUNCTION | NAME | OBJECT)
"""Sorts that may be keys of a dict or items of a set: Python hashes and compares them."""


class View(Protocol):
    """Access to the values of a pickle that is traced, or of a tree that is written."""

    def sort(self, value: Any) -> int:
        """Return the sort of a value."""

    def items(self, value: Any) -> Iterable[Any] | None:
        """Return what a container holds, the keys and values of a dict in turns.

        None if these are not known.
        """

    def numpy(self, value: Any) -> Any:
        """Return the element type that a built numpy.dtype stands for, None for other values."""


Shape = Callable[[View, Any], bool]
LOOKED_AT = 1_000_000  # values inside a container that a shape looks at


class Mask:
    """A value of these sorts. It depends on nothing else, so that a verdict may be remembered."""

    def __init__(self, sorts: int) -> None:
        self.sorts = sorts

    def __call__(self, view: View, value: Any) -> bool:
        return bool(view.sort(value) & self.sorts)


class Tuple:
    """A tuple whose items have these shapes; the last `optional` ones may be missing."""

    def __init__(self, shapes: list[Shape], optional: int, rest: Shape | None) -> None:
        self.shapes, self.needed, self.rest = shapes, len(shapes) - optional, rest

    def __call__(self, view: View, value: Any) -> bool:
        if not isinstance(value, tuple) or len(value) < self.needed:
            return False
        if len(value) > len(self.shapes) and self.rest is None:
            return False
        more = () if self.rest is None else repeat(self.rest, len(value) - len(self.shapes))
        matched = zip((*self.shapes, *more), value, strict=False)
        return all(fits(view, each) for fits, each in matched)


class AnyOf:
    def __init__(self, shapes: list[Shape]) -> None:
        self.shapes = shapes

    def __call__(self, view: View, value: Any) -> bool:
        return any(fits(view, value) for fits in self.shapes)


def _list(inner: Shape, view: View, value: Any) -> bool:
    items = view.items(value) if view.sort(value) == LIST else None
    return items is not None and all(inner(view, each) for each in items)


def pairs(view: View, value: Any) -> list[tuple[Any, Any]] | None:
    """Return the keys and values of a dict; None if it is no dict, or not known."""
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
    """Return whether a value has only these sorts, itself and at every depth inside."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if not view.sort(each) & sorts:
            return False
        if view.sort(each) & CONTAINERS and id(each) not in seen:
            seen.add(id(each))
            items = view.items(each)
            if items is None or len(waiting) > LOOKED_AT or len(seen) > LOOKED_AT:
                return False
            waiting.extend(items)
    return True


def _member(names: frozenset[tuple[str, str]], view: View, value: Any) -> bool:
    return isinstance(value, Global) and (value.module, value.name) in names


def by_sorts(shape: Shape, depth: int = 2) -> bool:
    """Return whether the sorts of a value and of what a tuple in it holds decide whether it fits,
    if there is no list, dict or set in it."""
    if isinstance(shape, AnyOf):
        return all(by_sorts(each, depth) for each in shape.shapes)
    if isinstance(shape, Tuple):
        inner = [*shape.shapes, *([] if shape.rest is None else [shape.rest])]
        return depth > 0 and all(by_sorts(each, depth - 1) for each in inner)
    if isinstance(shape, partial):
        sorts = shape.args[0] if shape.func in (_dict, deep) else 0
        return shape.func is not _member and not sorts & (MAPPING | DEFAULTS)
    return isinstance(shape, Mask)


_TOKEN = re.compile(r"\s*([\[\](){}<>|*?=:]|%?[A-Za-z_][\w]*|$)")


class Compiler:
    """Compiles shapes: `shapes` are those with a name, `sets` the sets of names for ``%name``."""

    def __init__(
        self, shapes: dict[str, Shape], sets: dict[str, frozenset[tuple[str, str]]]
    ) -> None:
        self.shapes, self.sets = shapes, sets

    def compile(self, text: str) -> Shape:
        """Return the shape that a text describes. Raises ValueError for anything else."""
        self.text, self.at = text, 0
        shape = self._alternatives()
        if self._peek():
            raise ValueError(f"{text!r} goes on behind a shape: {self._peek()!r}")
        return shape

    def signatures(self, text: str) -> list[Tuple]:
        """Return the tuples in a text such as ``() (int text?)``."""
        self.text, self.at = text, 0
        found = []
        while self._peek() == "(":
            shape = self._alternatives()
            assert isinstance(shape, Tuple)
            found.append(shape)
        if self._peek() or not found:
            raise ValueError(f"{text!r} is no list of signatures")
        return found

    def _peek(self) -> str:
        match = _TOKEN.match(self.text, self.at)
        if match is None:
            raise ValueError(f"{self.text!r} has no shape at {self.at}")
        return match[1]

    def _take(self, *expected: str) -> str:
        match = _TOKEN.match(self.text, self.at)
        if match is None or (expected and match[1] not in expected):
            raise ValueError(f"{self.text!r} needs {expected or 'a shape'} at {self.at}")
        self.at = match.end()
        return match[1]

    def _alternatives(self) -> Shape:
        found = [self._one()]
        while self._peek() == "|":
            self._take("|")
            found.append(self._one())
        masks = [each.sorts for each in found if isinstance(each, Mask)]
        others = [each for each in found if not isinstance(each, Mask)]
        if masks:
            mask = 0
            for each in masks:
                mask |= each
            others.insert(0, Mask(mask))
        return others[0] if len(others) == 1 else AnyOf(others)

    def _one(self) -> Shape:
        token = self._take()
        if token == "[":
            inner = self._alternatives()
            self._take("]")
            return partial(_list, inner)
        if token == "(":
            return self._tuple()
        if token == "{":
            return self._mapping(DICT)
        if token == "<":
            mask = 0
            while self._peek() != ">":
                mask |= SORTS[self._take()]
            self._take(">")
            return partial(deep, mask)
        if token.startswith("%"):
            return partial(_member, self.sets[token[1:]])
        if token in ("mapping", "defaults") and self._peek() == "{":
            self._take("{")
            return self._mapping(SORTS[token])
        return Mask(SORTS[token]) if token in SORTS else self.shapes[token]

    def _tuple(self) -> Tuple:
        shapes: list[Shape] = []
        optional, rest = 0, None
        while self._peek() != ")":
            shape = self._alternatives()
            if self._peek() == "*":
                self._take("*")
                rest = shape
                break
            shapes.append(shape)
            if self._peek() == "?":
                self._take("?")
                optional += 1
        self._take(")")
        return Tuple(shapes, optional, rest)

    def _mapping(self, sorts: int) -> Shape:
        at = self.at
        if _TOKEN.match(self.text, at) and self._take() and self._peek() == "=":
            self.at = at
            return self._named()
        self.at = at
        key = self._alternatives()
        self._take(":")
        inner = self._alternatives()
        self._take("}")
        return partial(_dict, sorts, key, inner)

    def _named(self) -> Shape:
        shapes: dict[str, Shape] = {}
        rest: Shape | None = None
        while self._peek() != "}":
            key = self._take()
            self._take("=")
            shape = self._alternatives()
            if key == "*":
                rest = shape
            else:
                shapes[key] = shape
        self._take("}")
        return partial(_fields, shapes, rest)
