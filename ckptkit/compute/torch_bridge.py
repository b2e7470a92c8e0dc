"""Read elements into numpy arrays and torch tensors, and apply functions of the user to tensors.

ckptkit reads bytes directly into the memory of torch. A torch storage can also be a part of a
memory-mapped file, from which the operating system reads a byte on first access.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ckptkit.compute.arranged import contiguous, refusal
from ckptkit.compute.lazy import Array, np
from ckptkit.compute.numbers import NUMBERS, own_dtype, swapped, torch_dtype
from ckptkit.compute.operation import PIECE, Pieces, read_into
from ckptkit.compute.workers import BATCH, ordered
from ckptkit.core.bytesource import Derived, Extent, LocalFile, Operation, Pending, Range, Record
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import (
    ArgumentError,
    DeviceError,
    PositionError,
    TensorError,
    UnsupportedError,
)
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import shape as shape_text

if TYPE_CHECKING:
    from mmap import mmap

    import torch

# numpy


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return numpy's dtype for a ckptkit dtype. If numpy lacks the dtype, use ml_dtypes.

    Raise TensorError if both packages lack the dtype.
    """
    if dtype.numpy is not None:
        return np.dtype(dtype.numpy)
    if dtype.kind == "float" and dtype.bits in (8, 16) and dtype.packed == 1:
        return own_dtype(dtype.name)
    floats = "ckptkit.dequantize converts quantized weights to floats"
    hint = floats if dtype.block > 1 else f".torch() returns a torch tensor; {floats}"
    raise TensorError(f"numpy has no dtype for {dtype}", hint=hint)


def numpy(tensor: Tensor) -> Array:
    """Read all elements of a tensor into a new array."""
    dtype = numpy_dtype(tensor.dtype)
    if (error := refusal(tensor)) is not None:
        raise error
    extent = contiguous(tensor).locate()
    array = np.empty(tensor.shape, dtype)
    read_into(extent, 0, array.reshape(-1).view(np.uint8).data)
    if tensor.dtype.kind == "bool":  # every byte but 0 is true
        array = array.view(np.uint8) != 0
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


def elements(tensor: Tensor, index: object) -> Any:
    """Read the elements that `index` selects. Return an array, or a number for a single element."""
    if tensor.layout != "strided":
        raise TensorError(
            f"cannot index the elements of a {tensor.layout} tensor",
            hint=".torch() returns a torch tensor",
        )
    given = index if isinstance(index, tuple) else (index,)
    for each in given:
        is_integer = hasattr(each, "__index__") and not hasattr(each, "__len__")
        is_known = each is None or each is Ellipsis or isinstance(each, slice) or is_integer
        if isinstance(each, bool) or not is_known:
            raise ArgumentError(
                "expected integers, slices, ... and None as the index of a tensor, got "
                f"{type(each).__name__}",
                hint="t.numpy()[...] accepts lists and masks",
            )
    # numpy computes the offsets from a dummy array. Nothing reads the elements of this array.
    memory = np.zeros(1, np.uint8)
    array = np.lib.stride_tricks.as_strided(memory, tensor.shape, tensor.stride)
    # With `...` in the index, numpy returns an array even for a single element.
    dots = () if any(each is Ellipsis for each in given) else (...,)
    try:
        found = array[(*given, *dots)]
    except IndexError as error:
        raise PositionError(str(error)) from error
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{index} is not a valid index: {error}") from error
    start = found.__array_interface__["data"][0] - memory.__array_interface__["data"][0]
    backward = [step < 0 for step in found.strides]
    for n, step in zip(found.shape, found.strides, strict=True):
        start += min(step, 0) * (n - 1)
    view = Tensor(
        tensor.storage, tensor.dtype, found.shape, tuple(map(abs, found.strides)),
        tensor.offset + (start if found.size else 0), conj=tensor.conj, neg=tensor.neg,
    )  # fmt: skip
    return numpy(view)[tuple(slice(None, None, -1 if each else 1) for each in backward)]


def torch_tensor(tensor: Tensor, device: object) -> torch.Tensor:
    """Read all elements of a tensor into a new torch tensor on `device`, by default the CPU."""
    if (error := refusal(tensor)) is not None:
        raise error
    record = contiguous(tensor)
    memory = to_torch_storage(Storage(record), _device(device))
    stride = contiguous_stride(tensor.shape)
    return rebuild(Tensor(Storage(record), tensor.dtype, tensor.shape, stride), memory)


def _device(device: object) -> torch.device:
    import torch

    if device is None:
        return torch.device("cpu")
    if not isinstance(device, (str, int, torch.device)) or isinstance(device, bool):
        raise ArgumentError(f"device: expected a name or a torch.device, got {device!r}")
    try:
        return torch.device(device)
    except RuntimeError as error:
        why = str(error).strip().partition("\n")[0]
        raise DeviceError(f"{device!r} is not a device: {why}") from error


def overflows(tensor: Tensor, target: DType) -> int:
    """Return the number of finite elements that are outside the range of the dtype `target`.

    Either both dtypes are floating-point dtypes, or both are integer dtypes. If `target` has the
    larger range, the function reads nothing and returns 0.
    """
    import torch

    old, new = torch_dtype(tensor.dtype), torch_dtype(target)
    info = torch.finfo if target.kind == "float" else torch.iinfo
    if info(old).max <= info(new).max and info(old).min >= info(new).min:
        return 0
    values = torch_tensor(tensor, None)
    if target.kind == "int":
        wide = values.to(torch.int64)
        return int(((wide < info(new).min) | (wide > info(new).max)).sum())
    wide = values.to(torch.promote_types(torch.float32, old) if old.itemsize > 1 else torch.float32)
    return int((wide.isfinite() & ~wide.to(new).to(torch.float32).isfinite()).sum())


# Memory of torch


class _Part(NamedTuple):
    """The bytes from `start` to `stop` of an extent, to be read into the 1-D tensor `target`.

    The bytes are elements of `dtype`.
    """

    extent: Extent
    start: int
    stop: int
    dtype: torch.dtype
    target: torch.Tensor


def to_torch_storage(
    storage: Storage, device: str | torch.device = "cpu", component: int = 1
) -> torch.UntypedStorage:
    """Read the bytes of a storage directly into torch's memory on `device`. Use several threads.

    If the storage is big-endian, reverse the bytes of each group of `component` bytes. `component`
    is ``DType.component`` of the tensors in the storage. Raise DeviceError if the device is missing
    or does not have enough memory.
    """
    import torch

    where = torch.device(device)
    extent = native(storage, component).locate()
    try:
        memory = torch.empty(extent.length, dtype=torch.uint8, device=where)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).strip().split("\n")[0]
        hint = None if where.type == "cpu" else "map_location='cpu' loads all tensors to the CPU"
        message = f"cannot allocate {extent.length:,} bytes on {where}: {why}"
        raise DeviceError(message, hint=hint) from error
    if where.type != "meta":
        _fill_all([*_parts(extent, memory.dtype, memory)])
    return memory.untyped_storage()


def fill(pairs: Iterable[tuple[Tensor, torch.Tensor]]) -> None:
    """Fill contiguous torch tensors with the elements of tensors in files. Use several threads.

    Each pair consists of a tensor in a file and the torch tensor to fill. Both have the same shape,
    and torch can cast the dtype in the file to the other dtype. If the torch tensor is on the CPU
    and has the dtype in the file, ckptkit reads bytes directly into its memory. Otherwise, ckptkit
    reads and casts small blocks. `fill` locates all records before it reads the first byte.
    """
    import torch

    parts: list[_Part] = []
    for tensor, target in pairs:
        extent = contiguous(tensor).locate()
        parts += _parts(extent, torch_dtype(tensor.dtype), target.detach().view(-1))
    _fill_all(parts)
    for part in parts:  # tell autograd about the change
        torch.autograd.graph.increment_version(part.target)


def _parts(extent: Extent, dtype: torch.dtype, target: torch.Tensor) -> Iterator[_Part]:
    """Split an extent into parts that several threads read.

    If an operation computes the extent, yield one part.
    """
    step = BATCH if isinstance(extent, Range) else extent.length
    for start in range(0, extent.length, step or 1):
        yield _Part(extent, start, min(start + step, extent.length), dtype, target)


def _fill_all(parts: list[_Part]) -> None:
    deque(ordered(_fill, parts, lambda part: part.stop - part.start), maxlen=0)


def _fill(part: _Part) -> None:
    import torch

    extent, start, stop, dtype, target = part
    size = dtype.itemsize
    if target.device.type == "cpu" and target.dtype == dtype:
        memory = target[start // size : stop // size].view(torch.uint8)
        read_into(extent, start, memory.numpy().data)
        return
    step = PIECE if isinstance(extent, Range) else stop - start
    pinned = target.device.type == "cuda"
    memory = torch.empty(
        min(step, stop - start), dtype=torch.uint8, device="cpu", pin_memory=pinned
    )
    for at in range(start, stop, step):
        piece = memory[: min(step, stop - at)]
        read_into(extent, at, piece.numpy().data)
        target[at // size : (at + len(piece)) // size].copy_(piece.view(dtype))


def native(storage: Storage, component: int) -> Record:
    """Return the bytes of a storage in little-endian order. Each number has `component` bytes."""
    return swapped(storage.record, component) if storage.big_endian else storage.record


def rebuild(tensor: Tensor, untyped: torch.UntypedStorage) -> torch.Tensor:
    """Return the torch tensor or Parameter that `tensor` describes, as a view of `untyped`.

    Raise UnsupportedError for quantized and non-strided tensors.
    """
    import torch

    if tensor.dtype.kind == "quantized" or tensor.layout != "strided":
        raise UnsupportedError(
            f"cannot rebuild {tensor.layout} tensors of {tensor.dtype} from their bytes alone"
        )
    made = torch.empty(0, dtype=torch_dtype(tensor.dtype), device=untyped.device)
    made.set_(untyped, tensor.offset, tensor.shape, tensor.stride)
    made = made.conj() if tensor.conj else made
    made = torch._neg_view(made) if tensor.neg else made
    if tensor.kind == "parameter":
        return torch.nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


class MappedFiles:
    """Memory-maps each local file once, copy-on-write.

    If the user changes a tensor, the file does not change.
    """

    def __init__(self) -> None:
        self._maps: dict[LocalFile, mmap | None] = {}

    def torch_storage(self, storage: Storage, component: int) -> torch.UntypedStorage | None:
        """Return the bytes of a storage as a part of a memory-mapped file.

        Return None if the storage is not a byte range of a local file, or if the operating system
        cannot map the file. Return None also for a big-endian storage, and for an offset that is
        not divisible by `component`.
        """
        import torch

        place = native(storage, component).locate()
        if not isinstance(place, Range) or not isinstance(place.source, LocalFile):
            return None
        if not place.length or place.offset % component:
            return None
        if place.source not in self._maps:
            self._maps[place.source] = place.source.map()
        whole = self._maps[place.source]
        if whole is None:
            return None
        memory = torch.frombuffer(whole, dtype=torch.uint8, count=place.length, offset=place.offset)
        return memory.untyped_storage()


# Functions of the user

Function = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Apply(Operation):
    """Calls a user's function with a tensor. The output contains the elements of the result.

    The tensor is contiguous. `made_dtype` and `made_shape` are the dtype and shape that the first
    call of the function returned.
    """

    function: Function
    dtype: DType
    shape: Shape
    made_dtype: DType
    made_shape: Shape
    seekable: ClassVar[bool] = False
    whole: ClassVar[bool] = True

    def read(self, extent: Derived, start: int, stop: int) -> Pieces:
        data = bytearray(extent.inputs[0].length)
        read_into(extent.inputs[0], 0, memoryview(data))
        made = self._result(data)
        del data
        for at in range(start, stop, PIECE):
            yield made[at : min(at + PIECE, stop)]

    def _result(self, data: bytearray) -> memoryview:
        """Call the function with the tensor whose bytes are `data`. Return the result's bytes."""
        import torch

        dtype = getattr(torch, self.dtype.name)
        given = torch.empty(self.shape, dtype=dtype)
        if data:
            given = torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(self.shape)
        made = called(self.function, given)
        found = (dtype_of(made), tuple(made.shape))
        if found != (self.made_dtype, self.made_shape):
            raise ArgumentError(
                f"the function must return the same dtype and shape in each call, but returned "
                f"{self.made_dtype} {shape_text(self.made_shape)}, then {found[0]} "
                f"{shape_text(found[1])}"
            )
        plain = made.cpu().resolve_conj().resolve_neg().contiguous()
        view: memoryview = plain.reshape(-1).view(torch.uint8).numpy().data
        return view


def called(function: Function, given: torch.Tensor) -> torch.Tensor:
    """Call a function with a tensor, and return the result as a torch tensor.

    Raise ArgumentError if the result is neither a strided tensor of numbers nor a numpy array.
    """
    import torch

    with torch.no_grad():
        made = function(given)
    if isinstance(made, (np.ndarray, np.generic)):
        made = torch.from_numpy(np.ascontiguousarray(made)).reshape(made.shape)
    if not isinstance(made, torch.Tensor):
        raise ArgumentError(
            f"the function returned a {type(made).__name__}, not a torch tensor or numpy array"
        )
    if made.layout is not torch.strided or dtype_of(made).kind not in NUMBERS:
        raise ArgumentError(
            f"the function must return a strided tensor of numbers, but returned a {made.layout} "
            f"tensor of {made.dtype}"
        )
    return made.detach()


def dtype_of(tensor: torch.Tensor) -> DType:
    """Return the dtype of a torch tensor."""
    return BY_NAME[str(tensor.dtype).removeprefix("torch.")]


def applied(tensor: Tensor, function: Function) -> Tensor:
    """Return a tensor whose elements `function` computes from `tensor` on each read.

    To find the dtype and shape, call `function` with a meta tensor. If this call fails, call
    `function` with the elements.
    """
    dtype, shape = _outcome(tensor, function)
    operation = Apply(function, tensor.dtype, tensor.shape, dtype, shape)
    storage = None
    if tensor.storage is not None:
        length = dtype.nbytes(prod(shape))
        record = Pending(operation, (contiguous(tensor),), length)
        storage = Storage(record, tensor.storage.device)
    grad = tensor.requires_grad and dtype.kind in ("float", "complex")
    kind = "parameter" if tensor.kind == "parameter" else "tensor"
    return Tensor(storage, dtype, shape, contiguous_stride(shape), 0, grad, kind)


def _outcome(tensor: Tensor, function: Function) -> tuple[DType, Shape]:
    """Return the dtype and shape of the result of `function`."""
    import torch

    like = torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype), device="meta")
    try:
        made = called(function, like)
    except Exception:  # the function may need the elements
        if tensor.storage is None:
            raise
        made = called(function, torch_tensor(tensor, None))
    return dtype_of(made), tuple(made.shape)
