"""compressed-tensors: floats and integers with scales, packed integers, NVFP4 and the MX formats.

Codes are multiplied in the dtype of their scales, those of NVFP4 and MX in bfloat16. Strategies and
group sizes stand in the ``config_groups`` of the configuration; which fit is decided by shapes, for
layers are named there by class.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptkit.compute.packing import Blocks, Numbers, Packing, ScaleGrid, ZeroPoint
from ckptkit.core.tensor import Shape, Tensor
from ckptkit.quantized import group as g
from ckptkit.quantized.group import QuantizationMethod, QuantizedWeight, TensorView

DROPPED = (
    ".input_scale", ".output_scale", ".input_zero_point", ".output_zero_point",
    ".input_global_scale", ".output_global_scale", ".input_scale_ub",
)  # fmt: skip
_DENSE_SINCE = (0, 18)  # before, codes of 3, 5, 6 and 7 bits did not go over the end of a word


def is_said(view: TensorView) -> bool:
    """Return whether the configuration is one of compressed-tensors."""
    return view.method == "compressed-tensors"


def schemes(view: TensorView) -> list[dict[str, Any]]:
    """Return the quantization schemes of the groups in the configuration."""
    groups = view.quantization.get("config_groups")
    if not isinstance(groups, dict):
        return []
    found = [each.get("weights") for each in groups.values() if isinstance(each, dict)]
    return [each for each in found if isinstance(each, dict)]


def transformed(view: TensorView) -> str | None:
    """Why the dequantized weight would not be that of the model."""
    if view.quantization.get("transform_config"):
        return "its weights are rotated (transform_config): the weight alone is not the model's"
    return None


def grid_for(
    view: TensorView, shape: Shape, scale: Shape, kind: str
) -> tuple[ScaleGrid, str] | None:
    """The grid of a scale and its name; None if no scheme of the configuration gives it."""
    if not scale or all(n == 1 for n in scale):
        return g.whole(shape), "tensor"
    if scale in ((*shape[:-1], 1), shape[:-1]):
        return g.grid_of(shape, 1, shape[-1]), "channel"
    for height, width in _sizes(view, kind):
        if scale == g.blocks_of(shape, height, width):
            return g.grid_of(
                shape, height, width
            ), f"{height}x{width}" if height > 1 else f"g{width}"
    return None


def _sizes(view: TensorView, kind: str) -> Iterator[tuple[int, int]]:
    """Height and width of the blocks that the configuration names."""
    for scheme in schemes(view):
        block, size = scheme.get("block_structure"), scheme.get("group_size")
        if scheme.get("type", kind) != kind:
            continue
        if (
            isinstance(block, list)
            and len(block) == 2
            and all(type(n) is int and n > 0 for n in block)
        ):
            yield block[0], block[1]
        elif type(size) is int and size > 0:
            yield 1, size


def recognize_dense(view: TensorView, mark: str) -> QuantizedWeight | None:
    """Codes that are elements of their own: ``weight`` of FP8 or int8 beside ``weight_scale``."""
    stem = mark.removesuffix("_scale")
    scale, weight = view.tensors[mark], view.get(stem, *g.FLOAT8, "int8")
    if weight is None or not is_said(view):
        return None
    zero = view.get(f"{stem}_zero_point")
    parts = (stem, mark, *((f"{stem}_zero_point",) if zero is not None else ()))
    dropped = view.present(stem.removesuffix(".weight"), DROPPED)
    kind = "int" if weight.dtype.name == "int8" else "float"
    group = QuantizedWeight(f"ct-{kind}", f"ct {kind}8", stem, weight.shape, parts, dropped)
    if (problem := transformed(view)) is not None:
        return g.refused(group, problem)
    if scale.dtype.name in ("uint8", "float8_e8m0fnu"):
        return _mx(group, weight, scale, weight.shape, Packing("flat", 8), weight.dtype.name)
    found = grid_for(view, weight.shape, scale.shape, kind)
    if found is None or not g.is_scale(scale):
        return g.refused(
            group, f"scales of {g.shown(scale.shape)} fit no strategy of its configuration"
        )
    grid, label = found
    table = weight.dtype.name if kind == "float" else None
    numbers = Numbers(1, scale.dtype.name, grid)
    if zero is None or (kind == "float" and zero.dtype.name not in ("int8", "uint8")):
        layout = g.flat(
            weight.shape,
            8,
            (numbers,),
            table=table,
            signed=kind == "int",
            product_dtype=scale.dtype.name,
        )
        return g.ready(group, f"{_word(kind)} {label}", layout, weight, scale)
    if zero.shape != scale.shape or zero.dtype.name not in ("int8", "uint8"):
        return g.refused(group, f"zero points of {zero.dtype} {g.shown(zero.shape)} do not fit")
    layout = g.flat(
        weight.shape, 8, (numbers,), table=table, signed=kind == "int",
        zero=Numbers(2, zero.dtype.name, grid), product_dtype=scale.dtype.name,
    )  # fmt: skip
    return g.ready(group, f"{_word(kind)} {label}", layout, weight, scale, zero)


def _word(kind: str) -> str:
    return "int8" if kind == "int" else "fp8"


def _mx(
    group: QuantizedWeight, codes: Tensor, scale: Tensor, shape: Shape, packing: Packing, table: str
) -> QuantizedWeight:
    """Blocks of 32 with an exponent each; the product is a bfloat16 whatever is asked for."""
    if scale.shape != g.blocks_of(shape, 1, 32):
        return g.refused(
            group,
            f"exponents of {g.shown(scale.shape)} do not fit {g.shown(shape)} in blocks of 32",
        )
    batches, rows, columns = g.matrix(shape)
    numbers = Numbers(1, g.scale_dtype(scale), g.grid_of(shape, 1, 32))
    layout = Blocks(
        batches, rows, columns, packing, (numbers,), table=table, product_dtype="bfloat16"
    )
    return g.ready(group, f"mxfp{packing.bits} 1x32", layout, codes, scale)


def recognize_packed(view: TensorView, mark: str) -> QuantizedWeight | None:
    """Codes of a few bits: ``weight_packed``."""
    stem = mark.removesuffix("_packed")
    codes, scale = view.tensors[mark], view.get(f"{stem}_scale")
    names = ("_scale", "_shape", "_zero_point", "_global_scale", "_g_idx")
    parts = (mark, *view.present(stem, names))
    dropped = view.present(stem.removesuffix(".weight"), DROPPED)
    group = QuantizedWeight("ct-pack", "ct packed", stem, codes.shape, parts, dropped)
    if codes.dtype.name not in ("int32", "uint8"):
        return None
    if scale is None:
        return g.refused(
            group,
            f"{stem}_scale is missing",
            "it may be in another shard: name the folder or the index",
        )
    if (problem := transformed(view)) is not None:
        return g.refused(group, problem)
    if codes.dtype.name == "uint8":
        return _floats(group, view, codes, scale)
    return _integers(group, view, codes, scale)


def _floats(
    group: QuantizedWeight, view: TensorView, codes: Tensor, scale: Tensor
) -> QuantizedWeight:
    """FP4 with scales of FP8 and one for all, or FP4 and FP6 with exponents."""
    blocks = scale.shape[-1] if scale.shape else 0
    last = codes.shape[-1] if codes.shape else 0
    if scale.dtype.name == "float8_e4m3fn":
        shape = g.doubled(codes.shape)
        level = view.get(f"{group.name}_global_scale", "float32")
        second = None if level is None else g.single(2, level, shape, combine="divide")
        group = QuantizedWeight("nvfp4", "nvfp4", group.name, shape, group.parts, group.dropped)
        if level is None or second is None or scale.shape != g.blocks_of(shape, 1, 16):
            return g.refused(
                group,
                f"{group.name}_global_scale is missing, or its scales do not fit blocks of 16",
            )
        scales = (Numbers(1, "float8_e4m3fn", g.grid_of(shape, 1, 16)), second)
        layout = g.flat(shape, 4, scales, table="e2m1", product_dtype="bfloat16")
        return g.ready(group, "nvfp4 1x16", layout, codes, scale, level)
    bits = last * 8 // (32 * blocks) if blocks else 0
    shape = (*codes.shape[:-1], 32 * blocks)
    if scale.dtype.name != "uint8" or bits not in (4, 6) or last * 8 != bits * 32 * blocks:
        return g.refused(
            group,
            f"codes of {g.shown(codes.shape)} and scales of {g.shown(scale.shape)} do not fit",
        )
    group = QuantizedWeight(
        f"mxfp{bits}", f"mxfp{bits}", group.name, shape, group.parts, group.dropped
    )
    packing = Packing("flat", 4) if bits == 4 else Packing("rows", 6, stride=last)
    return _mx(group, codes, scale, shape, packing, "e2m1" if bits == 4 else "e2m3")


def _integers(
    group: QuantizedWeight, view: TensorView, codes: Tensor, scale: Tensor
) -> QuantizedWeight:
    """Words of integers, each less by half of its range."""
    shape = view.integers(f"{group.name}_shape")
    if len(shape) != 2 or len(codes.shape) != 2 or min(shape) < 0 or shape[0] != codes.shape[0]:
        return g.refused(group, f"{group.name}_shape is missing or does not fit")
    group = QuantizedWeight("ct-pack", "ct packed", group.name, shape, group.parts, group.dropped)
    if f"{group.name}_g_idx" in view.tensors:
        return g.refused(
            group,
            "its columns are in an order of their own (weight_g_idx)",
            "compressed-tensors 0.17 reads it",
        )
    packing = _packing(view, shape[1], codes.shape[1])
    if isinstance(packing, str):
        return g.refused(group, packing, g.NEEDS_CONFIG)
    found = grid_for(view, shape, scale.shape, "int")
    if found is None or not g.is_scale(scale):
        return g.refused(
            group, f"scales of {g.shown(scale.shape)} fit no strategy of its configuration"
        )
    return _with_zeros(group, view, codes, scale, packing, found)


def _with_zeros(
    group: QuantizedWeight,
    view: TensorView,
    codes: Tensor,
    scale: Tensor,
    packing: Packing,
    found: tuple[ScaleGrid, str],
) -> QuantizedWeight:
    (grid, label), bits = found, packing.bits
    rows, columns = group.shape
    zero = view.get(f"{group.name}_zero_point")
    inputs: tuple[Tensor, ...] = (codes, scale)
    point = None
    half = 1 << (bits - 1)
    if zero is not None:
        groups = grid.columns if grid.height == 1 else 0
        if (
            packing.kind == "words"
            or zero.dtype.name != "int32"
            or zero.shape != (-(-rows * bits // 32), groups)
        ):
            return g.refused(group, f"zero points of {zero.dtype} {g.shown(zero.shape)} do not fit")
        inputs, point = (codes, scale, zero), ZeroPoint(2, bits, grid, "down", offset=half)
    layout = Blocks(
        1, rows, columns, packing, (Numbers(1, scale.dtype.name, grid),), offset=half, zero=point,
        product_dtype=scale.dtype.name,
    )  # fmt: skip
    return g.ready(group, f"int{bits} {label}", layout, *inputs)


def _packing(view: TensorView, columns: int, words: int) -> Packing | str:
    """Return the layout of codes in words if the configuration and their number leave one, else the
    reason.
    """
    known = {each.get("num_bits") for each in schemes(view)}
    found = set()
    for bits in sorted(each for each in known if type(each) is int and 1 <= each <= 8):
        if -(-columns * bits // 32) == words:
            found.add(("rows", bits))
        if 32 % bits and -(-columns // (32 // bits)) == words:
            found.add(("words", bits))
    if len(found) > 1 and len({bits for _, bits in found}) == 1:
        version = _version(view)
        if version is None:
            return (
                "its codes may or may not go over the end of a word, which depends on the version: "
                "config.json names none"
            )
        is_dense = version >= _DENSE_SINCE
        found = {(form, bits) for form, bits in found if (form == "rows") == is_dense}
    if len(found) != 1:
        widths = sorted(map(str, known)) or "none"
        return f"the bits of its codes are not known: config.json names {widths}"
    ((kind, bits),) = found
    return Packing(kind, bits, stride=4 * words)


def _version(view: TensorView) -> tuple[int, ...] | None:
    parts = str(view.quantization.get("version") or "").split(".")[:2]
    return (
        tuple(map(int, parts))
        if len(parts) == 2 and all(each.isdigit() for each in parts)
        else None
    )


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
