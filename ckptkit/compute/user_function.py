"""Call a function of the user, as an operation on the elements of one tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import ArgumentError
from ckptkit.core.tensor import Shape
from ckptkit.core.text import shape as shape_text

if TYPE_CHECKING:
    import torch

Function = Callable[[Any], Any]
_NUMBERS = ("float", "int", "bool", "complex")


@dataclass(frozen=True)
class Application:
    """A function, the tensor that it takes (over bytes without gaps), and what it gives."""

    function: Function
    dtype: DType
    shape: Shape
    made_dtype: DType
    made_shape: Shape


def result(job: Application, data: bytearray) -> memoryview:
    """Return the bytes of what the function makes of a tensor, given its bytes."""
    import torch

    dtype = getattr(torch, job.dtype.name)
    given = torch.empty(job.shape, dtype=dtype)
    if data:
        given = torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(job.shape)
    made = called(job.function, given)
    found = (dtype_of(made), tuple(made.shape))
    if found != (job.made_dtype, job.made_shape):
        raise ArgumentError(
            f"the function gives {found[0]} {shape_text(found[1])} now, and gave "
            f"{job.made_dtype} {shape_text(job.made_shape)} before"
        )
    plain = made.cpu().resolve_conj().resolve_neg().contiguous()
    view: memoryview = plain.reshape(-1).view(torch.uint8).numpy().data
    return view


def called(function: Function, given: torch.Tensor) -> torch.Tensor:
    """Call a function with a tensor. Raises ArgumentError unless it gives a plain one."""
    import numpy as np
    import torch

    with torch.no_grad():
        made = function(given)
    if isinstance(made, (np.ndarray, np.generic)):
        made = torch.from_numpy(np.ascontiguousarray(made)).reshape(made.shape)
    if not isinstance(made, torch.Tensor):
        raise ArgumentError(
            f"the function gives a {type(made).__name__}, not a torch tensor or numpy array"
        )
    if made.layout is not torch.strided or dtype_of(made).kind not in _NUMBERS:
        raise ArgumentError(f"the function gives a {made.layout} tensor of {made.dtype}")
    return made.detach()


def dtype_of(tensor: torch.Tensor) -> DType:
    """Return the dtype of a torch tensor."""
    return BY_NAME[str(tensor.dtype).removeprefix("torch.")]
