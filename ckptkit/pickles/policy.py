"""Decide which values of a tree may be written back, and remove all other values.

This module applies the rules of `ckptkit.pickles.judge` to values. `ckptkit scan` applies the same
rules to the calls of a pickle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import NoneType
from typing import Any

from ckptkit.core.errors import UnsafeGlobalError, UsageError
from ckptkit.core.limits import check
from ckptkit.core.tensor import Tensor, TypedStorage
from ckptkit.core.text import flatten, plural, some, typed_value
from ckptkit.core.tree import (
    ByteString,
    Global,
    Node,
    Object,
    OrderedMapping,
    Pairs,
    Path,
    SetNode,
    StoredBytes,
    children,
    held,
    join,
    like,
    nodes,
    rebuild,
    walk,
)
from ckptkit.core.weights import as_tensor
from ckptkit.pickles import judge
from ckptkit.pickles.judge import Judged, allowlist, refused_by_weights_only
from ckptkit.pickles.streams import holds_calls

_SORTS: dict[type, int] = {
    **judge.PLAIN, complex: judge.FLOAT, bytearray: judge.BYTES, ByteString: judge.BYTES,
    StoredBytes: judge.BYTES, list: judge.LIST, dict: judge.DICT, OrderedMapping: judge.MAPPING,
    Pairs: judge.DICT, SetNode: judge.SET, Tensor: judge.TENSOR, TypedStorage: judge.STORAGE,
}  # fmt: skip
_DEEP = 32  # maximum nesting depth of dtypes


class _TreeView:
    """Gives `ckptkit.pickles.judge` access to the values of a tree. Implements `judge.View`.

    The allowlist determines the category of an Object. `_judge_object` decides whether the
    operations that create the Object are harmless.
    """

    def __init__(self) -> None:
        self._open: list[Object] = []  # dtypes under examination, outermost first

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
        """Return the category of an object. For a NumPy dtype, also return the element type.

        This method does not check the arguments of the call.
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
    """Return the most harmful level among the operations that create an object.

    The operations are the call, BUILD, and the opcodes that add items. Also return a phrase that
    describes the most harmful operation. Values inside the object are not checked.
    """
    judged = judge.judge_call(_TREE, node.callable, node.args, new=node.new, kwargs=node.kwargs)
    worst, action = judged.kind, f"calls {judge.describe(node.callable)}"
    target, built = judge.target_of(node.callable, node.args), False
    if judge.is_unfinished(target) and [step for step, _ in node.steps[:1]] != ["build"]:
        return judge.UNSURE, f"{action} without a state"
    for step, value in node.steps:
        after = judge.judge_step(_TREE, target, step, value, judged)
        kind = judge.HARMFUL if built else after.kind
        judged, built = after, built or step == "build"
        if judge.LEVELS.index(kind) > judge.LEVELS.index(worst):
            worst, action = kind, f"changes the result of {judge.describe(node.callable)} ({step})"
    return worst, action


def is_harmful(node: Object) -> bool:
    """Return True if ckptkit must not write the object, because loading it may be harmful."""
    return _judge_object(node)[0] not in judge.WRITTEN


class Policy:
    """Checks that loading the values of one output is harmless.

    Every `check` method raises UnsafeGlobalError for a value that may be harmful.
    """

    def __init__(self) -> None:
        self._names: set[Global] = set()

    def check_object(self, node: Object) -> None:
        """Check that the operations that create an object are harmless."""
        kind, action = _judge_object(node)
        if kind == judge.UNSURE:
            raise _refused(f"the file {action} with arguments or a state that are not allowlisted")
        if kind not in judge.WRITTEN:
            raise _refused(f"the file {action}, which is not allowlisted")

    def check_fields(self, state: Node) -> None:
        """Check that the state of an OrderedDict is a dict of ordinary attributes."""
        if not judge.is_plain_fields(_TREE, state):
            raise _refused("the file sets the attributes of an OrderedDict to the result of a call")

    def check_keys(self, keys: Iterable[Node]) -> None:
        """Check that no dict key is an object, because hashing an object runs code of its class."""
        for key in keys:
            if isinstance(key, (Object, tuple)) and not judge.is_key(_TREE, key):
                raise _refused("the file contains a dict whose keys are objects")

    def hold(self, name: Global) -> None:
        """Record that the output contains a class or function as a value or an argument."""
        self._names.add(name)

    def check_names(self, root: Node) -> None:
        """Check each class and function that the tree contains as a value.

        If a call is allowlisted, the classes and functions among its arguments are not values.
        """
        waiting = [root] if any(map(judge.out_of_place, self._names)) else []
        seen: set[int] = set()
        while waiting:
            node = waiting.pop()
            if isinstance(node, Global):
                reason = judge.out_of_place(node)
                if reason is not None:
                    raise _refused(f"the file contains {node}, which {reason}")
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


def _refused(message: str) -> UnsafeGlobalError:
    drop = typed_value("objects", "drop")
    return UnsafeGlobalError(message, hint=f"{drop} drops such values")


# Removing values from trees

SHOWN = 8  # maximum number of names in a note
TEXTS = (str, bytes, bytearray, ByteString, StoredBytes)
_JUDGED = (
    *(Object, Global, SetNode, Tensor, TypedStorage),
    *(str, bytes, bytearray, ByteString, StoredBytes),
)


def without(root: Node, gone: Callable[[Node], bool]) -> tuple[Node, list[tuple[Path, Node]]]:
    """Remove the values for which `gone` returns True.

    Return the new tree, and (path, value) for each removed value.

    `gone` is called for objects, classes, functions, sets, tensors, storages, strings and byte
    strings. In a dict, the key is removed together with the value. In a list or tuple, None
    replaces the value, so the other values keep their indices.
    """
    dropped, holders = _find(root, gone)
    if not dropped:
        return root, []
    ids = {id(node) for _, node in dropped}
    if id(root) in ids:
        return None, dropped
    swap: dict[int, Node] = dict.fromkeys(ids)
    for holder in holders:
        if any(id(each) in ids for each in held(holder)):
            swap[id(holder)] = _without(holder, ids)
    return rebuild(root, lambda leaf: None if id(leaf) in ids else leaf, swap), dropped


def _find(root: Node, gone: Callable[[Node], bool]) -> tuple[list[tuple[Path, Node]], list[Node]]:
    """Return the keys and values to drop, each with its path, and all visited containers."""
    dropped: list[tuple[Path, Node]] = []
    holders: list[Node] = []
    seen: set[int] = set()
    waiting: list[tuple[Path, Node]] = [((), root)]
    while waiting:
        path, node = waiting.pop()
        check("depth", len(path), "levels of values")
        if isinstance(node, (dict, list, tuple)):
            if id(node) in seen:
                continue
            seen.add(id(node))
            holders.append(node)
            if isinstance(node, dict):
                dropped += [((*path, key), key) for key in node if gone(key)]
            waiting.extend([((*path, key), child) for key, child in _inside(node)][::-1])
        elif isinstance(node, _JUDGED) and gone(node):
            dropped.append((path, node))
    return dropped, holders


def _without(holder: Node, gone: set[int]) -> Node:
    """Return a copy of a container without the keys and values whose ids are in `gone`."""
    if not isinstance(holder, dict):
        return type(holder)(None if id(each) in gone else each for each in holder)
    kept = {
        key: value for key, value in holder.items() if id(key) not in gone and id(value) not in gone
    }
    return like(holder, kept)


def _inside(node: Node) -> Iterable[tuple[Node, Node]]:
    yield from children(node)
    if isinstance(node, OrderedMapping) and node.state is not None:
        yield "(attributes)", node.state


def without_objects(root: Node, *, may_be_empty: bool = False) -> tuple[Node, tuple[str, ...]]:
    """Remove all values that `torch.load(weights_only=True)` rejects. Return the tree and notes.

    An object is removed if it contains a rejected object. Byte strings that contain a pickle with
    calls are removed too.

    Raises UsageError if all tensors are removed. For a tree without tensors, raises UsageError if
    all values are removed. If `may_be_empty` is True, neither case raises an error.
    """
    pruned, dropped = without(root, _is_refused)
    if not dropped:
        return root, ()
    if not may_be_empty and not _has_more(pruned, tensors=any(map(_is_tensor, nodes(root)))):
        held = join(dropped[0][0]) or "the root"
        raise UsageError(
            f"nothing remains without Python objects: {held} is of type {_name(dropped[0][1])}",
            hint="`ckptkit inspect {where}` lists the content; the format safetensors stores "
            "only the weights, if there are any",
        )
    files = [each for each in dropped if isinstance(each[1], TEXTS)]
    objects = [each for each in dropped if not isinstance(each[1], TEXTS)]
    return pruned, (
        *_dropped_note(objects, "value", "that weights_only rejects"),
        *_dropped_note(files, "byte string", "that may contain a pickle with calls"),
    )


def _dropped_note(dropped: list[tuple[Path, Node]], what: str, why: str) -> Iterator[str]:
    """Yield a note with the paths of the dropped values. If `dropped` is empty, yield nothing."""
    if dropped:
        named = [f"{join(path) or '(root)'} ({_name(node)})" for path, node in dropped]
        yield f"dropped {plural(len(named), what)} {why}: {some(named, SHOWN)}"


def _has_more(root: Node, tensors: bool) -> bool:
    """Return whether the tree contains a tensor.

    If `tensors` is False, return whether the tree contains a value other than None.
    """
    if tensors:
        return any(map(_is_tensor, nodes(root)))
    containers = (dict, list, tuple, NoneType)
    return any(not isinstance(node, containers) for _, node in walk(root))


def _is_tensor(node: Node) -> bool:
    return as_tensor(node) is not None or isinstance(node, TypedStorage)


def _is_refused(node: Node) -> bool:
    """Return whether `torch.load(weights_only=True)` rejects the value or a value inside.

    Also return True if a byte string contains a pickle with calls.
    """
    return holds_calls(node) or any(map(_is_refused_part, nodes(node)))


def _is_refused_part(node: Node) -> bool:
    if isinstance(node, Object) and is_harmful(node):
        return True
    if isinstance(node, Global):
        return refused_by_weights_only(node)
    if isinstance(node, SetNode) and node.frozen:
        return True
    return not isinstance(node, Tensor) and any(map(holds_calls, held(node)))


def _name(node: Node) -> str:
    if isinstance(node, SetNode):
        return "frozenset"
    if isinstance(node, TEXTS):
        return "byte string"
    return judge.describe(node.callable) if isinstance(node, Object) else str(node)
