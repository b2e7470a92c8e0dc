"""Build the tree of values in a pickle.

Containers and scalars become plain Python values. A class or function becomes a Global. If
`ckptkit.pickles.globals` has a reducer for a call, the call becomes the value that the reducer
returns. Any other call becomes an Object.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from ckptkit.core.bytesource import ByteSource
from ckptkit.core.errors import FormatError, UnsupportedError
from ckptkit.core.limits import check
from ckptkit.core.text import flatten, plural
from ckptkit.core.tree import (
    ByteString,
    Global,
    Node,
    Object,
    OrderedMapping,
    Pairs,
    SetNode,
    StoredBytes,
    collector_paused,
    nodes,
    rebuild,
    type_name,
)
from ckptkit.pickles.globals import REDUCERS, Reducer, built
from ckptkit.pickles.machine import Machine

_NO_TUPLE = "pickle calls a function with arguments that are not a tuple"
_SETATTR, _GETATTR = Global("builtins", "setattr"), Global("builtins", "getattr")
_DILL_SETATTR = (Global("dill", "_dill"), "_setattr")
_CODE_OF_DILL = tuple(f"dill._dill._create_{kind}" for kind in ("cell", "function", "type"))
_DROPPED = "pickle discards the result of a call; ckptkit cannot represent such a call"
_UNNAMEABLE = re.compile("[\n\r\ud800-\udfff]")  # a newline would split the name in GLOBAL
_FULL = object()  # placeholder key: a dict with repeated or unhashable keys must not look empty


class Unpickled(NamedTuple):
    root: Node
    globals: tuple[Global, ...]  # every class and function that the pickle names
    protocol: int
    stop: int  # offset of the first byte after STOP in the source
    warnings: tuple[str, ...]


def unpickle(
    source: ByteSource,
    start: int = 0,
    stop: int | None = None,
    *,
    persistent_load: Callable[[Node], Node] | None = None,
    reducers: Mapping[tuple[str, str], Reducer] = REDUCERS,
) -> Unpickled:
    """Return the tree of the pickle at offset `start`. The pickle must end before offset `stop`.

    `persistent_load` maps a persistent id to a node. `reducers` maps the module and name of a
    callable to a function that evaluates its calls. Raises FormatError for a malformed pickle,
    TruncatedError for an incomplete pickle, LimitError for a pickle that exceeds a limit,
    UnsupportedError for a pickle that ckptkit does not support, and any error of `persistent_load`.
    """
    values = Values(persistent_load or _no_persistent_ids, reducers)
    machine = Machine(source, start, source.size if stop is None else stop, values)
    values.machine = machine
    try:
        with collector_paused():
            root = machine.run()
    finally:
        del values.machine  # a reference cycle would keep the file open until garbage collection
    names = tuple(values.globals.values())
    return Unpickled(root, names, machine.protocol, machine.offset, tuple(values.warnings))


class Values:
    """Builds the tree. Implements `ckptkit.pickles.machine.Builder`."""

    counted: frozenset[type] = frozenset()
    watchful = False
    weight = 100
    new_list: Callable[[], list[Node]] = list
    new_dict: Callable[[], dict[Node, Node]] = dict
    machine: Machine

    def __init__(
        self, persistent_load: Callable[[Node], Node], reducers: Mapping[tuple[str, str], Reducer]
    ) -> None:
        self.persistent = persistent_load
        self.meanings = reducers
        # Maps the id of a Global to the function that evaluates its calls.
        self.reducers: dict[int, Reducer] = {}
        self.globals: dict[tuple[str, str], Global] = {}
        self.keys = KeyCheck()
        # Maps the id of a dict with repeated or unhashable keys to the dict and the Pairs that
        # replaces the dict.
        self.pairs: dict[int, tuple[Node, Pairs]] = {}
        self.tensors: list[Object] = []  # objects that become plain Tensors in the tree
        # Values popped from the stack; the key is the id of the value.
        self.dropped: dict[int, Node] = {}
        self.drops = 0
        self.warnings: list[str] = []

    def name(self, module: Node, name: Node) -> Global:
        if module.__class__ is not str or name.__class__ is not str:
            raise FormatError("pickle names a class or function by values that are not strings")
        known = self.globals.get((module, name))
        if known is not None:
            return known
        parts = name.split(".")
        exists = bool(name) if len(parts) == 1 else all(map(str.isidentifier, parts))
        if not module or not exists or _UNNAMEABLE.search(module + name):
            raise FormatError(f"pickle contains an invalid name: {module!r} {name!r}")
        if len(parts) > 1 and self.machine.protocol < 4:
            raise FormatError(
                f"pickle contains a nested name: {module!r} {name!r}; protocol "
                f"{self.machine.protocol} does not support nested names"
            )
        found = self.globals[module, name] = Global(module, name)
        reducer = self.meanings.get((module, name))
        if reducer is not None:
            self.reducers[id(found)] = reducer
        return found

    def new_set(self) -> Node:
        return SetNode([])

    def pushed(self, value: Node) -> None: ...

    def text(self, text: str) -> None: ...

    def byte_string(self, value: bytes | StoredBytes, kind: str) -> Node:
        if isinstance(value, StoredBytes):
            return value
        if kind == "python2":  # ASCII bytes become a string; other bytes have an unknown encoding
            return value.decode("ascii") if value.isascii() else ByteString(value)
        return value if kind == "bytes" else bytearray(value)

    def call(self, made: Node, args: Node, *, new: bool = False, kwargs: Node = None) -> Node:
        if args.__class__ is not tuple:
            raise FormatError(_NO_TUPLE)
        if not new:
            reducer = self.reducers.get(id(made))
            if reducer is not None:
                return reducer(made, args)
        elif kwargs is not None and kwargs.__class__ is not dict:
            raise FormatError(_NO_TUPLE)
        return Object(made, args, new=new, kwargs=kwargs)

    def build(self, target: Node, state: Node) -> None:
        if isinstance(target, Object):
            target.steps.append(("build", state))
            if built(target, state):
                self.tensors.append(target)
        elif isinstance(target, OrderedMapping) and target.state is None:
            target.state = state
        else:
            raise FormatError(f"pickle calls __setstate__ on a value of type {type_name(target)}")

    def extend(self, target: Node, items: list[Node], how: str) -> None:
        if how == "append" and target.__class__ is list:
            target.extend(items)
        elif how == "add" and isinstance(target, SetNode) and not target.frozen:
            target.items.extend(items)
        elif isinstance(target, Object):
            _step(target, how, items)
        else:
            raise FormatError(f"pickle adds items to a value of type {type_name(target)}")

    def set(self, target: Node, items: Sequence[Node]) -> None:
        keys, values = items[0::2], items[1::2]
        if isinstance(target, Object):
            _step(target, "set", list(zip(keys, values, strict=True)))
            return
        if not isinstance(target, dict):
            raise FormatError(f"pickle sets a key of a value of type {type_name(target)}")
        if id(target) in self.pairs:
            self.pairs[id(target)][1].pairs.extend(zip(keys, values, strict=True))
            return
        if all(key.__class__ is str for key in keys) or all(map(self.keys.hashable, keys)):
            new = dict(zip(keys, values, strict=True))
            if len(new) == len(keys) and (not target or target.keys().isdisjoint(new)):
                target.update(new)
                return
        # A key is repeated or unhashable, so a Pairs stores all items.
        pairs = Pairs([*target.items(), *zip(keys, values, strict=True)])
        self.pairs[id(target)] = (target, pairs)
        target[_FULL] = None

    def collected(self, kind: str, items: list[Node]) -> Node:
        if kind == "list":
            return items
        if kind == "frozenset":
            return SetNode(items, frozen=True)
        made: dict[Node, Node] = {}
        self.set(made, items)
        return made

    def drop(self, values: list[Node]) -> None:
        """Record values that the pickle pops.

        `_check_dropped` later searches the tree for the popped values.

        Two picklers pop values. CPython pops the items of a tuple that contains itself, and then
        pushes the finished tuple. dill pushes an existing dict, fills the dict, and pops the dict.
        dill also pops the results of setattr (see `_sets_code`). A pickle that pops any other value
        could hide a call.
        """
        self.drops += 1
        check("pickle_stack", self.drops, "values dropped in a pickle")
        plain = (str, int, float, complex, bytes, type(None))
        self.dropped.update((id(node), node) for node in values if not isinstance(node, plain))

    def odd(self, reason: str) -> NoReturn:
        raise FormatError(reason)

    def outside(self, opcode: str, value: Any) -> NoReturn:
        raise UnsupportedError(f"pickle opcode {opcode} refers to a value outside the file")

    def end(self, stack: list[Node], marks: list[list[Node]]) -> Node:
        if len(stack) != 1 or marks:
            raise FormatError(
                f"pickle ends with {len(stack)} values and {len(marks)} open marks; expected "
                "one value"
            )
        root = stack[0]
        if self.dropped:
            self._check_dropped(root)
        swap: dict[int, Node] = {
            id(made): made.tensor for made in self.tensors if len(made.steps) == 1
        }
        for key, (target, pairs) in self.pairs.items():
            pairs.state = target.state if isinstance(target, OrderedMapping) else None
            swap[key] = pairs
        if self.pairs:
            self.warnings.append(f"{len(self.pairs)} dicts have repeated or unhashable keys")
        return rebuild(root, swap=swap) if swap else root

    def _check_dropped(self, root: Node) -> None:
        """Raise UnsupportedError if a popped value is missing from the tree.

        The tree does not contain attributes that dill sets on functions and classes. For such
        attributes, this method adds a warning instead.
        """
        setting = [node for node in self.dropped.values() if _sets_code(node)]
        lost = self.dropped.keys() - set(map(id, setting))
        if lost:
            # `end` adds the Pairs in `self.pairs` to the tree.
            repeated = [pairs for _, pairs in self.pairs.values()]
            lost.difference_update(map(id, nodes([root, *setting, *repeated])))
        if lost:
            raise UnsupportedError(_DROPPED)
        if setting:
            code = "functions and classes saved by dill"
            self.warnings.append(f"{plural(len(setting), 'attribute')} of {code} are not read")


def _no_persistent_ids(pid: Node) -> NoReturn:
    raise UnsupportedError("pickle contains persistent ids, which refer to external values")


def _step(target: Object, step: str, items: list[Node]) -> None:
    if target.steps and target.steps[-1][0] == step:
        target.steps[-1][1].extend(items)
    else:
        target.steps.append((step, items))


def _sets_code(node: Node) -> bool:
    """Return whether a call sets an attribute of a function, cell or class created by dill.

    dill restores recursive functions with such calls. These calls cannot change a tensor.
    """
    if not isinstance(node, Object) or node.new or node.steps or len(node.args) != 3:
        return False
    called, made = node.callable, node.args[0]
    if isinstance(called, Object) and called.callable == _GETATTR:
        called = _SETATTR if called.args[:2] == _DILL_SETATTR else None
    name = made.global_ if isinstance(made, Object) else None
    return called == _SETATTR and str(name) in _CODE_OF_DILL


# Limits on dict keys, because a file could contain keys that take very long to hash

_UNHASHABLE = (list, dict, SetNode, Pairs, StoredBytes, bytearray)


class KeyCheck:
    """Counts dict keys for which a malicious file could choose colliding hashes."""

    def __init__(self) -> None:
        self._odd = 0
        self._values = 0

    def hashable(self, key: Node) -> bool:
        """Return whether a key is hashable. Raises LimitError for too many or too deep keys."""
        if key.__class__ is str or (key.__class__ is int and -(2**60) < key < 2**60):
            return True
        if isinstance(key, (int, float, complex)) or (
            isinstance(key, tuple) and not all(each.__class__ is str for each in key)
        ):
            self._odd += 1
            check("odd_keys", self._odd, "dict keys that are floats, tuples or large integers")
        level, depth = [key], 0
        while level:
            if any(isinstance(each, _UNHASHABLE) and not _is_frozen(each) for each in level):
                return False
            check("key_depth", depth := depth + 1, "tuples nested in a dict key")
            self._values += sum(len(each) for each in level if isinstance(each, tuple))
            check("key_values", self._values, "values in tuples that are dict keys")
            level = list(flatten(each for each in level if isinstance(each, tuple)))
        return True


def _is_frozen(node: Node) -> bool:
    return isinstance(node, SetNode) and node.frozen
