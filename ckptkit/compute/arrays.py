"""Elements of tensors as numpy arrays and torch tensors, read when they are asked for."""

from __future__ import annotations

from operator import index as integer
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptkit.compute.expanded import refusal
from ckptkit.compute.operations import read_into
from ckptkit.compute.tensors import contiguous
from ckptkit.compute.torch_dtypes import torch_dtype
from ckptkit.compute.torch_memory import rebuild, to_torch_storage
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import (
    ArgumentError,
    DeviceError,
    MissingPackageError,
    PositionError,
    TensorError,
)
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import shape as shape_text

if TYPE_CHECKING:
    import numpy as np
    import torch

    Array = np.ndarray[Any, Any]

# Types that numpy lacks and ml_dtypes has, with one element in each item.
_ML_DTYPES = (
    "bfloat16",
    "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
)  # fmt: skip


def numpy_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the numpy type of `dtype`, from ml_dtypes where numpy has none.

    Raises MissingPackageError without ml_dtypes, TensorError where neither has one.
    """
    import numpy as np

    if dtype.numpy is not None:
        return np.dtype(dtype.numpy)
    if dtype.name not in _ML_DTYPES:
        raise TensorError(
            f"numpy has no arrays of {dtype}",
            hint=".torch() gives a torch tensor; ckptkit.dequantize gives floats for codes",
        )
    try:
        import ml_dtypes
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"numpy has no {dtype}, and ml_dtypes, which adds it, is not installed",
            hint="pip install ml_dtypes; or .torch() gives a torch tensor",
        ) from error
    found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype.name))
    return found


def numpy(tensor: Tensor) -> Array:
    """Read all elements of a tensor into a new array."""
    import numpy as np

    dtype = numpy_dtype(tensor.dtype)
    if (error := refusal(tensor)) is not None:
        raise error
    extent = contiguous(tensor).locate()
    array = np.empty(tensor.shape, dtype)
    read_into(extent, 0, array.reshape(-1).view(np.uint8).data)
    if tensor.dtype.kind == "bool":  # any other byte than 0 is true
        array = array.view(np.uint8) != 0
    return array if dtype.isnative else array.astype(dtype.newbyteorder("="))


def elements(tensor: Tensor, index: object) -> Any:
    """Read the elements that `index` selects: an array, or a number where nothing else is left."""
    if tensor.layout != "strided":
        raise TensorError(
            f"a {tensor.layout} tensor has no elements in order to select from",
            hint=".torch() gives a torch tensor",
        )
    view = _view(tensor, index if isinstance(index, tuple) else (index,))
    return numpy(view.tensor)[view.after]


class _View(NamedTuple):
    """The selected elements, and the index that turns their array into the result."""

    tensor: Tensor
    after: tuple[Any, ...]


def _view(tensor: Tensor, index: tuple[object, ...]) -> _View:
    shape: list[int] = []
    stride: list[int] = []
    after: list[Any] = []
    offset, axis = tensor.offset, 0
    for each in _expanded(index, tensor.shape):
        if each is None:
            after.append(None)
            continue
        n, step = tensor.shape[axis], tensor.stride[axis]
        axis += 1
        if isinstance(each, slice):
            selected = _range(each, n)
            ascending = selected if selected.step > 0 else selected[::-1]
            offset += ascending.start * step if ascending else 0
            shape.append(len(ascending))
            stride.append(ascending.step * step)
            after.append(slice(None, None, 1 if selected.step > 0 else -1))
        else:
            offset += _position(each, n, axis - 1) * step
    made = Tensor(
        tensor.storage, tensor.dtype, tuple(shape), tuple(stride), offset,
        conj=tensor.conj, neg=tensor.neg,
    )  # fmt: skip
    return _View(made, tuple(after))


def _expanded(index: tuple[object, ...], shape: Shape) -> list[object]:
    """Return one index for each dimension, and the None of new ones. Raises PositionError."""
    given = sum(each is not None and each is not Ellipsis for each in index)
    dots = [number for number, each in enumerate(index) if each is Ellipsis]
    if len(dots) > 1:
        raise PositionError("an index has at most one '...'")
    if given > len(shape):
        raise PositionError(f"{given} indices for a tensor of shape {shape_text(shape)}")
    at = dots[0] if dots else len(index)
    whole = [slice(None)] * (len(shape) - given)
    return [*index[:at], *whole, *index[at + 1 :]]


def _range(given: slice, n: int) -> range:
    try:
        return range(*given.indices(n))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{given} cannot be a slice of a tensor: {error}") from error


def _position(given: object, n: int, axis: int) -> int:
    """Return the position of an integer index, counted from the end if it is negative."""
    if isinstance(given, bool) or not hasattr(given, "__index__") or hasattr(given, "__len__"):
        raise ArgumentError(
            f"a tensor is indexed by integers, slices, ... and None, not by {type(given).__name__}",
            hint="t.numpy()[...] takes lists and masks",
        )
    position = integer(given)
    if not -n <= position < n:
        raise PositionError(f"index {position} is outside dimension {axis}, of {n:,}")
    return int(position) % n


def torch_tensor(tensor: Tensor, device: object) -> torch.Tensor:
    """Read all elements of a tensor into a torch tensor of its own on `device`, or the CPU."""
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
        raise ArgumentError(f"a device is a name or a torch.device, not {device!r}")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise DeviceError(f"{device!r} is not a device: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def overflows(tensor: Tensor, target: DType) -> int:
    """Count the finite elements of a tensor that are out of the range of another dtype.

    Nothing is read where none can be. Both are floating-point or both integer types.
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
