"""The dtypes of the installed torch, and its conversions between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptkit.compute.byte_pieces import Piece
from ckptkit.core.dtypes import DType
from ckptkit.core.errors import UnsupportedError

if TYPE_CHECKING:
    import torch


def as_torch(data: Piece, source: DType, target: torch.dtype) -> torch.Tensor:
    """Elements of dtype `source`, converted. Raises UnsupportedError where the installed torch
    cannot."""
    import torch

    values = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(torch_dtype(source))
    try:
        return values.to(target)
    except (RuntimeError, NotImplementedError) as error:
        raise UnsupportedError(
            f"torch {torch.__version__} cannot convert {source} to {target}"
        ) from error


def torch_dtype(dtype: DType) -> torch.dtype:
    """torch's own object for `dtype`. Raises UnsupportedError where the installed torch has
    none."""
    import torch

    found = getattr(torch, dtype.name, None)
    if not isinstance(found, torch.dtype):
        raise UnsupportedError(f"torch {torch.__version__} has no dtype {dtype}")
    return found
