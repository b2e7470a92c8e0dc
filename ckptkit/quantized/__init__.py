"""Quantized checkpoints: find the tensors that form each weight, and dequantize the weight.

In: a Checkpoint. Out: a `Quantization`: groups of tensors, each with a layout or the reason why it
cannot be dequantized. Each family is one module. No module here reads codes. Uses core and compute.
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
    "dequantized_for_model",
    "dequantized_view",
    "dequantized_views",
    "families",
    "find",
]


def find(ck: Checkpoint) -> Quantization:
    """Find the quantized weights; no weights if the entry with the weights is ambiguous."""
    try:
        weights = ck.selection
    except AmbiguousError:
        return Quantization()
    if weights is None or not quantization.may_be_quantized(weights):
        return Quantization()
    from ckptkit.quantized import finding

    return finding.find(ck, weights)


def families() -> tuple[QuantizationMethod, ...]:
    """Return all families, in the order in which they are tried."""
    from ckptkit.quantized import finding

    return finding.families()


def dequantized_view(ck: Checkpoint, types: Mapping[str, DType] | None = None) -> Checkpoint:
    """Return the checkpoint with one lazily dequantized tensor for each readable weight."""
    found = find(ck)
    if not found:
        return ck
    return quantization.dequantized_view(ck, found, types or {})


def dequantized_views(a: Checkpoint, b: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """Return both views. A quantized weight gets its dtype in the other checkpoint."""
    if not find(a) and not find(b):
        return a, b
    ours = dequantized_view(a, quantization.float_types(b))
    return ours, dequantized_view(b, quantization.float_types(ours))


def dequantized_for_model(ck: Checkpoint, expected: Mapping[str, str]) -> Checkpoint:
    """Return the view to compare with a model: one tensor for each quantized weight.

    `expected` maps names of the model to dtypes. A weight with such a name gets its dtype. If the
    model itself has codes and scales, these tensors are not dequantized.
    """
    found = find(ck)
    if not found:
        return ck
    targets = quantization.TARGETS
    types = {name: BY_NAME[dtype] for name, dtype in expected.items() if dtype in targets}
    return quantization.dequantized_view(ck, found.foreign_to(expected), types)
