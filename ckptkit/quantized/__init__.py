"""Find and dequantize the quantized weights of a checkpoint.

The function :func:`find` returns a `Quantization`, which contains a group of tensors for each
weight. A group has a layout, or the reason why ckptkit cannot dequantize the weight. `find` reads
no quantized values. This package uses core and compute.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import AmbiguousError
from ckptkit.quantized import quantization
from ckptkit.quantized.quantization import Quantization as Quantization

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ckptkit.core.dtypes import DType
    from ckptkit.quantized.group import QuantizationMethod as QuantizationMethod
    from ckptkit.quantized.group import QuantizedWeight as QuantizedWeight


def find(ck: Checkpoint) -> Quantization:
    """Find the quantized weights of a checkpoint.

    If the entry with the weights is ambiguous, return an empty Quantization.
    """
    try:
        weights = ck.selection
    except AmbiguousError:
        return Quantization()
    if weights is None or not quantization.may_be_quantized(weights):
        return Quantization()
    from ckptkit.quantized import finding

    return finding.find(ck, weights)


def families() -> tuple[QuantizationMethod, ...]:
    """Return all quantization methods, in the order in which ckptkit tries them."""
    from ckptkit.quantized import finding

    return finding.FAMILIES


def dequantized_view(
    ck: Checkpoint,
    types: Mapping[str, DType] | None = None,
    found: Quantization | None = None,
) -> Checkpoint:
    """Replace each quantized weight by one dequantized tensor.

    Weights that ckptkit cannot dequantize are unchanged. A tensor is dequantized when its bytes are
    read. `types` maps names of quantized weights to the dtypes of their dequantized tensors. Other
    weights get the default dtype of :func:`ckptkit.dequantize`. `found` contains the weights to
    replace, by default all. The attribute ``logical`` of the new checkpoint maps the id of each new
    tensor to the tensor and its group.
    """
    found, types = find(ck) if found is None else found, types or {}
    view = found.view
    groups = tuple(group for group in found.groups if group.layout is not None)
    if not groups or view is None:
        return ck
    dtypes = {
        id(group): types.get(group.name) or quantization.default_dtype(view, group)
        for group in groups
    }
    root, made = quantization.exchanged(ck, Quantization(groups, (), view), dtypes)
    return replace(ck, root=root, logical=made)


def dequantized_views(a: Checkpoint, b: Checkpoint) -> tuple[Checkpoint, Checkpoint]:
    """Dequantize the weights of two checkpoints for a comparison.

    If a weight is quantized in only one checkpoint, the weight is dequantized to the dtype that it
    has in the other checkpoint.
    """
    if not find(a) and not find(b):
        return a, b
    ours = dequantized_view(a, quantization.float_types(b))
    return ours, dequantized_view(b, quantization.float_types(ours))


def dequantized_for_model(ck: Checkpoint, expected: Mapping[str, str]) -> Checkpoint:
    """Dequantize the weights of a checkpoint for a comparison with a model.

    `expected` maps the names of the model's tensors to dtypes. If the model has a tensor with the
    name of a weight, the weight is dequantized to the dtype of this tensor. Codes and scales that
    the model itself stores are not dequantized.
    """
    targets = quantization.TARGETS
    types = {name: BY_NAME[dtype] for name, dtype in expected.items() if dtype in targets}
    return dequantized_view(ck, types, find(ck).foreign_to(expected))
