"""Recognize FP8 weights with scales, weights of ComfyUI, and unsupported quantization methods."""

from __future__ import annotations

from typing import Any, NamedTuple

from ckptkit.quantized import group as g
from ckptkit.quantized.group import QuantizationMethod, QuantizedWeight, TensorView

# DeepSeek-V3 and the method ``fp8`` of transformers have FP8 codes with a scale for each block, or
# for each tensor.
#
# Experts may be FP4. Despite its name, ``X.weight_scale_inv`` is not an inverse: codes are
# multiplied by this scale. The product is computed in float32 and rounded once.


_NOT_FP8_BLOCK = (".activation_scale", ".input_scale", ".qscale_act", ".input_scale_ub")
_WEIGHT_OF = {".scale": ".weight", ".qscale_weight": ".weight", "_scale_inv": ""}


def recognize_blocks(view: TensorView, mark: str) -> QuantizedWeight | None:
    """Recognize a weight of FP8, int8 or FP4 codes by `mark`, the name of its scale."""
    suffix = next((each for each in _WEIGHT_OF if mark.endswith(each)), None)
    if suffix is None:
        return None
    name = mark.removesuffix(suffix) + _WEIGHT_OF[suffix]
    scale, weight = view.tensors[mark], view.get(name, *g.FLOAT8, "int8", "float4_e2m1fn_x2")
    is_exponent = scale.dtype.name in g.EXPONENTS
    if weight is None or not (g.is_scale(scale) or is_exponent):
        return None
    stem = name.removesuffix(".weight")
    dropped = view.present(stem, _NOT_FP8_BLOCK) if stem != name else ()
    group = QuantizedWeight("fp8-block", "fp8", name, weight.shape, (name, mark), dropped)
    if weight.dtype.name not in g.FLOAT8:  # FP4 experts, stored like MXFP4
        found = group.in_blocks(g.MX._replace(label="fp4 1x32"), weight, scale)
        return found if is_exponent and not found.reason else None
    if scale.numel == 1:
        return group.flat("fp8 tensor", g.single_block(weight.shape), weight, scale)
    size = g.block_size(view.quantization.get("weight_block_size"))
    if size is None:
        return group.refused(
            "the size of its blocks is unknown: config.json has no weight_block_size",
            g.NEEDS_CONFIG,
        )
    blocks = f"{size[0]}x{size[1]}"
    if scale.shape != g.blocks_of(weight.shape, *size):
        return group.unfit(f" with blocks of {blocks}", scales=scale)
    return group.flat(f"fp8 {blocks}", g.grid_of(weight.shape, *size), weight, scale)


FP8_BLOCK = QuantizationMethod(
    "fp8-block", "FP8 blocks of DeepSeek-V3, Qwen3, GLM, Kimi", recognize_blocks,
    marks=("weight_scale_inv", "scale", "qscale_weight"), endings=("_scale_inv",),
    oracle="compressed-tensors 0.20.0, transformers 5.23.0", written="fp8-block",
)  # fmt: skip


# ComfyUI writes FP8, int8, NVFP4 and MXFP8.
#
# JSON in a tensor or in the header describes each quantized layer.
# Codes and scales are multiplied in the target dtype. In NVFP4, the high 4 bits of a byte are the
# first code, and scales are stored in tiles. The file does not contain the shape before padding, so
# the dequantized weight includes the padding.


_HEADER = "_quantization_metadata"
DROPPED = (".input_scale", ".scale_input", ".comfy_quant")
_BLOCKS = {
    "nvfp4": g.NVFP4._replace(tiled=True, high_first=True, **g.IN_TARGET),
    "mxfp8": g.MX._replace(dtype="float8_e8m0fnu", tiled=True, **g.IN_TARGET),
}
_FLAT = {
    "float8_e4m3fn": g.FLOAT8, "float8_e5m2": g.FLOAT8, "int8_tensorwise": ("int8",),
}  # fmt: skip


def recognize_old(view: TensorView, mark: str) -> QuantizedWeight | None:
    """Recognize an FP8 weight with a ``scale_weight``, as in older files of ComfyUI."""
    stem = mark.removesuffix(".scale_weight")
    name, scale = f"{stem}.weight", view.tensors[mark]
    weight = view.get(name, *g.FLOAT8)
    if weight is None or not g.is_scale(scale):
        return None
    dropped = view.present(stem, DROPPED)
    group = QuantizedWeight("comfy", "fp8", name, weight.shape, (name, mark), dropped)
    if scale.numel != 1:
        return group.unfit(": it must have one element", scale_weight=scale)
    return group.flat("fp8 tensor", g.single_block(weight.shape), weight, scale, **g.IN_TARGET)


def recognize_comfy(view: TensorView, mark: str) -> QuantizedWeight | None:
    """Recognize a layer that a ``comfy_quant`` tensor or the header of the file describes."""
    stem = mark.removesuffix(".weight_scale").removesuffix(".comfy_quant")
    name = f"{stem}.weight"
    settings = _settings(view, stem)
    weight, scale = view.get(name), view.get(f"{name}_scale")
    if settings is None or weight is None:
        return None
    parts = (name, *view.present(stem, (".weight_scale", ".weight_scale_2")))
    dropped = view.present(stem, DROPPED)
    group = QuantizedWeight("comfy", "comfy", name, weight.shape, parts, dropped)
    form = str(settings.get("format"))
    if "convrot" in form or settings.get("convrot") or form not in {*_BLOCKS, *_FLAT}:
        known = ", ".join([*_BLOCKS, *_FLAT])
        return group.refused(
            f"its format is {form}; ckptkit supports only {known}, all without rotation (convrot)"
        )
    if scale is None:
        return group.refused(f"{name}_scale is missing")
    if form in _BLOCKS:
        return group.in_blocks(_BLOCKS[form], weight, scale, view.get(f"{name}_scale_2", "float32"))
    is_integer = form == "int8_tensorwise"
    grid, label = g.grid_for(weight.shape, scale.shape) or (None, "")
    fits = weight.dtype.name in _FLAT[form] and g.is_scale(scale)
    if grid is None or not fits or not (is_integer or scale.numel == 1):
        return group.unfit(f" with the format {form}", codes=weight, scales=scale)
    if is_integer:
        label = "row" if label == "channel" else label
        return group.flat(f"int8 {label}", grid, weight, scale)
    return group.flat("fp8 tensor", grid, weight, scale, **g.IN_TARGET)


def _settings(view: TensorView, stem: str) -> dict[str, Any] | None:
    if f"{stem}.comfy_quant" in view.tensors:
        return view.json(f"{stem}.comfy_quant")
    layers = view.header(_HEADER).get("layers")
    found = layers.get(stem) if isinstance(layers, dict) else None
    return found if isinstance(found, dict) else None


_ORACLE = "comfy-kitchen 0.2.40"
COMFY = (
    QuantizationMethod(
        "comfy", "ComfyUI FP8, int8, NVFP4, MXFP8", recognize_comfy,
        marks=("comfy_quant", "weight_scale"), oracle=_ORACLE,
    ),
    QuantizationMethod(
        "comfy-scaled", "ComfyUI scaled FP8", recognize_old, marks=("scale_weight",), oracle=_ORACLE
    ),
)  # fmt: skip


# Quantization methods that ckptkit recognizes but does not support. The weights of these methods
# use codebooks, are rotated, or are packed for a GPU kernel.


class UnreadMethod(NamedTuple):
    """An unsupported method: the names of its tensors, and the library that reads these tensors.

    ``codes`` and ``companions`` are last components of tensor names. ckptkit recognizes a weight
    only if a tensor exists for each of these components. ``dtypes`` lists the possible dtypes of
    the codes. If ``dtypes`` is empty, any dtype is possible.
    """

    name: str
    codes: str
    companions: tuple[str, ...]
    reader: str
    dtypes: tuple[str, ...] = ()


OTHERS = (
    UnreadMethod("AQLM", "codes", ("codebooks", "scales"), "transformers with aqlm"),
    UnreadMethod("EETQ", "weight", ("weight_scales",), "transformers with eetq", ("int8",)),
    UnreadMethod("VPTQ", "indices", ("centroids.weight",), "vptq"),
    UnreadMethod("VPTQ", "indices", ("centroids",), "vptq"),
    UnreadMethod("EXL2", "q_weight", ("q_scale", "q_groups"), "exllamav2"),
    UnreadMethod("EXL3", "trellis", ("suh", "svh"), "exllamav3"),
    UnreadMethod("HIGGS", "weight", ("tables", "tables2"), "transformers with flute"),
    UnreadMethod("SpQR", "dense_weights", ("row_offsets",), "transformers with spqr_quant"),
    UnreadMethod("FP-Quant", "qweight", ("forward_hadamard_matrix",), "transformers with fp_quant"),
    UnreadMethod("ParoQuant", "qweight", ("theta", "pairs"), "paroquant"),
    UnreadMethod("QQQ", "B", ("s_channel", "s_group"), "GPTQModel"),
    UnreadMethod("Marlin", "B", ("s",), "vLLM"),
    UnreadMethod("compressed-tensors marlin-24", "weight_packed", ("meta",), "vLLM"),
    UnreadMethod("compressed-tensors sparse-bitmask", "compressed", ("bitmask", "row_offsets"),
                 "compressed-tensors 0.10"),
    UnreadMethod("compressed-tensors sparse-24-bitmask", "compressed", ("bitmask",),
                 "compressed-tensors 0.10"),
    UnreadMethod("BitNet", "weight", ("weight_scale",), "transformers", ("uint8",)),
)  # fmt: skip
# Maps unsupported values of quant_method, in lower case, to the names of quantization methods.
METHODS = {
    "aqlm": "AQLM", "eetq": "EETQ", "vptq": "VPTQ", "higgs": "HIGGS", "spqr": "SpQR",
    "bitnet": "BitNet", "quark": "Quark", "fp_quant": "FP-Quant", "fpquant": "FP-Quant",
    "sinq": "SINQ", "paroquant": "ParoQuant", "qqq": "QQQ", "exl2": "EXL2",
    "exl3": "EXL3", "marlin": "Marlin", "bitblas": "BitBLAS",
}  # fmt: skip


def recognize_unread(view: TensorView, mark: str) -> QuantizedWeight | None:
    """Recognize a weight of an unsupported method by the names of its tensors."""
    for other in OTHERS:
        if other.name == "BitNet" and view.method != "bitnet":
            continue
        for last in (other.codes, *other.companions):
            stem = mark.removesuffix(f".{last}")
            codes = view.get(f"{stem}.{other.codes}", *other.dtypes)
            names = view.present(stem, (f".{each}" for each in other.companions))
            if stem != mark and codes is not None and len(names) == len(other.companions):
                name, parts = other.name, (f"{stem}.{other.codes}", *names)
                group = QuantizedWeight(name, name, f"{stem}.weight", codes.shape, parts)
                return group.refused(f"ckptkit does not support {name}", f"{other.reader} reads it")
    return None


UNREAD = QuantizationMethod(
    "others", ", ".join(dict.fromkeys([*(each.name for each in OTHERS), *METHODS.values()])),
    recognize_unread,
    marks=(
        "codebooks", "weight_scales", "indices", "q_weight", "trellis", "tables2", "dense_weights",
        "forward_hadamard_matrix", "theta", "s_channel", "s", "meta", "bitmask", "weight_scale",
    ),
    read=False,
)  # fmt: skip
