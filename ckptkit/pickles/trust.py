"""Judge what a tree calls and holds, and what may be written back: `ckptkit.pickles.allowlist`, for
trees.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptkit.core.errors import UnsafeGlobalError
from ckptkit.core.limits import LIMITS
from ckptkit.core.tensor import Tensor, TypedStorage
from ckptkit.core.text import flatten, typed_value
from ckptkit.core.tree import (
    ByteString,
    Global,
    Node,
    Object,
    OrderedMapping,
    Pairs,
    SetNode,
    StoredBytes,
)
from ckptkit.pickles.allowlist import rows as table
from ckptkit.pickles.allowlist.calls import (
    Judged,
    by_sorts,
    fits_word,
    is_unfinished,
    judge_call,
    judge_step,
    target_of,
)
from ckptkit.pickles.allowlist.names import (
    ACCEPTED,
    ALLOCATES,
    CLASS,
    HARMFUL,
    HARMLESS,
    LEVELS,
    LOADS,
    UNKNOWN,
    UNSURE,
    WRITTEN,
    is_foreign,
    is_guarded,
    is_known,
    out_of_place,
    refused_by_weights_only,
)
from ckptkit.pickles.allowlist.numpy_types import NumpyType, named
from ckptkit.pickles.allowlist.rows import ROWS, WEIGHTS_ONLY

__all__ = [
    "ACCEPTED", "ALLOCATES", "CLASS", "HARMFUL", "HARMLESS", "LEVELS", "LOADS", "UNKNOWN",
    "UNSURE", "WEIGHTS_ONLY", "WRITTEN", "Judged", "by_sorts", "check_fields", "check_name",
    "check_object", "describe", "is_foreign", "is_guarded", "is_harmful", "is_known",
    "is_unfinished", "judge_call",
    "judge_object", "judge_step", "out_of_place", "refused_by_weights_only", "target_of",
]  # fmt: skip


def describe(callable_: Node) -> str:
    """Return the name of the class or function that an Object is made by, for messages."""
    return str(callable_) if isinstance(callable_, Global) else "the result of another call"


class TreeView:
    """The sorts of a tree's nodes. An Object has the sort that its call gives: it is judged where
    it is met itself."""

    def sort(self, value: Node) -> int:
        """Return the sort of a node."""
        if isinstance(value, Object):
            return _judged(value).sort
        for kind in type(value).__mro__:
            if kind in _SORTS:
                return _SORTS[kind]
        return table.UNKNOWN_SORT

    def inside(self, value: Node, every: bool) -> int:
        """Return the sorts of what a container holds. What is too much to look at may be
        anything."""
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

    def numpy(self, value: Node) -> NumpyType | None:
        """Return the element type that a built dtype stands for."""
        if not isinstance(value, Object) or [step for step, _ in value.steps] != ["build"]:
            return None
        return _judged(value).type

    def pairs(self, value: Node) -> list[tuple[Node, Node]] | None:
        """Return the items of a dict."""
        return list(value.items()) if isinstance(value, dict) else None

    def count(self, value: Node) -> int | None:
        """Return the length of a list."""
        return len(value) if isinstance(value, list) else None

    def is_bytes(self, value: Node) -> bool:
        """Return whether it is a byte string, or the text that Python 2 had for one."""
        return bool(self.sort(value) & (table.BYTES | table.TEXT))


_SORTS: dict[type, int] = {
    type(None): table.NONE, bool: table.FLAG, int: table.INT, float: table.FLOAT,
    complex: table.FLOAT,
    str: table.TEXT, bytes: table.BYTES, bytearray: table.BYTES, ByteString: table.BYTES,
    StoredBytes: table.BYTES,
    list: table.LIST, tuple: table.TUPLE, dict: table.DICT, OrderedMapping: table.MAPPING,
    Pairs: table.DICT,
    SetNode: table.SET, Global: table.NAME, Tensor: table.TENSOR, TypedStorage: table.STORAGE,
}  # fmt: skip
_TREE = TreeView()


def _judged(node: Object) -> Judged:
    """Return the sort of an object, and its element type if it is a dtype. Its arguments are judged
    elsewhere."""
    made = node.callable
    name = (made.module, made.name) if isinstance(made, Global) else None
    row = ROWS.get(name) if name is not None else None
    fills = row is not None and row.gives == table.INERT and bool(row.fill)
    if row is not None and (row.state in _STATEFUL or row.gives == table.TENSOR or fills):
        return _with_steps(node, row)
    if row is not None:
        return Judged(ACCEPTED, row.gives)
    if name in table.ENUMS:
        return Judged(CLASS, table.INERT)
    return Judged(CLASS, table.DRESSED if name in table.FROM_TYPE else table.OBJECT)


_STATEFUL = ("dtype_state", "array_state", "masked_state")
_DEEP = 32  # dtypes inside dtypes
_open: list[Object] = []  # dtypes that are being looked into


def _with_steps(node: Object, row: table.AllowedCall) -> Judged:
    """Return what the steps make of an object whose sort they decide."""
    unknown = Judged(UNSURE, table.BAG)
    if len(_open) >= _DEEP or any(each is node for each in _open):
        return unknown
    text = node.args[0] if isinstance(node.args, tuple) and node.args else None
    judged = Judged(ACCEPTED, row.gives, named(text) if row.state == "dtype_state" else None)
    _open.append(node)
    try:
        for step, value in node.steps[:2]:
            judged = judge_step(_TREE, node.callable, step, value, judged)
    finally:
        _open.pop()
    return judged if len(node.steps) < 2 else unknown


def _held(node: Node) -> Iterable[Node]:
    if isinstance(node, dict):
        return flatten(node.items())
    if isinstance(node, Pairs):
        return flatten(node.pairs)
    if isinstance(node, SetNode):
        return node.items
    return node if isinstance(node, (list, tuple)) else ()


def judge_object(node: Object) -> tuple[str, str]:
    """Judge an object of a tree, without the values that it holds: the worst kind, and which step
    that is."""
    judged = judge_call(_TREE, node.callable, node.args, new=node.new, kwargs=node.kwargs)
    worst, action = judged.kind, f"calls {describe(node.callable)}"
    target, built = target_of(node.callable, node.args), False
    if is_unfinished(target) and [step for step, _ in node.steps[:1]] != ["build"]:
        return UNSURE, f"{action} without a state"
    for step, value in node.steps:
        after = judge_step(_TREE, target, step, value, judged)
        kind = HARMFUL if built else after.kind
        judged, built = after, built or step == "build"
        if LEVELS.index(kind) > LEVELS.index(worst):
            worst, action = kind, f"changes what {describe(node.callable)} made ({step})"
    return worst, action


def is_harmful(node: Object) -> bool:
    """Return whether loading this object would do what cannot be proved harmless: it is not written
    back."""
    return judge_object(node)[0] not in WRITTEN


def check_object(node: Object) -> None:
    """Refuse to write an object that is not proved harmless. Raises UnsafeGlobalError."""
    kind, action = judge_object(node)
    if kind not in WRITTEN:
        known = (
            "which is not in the allowlist"
            if kind != UNSURE
            else "in a way that the allowlist does not know"
        )
        raise UnsafeGlobalError(f"the file {action}, {known}", hint=_hint())


def check_fields(state: Node) -> None:
    """Refuse to write what would be set as attributes, unless a literal says it. Raises
    UnsafeGlobalError."""
    if not fits_word(_TREE, "fields", state):
        raise UnsafeGlobalError("the file sets attributes by the result of a call", hint=_hint())


def check_name(name: Global) -> None:
    """Refuse to write a class or function that a checkpoint may not hold. Raises
    UnsafeGlobalError."""
    reason = out_of_place(name)
    if reason is not None:
        raise UnsafeGlobalError(f"the file holds {name}, which {reason}", hint=_hint())


def _hint() -> str:
    drop = typed_value("objects", "drop")
    return f"`ckptkit inspect {{where}}` lists such values; {drop} leaves them out"
