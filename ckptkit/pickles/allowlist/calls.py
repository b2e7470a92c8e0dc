"""Judges calls and the steps after them, by the sorts of the values that they take. Calls nothing.

A value is plain, or inert (a row makes it of arguments that the row takes), or an object of a class
whose state is plain or inert, or not known. The tracer asks for each opcode of a pickle that is scanned,
:mod:`ckptkit.pickles.trust` for each object of a tree that is written: there is no second table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from ckptkit.core.tree import Global, Node, Object
from ckptkit.pickles.allowlist import rows as table
from ckptkit.pickles.allowlist.classes import CLASSES, FILLED, OPTIMIZERS
from ckptkit.pickles.allowlist.names import (
    ACCEPTED,
    ALLOCATES,
    CLASS,
    HARMFUL,
    HARMLESS,
    LEVELS,
    LOADS,
    STANDARD,
    TORCH,
    UNKNOWN,
    UNSURE,
    class_kind,
    top_of,
)
from ckptkit.pickles.allowlist.rows import KINDS as WORDS
from ckptkit.pickles.allowlist.rows import ROWS, WEIGHTS_ONLY, Kind, Name, Row

_LATIN1 = ("latin1", "latin-1")
_SIZED = ("bytearray", "bytes", "list", "tuple", "set", "frozenset", "deque", "Counter")


class View(Protocol):
    """What a machine knows of its values."""

    def sort(self, value: Node) -> int:
        """Return the sort of a value, one of the bits of the allowlist."""

    def inside(self, value: Node, every: bool) -> int:
        """Return the sorts of what a container holds, directly or at every depth."""


class Judged(NamedTuple):
    """A call: its kind, and the sort of what it makes."""

    kind: str
    sort: int


def judge_call(
    view: View, made: Node, args: Node, *, new: bool = False, kwargs: Node = None
) -> Judged:
    """Judge a call of `made` with a tuple of arguments; `new`: through ``__new__``."""
    if not isinstance(made, Global) or not isinstance(args, tuple):
        return Judged(HARMFUL, table.UNKNOWN_SORT)
    name = (made.module, made.name)
    special = None if new else _SPECIAL.get(name)
    if special is not None:
        return special(view, name, args)
    row = ROWS.get(name)
    if row is None or (new and not row.new and not _is_storage(row)):
        return _outside(view, made, args, new)
    if _fills_memory(view, name, args) or (
        row.gives == table.TENSOR and row.takes == ((),) and args
    ):
        return Judged(ALLOCATES, row.gives)
    if not any(_takes(view, signature, args) for signature in row.takes) or not _is_empty(kwargs):
        return Judged(UNSURE, row.gives)
    return Judged(ACCEPTED if name in WEIGHTS_ONLY else _class_argument(row, args), row.gives)


def _is_empty(kwargs: Node) -> bool:
    return kwargs is None or (isinstance(kwargs, dict) and not kwargs)


def _is_storage(row: Row) -> bool:
    return row.takes == ((),) and row.gives == table.TENSOR


def _outside(view: View, made: Global, args: tuple[Node, ...], new: bool) -> Judged:
    """Judge a call of what has no row: a class through ``__new__``, an enumeration, anything
    else."""
    if (made.module, made.name) in table.ENUMS and not new:
        plain = len(args) == 1 and view.sort(args[0]) & table.SCALARS
        return Judged(CLASS if plain else UNSURE, table.INERT)
    kind = class_kind(made) if new else _function_kind(made)
    if kind == CLASS and any(view.sort(each) == table.UNKNOWN_SORT for each in args):
        kind = UNSURE
    return Judged(kind, table.OBJECT)


def _function_kind(made: Global) -> str:
    return HARMFUL if top_of(made) in STANDARD | TORCH else UNKNOWN


def _class_argument(row: Row, args: tuple[Node, ...]) -> str:
    """Return the kind of a call that makes an object of the class that is its first argument, if it
    does."""
    if row.takes[0][:1] != ("class",):
        return HARMLESS
    return HARMLESS if (args[0].module, args[0].name) in ROWS else CLASS


def _takes(view: View, signature: tuple[str, ...], args: tuple[Node, ...]) -> bool:
    """Return whether arguments are what the words of a signature stand for."""
    words = list(signature)
    rest = words.pop()[1:] if words and words[-1].startswith("*") else None
    needed = sum(not word.startswith("?") for word in words)
    if len(args) < needed or (len(args) > len(words) and rest is None):
        return False
    words += [rest or ""] * (len(args) - len(words))
    return all(
        fits_word(view, word.lstrip("?"), arg) for word, arg in zip(words, args, strict=False)
    )


def fits_word(view: View, words: str, value: Node) -> bool:
    """Return whether a value is one of those that words of the allowlist stand for."""
    return any(_is_one(view, word, value) for word in words.split("/"))


def _is_one(view: View, word: str, value: Node) -> bool:
    if word in WORDS:
        return any(_fits(view, kind, value) for kind in WORDS[word])
    if word in table.ARGUMENTS:
        return isinstance(value, Global) and (value.module, value.name) in table.ARGUMENTS[word]
    return _PREDICATES[word](view, value)


def _fits(view: View, kind: Kind, value: Node) -> bool:
    sort = view.sort(value)
    if not sort & kind.sorts:
        return False
    holds = sort & table.LITERALS and (kind.every or kind.inside != table.VALUES)
    return not holds or not view.inside(value, kind.every) & ~kind.inside


def _is_factory(view: View, value: Node) -> bool:
    """Return whether it is what a defaultdict may make its values by: called by whoever asks for
    one."""
    return value is None or bool(view.sort(value) & (table.NAME | table.BAG))


_PREDICATES: dict[str, Callable[[View, Node], bool]] = {
    "class": lambda view, value: isinstance(value, Global) and _is_tensor_class(value),
    "factory": _is_factory,
    "latin1": lambda view, value: isinstance(value, str) and value in _LATIN1,
    "optional_int": lambda view, value: bool(view.sort(value) & (table.NONE | table.INT)),
}


def _is_tensor_class(value: Global) -> bool:
    row = ROWS.get((value.module, value.name))
    return class_kind(value) == CLASS if row is None else row.gives == table.TENSOR


def _fills_memory(view: View, name: Name, args: tuple[Node, ...]) -> bool:
    """Return whether a container is made of a number, which is its size, or of a range."""
    if name[0] not in ("builtins", "collections") or name[1] not in _SIZED or not args:
        return False
    if view.sort(args[0]) == table.INT:
        return name[1].startswith("byte")
    return isinstance(args[0], Object) and args[0].callable == Global("builtins", "range")


def _from_type(view: View, name: Name, args: tuple[Node, ...]) -> Judged:
    """_rebuild_from_type_v2(function, class, arguments, state): calls the first with the third."""
    called = args[0] if args else None
    made = isinstance(called, Global) and (called.module, called.name) not in table.SPECIAL
    if not made or not 3 <= len(args) <= 4 or not isinstance(args[2], tuple):
        return Judged(HARMFUL, table.UNKNOWN_SORT)
    inner = judge_call(view, called, args[2])
    known = isinstance(args[1], Global) and _is_tensor_class(args[1]) and inner.sort == table.TENSOR
    known = known and fits_word(view, "fields", args[3] if len(args) > 3 else None)
    own = ACCEPTED if name in WEIGHTS_ONLY else HARMLESS
    kinds = [own, inner.kind, CLASS if known and (args[1].module, args[1].name) in CLASSES else own]
    if not known:
        kinds.append(UNSURE)
    return Judged(max(kinds, key=LEVELS.index), table.TENSOR)


def _new_call(view: View, name: Name, args: tuple[Node, ...]) -> Judged:
    """copyreg.__newobj__(class, argument...), __newobj_ex__(class, arguments, keywords)."""
    if not args:
        return Judged(HARMFUL, table.UNKNOWN_SORT)
    if name[1] == "__newobj__":
        return judge_call(view, args[0], args[1:], new=True)
    kwargs = args[2] if len(args) > 2 else None
    return judge_call(view, args[0], args[1] if len(args) > 1 else None, new=True, kwargs=kwargs)


def _reconstruct(view: View, name: Name, args: tuple[Node, ...]) -> Judged:
    """copyreg._reconstructor(class, base, state): the base makes it, of a literal."""
    if len(args) != 3 or not _is_plain_base(args[1]):
        return Judged(HARMFUL, table.UNKNOWN_SORT)
    judged = judge_call(view, args[0], (), new=True)
    return judged if fits_word(view, "scalar/literal", args[2]) else Judged(UNSURE, judged.sort)


def _is_plain_base(base: Node) -> bool:
    return isinstance(base, Global) and base.module == "builtins" and base.name in (
        "object", "list", "dict", "tuple", "set", "frozenset", "str", "bytes", "int", "float", "complex",
    )  # fmt: skip


def _getattr(view: View, name: Name, args: tuple[Node, ...]) -> Judged:
    """getattr(Class, "Inner"): the name that it stands for is judged where it is used."""
    named = (
        len(args) == 2
        and isinstance(args[0], Global)
        and isinstance(args[1], str)
        and args[1].isidentifier()
    )
    return Judged(CLASS, table.NAME) if named else Judged(HARMFUL, table.UNKNOWN_SORT)


def _load(view: View, name: Name, args: tuple[Node, ...]) -> Judged:
    """torch.storage._load_from_bytes(bytes): a file of its own, judged as one."""
    if len(args) != 1:
        return Judged(HARMFUL, table.UNKNOWN_SORT)
    return Judged(LOADS, table.STORAGE)


_Special = Callable[[View, Name, tuple[Node, ...]], Judged]
_SPECIAL: dict[Name, _Special] = {
    **dict.fromkeys(table.FROM_TYPE, _from_type),
    **dict.fromkeys(table.NEW_CALLS, _new_call),
    table.RECONSTRUCT: _reconstruct,
    table.GETATTR: _getattr,
    table.LOAD: _load,
}


# Steps after a call


def judge_step(view: View, made: Node, step: str, value: Node, sort: int) -> str:
    """Judge what follows a call of `made` that gave a value of this sort: build, append, set or
    add."""
    if not isinstance(made, Global) or sort == table.UNKNOWN_SORT:
        return UNSURE
    row = ROWS.get((made.module, made.name))
    if row is None and sort == table.OBJECT:
        return _object_step(view, made, step, value)
    if row is None:
        return _special_step(view, made, step, value)
    if step == "build":
        return ACCEPTED if row.state and fits_word(view, row.state, value) else UNSURE
    return ACCEPTED if step in row.fill else UNSURE


def _object_step(view: View, made: Global, step: str, value: Node) -> str:
    """Judge a step of an object of a class outside the rows."""
    listed = (made.module, made.name) in CLASSES
    if (made.module, made.name) in OPTIMIZERS:
        return CLASS if step == "build" and fits_word(view, "optimizer", value) else UNSURE
    if step != "build":
        return UNSURE if listed and (made.module, made.name) not in FILLED else CLASS
    return CLASS if fits_word(view, "scalar/literal" if listed else "state", value) else UNSURE


def _special_step(view: View, made: Global, step: str, value: Node) -> str:
    """Judge a step of what one of the special calls made: a tensor that gets attributes, an
    object."""
    if (made.module, made.name) in table.FROM_TYPE and step == "build":
        return CLASS if fits_word(view, "fields", value) else UNSURE
    return UNSURE


def target_of(made: Node, args: Node) -> Node:
    """Return the name that decides which steps may follow a call: of the class that it makes an
    object of."""
    if isinstance(made, Global) and isinstance(args, tuple) and args:
        name = (made.module, made.name)
        if name in table.NEW_CALLS or name == table.RECONSTRUCT:
            return args[0]
    return made
