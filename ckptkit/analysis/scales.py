"""Scales of quantized weights: how many are zero, and how many are no numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from ckptkit import quantized
from ckptkit.compute.blocks import Numbers
from ckptkit.compute.nonfinite import nonfinite, zeros
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.tensor import Tensor

_EXPONENTS = ("exponent", "ldexp")  # bytes, of which 255 is no exponent


class Scales(NamedTuple):
    """A tensor of scales; `divides`: weights are divided by it, so that a zero is no scale."""

    name: str
    total: int
    zeros: int
    nonfinite: int  # only those that are stored as bytes: the others are seen as they are
    divides: bool


def scales(ck: Checkpoint) -> Iterator[Scales]:
    """Yield the scales of the quantized weights that are read. Reads all of them."""
    found = quantized.find(ck)
    names = {id(tensor): name for name, tensor in ck.weights.items()} if found else {}
    for group in found.groups:
        for numbers in group.layout.scales if group.layout is not None else ():
            tensor = group.inputs[numbers.input]
            if numbers.dtype != "map":  # the bytes of nested scales are positions in a table
                yield _counted(names.get(id(tensor), group.name), tensor, numbers)


def _counted(name: str, tensor: Tensor, numbers: Numbers) -> Scales:
    is_bytes = tensor.dtype.name == "uint8"
    if is_bytes:
        dtype = "float8_e8m0fnu" if numbers.dtype in _EXPONENTS else numbers.dtype
        tensor = replace(tensor, dtype=BY_NAME[dtype])
    odd = sum(nonfinite(tensor)) if is_bytes else 0
    return Scales(name, tensor.numel, zeros(tensor), odd, numbers.combine == "divide")
