"""bitsandbytes: 4 bits (nf4, fp4) in blocks over the ends of rows; int8 with a scale for each row.

The shape of a weight of 4 bits stands in a small JSON text only. Scales may be quantized themselves
(``nested``).
"""

from __future__ import annotations

from math import prod
from typing import Any

from ckptkit.compute.packing import Blocks, Numbers, Packing, ScaleGrid
from ckptkit.core.tensor import Tensor
from ckptkit.quantized import group as g
from ckptkit.quantized.group import Family, Group, View

_STATES = ("nf4", "fp4")
_INT8_FACTOR = 7.874015718698502e-3  # 1 / 127, as the library writes it


def recognize4(view: View, mark: str) -> Group | None:
    """The weight whose state is the JSON text called `mark`."""
    name, _, _ = mark.partition(".quant_state.bitsandbytes__")
    weight = view.get(name)
    if weight is None or name == mark:
        return None
    others = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
    group = Group(
        "bnb-4bit", "bnb 4bit", name, weight.shape, (name, mark, *view.present(name, others))
    )
    state = view.json(mark)
    shape, size = state.get("shape"), state.get("blocksize")
    if (
        not isinstance(shape, list)
        or not all(type(n) is int and n >= 0 for n in shape)
        or type(size) is not int
    ):
        return g.refused(group, "its quant_state is not JSON text with a shape and a blocksize")
    group = Group(
        group.family, f"{state.get('quant_type')} {size}", name, tuple(shape), group.parts
    )
    return _four_bits(group, view, state, weight)


def _four_bits(group: Group, view: View, state: dict[str, Any], weight: Tensor) -> Group:
    name, count, size = group.name, prod(group.shape), int(state["blocksize"])
    kind = state.get("quant_type")
    absmax, table = (
        view.get(f"{name}.absmax", "float32", "uint8"),
        view.get(f"{name}.quant_map", "float32"),
    )
    if kind not in _STATES or absmax is None or table is None or table.numel != 16:
        return g.refused(group, f"it is {kind!r}, or its absmax or quant_map is missing")
    room = weight.nbytes - -(-count // 2)
    if size <= 0 or not 0 <= room < weight.dtype.itemsize or absmax.numel != -(-count // size):
        return g.refused(
            group,
            f"its quant_state says {g.shown(group.shape)} in blocks of {size}, which does not fit",
        )
    inputs = [weight, absmax, table]
    scales = [Numbers(1, "float32", ScaleGrid(1, size, 1, absmax.numel))]
    if absmax.dtype.name == "uint8":
        nested = view.get(f"{name}.nested_absmax", "float32")
        nested_map = view.get(f"{name}.nested_quant_map", "float32")
        wide, offset = state.get("nested_blocksize"), state.get("nested_offset")
        if (
            nested is None
            or nested_map is None
            or type(wide) is not int
            or wide <= 0
            or not isinstance(offset, float)
        ):
            return g.refused(group, "its absmax is quantized, and what that needs is missing")
        if nested.numel != -(-absmax.numel // wide) or nested_map.numel != 256:
            return g.refused(group, "its nested_absmax does not fit")
        inputs += [nested, nested_map]
        scales = [
            Numbers(1, "map", scales[0].grid, map=4),
            Numbers(3, "float32", ScaleGrid(1, size * wide, 1, nested.numel), add=offset),
        ]
    table_name = "map-signed" if kind == "fp4" else "map"
    layout = Blocks(
        1, 1, count, Packing("flat", 4, high_first=True), tuple(scales), table=table_name, map=2
    )
    return g.ready(group, group.label, layout, *inputs, own=g.dtype_named(state.get("dtype")))


def recognize8(view: View, mark: str) -> Group | None:
    """The weight of int8 whose scales are called `mark`."""
    stem = mark.removesuffix(".SCB")
    weight, scale = view.get(f"{stem}.weight", "int8"), view.get(mark, "float32")
    if weight is None or scale is None:
        return None
    dropped = view.present(stem, (".weight_format",))
    group = Group(
        "bnb-int8", "bnb int8", f"{stem}.weight", weight.shape, (f"{stem}.weight", mark), dropped
    )
    form = view.number(f"{stem}.weight_format") if dropped else 0
    if form != 0:
        return g.refused(
            group, f"its weight_format is {form}: only rows (0) have one meaning in all versions"
        )
    if len(weight.shape) != 2 or scale.shape != weight.shape[:1]:
        return g.refused(
            group, f"SCB of {g.shown(scale.shape)} does not fit {g.shown(weight.shape)}"
        )
    numbers = Numbers(1, "float32", g.grid_of(weight.shape, 1, weight.shape[1]))
    layout = g.flat(weight.shape, 8, (numbers,), signed=True, factor=_INT8_FACTOR)
    return g.ready(group, "int8 row", layout, weight, scale)


FAMILIES = (
    Family(
        "bnb-4bit", "bitsandbytes 4 bit (nf4, fp4), nested too", recognize4,
        marks=("bitsandbytes__nf4", "bitsandbytes__fp4"), oracle="bitsandbytes 0.50.2",
    ),
    Family(
        "bnb-int8", "bitsandbytes int8", recognize8, marks=("SCB",), oracle="bitsandbytes 0.50.2"
    ),
)  # fmt: skip
