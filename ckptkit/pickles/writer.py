"""Writes a tree as a pickle of protocol 2, in opcodes that `torch.load(weights_only=True)` accepts.

One pass, iterative, deterministic. Strings and other immutable scalars are stored in the memo by
value; containers, tuples, tensors and objects by identity, so that what was shared is shared again.
Sizes, strides and the keys of storages are written out where they stand. Only what protocol 2
cannot say (keyword arguments of ``__new__``, items of a set subclass, a module with a name that
Python 2 had) raises the protocol to 4.

Other normalizations, all of equal meaning:

- ``_rebuild_tensor`` and hooks of None become ``_rebuild_tensor_v2`` with an empty OrderedDict;
- bytes are spelled ``_codecs.encode(text, "latin1")``, a set ``set([...])``;
- a nested class is spelled ``getattr(Outer, "Inner")``.
"""

from __future__ import annotations

from _compat_pickle import (
    IMPORT_MAPPING,
    NAME_MAPPING,
    REVERSE_IMPORT_MAPPING,
    REVERSE_NAME_MAPPING,
)
from collections.abc import Callable, Iterator
from struct import Struct, pack
from typing import NamedTuple

from ckptkit.core.dtypes import NOT_IN_TORCH, DType
from ckptkit.core.errors import (
    AmbiguousError,
    FormatError,
    TensorError,
    UnsafeGlobalError,
    UnsupportedError,
)
from ckptkit.core.limits import LIMITS, check
from ckptkit.core.tensor import Storage, Tensor, TypedStorage
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
)
from ckptkit.pickles.nested import check_no_calls
from ckptkit.pickles.objects import without_objects
from ckptkit.pickles.trust import Policy, refused_by_weights_only

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
_TUPLES = (b")", b"\x85", b"\x86", b"\x87")
_PUT = _TEXT = Struct("<cI").pack  # an opcode and its number
_MOST_KINDS = 1024


class _Kind(NamedTuple):
    """The code of tensors that differ in the key of their storage only."""

    before: bytes
    after: bytes
    dtype: DType | None  # of the storage


BATCH = 1000  # items per SETITEMS or APPENDS, as CPython does


class Pickled(NamedTuple):
    data: bytes
    notes: tuple[str, ...]  # what its reader should know


class _Code(bytes):
    """Opcodes to emit as they are, between nodes."""


class _Put(NamedTuple):
    """Store the value on top of the stack as `node`."""

    node: Node


class _EndTuple(NamedTuple):
    node: tuple[Node, ...]


_MARK, _REDUCE, _BUILD, _NEWOBJ, _NEWOBJ_EX = map(_Code, (b"(", b"R", b"b", b"\x81", b"\x92"))
_APPEND, _APPENDS, _SETITEM, _SETITEMS, _ADDITEMS = map(_Code, (b"a", b"e", b"s", b"u", b"\x90"))


def write_pickle(
    root: Node,
    persistent_id: PersistentId,
    *,
    objects: str = "keep",
) -> Pickled:
    """Return the pickle of a tree.

    `persistent_id` gives the persistent id of a storage, a tuple, each time it is met.

    `objects` says what becomes of values that weights_only refuses: they are kept, left out
    (``drop``), or an ``error``. Raises AmbiguousError for mappings that Python could not hold,
    UnsafeGlobalError for calls that are not in the allowlist, UnsupportedError for objects that
    contain themselves.
    """
    notes: tuple[str, ...] = ()
    if objects == "drop":
        root, notes = without_objects(root)
    pickled = _Writer(persistent_id).write(root)
    if objects == "error" and pickled.notes:
        raise UnsafeGlobalError(
            pickled.notes[0],
            hint=f"{typed_value('objects', 'keep')} keeps them, "
            f"{typed_value('objects', 'drop')} leaves them out",
        )
    return Pickled(pickled.data, (*notes, *pickled.notes))


_JOINED = 1 << 15  # pieces that are joined, because a short one is mostly its header


class _Writer:
    """Opcodes so far, the memo, and a method for each kind of value."""

    def __init__(self, persistent_id: PersistentId, protocol: int = 2) -> None:
        self.persistent_id = persistent_id
        self.protocol = protocol
        self.needed = 2  # the protocol that what has been met so far needs
        self.parts: list[bytes] = []
        self.emit = self.parts.append
        self.count = 0  # memo entries
        self.tensors: dict[Tensor, int] = {}  # memo entries
        self.by_id: dict[int, int] = {}  # id of another node -> its memo entry
        self.by_value: dict[tuple[type, Node], int] = {}
        self.strings: dict[str, int] = {}
        self.keep: list[Node] = []  # ids in by_id stay taken
        self.kinds: dict[tuple[object, ...], _Kind] = {}  # see _kind_of
        self.refused: dict[str, int] = {}  # by weights_only: name -> times
        self.leaves: dict[type, Callable[[Node], object]] = {
            str: self._str, Tensor: self._tensor, int: self._int, bool: self._bool,
            type(None): self._none, float: self._float, complex: self._complex, bytes: self._bytes,
            bytearray: self._bytearray,
            ByteString: self._byte_string, StoredBytes: self._blob, TypedStorage: self._storage,
            Global: self._global_leaf, _Code: self.emit, _Put: self._put_node,
            _EndTuple: self._end_tuple,
        }  # fmt: skip
        self.joined: list[bytes] = []
        self.policy = Policy()
        self.making: set[int] = set()  # objects whose arguments are being written

    # The memo

    def _put(self, node: Node = None) -> bytes:
        """Return opcodes that store the top of the stack in the next entry, for `node`."""
        index = self.count
        self.count = index + 1
        if node is not None:
            self.by_id[id(node)] = index
            self.keep.append(node)
        return _put_at(index)

    # Scalars

    def _str(self, text: str) -> None:
        self.emit(self._string(text))

    def _string(self, text: str) -> bytes:
        index = self.strings.get(text)
        if index is not None:
            return _get(index)
        check_no_calls(text)
        data = text.encode("utf-8", "surrogatepass")
        self.strings[text] = index = self.count
        self.count = index + 1
        return b"X" + _U4(len(data)) + data + _put_at(index)

    def _int(self, value: int) -> None:
        self.emit(_integer(value))

    def _bool(self, value: bool) -> None:
        self.emit(b"\x88" if value else b"\x89")

    def _none(self, _: None) -> None:
        self.emit(b"N")

    def _float(self, value: float) -> None:
        self.emit(b"G" + pack(">d", value))

    def _complex(self, value: complex) -> None:
        real, imaginary = pack(">d", value.real), pack(">d", value.imag)
        self.emit(self._global(_COMPLEX) + b"G" + real + b"G" + imaginary + b"\x86R")

    def _bytes(self, value: bytes) -> None:
        """Emit bytes by value: code cannot rely on their identity."""
        key = (bytes, value)
        if key not in self.by_value:
            code = self._encoded(value)
            self.by_value[key] = self.count
            self.emit(code + self._put())
        else:
            self.emit(_get(self.by_value[key]))

    def _encoded(self, value: bytes) -> bytes:
        check_no_calls(value)
        text = value.decode("latin-1").encode()
        encode = self._global(_ENCODE)
        return encode + b"X" + _U4(len(text)) + text + b"X\x06\0\0\0latin1\x86R"

    def _bytearray(self, value: bytearray) -> None:
        self._once(value, lambda: self._global(_BYTEARRAY) + self._encoded(bytes(value)) + b"\x85R")

    def _byte_string(self, value: ByteString) -> None:
        self._once(value, lambda: _python2(value.data))

    def _blob(self, blob: StoredBytes) -> None:
        from ckptkit.compute.operation import stream

        check("record_bytes", blob.extent.length, "bytes of a byte string inside a pickle")
        data = b"".join(stream(blob.extent))
        if blob.kind == "python2":
            self._once(blob, lambda: _python2(data))
        elif blob.kind == "bytearray":
            self._once(blob, lambda: self._global(_BYTEARRAY) + self._encoded(data) + b"\x85R")
        else:
            self._once(blob, lambda: self._encoded(data))

    def _once(self, node: Node, code: Callable[[], bytes]) -> None:
        if id(node) not in self.by_id:
            self.emit(code() + self._put(node))
        else:
            self.emit(_get(self.by_id[id(node)]))

    def _global(self, node: Global) -> bytes:
        """Opcodes for a class or function by name."""
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
            name = inner.encode()
            code = self._global(_GETATTR) + self._global(Global(node.module, outer))
            code += b"X" + _U4(len(name)) + name + b"\x86R"
        else:
            module, name_ = self._spelled(node)
            if "\n" in module + name_:
                raise FormatError(f"the name of a global holds a newline: {str(node)!r}")
            code = b"c" + module.encode() + b"\n" + name_.encode() + b"\n"
        self.by_value[key] = self.count
        return code + self._put(node)

    def _spelled(self, node: Global) -> tuple[str, str]:
        """Return module and name as Python 2 had them, if these are read back as the same."""
        name = node.module, node.name
        if self.protocol > 2:
            return name
        spelled = REVERSE_NAME_MAPPING.get(
            name, (REVERSE_IMPORT_MAPPING.get(node.module, node.module), node.name)
        )
        if (
            NAME_MAPPING.get(spelled, (IMPORT_MAPPING.get(spelled[0], spelled[0]), spelled[1]))
            != name
        ):
            self.needed = 4
        return spelled

    # Tensors

    def _storage(self, typed: TypedStorage) -> None:
        self.emit(self._persistent(typed))

    def _persistent(self, typed: TypedStorage) -> bytes:
        """('storage', class, key, location, numel) BINPERSID."""
        tag, made, key, location, numel = self.persistent_id(typed)
        text = key.encode()
        return b"".join((
            b"(", self._string(tag), self._global(made), b"X", _U4(len(text)), text,
            self._string(location), _integer(numel), b"tQ",
        ))  # fmt: skip

    def _tensor(self, tensor: Tensor) -> None:
        index = self.tensors.get(tensor)
        if index is not None:
            self.emit(_get(index))
            return
        code = self._alike(tensor) or self._new(tensor)
        self.tensors[tensor] = self.count
        self.emit(code + self._put())

    def _alike(self, tensor: Tensor) -> bytes:
        """Return the code of a tensor of a kind that was met before, nothing for any other."""
        storage = tensor.storage
        if storage is None:
            return b""
        found = self.kinds.get(_kind_of(tensor, storage))
        if found is None:
            return b""
        before, after, dtype = found
        key = self.persistent_id(TypedStorage(storage, dtype))[2]
        text = key.encode()
        return b"".join((before, _U4(len(text)), text, after))

    def _new(self, tensor: Tensor) -> bytes:
        """Return the code of a tensor.

        Its kind is remembered where it stores nothing in the memo: all names in it are stored by
        now, and spelled in the same way from here on.
        """
        if tensor.layout != "strided":
            raise UnsupportedError(f"a {tensor.layout} tensor that does not say what it is made of")
        count = self.count
        is_parameter = tensor.kind == "parameter"
        made = self._global(_PARAMETER) if is_parameter else b""
        grad = tensor.requires_grad and not is_parameter
        if tensor.storage is None:
            before, key, after = made + self._meta(tensor, grad), b"", b""
        else:
            before, key, after = self._built(tensor, tensor.storage, grad)
            before = made + before
        if is_parameter:  # _rebuild_parameter(data, requires_grad, OrderedDict())
            hooks = self._global(_ORDERED_DICT) + b")R"
            after += _flag(tensor.requires_grad) + hooks + b"\x87R"
        if self.count == count and tensor.storage is not None and len(self.kinds) < _MOST_KINDS:
            kind = _Kind(before, after, _element_type(tensor.dtype))
            self.kinds[_kind_of(tensor, tensor.storage)] = kind
        return before + key + after

    def _built(self, tensor: Tensor, storage: Storage, grad: bool) -> tuple[bytes, bytes, bytes]:
        """_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, OrderedDict()[,
        metadata]), or v3: the code before the key of the storage, the key, and what is after it."""
        dtype = _element_type(tensor.dtype)
        tag, made, key, location, numel = self.persistent_id(TypedStorage(storage, dtype))
        rebuild = self._global(_TENSOR_V3 if dtype is None else _TENSOR_V2)
        before = rebuild + b"((" + self._string(tag) + self._global(made) + b"X"
        sizes = _integer(tensor.offset) + _shape(tensor.shape) + _shape(tensor.stride)
        after = self._string(location) + _integer(numel) + b"tQ" + sizes
        after += _flag(grad) + self._global(_ORDERED_DICT) + b")R"
        after += self._dtype(tensor) if dtype is None else b""
        text = key.encode()
        return before, _U4(len(text)) + text, after + self._metadata(tensor) + b"tR"

    def _dtype(self, tensor: Tensor) -> bytes:
        name = tensor.dtype.name
        if name in NOT_IN_TORCH:
            raise TensorError(
                f"torch has no dtype {name}, that of a tensor of shape {tensor.shape}: it could "
                "not load the file",
                hint=f"write safetensors without {typed('--all', 'everything=True')}, or leave "
                f"such tensors out with {typed('--drop', 'select(drop=...)')}",
            )
        return self._global(Global("torch", name))

    def _metadata(self, tensor: Tensor) -> bytes:
        bits = [self._string(name) + b"\x88s" for name in ("conj", "neg") if getattr(tensor, name)]
        return b"}" + b"".join(bits) if bits else b""

    def _meta(self, tensor: Tensor, grad: bool) -> bytes:
        """_rebuild_meta_tensor_no_storage(dtype, size, stride, requires_grad)."""
        made = self._global(_META_TENSOR_NO_STORAGE)
        dtype = self._dtype(tensor)
        return (
            made + b"(" + dtype + _shape(tensor.shape) + _shape(tensor.stride) + _flag(grad) + b"tR"
        )

    def write(self, root: Node) -> Pickled:
        frames: list[Iterator[Node]] = [iter((root,))]
        while frames:
            self._join()
            for item in frames[-1]:
                leaf = self.leaves.get(item.__class__)
                if leaf is not None:
                    leaf(item)
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
        # methods of this object: with the collector off, a cycle would keep the memo for good
        self.leaves.clear()
        if self.needed > self.protocol:  # in which names are spelled differently from the start
            return _Writer(self.persistent_id, self.needed).write(root)
        data = b"".join((b"\x80", bytes((self.protocol,)), *self.joined, *self.parts, b"."))
        check("pickle_bytes", len(data), "bytes of the pickle to write")
        return Pickled(data, self._notes())

    def _join(self) -> None:
        if len(self.parts) > _JOINED:
            self.joined.append(b"".join(self.parts))
            self.parts.clear()

    def _notes(self) -> tuple[str, ...]:
        if not self.refused:
            return ()
        names = ", ".join(sorted(self.refused)[:8]) + (", ..." if len(self.refused) > 8 else "")
        return (f"kept values that torch.load(weights_only=True) refuses: {names}",)

    def _global_leaf(self, node: Global) -> None:
        self.emit(self._global(node))
        self.policy.hold(node)

    def _put_node(self, put: _Put) -> None:
        self.making.discard(id(put.node))
        self.emit(self._put(put.node))

    # Containers: each opens with what can be emitted at once, then yields what is inside

    def _open(self, node: Node) -> Iterator[Node]:
        if isinstance(node, OrderedMapping):
            return self._ordered_dict(node)
        if isinstance(node, dict):
            return self._dict(node)
        if isinstance(node, tuple):
            return self._tuple(node)
        if isinstance(node, list):
            return self._list(node)
        if isinstance(node, Object):
            return self._object(node)
        if isinstance(node, SetNode):
            return self._set(node)
        if isinstance(node, Pairs):
            raise AmbiguousError(
                "a mapping has repeated or unhashable keys, which no output can keep",
                hint="`extract` takes another part of the file",
            )
        raise FormatError(f"a value of type {type(node).__name__} has no place in a checkpoint")

    def _dict(self, node: dict[Node, Node]) -> Iterator[Node]:
        self.policy.check_keys(node)
        self.emit(b"}" + self._put(node))
        return self._items(list(node.items()))

    def _ordered_dict(self, node: OrderedMapping) -> Iterator[Node]:
        self.policy.check_keys(node)
        self.emit(self._global(_ORDERED_DICT) + b")R" + self._put(node))
        yield from self._items(list(node.items()))
        if node.state is not None:
            self.policy.check_fields(node.state)
            yield node.state
            yield _BUILD

    def _items(self, pairs: list[tuple[Node, Node]]) -> Iterator[Node]:
        """Emit keys and values that can be emitted at once, and yield the others."""
        leaves = self.leaves
        for start in range(0, len(pairs), BATCH):
            self._join()
            batch = pairs[start : start + BATCH]
            if len(batch) > 1:
                self.emit(_MARK)
            for pair in batch:
                for node in pair:
                    leaf = leaves.get(node.__class__)
                    if leaf is not None:
                        leaf(node)
                    else:
                        yield node
            self.emit(_SETITEMS if len(batch) > 1 else _SETITEM)

    def _list(self, node: list[Node]) -> Iterator[Node]:
        self.emit(b"]" + self._put(node))
        return self._elements(node)

    def _elements(self, items: list[Node]) -> Iterator[Node]:
        for start in range(0, len(items), BATCH):
            batch = items[start : start + BATCH]
            if len(batch) > 1:
                yield _MARK
            yield from batch
            yield _APPENDS if len(batch) > 1 else _APPEND

    def _tuple(self, node: tuple[Node, ...]) -> Iterator[Node]:
        if len(node) > 3:
            yield _MARK
        yield from node
        yield _EndTuple(node)

    def _end_tuple(self, end: _EndTuple) -> None:
        node = end.node
        if not node:
            self.emit(b")")
        elif (
            id(node) in self.by_id
        ):  # it holds itself, and was finished in there: drop the items, get that
            self.emit((b"1" if len(node) > 3 else b"0" * len(node)) + _get(self.by_id[id(node)]))
        else:
            self.emit((_TUPLES[len(node)] if len(node) < 4 else b"t") + self._put(node))

    def _set(self, node: SetNode) -> Iterator[Node]:
        self._begin(node)
        self.policy.check_keys(node.items)
        yield Global("builtins", "frozenset" if node.frozen else "set")
        yield _Code(b"]")
        yield from self._elements(node.items)
        yield _Code(b"\x85R")
        yield _Put(node)

    def _object(self, node: Object) -> Iterator[Node]:
        self._begin(node)
        self.policy.check_object(node)
        self.emit(self._global(node.callable))
        yield node.args
        if node.kwargs is not None:
            yield node.kwargs
            self.needed = 4
            yield _NEWOBJ_EX
        else:
            yield _NEWOBJ if node.new else _REDUCE
        yield _Put(node)
        for step, value in node.steps:
            yield from self._step(step, value)

    def _step(self, step: str, value: Node) -> Iterator[Node]:
        if step == "build":
            yield value
            yield _BUILD
        elif step == "set":
            yield from self._items(value)
        elif step == "append":
            yield from self._elements(value)
        else:
            self.needed = 4
            yield _MARK
            yield from value
            yield _ADDITEMS

    def _begin(self, node: Node) -> None:
        if id(node) in self.making:
            raise UnsupportedError("an object is an argument of its own construction")
        self.making.add(id(node))


def _put_at(index: int) -> bytes:
    """BINPUT or LONG_BINPUT."""
    return b"q%c" % index if index < 256 else b"r" + _U4(index)


def _get(index: int) -> bytes:
    """BINGET or LONG_BINGET."""
    return _GETS[index] if index < 256 else b"j" + _U4(index)


def _flag(value: bool) -> bytes:
    return b"\x88" if value else b"\x89"


def _element_type(dtype: DType) -> DType | None:
    """Return the type of the elements of a storage, None where torch has no class for them."""
    return None if dtype.storage is None else dtype


def _kind_of(tensor: Tensor, storage: Storage) -> tuple[object, ...]:
    """Return what tensors have in common whose code differs in the key of their storage only."""
    return (
        tensor.dtype.name, tensor.shape, tensor.stride, tensor.offset, tensor.requires_grad,
        tensor.kind, tensor.layout, tensor.conj, tensor.neg,
        storage.device, storage.record.length,
    )  # fmt: skip


def _shape(shape: tuple[int, ...]) -> bytes:
    items = b"".join(map(_integer, shape))
    return items + _TUPLES[len(shape)] if len(shape) < 4 else b"(" + items + b"t"


def _integer(value: int) -> bytes:
    """BININT1, BININT2, BININT, LONG1 or LONG4, the shortest that fits."""
    if 0 <= value < 256:
        return _SMALL[value]
    if 0 <= value < 65536:
        return b"M" + pack("<H", value)
    if -(2**31) <= value < 2**31:
        return b"J" + pack("<i", value)
    size = value.bit_length() // 8 + 1
    head = b"\x8a%c" % size if size < 256 else b"\x8b" + pack("<i", size)
    return head + value.to_bytes(size, "little", signed=True)


def _python2(data: bytes) -> bytes:
    """SHORT_BINSTRING or BINSTRING."""
    check_no_calls(data)
    return (b"U%c" % len(data) if len(data) < 256 else b"T" + pack("<i", len(data))) + data
