"""FP8 with a scale for each block or tensor: DeepSeek-V3, transformers' ``fp8``, and FP4 experts.

``X.weight_scale_inv`` multiplies, in spite of its name. The product is made in float32 and rounded
once.
"""

from __future__ import annotations

from ckptkit.compute.packing import Numbers
from ckptkit.core.tensor import Tensor
from ckptkit.quantized import group as g
from ckptkit.quantized.group import Family, Group, View

NAME = "fp8-block"
DROPPED = (".activation_scale", ".input_scale", ".qscale_act", ".input_scale_ub")
_WEIGHT_OF = {".scale": ".weight", ".qscale_weight": ".weight", "_scale_inv": ""}


def recognize(view: View, mark: str) -> Group | None:
    """A weight of 8 bits (or pairs of 4) and the scale called `mark`."""
    suffix = next((each for each in _WEIGHT_OF if mark.endswith(each)), None)
    if suffix is None:
        return None
    name = mark.removesuffix(suffix) + _WEIGHT_OF[suffix]
    scale, weight = view.tensors[mark], view.get(name, *g.FLOAT8, "int8", "float4_e2m1fn_x2")
    is_byte = scale.dtype.name in ("uint8", "float8_e8m0fnu")
    if weight is None or not (g.is_scale(scale) or is_byte):
        return None
    dropped = (
        view.present(name.removesuffix(".weight"), DROPPED) if name.endswith(".weight") else ()
    )
    group = Group(NAME, "fp8", name, weight.shape, (name, mark), dropped)
    if weight.dtype.name in g.FLOAT8:
        return _fp8(group, view, weight, scale)
    return _fp4(group, weight, scale) if is_byte else None


def _fp8(group: Group, view: View, weight: Tensor, scale: Tensor) -> Group:
    dtype, shape = g.scale_dtype(scale), weight.shape
    if scale.numel == 1:
        layout = g.flat(
            shape, 8, (Numbers(1, dtype, g.whole(shape), shared=True),), table=weight.dtype.name
        )
        return g.ready(group, "fp8 tensor", layout, weight, scale)
    size = view.quantization.get("weight_block_size")
    if not (
        isinstance(size, list) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    ):
        return g.refused(
            group,
            "the size of its blocks is not known: config.json names no weight_block_size",
            g.NEEDS_CONFIG,
        )
    height, width = size
    if len(shape) < 2 or scale.shape != g.blocks_of(shape, height, width):
        return g.refused(
            group,
            f"scales of {g.shown(scale.shape)} do not fit {g.shown(shape)} in blocks of "
            f"{height}x{width}",
        )
    numbers = Numbers(1, dtype, g.grid_of(shape, height, width))
    layout = g.flat(shape, 8, (numbers,), table=weight.dtype.name)
    return g.ready(group, g.block_label("fp8", height, width), layout, weight, scale)


def _fp4(group: Group, weight: Tensor, scale: Tensor) -> Group | None:
    """Two codes in a byte, the low half first; a scale for 32 of them, as in all MX formats."""
    shape = g.doubled(weight.shape)
    if len(shape) < 2 or scale.shape != (*shape[:-1], shape[-1] // 32) or shape[-1] % 32:
        return None
    numbers = Numbers(1, g.scale_dtype(scale), g.grid_of(shape, 1, 32))
    group = Group(group.family, group.label, group.name, shape, group.parts, group.dropped)
    return g.ready(group, "fp4 1x32", g.flat(shape, 4, (numbers,), table="e2m1"), weight, scale)


FAMILY = Family(
    NAME,
    "FP8 blocks of DeepSeek-V3, Qwen3, GLM, Kimi",
    recognize,
    marks=("weight_scale_inv", "scale", "qscale_weight"),
    endings=("_scale_inv",),
    oracle="compressed-tensors 0.20.0, transformers 5.23.0",
    written="fp8-block",
)
