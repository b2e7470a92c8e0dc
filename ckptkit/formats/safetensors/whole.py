"""A whole checkpoint in a safetensors file (``--all``): each storage once, the tree as metadata.

A storage that one tensor fills, row by row, is an entry under the path of that tensor, as every
reader sees it. Any other (the base of views, of a type that the format does not know) is an entry
``ckptkit.storage.<n>`` of bytes, and a long byte string ``ckptkit.bytes.<n>``. The record
``ckptkit`` in ``__metadata__`` holds what remains:

    version 1, root, tree         see :mod:`skeleton`
    ties                          names noted in the hub's convention for other readers
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ckptkit.core.bytesource import Record
from ckptkit.core.dtypes import UINT8
from ckptkit.core.errors import FormatError
from ckptkit.core.tensor import Storage, Tensor, contiguous_stride
from ckptkit.core.tree import Node, StoredBytes, join, walk
from ckptkit.core.weights import as_tensor
from ckptkit.formats.common.plain_json import is_utf8
from ckptkit.formats.safetensors import skeleton, skeleton_reader
from ckptkit.formats.safetensors.skeleton import Skeleton, SkeletonEntry
from ckptkit.formats.safetensors.skeleton_reader import Read

Obstacle = Callable[[str, Tensor], str | None]


class Whole:
    """The entries of a file that holds all of `root`: tensors by name, and statements over them.

    ``obstacle(name, tensor)`` says why a tensor cannot be an entry as it is, None if it can.
    """

    def __init__(self, root: Node, obstacle: Obstacle) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._fillers = _fillers(root, obstacle)
        self._taken = {name for name, _ in self._fillers.values()}
        self._entries: dict[int, SkeletonEntry] = {}  # by id of the storage or blob
        self.tree = skeleton.Writer(self._entry).write(root)
        self.ties = dict(self._tied(root))

    def _entry(self, held: Storage | StoredBytes) -> SkeletonEntry:
        if id(held) not in self._entries:
            self._entries[id(held)] = self._new(held)
        return self._entries[id(held)]

    def _new(self, held: Storage | StoredBytes) -> SkeletonEntry:
        found = self._fillers.get(id(held))
        if found is not None and found[0] not in self.tensors:
            name, tensor = found
            self.tensors[name] = tensor
            return SkeletonEntry(name, tensor.dtype, tensor.shape)
        record: Record = held.extent if isinstance(held, StoredBytes) else held.record
        big_endian = isinstance(held, Storage) and held.big_endian
        name = self._reserved("bytes" if isinstance(held, StoredBytes) else "storage")
        self.tensors[name] = Tensor(Storage(record), UINT8, (record.length,), (1,))
        return SkeletonEntry(name, UINT8, (record.length,), big_endian)

    def _reserved(self, what: str) -> str:
        number = len(self.tensors)
        while (name := f"ckptkit.{what}.{number}") in self.tensors or name in self._taken:
            number += 1
        return name

    def _tied(self, root: Node) -> Iterator[tuple[str, str]]:
        """Map further names of tensors that are identical to an entry to its name."""
        for name, tensor in _named_tensors(root):
            if id(tensor.storage) in self._entries and name not in self.tensors and is_utf8(name):
                kept = self._entries[id(tensor.storage)].name
                if _view(tensor) == _view(self.tensors[kept]):
                    yield name, kept


def record_of(whole: Whole) -> dict[str, Any]:
    """Return the record of the tree."""
    return {"root": whole.tree.root, "tree": whole.tree.statements, "ties": sorted(whole.ties)}


def restore(record: Mapping[str, Any], entries: Mapping[str, Tensor]) -> Read:
    """Restore the tree of a record. Raises FormatError where it does not fit the entries."""
    statements = record["tree"]
    if not isinstance(statements, list):
        raise FormatError("its tree is not a list")
    found = skeleton_reader.read(Skeleton(statements, record.get("root")), entries)
    if len(found.used) < len(entries):
        left = next(name for name in entries if name not in found.used)
        raise FormatError(f"its tree has no place for {left[:80]!r}")
    return found


def _view(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride, tensor.offset, tensor.conj, tensor.neg


def _named_tensors(root: Node) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with bytes, by path."""
    for path, node in walk(root):
        tensor = as_tensor(node)
        if tensor is not None and tensor.storage is not None:
            yield join(path), tensor


def _fillers(root: Node, obstacle: Obstacle) -> dict[int, tuple[str, Tensor]]:
    """Map each storage's id to the first tensor that fills it and can be an entry, and its path."""
    found: dict[int, tuple[str, Tensor]] = {}
    types: dict[int, set[str]] = {}
    for name, tensor in _named_tensors(root):
        types.setdefault(id(tensor.storage), set()).add(tensor.dtype.name)
        if id(tensor.storage) not in found and _fills(tensor) and obstacle(name, tensor) is None:
            found[id(tensor.storage)] = name, tensor
    return {
        key: (name, tensor)
        for key, (name, tensor) in found.items()
        if not (tensor.storage is not None and tensor.storage.big_endian and len(types[key]) > 1)
    }


def _fills(tensor: Tensor) -> bool:
    """Return whether the elements, row by row, are the bytes of the storage, first to last."""
    whole = (
        tensor.storage is not None and tensor.nbytes == tensor.storage.nbytes and not tensor.offset
    )
    return (
        whole
        and tensor.stride == contiguous_stride(tensor.shape)
        and not (tensor.conj or tensor.neg)
    )
