"""ComfyUI: FP8, int8, NVFP4 and MXFP8 of single layers, which JSON in the file or its header names.

Codes and scales are multiplied in the dtype that is asked for. Of NVFP4 the first of two codes is
the high half of a byte, and scales lie in tiles. The shape before padding is not in the file: the
padded one is given.
"""

from __future__ import annotations

from typing import Any

from ckptkit.compute.packing import TARGET, Numbers, ScaleGrid
from ckptkit.core.tensor import Shape, Tensor
from ckptkit.quantized import group as g
from ckptkit.quantized.group import Family, Group, View

_HEADER = "_quantization_metadata"
DROPPED = (".input_scale", ".scale_input", ".comfy_quant")
_MARKER = "scaled_fp8"


def recognize_old(view: View, mark: str) -> Group | None:
    """FP8 with ``scale_weight``, beside a marker of the whole file."""
    stem = mark.removesuffix(".scale_weight")
    weight, scale = view.get(f"{stem}.weight", *g.FLOAT8), view.tensors[mark]
    if weight is None or not g.is_scale(scale):
        return None
    group = Group(
        "comfy",
        "fp8",
        f"{stem}.weight",
        weight.shape,
        (f"{stem}.weight", mark),
        view.present(stem, DROPPED),
    )
    return _fp8(group, weight, scale)


def recognize(view: View, mark: str) -> Group | None:
    """The layer that has a ``comfy_quant`` of its own, or an entry in the header."""
    stem = mark.removesuffix(".weight_scale").removesuffix(".comfy_quant")
    settings = _settings(view, stem)
    weight, scale = view.get(f"{stem}.weight"), view.get(f"{stem}.weight_scale")
    if settings is None or weight is None:
        return None
    parts = (f"{stem}.weight", *view.present(stem, (".weight_scale", ".weight_scale_2")))
    group = Group(
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


def _settings(view: View, stem: str) -> dict[str, Any] | None:
    if f"{stem}.comfy_quant" in view.tensors:
        return view.json(f"{stem}.comfy_quant")
    layers = g.parsed(view.extras.get(_HEADER, "").encode()).get("layers")
    found = layers.get(stem) if isinstance(layers, dict) else None
    return found if isinstance(found, dict) else None


def _fp8(group: Group, weight: Tensor, scale: Tensor) -> Group:
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


def _read_fp8(group: Group, view: View, weight: Tensor, scale: Tensor) -> Group:
    return _fp8(group, weight, scale)


def _read_int8(group: Group, view: View, weight: Tensor, scale: Tensor) -> Group:
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


def _read_nvfp4(group: Group, view: View, weight: Tensor, scale: Tensor) -> Group:
    shape = g.doubled(weight.shape)
    second = view.get(f"{group.name}_scale_2", "float32")
    level = None if second is None else g.single(2, second, shape)
    grid = _tiles(shape, 16, scale)
    group = Group("comfy", "nvfp4", group.name, shape, group.parts, group.dropped)
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


def _read_mxfp8(group: Group, view: View, weight: Tensor, scale: Tensor) -> Group:
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
FAMILIES = (
    Family(
        "comfy",
        "ComfyUI FP8, int8, NVFP4, MXFP8",
        recognize,
        marks=("comfy_quant", "weight_scale"),
        oracle=_ORACLE,
    ),
    Family(
        "comfy-scaled", "ComfyUI scaled FP8", recognize_old, marks=("scale_weight",), oracle=_ORACLE
    ),
)
