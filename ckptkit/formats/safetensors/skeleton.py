"""Encode a whole tree as JSON: what ``--all`` writes next to the tensors of a safetensors file.

A list of statements. Each makes a node, numbered from 0 in the order of the list, or fills one that
was made before:

    ["dict"] ["ordered"] ["list"]                           empty, an OrderedDict among them
    ["tuple", value...] ["set", value...] ["frozenset", value...]
    ["bytes", base64] ["bytearray", base64] ["python2", base64]
    ["text", base64]                                        of UTF-8 with lone surrogates
    ["int", hex] ["float", hex] ["complex", hex]            two's complement; IEEE 754; big-endian
    ["global", module, name]
    ["object", callable, arguments, keywords, new]          see tree.Object; keywords null or a dict
    ["storage", entry, device]  and  true after it          bytes of an entry; big-endian ones
    ["tensor", storage, {...}]                              fields not in the entry: below
    ["typed", storage, dtype, start, stop]                  see tensor.TypedStorage
    ["blob", entry, kind]                                   see tree.StoredBytes

    ["fill", n, "set", key, value...]                       items of a dict, or set on an object
    ["fill", n, "append" | "add", value...]                 items of a list, or of an object
    ["fill", n, "build", value]                             the state of an object, the attributes
                                                            of an OrderedDict

A value is null, a boolean, an integer of up to 19 digits, a finite float, a text; or ``[n]``, a
node that was made. Fields of a tensor: dtype, shape, stride, offset, kind, layout, requires_grad,
conj, neg. Without them a tensor is what its entry is: that dtype and shape, row-major, from the
first element.

:mod:`skeleton_reader` builds the tree by the rules of the pickle machine, which also decides how an
object reads.
"""

from __future__ import annotations

import base64
import math
import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from ckptkit.core.dtypes import DType
from ckptkit.core.errors import AmbiguousError, FormatError, UnsupportedError
from ckptkit.core.limits import check
from ckptkit.core.tensor import Storage, Tensor, TypedStorage, contiguous_stride
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
from ckptkit.formats.common.plain_json import is_utf8
from ckptkit.pickles.nested import check_no_calls
from ckptkit.pickles.trust import check_fields, check_name, check_object

Statement = list[Any]
_INT = 10**19  # more digits are not read alike everywhere
FLAGS = ("requires_grad", "conj", "neg")


class Skeleton(NamedTuple):
    statements: list[Statement]
    root: Any  # a value


class SkeletonEntry(NamedTuple):
    """The bytes of a storage in a header: a tensor of its own, or plain bytes (dtype uint8)."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    big_endian: bool = False  # the bytes are left as they are


class Writer:
    """Encode a tree as statements. `entry` places the bytes of a storage or a blob."""

    def __init__(self, entry: Callable[[Storage | StoredBytes], SkeletonEntry]) -> None:
        self._entry = entry
        self._statements: list[Statement] = []
        self._count = 0
        self._numbers: dict[object, int] = {}  # by id, of a Global by its names
        self._keep: list[Node] = []  # ids in it stay taken
        self._making: set[int] = set()

    def write(self, root: Node) -> Skeleton:
        """Write the statements of a tree.

        Iterative: a generator per open node yields what must be made first.
        """
        frames: list[Iterator[Node]] = [iter((root,))]
        while frames:
            for node in frames[-1]:
                if not _is_inline(node) and self._number(node) is None:
                    frames.append(self._make(node))
                    check("depth", len(frames), "levels of values to write")
                    break
            else:
                frames.pop()
        return Skeleton(self._statements, self._value(root))

    def _number(self, node: Node) -> int | None:
        return self._numbers.get((node.module, node.name) if isinstance(node, Global) else id(node))

    def _value(self, node: Node) -> Any:
        if node.__class__ is str:
            check_no_calls(node)
        return node if _is_inline(node) else [self._number(node)]

    def _values(self, nodes: Iterable[Node]) -> list[Any]:
        return [self._value(node) for node in nodes]

    def _emit(self, node: Node, *statement: Any) -> int:
        self._numbers[(node.module, node.name) if isinstance(node, Global) else id(node)] = (
            number
        ) = self._count
        self._keep.append(node)
        self._count += 1
        self._statements.append(list(statement))
        return number

    def _fill(self, number: int, step: str, values: list[Any]) -> None:
        self._statements.append(["fill", number, step, *values])

    def _make(self, node: Node) -> Iterator[Node]:
        if isinstance(node, dict):
            return self._dict(node)
        if isinstance(node, list):
            return self._list(node)
        if isinstance(node, (tuple, SetNode)):
            return self._fixed(node)
        if isinstance(node, Object):
            return self._object(node)
        self._leaf(node)
        return iter(())

    def _dict(self, node: dict[Node, Node]) -> Iterator[Node]:
        number = self._emit(node, "ordered" if isinstance(node, OrderedMapping) else "dict")
        flat = list(_flat(node.items()))
        yield from flat
        if flat:
            self._fill(number, "set", self._values(flat))
        if isinstance(node, OrderedMapping) and node.state is not None:
            check_fields(node.state)
            yield node.state
            self._fill(number, "build", [self._value(node.state)])

    def _list(self, node: list[Node]) -> Iterator[Node]:
        number = self._emit(node, "list")
        yield from node
        if node:
            self._fill(number, "append", self._values(node))

    def _fixed(self, node: tuple[Node, ...] | SetNode) -> Iterator[Node]:
        items = node.items if isinstance(node, SetNode) else node
        yield from items
        if self._number(node) is None:  # else it contains itself, and was made meanwhile
            kind = "tuple"
            if isinstance(node, SetNode):
                kind = "frozenset" if node.frozen else "set"
            self._emit(node, kind, *self._values(items))

    def _object(self, node: Object) -> Iterator[Node]:
        if id(node) in self._making:
            raise UnsupportedError("an object is an argument of its own construction")
        self._making.add(id(node))
        check_object(node)
        if self._number(node.callable) is None:
            self._emit(node.callable, "global", node.callable.module, node.callable.name)
        yield node.args
        yield node.kwargs
        made = self._values((node.callable, node.args, node.kwargs))
        number = self._emit(node, "object", *made, node.new)
        for step, value in node.steps:
            items = value
            if step == "build":
                items = [value]
            elif step == "set":
                items = _flat(value)
            yield from items
            self._fill(number, step, self._values(items))

    def _leaf(self, node: Node) -> None:
        if isinstance(node, Tensor):
            self._tensor(node)
        elif isinstance(node, TypedStorage):
            dtype = None if node.dtype is None else node.dtype.name
            self._emit(node, "typed", self._storage(node.storage), dtype, node.start, node.stop)
        elif isinstance(node, StoredBytes):
            check_no_calls(node)
            self._emit(node, "blob", self._entry(node).name, node.kind)
        elif isinstance(node, Global):
            check_name(node)
            self._emit(node, "global", node.module, node.name)
        elif isinstance(node, Pairs):
            raise AmbiguousError(
                "a mapping has repeated or unhashable keys, which cannot be written"
            )
        else:
            self._emit(node, *_encoded(node))

    def _storage(self, storage: Storage) -> list[int]:
        if id(storage) not in self._numbers:
            if not is_utf8(storage.device):
                raise UnsupportedError(
                    "the name of a device is not UTF-8, which cannot be written as text"
                )
            entry = self._entry(storage)
            self._emit(
                storage,
                "storage",
                entry.name,
                storage.device,
                *([True] if entry.big_endian else []),
            )
        return [self._numbers[id(storage)]]

    def _tensor(self, tensor: Tensor) -> None:
        flags = {flag: True for flag in FLAGS if getattr(tensor, flag)}
        fields: dict[str, Any] = {"dtype": tensor.dtype.name, "shape": list(tensor.shape)}
        storage = None
        if tensor.storage is not None:
            entry = self._entry(tensor.storage)
            storage = self._storage(tensor.storage)
            if (entry.dtype, entry.shape) == (tensor.dtype, tensor.shape):
                fields = {}
        if tensor.layout != "strided":
            fields["layout"] = tensor.layout
        elif tensor.stride != contiguous_stride(tensor.shape):
            fields["stride"] = list(tensor.stride)
        if tensor.offset:
            fields["offset"] = tensor.offset
        if tensor.kind != "tensor":
            fields["kind"] = tensor.kind
        self._emit(tensor, "tensor", storage, {**fields, **flags})


def _flat(pairs: Iterable[tuple[Node, Node]]) -> list[Node]:
    return list(chain.from_iterable(pairs))


def _is_inline(node: Node) -> bool:
    kind = node.__class__
    if kind is str:
        return node.isascii() or is_utf8(node)
    if kind is int:
        return bool(-_INT < node < _INT)
    return node is None or kind is bool or (kind is float and math.isfinite(node))


def _encoded(node: Node) -> tuple[str, str]:
    if isinstance(node, str):
        return "text", _base64(node.encode("utf-8", "surrogatepass"))
    if isinstance(node, (bytes, bytearray)):
        check_no_calls(node)
        return type(node).__name__, _base64(node)
    if isinstance(node, ByteString):
        check_no_calls(node)
        return "python2", _base64(node.data)
    if isinstance(node, int):
        return "int", node.to_bytes(node.bit_length() // 8 + 1, "big", signed=True).hex()
    if isinstance(node, float):
        return "float", struct.pack(">d", node).hex()
    if isinstance(node, complex):
        return "complex", struct.pack(">dd", node.real, node.imag).hex()
    raise FormatError(f"a value of type {type(node).__name__} cannot be kept in a checkpoint")


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()
