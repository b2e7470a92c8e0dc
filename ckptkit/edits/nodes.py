"""Replace the storages of the leaves of a tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ckptkit.core.dtypes import DType
from ckptkit.core.tensor import Storage, Tensor, TypedStorage
from ckptkit.core.tree import Node


def moved(leaf: Node, storages: Mapping[int, Storage]) -> Node:
    """Return a leaf on the storage that replaces its own, by id; any other leaf as it is."""
    if isinstance(leaf, Tensor):
        old = leaf.storage
        storage = storages.get(id(old))
        if storage is None:
            return leaf
        if old is not None and storage.record.length == old.record.length:
            return leaf.over(storage)  # the elements are as far inside it as before
        return on(storage, leaf)
    if isinstance(leaf, TypedStorage) and id(leaf.storage) in storages:
        return replace(leaf, storage=storages[id(leaf.storage)])
    return leaf


def on(
    storage: Storage, like: Tensor, dtype: DType | None = None, offset: int | None = None
) -> Tensor:
    """Return `like` on another storage.

    Spelled out, as `dataclasses.replace` takes half as long again.
    """
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
