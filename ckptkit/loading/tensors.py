"""Convert the nodes of a checkpoint to torch tensors, NumPy arrays and Python values."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ckptkit.api import open_checkpoint
from ckptkit.compute.numbers import torch_dtype
from ckptkit.compute.operation import stream
from ckptkit.compute.torch_bridge import MappedFiles, rebuild, to_torch_storage
from ckptkit.core import arguments
from ckptkit.core.checkpoint import Source
from ckptkit.core.dtypes import BY_NAME, UINT8, DType
from ckptkit.core.errors import (
    CkptkitError,
    DeviceError,
    FormatError,
    TensorError,
    UnsupportedError,
    UsageError,
)
from ckptkit.core.tensor import Storage, Tensor, TypedStorage, check_geometry
from ckptkit.core.text import flatten
from ckptkit.core.tree import (
    MODULE_VERSIONS,
    ByteString,
    Copier,
    Global,
    Node,
    Object,
    OrderedMapping,
    Pairs,
    SetNode,
    StoredBytes,
    StoredList,
    attributes_of,
    join,
)
from ckptkit.core.weights import Weights, as_tensor
from ckptkit.edits import keys
from ckptkit.formats.format import steady

if TYPE_CHECKING:
    import torch

    Restore = Callable[[torch.UntypedStorage, str], torch.UntypedStorage | None]
    MapLocation = str | torch.device | Mapping[str, str] | Restore | None
else:
    MapLocation = Any


class TorchTensors:
    """Creates the torch tensors of one checkpoint. Tensors that share a Storage share memory.

    `map_location` accepts the same values as ``torch.load``. With None, each tensor is on the
    device that the file records. Raises DeviceError if a device is missing. With `files`, tensors
    on the CPU are memory-mapped if possible.
    """

    def __init__(self, map_location: MapLocation = None, files: MappedFiles | None = None) -> None:
        import torch

        forms = (str, torch.device, Mapping, type(None))
        if not isinstance(map_location, forms) and not callable(map_location):
            raise UsageError(f"map_location cannot be of type {type(map_location).__name__}")
        self._map_location = map_location
        self._files = files
        self._devices: dict[str, torch.device] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        # References to the storages. Without a reference, Python could give the id of a storage, a
        # key of `_storages`, to a new object.
        self._keep: list[Storage] = []

    def storage(self, storage: Storage, dtype: DType | None = None) -> torch.UntypedStorage:
        """Return the torch storage on the device that `map_location` selects.

        `dtype` is the dtype of the tensors in the storage.
        """
        import torch

        if id(storage) in self._storages:
            return self._storages[id(storage)]
        self._keep.append(storage)
        where, component = self._map_location, dtype.component if dtype else 1
        device = torch.device("cpu") if callable(where) else self.device(storage.device)
        memory = None
        if self._files is not None and device.type == "cpu":
            memory = self._files.torch_storage(storage, component)
        if memory is None:
            memory = to_torch_storage(storage, device, component)
        if callable(where):
            given = where(memory, storage.device)
            if given is None:
                memory = _restored(memory, storage.device)
            elif isinstance(given, torch.storage.TypedStorage):
                memory = given._untyped_storage
            else:
                memory = given
        self._storages[id(storage)] = memory
        return memory

    def device(self, tag: str) -> torch.device:
        """Return the device that `map_location` selects for a device tag.

        To find the device, torch restores an empty storage. Later calls for the same device reuse
        the result.
        """
        where = self._map_location
        if callable(where):
            raise UnsupportedError(
                "map_location cannot be a function: the file has tensors without a storage"
            )
        location = tag
        if isinstance(where, Mapping):
            location = where.get(tag, tag)
        elif where is not None:
            location = str(where)
        if location not in self._devices:
            import torch

            empty = torch.UntypedStorage(0)  # type: ignore[no-untyped-call]
            self._devices[location] = _restored(empty, location).device
        return self._devices[location]

    def tensor(self, node: Tensor | Object) -> torch.Tensor:
        """Create the torch tensor for a Tensor, or for an Object that calls a rebuild function.

        A tensor subclass becomes a plain tensor. This method does not set attributes on tensors.
        Raises UnsupportedError if the tensor cannot be created without the class.
        """
        return self._strided(node) if isinstance(node, Tensor) else self._called(node)

    def _strided(self, tensor: Tensor) -> torch.Tensor:
        import torch

        if tensor.storage is not None:
            return rebuild(tensor, self.storage(tensor.storage, tensor.dtype))
        dtype = torch_dtype(tensor.dtype)
        made = torch.empty_strided(tensor.shape, tensor.stride, dtype=dtype, device="meta")
        if tensor.kind == "parameter":
            return torch.nn.Parameter(made, tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)

    def _called(self, node: Object) -> torch.Tensor:
        name = node.global_.name if node.global_ and node.global_.module in _MODULES else ""
        make = _CALLS.get(name)
        try:
            if make is not None:
                return make(self, node)
            if node.tensor is not None and node.tensor.layout == "strided":
                return self._strided(node.tensor)
        except CkptkitError:
            raise
        except _FAILURES as error:
            why = str(error).strip().split("\n")[0]
            raise TensorError(
                f"the arguments of {node.global_} contradict each other: {why}"
            ) from error
        raise UnsupportedError(
            f"cannot rebuild a tensor of {node.global_ or 'a tensor subclass'} without its class",
            hint="ckptkit.load(..., whole=True) returns the tree with such values as Object",
        )


def _restored(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
    """Move a storage to a location, like `torch.load`. Raises DeviceError if torch fails."""
    import torch

    try:
        moved: torch.UntypedStorage = torch.serialization.default_restore_location(
            storage, location
        )  # type: ignore[no-untyped-call]
        return moved
    except (RuntimeError, AssertionError) as error:
        why = str(error).strip().split("\n")[0]
        raise DeviceError(
            f"cannot put tensors on {location}: {why}",
            hint="map_location='cpu' loads them on the CPU",
        ) from error


# Functions that replace the rebuild functions of torch/_utils.py. ``node.args`` contains the
# arguments of the rebuild function. The reader has already checked the types of these arguments.


def _parameter_call(tensors: TorchTensors, node: Object) -> torch.Tensor:
    """Create a parameter. ``node.args`` is (data, requires_grad, hooks[, state])."""
    import torch

    assert node.tensor is not None
    data = tensors.tensor(node.args[0]).detach()
    return torch.nn.Parameter(data, node.tensor.requires_grad)


def attributes(node: Node) -> Iterator[tuple[str, Node]]:
    """Yield (name, value) of attributes that Python code set on a plain tensor or parameter."""
    if not isinstance(node, Object) or node.global_ is None:
        return
    name, args = node.global_.name, node.args
    own = name == "_rebuild_from_type_v2" and len(args) == 4 and args[1] in _CLASSES
    if not own and not (name == "_rebuild_parameter_with_state" and len(args) == 4):
        return
    for held in args[3] if isinstance(args[3], tuple) else (args[3],):  # (__dict__, __slots__)
        if isinstance(held, dict):
            yield from ((key, value) for key, value in held.items() if isinstance(key, str))


def _from_type(tensors: TorchTensors, node: Object) -> torch.Tensor:
    """Create a plain tensor instead of a tensor subclass.

    ``node.args`` is (function, class, arguments, state). The class and the state are ignored.
    """
    inner = Object(node.args[0], node.args[2], tensor=node.tensor)
    return tensors._called(inner)


def _on_device(tensors: TorchTensors, node: Object) -> torch.Tensor:
    """Create a tensor on a device. ``node.args`` is (data, dtype, device, requires_grad)."""
    data, dtype, device, grad = node.args
    made = tensors.tensor(data).to(
        device=tensors.device(device), dtype=torch_dtype(BY_NAME[dtype.name])
    )
    return made.requires_grad_(bool(grad))


def _sparse(tensors: TorchTensors, node: Object) -> torch.Tensor:
    """Create a sparse tensor. ``node.args`` is (layout, data).

    For COO, data is (indices, values, size[, is_coalesced]). For other layouts, data is
    (compressed, plain, values, size).
    """
    import torch

    assert node.tensor is not None
    layout, shape, data = node.tensor.layout, node.tensor.shape, node.args[1]
    if layout == "sparse_coo":
        coalesced = bool(data[3]) if len(data) > 3 and data[3] is not None else None
        indices, values = map(tensors.tensor, data[:2])
        # Tensors on the meta device have no indices to check.
        return torch.sparse_coo_tensor(
            indices, values, shape, check_invariants=not values.is_meta, is_coalesced=coalesced
        )
    compressed, plain, values = map(tensors.tensor, data[:3])
    how: dict[str, Any] = {"layout": getattr(torch, layout), "check_invariants": not values.is_meta}
    return torch.sparse_compressed_tensor(compressed, plain, values, shape, **how)


def _quantized(tensors: TorchTensors, node: Object) -> torch.Tensor:
    """Create a quantized tensor.

    ``node.args`` is (storage, offset, size, stride, quantizer, ...). The quantizer is (scheme,
    scale, zero_point) or (scheme, scales, zero_points, axis).
    """
    import torch

    like, scheme = node.tensor, node.args[4]
    assert like is not None and like.storage is not None
    memory = tensors.storage(like.storage, like.dtype)
    dtype = torch_dtype(like.dtype)
    if scheme[0].name == "per_tensor_affine":
        made = torch._empty_affine_quantized(
            (0,), scale=scheme[1], zero_point=scheme[2], dtype=dtype, device=memory.device
        )
    else:
        is_wide = scheme[0].name == "per_channel_affine"
        wide = (torch.double, torch.long) if is_wide else (torch.float, torch.float)
        scales, zeros = (
            tensors.tensor(part) if as_tensor(part) is not None else torch.tensor(part, dtype=kind)
            for part, kind in zip(scheme[1:3], wide, strict=True)
        )
        axis, rank = scheme[3], len(like.shape)
        if not 0 <= axis < rank or not len(scales) == len(zeros) == like.shape[axis]:
            raise TensorError(
                f"per-channel quantization along axis {axis} does not fit shape {like.shape}"
            )
        made = torch._empty_per_channel_affine_quantized(
            like.shape, scales=scales, zero_points=zeros, axis=axis,
            dtype=dtype, device=memory.device,
        )  # fmt: skip
    made.set_(memory, like.offset, like.shape, like.stride)
    return made.requires_grad_(like.requires_grad)


def _nested(tensors: TorchTensors, node: Object) -> torch.Tensor:
    """Create a nested tensor. ``node.args`` is (buffer, sizes, strides, offsets).

    This function checks that the tensors are inside the buffer, because torch does not.
    """
    import torch

    buffer, sizes, strides, offsets = map(tensors.tensor, node.args)
    whole = as_tensor(node.args[0])
    assert whole is not None
    for shape, stride, offset in zip(
        sizes.tolist(), strides.tolist(), offsets.tolist(), strict=True
    ):
        check_geometry(None, whole.dtype, tuple(shape), tuple(stride), offset)
        last = offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        if 0 not in shape and last >= whole.numel:
            raise TensorError(
                f"a nested tensor of {shape} at {offset} is outside its buffer of {whole.numel:,}"
            )
    made: torch.Tensor = torch._nested_view_from_buffer(buffer, sizes, strides, offsets)
    return made


# Exceptions that torch raises for inconsistent arguments.
_FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, OverflowError)
_MODULES = ("torch._utils", "torch._tensor", "torch.tensor")
_CLASSES = (
    Global("torch", "Tensor"),
    Global("torch.nn.parameter", "Parameter"),
    Global("torch.nn.parameter", "Buffer"),
)
_CALLS: dict[str, Callable[[TorchTensors, Object], torch.Tensor]] = {
    "_rebuild_parameter": _parameter_call,
    "_rebuild_parameter_with_state": _parameter_call,
    "_rebuild_from_type": _from_type,
    "_rebuild_from_type_v2": _from_type,
    "_rebuild_device_tensor_from_numpy": _on_device,
    "_rebuild_device_tensor_from_cpu_tensor": _on_device,
    "_rebuild_xla_tensor": _on_device,
    "_rebuild_sparse_tensor": _sparse,
    "_rebuild_sparse_csr_tensor": _sparse,
    "_rebuild_qtensor": _quantized,
    "_rebuild_nested_tensor": _nested,
}


def load(
    path: Source,
    map_location: MapLocation = None,
    *,
    key: str | None = None,
    whole: bool = False,
    mmap: bool = True,
) -> Any:
    """Return the weights of a file, folder or Checkpoint as torch tensors by name, like torch.load.

    Tensors on the CPU are memory-mapped, as with ``torch.load(mmap=True)`` and safetensors. The
    first use of a tensor reads its bytes from the file. If you write to a tensor, the file does not
    change. Do not change the file while its tensors are in use. If you overwrite or truncate the
    file, for example by ``torch.save`` to the same path, the process ends with a bus error and the
    content of the file is lost. :func:`ckptkit.save` to the same path is safe.

    With ``mmap=False``, `load` reads all tensors into memory. With ``mmap=True``, `load` reads a
    tensor into memory if the tensor must be computed, is not in a local file, or does not begin at
    an address divisible by its element size. `load` does not verify checksums. To verify checksums,
    use `ckptkit verify`.

    `map_location` accepts the same values as ``torch.load``. `key` is the path of the entry with
    the weights. Tensors that share memory in the checkpoint also share memory after `load`. An
    OrderedDict keeps its ``_metadata``. With `whole`, `load` returns the complete tree, not only
    the weights. In this tree, a :class:`ckptkit.core.tree.Object` represents each object of an
    unknown class.

    Raises UsageError if there are no weights. Raises DeviceError if this machine lacks the device.
    """
    arguments.flags(whole=whole, mmap=mmap)
    ck = open_checkpoint(path, key=key)
    files = MappedFiles() if mmap else None
    values = PythonValues(TorchTensors(map_location, files), TorchTensors("cpu", files))
    try:
        with steady(ck.source, remote=True):
            return values(ck.root) if whole else values.state_dict(ck.required)
    except CkptkitError as error:
        raise error.at(ck.name or "checkpoint") from error.__cause__


def entries(weights: Weights) -> Iterator[tuple[str, Node]]:
    """Yield (name, node) of each tensor and ``_extra_state`` in the dict with the weights.

    A dict with ``_metadata`` is a state_dict. In this case, yield all entries of the dict.
    """
    if weights.is_module:
        yield from weights.nodes.items()
        return
    complete = keys.paths_of(weights.node) is not None
    for name, node in weights.node.items():
        if isinstance(name, str) and (
            complete or name in weights.nodes or name.endswith("_extra_state")
        ):
            yield name, node


class PythonValues(Copier):
    """Converts nodes to Python values. Converts each node once, so shared values remain shared.

    The tree can have any depth, and can contain cycles. `arrays` creates the tensors for NumPy
    arrays. NumPy arrays are always on the CPU.
    """

    def __init__(self, tensors: TorchTensors, arrays: TorchTensors | None = None) -> None:
        super().__init__()
        self.tensors, self.arrays = tensors, arrays or TorchTensors("cpu")

    def state_dict(self, weights: Weights) -> dict[str, Any]:
        """Map names to torch tensors.

        Tensors of a pickled module are detached, as in its ``state_dict()``.
        """
        ordered = isinstance(weights.node, OrderedMapping) or weights.is_module
        found: dict[str, Any] = collections.OrderedDict() if ordered else {}
        for name, node in entries(weights):
            try:
                found[name] = self(node) if as_tensor(node) is None else self._with_attributes(node)
            except CkptkitError as error:
                error.message = f"{join((*weights.path, name))}: {error.message}"
                raise
            if weights.is_module:
                found[name] = found[name].detach()
        if isinstance(weights.node, OrderedMapping):
            self._attributes(weights.node, found)
        self(None)  # fills all containers that are still empty
        return found

    def start(self, node: Node) -> Any:
        """Return the value of a node. Containers and Objects are still empty."""
        if type(node) in _SHELLS:
            return _SHELLS[type(node)]()
        if isinstance(node, Object):
            if node.tensor is not None and node.tensor.layout != "subclass":
                return self._tensor(node, node.tensor)
            if node.value is not None:
                return node.value
            made = _plain_object(node)
            return Object(None, new=node.new) if made is None else made
        if isinstance(node, Tensor):
            return self._tensor(node, node)
        if isinstance(node, TypedStorage):
            # Return an untyped storage as a TypedStorage of uint8, like torch.load.
            import torch

            # torch has no type annotations for TypedStorage.
            make: Any = torch.storage.TypedStorage
            memory = self.tensors.storage(node.storage, node.dtype)
            dtype = torch_dtype(node.dtype or UINT8)
            return make(wrap_storage=memory, dtype=dtype, _internal=True)
        if isinstance(node, Global):
            is_dtype = node.module == "torch" and node.name in BY_NAME
            return torch_dtype(BY_NAME[node.name]) if is_dtype else node
        if isinstance(node, StoredBytes):
            data = b"".join(stream(node.extent))
            return bytearray(data) if node.kind == "bytearray" else data
        if isinstance(node, StoredList):
            return list(node)
        return node.data if isinstance(node, ByteString) else node

    def _tensor(self, node: Tensor | Object, like: Tensor) -> Any:
        if like.kind == "ndarray":  # map_location does not apply to NumPy arrays
            return self.arrays.tensor(node).numpy()
        return self._with_attributes(node)

    def _with_attributes(self, node: Tensor | Object) -> Any:
        """Create the torch tensor of a node, and set the attributes that Python code had set."""
        made = self.tensors.tensor(node)
        for key, value in attributes(node):
            made.__dict__[key] = self.copy(value)
        return made

    def fill(self, old: Node, new: Any) -> None:
        if isinstance(new, dict):
            for key, value in _items(old):
                # If a key is equal to an earlier key or is not hashable, use the node as the key.
                item, made = self.copy(value), self.copy(key)
                try:
                    new[key if made in new else made] = item
                except TypeError:
                    new[key] = item
            if isinstance(old, OrderedMapping):
                self._attributes(old, new)
        elif isinstance(new, set):
            new.update(_hashable(map(self.copy, old.items)))
        else:
            super().fill(old, new)

    def frozen(self, node: Node) -> Sequence[Node] | None:
        """Return the items of a tuple or frozenset. Return None for other nodes."""
        if isinstance(node, SetNode) and node.frozen:
            return node.items
        return super().frozen(node)

    def freeze(self, node: Node, items: Iterable[Any]) -> Any:
        return frozenset(_hashable(items)) if isinstance(node, SetNode) else tuple(items)

    def _attributes(self, old: OrderedMapping, new: Any) -> None:
        """Set ``_metadata`` on an OrderedDict. Other attributes are not restored."""
        held = attributes_of(old)
        if MODULE_VERSIONS in held:
            new._metadata = self.copy(held[MODULE_VERSIONS])


_SHELLS: dict[type, Callable[[], Any]] = {
    dict: dict, list: list, OrderedMapping: collections.OrderedDict, SetNode: set,
    Pairs: lambda: Pairs([]),
}  # fmt: skip


def _items(node: Node) -> Iterable[tuple[Node, Node]]:
    """Return the items of a node that becomes a dict, a Counter or a defaultdict."""
    if isinstance(node, dict):
        return node.items()
    if node.steps:
        return list(flatten(pairs for _, pairs in node.steps))
    return node.args[0].items() if node.args and isinstance(node.args[0], dict) else ()


def _hashable(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        try:
            hash(value)
        except TypeError as error:
            raise FormatError(
                f"a set contains a {type(value).__name__}, which is not hashable"
            ) from error
        yield value


_FACTORIES = {each.__name__: each for each in (list, dict, set, int, float, str)}


def _plain_object(node: Object) -> Any:
    """Create a torch.Size, torch.device, Counter or defaultdict. Return None for other classes."""
    if node.global_ is None:
        return None
    name, args = (node.global_.module, node.global_.name), node.args
    first: Any = None
    if isinstance(args, (tuple, list)) and len(args) == 1:
        first = args[0]

    def are(values: Node, *kinds: type) -> bool:
        return isinstance(values, (tuple, list)) and all(isinstance(each, kinds) for each in values)

    if name == ("torch", "Size") and are(first, int):
        import torch

        return torch.Size(first)
    if name == ("torch", "device") and are(args, str, int):
        import torch

        try:
            return torch.device(*args)
        except (RuntimeError, TypeError):  # the installed torch does not know this device
            return None
    if name == ("collections", "Counter") and not node.steps:
        return collections.Counter() if not args or isinstance(first, dict) else None
    if name == ("collections", "defaultdict") and all(step == "set" for step, _ in node.steps):
        if first is None:
            return collections.defaultdict(None)
        if isinstance(first, Global) and first.module == "builtins":
            made = _FACTORIES.get(first.name)
            return collections.defaultdict(made) if made else None
    return None
