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
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any

from ckptkit.core import dtypes
from ckptkit.core.bytesource import Record
from ckptkit.core.dtypes import UINT8
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

Statement = list[Any]
_INT = 10**19  # JSON readers return different values for longer integers
_FLAGS = ("requires_grad", "conj", "neg")


# Writing


class StoredTree:
    """The complete tree `root` as header entries (``tensors``), ``statements`` and ``ties``.

    ``value`` is the value of the root. ``obstacle(name, tensor)`` returns why a tensor cannot be a
    header entry, or None.
    """

    def __init__(self, root: Node, obstacle: Callable[[str, Tensor], str | None]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.statements: list[Statement] = []
        self._count = 0  # number of nodes that the statements create
        # Number of each node, by the result of `_key`. None while the node's arguments are created.
        self._numbers: dict[object, int | None] = {}
        self._policy = Policy()
        named = [
            (join(path), tensor)
            for path, node in walk(root)
            if (tensor := as_tensor(node)) is not None and tensor.storage is not None
        ]
        self._fillers = _fillers(named, obstacle)
        self._taken = {name for name, _ in self._fillers.values()}
        self._entries: dict[int, str] = {}  # names of entries, by id of a storage or byte string
        self._write(root)
        self.value = self._value(root)
        # The further names of entries that have several names in the tree.
        self.ties = {
            name: kept
            for name, tensor in named
            if (kept := self._entries.get(id(tensor.storage))) is not None
            and name not in self.tensors
            and is_utf8(name)
            and _view(tensor) == _view(self.tensors[kept])
        }

    def record(self) -> dict[str, Any]:
        """Return the fields of the metadata record."""
        return {"root": self.value, "tree": self.statements, "ties": sorted(self.ties)}

    def _write(self, root: Node) -> None:
        """Emit the statements that create a tree.

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

    def _value(self, node: Node) -> Any:
        if node.__class__ is str:
            check_no_calls(node)
        return node if _is_inline(node) else [self._numbers.get(_key(node))]

    def _emit(self, node: Node, *statement: Any) -> int:
        number = self._numbers[_key(node)] = self._count
        self._count += 1
        self.statements.append(list(statement))
        return number

    def _fill(self, number: int, step: str, items: Iterable[Node]) -> Iterator[Node]:
        """Yield `items`, then emit the statement that adds `items` to node `number`."""
        items = list(items)
        yield from items
        self.statements.append(["fill", number, step, *map(self._value, items)])

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
            kind = "tuple"
            inner: Iterable[Node] = node if isinstance(node, tuple) else node.items
            if isinstance(node, SetNode):
                kind = "frozenset" if node.frozen else "set"
            yield from inner
            # If the node contains itself, an inner call has already emitted the statement of this
            # node.
            if self._numbers.get(_key(node)) is None:
                self._emit(node, kind, *map(self._value, inner))
        elif isinstance(node, Object):
            if id(node) in self._numbers:
                raise UnsupportedError("an object is an argument of its own construction")
            self._numbers[id(node)] = None
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
        else:
            self._emit(node, *self._leaf(node))

    def _leaf(self, node: Node) -> tuple[Any, ...]:
        """Return the statement that creates a node without other nodes."""
        if isinstance(node, Tensor):
            return "tensor", *self._tensor(node)
        if isinstance(node, TypedStorage):
            dtype = None if node.dtype is None else node.dtype.name
            return "typed", self._storage(node.storage), dtype, node.start, node.stop
        if isinstance(node, Global):
            self._policy.hold(node)
            return "global", node.module, node.name
        if isinstance(node, Pairs):
            raise AmbiguousError("cannot write a dict with repeated or unhashable keys")
        if isinstance(node, str):
            return "text", _base64(node.encode("utf-8", "surrogatepass"))
        if isinstance(node, int):
            return "int", node.to_bytes(node.bit_length() // 8 + 1, "big", signed=True).hex()
        if isinstance(node, float):
            return "float", struct.pack(">d", node).hex()
        if isinstance(node, complex):
            return "complex", struct.pack(">dd", node.real, node.imag).hex()
        check_no_calls(node)
        if isinstance(node, StoredBytes):
            return "blob", self._entry(node), node.kind
        if isinstance(node, ByteString):
            return "python2", _base64(node.data)
        if isinstance(node, (bytes, bytearray)):
            return type(node).__name__, _base64(node)
        raise FormatError(f"cannot store a value of type {type(node).__name__}")

    def _storage(self, storage: Storage) -> list[int | None]:
        if id(storage) not in self._numbers:
            if not is_utf8(storage.device):
                raise UnsupportedError("a device name is not UTF-8: JSON cannot store it")
            entry = self._entry(storage)
            # The bytes of a tensor are written in little-endian order, the bytes of a storage as
            # they are.
            swapped = storage.big_endian and self.tensors[entry].storage is not storage
            self._emit(storage, "storage", entry, storage.device, *([True] if swapped else []))
        return [self._numbers[id(storage)]]

    def _tensor(self, tensor: Tensor) -> tuple[list[int | None] | None, dict[str, Any]]:
        fields: dict[str, Any] = {"dtype": tensor.dtype.name, "shape": list(tensor.shape)}
        storage = None
        if tensor.storage is not None:
            storage = self._storage(tensor.storage)
            entry = self.tensors[self._entry(tensor.storage)]
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
        return storage, fields | {flag: True for flag in _FLAGS if getattr(tensor, flag)}

    def _entry(self, held: Storage | StoredBytes) -> str:
        """Return the name of the header entry that contains the bytes of `held`."""
        if id(held) not in self._entries:
            name, tensor = self._fillers.get(id(held), ("", None))
            if tensor is None or name in self.tensors:
                is_bytes = isinstance(held, StoredBytes)
                record: Record = held.extent if isinstance(held, StoredBytes) else held.record
                tensor = Tensor(Storage(record), UINT8, (record.length,), (1,))
                prefix = f"ckptkit.{'bytes' if is_bytes else 'storage'}."
                names = (f"{prefix}{number}" for number in count(len(self.tensors)))
                name = next(
                    each for each in names if each not in self.tensors and each not in self._taken
                )
            self.tensors[name] = tensor
            self._entries[id(held)] = name
        return self._entries[id(held)]


def _key(node: Node) -> object:
    return (node.module, node.name) if isinstance(node, Global) else id(node)


def _is_inline(node: Node) -> bool:
    kind = node.__class__
    if kind is str:
        return node.isascii() or is_utf8(node)
    if kind is int:
        return bool(-_INT < node < _INT)
    return node is None or kind is bool or (kind is float and math.isfinite(node))


def _base64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _view(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride, tensor.offset, tensor.conj, tensor.neg


def _fillers(
    named: list[tuple[str, Tensor]], obstacle: Callable[[str, Tensor], str | None]
) -> dict[int, tuple[str, Tensor]]:
    """Map the id of a storage to the path of a tensor, and to this tensor.

    The tensor is the first tensor that can be a header entry, is contiguous, and covers the storage
    completely.
    """
    found: dict[int, tuple[str, Tensor]] = {}
    types: dict[int, set[str]] = {}
    for name, tensor in named:
        storage, key = tensor.storage, id(tensor.storage)
        types.setdefault(key, set()).add(tensor.dtype.name)
        if (
            storage is not None
            and key not in found
            and tensor.nbytes == storage.nbytes
            and tensor.stride == contiguous_stride(tensor.shape)
            and not (tensor.offset or tensor.conj or tensor.neg)
            and obstacle(name, tensor) is None
        ):
            found[key] = name, tensor
    for key, (_, tensor) in list(found.items()):
        if tensor.storage is not None and tensor.storage.big_endian and len(types[key]) > 1:
            del found[key]
    return found


# Reading


def restore(
    record: Mapping[str, Any], entries: Mapping[str, Tensor]
) -> tuple[Node, tuple[Global, ...]]:
    """Return the tree of a record, and the classes and functions in the tree.

    `entries` maps names of header entries to tensors. Raises FormatError if the tree omits a header
    entry, and other subclasses of InputError.
    """
    statements = record["tree"]
    if not isinstance(statements, list):
        raise FormatError("its tree is not a list")
    decoder = _TreeDecoder(entries)
    what, statement = "statement", None
    try:
        for statement in statements:
            decoder.run(statement)
        what, statement = "its root", record.get("root")
        root = decoder.value(statement)
    except CkptkitError as error:
        error.message = f"{what} {str(statement)[:80]}: {error.message}"
        raise
    except (TypeError, ValueError, IndexError, KeyError, AttributeError, struct.error) as error:
        raise FormatError(f"{what} {str(statement)[:80]} is invalid") from error
    left = next((name for name in entries if name not in decoder.used), None)
    if left is not None:
        raise FormatError(f"its tree does not use the tensor {left[:80]!r}")
    return root, tuple(decoder.globals)


class _TreeDecoder:
    def __init__(self, entries: Mapping[str, Tensor]) -> None:
        self.nodes: list[Node] = []  # also storages, which the tree contains only in its tensors
        self.globals: list[Global] = []
        self.used: set[str] = set()  # names of the entries to which the tree refers
        self._entries = entries
        self._entry_of: dict[int, Tensor] = {}  # entry of each storage in `nodes`, by its id
        self._keys = KeyCheck()

    def run(self, statement: Any) -> None:
        match statement:
            case ["fill", number, step, *operands]:
                target = self.nodes[_natural(number)]
                self._fill(target, step, [self.value(each) for each in operands])
            case _:
                self.nodes.append(self._made(statement))

    def value(self, operand: Any) -> Node:
        """Return the value of an operand.

        Raises IndexError if the operand refers to a node that no statement created.
        """
        if operand.__class__ is list:
            (number,) = operand
            operand = self.nodes[_natural(number)]
            if isinstance(operand, Storage):
                raise FormatError("a storage cannot be a value")
        elif operand.__class__ is dict:
            raise FormatError("a JSON object cannot be a value")
        return operand

    def _fill(self, target: Node, step: str, values: list[Node]) -> None:
        pairs = list(zip(values[0::2], values[1::2], strict=True)) if step == "set" else []
        if isinstance(target, Object) and step == "build":
            (state,) = values
            target.steps.append((step, state))
            built(target, state)
        elif isinstance(target, Object) and step in ("set", "append", "add"):
            target.steps.append((step, pairs if step == "set" else values))
        elif isinstance(target, dict) and step == "set":
            for key, value in pairs:
                if not self._keys.hashable(key) or key in target:
                    raise AmbiguousError("a key is repeated or not hashable")
                target[key] = value
        elif target.__class__ is list and step == "append":
            target.extend(values)
        elif isinstance(target, OrderedMapping) and step == "build" and target.state is None:
            (target.state,) = values
        else:
            raise FormatError(f"cannot fill a {type_name(target)} this way")

    def _made(self, statement: Any) -> Node:
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
            case [str(kind), str(text)] if kind in _SCALARS:
                return _SCALARS[kind](text)
            case ["global", str(module), str(name)]:
                check("name_bytes", max(len(module), len(name)), "characters of a name")
                self.globals.append(Global(module, name))
                return self.globals[-1]
            case ["object", made, args, kwargs, bool(new)]:
                return _object(self.value(made), self.value(args), self.value(kwargs), new)
            case ["storage", str(entry), str(device), *rest] if [*map(type, rest)] in ([], [bool]):
                storage = Storage(self._take(entry).record, device, None, *rest)
                self._entry_of[id(storage)] = self._entries[entry]
                return storage
            case ["tensor", storage, dict(fields)]:
                return self._tensor(None if storage is None else self._storage(storage), fields)
            case ["typed", storage, dtype, start, stop]:
                held = self._storage(storage)
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

    def _storage(self, operand: Any) -> Storage:
        (number,) = operand
        storage = self.nodes[_natural(number)]
        if not isinstance(storage, Storage):
            raise FormatError("a tensor refers to a node that is not a storage")
        return storage

    def _tensor(self, storage: Storage | None, fields: dict[str, Any]) -> Tensor:
        defaults: dict[str, Any] = {"layout": "strided", "kind": "tensor", "offset": 0}
        if storage is not None:
            entry = self._entry_of[id(storage)]
            defaults |= {"dtype": entry.dtype.name, "shape": entry.shape}
        rest = defaults | fields
        dtype, shape = dtypes.BY_NAME[rest.pop("dtype")], tuple(rest.pop("shape"))
        stride = tuple(rest.pop("stride", contiguous_stride(shape)))
        layout, kind, offset = map(rest.pop, ("layout", "kind", "offset"))
        if kind not in ("tensor", "parameter", "ndarray") or not isinstance(layout, str):
            raise FormatError("unknown kind of tensor")
        if any(flag not in _FLAGS or value is not True for flag, value in rest.items()):
            raise FormatError("a tensor has unknown fields")
        stride = stride if layout == "strided" else ()
        return Tensor(storage, dtype, shape, stride, offset, kind=kind, layout=layout, **rest)


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
    return base64.b64decode(text, validate=True)


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
