"""NVIDIA ModelOpt and MLX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ckptkit.compute.packing import TARGET, Blocks, Numbers, Packing, ScaleGrid
from ckptkit.core.tensor import Shape, Tensor
from ckptkit.quantized import group as g
from ckptkit.quantized.group import QuantizationMethod, QuantizedWeight, TensorView

# NVIDIA ModelOpt: FP8, NVFP4 and MXFP8; and FBGEMM's FP8, whose names are the same.
#
# ModelOpt rounds the scale of FP8 to the dtype that is asked for before it multiplies; the others
# multiply in float32.


DROPPED = (".input_scale", ".output_scale", ".input_scale_ub")
_NEEDS_CONFIG = "put the config.json or hf_quant_config.json of the model beside the file"


def recognize_modelopt(view: TensorView, mark: str) -> QuantizedWeight | None:
    """The weight whose scale is called `mark`."""
    name = mark.removesuffix("_scale")
    scale, weight = view.tensors[mark], view.get(name, *g.FLOAT8, "uint8")
    if weight is None or f"{name}_scale_inv" in view.tensors:
        return None
    stem = name.removesuffix(".weight")
    second = view.get(f"{name}_scale_2", "float32")
    parts = (name, mark, *((f"{name}_scale_2",) if second is not None else ()))
    group = QuantizedWeight(
        "modelopt", "fp8", name, weight.shape, parts, view.present(stem, DROPPED)
    )
    extra = view.present(stem, (".pre_quant_scale", ".svdquant_lora_a", ".svdquant_lora_b"))
    if extra:
        return g.refused(
            group,
            f"{extra[0]} changes what goes into the layer: the weight alone is not the model's",
        )
    if weight.dtype.name == "uint8":
        return _nvfp4(group, view, weight, scale, second)
    if view.method == "fbgemm_fp8":
        return _fbgemm(group, weight, scale)
    if scale.dtype.name in ("uint8", "float8_e8m0fnu"):
        return _mxfp8(group, view, weight, scale)
    return _fp8(group, view, weight, scale)


def _nvfp4(
    group: QuantizedWeight, view: TensorView, weight: Tensor, scale: Tensor, second: Tensor | None
) -> QuantizedWeight | None:
    if second is None or scale.dtype.name != "float8_e4m3fn":
        return None
    shape = g.doubled(weight.shape)
    level = g.single(2, second, shape)
    group = QuantizedWeight("modelopt", "nvfp4", group.name, shape, group.parts, group.dropped)
    if view.method not in ("modelopt", "modelopt_fp4"):
        return g.refused(
            group, "whether ModelOpt or another library has packed it is not known", _NEEDS_CONFIG
        )
    if level is None or scale.shape != g.blocks_of(shape, 1, 16):
        return g.refused(
            group, f"scales of {g.shown(scale.shape)} do not fit {g.shown(shape)} in blocks of 16"
        )
    scales = (Numbers(1, "float8_e4m3fn", g.grid_of(shape, 1, 16)), level)
    return g.ready(
        group, "nvfp4 1x16", g.flat(shape, 4, scales, table="e2m1+0"), weight, scale, second
    )


def _mxfp8(
    group: QuantizedWeight, view: TensorView, weight: Tensor, scale: Tensor
) -> QuantizedWeight:
    if view.method != "modelopt":
        return g.refused(
            group, "whether ModelOpt or another library has made it is not known", _NEEDS_CONFIG
        )
    if scale.shape != g.blocks_of(weight.shape, 1, 32):
        return g.refused(
            group, f"exponents of {g.shown(scale.shape)} do not fit {g.shown(weight.shape)}"
        )
    numbers = Numbers(1, g.scale_dtype(scale), g.grid_of(weight.shape, 1, 32))
    layout = g.flat(weight.shape, 8, (numbers,), table=weight.dtype.name)
    return g.ready(group, "mxfp8 1x32", layout, weight, scale)


def _fp8(
    group: QuantizedWeight, view: TensorView, weight: Tensor, scale: Tensor
) -> QuantizedWeight | None:
    if not g.is_scale(scale):
        return None
    if view.method != "modelopt":
        return g.refused(
            group, "in which dtype codes and scales are multiplied is not known", _NEEDS_CONFIG
        )
    found = _fp8_grid(view, weight.shape, scale)
    if found is None:
        return g.refused(
            group, f"scales of {g.shown(scale.shape)} fit no layout of ModelOpt that is known"
        )
    numbers, label = found
    layout = g.flat(
        weight.shape,
        8,
        (numbers,),
        table=weight.dtype.name,
        scale_dtype=TARGET,
        product_dtype=TARGET,
    )
    return g.ready(group, f"fp8 {label}", layout, weight, scale)


def _fp8_grid(view: TensorView, shape: Shape, scale: Tensor) -> tuple[Numbers, str] | None:
    dtype, short = scale.dtype.name, g.plain(scale.shape)
    if scale.numel == 1:
        return Numbers(1, dtype, g.whole(shape), shared=True), "tensor"
    if len(shape) == 2 and short == shape[:1]:
        return Numbers(1, dtype, g.grid_of(shape, 1, shape[-1])), "channel"
    if len(shape) == 3 and short == shape[:1] and shape[0] != shape[1]:
        return Numbers(1, dtype, g.whole(shape)), "tensor"
    for height, width in _block_sizes(view):
        if len(shape) == 2 and short == g.plain(g.blocks_of(shape, height, width)):
            return Numbers(1, dtype, g.grid_of(shape, height, width)), f"{height}x{width}"
    return None


def _block_sizes(view: TensorView) -> Iterator[tuple[int, int]]:
    """Height and width of blocks, if the configuration names them."""
    for key in ("group_size", "weight_block_size"):
        block = view.quantization.get(key)
        size = [block, block] if type(block) is int else block
        if (
            isinstance(size, list)
            and len(size) == 2
            and all(type(n) is int and n > 0 for n in size)
        ):
            yield size[0], size[1]


def _fbgemm(group: QuantizedWeight, weight: Tensor, scale: Tensor) -> QuantizedWeight:
    shape = weight.shape
    group = QuantizedWeight("fbgemm-fp8", "fp8", group.name, shape, group.parts, group.dropped)
    found: tuple[ScaleGrid, str] | None = None
    if scale.shape in ((*shape[:-1], 1), shape[:-1]):
        found = g.grid_of(shape, 1, shape[-1]), "channel"
    elif len(shape) == 3 and scale.shape == (shape[0], 1, shape[2]):
        found = g.grid_of(shape, shape[1], 1), "column"
    if found is None or scale.dtype.name != "float32":
        return g.refused(
            group, f"scales of {scale.dtype} {g.shown(scale.shape)} do not fit {g.shown(shape)}"
        )
    layout = g.flat(shape, 8, (Numbers(1, "float32", found[0]),), table=weight.dtype.name)
    return g.ready(group, f"fp8 {found[1]}", layout, weight, scale)


def recognize_experts(view: TensorView, mark: str) -> QuantizedWeight | None:
    """The experts of Llama-4 as FBGEMM has them: ``gate_up_proj`` and ``gate_up_proj_scale``."""
    if view.method != "fbgemm_fp8":
        return None
    name = mark.removesuffix("_scale")
    weight = view.get(name, *g.FLOAT8)
    group = QuantizedWeight("fbgemm-fp8", "fp8", name, weight.shape if weight else (), (name, mark))
    return None if weight is None else _fbgemm(group, weight, view.tensors[mark])


MODELOPT = (
    QuantizationMethod(
        "modelopt", "ModelOpt FP8, NVFP4, MXFP8; FBGEMM FP8", recognize_modelopt,
        marks=("weight_scale",),
        oracle="nvidia-modelopt 0.47.0; of FBGEMM, the formula",
    ),
    QuantizationMethod(
        "fbgemm-fp8", "FBGEMM FP8 experts of Llama-4", recognize_experts,
        marks=("gate_up_proj_scale", "down_proj_scale"), oracle="the formula",
    ),
)  # fmt: skip


# MLX: words of 32 bits, filled from the low bits up, with a scale and a bias for each group.
#
# Of its modes, ``affine`` has biases; ``mxfp4``, ``nvfp4`` and ``mxfp8`` have scales of one byte.
# QuantizedWeight size and bits stand in ``config.json`` only, with exceptions for single layers.


_MODES = {"mxfp4": (32, 4, "e2m1", "exponent"), "nvfp4": (16, 4, "e2m1", "float8_e4m3fn"),
          "mxfp8": (32, 8, "float8_e4m3fn", "exponent")}  # fmt: skip


def recognize_mlx(view: TensorView, mark: str) -> QuantizedWeight | None:
    """The weight of words whose scales are called `mark`."""
    stem = mark.removesuffix(".scales")
    weight, scales = view.get(f"{stem}.weight", "uint32"), view.tensors[mark]
    if weight is None or len(weight.shape) < 2:
        return None
    biases = next(iter(view.present(stem, (".biases", ".qbiases"))), None)
    parts = (f"{stem}.weight", mark, *((biases,) if biases else ()))
    group = QuantizedWeight("mlx", "mlx", f"{stem}.weight", weight.shape, parts)
    settings = _settings(view, stem)
    mode, size, bits = (
        settings.get("mode", "affine"),
        settings.get("group_size"),
        settings.get("bits"),
    )
    if mode in _MODES:
        size, bits = _MODES[mode][:2]
    if type(size) is not int or type(bits) is not int or size <= 0 or not 1 <= bits <= 8:
        return g.refused(
            group, "its group_size and bits are not known: config.json names none", g.NEEDS_CONFIG
        )
    shape = (*weight.shape[:-1], weight.shape[-1] * 32 // bits)
    group = QuantizedWeight("mlx", f"mlx {mode} int{bits}", group.name, shape, parts)
    if scales.shape != g.blocks_of(shape, 1, size) or shape[-1] * bits != weight.shape[-1] * 32:
        return g.refused(
            group,
            f"scales of {g.shown(scales.shape)} do not fit {g.shown(shape)} in groups of {size}",
        )
    if mode in _MODES:
        return (
            _coded(group, mode, shape, weight, scales)
            if scales.dtype.name == "uint8"
            else g.refused(group, f"its mode is {mode} and its scales are {scales.dtype}")
        )
    bias = view.get(biases or "")
    if mode != "affine" or bias is None or bias.shape != scales.shape or not g.is_scale(scales):
        return g.refused(group, f"its mode is {mode!r}, or its biases are missing or do not fit")
    return _affine(group, bits, size, weight, scales, bias)


def _settings(view: TensorView, stem: str) -> dict[str, Any]:
    """Mode, group size and bits of a layer."""
    config = view.config.get("quantization") or view.quantization
    if not isinstance(config, dict):
        return {}
    own = config.get(stem)
    return {**config, **own} if isinstance(own, dict) else config


def _packing(weight: Tensor, bits: int) -> Packing:
    return Packing("rows", bits, stride=4 * weight.shape[-1])


def _affine(
    group: QuantizedWeight, bits: int, size: int, weight: Tensor, scales: Tensor, bias: Tensor
) -> QuantizedWeight:
    batches, rows, columns = g.matrix(group.shape)
    grid = g.grid_of(group.shape, 1, size)
    layout = Blocks(
        batches, rows, columns, _packing(weight, bits), (Numbers(1, scales.dtype.name, grid),),
        bias=Numbers(2, bias.dtype.name, grid),
    )  # fmt: skip
    return g.ready(group, f"mlx int{bits} g{size}", layout, weight, scales, bias)


def _coded(
    group: QuantizedWeight, mode: str, shape: Shape, weight: Tensor, scales: Tensor
) -> QuantizedWeight:
    size, bits, table, dtype = _MODES[mode]
    numbers = Numbers(1, dtype, g.grid_of(shape, 1, size))
    return g.ready(
        group, f"mlx {mode}", g.flat(shape, bits, (numbers,), table=table), weight, scales
    )


MLX = QuantizationMethod(
    "mlx", "MLX: affine, mxfp4, nvfp4, mxfp8", recognize_mlx, marks=("scales",), oracle="mlx 0.32.4"
)
