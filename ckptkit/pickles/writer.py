"""Write a tree as a pickle of protocol 2. `torch.load(weights_only=True)` accepts the pickle.

Equal trees give equal pickles. A list or tensor that occurs twice in the tree is still one object
after loading. The pickle stores equal strings only once. The memo does not contain sizes and
strides of tensors, or keys of storages.

The writer uses protocol 4 in three cases that protocol 2 does not support:

* A call of ``__new__`` has keyword arguments.
* An object of a subclass of set has items.
* The name of a class or function changes when it is converted to Python 2 and back. Protocol 2
  stores Python 2 names.

The writer always uses the following calls, even if the original file contains an older form:

* For a tensor, ``_rebuild_tensor_v2`` with an empty OrderedDict as hooks.
* For bytes, ``_codecs.encode(text, "latin1")``.
* For a set, ``set([...])``.
* For a nested class, ``getattr(Outer, "Inner")``.
"""

from __future__ import annotations

from _compat_pickle import REVERSE_IMPORT_MAPPING, REVERSE_NAME_MAPPING
from collections.abc import Callable, Iterator
from struct import Struct, pack
from typing import Any, NamedTuple

from ckptkit.core.dtypes import NOT_IN_TORCH, DType
from ckptkit.core.errors import (
    AmbiguousError,
    FormatError,
    TensorError,
    UnsafeGlobalError,
    UnsupportedError,
)
from ckptkit.core.limits import LIMITS, check
from ckptkit.core.tensor import Tensor, TypedStorage
from ckptkit.core.text import typed, typed_value
from ckptkit.core.tree import (
    ByteString,
    Global,
    Node,
    Object,
    OrderedMapping,
    Pairs,
    SetNode,
    StoredBytes,
    StoredList,
)
from ckptkit.pickles.judge import refused_by_weights_only
from ckptkit.pickles.machine import renamed
from ckptkit.pickles.policy import Policy, without_objects
from ckptkit.pickles.streams import check_no_calls

PersistentId = Callable[[TypedStorage], tuple[Node, ...]]

_ORDERED_DICT = Global("collections", "OrderedDict")
_ENCODE = Global("_codecs", "encode")
_BYTEARRAY = Global("builtins", "bytearray")
_COMPLEX = Global("builtins", "complex")
_GETATTR = Global("builtins", "getattr")
_TENSOR_V2 = Global("torch._utils", "_rebuild_tensor_v2")
_TENSOR_V3 = Global("torch._utils", "_rebuild_tensor_v3")
_PARAMETER = Global("torch._utils", "_rebuild_parameter")
_META_TENSOR_NO_STORAGE = Global("torch._utils", "_rebuild_meta_tensor_no_storage")

_U4 = Struct("<I").pack
_GETS = tuple(b"h%c" % index for index in range(256))
_SMALL = tuple(b"K%c" % value for value in range(256))
_FLAGS = (b"\x89", b"\x88")  # opcodes of False and True
_TUPLES = (b")", b"\x85", b"\x86", b"\x87")
_MOST_KINDS = 1024


class _Kind(NamedTuple):
    """The opcodes of a tensor before and after the key of its storage.

    Tensors that differ only in the key share one `_Kind`.
    """

    before: bytes
    after: bytes
    dtype: DType | None  # of the storage


BATCH = 1000  # maximum number of items per SETITEMS or APPENDS, as in CPython
_JOINED = 1 << 15  # number of byte strings that the writer joins at once to save memory


class Pickled(NamedTuple):
    data: bytes
    notes: tuple[str, ...]  # for the user


def write_pickle(root: Node, persistent_id: PersistentId, *, objects: str = "keep") -> Pickled:
    """Return the pickle of a tree.

    `persistent_id` is a function that takes a storage and returns its persistent id, a tuple.
    `write_pickle` calls this function for each use of a storage. `objects` is ``keep``, ``drop`` or
    ``error``: the treatment of values that `torch.load(weights_only=True)` rejects.

    Raises AmbiguousError for a dict with repeated or unhashable keys. Raises UnsafeGlobalError for
    a call that is not allowlisted. Raises UnsupportedError for an object that contains itself.
    """
    notes: tuple[str, ...] = ()
    if objects == "drop":
        root, notes = without_objects(root)
    pickled = _Writer(persistent_id).write(root)
    if objects == "error" and pickled.notes:
        raise UnsafeGlobalError(
            pickled.notes[0],
            hint=f"{typed_value('objects', 'keep')} keeps such values, "
            f"{typed_value('objects', 'drop')} drops such values",
        )
    return Pickled(pickled.data, (*notes, *pickled.notes))


class _Writer:
    """Converts values to opcodes.

    For scalars, strings and tensors, a method returns the opcodes. For a container, a generator
    emits opcodes and yields each item. `write` resumes the generator after writing the item.
    """

    def __init__(self, persistent_id: PersistentId, protocol: int = 2) -> None:
        self.persistent_id = persistent_id
        self.protocol = protocol
        self.needed = 2  # lowest protocol that supports all values written so far
        self.parts: list[bytes] = []
        self.emit = self.parts.append
        self.joined: list[bytes] = []
        self.count = 0  # memo entries
        self.tensors: dict[Tensor, int] = {}  # memo entries
        self.by_id: dict[int, int] = {}  # maps the id of a node to the node's memo entry
        self.by_value: dict[tuple[type, Node], int] = {}
        self.strings: dict[str, int] = {}
        # Keeps nodes alive: otherwise, Python could reuse their ids, which are the keys of `by_id`.
        self.keep: list[Node] = []
        self.kinds: dict[tuple[object, ...] | None, _Kind] = {}
        self.refused: dict[str, int] = {}  # counts the uses of each name that weights_only rejects
        self.policy = Policy()
        self.making: set[int] = set()  # objects whose arguments are being written
        self.leaves: dict[type, Callable[[Any], bytes]] = {
            str: self._string, Tensor: self._tensor, int: _integer, bool: _FLAGS.__getitem__,
            type(None): lambda _: b"N", float: lambda value: b"G" + pack(">d", value),
            complex: self._complex, bytes: self._bytes, bytearray: self._byte_string,
            ByteString: self._byte_string, StoredBytes: self._byte_string,
            TypedStorage: self._storage, Global: self._held,
        }  # fmt: skip

    def write(self, root: Node) -> Pickled:
        frames: list[Iterator[Node]] = [iter((root,))]
        while frames:
            self._join()
            for item in frames[-1]:
                leaf = self.leaves.get(item.__class__)
                if leaf is not None:
                    self.emit(leaf(item))
                elif id(item) in self.by_id:
                    self.emit(_get(self.by_id[id(item)]))
                else:
                    frames.append(self._open(item))
                    if len(frames) > LIMITS.depth:
                        check("depth", len(frames), "levels of values to write")
                    break
            else:
                frames.pop()
        self.policy.check_names(root)
        # `leaves` contains methods of this object. Without garbage collection, this reference cycle
        # would keep the memo alive.
        self.leaves.clear()
        if self.needed > self.protocol:  # write again, because protocol 4 encodes names differently
            return _Writer(self.persistent_id, self.needed).write(root)
        data = b"".join((b"\x80", bytes((self.protocol,)), *self.joined, *self.parts, b"."))
        check("pickle_bytes", len(data), "bytes of the pickle to write")
        if not self.refused:
            return Pickled(data, ())
        names = ", ".join(sorted(self.refused)[:8]) + (", ..." if len(self.refused) > 8 else "")
        note = f"kept values that torch.load(weights_only=True) rejects: {names}"
        return Pickled(data, (note,))

    def _join(self) -> None:
        if len(self.parts) > _JOINED:
            self.joined.append(b"".join(self.parts))
            self.parts.clear()

    def _put(self, node: Node = None) -> bytes:
        """Return the opcode that stores the top of the stack in the memo.

        `node` is the value on top of the stack.
        """
        index = self.count
        self.count = index + 1
        if node is not None:
            self.by_id[id(node)] = index
            self.keep.append(node)
        return b"q%c" % index if index < 256 else b"r" + _U4(index)

    # Leaves

    def _string(self, text: str) -> bytes:
        index = self.strings.get(text)
        if index is not None:
            return _get(index)
        check_no_calls(text)
        self.strings[text] = self.count
        return _unicode(text.encode("utf-8", "surrogatepass")) + self._put()

    def _complex(self, value: complex) -> bytes:
        real, imaginary = pack(">d", value.real), pack(">d", value.imag)
        return self._global(_COMPLEX) + b"G" + real + b"G" + imaginary + b"\x86R"

    def _bytes(self, value: bytes) -> bytes:
        """Return the opcodes of a bytes object. Equal bytes share one memo entry."""
        key = (bytes, value)
        if key in self.by_value:
            return _get(self.by_value[key])
        code = self._encoded(value)
        self.by_value[key] = self.count
        return code + self._put()

    def _encoded(self, value: bytes) -> bytes:
        check_no_calls(value)
        text = _unicode(value.decode("latin-1").encode())
        return self._global(_ENCODE) + text + _unicode(b"latin1") + b"\x86R"

    def _byte_string(self, node: bytearray | ByteString | StoredBytes) -> bytes:
        if id(node) in self.by_id:
            return _get(self.by_id[id(node)])
        if isinstance(node, StoredBytes):
            from ckptkit.compute.operation import stream

            check("record_bytes", node.extent.length, "bytes of a byte string inside a pickle")
            kind, data = node.kind, b"".join(stream(node.extent))
        elif isinstance(node, ByteString):
            kind, data = "python2", node.data
        else:
            kind, data = "bytearray", bytes(node)
        if kind == "python2":  # SHORT_BINSTRING or BINSTRING
            check_no_calls(data)
            size = len(data)
            code = (b"U%c" % size if size < 256 else b"T" + pack("<i", size)) + data
        elif kind == "bytearray":
            code = self._global(_BYTEARRAY) + self._encoded(data) + b"\x85R"
        else:
            code = self._encoded(data)
        return code + self._put(node)

    def _held(self, node: Global) -> bytes:
        self.policy.hold(node)
        return self._global(node)

    def _global(self, node: Global) -> bytes:
        """Return the opcodes of a class or function."""
        index = self.by_id.get(id(node))
        if index is not None:
            return _get(index)
        key = (Global, (node.module, node.name))
        if key in self.by_value:
            self.keep.append(node)
            self.by_id[id(node)] = self.by_value[key]
            return _get(self.by_value[key])
        if refused_by_weights_only(node):
            self.refused[str(node)] = self.refused.get(str(node), 0) + 1
        outer, _, inner = node.name.rpartition(".")
        if outer:
            code = self._global(_GETATTR) + self._global(Global(node.module, outer))
            code += _unicode(inner.encode()) + b"\x86R"
        else:
            module, name = self._spelled(node)
            if "\n" in module + name:
                raise FormatError(f"the name of a global contains a newline: {str(node)!r}")
            code = b"c" + module.encode() + b"\n" + name.encode() + b"\n"
        self.by_value[key] = self.count
        return code + self._put(node)

    def _spelled(self, node: Global) -> tuple[str, str]:
        """Return the module and name in the spelling of Python 2.

        If Python 3 would load another name, require protocol 4.
        """
        name = node.module, node.name
        if self.protocol > 2:
            return name
        spelled = REVERSE_NAME_MAPPING.get(
            name, (REVERSE_IMPORT_MAPPING.get(node.module, node.module), node.name)
        )
        if renamed(*spelled) != name:
            self.needed = 4
        return spelled

    # Tensors

    def _storage(self, typed: TypedStorage) -> bytes:
        """Return opcodes that push ('storage', class, key, location, numel), and BINPERSID."""
        return b"".join(self._reference(typed))

    def _reference(self, typed: TypedStorage) -> tuple[bytes, bytes, bytes]:
        """Return the opcodes of a storage: before the key, the key, and after the key."""
        tag, made, key, location, numel = self.persistent_id(typed)
        before = b"(" + self._string(tag) + self._global(made)
        return before, _unicode(key.encode()), self._string(location) + _integer(numel) + b"tQ"

    def _tensor(self, tensor: Tensor) -> bytes:
        index = self.tensors.get(tensor)
        if index is not None:
            return _get(index)
        storage, kind = tensor.storage, None
        if storage is not None:
            kind = (
                tensor.dtype.name, tensor.shape, tensor.stride, tensor.offset, tensor.layout,
                tensor.requires_grad, tensor.kind, tensor.conj, tensor.neg, storage.device,
                storage.record.length,
            )  # fmt: skip
        known = self.kinds.get(kind)
        if storage is not None and known is not None:
            key = self.persistent_id(TypedStorage(storage, known.dtype))[2]
            code = b"".join((known.before, _unicode(key.encode()), known.after))
        else:
            code = self._new(tensor, kind)
        self.tensors[tensor] = self.count
        return code + self._put()

    def _new(self, tensor: Tensor, kind: tuple[object, ...] | None) -> bytes:
        """Return the opcodes of a tensor that has no memo entry yet.

        A tensor is a call of `_rebuild_tensor_v2`. If its dtype has no storage class in torch, the
        tensor is a call of `_rebuild_tensor_v3`. A meta tensor is a call of
        `_rebuild_meta_tensor_no_storage`. A parameter is a call of `_rebuild_parameter`, whose
        first argument is the tensor. `ckptkit.pickles.globals` lists the arguments of these calls.

        The method caches the opcodes if they add no entry to the memo. Later tensors of the same
        dtype, shape and device then have the same opcodes, except for the key of the storage.
        """
        if tensor.layout != "strided":
            raise UnsupportedError(f"cannot write a {tensor.layout} tensor whose parts are unknown")
        count = self.count
        is_parameter = tensor.kind == "parameter"
        before = self._global(_PARAMETER) if is_parameter else b""
        own = _shape(tensor.shape) + _shape(tensor.stride)
        own += _FLAGS[tensor.requires_grad and not is_parameter]
        # torch has no storage class for some dtypes.
        dtype = None if tensor.dtype.storage is None else tensor.dtype
        key = after = b""
        if tensor.storage is None:
            before += self._global(_META_TENSOR_NO_STORAGE) + b"(" + self._dtype(tensor)
            before += own + b"tR"
        else:
            before += self._global(_TENSOR_V3 if dtype is None else _TENSOR_V2) + b"("
            start, key, after = self._reference(TypedStorage(tensor.storage, dtype))
            before += start
            after += _integer(tensor.offset)
            after += own + self._global(_ORDERED_DICT) + b")R"
            after += self._dtype(tensor) if dtype is None else b""
            bits = [self._string(bit) + b"\x88s" for bit in ("conj", "neg") if getattr(tensor, bit)]
            after += (b"}" + b"".join(bits) if bits else b"") + b"tR"
        if is_parameter:
            after += _FLAGS[tensor.requires_grad] + self._global(_ORDERED_DICT) + b")R\x87R"
        if self.count == count and kind is not None and len(self.kinds) < _MOST_KINDS:
            self.kinds[kind] = _Kind(before, after, dtype)
        return before + key + after

    def _dtype(self, tensor: Tensor) -> bytes:
        name = tensor.dtype.name
        if name in NOT_IN_TORCH:
            raise TensorError(
                f"torch has no dtype {name}, so torch cannot load a tensor of this dtype (shape "
                f"{tensor.shape})",
                hint=f"write safetensors without {typed('--all', 'all=True')}, or drop "
                f"such tensors with {typed('--drop', 'select(drop=...)')}",
            )
        return self._global(Global("torch", name))

    # Containers

    def _open(self, node: Node) -> Iterator[Node]:
        if isinstance(node, dict):
            return self._dict(node)
        if isinstance(node, tuple):
            return self._tuple(node)
        if isinstance(node, (list, StoredList)):
            self.emit(b"]" + self._put(node))
            return self._elements(node if isinstance(node, list) else list(node))
        if isinstance(node, Object):
            return self._object(node)
        if isinstance(node, SetNode):
            return self._set(node)
        if isinstance(node, Pairs):
            raise AmbiguousError(
                "ckptkit cannot write a dict with repeated or unhashable keys",
                hint="`ckptkit extract` can write other parts of the file",
            )
        raise FormatError(f"cannot store a value of type {type(node).__name__} in a checkpoint")

    def _dict(self, node: dict[Node, Node]) -> Iterator[Node]:
        self.policy.check_keys(node)
        is_ordered = isinstance(node, OrderedMapping)
        made = self._global(_ORDERED_DICT) + b")R" if is_ordered else b"}"
        self.emit(made + self._put(node))
        yield from self._items(list(node.items()))
        if isinstance(node, OrderedMapping) and node.state is not None:
            self.policy.check_fields(node.state)
            yield node.state
            self.emit(b"b")

    def _items(self, pairs: list[tuple[Node, Node]]) -> Iterator[Node]:
        """Emit the opcodes of scalars, strings and tensors. Yield the other keys and values."""
        leaves, emit = self.leaves, self.emit
        for start in range(0, len(pairs), BATCH):
            self._join()
            batch = pairs[start : start + BATCH]
            if len(batch) > 1:
                emit(b"(")
            for pair in batch:
                for node in pair:
                    leaf = leaves.get(node.__class__)
                    if leaf is not None:
                        emit(leaf(node))
                    else:
                        yield node
            emit(b"u" if len(batch) > 1 else b"s")

    def _elements(self, items: list[Node]) -> Iterator[Node]:
        for start in range(0, len(items), BATCH):
            batch = items[start : start + BATCH]
            if len(batch) > 1:
                self.emit(b"(")
            yield from batch
            self.emit(b"e" if len(batch) > 1 else b"a")

    def _tuple(self, node: tuple[Node, ...]) -> Iterator[Node]:
        size = len(node)
        if size > 3:
            self.emit(b"(")
        yield from node
        if not size:
            self.emit(b")")
        elif id(node) in self.by_id:
            # The tuple contains itself, and writing its items has already created the tuple. Pop
            # the items and push the tuple.
            self.emit((b"1" if size > 3 else b"0" * size) + _get(self.by_id[id(node)]))
        else:
            self.emit((_TUPLES[size] if size < 4 else b"t") + self._put(node))

    def _set(self, node: SetNode) -> Iterator[Node]:
        self._begin(node)
        self.policy.check_keys(node.items)
        yield Global("builtins", "frozenset" if node.frozen else "set")
        self.emit(b"]")
        yield from self._elements(node.items)
        self._made(node, b"\x85R")

    def _object(self, node: Object) -> Iterator[Node]:
        self._begin(node)
        self.policy.check_object(node)
        self.emit(self._global(node.callable))
        yield node.args
        if node.kwargs is not None:
            yield node.kwargs
            self.needed = 4
            self._made(node, b"\x92")
        else:
            self._made(node, b"\x81" if node.new else b"R")
        for step, value in node.steps:
            if step == "build":
                yield value
                self.emit(b"b")
            elif step == "set":
                yield from self._items(value)
            elif step == "append":
                yield from self._elements(value)
            else:
                self.needed = 4
                self.emit(b"(")
                yield from value
                self.emit(b"\x90")

    def _begin(self, node: Node) -> None:
        if id(node) in self.making:
            raise UnsupportedError("an object is an argument of the call that creates this object")
        self.making.add(id(node))

    def _made(self, node: Node, code: bytes) -> None:
        self.making.discard(id(node))
        self.emit(code + self._put(node))


def _get(index: int) -> bytes:
    """Return the opcode BINGET or LONG_BINGET."""
    return _GETS[index] if index < 256 else b"j" + _U4(index)


def _unicode(data: bytes) -> bytes:
    """Return the opcode BINUNICODE with a UTF-8 string."""
    return b"X" + _U4(len(data)) + data


def _shape(shape: tuple[int, ...]) -> bytes:
    items = b"".join(map(_integer, shape))
    return items + _TUPLES[len(shape)] if len(shape) < 4 else b"(" + items + b"t"


def _integer(value: int) -> bytes:
    """Return the shortest opcode for an integer: BININT1, BININT2, BININT, LONG1 or LONG4."""
    if 0 <= value < 256:
        return _SMALL[value]
    if 0 <= value < 65536:
        return b"M" + pack("<H", value)
    if -(2**31) <= value < 2**31:
        return b"J" + pack("<i", value)
    size = value.bit_length() // 8 + 1
    head = b"\x8a%c" % size if size < 256 else b"\x8b" + pack("<i", size)
    return head + value.to_bytes(size, "little", signed=True)
