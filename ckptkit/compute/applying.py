"""Apply functions of the user to tensors, one at a time while they are written."""

from __future__ import annotations

from math import prod

from ckptkit.compute.arrays import torch_tensor
from ckptkit.compute.tensors import contiguous
from ckptkit.compute.torch_dtypes import torch_dtype
from ckptkit.compute.user_function import Application, Function, called, dtype_of
from ckptkit.core.bytesource import Pending
from ckptkit.core.dtypes import DType
from ckptkit.core.plan import ONE_BY_ONE
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride


def applied(tensor: Tensor, function: Function) -> Tensor:
    """Return the tensor that `function` makes of another, computed when its bytes are read.

    The function is called on a tensor of the meta device for dtype and shape, and on the elements
    where it cannot do with that.
    """
    dtype, shape = _outcome(tensor, function)
    job = Application(function, tensor.dtype, tensor.shape, dtype, shape)
    storage = None
    if tensor.storage is not None:
        length = dtype.nbytes(prod(shape))
        record = Pending(ONE_BY_ONE, (contiguous(tensor),), (job,), length)
        storage = Storage(record, tensor.storage.device)
    grad = tensor.requires_grad and dtype.kind in ("float", "complex")
    kind = "parameter" if tensor.kind == "parameter" else "tensor"
    return Tensor(storage, dtype, shape, contiguous_stride(shape), 0, grad, kind)


def _outcome(tensor: Tensor, function: Function) -> tuple[DType, Shape]:
    """Return dtype and shape of what the function makes of a tensor."""
    import torch

    like = torch.empty(tensor.shape, dtype=torch_dtype(tensor.dtype), device="meta")
    try:
        made = called(function, like)
    except Exception:  # whatever it is, it may not happen with elements
        if tensor.storage is None:
            raise
        made = called(function, torch_tensor(tensor, None))
    return dtype_of(made), tuple(made.shape)
