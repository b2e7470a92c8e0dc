"""A whole checkpoint in a safetensors file (``--all``): each storage once, the tree as metadata.

A storage that one tensor fills, row by row, is an entry under the path of that tensor, as every
reader sees it. Any other (the base of views, of a type that the format does not know) is an entry
``ckptkit.storage.<n>`` of bytes, and a long byte string ``ckptkit.bytes.<n>``. The record
``ckptkit`` in ``__metadata__`` holds what remains:

    version 1, root, tree         a value and a list of statements, below
    ties                          names noted in the hub's convention for other readers

The tree is a list of statements. Each makes a node, numbered from 0 in the order of the list, or
fills one that was made before:

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

Statements are untrusted input. The tree is built by the rules of the pickle machine, which also
decides how an object reads.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

from ckptkit.core import dtypes
from ckptkit.core.bytesource import Record
from ckptkit.core.dtypes import UINT8, DType
from ckptkit.core.errors import AmbiguousError, CkptkitError, FormatError, UnsupportedError
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
    join,
    walk,
)
from ckptkit.core.weights import as_tensor
from ckptkit.formats.strict_json import is_utf8
from ckptkit.pickles import globals as known
from ckptkit.pickles.builders import built
from ckptkit.pickles.dict_keys import KeyCheck
from ckptkit.pickles.nested import check_no_calls
from ckptkit.pickles.trust import Policy

# Writing


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


class TreeEncoder:
    """Encode a tree as statements. `entry` places the bytes of a storage or a blob."""

    def __init__(self, entry: Callable[[Storage | StoredBytes], SkeletonEntry]) -> None:
        self._entry = entry
        self._statements: list[Statement] = []
        self._count = 0
        self._numbers: dict[object, int] = {}  # by id, of a Global by its names
        self._keep: list[Node] = []  # ids in it stay taken
        self._making: set[int] = set()
        self._policy = Policy()

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
        self._policy.check_names(root)
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
        self._policy.check_keys(node)
        number = self._emit(node, "ordered" if isinstance(node, OrderedMapping) else "dict")
        flat = list(_flat(node.items()))
        yield from flat
        if flat:
            self._fill(number, "set", self._values(flat))
        if isinstance(node, OrderedMapping) and node.state is not None:
            self._policy.check_fields(node.state)
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
        self._policy.check_object(node)
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
            self._policy.hold(node)
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


# Reading


class Read(NamedTuple):
    root: Node
    globals: tuple[Global, ...]
    used: frozenset[str]  # the entries that it refers to


def read(skeleton: Skeleton, entries: Mapping[str, Tensor]) -> Read:
    """Build the tree that the statements describe over the entries of a header.

    Raises InputErrors of several kinds.
    """
    reader = _TreeDecoder(entries)
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


class _TreeDecoder:
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
    "tuple": _TreeDecoder.tuple_,
    "set": _TreeDecoder.set_,
    "frozenset": _TreeDecoder.frozenset_,
    "text": lambda reader, text: _decoded(text).decode("utf-8", "surrogatepass"),
    "bytes": lambda reader, text: _decoded(text),
    "bytearray": lambda reader, text: bytearray(_decoded(text)),
    "python2": lambda reader, text: ByteString(_decoded(text)),
    "int": lambda reader, text: _int(text),
    "float": lambda reader, text: _float(text),
    "complex": lambda reader, text: complex(*struct.unpack(">dd", bytes.fromhex(text))),
    "global": _TreeDecoder.global_,
    "object": _TreeDecoder.object_,
    "storage": _TreeDecoder.storage,
    "tensor": _TreeDecoder.tensor,
    "typed": _TreeDecoder.typed,
    "blob": _TreeDecoder.blob,
}


# The whole checkpoint


Obstacle = Callable[[str, Tensor], str | None]


class StoredTree:
    """The entries of a file that holds all of `root`: tensors by name, and statements over them.

    ``obstacle(name, tensor)`` says why a tensor cannot be an entry as it is, None if it can.
    """

    def __init__(self, root: Node, obstacle: Obstacle) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._fillers = _fillers(root, obstacle)
        self._taken = {name for name, _ in self._fillers.values()}
        self._entries: dict[int, SkeletonEntry] = {}  # by id of the storage or blob
        self.tree = TreeEncoder(self._entry).write(root)
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


def record_of(whole: StoredTree) -> dict[str, Any]:
    """Return the record of the tree."""
    return {"root": whole.tree.root, "tree": whole.tree.statements, "ties": sorted(whole.ties)}


def restore(record: Mapping[str, Any], entries: Mapping[str, Tensor]) -> Read:
    """Restore the tree of a record. Raises FormatError where it does not fit the entries."""
    statements = record["tree"]
    if not isinstance(statements, list):
        raise FormatError("its tree is not a list")
    found = read(Skeleton(statements, record.get("root")), entries)
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
