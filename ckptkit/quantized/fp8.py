"""FP8 with scales of blocks or tensors, ComfyUI, and methods that are named and not read."""

from __future__ import annotations

from typing import Any, NamedTuple

from ckptkit.compute.packing import TARGET, Numbers, ScaleGrid
from ckptkit.core.tensor import Shape, Tensor
from ckptkit.quantized import group as g
from ckptkit.quantized.group import QuantizationMethod, QuantizedWeight, TensorView

# FP8 with a scale for each block or tensor: DeepSeek-V3, transformers' ``fp8``, and FP4 experts.
#
# ``X.weight_scale_inv`` multiplies, in spite of its name. The product is made in float32 and
# rounded once.


NAME = "fp8-block"
_NOT_FP8_BLOCK = (".activation_scale", ".input_scale", ".qscale_act", ".input_scale_ub")
_WEIGHT_OF = {".scale": ".weight", ".qscale_weight": ".weight", "_scale_inv": ""}


def recognize_blocks(view: TensorView, mark: str) -> QuantizedWeight | None:
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
        view.present(name.removesuffix(".weight"), _NOT_FP8_BLOCK)
        if name.endswith(".weight")
        else ()
    )
    group = QuantizedWeight(NAME, "fp8", name, weight.shape, (name, mark), dropped)
    if weight.dtype.name in g.FLOAT8:
        return _fp8_block(group, view, weight, scale)
    return _fp4(group, weight, scale) if is_byte else None


def _fp8_block(
    group: QuantizedWeight, view: TensorView, weight: Tensor, scale: Tensor
) -> QuantizedWeight:
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


def _fp4(group: QuantizedWeight, weight: Tensor, scale: Tensor) -> QuantizedWeight | None:
    """Two codes in a byte, the low half first; a scale for 32 of them, as in all MX formats."""
    shape = g.doubled(weight.shape)
    if len(shape) < 2 or scale.shape != (*shape[:-1], shape[-1] // 32) or shape[-1] % 32:
        return None
    numbers = Numbers(1, g.scale_dtype(scale), g.grid_of(shape, 1, 32))
    group = QuantizedWeight(
        group.family, group.label, group.name, shape, group.parts, group.dropped
    )
    return g.ready(group, "fp4 1x32", g.flat(shape, 4, (numbers,), table="e2m1"), weight, scale)


FP8_BLOCK = QuantizationMethod(
    NAME,
    "FP8 blocks of DeepSeek-V3, Qwen3, GLM, Kimi",
    recognize_blocks,
    marks=("weight_scale_inv", "scale", "qscale_weight"),
    endings=("_scale_inv",),
    oracle="compressed-tensors 0.20.0, transformers 5.23.0",
    written="fp8-block",
)


# ComfyUI: FP8, int8, NVFP4 and MXFP8 of single layers, which JSON in the file or its header names.
#
# Codes and scales are multiplied in the dtype that is asked for. Of NVFP4 the first of two codes is
# the high half of a byte, and scales lie in tiles. The shape before padding is not in the file: the
# padded one is given.


_HEADER = "_quantization_metadata"
DROPPED = (".input_scale", ".scale_input", ".comfy_quant")
_MARKER = "scaled_fp8"


def recognize_old(view: TensorView, mark: str) -> QuantizedWeight | None:
    """FP8 with ``scale_weight``, beside a marker of the whole file."""
    stem = mark.removesuffix(".scale_weight")
    weight, scale = view.get(f"{stem}.weight", *g.FLOAT8), view.tensors[mark]
    if weight is None or not g.is_scale(scale):
        return None
    group = QuantizedWeight(
        "comfy",
        "fp8",
        f"{stem}.weight",
        weight.shape,
        (f"{stem}.weight", mark),
        view.present(stem, DROPPED),
    )
    return _fp8(group, weight, scale)


def recognize_comfy(view: TensorView, mark: str) -> QuantizedWeight | None:
    """The layer that has a ``comfy_quant`` of its own, or an entry in the header."""
    stem = mark.removesuffix(".weight_scale").removesuffix(".comfy_quant")
    settings = _settings(view, stem)
    weight, scale = view.get(f"{stem}.weight"), view.get(f"{stem}.weight_scale")
    if settings is None or weight is None:
        return None
    parts = (f"{stem}.weight", *view.present(stem, (".weight_scale", ".weight_scale_2")))
    group = QuantizedWeight(
        "comfy", "comfy", f"{stem}.weight", weight.shape, parts, view.present(stem, DROPPED)
    )
    form = str(settings.get("format"))
    if "convrot" in form or settings.get("convrot") or form not in _READERS:
        return g.refused(
            group,
            f"its format is {form}, or rotated (convrot): the weight alone is not the model's",
        )
    if scale is None:
        return g.refused(group, f"{stem}.weight_scale is missing")
    return _READERS[form](group, view, weight, scale)


def _settings(view: TensorView, stem: str) -> dict[str, Any] | None:
    if f"{stem}.comfy_quant" in view.tensors:
        return view.json(f"{stem}.comfy_quant")
    layers = g.parsed(view.extras.get(_HEADER, "").encode()).get("layers")
    found = layers.get(stem) if isinstance(layers, dict) else None
    return found if isinstance(found, dict) else None


def _fp8(group: QuantizedWeight, weight: Tensor, scale: Tensor) -> QuantizedWeight:
    if scale.numel != 1 or weight.dtype.name not in g.FLOAT8 or not g.is_scale(scale):
        return g.refused(
            group, f"its scale is {scale.dtype} {g.shown(scale.shape)}, and not one number"
        )
    numbers = Numbers(1, scale.dtype.name, g.whole(weight.shape), shared=True)
    layout = g.flat(
        weight.shape,
        8,
        (numbers,),
        table=weight.dtype.name,
        scale_dtype=TARGET,
        product_dtype=TARGET,
    )
    return g.ready(group, "fp8 tensor", layout, weight, scale)


def _read_fp8(
    group: QuantizedWeight, view: TensorView, weight: Tensor, scale: Tensor
) -> QuantizedWeight:
    return _fp8(group, weight, scale)


def _read_int8(
    group: QuantizedWeight, view: TensorView, weight: Tensor, scale: Tensor
) -> QuantizedWeight:
    shape = weight.shape
    if scale.numel == 1:
        grid = g.whole(shape)
    elif len(shape) == 2 and scale.shape in ((shape[0], 1), shape[:1]):
        grid = g.grid_of(shape, 1, shape[1])
    else:
        return g.refused(group, f"scales of {g.shown(scale.shape)} do not fit {g.shown(shape)}")
    if weight.dtype.name != "int8" or not g.is_scale(scale):
        return g.refused(group, f"its codes are {weight.dtype}")
    layout = g.flat(shape, 8, (Numbers(1, scale.dtype.name, grid, shared=True),), signed=True)
    return g.ready(group, f"int8 {'tensor' if scale.numel == 1 else 'row'}", layout, weight, scale)


def _tiles(shape: Shape, width: int, scale: Tensor) -> ScaleGrid | None:
    """The grid of scales in tiles of 128 x 4, None if there are not as many."""
    _, rows, columns = g.matrix(shape)
    padded = -(-rows // 128) * 128 * (-(-columns // width // 4) * 4)
    whole = len(shape) == 2 and columns % width == 0 and scale.numel == padded
    return g.grid_of(shape, 1, width, "tiles") if whole else None


def _read_nvfp4(
    group: QuantizedWeight, view: TensorView, weight: Tensor, scale: Tensor
) -> QuantizedWeight:
    shape = g.doubled(weight.shape)
    second = view.get(f"{group.name}_scale_2", "float32")
    level = None if second is None else g.single(2, second, shape)
    grid = _tiles(shape, 16, scale)
    group = QuantizedWeight("comfy", "nvfp4", group.name, shape, group.parts, group.dropped)
    if second is None or level is None or grid is None or scale.dtype.name != "float8_e4m3fn":
        return g.refused(
            group,
            "its scales do not fit blocks of 16 in tiles of 128x4, or weight_scale_2 is missing",
        )
    layout = g.flat(
        shape, 4, (Numbers(1, "float8_e4m3fn", grid), level), high_first=True, table="e2m1",
        scale_dtype=TARGET, product_dtype=TARGET,
    )  # fmt: skip
    return g.ready(group, "nvfp4 1x16", layout, weight, scale, second)


def _read_mxfp8(
    group: QuantizedWeight, view: TensorView, weight: Tensor, scale: Tensor
) -> QuantizedWeight:
    grid = _tiles(weight.shape, 32, scale)
    if (
        grid is None
        or weight.dtype.name not in g.FLOAT8
        or scale.dtype.name not in ("uint8", "float8_e8m0fnu")
    ):
        return g.refused(group, "its exponents do not fit blocks of 32 in tiles of 128x4")
    layout = g.flat(
        weight.shape, 8, (Numbers(1, "float8_e8m0fnu", grid),), table=weight.dtype.name,
        scale_dtype=TARGET, product_dtype=TARGET,
    )  # fmt: skip
    return g.ready(group, "mxfp8 1x32", layout, weight, scale)


_READERS = {"float8_e4m3fn": _read_fp8, "float8_e5m2": _read_fp8, "int8_tensorwise": _read_int8,
            "nvfp4": _read_nvfp4, "mxfp8": _read_mxfp8}  # fmt: skip
_ORACLE = "comfy-kitchen 0.2.40"
COMFY = (
    QuantizationMethod(
        "comfy",
        "ComfyUI FP8, int8, NVFP4, MXFP8",
        recognize_comfy,
        marks=("comfy_quant", "weight_scale"),
        oracle=_ORACLE,
    ),
    QuantizationMethod(
        "comfy-scaled", "ComfyUI scaled FP8", recognize_old, marks=("scale_weight",), oracle=_ORACLE
    ),
)


# Families that are named and not read: layouts of kernels, codebooks, rotated weights.


class UnreadMethod(NamedTuple):
    """A family by its marks: codes, what must be beside them, their dtypes, what reads them."""

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
    UnreadMethod(
        "compressed-tensors sparse-bitmask",
        "compressed",
        ("bitmask", "row_offsets"),
        "compressed-tensors 0.10",
    ),
    UnreadMethod(
        "compressed-tensors sparse-24-bitmask",
        "compressed",
        ("bitmask",),
        "compressed-tensors 0.10",
    ),
    UnreadMethod("BitNet", "weight", ("weight_scale",), "transformers", ("uint8",)),
)
# quant_method in small letters: of these nothing is read, whatever the tensors look like
METHODS = {
    "aqlm": "AQLM", "eetq": "EETQ", "vptq": "VPTQ", "higgs": "HIGGS", "spqr": "SpQR",
    "bitnet": "BitNet", "quark": "Quark", "fp_quant": "FP-Quant", "fpquant": "FP-Quant",
    "sinq": "SINQ", "paroquant": "ParoQuant", "qqq": "QQQ", "exl2": "EXL2",
    "exl3": "EXL3", "marlin": "Marlin", "bitblas": "BitBLAS",
}  # fmt: skip


def recognize_unread(view: TensorView, mark: str) -> QuantizedWeight | None:
    """The first of the families whose codes are called `mark`, or that `mark` stands beside."""
    for other in OTHERS:
        for last in (other.codes, *other.companions):
            if mark.endswith(f".{last}"):
                found = _of(view, other, mark.removesuffix(f".{last}"))
                if found is not None:
                    return found
    return None


def _of(view: TensorView, other: UnreadMethod, stem: str) -> QuantizedWeight | None:
    codes = view.get(f"{stem}.{other.codes}", *other.dtypes)
    names = view.present(stem, (f".{each}" for each in other.companions))
    if (
        codes is None
        or len(names) < len(other.companions)
        or (other.name == "BitNet" and view.method != "bitnet")
    ):
        return None
    group = QuantizedWeight(
        other.name, other.name, f"{stem}.weight", codes.shape, (f"{stem}.{other.codes}", *names)
    )
    return g.refused(group, f"{other.name} is not read", f"{other.reader} reads it")


UNREAD = QuantizationMethod(
    "others", ", ".join(dict.fromkeys([*(each.name for each in OTHERS), *METHODS.values()])),
    recognize_unread,
    marks=(
        "codebooks", "weight_scales", "indices", "q_weight", "trellis", "tables2", "dense_weights",
        "forward_hadamard_matrix", "theta", "s_channel", "s", "meta", "bitmask", "weight_scale",
    ),
    read=False,
)  # fmt: skip
