"""Judge the names, calls and states of a pickle by the allowlist. Calls nothing.

Nothing that a file holds may be a callable of the file's choosing: a name is a value only where the
allowlist has it, and a call has a row, whose shapes its arguments and its state fit. So whatever
Python's, torch's or numpy's code does with a value on the way, it finds no code of the file to run.
Two callers: the trace of a pickle that is scanned, and the writer of a tree.
"""

from __future__ import annotations

import re
import sys
from _compat_pickle import IMPORT_MAPPING
from functools import cache, lru_cache
from typing import Any, NamedTuple

from ckptkit.core.tree import Global, Node
from ckptkit.pickles import numpy_types, shapes
from ckptkit.pickles.allowlisted import Allowlist, Name, load, weights_only
from ckptkit.pickles.numpy_types import NumpyType
from ckptkit.pickles.shapes import (
    ANY,
    ARRAY,
    CONSTANT,
    CONTAINERS,
    DEFAULTS,
    DICT,
    DRESSED,
    FUNCTION,
    KEYS,
    LIST,
    MAPPING,
    NAME,
    NPDTYPE,
    OBJECT,
    OTHER,
    SCALAR,
    STORAGE,
    TENSOR,
    TEXT,
    TUPLE,
    UNKNOWN,
    Shape,
    View,
    pairs,
)

# The effect of a step on the process that loads the file, from harmless to harmful.
ACCEPTED = "accepted"  # torch.load(weights_only=True) makes it
HARMLESS = "harmless"  # in the allowlist, with arguments that its row takes: it makes a value
CLASS = "class"  # an object of a class that is not in it: that class alone decides
LOADS = "loads"  # a file inside: what that would do
UNSURE = "unsure"  # not proved: arguments or a state that no row takes
CALLED = "unknown"  # a function of another package, or a class by its constructor
HARMFUL = "harmful"
LEVELS = (ACCEPTED, HARMLESS, CLASS, LOADS, UNSURE, CALLED, HARMFUL)
WRITTEN = (ACCEPTED, HARMLESS, CLASS)  # what may be written back

# Whose calls are harmful unless they are in the allowlist: the standard libraries of Python 3.11 to
# 3.14, of Python 2 (protocol 2 maps its names to today's), and of the versions in between; and
# those whose files these are.
STANDARD = sys.stdlib_module_names | {name for name in IMPORT_MAPPING if "." not in name} | {
    "_android_support", "_apple_support", "_ast_unparse", "_bootsubprocess", "_colorize", "_crypt",
    "_hmac", "_interpchannels", "_interpqueues", "_interpreters", "_ios_support", "_msi",
    "_opcode_metadata", "_py_warnings", "_pydatetime", "_pylong", "_pyrepl", "_remote_debugging",
    "_sha2", "_sha256", "_sha512", "_suggestions", "_sysconfig", "_types", "_wmi",
    "_xxinterpchannels", "_xxsubinterpreters", "_zstd", "aifc", "annotationlib", "asynchat",
    "asyncore", "audioop", "cgi", "cgitb", "chunk", "compression", "crypt", "distutils",
    "exceptions", "imghdr", "imp", "lib2to3", "mailcap", "msilib", "nis", "nntplib", "os2emxpath",
    "ossaudiodev", "pipes", "popen2", "sets", "smtpd", "sndhdr", "spwd", "sunau", "telnetlib",
    "test", "uu", "xdrlib",
}  # fmt: skip
TORCH = {"functorch", "numpy", "torch", "torchgen"}
_SCRIPT = "__torch__"  # classes of a TorchScript archive, which has their code in it

# Calls that call one of their arguments, or name something inside it.
FROM_TYPE: frozenset[Name] = frozenset((
    ("torch._tensor", "_rebuild_from_type_v2"), ("torch._tensor", "_rebuild_from_type"),
    ("torch.tensor", "_rebuild_from_type"),
))  # fmt: skip
_NEW_CALLS: frozenset[Name] = frozenset((("copyreg", "__newobj__"), ("copyreg", "__newobj_ex__")))
_RECONSTRUCT: Name = ("copyreg", "_reconstructor")  # (class, base, state): protocols 0 and 1
_GETATTR: Name = ("builtins", "getattr")  # how protocols below 4 name what is inside a class
_LOAD: Name = ("torch.storage", "_load_from_bytes")  # a storage that torch.save did not pickle
_SPECIAL = FROM_TYPE | _NEW_CALLS | {_RECONSTRUCT, _GETATTR, _LOAD}
# Classes of C++ whose memory is not set up before their state is: nothing may come between.
_PLACEMENTS = "torch.distributed.tensor.placement_types"
_UNFINISHED = frozenset((_PLACEMENTS, name) for name in ("Partial", "Shard", "_StridedShard"))


class Judged(NamedTuple):
    """A call or a step: its kind, the sort of what it makes, and the type where that is a dtype."""

    kind: str
    sort: int
    type: NumpyType | None = None


# Names


def key_of(name: Global) -> Name:
    return name.module, name.name


def top_of(name: Global) -> str:
    return name.module.partition(".")[0]


@lru_cache(maxsize=4096)
def name_sort(name: Global) -> int:
    """Return the sort of a class or function that is held as a value."""
    key = key_of(name)
    outer, _, last = name.name.rpartition(".")
    if key in allowlist().constants or (
        (name.module, outer) in allowlist().enums and not _special(last)
    ):
        return CONSTANT
    return FUNCTION if key in allowlist().functions else NAME


def refused_by_weights_only(name: Global) -> bool:
    """Return whether `torch.load(weights_only=True)` refuses a file that names this."""
    return key_of(name) not in weights_only()


def is_known(name: Global) -> bool:
    """Return whether the allowlist has this name, to be called or held."""
    key = key_of(name)
    row = allowlist().rows.get(key)
    return (
        row is not None or key in _SPECIAL or key in allowlist().enums or name_sort(name) != NAME
    ) or any(key in names for names in allowlist().sets.values())


def out_of_place(name: Global) -> str | None:
    """Return why no checkpoint may hold this name as a value; None if one may."""
    if name_sort(name) != NAME or top_of(name) == _SCRIPT:
        return None
    if is_own(name):
        return "is code of your own"
    if top_of(name) in STANDARD | TORCH:
        return "is not in the allowlist"
    return "is not the name of a class"


@lru_cache(maxsize=4096)
def is_own(name: Global) -> bool:
    """Return whether this may be a class or function of other code than Python's and torch's."""
    if top_of(name) == _SCRIPT:
        return True
    *outer, last = name.name.split(".")
    parts = (*name.module.split("."), *outer, last)
    if not all(map(str.isidentifier, parts)) or any(map(_special, (*outer, last))):
        return False
    if not all(each.lstrip("_")[:1].isupper() for each in outer):
        return False
    return top_of(name) not in STANDARD and top_of(name) not in TORCH


def _special(part: str) -> bool:
    return part.startswith("__") and part.endswith("__")


def is_guarded(name: str) -> bool:
    """Return whether a full name is of Python, torch or numpy, which cannot be trusted as a whole;
    or no name at all."""
    top = name.partition(".")[0]
    return top in STANDARD or top in TORCH or not top.isidentifier()


def is_foreign(name: Global) -> bool:
    """Return whether no checkpoint names this: of Python itself, or a function of torch or numpy,
    and not listed."""
    last = name.name.rpartition(".")[2]
    function = top_of(name) in TORCH and not last.lstrip("_")[:1].isupper()
    return not is_known(name) and (function or top_of(name) in STANDARD)


# Calls


def judge_call(
    view: View, made: Node, args: Node, *, new: bool = False, kwargs: Node = None
) -> Judged:
    """Judge a call of `made` with a tuple of arguments; `new`: through ``__new__``."""
    if not isinstance(made, Global) or not isinstance(args, tuple):
        return Judged(HARMFUL, UNKNOWN)
    name = key_of(made)
    if name in _SPECIAL and not new:
        return _special_call(view, name, args)
    row = allowlist().rows.get(name)
    if row is None or not (row.new if new else row.called):
        return _outside(view, made, args, new, kwargs)
    if not any(fits(view, args) for fits in row.takes) or not _is_empty(view, kwargs):
        return Judged(UNSURE, row.gives)
    kind = ACCEPTED if name in weights_only() else HARMLESS
    if row.of_class and not _is_listed_class(args[0]):
        kind = CLASS  # an object of the class that is its first argument
    return Judged(kind, row.gives, numpy_types.named(args[0]) if row.gives == NPDTYPE else None)


def by_sorts(made: Global) -> bool:
    """Return whether the sorts of its arguments, and of the items of tuples among them, decide how
    a call is judged."""
    row = allowlist().rows.get(key_of(made))
    return row is not None and row.called and row.by_sorts and key_of(made) not in _SPECIAL


def is_final(made: Global) -> bool:
    """Return whether nothing may change what a call of this name has made."""
    row = allowlist().rows[key_of(made)]
    return row.state is None and not row.fill


def consumed(made: Node, args: Node) -> tuple[Global, ...]:
    """Return the names among the arguments that the row of a call takes: these are no values."""
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
    """Return what a container of this sort holds that a call makes of `args`; None if not known."""
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


def _is_empty(view: View, kwargs: Node) -> bool:
    return kwargs is None or pairs(view, kwargs) == []


def _outside(view: View, made: Global, args: tuple[Node, ...], new: bool, kwargs: Node) -> Judged:
    """Judge a call of what has no row: a class through ``__new__``, an enumeration, anything
    else."""
    if key_of(made) in allowlist().enums and not new:
        plain = len(args) == 1 and view.sort(args[0]) & SCALAR
        return Judged(HARMLESS if plain else UNSURE, OTHER)
    if not new:
        return Judged(HARMFUL if top_of(made) in STANDARD | TORCH else CALLED, OBJECT)
    if not is_own(made):
        return Judged(HARMFUL if top_of(made) in STANDARD else UNSURE, OBJECT)
    given = [*args]
    if kwargs is not None:
        named = pairs(view, kwargs)
        if named is None or not all(isinstance(key, str) for key, _ in named):
            return Judged(UNSURE, OBJECT)
        given += [value for _, value in named]
    # A class that makes something of a text may evaluate it, as sympy does.
    return Judged(UNSURE if any(_may_be_code(view, each) for each in given) else CLASS, OBJECT)


def _may_be_code(view: View, value: Node) -> bool:
    return not shapes.deep(ANY & ~(TEXT | shapes.BYTES), view, value)


def _special_call(view: View, name: Name, args: tuple[Node, ...]) -> Judged:
    """Judge a call that calls an argument, or names something inside it."""
    wrong = Judged(HARMFUL, UNKNOWN)
    if name == _LOAD:  # _load_from_bytes(bytes): a file of its own, judged as one
        return Judged(LOADS, STORAGE) if len(args) == 1 else wrong
    if name == _GETATTR:  # getattr(Class, "Inner"): the name is judged where it is used
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
    if name == _RECONSTRUCT:  # what NEWOBJ does, unless the base is another or the state is given
        judged = judge_call(view, args[0], (), new=True)
        if args[1:] == (Global("builtins", "object"), None):
            return judged
        return Judged(max(judged.kind, UNSURE, key=LEVELS.index), UNKNOWN)
    return _from_type(view, name, args)


def _from_type(view: View, name: Name, args: tuple[Node, ...]) -> Judged:
    """_rebuild_from_type_v2(function, class, arguments, state): calls the first with the third."""
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
    """Return whether an object of this class may not be touched before its state is set."""
    return isinstance(made, Global) and key_of(made) in _UNFINISHED


def target_of(made: Node, args: Node) -> Node:
    """Return the name that decides which steps may follow a call: of the class that it makes an
    object of."""
    name = key_of(made) if isinstance(made, Global) else None
    is_maker = name in _NEW_CALLS or name == _RECONSTRUCT
    return args[0] if is_maker and isinstance(args, tuple) and args else made


# Steps after a call


def judge_step(view: View, made: Node, step: str, value: Node, before: Judged) -> Judged:
    """Judge what follows a call of `made`, judged before: build, append, set or add."""
    unsure = before._replace(kind=UNSURE)
    if not isinstance(made, Global) or before.sort == UNKNOWN:
        return unsure
    row = allowlist().rows.get(key_of(made))
    if row is None:
        if key_of(made) in FROM_TYPE and step == "build":
            known = allowlist().shapes["attributes"](view, value)
        else:  # of a class outside: its own code takes items and what fits `own_state`
            known = before.sort == OBJECT and (
                step != "build" or allowlist().shapes["own_state"](view, value)
            )
        return before._replace(kind=CLASS) if known else unsure
    if step != "build":
        return before._replace(kind=ACCEPTED) if step in row.fill else unsure
    if row.state == "dtype_state":
        type_ = numpy_types.built(view, before.type, value)
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
    """Return the sort of an array with this state; None if numpy would not write it."""
    masked = word == "masked_state"
    if masked:
        if (
            not isinstance(state, tuple)
            or len(state) != 7
            or not numpy_types.is_bytes(view, state[5])
        ):
            return None
        if not view.sort(state[6]) & (SCALAR | ARRAY):
            return None
        state = state[:5]
    type_ = numpy_types.array(view, state)
    if type_ is None or (masked and type_.objects):
        return None
    return OTHER if type_.objects else ARRAY


def is_key(view: View, value: Node) -> bool:
    """Return whether Python may hash and compare a value: no code of the file answers."""
    return shapes.deep(KEYS, view, value)


# Tests: the shapes that are functions


def _keys(view: View, state: Node) -> list[str] | None:
    """Return the names of the attributes that a state sets, None if these are not known."""
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
    """Return whether it is a plain value, a tensor or a container; attributes have ordinary names.

    A state that is an object would answer in its own code when it is unpacked.
    """
    if not view.sort(state) & (SCALAR | CONTAINERS | TENSOR | DRESSED | ARRAY | OTHER | STORAGE):
        return False
    keys = _keys(view, state)
    return keys is None or not any(map(_special, keys))


def is_plain_fields(view: View, state: Node) -> bool:
    """Return whether it is a dict of attributes with ordinary names, and nothing in slots."""
    keys = None if isinstance(state, tuple) and state[1:] != (None,) else _keys(view, state)
    return keys is not None and not any(map(_special, keys))


def _attributes(view: View, state: Node) -> bool:
    """Return whether it sets attributes of a tensor that are no methods of torch.Tensor."""
    keys = _keys(view, state)
    if keys is None:
        return False
    return not any(_special(key) or key in allowlist().tensor_attributes for key in keys)


def _quantizer(view: View, value: Node) -> bool:
    """Return whether it is (scheme, number or tensor...) of a quantized tensor."""
    if not isinstance(value, tuple) or not value or view.sort(value[0]) != CONSTANT:
        return False
    return all(view.sort(each) & (shapes.FLOAT | shapes.INT | TENSOR) for each in value[1:])


def _text(pattern: str) -> Shape:
    compiled = re.compile(pattern, re.ASCII)
    return lambda view, value: isinstance(value, str) and compiled.fullmatch(value) is not None


_TESTS: dict[str, Shape] = {
    "attributes": _attributes,
    "byte": lambda view, value: isinstance(value, (str, bytes)) and value in ("b", b"b"),
    "decimal": _text(
        r"[+-]?[0-9.]{0,1000}([eE][+-]?[0-9]{1,19})?|[+-]?s?NaN[0-9]{0,99}|[+-]?Infinity"
    ),
    # False equals 0.
    "empty_shape": lambda view, value: value == (0,) and type(value[0]) is int,
    "fraction": _text(r"[+-]?[0-9]{1,1000}(/[0-9]{1,1000})?"),
    "latin1": _text("latin-?1"),
    "own_state": _own_state,
    "plain_fields": is_plain_fields,
    "quantizer": _quantizer,
    "tensor_class": _is_tensor_class,
    "type_text": lambda view, value: numpy_types.named(value) is not None,
    "zone": _text(r"[A-Za-z][\w+-]{0,99}(/[A-Za-z][\w+-]{0,99}){0,3}"),  # Asia/Tokyo
    **dict.fromkeys(("dtype_state", "array_state", "masked_state"), lambda view, value: False),
}  # fmt: skip


@cache
def allowlist() -> Allowlist:
    """Return the allowlist, read when the first name or call is judged."""
    return load(_TESTS)
