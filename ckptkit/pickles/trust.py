"""The one judgement of calls: what loading a file would run, and what may be written back. Nothing is ever called.

A value is plain, or inert (a row of :mod:`ckptkit.allowlist` makes it of arguments that the row takes), or an object of
a class whose state is plain or inert, or not known. `judge_call` and `judge_step` say which of the `KINDS` one step of
a machine is, from the sorts of the values that it takes. The tracer asks them for each opcode of a pickle that is
scanned, the writers for each object of a tree: there is no second table and no second opinion.
"""

from __future__ import annotations

import sys
from _compat_pickle import IMPORT_MAPPING
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple, Protocol

from ckptkit.allowlist_classes import CLASSES, FILLED, KEPT, PACKAGES
from ckptkit.core.errors import UnsafeGlobalError
from ckptkit.core.limits import LIMITS
from ckptkit.core.tensor import Tensor, TypedStorage
from ckptkit.core.tree import Blob, ByteString, Global, Node, Object, OrderedDict, Pairs, SetNode
from ckptkit.pickles import allowlist as table
from ckptkit.pickles.allowlist import KINDS as WORDS
from ckptkit.pickles.allowlist import ROWS, WEIGHTS_ONLY, Kind, Name, Row

__all__ = ["WEIGHTS_ONLY"]

# What a step is to whoever loads the file, from harmless to not.
ACCEPTED = "accepted"  # torch.load(weights_only=True) makes it
HARMLESS = "harmless"  # in the allowlist, with arguments that its row takes: it makes a value
CLASS = "class"  # an object of a class, through __new__: its package's code sets it up
LOADS = "loads"  # a file inside: what that would do
ALLOCATES = "allocates"  # memory, as much as the file says
UNSURE = "unsure"  # not proved: arguments that the row does not take, an installed package's class
UNKNOWN = "unknown"  # somebody's function, or a class through __init__, with arguments of the file's choosing
HARMFUL = "harmful"
LEVELS = (ACCEPTED, HARMLESS, CLASS, LOADS, ALLOCATES, UNSURE, UNKNOWN, HARMFUL)
WRITTEN = (ACCEPTED, HARMLESS, CLASS)  # what may be written back

# Whose calls are harmful unless they are in the allowlist: the standard libraries of this Python, of Python 2 (protocol
# 2 maps its names to today's), and of the versions in between; and those whose files these are.
_STANDARD = sys.stdlib_module_names | {name for name in IMPORT_MAPPING if "." not in name} | {
    "aifc", "asynchat", "asyncore", "audioop", "cgi", "cgitb", "chunk", "crypt", "distutils", "exceptions", "imghdr",
    "imp", "lib2to3", "mailcap", "msilib", "nis", "nntplib", "os2emxpath", "ossaudiodev", "pipes", "popen2", "sets",
    "smtpd", "sndhdr", "spwd", "sunau", "telnetlib", "test", "uu", "xdrlib",
}  # fmt: skip
_TORCH = {"functorch", "numpy", "torch", "torchgen"}
_SCRIPT = "__torch__"  # classes of a TorchScript archive, which has their code in it
_LATIN1 = ("latin1", "latin-1")
_SIZED = ("bytearray", "bytes", "list", "tuple", "set", "frozenset", "deque", "Counter")
_GENERIC = table.ARGUMENTS["generic"]


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


# Names


def refused_by_weights_only(name: Global) -> bool:
    """Return whether `torch.load(weights_only=True)` refuses a file that names this."""
    return (name.module, name.name) not in WEIGHTS_ONLY


def is_known(name: Global) -> bool:
    """Return whether the name may be called: accepted by weights_only, in the allowlist, or what loads a file."""
    key = (name.module, name.name)
    return key in ROWS or key in WEIGHTS_ONLY or key in table.SPECIAL


def out_of_place(name: Global) -> str | None:
    """Return why a checkpoint may not hold this name as a value, even if nothing calls it; None if it may."""
    if _is_listed(name) or _is_own(name):
        return None
    if _top(name) in _STANDARD | _TORCH:
        return "is not in the allowlist"
    if _is_package(_top(name)):
        return "belongs to an installed package and is not in the allowlist"
    return "is not the name of a class"


def describe(callable_: Node) -> str:
    """Return the name of the class or function that an Object is made by, for messages."""
    return str(callable_) if isinstance(callable_, Global) else "the result of another call"


def _top(name: Global) -> str:
    return name.module.partition(".")[0]


def _is_listed(name: Global) -> bool:
    key = (name.module, name.name)
    if key in WEIGHTS_ONLY or key in KEPT or key in CLASSES or key in table.ENUMS:
        return True
    if key in ROWS and key not in table.CALLED_ONLY:
        return True
    if any(key in names for names in table.ARGUMENTS.values()):
        return True
    outer, _, _ = name.name.rpartition(".")
    return (name.module, outer) in table.ENUMS or (name.module == "torch" and key[1] in _DTYPES)


_DTYPES = frozenset(table._DTYPES.split() + ["strided", "sparse_coo", "sparse_csr"])


def _is_own(name: Global) -> bool:
    """Return whether this may be a class or function of the user's own code, by its spelling and its package."""
    top = _top(name)
    if top == _SCRIPT:
        return True
    *outer, last = name.name.split(".")
    parts = (*name.module.split("."), *outer, last)
    if not all(map(str.isidentifier, parts)) or any(map(_is_special, (*outer, last))):
        return False
    if not all(each.lstrip("_")[:1].isupper() for each in outer):
        return False
    return top not in _STANDARD and top not in _TORCH and not _is_package(top)


def _is_special(part: str) -> bool:
    return part.startswith("__") and part.endswith("__")


@lru_cache(maxsize=4096)
def _is_package(top: str) -> bool:
    """Return whether code of this name is a package that people install, or is installed here. Imports nothing."""
    if top in PACKAGES or not top.isidentifier():
        return True
    from importlib.util import find_spec

    try:
        spec = find_spec(top)
    except (ImportError, ValueError, AttributeError):
        return False
    if spec is None:
        return False
    places = [spec.origin or "", *(spec.submodule_search_locations or ())]
    return any("site-packages" in place or "dist-packages" in place for place in places)


# Calls


def judge_call(view: View, made: Node, args: Node, *, new: bool = False, kwargs: Node = None) -> Judged:
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
    if _fills_memory(view, name, args) or (row.gives == table.TENSOR and row.takes == ((),) and args):
        return Judged(ALLOCATES, row.gives)
    if not any(_takes(view, signature, args) for signature in row.takes) or not _is_empty(kwargs):
        return Judged(UNSURE, row.gives)
    return Judged(ACCEPTED if name in WEIGHTS_ONLY else _class_argument(row, args), row.gives)


def _is_empty(kwargs: Node) -> bool:
    return kwargs is None or (isinstance(kwargs, dict) and not kwargs)


def _is_storage(row: Row) -> bool:
    return row.takes == ((),) and row.gives == table.TENSOR


def _outside(view: View, made: Global, args: tuple[Node, ...], new: bool) -> Judged:
    """Judge a call of what has no row: a class through ``__new__``, an enumeration, anything else."""
    if (made.module, made.name) in table.ENUMS and not new:
        plain = len(args) == 1 and view.sort(args[0]) & table.SCALARS
        return Judged(CLASS if plain else UNSURE, table.INERT)
    kind = class_kind(made) if new else _function_kind(made)
    if kind == CLASS and any(view.sort(each) == table.UNKNOWN_SORT for each in args):
        kind = UNSURE
    return Judged(kind, table.OBJECT)


def _function_kind(made: Global) -> str:
    return HARMFUL if _top(made) in _STANDARD | _TORCH else UNKNOWN


def class_kind(name: Global) -> str:
    """Return the kind of making an empty object of a class: one of CLASS, UNSURE, HARMFUL."""
    if (name.module, name.name) in CLASSES or _is_own(name):
        return CLASS
    return HARMFUL if _top(name) in _STANDARD else UNSURE


def _class_argument(row: Row, args: tuple[Node, ...]) -> str:
    """Return the kind of a call that makes an object of the class that is its first argument, if it does."""
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
    return all(_is(view, word.lstrip("?"), arg) for word, arg in zip(words, args, strict=False))


def _is(view: View, words: str, value: Node) -> bool:
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
    """Return whether it is what a defaultdict may make its values by: called by whoever asks for one."""
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
    known = known and _is(view, "fields", args[3] if len(args) > 3 else None)
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
    return judged if _is(view, "scalar/literal", args[2]) else Judged(UNSURE, judged.sort)


def _is_plain_base(base: Node) -> bool:
    return isinstance(base, Global) and base.module == "builtins" and base.name in (
        "object", "list", "dict", "tuple", "set", "frozenset", "str", "bytes", "int", "float", "complex",
    )  # fmt: skip


def _getattr(view: View, name: Name, args: tuple[Node, ...]) -> Judged:
    """getattr(Class, "Inner"): the name that it stands for is judged where it is used."""
    named = len(args) == 2 and isinstance(args[0], Global) and isinstance(args[1], str) and args[1].isidentifier()
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
    """Judge what follows a call of `made` that gave a value of this sort: build, append, set or add."""
    if not isinstance(made, Global) or sort == table.UNKNOWN_SORT:
        return UNSURE
    row = ROWS.get((made.module, made.name))
    if sort == table.OBJECT:
        return _object_step(view, made, step, value)
    if row is None:
        return _special_step(view, made, step, value)
    if step == "build":
        return ACCEPTED if row.state and _is(view, row.state, value) else UNSURE
    return ACCEPTED if step in row.fill else UNSURE


def _object_step(view: View, made: Global, step: str, value: Node) -> str:
    """Judge a step of an object of a class outside the rows."""
    listed = (made.module, made.name) in CLASSES
    if step != "build":
        return UNSURE if listed and (made.module, made.name) not in FILLED else CLASS
    return CLASS if _is(view, "scalar/literal" if listed else "state", value) else UNSURE


def _special_step(view: View, made: Global, step: str, value: Node) -> str:
    """Judge a step of what one of the special calls made: a tensor that gets attributes, an object."""
    if (made.module, made.name) in table.FROM_TYPE and step == "build":
        return CLASS if _is(view, "fields", value) else UNSURE
    return UNSURE


# Objects of a tree


class TreeView:
    """The sorts of a tree's nodes. An Object has the sort that its call gives: it is judged where it is met itself."""

    def sort(self, value: Node) -> int:
        """Return the sort of a node."""
        if isinstance(value, Object):
            return _result(value)
        for kind in type(value).__mro__:
            if kind in _SORTS:
                return _SORTS[kind]
        return table.UNKNOWN_SORT

    def inside(self, value: Node, every: bool) -> int:
        """Return the sorts of what a container holds. What is too much to look at may be anything."""
        mask = 0
        seen: set[int] = set()
        waiting: list[Node] = [value]
        while waiting:
            node = waiting.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            if isinstance(node, Object) or len(seen) > LIMITS.revisits:  # what a call has filled
                return table.VALUES
            for child in _held(node):
                sort = self.sort(child)
                mask |= sort
                if every and sort & table.LITERALS:
                    waiting.append(child)
        return mask


_SORTS: dict[type, int] = {
    type(None): table.NONE, bool: table.FLAG, int: table.INT, float: table.FLOAT, complex: table.FLOAT,
    str: table.TEXT, bytes: table.BYTES, bytearray: table.BYTES, ByteString: table.BYTES, Blob: table.BYTES,
    list: table.LIST, tuple: table.TUPLE, dict: table.DICT, OrderedDict: table.MAPPING, Pairs: table.DICT,
    SetNode: table.SET, Global: table.NAME, Tensor: table.TENSOR, TypedStorage: table.STORAGE,
}  # fmt: skip
_TREE = TreeView()


def _result(node: Object) -> int:
    made = node.callable
    row = ROWS.get((made.module, made.name)) if isinstance(made, Global) else None
    if row is not None:
        return row.gives
    if isinstance(made, Global):
        name = (made.module, made.name)
        if name in table.ENUMS:
            return table.INERT
        if name in table.FROM_TYPE:
            return table.TENSOR
    return table.OBJECT


def _held(node: Node) -> Iterable[Node]:
    if isinstance(node, dict):
        return (each for pair in node.items() for each in pair)
    if isinstance(node, Pairs):
        return (each for pair in node.pairs for each in pair)
    if isinstance(node, SetNode):
        return node.items
    return node if isinstance(node, (list, tuple)) else ()


def judge_object(node: Object) -> tuple[str, str]:
    """Judge an object of a tree, without the values that it holds: the worst kind, and which step that is."""
    judged = judge_call(_TREE, node.callable, node.args, new=node.new, kwargs=node.kwargs)
    worst, said = judged.kind, f"calls {describe(node.callable)}"
    target, built = target_of(node.callable, node.args), False
    for step, value in node.steps:
        kind = HARMFUL if built else judge_step(_TREE, target, step, value, judged.sort)
        built = built or step == "build"
        if LEVELS.index(kind) > LEVELS.index(worst):
            worst, said = kind, f"changes what {describe(node.callable)} made ({step})"
    return worst, said


def target_of(made: Node, args: Node) -> Node:
    """Return the name that decides which steps may follow a call: of the class that it makes an object of."""
    if isinstance(made, Global) and isinstance(args, tuple) and args:
        name = (made.module, made.name)
        if name in table.NEW_CALLS or name == table.RECONSTRUCT:
            return args[0]
    return made


def is_harmful(node: Object) -> bool:
    """Return whether loading this object would do what cannot be proved harmless: it is not written back."""
    return judge_object(node)[0] not in WRITTEN


def check_object(node: Object) -> None:
    """Refuse to write an object that is not proved harmless. Raises UnsafeGlobalError."""
    kind, said = judge_object(node)
    if kind not in WRITTEN:
        known = "which is not in the allowlist" if kind != UNSURE else "in a way that the allowlist does not know"
        raise UnsafeGlobalError(f"the file {said}, {known}", hint=_HINT)


def check_fields(state: Node) -> None:
    """Refuse to write what would be set as attributes, unless a literal says it. Raises UnsafeGlobalError."""
    if not _is(_TREE, "fields", state):
        raise UnsafeGlobalError("the file sets attributes by the result of a call", hint=_HINT)


def check_name(name: Global) -> None:
    """Refuse to write a class or function that a checkpoint may not hold. Raises UnsafeGlobalError."""
    reason = out_of_place(name)
    if reason is not None:
        raise UnsafeGlobalError(f"the file holds {name}, which {reason}", hint=_HINT)


_HINT = "`ckptkit inspect` lists such values; --objects drop leaves them out"
