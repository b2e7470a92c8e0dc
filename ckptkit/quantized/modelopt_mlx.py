"""Recognize weights of NVIDIA ModelOpt, FBGEMM and MLX."""

from __future__ import annotations

from typing import Any

from ckptkit.compute.packing import Packing, ScaleGrid
from ckptkit.core.tensor import Shape, Tensor
from ckptkit.quantized import group as g
from ckptkit.quantized.group import QuantizationMethod, QuantizedWeight, TensorView

# NVIDIA ModelOpt writes FP8, NVFP4 and MXFP8. FBGEMM writes FP8.
#
# ModelOpt and FBGEMM use the same tensor names. ModelOpt rounds the scale of FP8 weights to the
# target dtype before the multiplication. All other products are computed in float32.


DROPPED = (".input_scale", ".output_scale", ".input_scale_ub")
_NEEDS_CONFIG = "put the config.json or hf_quant_config.json of the model beside the file"
_NVFP4 = g.NVFP4._replace(table="e2m1+0")


def recognize_modelopt(view: TensorView, mark: str) -> QuantizedWeight | None:
    """Recognize a weight by `mark`, the name of its scale."""
    name = mark.removesuffix("_scale")
    scale, weight = view.tensors[mark], view.get(name, *g.FLOAT8, "uint8")
    if weight is None or f"{name}_scale_inv" in view.tensors:
        return None
    stem, shape, method = name.removesuffix(".weight"), weight.shape, view.method
    second = view.get(f"{name}_scale_2", "float32")
    parts = (name, mark, *((f"{name}_scale_2",) if second is not None else ()))
    dropped = view.present(stem, DROPPED)
    group = QuantizedWeight("modelopt", "fp8", name, shape, parts, dropped)
    extra = view.present(stem, (".pre_quant_scale", ".svdquant_lora_a", ".svdquant_lora_b"))
    if extra:
        return group.refused(f"the layer also computes with {extra[0]}, {g.NOT_ALONE}")
    if weight.dtype.name == "uint8":
        if second is None or scale.dtype.name != "float8_e4m3fn":
            return None
        if method not in ("modelopt", "modelopt_fp4"):
            group.label, group.shape = "nvfp4", g.doubled(shape)
            return group.refused("the library that packed its codes is unknown", _NEEDS_CONFIG)
        return group.in_blocks(_NVFP4, weight, scale, second)
    if method == "fbgemm_fp8":
        return _fbgemm(group, weight, scale)
    is_exponent = scale.dtype.name in g.EXPONENTS
    if not is_exponent and not g.is_scale(scale):
        return None
    if method != "modelopt":
        what = "the library that quantized the weight, and the dtype of its products, are unknown"
        return group.refused(what, _NEEDS_CONFIG)
    if is_exponent:
        return group.in_blocks(g.MX, weight, scale)
    grid, label = _fp8_grid(view, shape, scale.shape) or (None, "")
    if grid is None:
        return group.unfit(" in any known layout of ModelOpt", scales=scale)
    return group.flat(f"fp8 {label}", grid, weight, scale, **g.IN_TARGET)


def _fp8_grid(view: TensorView, shape: Shape, scale: Shape) -> tuple[ScaleGrid, str] | None:
    """Return the grid of the scales, and the name of the grid.

    Return None if the shapes do not match.

    The shape of the scales may contain additional dimensions of size 1.
    """
    short = tuple(n for n in scale if n != 1)
    if not short or (len(shape) == 3 and short == shape[:1] and shape[0] != shape[1]):
        return g.single_block(shape), "tensor"  # one scale, or one for each expert
    if len(shape) != 2:
        return None
    if short == shape[:1]:
        return g.grid_of(shape, 1, shape[-1]), "channel"
    for key in ("group_size", "weight_block_size"):
        block = view.quantization.get(key)
        size = g.block_size([block, block] if type(block) is int else block)
        if size and short == tuple(n for n in g.blocks_of(shape, *size) if n != 1):
            return g.grid_of(shape, *size), f"{size[0]}x{size[1]}"
    return None


def _fbgemm(group: QuantizedWeight, weight: Tensor, scale: Tensor) -> QuantizedWeight:
    shape, is_float = group.shape, scale.dtype.name == "float32"
    group.family = "fbgemm-fp8"
    if is_float and scale.shape in ((*shape[:-1], 1), shape[:-1]):
        return group.flat("fp8 channel", g.grid_of(shape, 1, shape[-1]), weight, scale)
    if is_float and len(shape) == 3 and scale.shape == (shape[0], 1, shape[2]):
        return group.flat("fp8 column", g.grid_of(shape, shape[1], 1), weight, scale)
    return group.unfit(scales=scale)


def recognize_experts(view: TensorView, mark: str) -> QuantizedWeight | None:
    """Recognize experts of Llama 4 that FBGEMM quantized, such as ``gate_up_proj``."""
    name = mark.removesuffix("_scale")
    weight = view.get(name, *g.FLOAT8)
    if weight is None or view.method != "fbgemm_fp8":
        return None
    group = QuantizedWeight("fbgemm-fp8", "fp8", name, weight.shape, (name, mark))
    return _fbgemm(group, weight, view.tensors[mark])


MODELOPT = (
    QuantizationMethod(
        "modelopt", "ModelOpt FP8, NVFP4, MXFP8; FBGEMM FP8", recognize_modelopt,
        marks=("weight_scale",),
        oracle="nvidia-modelopt 0.47.0; for FBGEMM, the formula",
    ),
    QuantizationMethod(
        "fbgemm-fp8", "FBGEMM FP8 experts of Llama-4", recognize_experts,
        marks=("gate_up_proj_scale", "down_proj_scale"), oracle="the formula",
    ),
)  # fmt: skip


# MLX packs codes into uint32 elements. Each group of codes has a scale.
#
# The first code is in the lowest bits of an element. The mode ``affine`` has a scale and a bias for
# each group. The modes ``mxfp4``, ``nvfp4`` and ``mxfp8`` have scales of one byte and no biases.
# Only ``config.json`` contains the group size and the number of bits. A layer may have its own
# group size and bits.


_MODES = {  # maps each mode to (bits of a code, format of the blocks)
    "mxfp4": (4, g.MX._replace(label="mlx mxfp4", dtype="exponent", stored=("uint8",))),
    "nvfp4": (4, g.BlockForm("mlx nvfp4", 16, ("uint8",), "float8_e4m3fn")),
    "mxfp8": (8, g.BlockForm("mlx mxfp8", 32, ("uint8",), "exponent", table="float8_e4m3fn")),
}


def recognize_mlx(view: TensorView, mark: str) -> QuantizedWeight | None:
    """Recognize a weight by `mark`, the name of its scales."""
    stem = mark.removesuffix(".scales")
    weight, scales = view.get(f"{stem}.weight", "uint32"), view.tensors[mark]
    if weight is None or len(weight.shape) < 2:
        return None
    biases = next(iter(view.present(stem, (".biases", ".qbiases"))), "")
    parts = (f"{stem}.weight", mark, *((biases,) if biases else ()))
    group = QuantizedWeight("mlx", "mlx", f"{stem}.weight", weight.shape, parts)
    settings = _settings(view, stem)
    mode = settings.get("mode", "affine")
    size, bits = settings.get("group_size"), settings.get("bits")
    if mode in _MODES:
        bits, form = _MODES[mode]
        size = form.width
    if type(size) is not int or type(bits) is not int or size <= 0 or not 1 <= bits <= 8:
        return group.refused(
            "config.json contains no valid group_size and bits for this weight", g.NEEDS_CONFIG
        )
    words = weight.shape[-1]
    shape = (*weight.shape[:-1], words * 32 // bits)
    group.label, group.shape = f"mlx {mode} int{bits}", shape
    if mode in _MODES:
        return group.in_blocks(form, weight, scales, packing=Packing("flat", bits))
    if scales.shape != g.blocks_of(shape, 1, size) or shape[-1] * bits != words * 32:
        return group.unfit(f" in groups of {size}", scales=scales)
    bias = view.get(biases)
    if mode != "affine" or bias is None or bias.shape != scales.shape or not g.is_scale(scales):
        return group.refused(
            f"its mode is {mode!r}; ckptkit supports mxfp4, nvfp4, mxfp8, and affine with float "
            "scales and biases of the same shape"
        )
    grid, packing = g.grid_of(shape, 1, size), Packing("rows", bits, stride=4 * words)
    numbers = g.numbers(2, bias, grid)
    label = f"mlx int{bits} g{size}"
    return group.with_layout(label, packing, grid, weight, scales, bias, bias=numbers)


def _settings(view: TensorView, stem: str) -> dict[str, Any]:
    """Return the mode, group size and bits of a layer, according to the configuration."""
    config = view.config.get("quantization") or view.quantization
    if not isinstance(config, dict):
        return {}
    own = config.get(stem)
    return {**config, **own} if isinstance(own, dict) else config


MLX = QuantizationMethod(
    "mlx", "MLX: affine, mxfp4, nvfp4, mxfp8", recognize_mlx, marks=("scales",), oracle="mlx 0.32.4"
)
