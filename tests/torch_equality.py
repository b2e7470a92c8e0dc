"""Equality of two values that torch loaded: types, order, geometry, bytes, shared memory."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of the elements, row-major, whatever the dtype."""
    plain = (
        (tensor.int_repr() if tensor.is_quantized else tensor).detach().resolve_conj().resolve_neg()
    )
    return (
        plain.clone(memory_format=torch.contiguous_format)
        .flatten()
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def storage_bits(tensor: torch.Tensor) -> bytes:
    """The bytes of the whole storage; to iterate over one takes microseconds for each of them."""
    return _bytes(tensor.detach().untyped_storage())


def _bytes(storage: torch.UntypedStorage) -> bytes:
    return torch.empty(0, dtype=torch.uint8).set_(storage).numpy().tobytes()


def sha256(tensor: torch.Tensor) -> str | None:
    """Of those bytes; None where a tensor has none of its own."""
    if tensor.layout != torch.strided or tensor.is_meta:
        return None
    return hashlib.sha256(bits(tensor)).hexdigest()


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[str, Any]]:
    """Tensors and scalars with their dotted paths, in order."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, (*path, key))
    elif isinstance(node, (list, tuple)) and not isinstance(node, torch.Size):
        for position, value in enumerate(node):
            yield from leaves(value, (*path, position))
    else:
        yield ".".join(map(str, path)), node


def tensors(root: Any) -> list[tuple[str, torch.Tensor]]:
    return [(path, leaf) for path, leaf in leaves(root) if torch.is_tensor(leaf)]


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether it can share memory; storages of no bytes are left to torch."""
    return (
        tensor.layout == torch.strided
        and not tensor.is_meta
        and tensor.untyped_storage().nbytes() > 0
    )


def ties(named: dict[str, torch.Tensor]) -> list[list[str]]:
    """Names of tensors with memory, grouped by the storage that they share."""
    groups: dict[int, list[str]] = {}
    for name, tensor in named.items():
        if has_memory(tensor):
            groups.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    return sorted(map(sorted, groups.values()))


def same(want: Any, got: Any, storages: bool = True) -> None:
    """Assert that two trees are equal; of `storages`, that they are equal as wholes and shared
    alike."""
    _Comparison(storages).compare(want, got, ())


class _Comparison:
    def __init__(self, storages: bool) -> None:
        self.storages = storages
        self.twins: dict[int, int] = {}  # identity on one side -> on the other
        self.back: dict[int, int] = {}
        self.keep: list[Any] = []

    def paired(self, want: int, got: int, path: tuple[Any, ...]) -> bool:
        """Return whether the two have been met before; they must then have been met together."""
        met = want in self.twins
        assert self.twins.setdefault(want, got) == got, f"shared otherwise: {path}"
        assert self.back.setdefault(got, want) == want, f"shared otherwise: {path}"
        return met

    def compare(self, want: Any, got: Any, path: tuple[Any, ...]) -> None:
        assert type(want) is type(got), (path, type(want), type(got))
        if (
            torch.is_tensor(want)
            or isinstance(want, (dict, list, bytearray))
            or (type(want) is tuple and want)
        ):
            self.keep += (want, got)
            if self.paired(id(want), id(got), path):
                return
        if torch.is_tensor(want):
            self.tensor(want, got, path)
        elif isinstance(want, dict):
            self.compare(list(map(repr, want)), list(map(repr, got)), (*path, "<keys>"))
            for key, value, other in zip(want, want.values(), got.values(), strict=True):
                self.compare(value, other, (*path, key))
            if isinstance(want, OrderedDict):
                self.compare(vars(want), vars(got), (*path, "<attributes>"))
        elif isinstance(want, (list, tuple)):
            assert len(want) == len(got), path
            for position, (value, other) in enumerate(zip(want, got, strict=True)):
                self.compare(value, other, (*path, position))
        else:
            assert (want == got and repr(want) == repr(got)) or want != want, (path, want, got)

    def tensor(self, want: torch.Tensor, got: torch.Tensor, path: tuple[Any, ...]) -> None:
        for fact in ("dtype", "shape", "layout", "requires_grad", "is_quantized", "device"):
            assert getattr(want, fact) == getattr(got, fact), (path, fact)
        self.compare(dict(vars(want)), dict(vars(got)), (*path, "<attributes>"))
        if want.layout == torch.sparse_coo:
            self.compare(want._indices(), got._indices(), (*path, "<indices>"))
            self.compare(want._values(), got._values(), (*path, "<values>"))
            assert want.is_coalesced() == got.is_coalesced(), path
        elif want.is_meta:
            assert want.stride() == got.stride(), path
        else:
            self.strided(want, got, path)

    def strided(self, want: torch.Tensor, got: torch.Tensor, path: tuple[Any, ...]) -> None:
        if want.is_quantized:
            assert repr(want) == repr(got), path
        else:
            assert bits(want) == bits(got), path
        if not self.storages:
            return
        for fact in ("stride", "storage_offset", "is_conj", "is_neg"):
            assert getattr(want, fact)() == getattr(got, fact)(), (path, fact)
        mine, other = want.untyped_storage(), got.untyped_storage()
        self.keep += (mine, other)
        assert mine.nbytes() == other.nbytes(), path
        if mine.nbytes() and not self.paired(mine._cdata, other._cdata, path):
            assert _bytes(mine) == _bytes(other), path
