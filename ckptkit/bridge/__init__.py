"""The only door to torch: work on the elements of byte ranges, torch tensors, and model classes.

``operations`` computes byte ranges, ``gather`` is the reading plan of its strided views, ``tensors`` says which
operations a tensor needs and makes torch's own of it, ``models`` builds the user's classes. numpy and torch are
imported inside functions, so that a command that computes nothing pays for neither.
"""

from ckptkit.bridge.models import environment, model_from, model_shapes
from ckptkit.bridge.operations import OPERATIONS, PIECE, stream, torch_dtype
from ckptkit.bridge.tensors import (
    Difference,
    cast_record,
    compare,
    contiguous,
    rebuild,
    to_torch_storage,
)

__all__ = [
    "OPERATIONS",
    "PIECE",
    "Difference",
    "cast_record",
    "compare",
    "contiguous",
    "environment",
    "model_from",
    "model_shapes",
    "rebuild",
    "stream",
    "to_torch_storage",
    "torch_dtype",
]
