"""Writes a tree as a pickle of protocol 2, in opcodes that `torch.load(weights_only=True)` accepts.

One pass, iterative, deterministic. Strings and other immutable scalars are stored in the memo by
value; containers, tuples, tensors and objects by identity, so that what was shared is shared again.
Sizes, strides and the keys of storages are written out where they stand. Only what protocol 2
cannot say (keyword arguments of ``__new__``, items of a set subclass, a module with a name that
Python 2 had) raises the protocol to 4.

Other normalizations, all of equal meaning:

- ``_rebuild_tensor`` and hooks of None become ``_rebuild_tensor_v2`` with an empty OrderedDict;
- bytes are spelled ``_codecs.encode(text, "latin1")``, a set ``set([...])``;
- a nested class is spelled ``getattr(Outer, "Inner")``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckptkit.core.errors import AmbiguousError, FormatError, UnsafeGlobalError, UnsupportedError
from ckptkit.core.limits import LIMITS, check
from ckptkit.core.text import typed_value
from ckptkit.core.tree import Global, Node, Object, OrderedMapping, Pairs, SetNode
from ckptkit.pickles.emitter import (
    ORDERED_DICT,
    TUPLES,
    AnotherKey,
    Emitter,
    PersistentId,
    get,
    no_other,
)
from ckptkit.pickles.objects import without_objects
from ckptkit.pickles.trust import Policy

BATCH = 1000  # items per SETITEMS or APPENDS, as CPython does


class Pickled(NamedTuple):
    data: bytes
    notes: tuple[str, ...]  # what its reader should know


class _Code(bytes):
    """Opcodes to emit as they are, between nodes."""


class _Put(NamedTuple):
    """Store the value on top of the stack as `node`."""

    node: Node


class _EndTuple(NamedTuple):
    node: tuple[Node, ...]


_MARK, _REDUCE, _BUILD, _NEWOBJ, _NEWOBJ_EX = map(_Code, (b"(", b"R", b"b", b"\x81", b"\x92"))
_APPEND, _APPENDS, _SETITEM, _SETITEMS, _ADDITEMS = map(_Code, (b"a", b"e", b"s", b"u", b"\x90"))


def write_pickle(
    root: Node,
    persistent_id: PersistentId,
    another: AnotherKey = no_other,
    *,
    objects: str = "keep",
) -> Pickled:
    """Return the pickle of a tree.

    `persistent_id` gives the persistent id of a storage, a tuple, each time it is met; `another`
    the key alone of a new storage whose id differs from that of one before in the key.

    `objects` says what becomes of values that weights_only refuses: they are kept, left out
    (``drop``), or an ``error``. Raises AmbiguousError for mappings that Python could not hold,
    UnsafeGlobalError for calls that are not in the allowlist, UnsupportedError for objects that
    contain themselves.
    """
    notes: tuple[str, ...] = ()
    if objects == "drop":
        root, notes = without_objects(root)
    pickled = _Writer(persistent_id, another).write(root)
    if objects == "error" and pickled.notes:
        raise UnsafeGlobalError(
            pickled.notes[0],
            hint=f"{typed_value('objects', 'keep')} keeps them, "
            f"{typed_value('objects', 'drop')} leaves them out",
        )
    return Pickled(pickled.data, (*notes, *pickled.notes))


_JOINED = 1 << 15  # pieces that are joined, because a short one is mostly its header


class _Writer(Emitter):
    def __init__(self, persistent_id: PersistentId, another: AnotherKey, protocol: int = 2) -> None:
        super().__init__(persistent_id, another, protocol)
        self.joined: list[bytes] = []
        self.policy = Policy()
        self.making: set[int] = set()  # objects whose arguments are being written
        self.leaves |= {_Code: self.emit, _Put: self._put_node, _EndTuple: self._end_tuple}

    def write(self, root: Node) -> Pickled:
        frames: list[Iterator[Node]] = [iter((root,))]
        while frames:
            self._join()
            for item in frames[-1]:
                leaf = self.leaves.get(item.__class__)
                if leaf is not None:
                    leaf(item)
                elif id(item) in self.by_id:
                    self.emit(get(self.by_id[id(item)]))
                else:
                    frames.append(self._open(item))
                    if len(frames) > LIMITS.depth:
                        check("depth", len(frames), "levels of values to write")
                    break
            else:
                frames.pop()
        self.policy.check_names(root)
        # methods of this object: with the collector off, a cycle would keep the memo for good
        self.leaves.clear()
        if self.needed > self.protocol:  # in which names are spelled differently from the start
            return _Writer(self.persistent_id, self.another, self.needed).write(root)
        data = b"".join((b"\x80", bytes((self.protocol,)), *self.joined, *self.parts, b"."))
        check("pickle_bytes", len(data), "bytes of the pickle to write")
        return Pickled(data, self._notes())

    def _join(self) -> None:
        if len(self.parts) > _JOINED:
            self.joined.append(b"".join(self.parts))
            self.parts.clear()

    def _notes(self) -> tuple[str, ...]:
        if not self.refused:
            return ()
        names = ", ".join(sorted(self.refused)[:8]) + (", ..." if len(self.refused) > 8 else "")
        return (f"kept values that torch.load(weights_only=True) refuses: {names}",)

    def _global_leaf(self, node: Global) -> None:
        self.emit(self._global(node))
        self.policy.hold(node)

    def _put_node(self, put: _Put) -> None:
        self.making.discard(id(put.node))
        self.emit(self._put(put.node))

    # Containers: each opens with what can be emitted at once, then yields what is inside

    def _open(self, node: Node) -> Iterator[Node]:
        if isinstance(node, OrderedMapping):
            return self._ordered_dict(node)
        if isinstance(node, dict):
            return self._dict(node)
        if isinstance(node, tuple):
            return self._tuple(node)
        if isinstance(node, list):
            return self._list(node)
        if isinstance(node, Object):
            return self._object(node)
        if isinstance(node, SetNode):
            return self._set(node)
        if isinstance(node, Pairs):
            raise AmbiguousError(
                "a mapping has repeated or unhashable keys, which no output can keep",
                hint=(
                    "`ckptkit inspect {where}` shows them; `extract` takes another part of the file"
                ),
            )
        raise FormatError(f"a value of type {type(node).__name__} has no place in a checkpoint")

    def _dict(self, node: dict[Node, Node]) -> Iterator[Node]:
        self.policy.check_keys(node)
        self.emit(b"}" + self._put(node))
        return self._items(list(node.items()))

    def _ordered_dict(self, node: OrderedMapping) -> Iterator[Node]:
        self.policy.check_keys(node)
        self.emit(self._global(ORDERED_DICT) + b")R" + self._put(node))
        yield from self._items(list(node.items()))
        if node.state is not None:
            self.policy.check_fields(node.state)
            yield node.state
            yield _BUILD

    def _single(self, node: dict[Node, Node]) -> bool:
        """Emit a dict of one leaf at once, without a frame of its own; return False for any other.

        The versions of modules are such: there may be as many as tensors.
        """
        if len(node) != 1 or id(node) in self.by_id:
            return False
        ((key, value),) = node.items()
        write_key, write_value = map(self.leaves.get, (key.__class__, value.__class__))
        if write_key is None or write_value is None:
            return False
        self.emit(b"}" + self._put(node))
        write_key(key)
        write_value(value)
        self.emit(_SETITEM)
        return True

    def _items(self, pairs: list[tuple[Node, Node]]) -> Iterator[Node]:
        """Emit keys and values that can be emitted at once, and yield the others."""
        leaves = self.leaves
        for start in range(0, len(pairs), BATCH):
            self._join()
            batch = pairs[start : start + BATCH]
            if len(batch) > 1:
                self.emit(_MARK)
            place = self.emit_named(batch, 0)
            while place < len(batch):
                for node in batch[place]:
                    leaf = leaves.get(node.__class__)
                    if leaf is not None:
                        leaf(node)
                    elif node.__class__ is not dict or not self._single(node):
                        yield node
                place = self.emit_named(batch, place + 1)
            self.emit(_SETITEMS if len(batch) > 1 else _SETITEM)

    def _list(self, node: list[Node]) -> Iterator[Node]:
        self.emit(b"]" + self._put(node))
        return self._elements(node)

    def _elements(self, items: list[Node]) -> Iterator[Node]:
        for start in range(0, len(items), BATCH):
            batch = items[start : start + BATCH]
            if len(batch) > 1:
                yield _MARK
            yield from batch
            yield _APPENDS if len(batch) > 1 else _APPEND

    def _tuple(self, node: tuple[Node, ...]) -> Iterator[Node]:
        if len(node) > 3:
            yield _MARK
        yield from node
        yield _EndTuple(node)

    def _end_tuple(self, end: _EndTuple) -> None:
        node = end.node
        if not node:
            self.emit(b")")
        elif (
            id(node) in self.by_id
        ):  # it holds itself, and was finished in there: drop the items, get that
            self.emit((b"1" if len(node) > 3 else b"0" * len(node)) + get(self.by_id[id(node)]))
        else:
            self.emit((TUPLES[len(node)] if len(node) < 4 else b"t") + self._put(node))

    def _set(self, node: SetNode) -> Iterator[Node]:
        self._begin(node)
        self.policy.check_keys(node.items)
        yield Global("builtins", "frozenset" if node.frozen else "set")
        yield _Code(b"]")
        yield from self._elements(node.items)
        yield _Code(b"\x85R")
        yield _Put(node)

    def _object(self, node: Object) -> Iterator[Node]:
        self._begin(node)
        self.policy.check_object(node)
        self.emit(self._global(node.callable))
        yield node.args
        if node.kwargs is not None:
            yield node.kwargs
            self.needed = 4
            yield _NEWOBJ_EX
        else:
            yield _NEWOBJ if node.new else _REDUCE
        yield _Put(node)
        for step, value in node.steps:
            yield from self._step(step, value)

    def _step(self, step: str, value: Node) -> Iterator[Node]:
        if step == "build":
            yield value
            yield _BUILD
        elif step == "set":
            yield from self._items(value)
        elif step == "append":
            yield from self._elements(value)
        else:
            self.needed = 4
            yield _MARK
            yield from value
            yield _ADDITEMS

    def _begin(self, node: Node) -> None:
        if id(node) in self.making:
            raise UnsupportedError("an object is an argument of its own construction")
        self.making.add(id(node))
