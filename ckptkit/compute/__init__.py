"""Arithmetic on the elements of byte ranges, and torch tensors made of them.

In: a Derived (an operation over byte ranges). Out: its bytes, in bounded pieces; statistics; torch
storages. Uses core. numpy and torch are imported inside functions, so that commands that only copy
pay for neither.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptkit.compute.arrays import overflows
    from ckptkit.compute.expanded import Allowance
    from ckptkit.compute.mapped import MappedFiles
    from ckptkit.compute.mean import has_mean, mean_record, sum_record
    from ckptkit.compute.operations import OPERATIONS, PIECE, flow, stream
    from ckptkit.compute.tallies import BINS, ElementRange, Histogram, Tally, numbers, parts, tally
    from ckptkit.compute.tensors import (
        Difference,
        cast_record,
        compare,
        contiguous,
        dequantized_record,
        distance,
    )
    from ckptkit.compute.threads import ordered
    from ckptkit.compute.torch_dtypes import torch_dtype
    from ckptkit.compute.torch_memory import fill, rebuild, to_torch_storage
    from ckptkit.compute.user_function import dtype_of

__all__ = [
    "BINS",
    "OPERATIONS",
    "PIECE",
    "Allowance",
    "Difference",
    "ElementRange",
    "Histogram",
    "MappedFiles",
    "Tally",
    "cast_record",
    "compare",
    "contiguous",
    "dequantized_record",
    "distance",
    "dtype_of",
    "fill",
    "flow",
    "has_mean",
    "mean_record",
    "numbers",
    "ordered",
    "overflows",
    "parts",
    "rebuild",
    "stream",
    "sum_record",
    "tally",
    "to_torch_storage",
    "torch_dtype",
]

_PLACES = {
    **dict.fromkeys(("OPERATIONS", "PIECE", "flow", "stream"), "operations"),
    **dict.fromkeys(
        (
            "Difference",
            "cast_record",
            "compare",
            "distance",
            "contiguous",
            "dequantized_record",
        ),
        "tensors",
    ),
    **dict.fromkeys(
        ("BINS", "Histogram", "ElementRange", "Tally", "numbers", "parts", "tally"), "tallies"
    ),
    **dict.fromkeys(("fill", "rebuild", "to_torch_storage"), "torch_memory"),
    **dict.fromkeys(("has_mean", "mean_record", "sum_record"), "mean"),
    "ordered": "threads",
    "Allowance": "expanded",
    "MappedFiles": "mapped",
    "dtype_of": "user_function",
    "overflows": "arrays",
    "torch_dtype": "torch_dtypes",
}


def __getattr__(name: str) -> object:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = found  # for the next time, which does not ask here
    return found
