"""What transforms ask of a tree before they change it, and how they say what they did."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain

from ckptkit.core.dtypes import DType
from ckptkit.core.tensor import Storage, Tensor, TypedStorage
from ckptkit.core.tree import Node, Object, OrderedDict, Pairs, SetNode

_SCALARS = frozenset({str, int, float, bool, complex, bytes, type(None)})


def nodes(root: Node) -> Iterator[Node]:
    """Every node that is more than a scalar, once, at any depth: arguments, states and keys
    included; in no order."""
    seen: set[int] = set()
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node.__class__ in _SCALARS or id(node) in seen:
            continue
        seen.add(id(node))
        yield node
        if node.__class__ is not Tensor:
            waiting.extend(_held(node))


def _held(node: Node) -> Iterable[Node]:
    if isinstance(node, OrderedDict):
        return (*node, *node.values(), node.state)
    if isinstance(node, dict):
        return (*node, *node.values())
    if isinstance(node, (list, tuple)):
        return node
    if isinstance(node, SetNode):
        return node.items
    if isinstance(node, Pairs):
        return (*chain.from_iterable(node.pairs), node.state)
    if isinstance(node, Object):
        return (node.callable, node.args, node.kwargs, node.tensor, *_added(node))
    return ()


def _added(node: Object) -> Iterator[Node]:
    for step, value in node.steps:
        if step == "build":
            yield value
        else:
            yield from chain.from_iterable(value) if step == "set" else value


def moved(leaf: Node, storages: Mapping[int, Storage]) -> Node:
    """A tensor or typed storage on the storage that stands, by id, for its own; any other leaf as
    it is."""
    if isinstance(leaf, Tensor):
        storage = storages.get(id(leaf.storage))
        return leaf if storage is None else on(storage, leaf)
    if isinstance(leaf, TypedStorage) and id(leaf.storage) in storages:
        return replace(leaf, storage=storages[id(leaf.storage)])
    return leaf


def on(
    storage: Storage, like: Tensor, dtype: DType | None = None, offset: int | None = None
) -> Tensor:
    """`like` on another storage. Spelled out, as `dataclasses.replace` takes half as long again."""
    where = like.offset if offset is None else offset
    shape, stride, grad, kind = like.shape, like.stride, like.requires_grad, like.kind
    return Tensor(
        storage,
        dtype or like.dtype,
        shape,
        stride,
        where,
        grad,
        kind,
        like.layout,
        like.conj,
        like.neg,
    )
