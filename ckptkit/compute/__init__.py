"""The only door to torch: work on the elements of byte ranges, torch tensors, and model classes.

``operations`` computes byte ranges, ``gather`` is the reading plan of its strided views, ``floats`` the elements as
numbers, ``tensors`` says which operations a tensor needs and makes torch's own of it, ``tallies`` are statistics,
``threads`` the way to work on many tensors, ``models`` builds the user's classes. numpy and torch are imported inside
functions, and the modules here when they are used, so that a command that computes nothing pays for none of them, and
one that computes with numbers for numpy alone.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptkit.compute.mean import has_mean, mean_record, sum_record
    from ckptkit.compute.operations import OPERATIONS, PIECE, flow, stream, torch_dtype
    from ckptkit.compute.tallies import BINS, Histogram, Part, Tally, numbers, parts, tally
    from ckptkit.compute.tensors import (
        Difference,
        cast_record,
        compare,
        contiguous,
        dequantized_record,
        rebuild,
        to_torch_storage,
    )
    from ckptkit.compute.threads import ordered
    from ckptkit.loading.building import environment, model_from, model_shapes, model_ties, torch_lacks

__all__ = [
    "BINS",
    "OPERATIONS",
    "PIECE",
    "Difference",
    "Histogram",
    "Part",
    "Tally",
    "cast_record",
    "compare",
    "contiguous",
    "dequantized_record",
    "environment",
    "flow",
    "has_mean",
    "mean_record",
    "model_from",
    "model_shapes",
    "model_ties",
    "numbers",
    "ordered",
    "parts",
    "rebuild",
    "stream",
    "sum_record",
    "tally",
    "to_torch_storage",
    "torch_dtype",
    "torch_lacks",
]

_PLACES = {
    **dict.fromkeys(("environment", "model_from", "model_shapes", "model_ties", "torch_lacks"), "models"),
    **dict.fromkeys(("OPERATIONS", "PIECE", "flow", "stream", "torch_dtype"), "operations"),
    **dict.fromkeys(
        ("Difference", "cast_record", "compare", "contiguous", "dequantized_record", "rebuild", "to_torch_storage"),
        "tensors",
    ),
    **dict.fromkeys(("BINS", "Histogram", "Part", "Tally", "numbers", "parts", "tally"), "tallies"),
    **dict.fromkeys(("has_mean", "mean_record", "sum_record"), "mean"),
    "ordered": "threads",
}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
