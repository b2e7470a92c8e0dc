"""Shared by the tests of the pickle machine and its writer: nodes as values, and ways through
torch."""

from __future__ import annotations

import io
import math
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch

from ckptkit.compute.operation import stream
from ckptkit.core.bytesource import LocalFile, Memory
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.tensor import Storage, Tensor, TypedStorage
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
from ckptkit.formats.format import Probe
from ckptkit.formats.table import TORCH_ZIP
from ckptkit.pickles.storages import storage_class
from ckptkit.pickles.values import unpickle
from ckptkit.pickles.writer import Pickled, write_pickle


def machine(data: bytes) -> Node:
    """The tree of a pickle at hand."""
    return unpickle(Memory(data)).root


def emit(root: Node, **options: Any) -> Pickled:
    """The pickle of a tree that has no storages."""
    return write_pickle(root, lambda typed: (), **options)


type_of = {"bytes": bytes, "bytearray": bytearray}


def to_python(node: Node) -> Any:
    """The Python value that a small tree without objects stands for."""
    if isinstance(node, StoredBytes):
        data = b"".join(stream(node.extent))
        return data.decode("latin-1") if node.kind == "python2" else type_of[node.kind](data)
    if isinstance(node, ByteString):
        return str(node)
    if isinstance(node, dict):
        return {to_python(key): to_python(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(map(to_python, node))
    if isinstance(node, SetNode):
        return (frozenset if node.frozen else set)(map(to_python, node.items))
    assert node is None or isinstance(node, (bool, int, float, complex, str, bytes, bytearray)), (
        node
    )
    return node


def same(a: Any, b: Any) -> bool:
    """Equality of type and of bits, order of dicts included."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dict):
        return same(list(a.items()), list(b.items()))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


_SCALARS = (bool, int, float, complex, str, bytes, bytearray, Global, ByteString, type(None))


def isomorphic(a: Node, b: Node) -> bool:
    """Return whether two trees are equal in every type, value and order, and in what is shared with
    what."""
    forward: dict[int, int] = {}
    backward: dict[int, int] = {}
    keep: list[Node] = []  # ids stay taken
    waiting: list[tuple[Node, Node]] = [(a, b)]
    while waiting:
        x, y = waiting.pop()
        if isinstance(x, _SCALARS) or (x == () and isinstance(x, tuple)):
            if not same(x, y):
                return False
            continue
        known = id(x) in forward
        if type(x) is not type(y) or forward.setdefault(id(x), id(y)) != id(y):
            return False
        if backward.setdefault(id(y), id(x)) != id(x):
            return False
        if not known:
            parts = _parts(x), _parts(y)
            keep.append((x, y, parts))
            if len(parts[0]) != len(parts[1]):
                return False
            waiting.extend(zip(*parts, strict=True))
    return True


def _parts(node: Node) -> list[Node]:
    if isinstance(node, dict):
        inner = [each for pair in node.items() for each in pair]
        return [*inner, node.state] if isinstance(node, OrderedMapping) else inner
    if isinstance(node, (list, tuple)):
        return list(node)
    if isinstance(node, SetNode):
        return [node.frozen, *node.items]
    if isinstance(node, Object):
        steps = [list(map(list, value)) if step == "set" else value for step, value in node.steps]
        return [
            node.callable, node.args, node.new, node.kwargs, [step for step, _ in node.steps],
            *steps,
        ]  # fmt: skip
    if isinstance(node, Tensor):
        return [
            node.dtype.name, *node.shape, "stride", *node.stride, node.offset, node.requires_grad, node.kind,
            node.layout, node.conj, node.neg, node.storage,
        ]  # fmt: skip
    if isinstance(node, TypedStorage):
        return [None if node.dtype is None else node.dtype.name, node.storage]
    if isinstance(node, Storage):
        return [node.device, node.nbytes, b"".join(stream(node.record.locate()))]
    if isinstance(node, StoredBytes):
        return [node.kind, b"".join(stream(node.extent))]
    if isinstance(node, Pairs):
        return [*(each for pair in node.pairs for each in pair), node.state]
    raise AssertionError(node)


# Through torch


def saved(value: Any, *, crc: bool = True, **options: Any) -> bytes:
    """Return what torch.save writes, with checksums or without."""
    buffer = io.BytesIO()
    torch.serialization.set_crc32_options(crc)
    try:
        torch.save(value, buffer, **options)
    finally:
        torch.serialization.set_crc32_options(True)
    return buffer.getvalue()


def read_file(path: Path) -> Checkpoint:
    """A torch-zip file, through its format alone."""
    return TORCH_ZIP.read(Probe(LocalFile(path)))


def read_saved(value: Any, folder: Path, **options: Any) -> Checkpoint:
    """Return what torch.save writes, as ckptkit reads it."""
    path = folder / "saved.pt"
    path.write_bytes(saved(value, **options))
    return read_file(path)


class Written:
    """A tree written by the pickle writer, in an archive put together by zipfile."""

    def __init__(self, root: Node, path: Path, **options: Any) -> None:
        self.path = path
        self._numbers: dict[int, int] = {}
        self._storages: list[Storage] = []
        self.pickled = write_pickle(root, self._pid, **options)
        with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
            archive.writestr("archive/data.pkl", self.pickled.data)
            archive.writestr("archive/byteorder", b"little")
            for number, storage in enumerate(self._storages):
                archive.writestr(
                    f"archive/data/{number}", b"".join(stream(storage.record.locate()))
                )
            archive.writestr("archive/version", b"3\n")

    def _pid(self, typed: TypedStorage) -> tuple[Node, ...]:
        storage = typed.storage
        number = self._numbers.setdefault(id(storage), len(self._storages))
        if number == len(self._storages):
            self._storages.append(storage)
        numel = storage.nbytes // (1 if typed.dtype is None else typed.dtype.itemsize)
        return "storage", storage_class(typed.dtype), str(number), storage.device, numel

    def load(self, **options: Any) -> Any:
        """Return what torch makes of it; weights_only unless said otherwise."""
        return torch.load(self.path, **{"weights_only": True, **options})
