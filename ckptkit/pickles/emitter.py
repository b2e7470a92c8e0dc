"""Leaves of a pickle that is written: scalars, names, storages and tensors, and the shared memo.

`ckptkit.pickles.writer` adds what holds other values.
"""

from __future__ import annotations

from _compat_pickle import (
    IMPORT_MAPPING,
    NAME_MAPPING,
    REVERSE_IMPORT_MAPPING,
    REVERSE_NAME_MAPPING,
)
from collections.abc import Callable
from struct import Struct, pack

from ckptkit.core.dtypes import NOT_IN_TORCH
from ckptkit.core.errors import FormatError, TensorError, UnsupportedError
from ckptkit.core.limits import check
from ckptkit.core.tensor import Tensor, TypedStorage
from ckptkit.core.tree import ByteString, Global, ModuleVersion, Node, StoredBytes
from ckptkit.pickles.nested import check_no_calls
from ckptkit.pickles.trust import refused_by_weights_only

PersistentId = Callable[[TypedStorage], tuple[Node, ...]]

ORDERED_DICT = Global("collections", "OrderedDict")
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
TUPLES = (b")", b"\x85", b"\x86", b"\x87")


class Emitter:
    """Opcodes so far, the memo, and a method for each leaf of a tree."""

    def __init__(self, persistent_id: PersistentId, protocol: int) -> None:
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
        self.sizes: dict[
            tuple[int, int, tuple[int, ...], tuple[int, ...]], bytes
        ] = {}  # see _sized
        self.frames: dict[
            tuple[str, Node, bool, bool, bool], tuple[bytes, bytes, bytes]
        ] = {}  # see _frame
        self.refused: dict[str, int] = {}  # by weights_only: name -> times
        self.leaves: dict[type, Callable[[Node], object]] = {
            str: self._str, Tensor: self._tensor, int: self._int, bool: self._bool,
            type(None): self._none, ModuleVersion: self._version,
            float: self._float, complex: self._complex, bytes: self._bytes,
            bytearray: self._bytearray,
            ByteString: self._byte_string, StoredBytes: self._blob, TypedStorage: self._storage,
            Global: self._global_leaf,
        }  # fmt: skip

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
            return get(index)
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

    def _version(self, value: ModuleVersion) -> None:
        """Emit a dict of its own for each place."""
        ((key, number),) = value.items()
        self.emit(b"}" + self._put() + self._string(key) + _integer(number) + b"s")

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
            self.emit(get(self.by_value[key]))

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
        from ckptkit.compute import stream

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
            self.emit(get(self.by_id[id(node)]))

    def _global_leaf(self, node: Global) -> None:
        self.emit(self._global(node))

    def _global(self, node: Global) -> bytes:
        """Opcodes for a class or function by name."""
        index = self.by_id.get(id(node))
        if index is not None:
            return get(index)
        key = (Global, (node.module, node.name))
        if key in self.by_value:
            self.keep.append(node)
            self.by_id[id(node)] = self.by_value[key]
            return get(self.by_value[key])
        if refused_by_weights_only(node):
            self.refused[str(node)] = self.refused.get(str(node), 0) + 1
        outer, _, inner = node.name.rpartition(".")
        if outer:
            name = inner.encode()
            code = self._global(_GETATTR) + self._global(Global(node.module, outer))
            code += b"X" + _U4(len(name)) + name + b"\x86R"
        else:
            module, name_ = self._spelt(node)
            if "\n" in module + name_:
                raise FormatError(f"the name of a global holds a newline: {str(node)!r}")
            code = b"c" + module.encode() + b"\n" + name_.encode() + b"\n"
        self.by_value[key] = self.count
        return code + self._put(node)

    def _spelt(self, node: Global) -> tuple[str, str]:
        """Return module and name as Python 2 had them, if these are read back as the same."""
        name = node.module, node.name
        if self.protocol > 2:
            return name
        spelt = REVERSE_NAME_MAPPING.get(
            name, (REVERSE_IMPORT_MAPPING.get(node.module, node.module), node.name)
        )
        if NAME_MAPPING.get(spelt, (IMPORT_MAPPING.get(spelt[0], spelt[0]), spelt[1])) != name:
            self.needed = 4
        return spelt

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
            self.emit(get(index))
            return
        code = (
            self._parameter(tensor)
            if tensor.kind == "parameter"
            else self._built(tensor, tensor.requires_grad)
        )
        self.tensors[tensor] = self.count
        self.emit(code + self._put())

    def _parameter(self, tensor: Tensor) -> bytes:
        """_rebuild_parameter(data, requires_grad, OrderedDict())."""
        made = self._global(_PARAMETER)
        data = self._built(tensor, False)
        return made + data + _flag(tensor.requires_grad) + self._global(ORDERED_DICT) + b")R\x87R"

    def _built(self, tensor: Tensor, grad: bool) -> bytes:
        """_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, OrderedDict()[,
        metadata]), or v3."""
        if tensor.layout != "strided":
            raise UnsupportedError(f"a {tensor.layout} tensor that does not say what it is made of")
        if tensor.storage is None:
            return self._meta(tensor, grad)
        dtype = tensor.dtype
        typed = TypedStorage(tensor.storage, dtype if dtype.storage is not None else None)
        tag, made, key, location, numel = self.persistent_id(typed)
        kind = dtype.name, location, grad, tensor.conj, tensor.neg
        frame = self.frames.get(kind)
        if frame is None:
            before = self.count
            frame = self._frame(tensor, tag, made, location, grad)
            if (
                self.count == before
            ):  # all names are stored by now, and spelt in the same way from here on
                self.frames[kind] = frame
        head, middle, tail = frame
        text = key.encode()
        sizes = numel, tensor.offset, tensor.shape, tensor.stride
        sized = self.sizes.get(sizes)
        if sized is None:
            sized = self.sizes[sizes] = _sized(*sizes)
        return b"".join((head, _U4(len(text)), text, middle, sized, tail))

    def _frame(
        self, tensor: Tensor, tag: str, made: Global, location: str, grad: bool
    ) -> tuple[bytes, bytes, bytes]:
        """Return the parts of a tensor's code that all of its kind share.

        They are before the key of its storage, between that and the numbers, and after these.
        """
        typed = tensor.dtype.storage is not None
        head = (
            self._global(_TENSOR_V2 if typed else _TENSOR_V3)
            + b"(("
            + self._string(tag)
            + self._global(made)
            + b"X"
        )
        middle = self._string(location)
        tail = _flag(grad) + self._global(ORDERED_DICT) + b")R"
        dtype = b"" if typed else self._dtype(tensor)
        return head, middle, tail + dtype + self._metadata(tensor) + b"tR"

    def _dtype(self, tensor: Tensor) -> bytes:
        name = tensor.dtype.name
        if name in NOT_IN_TORCH:
            raise TensorError(
                f"torch has no dtype {name}, that of a tensor of shape {tensor.shape}: it could "
                "not load the file",
                hint=(
                    "write safetensors without --all, or leave such tensors out with `--drop NAME`"
                ),
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


def _put_at(index: int) -> bytes:
    """BINPUT or LONG_BINPUT."""
    return b"q%c" % index if index < 256 else b"r" + _U4(index)


def get(index: int) -> bytes:
    """BINGET or LONG_BINGET."""
    return _GETS[index] if index < 256 else b"j" + _U4(index)


def _flag(value: bool) -> bytes:
    return b"\x88" if value else b"\x89"


def _sized(numel: int, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> bytes:
    """Return the end of a persistent id, and the numbers of a tensor of it."""
    return _integer(numel) + b"tQ" + _integer(offset) + _shape(shape) + _shape(stride)


def _shape(shape: tuple[int, ...]) -> bytes:
    items = b"".join(map(_integer, shape))
    return items + TUPLES[len(shape)] if len(shape) < 4 else b"(" + items + b"t"


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
