"""MLX: words of 32 bits, filled from the low bits up, with a scale and a bias for each group.

Of its modes, ``affine`` has biases; ``mxfp4``, ``nvfp4`` and ``mxfp8`` have scales of one byte.
Group size and bits stand in ``config.json`` only, with exceptions for single layers.
"""

from __future__ import annotations

from typing import Any

from ckptkit.compute.packing import Blocks, Numbers, Packing
from ckptkit.core.tensor import Shape, Tensor
from ckptkit.quantized import group as g
from ckptkit.quantized.group import Family, Group, View

_MODES = {"mxfp4": (32, 4, "e2m1", "exponent"), "nvfp4": (16, 4, "e2m1", "float8_e4m3fn"),
          "mxfp8": (32, 8, "float8_e4m3fn", "exponent")}  # fmt: skip


def recognize(view: View, mark: str) -> Group | None:
    """The weight of words whose scales are called `mark`."""
    stem = mark.removesuffix(".scales")
    weight, scales = view.get(f"{stem}.weight", "uint32"), view.tensors[mark]
    if weight is None or len(weight.shape) < 2:
        return None
    biases = next(iter(view.present(stem, (".biases", ".qbiases"))), None)
    parts = (f"{stem}.weight", mark, *((biases,) if biases else ()))
    group = Group("mlx", "mlx", f"{stem}.weight", weight.shape, parts)
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
    group = Group("mlx", f"mlx {mode} int{bits}", group.name, shape, parts)
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


def _settings(view: View, stem: str) -> dict[str, Any]:
    """Mode, group size and bits of a layer."""
    config = view.config.get("quantization") or view.quantization
    if not isinstance(config, dict):
        return {}
    own = config.get(stem)
    return {**config, **own} if isinstance(own, dict) else config


def _packing(weight: Tensor, bits: int) -> Packing:
    return Packing("rows", bits, stride=4 * weight.shape[-1])


def _affine(
    group: Group, bits: int, size: int, weight: Tensor, scales: Tensor, bias: Tensor
) -> Group:
    batches, rows, columns = g.matrix(group.shape)
    grid = g.grid_of(group.shape, 1, size)
    layout = Blocks(
        batches, rows, columns, _packing(weight, bits), (Numbers(1, scales.dtype.name, grid),),
        bias=Numbers(2, bias.dtype.name, grid),
    )  # fmt: skip
    return g.ready(group, f"mlx int{bits} g{size}", layout, weight, scales, bias)


def _coded(group: Group, mode: str, shape: Shape, weight: Tensor, scales: Tensor) -> Group:
    size, bits, table, dtype = _MODES[mode]
    numbers = Numbers(1, dtype, g.grid_of(shape, 1, size))
    return g.ready(
        group, f"mlx {mode}", g.flat(shape, bits, (numbers,), table=table), weight, scales
    )


FAMILY = Family(
    "mlx", "MLX: affine, mxfp4, nvfp4, mxfp8", recognize, marks=("scales",), oracle="mlx 0.32.4"
)
