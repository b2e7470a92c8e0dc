"""HQQ: rows in the halves or quarters of bytes, groups along an axis, floats as zero points."""

from __future__ import annotations

from math import prod

from ckptkit.compute.packing import Blocks, Numbers, Packing, ScaleGrid
from ckptkit.core.tensor import Tensor
from ckptkit.quantized import group as g
from ckptkit.quantized.group import Family, Group, View

_SETTINGS = (
    ".shape", ".axis", ".group_size", ".nbits", ".channel_wise", ".compute_dtype",
    ".encoded_state_dict", ".offload_meta", ".optimize", ".packing", ".quant_scale", ".quant_zero",
    ".round_zero", ".stores_quant_config", ".unpack_view_dtype", ".view_as_float",
    ".scale_q", ".zero_q", ".meta_scale", ".meta_zero",
)  # fmt: skip
_PACKED = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}


def recognize(view: View, mark: str) -> Group | None:
    """The layer whose codes are called `mark`."""
    stem = mark.removesuffix(".W_q")
    codes, scale, zero = view.tensors[mark], view.get(f"{stem}.scale"), view.get(f"{stem}.zero")
    parts = (mark, *view.present(stem, (".scale", ".zero")))
    shape = view.integers(f"{stem}.shape")
    group = Group(
        "hqq", "hqq", f"{stem}.weight", shape or codes.shape, parts, view.present(stem, _SETTINGS)
    )
    if view.number(f"{stem}.quant_scale") or view.number(f"{stem}.quant_zero"):
        return g.refused(group, "its scales or zero points are quantized themselves")
    bits, axis, size = (view.number(f"{stem}.{each}") for each in ("nbits", "axis", "group_size"))
    if (
        bits not in _PACKED
        or view.text(f"{stem}.packing") != _PACKED[bits]
        or view.number(f"{stem}.view_as_float")
    ):
        return g.refused(group, f"its packing is {view.text(f'{stem}.packing')!r}, {bits} bits")
    if len(shape) != 2 or min(shape) <= 0 or axis not in (0, 1) or scale is None or zero is None:
        return g.refused(group, "its shape, axis, scale or zero is missing")
    return _with_groups(group, bits, axis, size or shape[1 - axis], (codes, scale, zero))


def _with_groups(
    group: Group, bits: int, axis: int, size: int, inputs: tuple[Tensor, Tensor, Tensor]
) -> Group:
    codes, scale, zero = inputs
    count = prod(group.shape)
    groups = count // size
    rows, columns = (groups, size) if axis else (size, groups)
    fits = scale.numel == zero.numel == groups and groups * size == count
    word = ("int32", 10) if bits == 3 else ("uint8", 8 // bits)  # dtype, codes in an element
    stored = -(-rows // word[1]) * columns
    whole = codes.dtype.name == word[0] and codes.numel == stored
    if not (fits and whole and g.is_scale(scale) and scale.dtype == zero.dtype):
        return g.refused(
            group, f"its scales or codes do not fit {g.shown(group.shape)} in groups of {size}"
        )
    grid = ScaleGrid(1, size, groups, 1) if axis else ScaleGrid(size, 1, 1, groups)
    dtype = scale.dtype.name
    packing = Packing("parts", bits, high_first=True) if bits < 8 else Packing("flat", 8)
    layout = Blocks(
        1,
        rows,
        columns,
        packing,
        (Numbers(1, dtype, grid),),
        zero=Numbers(2, dtype, grid),
        product_dtype=dtype,
    )
    return g.ready(group, f"hqq int{bits} g{size}", layout, *inputs)


FAMILY = Family("hqq", "HQQ", recognize, marks=("W_q",), oracle="hqq 0.2.8.post1")
