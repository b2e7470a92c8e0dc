"""Judge what a tree calls and holds, and what may be written back.

The judge of traces, `ckptkit.pickles.judge`, for trees.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ckptkit.core.errors import UnsafeGlobalError
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
    held,
)
from ckptkit.pickles import judge
from ckptkit.pickles.judge import Judged, allowlist, is_foreign, refused_by_weights_only

__all__ = ["Policy", "describe", "is_foreign", "is_harmful", "refused_by_weights_only"]

_SORTS: dict[type, int] = {
    **judge.PLAIN, complex: judge.FLOAT, bytearray: judge.BYTES, ByteString: judge.BYTES,
    StoredBytes: judge.BYTES, list: judge.LIST, dict: judge.DICT, OrderedMapping: judge.MAPPING,
    Pairs: judge.DICT, SetNode: judge.SET, Tensor: judge.TENSOR, TypedStorage: judge.STORAGE,
}  # fmt: skip
_DEEP = 32  # dtypes inside dtypes


def describe(callable_: Node) -> str:
    """Return the name of the class or function that an Object is made by, for messages."""
    return str(callable_) if isinstance(callable_, Global) else "the result of another call"


class _TreeView:
    """The values of a tree; see `ckptkit.pickles.judge.View`.

    An Object has the sort that its row gives: it is judged where it is met itself.
    """

    def __init__(self) -> None:
        self._open: list[Object] = []  # dtypes that are being looked into

    def sort(self, value: Node) -> int:
        if isinstance(value, Object):
            return self._judged(value).sort
        if isinstance(value, Global):
            return judge.name_sort(value)
        for kind in type(value).__mro__:
            if kind in _SORTS:
                return _SORTS[kind]
        return judge.UNKNOWN

    def items(self, value: Node) -> Iterable[Any] | None:
        if isinstance(value, dict):
            return flatten(value.items())
        if isinstance(value, Pairs):
            return flatten(value.pairs)
        if isinstance(value, SetNode):
            return value.items
        if not isinstance(value, Object):
            return value if isinstance(value, (list, tuple)) else None
        args = value.args if isinstance(value.args, tuple) else ()
        found = judge.contents(self, self.sort(value), args)
        for step, items in value.steps:
            if found is not None and step != "build":
                found += flatten(items) if step == "set" else items
        return found

    def numpy(self, value: Node) -> judge.NumpyType | None:
        if not isinstance(value, Object) or [step for step, _ in value.steps] != ["build"]:
            return None
        return self._judged(value).type

    def _judged(self, node: Object) -> Judged:
        """Return the sort of an object, and its element type if it is a dtype.

        Its arguments are judged elsewhere.
        """
        made = node.callable
        name = judge.key_of(made) if isinstance(made, Global) else None
        row = None if name is None else allowlist().rows.get(name)
        if row is None:
            sort = judge.OBJECT
            if name in allowlist().enums:
                sort = judge.OTHER
            elif name in judge.FROM_TYPE:
                sort = judge.DRESSED
            return Judged(judge.CLASS, sort)
        if row.state not in ("dtype_state", "array_state", "masked_state", "attributes"):
            return Judged(judge.ACCEPTED, row.gives)
        unknown = Judged(judge.UNSURE, judge.OTHER)
        if len(self._open) >= _DEEP or any(each is node for each in self._open):
            return unknown
        text = node.args[0] if isinstance(node.args, tuple) and node.args else None
        type_ = judge.named(text) if row.state == "dtype_state" else None
        judged = Judged(judge.ACCEPTED, row.gives, type_)
        self._open.append(node)
        try:
            for step, value in node.steps[:2]:
                judged = judge.judge_step(self, made, step, value, judged)
        finally:
            self._open.pop()
        return judged if len(node.steps) < 2 else unknown


_TREE = _TreeView()


def _judge_object(node: Object) -> tuple[str, str]:
    """Judge an object of a tree, without the values that it holds: the worst kind, and which step
    that is."""
    judged = judge.judge_call(_TREE, node.callable, node.args, new=node.new, kwargs=node.kwargs)
    worst, action = judged.kind, f"calls {describe(node.callable)}"
    target, built = judge.target_of(node.callable, node.args), False
    if judge.is_unfinished(target) and [step for step, _ in node.steps[:1]] != ["build"]:
        return judge.UNSURE, f"{action} without a state"
    for step, value in node.steps:
        after = judge.judge_step(_TREE, target, step, value, judged)
        kind = judge.HARMFUL if built else after.kind
        judged, built = after, built or step == "build"
        if judge.LEVELS.index(kind) > judge.LEVELS.index(worst):
            worst, action = kind, f"changes what {describe(node.callable)} made ({step})"
    return worst, action


def is_harmful(node: Object) -> bool:
    """Return whether loading this object would do what cannot be proved harmless: it is not written
    back."""
    return _judge_object(node)[0] not in judge.WRITTEN


class Policy:
    """Refuse to write what is not proved harmless into one output.

    All methods raise UnsafeGlobalError.
    """

    def __init__(self) -> None:
        self._names: set[Global] = set()

    def check_object(self, node: Object) -> None:
        """Refuse an object that is not proved harmless."""
        kind, action = _judge_object(node)
        if kind == judge.UNSURE:
            raise _refused(f"the file {action}, in a way that the allowlist does not know")
        if kind not in judge.WRITTEN:
            raise _refused(f"the file {action}, which is not in the allowlist")

    def check_fields(self, state: Node) -> None:
        """Refuse a state of an OrderedDict that is no dict of ordinary attributes."""
        if not judge.is_plain_fields(_TREE, state):
            raise _refused("the file sets attributes by the result of a call")

    def check_keys(self, keys: Iterable[Node]) -> None:
        """Refuse keys whose hash an object of the allowlist would compute of its state."""
        for key in keys:
            if isinstance(key, (Object, tuple)) and not judge.is_key(_TREE, key):
                raise _refused("the file has objects as the keys of a dict")

    def hold(self, name: Global) -> None:
        """Note a class or function that is written, as a value or as an argument."""
        self._names.add(name)

    def check_names(self, root: Node) -> None:
        """Refuse names that the tree holds as values and that no checkpoint may hold.

        Those that the row of a call takes as its arguments are no values.
        """
        waiting = [root] if any(map(judge.out_of_place, self._names)) else []
        seen: set[int] = set()
        while waiting:
            node = waiting.pop()
            if isinstance(node, Global):
                reason = judge.out_of_place(node)
                if reason is not None:
                    raise _refused(f"the file holds {node}, which {reason}")
            elif id(node) in seen:
                continue
            elif isinstance(node, Object) and isinstance(node.args, tuple):
                given, made = [*node.args], node.callable
                if isinstance(made, Global) and judge.key_of(made) in judge.FROM_TYPE:
                    inner = given[2] if len(given) > 2 else None
                    given[2:3] = inner if isinstance(inner, tuple) else ()
                for name in judge.consumed(made, node.args):
                    given.remove(name)
                waiting += [*given, node.kwargs, *(value for _, value in node.steps)]
            else:
                waiting += held(node)
            seen.add(id(node))


def _refused(text: str) -> UnsafeGlobalError:
    drop = typed_value("objects", "drop")
    return UnsafeGlobalError(text, hint=f"{drop} leaves such values out")
