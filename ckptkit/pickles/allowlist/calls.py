"""Judge calls and the steps after them, by the sorts of the values that they take. Calls nothing.

A value is plain, or inert (a row makes it of arguments that the row takes), or an object of a class
whose state is plain or inert, or not known. The tracer asks for each opcode of a pickle that is
scanned, :mod:`ckptkit.pickles.trust` for each object of a tree that is written: there is no second
table.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cache, lru_cache, partial
from typing import NamedTuple, Protocol

from ckptkit.core.text import flatten
from ckptkit.core.tree import Global, Node, Object
from ckptkit.pickles.allowlist import numpy_types
from ckptkit.pickles.allowlist import rows as table
from ckptkit.pickles.allowlist.classes import CLASSES, FILLED, OPTIMIZERS, UNFINISHED
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
from ckptkit.pickles.allowlist.numpy_types import NumpyType, NumpyView
from ckptkit.pickles.allowlist.rows import KINDS as WORDS
from ckptkit.pickles.allowlist.rows import ROWS, WEIGHTS_ONLY, AllowedCall, Kind, Name

_LATIN1 = ("latin1", "latin-1")
_SIZED = ("bytearray", "bytes", "list", "tuple", "set", "frozenset", "deque", "Counter")


class View(NumpyView, Protocol):
    """Access to the values of a machine."""

    def sort(self, value: Node) -> int:
        """Return the sort of a value, one of the bits of the allowlist."""

    def inside(self, value: Node, every: bool) -> int:
        """Return the sorts of what a container holds, directly or at every depth."""


class Judged(NamedTuple):
    """A call or a step: its kind, the sort of what it makes, and the type where that is a dtype."""

    kind: str
    sort: int
    type: NumpyType | None = None


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
    if row is None or (new and not row.new):
        return _outside(view, made, args, new, kwargs)
    if _fills_memory(view, name, args) or (name in table.SIZED and args):
        return Judged(ALLOCATES, row.gives)
    if not any(_takes(view, row, each, args) for each in row.takes) or not _is_empty(kwargs):
        return Judged(UNSURE, row.gives)
    kind = ACCEPTED if name in WEIGHTS_ONLY else _class_argument(row, args)
    sort = _sort_with(view, row, args) if row.keeps else row.gives
    return Judged(kind, sort, numpy_types.named(args[0]) if name == _DTYPE else None)


_DTYPE: Name = ("numpy", "dtype")


@lru_cache(maxsize=4096)
def by_sorts(made: Global, count: int) -> bool:
    """Return whether the sorts of `count` arguments, and of what they hold, decide how a call is
    judged."""
    row = ROWS.get((made.module, made.name))
    if row is None or made.name in _SIZED or (made.module, made.name) in _SPECIAL:
        return False
    signatures = (signature[:count] for signature in row.takes)
    words = flatten(_alternatives(word.lstrip("?*")) for word in flatten(signatures))
    return all(word in WORDS for word in words)


def _is_empty(kwargs: Node) -> bool:
    return kwargs is None or (isinstance(kwargs, dict) and not kwargs)


def _is_handed(view: View, value: Node) -> bool:
    """Return whether nothing in a value answers in the file's words when somebody looks inside."""
    sort = view.sort(value)
    if sort & table.ASKED:
        return False
    return not sort & table.LITERALS or not view.inside(value, True) & table.ASKED


def _outside(view: View, made: Global, args: tuple[Node, ...], new: bool, kwargs: Node) -> Judged:
    """Judge a call of what has no row: a class through ``__new__``, an enumeration, anything
    else."""
    if (made.module, made.name) in table.ENUMS and not new:
        plain = len(args) == 1 and view.sort(args[0]) & table.SCALARS
        return Judged(CLASS if plain else UNSURE, table.INERT)
    kind = class_kind(made) if new else _function_kind(made)
    if kind == CLASS:
        listed = (made.module, made.name) in CLASSES
        known = all(map(partial(_is_handed if listed else _is_value, view), args))
        kind = CLASS if known and _are_keywords(view, kwargs) else UNSURE
    return Judged(kind, table.OBJECT)


def _is_value(view: View, value: Node) -> bool:
    return view.sort(value) != table.UNKNOWN_SORT


def _are_keywords(view: View, kwargs: Node) -> bool:
    """Return whether it is a dict of texts: anything else would be asked for its keys."""
    if kwargs is None:
        return True
    pairs = view.pairs(kwargs) if view.sort(kwargs) == table.DICT else None
    return pairs is not None and all(
        isinstance(key, str) and _is_value(view, value) for key, value in pairs
    )


def _function_kind(made: Global) -> str:
    return HARMFUL if top_of(made) in STANDARD | TORCH else UNKNOWN


def _class_argument(row: AllowedCall, args: tuple[Node, ...]) -> str:
    """Return the kind of a call that makes an object of the class that is its first argument, if it
    does."""
    if row.takes[0][:1] != ("class",):
        return HARMLESS
    return HARMLESS if (args[0].module, args[0].name) in ROWS else CLASS


class _Signature(NamedTuple):
    needed: int
    words: tuple[str, ...]
    rest: str | None


@cache
def _signature(words: tuple[str, ...]) -> _Signature:
    """Return the words of a row, without their marks."""
    rest = words[-1][1:] if words and words[-1].startswith("*") else None
    fixed = words if rest is None else words[:-1]
    needed = sum(not word.startswith("?") for word in fixed)
    return _Signature(needed, tuple(word.lstrip("?") for word in fixed), rest)


def _takes(
    view: View, row: AllowedCall, signature: tuple[str, ...], args: tuple[Node, ...]
) -> bool:
    """Return whether arguments are what the words of a signature stand for."""
    needed, words, rest = _signature(signature)
    if len(args) < needed or (len(args) > len(words) and rest is None):
        return False
    words += (rest or "",) * (len(args) - len(words))
    for word, arg in zip(words, args, strict=False):
        if not fits_word(view, word, arg):
            return False
        if not row.keeps and word not in _STATES and not _is_handed(view, arg):
            return False
    return True


_STATES = ("attributes", "fields")  # what they hold is only kept


@cache
def _alternatives(words: str) -> tuple[str, ...]:
    return tuple(words.split("/"))


def fits_word(view: View, words: str, value: Node) -> bool:
    """Return whether a value is one of those that words of the allowlist stand for."""
    return any(_is_one(view, word, value) for word in _alternatives(words))


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
    """Return whether a defaultdict may call it for each missing key: it makes an empty value."""
    return value is None or (
        isinstance(value, Global) and (value.module, value.name) in table.EMPTY
    )


def _keys(view: View, state: Node) -> list[str] | None:
    """Return the names of the attributes that a state sets, None if these are not known."""
    if state is None:
        return []
    if isinstance(state, tuple):
        parts = [_keys(view, each) for each in state if not isinstance(each, tuple)]
        return None if len(state) != 2 or len(parts) != 2 else _joined(parts)
    pairs = view.pairs(state) if view.sort(state) == table.DICT else None
    if pairs is None or not all(isinstance(key, str) for key, _ in pairs):
        return None
    return [key for key, _ in pairs]


def _joined(parts: list[list[str] | None]) -> list[str] | None:
    return None if None in parts else list(flatten(part or () for part in parts))


def _is_fields(view: View, state: Node) -> bool:
    """Return whether it sets attributes of ordinary names, as a literal."""
    keys = _keys(view, state)
    return keys is not None and not any(map(_is_special, keys))


def _is_attributes(view: View, state: Node) -> bool:
    """Return whether it sets attributes of a tensor that its rebuilding does not call."""
    keys = _keys(view, state) if view.sort(state) != table.MAPPING else []
    return keys is not None and not any(_is_special(key) or key in _CALLED for key in keys)


def _is_mapping_fields(view: View, state: Node) -> bool:
    keys = _keys(view, state)
    return keys is not None and not any(
        _is_special(key) or hasattr(OrderedDict, key) for key in keys
    )


def _is_special(key: str) -> bool:
    return key.startswith("__") and key.endswith("__")


_CALLED = ("as_subclass", "clone", "data", "detach", "requires_grad_", "to")  # of a tensor


def _is_partial_state(view: View, state: Node) -> bool:
    """Return whether it is (function, arguments, keywords, attributes) as partial writes it."""
    if not isinstance(state, tuple) or len(state) != 4 or not isinstance(state[1], tuple):
        return False
    named = view.sort(state[0]) & (table.NAME | table.BAG)
    return bool(named) and all(view.sort(each) & (table.NONE | table.DICT) for each in state[2:])


def _is_quantizer(view: View, value: Node) -> bool:
    """Return whether it is (scheme, number or tensor...) of a quantized tensor."""
    known = isinstance(value, tuple) and value and isinstance(value[0], Global)
    numbers = table.FLOAT | table.INT | table.TENSOR
    return bool(known) and all(view.sort(each) & numbers for each in value[1:])


_DECIMAL = re.compile(
    r"[+-]?[0-9.]{0,1000}([eE][+-]?[0-9]{1,19})?|[+-]?s?NaN[0-9]{0,99}|[+-]?Infinity"
)
_ZONE = re.compile(r"[A-Za-z][\w+-]{0,99}(/[A-Za-z][\w+-]{0,99}){0,3}", re.ASCII)  # Asia/Tokyo
_FRACTION = re.compile(r"[+-]?[0-9]{1,1000}(/[0-9]{1,1000})?")


def _is_text(pattern: re.Pattern[str]) -> Callable[[View, Node], bool]:
    return lambda view, value: isinstance(value, str) and pattern.fullmatch(value) is not None


def _are_bits(view: View, value: Node) -> bool:
    """Return whether it is what torch keeps of a conjugated or negated tensor: texts and flags.

    For anything else torch makes a message of the tensor, which imports more of torch.
    """
    pairs = [] if value is None else view.pairs(value)
    return pairs is not None and all(
        isinstance(key, str) and isinstance(flag, bool) for key, flag in pairs
    )


def _is_empty_shape(view: View, value: Node) -> bool:
    """Return whether a value is ``(0,)``; False equals 0."""
    return isinstance(value, tuple) and value == (0,) and type(value[0]) is int


_PREDICATES: dict[str, Callable[[View, Node], bool]] = {
    "attributes": _is_attributes,
    "bits": _are_bits,
    "byte": lambda view, value: value in ("b", b"b") if isinstance(value, (str, bytes)) else False,
    "class": lambda view, value: isinstance(value, Global) and _is_tensor_class(value),
    "decimal": _is_text(_DECIMAL),
    "empty": _is_empty_shape,
    "factory": _is_factory,
    "fields": _is_fields,
    "fraction": _is_text(_FRACTION),
    "latin1": lambda view, value: isinstance(value, str) and value in _LATIN1,
    "mapping_fields": _is_mapping_fields,
    "optional_int": lambda view, value: bool(view.sort(value) & (table.NONE | table.INT)),
    "partial_state": _is_partial_state,
    "quantizer": _is_quantizer,
    "type_text": lambda view, value: numpy_types.named(value) is not None,
    "zone": _is_text(_ZONE),
}  # fmt: skip


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
    known = isinstance(args[1], Global) and _is_tensor_class(args[1])
    known = known and bool(inner.sort & (table.TENSOR | table.DRESSED))
    known = known and fits_word(view, "attributes", args[3] if len(args) > 3 else None)
    own = ACCEPTED if name in WEIGHTS_ONLY else HARMLESS
    kinds = [own, inner.kind, CLASS if known and (args[1].module, args[1].name) in CLASSES else own]
    if not known:
        kinds.append(UNSURE)
    return Judged(max(kinds, key=LEVELS.index), table.DRESSED)


def _new_call(view: View, name: Name, args: tuple[Node, ...]) -> Judged:
    """copyreg.__newobj__(class, argument...), __newobj_ex__(class, arguments, keywords)."""
    if not args:
        return Judged(HARMFUL, table.UNKNOWN_SORT)
    if name[1] == "__newobj__":
        return judge_call(view, args[0], args[1:], new=True)
    kwargs = args[2] if len(args) > 2 else None
    return judge_call(view, args[0], args[1] if len(args) > 1 else None, new=True, kwargs=kwargs)


def _reconstruct(view: View, name: Name, args: tuple[Node, ...]) -> Judged:
    """copyreg._reconstructor(class, object, None): an empty object, as protocols 0 and 1 write it.

    It is what NEWOBJ does to the class. Another base would be handed the third argument.
    """
    if len(args) != 3:
        return Judged(HARMFUL, table.UNKNOWN_SORT)
    judged = judge_call(view, args[0], (), new=True)
    if args[1] == Global("builtins", "object") and view.sort(args[2]) == table.NONE:
        return judged
    return Judged(max(judged.kind, UNSURE, key=LEVELS.index), table.UNKNOWN_SORT)


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


def is_unfinished(made: Node) -> bool:
    """Return whether an object of this class may not be touched before its state is set."""
    return isinstance(made, Global) and (made.module, made.name) in UNFINISHED


# Steps after a call


def judge_step(view: View, made: Node, step: str, value: Node, before: Judged) -> Judged:
    """Judge what follows a call of `made`, judged before: build, append, set or add."""
    if not isinstance(made, Global) or before.sort == table.UNKNOWN_SORT:
        return before._replace(kind=UNSURE)
    row = ROWS.get((made.module, made.name))
    if row is None:
        outside = _object_step if before.sort == table.OBJECT else _special_step
        return before._replace(kind=outside(view, made, step, value))
    if step != "build":
        sort = _sort_with(view, row, value)
        return before._replace(kind=ACCEPTED if step in row.fill else UNSURE, sort=sort)
    return _built(view, row, value, before)


def _sort_with(view: View, row: AllowedCall, held: Iterable[Node]) -> int:
    """Return the sort of what a row gives when it holds these values.

    A deque or a defaultdict whose values may answer in the file's words is no inert value.
    """
    if row.gives != table.INERT or all(_is_handed(view, each) for each in held):
        return row.gives
    return table.BAG


def _built(view: View, row: AllowedCall, state: Node, before: Judged) -> Judged:
    """Judge the state of what a row has made."""
    if row.state == "dtype_state":
        type_ = numpy_types.built(view, before.type, state)
        if type_ is None or not _is_handed(view, state):
            return before._replace(kind=UNSURE)
        return Judged(ACCEPTED, table.INERT if type_.objects else table.NUMPY_DTYPE, type_)
    if row.state in ("array_state", "masked_state"):
        return (
            before._replace(kind=UNSURE, sort=table.BAG)
            if ((sort := _array_sort(view, row.state, state)) is None)
            else Judged(ACCEPTED, sort)
        )
    known = bool(row.state) and fits_word(view, row.state, state)
    if row.gives != table.BAG and row.state not in _KEPT:
        known = known and _is_handed(view, state)
    dressed = row.gives == table.TENSOR and row.state == "attributes" and state is not None
    return before._replace(
        kind=ACCEPTED if known else UNSURE, sort=table.DRESSED if dressed else before.sort
    )


_KEPT = (*_STATES, "mapping_fields")


def _array_sort(view: View, word: str, state: Node) -> int | None:
    """Return the sort of an array with this state; None if numpy would not write it."""
    masked = word == "masked_state"
    if masked and not (isinstance(state, tuple) and len(state) == 7 and _is_mask(view, state)):
        return None
    type_ = numpy_types.array(view, state[:5] if masked else state)
    if type_ is None or (masked and type_.objects):
        return None
    return table.BAG if type_.objects else table.ARRAY


def _is_mask(view: View, state: tuple[Node, ...]) -> bool:
    return view.is_bytes(state[5]) and bool(view.sort(state[6]) & (table.SCALARS | table.ARRAY))


def _object_step(view: View, made: Global, step: str, value: Node) -> str:
    """Judge a step of an object of a class outside the rows."""
    listed = (made.module, made.name) in CLASSES
    if (made.module, made.name) in OPTIMIZERS:
        return CLASS if step == "build" and fits_word(view, "optimizer", value) else UNSURE
    if step != "build":
        return UNSURE if listed and (made.module, made.name) not in FILLED else CLASS
    word = "scalar/literal" if listed else "state"
    return CLASS if fits_word(view, word, value) else UNSURE


def _special_step(view: View, made: Global, step: str, value: Node) -> str:
    """Judge a step of what one of the special calls made: a tensor that gets attributes, an
    object."""
    if (made.module, made.name) in table.FROM_TYPE and step == "build":
        return CLASS if fits_word(view, "attributes", value) else UNSURE
    return UNSURE


def target_of(made: Node, args: Node) -> Node:
    """Return the name that decides which steps may follow a call: of the class that it makes an
    object of."""
    if isinstance(made, Global) and isinstance(args, tuple) and args:
        name = (made.module, made.name)
        if name in table.NEW_CALLS or name == table.RECONSTRUCT:
            return args[0]
    return made
