"""The only door to torch: work on the elements of byte ranges, torch tensors, and model classes.

``operations`` computes byte ranges, ``gather`` is the reading plan of its strided views, ``tensors`` says which
operations a tensor needs and makes torch's own of it, ``models`` builds the user's classes. numpy and torch are
imported inside functions, and the modules here when they are used, so that a command that computes nothing pays for
none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptkit.bridge.models import environment, model_from, model_shapes
    from ckptkit.bridge.operations import OPERATIONS, PIECE, stream, torch_dtype
    from ckptkit.bridge.tensors import (
        Difference,
        cast_record,
        compare,
        contiguous,
        dequantized_record,
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
    "dequantized_record",
    "environment",
    "model_from",
    "model_shapes",
    "rebuild",
    "stream",
    "to_torch_storage",
    "torch_dtype",
]

_PLACES = {
    **dict.fromkeys(("environment", "model_from", "model_shapes"), "models"),
    **dict.fromkeys(("OPERATIONS", "PIECE", "stream", "torch_dtype"), "operations"),
    **dict.fromkeys(
        ("Difference", "cast_record", "compare", "contiguous", "dequantized_record", "rebuild", "to_torch_storage"),
        "tensors",
    ),
}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
