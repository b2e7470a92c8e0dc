"""Recognize weights of compressed-tensors: FP8, int8, packed integers, NVFP4 and MX formats.

The product of a code and a scale has the dtype of the scale. In NVFP4 and MX formats, the product
has the dtype bfloat16. ``config_groups`` in the configuration lists strategies and group sizes for
classes of layers. A checkpoint does not contain the classes of its layers, so ckptkit selects the
strategy by the shape of the scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptkit.compute.packing import Packing, ZeroPoint
from ckptkit.core.tensor import Tensor
from ckptkit.quantized import group as g
from ckptkit.quantized.group import QuantizationMethod, QuantizedWeight, TensorView

DROPPED = (
    ".input_scale", ".output_scale", ".input_zero_point", ".output_zero_point",
    ".input_global_scale", ".output_global_scale", ".input_scale_ub",
)  # fmt: skip
# The first version of compressed-tensors in which a code of 3, 5, 6 or 7 bits can extend over two
# int32 elements.
_DENSE_SINCE = (0, 18)
_NO_STRATEGY = " in any strategy of config.json"
_ROTATED = "it is rotated (transform_config), so the dequantized weight would give wrong results"
_NVFP4 = g.NVFP4._replace(second="divide", product_dtype="bfloat16")
_MX = g.MX._replace(product_dtype="bfloat16")  # compute products in bfloat16 for any target dtype


def schemes(view: TensorView) -> list[dict[str, Any]]:
    """Return the quantization scheme of each entry of ``config_groups`` in the configuration."""
    groups = view.quantization.get("config_groups")
    groups = groups.values() if isinstance(groups, dict) else ()
    found = [each.get("weights") for each in groups if isinstance(each, dict)]
    return [each for each in found if isinstance(each, dict)]


def _sizes(view: TensorView, kind: str) -> Iterator[tuple[int, int]]:
    """Yield (height, width) of each block size in the configuration."""
    for scheme in schemes(view):
        size = g.block_size(scheme.get("block_structure"))
        size = size or g.block_size([1, scheme.get("group_size")])
        if size is not None and scheme.get("type", kind) == kind:
            yield size


def recognize_dense(view: TensorView, mark: str) -> QuantizedWeight | None:
    """Recognize a weight with FP8 or int8 elements and a ``weight_scale``."""
    name = mark.removesuffix("_scale")
    scale, weight = view.tensors[mark], view.get(name, *g.FLOAT8, "int8")
    if weight is None or view.method != "compressed-tensors":
        return None
    zero = view.get(f"{name}_zero_point")
    parts = (name, mark, *view.present(name, ("_zero_point",)))
    dropped = view.present(name.removesuffix(".weight"), DROPPED)
    kind, word = ("int", "int8") if weight.dtype.name == "int8" else ("float", "fp8")
    group = QuantizedWeight(f"ct-{kind}", f"ct {kind}8", name, weight.shape, parts, dropped)
    if view.quantization.get("transform_config"):
        return group.refused(_ROTATED)
    if scale.dtype.name in g.EXPONENTS:
        return group.in_blocks(_MX, weight, scale)
    grid, label = g.grid_for(weight.shape, scale.shape, _sizes(view, kind)) or (None, "")
    if grid is None or not g.is_scale(scale):
        return group.unfit(_NO_STRATEGY, scales=scale)
    inputs, more = [weight, scale], dict[str, Any](product_dtype=scale.dtype.name)
    is_byte = zero is not None and zero.dtype.name in ("int8", "uint8")
    if zero is not None and (is_byte or kind == "int"):
        if zero.shape != scale.shape or not is_byte:
            return group.unfit(scales=scale, zero_points=zero)
        inputs.append(zero)
        more["zero"] = g.numbers(2, zero, grid, dtype=zero.dtype.name)
    return group.flat(f"{word} {label}", grid, *inputs, **more)


def recognize_packed(view: TensorView, mark: str) -> QuantizedWeight | None:
    """Recognize a weight with packed codes: ``weight_packed``."""
    name = mark.removesuffix("_packed")
    codes, scale = view.tensors[mark], view.get(f"{name}_scale")
    names = ("_scale", "_shape", "_zero_point", "_global_scale", "_g_idx")
    parts = (mark, *view.present(name, names))
    dropped = view.present(name.removesuffix(".weight"), DROPPED)
    group = QuantizedWeight("ct-pack", "ct packed", name, codes.shape, parts, dropped)
    if codes.dtype.name not in ("int32", "uint8"):
        return None
    if scale is None:
        return group.refused(f"{name}_scale is missing", g.ELSEWHERE)
    if view.quantization.get("transform_config"):
        return group.refused(_ROTATED)
    if codes.dtype.name == "int32":
        return _integers(group, view, codes, scale)
    if scale.dtype.name == "float8_e4m3fn":
        group.family = "nvfp4"
        return group.in_blocks(_NVFP4, codes, scale, view.get(f"{name}_global_scale", "float32"))
    # MXFP4 and MXFP6 have one exponent for each block of 32 codes.
    blocks = scale.shape[-1] if scale.shape else 0
    last = codes.shape[-1] if codes.shape else 0
    bits = last * 8 // (32 * blocks) if blocks else 0
    if scale.dtype.name != "uint8" or bits not in (4, 6) or last * 8 != bits * 32 * blocks:
        return group.unfit(codes=codes, scales=scale)
    group.family, group.shape = f"mxfp{bits}", (*codes.shape[:-1], 32 * blocks)
    if bits == 4:
        return group.in_blocks(_MX, codes, scale)
    packing = Packing("rows", 6, stride=last)
    return group.in_blocks(_MX._replace(table="e2m3"), codes, scale, packing=packing)


def _integers(
    group: QuantizedWeight, view: TensorView, codes: Tensor, scale: Tensor
) -> QuantizedWeight:
    """Set the layout of packed integers.

    To dequantize a code, ckptkit subtracts half of the range of codes (8 for int4).
    """
    name = group.name
    shape, zero = view.integers(f"{name}_shape"), view.get(f"{name}_zero_point")
    if len(shape) != 2 or len(codes.shape) != 2 or min(shape) < 0 or shape[0] != codes.shape[0]:
        return group.refused(f"{name}_shape is missing or does not fit the codes")
    group.shape = shape
    if f"{name}_g_idx" in view.tensors:
        return group.refused(
            "ckptkit does not support its reordered columns (weight_g_idx)",
            "compressed-tensors 0.17 reads it",
        )
    packing = _packing(view, shape[1], codes.shape[1])
    if isinstance(packing, str):
        return group.refused(packing, g.NEEDS_CONFIG)
    grid, label = g.grid_for(shape, scale.shape, _sizes(view, "int")) or (None, "")
    if grid is None or not g.is_scale(scale):
        return group.unfit(_NO_STRATEGY, scales=scale)
    bits, inputs, point = packing.bits, [codes, scale], None
    half = 1 << (bits - 1)
    if zero is not None:
        stored = (-(-shape[0] * bits // 32), grid.columns if grid.height == 1 else 0)
        if packing.kind == "words" or zero.dtype.name != "int32" or zero.shape != stored:
            return group.unfit(codes=codes, scales=scale, zero_points=zero)
        inputs.append(zero)
        point = ZeroPoint(2, bits, grid, "down", offset=half)
    return group.with_layout(
        f"int{bits} {label}", packing, grid, *inputs, offset=half, zero=point,
        product_dtype=scale.dtype.name,
    )  # fmt: skip


def _packing(view: TensorView, columns: int, words: int) -> Packing | str:
    """Return how codes are packed in int32 elements, or the reason why the packing is unknown.

    `words` is the number of int32 elements in a row. The packing follows from `words` and the
    configuration.
    """
    known = {each.get("num_bits") for each in schemes(view)}
    found = set()
    for bits in sorted(each for each in known if type(each) is int and 1 <= each <= 8):
        if -(-columns * bits // 32) == words:
            found.add(("rows", bits))
        if 32 % bits and -(-columns // (32 // bits)) == words:
            found.add(("words", bits))
    if len(found) > 1 and len({bits for _, bits in found}) == 1:
        version = str(view.quantization.get("version") or "").split(".")[:2]
        if len(version) < 2 or not all(each.isdigit() for each in version):
            return (
                "its packing depends on the version of compressed-tensors, but config.json does "
                "not contain the version"
            )
        is_dense = tuple(map(int, version)) >= _DENSE_SINCE
        found = {(form, bits) for form, bits in found if (form == "rows") == is_dense}
    if len(found) != 1:
        widths = sorted(map(str, known)) or "none"
        return f"the number of bits per code is unknown: config.json lists {widths}"
    ((kind, bits),) = found
    return Packing(kind, bits, stride=4 * words)


_ORACLE = "compressed-tensors 0.20.0"
COMPRESSED_TENSORS = (
    QuantizationMethod(
        "ct-float", "compressed-tensors FP8, int8, MXFP8", recognize_dense,
        marks=("weight_scale",), oracle=_ORACLE,
    ),
    QuantizationMethod(
        "ct-pack", "compressed-tensors packed integers, NVFP4, MXFP4, MXFP6", recognize_packed,
        marks=("weight_packed",), oracle=_ORACLE, written="mxfp4",
    ),
)  # fmt: skip
