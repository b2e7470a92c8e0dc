"""Build a tree from the statements of :mod:`skeleton`, which are untrusted input."""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from ckptkit.core import dtypes
from ckptkit.core.errors import AmbiguousError, CkptkitError, FormatError
from ckptkit.core.limits import check
from ckptkit.core.tensor import Storage, Tensor, TypedStorage, contiguous_stride
from ckptkit.core.tree import ByteString, Global, Node, Object, OrderedMapping, SetNode, StoredBytes
from ckptkit.formats.safetensors.skeleton import FLAGS, Skeleton, Statement
from ckptkit.pickles import globals as known
from ckptkit.pickles.builders import built
from ckptkit.pickles.dict_keys import KeyCheck


class Read(NamedTuple):
    root: Node
    globals: tuple[Global, ...]
    used: frozenset[str]  # the entries that it refers to


def read(skeleton: Skeleton, entries: Mapping[str, Tensor]) -> Read:
    """Build the tree that the statements describe over the entries of a header.

    Raises InputErrors of several kinds.
    """
    reader = _Reader(entries)
    for statement in skeleton.statements:
        with _explained(f"statement {str(statement)[:80]}"):
            reader.carry_out(statement)
    with _explained("its root"):
        root = reader.value(skeleton.root)
    return Read(root, tuple(reader.globals), frozenset(reader.used))


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Name the statement in errors; report a Python error as a file that ckptkit did not write."""
    try:
        yield
    except CkptkitError as error:
        error.message = f"{what}: {error.message}"
        raise
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, struct.error) as error:
        raise FormatError(f"{what} is invalid") from error


class _Reader:
    def __init__(self, entries: Mapping[str, Tensor]) -> None:
        self.nodes: list[Node] = []
        self.globals: list[Global] = []
        self.used: set[str] = set()
        self._entries = entries
        self._keys = KeyCheck()

    def carry_out(self, statement: Statement) -> None:
        what, *rest = statement
        if what == "fill":
            self._fill(*rest)
        else:
            self.nodes.append(_MAKERS[what](self, *rest))

    def value(self, operand: Any) -> Node:
        """Return the value of an operand. Nodes that are not made yet are refused."""
        if operand.__class__ is list:
            (number,) = operand
            node = self.nodes[_natural(number)]
            if isinstance(node, _Named):
                raise FormatError("a storage is not a value")
            return node
        if operand.__class__ is dict:
            raise FormatError("a JSON object is not a value")
        return operand

    def _fill(self, number: int, step: str, *operands: Any) -> None:
        target = self.nodes[_natural(number)]
        values = [self.value(each) for each in operands]
        if isinstance(target, Object):
            self._step(target, step, values)
        elif step == "set" and isinstance(target, dict):
            self._items(target, values)
        elif step == "append" and target.__class__ is list:
            target.extend(values)
        elif step == "build" and isinstance(target, OrderedMapping) and target.state is None:
            (target.state,) = values
        else:
            raise FormatError(f"a {type(target).__name__} cannot be filled this way")

    def _items(self, target: dict[Node, Node], values: list[Node]) -> None:
        for key, value in zip(values[0::2], values[1::2], strict=True):
            if not self._keys.hashable(key) or key in target:
                raise AmbiguousError("a key is repeated or not hashable")
            target[key] = value

    def _step(self, target: Object, step: str, values: list[Node]) -> None:
        if step == "build":
            (state,) = values
            target.steps.append((step, state))
            built(target, state)
        elif step == "set":
            target.steps.append((step, list(zip(values[0::2], values[1::2], strict=True))))
        elif step in ("append", "add"):
            target.steps.append((step, values))
        else:
            raise FormatError("an object cannot be filled this way")

    def tuple_(self, *operands: Any) -> Node:
        return tuple(self.value(each) for each in operands)

    def set_(self, *operands: Any) -> Node:
        return SetNode([self.value(each) for each in operands])

    def frozenset_(self, *operands: Any) -> Node:
        return SetNode([self.value(each) for each in operands], frozen=True)

    def global_(self, module: str, name: str) -> Node:
        if not isinstance(module, str) or not isinstance(name, str):
            raise FormatError("a global is named by two texts")
        check("name_bytes", max(len(module), len(name)), "characters of a name")
        found = Global(module, name)
        self.globals.append(found)
        return found

    def object_(self, callable_: Any, arguments: Any, keywords: Any, new: bool) -> Node:
        made, args, kwargs = self.value(callable_), self.value(arguments), self.value(keywords)
        if (
            not isinstance(args, tuple)
            or not (kwargs is None or isinstance(kwargs, dict))
            or new.__class__ is not bool
        ):
            raise FormatError("an object is not made this way")
        reducer = (
            known.REDUCERS.get((made.module, made.name))
            if isinstance(made, Global) and not new
            else None
        )
        return (
            Object(made, args, new=new, kwargs=kwargs) if reducer is None else reducer(made, args)
        )

    def storage(self, entry: str, device: str, big_endian: bool = False) -> Node:
        if not isinstance(device, str) or big_endian.__class__ is not bool:
            raise FormatError("a storage is not described this way")
        held = self._take(entry).storage
        assert held is not None
        return _Named(Storage(held.record, device, None, big_endian), entry)

    def _take(self, entry: str) -> Tensor:
        if entry in self.used:
            raise AmbiguousError(f"the bytes of {entry[:80]!r} are described twice")
        self.used.add(entry)
        return self._entries[entry]

    def tensor(self, storage: Any, fields: dict[str, Any]) -> Node:
        named = self._named(storage) if storage is not None else None
        entry = self._entries[named.entry] if named is not None else None
        left = dict(fields)
        dtype = (
            dtypes.BY_NAME[left.pop("dtype")] if "dtype" in left or entry is None else entry.dtype
        )
        shape = tuple(left.pop("shape")) if "shape" in left or entry is None else entry.shape
        layout = left.pop("layout", "strided")
        stride = tuple(left.pop("stride")) if "stride" in left else contiguous_stride(shape)
        if layout != "strided":
            stride = ()
        kind, offset = left.pop("kind", "tensor"), left.pop("offset", 0)
        if kind not in ("tensor", "parameter", "ndarray") or not isinstance(layout, str):
            raise FormatError("there is no such kind of tensor")
        if any(flag not in FLAGS or value is not True for flag, value in left.items()):
            raise FormatError("a tensor has no such fields")
        held = named.storage if named is not None else None
        return Tensor(held, dtype, shape, stride, offset, kind=kind, layout=layout, **left)

    def _named(self, operand: Any) -> _Named:
        (number,) = operand
        named = self.nodes[_natural(number)]
        if not isinstance(named, _Named):
            raise FormatError("a tensor is made of something that is not a storage")
        return named

    def typed(self, storage: Any, dtype: str | None, start: int, stop: int | None) -> Node:
        held = self._named(storage).storage
        element = None if dtype is None else dtypes.BY_NAME[dtype]
        room = held.nbytes // (1 if element is None else element.itemsize)
        if not 0 <= _natural(start) <= (room if stop is None else _natural(stop)) <= room:
            raise FormatError("a view leaves its storage")
        return TypedStorage(held, element, start, stop)

    def blob(self, entry: str, kind: str) -> Node:
        if kind not in ("bytes", "bytearray", "python2"):
            raise FormatError("there is no such kind of byte string")
        held = self._take(entry).storage
        assert held is not None
        return StoredBytes(held.record.locate(), kind)


class _Named(NamedTuple):
    """A storage, and the entry that its bytes are in. Not a value by itself."""

    storage: Storage
    entry: str


def _natural(number: Any) -> int:
    if number.__class__ is not int or number < 0:
        raise FormatError("not a natural number")
    return int(number)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise FormatError("not base64") from error


def _int(text: str) -> int:
    check("int_bytes", len(text) // 2, "bytes of an integer")
    return int.from_bytes(bytes.fromhex(text), "big", signed=True)


def _float(text: str) -> float:
    value: float = struct.unpack(">d", bytes.fromhex(text))[0]
    return value


_MAKERS: dict[str, Callable[..., Node]] = {
    "dict": lambda reader: {},
    "ordered": lambda reader: OrderedMapping(),
    "list": lambda reader: [],
    "tuple": _Reader.tuple_,
    "set": _Reader.set_,
    "frozenset": _Reader.frozenset_,
    "text": lambda reader, text: _decoded(text).decode("utf-8", "surrogatepass"),
    "bytes": lambda reader, text: _decoded(text),
    "bytearray": lambda reader, text: bytearray(_decoded(text)),
    "python2": lambda reader, text: ByteString(_decoded(text)),
    "int": lambda reader, text: _int(text),
    "float": lambda reader, text: _float(text),
    "complex": lambda reader, text: complex(*struct.unpack(">dd", bytes.fromhex(text))),
    "global": _Reader.global_,
    "object": _Reader.object_,
    "storage": _Reader.storage,
    "tensor": _Reader.tensor,
    "typed": _Reader.typed,
    "blob": _Reader.blob,
}
