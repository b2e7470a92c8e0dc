"""Quantized checkpoints: which tensors are one weight, and how it follows from them.

In: a Checkpoint. Out: a `Quantization`: groups of tensors, each with a layout or the reason why it
is not read. A family is one module here; it never looks at codes. Uses core and compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import AmbiguousError
from ckptkit.quantized import quantization
from ckptkit.quantized.quantization import Quantization

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptkit.core.dtypes import DType
    from ckptkit.quantized.group import QuantizationMethod as QuantizationMethod
    from ckptkit.quantized.group import QuantizedWeight as QuantizedWeight

__all__ = [
    "Quantization",
    "QuantizationMethod",
    "QuantizedWeight",
    "dequantized_view",
    "families",
    "find",
    "look_through_both",
    "look_through_for",
]


def find(ck: Checkpoint) -> Quantization:
    """Find the quantized groups of the weights; none if it is unclear which mapping the weights
    are.
    """
    try:
        weights = ck.selection
    except AmbiguousError:
        return Quantization()
    if weights is None or not quantization.concern(weights):
        return Quantization()
    from ckptkit.quantized import finding

    return finding.find(ck, weights)


def families() -> tuple[QuantizationMethod, ...]:
    """All families, in the order in which they are asked."""
    from ckptkit.quantized import finding

    return finding.families()


def dequantized_view(ck: Checkpoint, types: Mapping[str, DType] | None = None) -> Checkpoint:
    """The checkpoint with one tensor for each quantized weight that is read."""
    found = find(ck)
    if not found:
        return ck
    return quantization.dequantized_view(ck, found, types or {})


def look_through_both(a: Checkpoint, b: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """Both, with quantized weights in the dtype that the other has under their names."""
    if not find(a) and not find(b):
        return a, b
    ours = dequantized_view(a, quantization.float_types(b))
    return ours, dequantized_view(b, quantization.float_types(ours))


def look_through_for(ck: Checkpoint, expected: Mapping[str, str]) -> Checkpoint:
    """The checkpoint as it compares with a model: one tensor for each quantized weight.

    `expected` maps names of the model to dtypes; weights of these names get them. A model that has
    the codes and scales themselves sees them as they are stored.
    """
    found = find(ck)
    if not found:
        return ck
    targets = quantization.TARGETS
    types = {name: BY_NAME[dtype] for name, dtype in expected.items() if dtype in targets}
    return quantization.dequantized_view(ck, found.foreign_to(expected), types)
