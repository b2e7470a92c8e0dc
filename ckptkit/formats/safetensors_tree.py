"""Store a complete checkpoint in a safetensors file (``--all``): tensors, and the tree as metadata.

The header of the file contains these entries:

* A tensor for each storage that one contiguous tensor fills. The name of the entry is the path of
  this tensor. Every safetensors reader can load this entry.
* A uint8 tensor called ``ckptkit.storage.<n>`` for each other storage. Examples are the base of
  several views, and a storage of a dtype that safetensors lacks.
* A uint8 tensor called ``ckptkit.bytes.<n>`` for each long byte string.

The metadata entry ``ckptkit`` contains a JSON record:

    version               1
    root                  a value, see below
    tree                  a list of statements, see below
    ties                  tied names; other metadata entries record the ties for other readers

A statement creates a node of the tree, or fills a node that an earlier statement created. Nodes are
numbered from 0 in the order of the list. These statements create a node:

    ["dict"] ["list"]                                an empty dict or list
    ["ordered"]                                      an empty OrderedDict
    ["tuple", value...] ["set", value...] ["frozenset", value...]
    ["bytes", base64] ["bytearray", base64]
    ["python2", base64]                              a byte string of Python 2
    ["text", base64]                                 a string with lone surrogates, as UTF-8
    ["int", hex]                                     a big-endian integer in two's complement
    ["float", hex] ["complex", hex]                  big-endian IEEE 754 numbers
    ["global", module, name]                         a class or function
    ["object", callable, arguments, keywords, new]   see tree.Object
    ["storage", entry, device]                       the bytes of a header entry
    ["storage", entry, device, true]                 the big-endian bytes of a header entry
    ["tensor", storage, {...}]                       a tensor with the fields that are listed below
    ["typed", storage, dtype, start, stop]           see tensor.TypedStorage
    ["blob", entry, kind]                            see tree.StoredBytes

These statements fill node number n:

    ["fill", n, "set", key, value...]                add items to a dict or object
    ["fill", n, "append" | "add", value...]          add items to a list or object
    ["fill", n, "build", value]                      set the state of an object, or the attributes
                                                     of an OrderedDict

The keywords of an object are null or a dict.

A value is null, a boolean, an integer of up to 19 digits, a finite float, a string, or ``[n]``.
``[n]`` refers to node number n. An earlier statement must have created this node. The fields of a
tensor are dtype, shape, stride, offset, kind, layout, requires_grad, conj and neg. By default, the
tensor has the dtype and shape of the header entry, a row-major stride, and the offset 0.

Statements are untrusted input. Therefore ckptkit creates objects from statements by the same rules
as from a pickle. The rules for pickles also determine which objects are tensors.
"""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from ckptkit.core import dtypes
from ckptkit.core.bytesource import Record
from ckptkit.core.dtypes import UINT8, DType
from ckptkit.core.errors import AmbiguousError, CkptkitError, FormatError, UnsupportedError
from ckptkit.core.limits import check
from ckptkit.core.tensor import Storage, Tensor, TypedStorage, contiguous_stride
from ckptkit.core.text import flatten
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
    type_name,
    walk,
)
from ckptkit.core.weights import as_tensor
from ckptkit.formats.strict_json import is_utf8
from ckptkit.pickles import globals as known
from ckptkit.pickles.globals import built
from ckptkit.pickles.policy import Policy
from ckptkit.pickles.streams import check_no_calls
from ckptkit.pickles.values import KeyCheck

# Writing


Statement = list[Any]
_INT = 10**19  # JSON readers return different values for longer integers
FLAGS = ("requires_grad", "conj", "neg")


class Skeleton(NamedTuple):
    statements: list[Statement]
    root: Any  # a value


class SkeletonEntry(NamedTuple):
    """The header entry for the bytes of a storage. The dtype is the dtype of a tensor, or uint8."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    big_endian: bool = False  # whether the bytes are big-endian


class TreeEncoder:
    """Encodes a tree as statements.

    `entry` returns the header entry of a storage or byte string.
    """

    def __init__(self, entry: Callable[[Storage | StoredBytes], SkeletonEntry]) -> None:
        self._entry = entry
        self._statements: list[Statement] = []
        self._count = 0
        self._numbers: dict[object, int] = {}  # number of each node, by the result of `_key`
        self._keep: list[Node] = []  # nodes, kept alive so that their ids stay unique
        self._making: set[int] = set()
        self._policy = Policy()

    def write(self, root: Node) -> Skeleton:
        """Return the statements that create a tree.

        This function is not recursive. `frames` contains a generator for each unfinished node. The
        generator yields the nodes that must be created first.
        """
        frames: list[Iterator[Node]] = [iter((root,))]
        while frames:
            for node in frames[-1]:
                if not _is_inline(node) and self._numbers.get(_key(node)) is None:
                    frames.append(self._make(node))
                    check("depth", len(frames), "levels of values to write")
                    break
            else:
                frames.pop()
        self._policy.check_names(root)
        return Skeleton(self._statements, self._value(root))

    def _value(self, node: Node) -> Any:
        if node.__class__ is str:
            check_no_calls(node)
        return node if _is_inline(node) else [self._numbers.get(_key(node))]

    def _emit(self, node: Node, *statement: Any) -> int:
        number = self._numbers[_key(node)] = self._count
        self._keep.append(node)
        self._count += 1
        self._statements.append(list(statement))
        return number

    def _fill(self, number: int, step: str, items: Iterable[Node]) -> Iterator[Node]:
        """Yield `items`, then emit the statement that adds `items` to node `number`."""
        items = list(items)
        yield from items
        self._statements.append(["fill", number, step, *map(self._value, items)])

    def _make(self, node: Node) -> Iterator[Node]:
        """Emit the statements of a node. Before each statement, yield the nodes in its values."""
        if isinstance(node, dict):
            self._policy.check_keys(node)
            number = self._emit(node, "ordered" if isinstance(node, OrderedMapping) else "dict")
            if node:
                yield from self._fill(number, "set", flatten(node.items()))
            if isinstance(node, OrderedMapping) and node.state is not None:
                self._policy.check_fields(node.state)
                yield from self._fill(number, "build", [node.state])
        elif isinstance(node, list):
            number = self._emit(node, "list")
            if node:
                yield from self._fill(number, "append", node)
        elif isinstance(node, (tuple, SetNode)):
            items = node.items if isinstance(node, SetNode) else node
            yield from items
            # If the node contains itself, an inner call has already emitted the statement of this
            # node.
            if self._numbers.get(_key(node)) is None:
                kind = "tuple"
                if isinstance(node, SetNode):
                    kind = "frozenset" if node.frozen else "set"
                self._emit(node, kind, *map(self._value, items))
        elif isinstance(node, Object):
            yield from self._object(node)
        else:
            self._leaf(node)

    def _object(self, node: Object) -> Iterator[Node]:
        if id(node) in self._making:
            raise UnsupportedError("an object is an argument of its own construction")
        self._making.add(id(node))
        self._policy.check_object(node)
        made = node.callable
        if self._numbers.get(_key(made)) is None:
            self._emit(made, "global", made.module, made.name)
        yield from (node.args, node.kwargs)
        parts = map(self._value, (made, node.args, node.kwargs))
        number = self._emit(node, "object", *parts, node.new)
        for step, value in node.steps:
            items = flatten(value) if step == "set" else value
            yield from self._fill(number, step, [value] if step == "build" else items)

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
            raise AmbiguousError("cannot write a dict with repeated or unhashable keys")
        else:
            self._emit(node, *_encoded(node))

    def _storage(self, storage: Storage) -> list[int]:
        if id(storage) not in self._numbers:
            if not is_utf8(storage.device):
                raise UnsupportedError("a device name is not UTF-8: JSON cannot store it")
            entry = self._entry(storage)
            more = [True] if entry.big_endian else []
            self._emit(storage, "storage", entry.name, storage.device, *more)
        return [self._numbers[id(storage)]]

    def _tensor(self, tensor: Tensor) -> None:
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
        fields |= {flag: True for flag in FLAGS if getattr(tensor, flag)}
        self._emit(tensor, "tensor", storage, fields)


def _key(node: Node) -> object:
    return (node.module, node.name) if isinstance(node, Global) else id(node)


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
    raise FormatError(f"cannot store a value of type {type(node).__name__}")


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


# Reading


class Read(NamedTuple):
    root: Node
    globals: tuple[Global, ...]
    used: frozenset[str]  # names of the header entries to which the tree refers


def read(skeleton: Skeleton, entries: Mapping[str, Tensor]) -> Read:
    """Return the tree that the statements create.

    `entries` maps names of header entries to tensors.

    Raises subclasses of InputError.
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
    """Add `what` to errors of the `with` body. Replace a Python error by a FormatError."""
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
        match statement:
            case ["fill", number, step, *operands]:
                target = self.nodes[_natural(number)]
                self._fill(target, step, [self.value(each) for each in operands])
            case [str(kind), str(text)] if kind in _SCALARS:
                self.nodes.append(_SCALARS[kind](text))
            case _:
                self.nodes.append(self._made(statement))

    def value(self, operand: Any) -> Node:
        """Return the value of an operand.

        Raises IndexError if the operand refers to a node that no statement created.
        """
        if operand.__class__ is list:
            (number,) = operand
            node = self.nodes[_natural(number)]
            if isinstance(node, _Named):
                raise FormatError("a storage cannot be a value")
            return node
        if operand.__class__ is dict:
            raise FormatError("a JSON object cannot be a value")
        return operand

    def _fill(self, target: Node, step: str, values: list[Node]) -> None:
        if isinstance(target, Object) and step == "build":
            (state,) = values
            target.steps.append((step, state))
            built(target, state)
        elif isinstance(target, Object) and step == "set":
            target.steps.append((step, list(zip(values[0::2], values[1::2], strict=True))))
        elif isinstance(target, Object) and step in ("append", "add"):
            target.steps.append((step, values))
        elif step == "set" and isinstance(target, dict):
            for key, value in zip(values[0::2], values[1::2], strict=True):
                if not self._keys.hashable(key) or key in target:
                    raise AmbiguousError("a key is repeated or not hashable")
                target[key] = value
        elif step == "append" and target.__class__ is list:
            target.extend(values)
        elif step == "build" and isinstance(target, OrderedMapping) and target.state is None:
            (target.state,) = values
        else:
            raise FormatError(f"cannot fill a {type_name(target)} this way")

    def _made(self, statement: Statement) -> Node:
        """Return the node that a statement creates. Raises ValueError for an unknown statement."""
        match statement:
            case ["dict"]:
                return {}
            case ["ordered"]:
                return OrderedMapping()
            case ["list"]:
                return []
            case ["tuple", *items]:
                return tuple(self.value(each) for each in items)
            case ["set" | "frozenset" as kind, *items]:
                return SetNode([self.value(each) for each in items], frozen=kind == "frozenset")
            case ["global", str(module), str(name)]:
                check("name_bytes", max(len(module), len(name)), "characters of a name")
                self.globals.append(Global(module, name))
                return self.globals[-1]
            case ["object", made, args, kwargs, bool(new)]:
                return _object(self.value(made), self.value(args), self.value(kwargs), new)
            case ["storage", str(entry), str(device)]:
                return _Named(Storage(self._take(entry).record, device), entry)
            case ["storage", str(entry), str(device), bool(big_endian)]:
                return _Named(Storage(self._take(entry).record, device, None, big_endian), entry)
            case ["tensor", storage, dict(fields)]:
                return self._tensor(None if storage is None else self._named(storage), dict(fields))
            case ["typed", storage, dtype, start, stop]:
                held = self._named(storage).storage
                element = None if dtype is None else dtypes.BY_NAME[dtype]
                room = held.nbytes // (1 if element is None else element.itemsize)
                if not 0 <= _natural(start) <= (room if stop is None else _natural(stop)) <= room:
                    raise FormatError("a view is larger than its storage")
                return TypedStorage(held, element, start, stop)
            case ["blob", str(entry), "bytes" | "bytearray" | "python2" as kind]:
                return StoredBytes(self._take(entry).record.locate(), kind)
        raise ValueError

    def _take(self, entry: str) -> Storage:
        if entry in self.used:
            raise AmbiguousError(f"two statements refer to the bytes of {entry[:80]!r}")
        self.used.add(entry)
        held = self._entries[entry].storage
        assert held is not None
        return held

    def _tensor(self, named: _Named | None, fields: dict[str, Any]) -> Node:
        entry = self._entries[named.entry] if named is not None else None
        if entry is not None:
            dtype, shape = entry.dtype, entry.shape
        if entry is None or "dtype" in fields:
            dtype = dtypes.BY_NAME[fields.pop("dtype")]
        if entry is None or "shape" in fields:
            shape = tuple(fields.pop("shape"))
        layout = fields.pop("layout", "strided")
        stride = tuple(fields.pop("stride")) if "stride" in fields else contiguous_stride(shape)
        kind, offset = fields.pop("kind", "tensor"), fields.pop("offset", 0)
        if kind not in ("tensor", "parameter", "ndarray") or not isinstance(layout, str):
            raise FormatError("unknown kind of tensor")
        if any(flag not in FLAGS or value is not True for flag, value in fields.items()):
            raise FormatError("a tensor has unknown fields")
        held = named.storage if named is not None else None
        stride = stride if layout == "strided" else ()
        return Tensor(held, dtype, shape, stride, offset, kind=kind, layout=layout, **fields)

    def _named(self, operand: Any) -> _Named:
        (number,) = operand
        named = self.nodes[_natural(number)]
        if not isinstance(named, _Named):
            raise FormatError("a tensor refers to a node that is not a storage")
        return named


class _Named(NamedTuple):
    """A storage and the name of its header entry. The tree never contains a _Named."""

    storage: Storage
    entry: str


def _object(made: Node, args: Node, kwargs: Node, new: bool) -> Node:
    if not isinstance(args, tuple) or not (kwargs is None or isinstance(kwargs, dict)):
        raise FormatError("the arguments of an object are invalid")
    is_known = isinstance(made, Global) and not new
    reducer = known.REDUCERS.get((made.module, made.name)) if is_known else None
    return Object(made, args, new=new, kwargs=kwargs) if reducer is None else reducer(made, args)


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


_SCALARS: dict[str, Callable[[str], Node]] = {
    "text": lambda encoded: _decoded(encoded).decode("utf-8", "surrogatepass"),
    "bytes": _decoded,
    "bytearray": lambda encoded: bytearray(_decoded(encoded)),
    "python2": lambda encoded: ByteString(_decoded(encoded)),
    "int": _int,
    "float": lambda digits: struct.unpack(">d", bytes.fromhex(digits))[0],
    "complex": lambda digits: complex(*struct.unpack(">dd", bytes.fromhex(digits))),
}


# The complete checkpoint


Obstacle = Callable[[str, Tensor], str | None]


class StoredTree:
    """The header entries (tensors by name) and the statements for the complete tree `root`.

    ``obstacle(name, tensor)`` returns why a tensor cannot be a header entry, or None.
    """

    def __init__(self, root: Node, obstacle: Obstacle) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._fillers = _fillers(root, obstacle)
        self._taken = {name for name, _ in self._fillers.values()}
        self._entries: dict[int, SkeletonEntry] = {}  # by id of a storage or byte string
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
        """Yield the further names of header entries that have several names in the tree.

        Each item is (further name, name of the header entry).
        """
        for name, tensor in _named_tensors(root):
            if id(tensor.storage) in self._entries and name not in self.tensors and is_utf8(name):
                kept = self._entries[id(tensor.storage)].name
                if _view(tensor) == _view(self.tensors[kept]):
                    yield name, kept


def record_of(whole: StoredTree) -> dict[str, Any]:
    """Return the fields of the metadata record."""
    return {"root": whole.tree.root, "tree": whole.tree.statements, "ties": sorted(whole.ties)}


def restore(record: Mapping[str, Any], entries: Mapping[str, Tensor]) -> Read:
    """Restore the tree of a record. Raises FormatError if the tree omits a header entry."""
    statements = record["tree"]
    if not isinstance(statements, list):
        raise FormatError("its tree is not a list")
    found = read(Skeleton(statements, record.get("root")), entries)
    if len(found.used) < len(entries):
        left = next(name for name in entries if name not in found.used)
        raise FormatError(f"its tree does not use the tensor {left[:80]!r}")
    return found


def _view(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride, tensor.offset, tensor.conj, tensor.neg


def _named_tensors(root: Node) -> Iterator[tuple[str, Tensor]]:
    """For each tensor that has bytes, yield the path and the tensor."""
    for path, node in walk(root):
        tensor = as_tensor(node)
        if tensor is not None and tensor.storage is not None:
            yield join(path), tensor


def _fillers(root: Node, obstacle: Obstacle) -> dict[int, tuple[str, Tensor]]:
    """Map the id of a storage to a tensor, and to the path of this tensor.

    The tensor is the first tensor that fills the storage and can be a header entry.
    """
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
    """Return whether a tensor is contiguous and covers its complete storage."""
    whole = (
        tensor.storage is not None and tensor.nbytes == tensor.storage.nbytes and not tensor.offset
    )
    return (
        whole
        and tensor.stride == contiguous_stride(tensor.shape)
        and not (tensor.conj or tensor.neg)
    )
