"""optimum-quanto: int8 and FP8 as they are, 4 and 2 bits in parts of bytes, in groups of 128.

Of 4 and 2 bits the shape is not in the file: the rows are those of the bias.
"""

from __future__ import annotations

from math import prod

from ckptkit.compute.packing import Blocks, Numbers, Packing, ScaleGrid
from ckptkit.core.tensor import Tensor
from ckptkit.quantized import group as g
from ckptkit.quantized.group import Family, Group, View

# What wrappers put into names, which the qmap does not have.
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_BITS = {"qint4": 4, "qint2": 2}


def recognize(view: View, mark: str) -> Group | None:
    """The weight whose codes are called `mark`."""
    packed = mark.endswith("._data._data")
    name = mark.removesuffix("._data").removesuffix("._data")
    stem = name.removesuffix(".weight")
    codes, scale = view.tensors[mark], view.get(f"{name}._scale")
    if (
        scale is None
        or not g.is_scale(scale)
        or (f"{name}._data._data" in view.tensors and not packed)
    ):
        return None
    parts = (mark, f"{name}._scale", *view.present(name, ("._shift",)))
    group = Group(
        "quanto",
        "quanto",
        name,
        codes.shape,
        parts,
        view.present(stem, (".input_scale", ".output_scale")),
    )
    return _packed(group, view, stem, codes, scale) if packed else _plain(group, codes, scale)


def _plain(group: Group, codes: Tensor, scale: Tensor) -> Group:
    shape = codes.shape
    if len(shape) != 2 or codes.dtype.name not in ("int8", *g.FLOAT8):
        return g.refused(group, f"its codes are {codes.dtype} {g.shown(shape)}")
    if scale.numel == 1:
        grid = g.whole(shape)
    elif scale.shape == (shape[0], 1):
        grid = g.grid_of(shape, 1, shape[1])
    elif scale.shape == (1, shape[1]):
        grid = g.grid_of(shape, shape[0], 1)
    else:
        return g.refused(group, f"scales of {g.shown(scale.shape)} do not fit {g.shown(shape)}")
    table = None if codes.dtype.name == "int8" else codes.dtype.name
    dtype = scale.dtype.name
    layout = g.flat(
        shape, 8, (Numbers(1, dtype, grid),), table=table, signed=table is None, product_dtype=dtype
    )
    return g.ready(group, f"quanto {'int8' if table is None else 'fp8'}", layout, codes, scale)


def _packed(group: Group, view: View, stem: str, codes: Tensor, scale: Tensor) -> Group:
    bare = ".".join(part for part in stem.split(".") if part not in _WRAPPERS)
    entry = view.qmap.get(stem, view.qmap.get(bare))
    bits = _BITS.get(str(entry.get("weights"))) if isinstance(entry, dict) else None
    shift, bias = view.get(f"{group.name}._shift"), view.get(f"{stem}.bias")
    if bits is None:
        return g.refused(
            group, "its bits are not known", "put the quanto_qmap.json of the model beside the file"
        )
    if bias is None or len(bias.shape) != 1:
        return g.refused(
            group, "its shape is not in the file, and it has no bias that would tell the rows"
        )
    if (
        shift is None
        or shift.shape != scale.shape
        or len(scale.shape) != 2
        or len(codes.shape) != 2
    ):
        return g.refused(group, "its _shift is missing or does not fit")
    (rows,) = bias.shape
    size = codes.shape[1]
    groups = scale.numel
    if (
        scale.shape != (groups, 1)
        or not rows
        or groups % rows
        or -(-groups * bits // 8) != codes.shape[0]
    ):
        return g.refused(group, f"scales of {g.shown(scale.shape)} do not fit {rows} rows")
    shape = (rows, groups // rows * size)
    grid, dtype = ScaleGrid(1, size, groups, 1), scale.dtype.name
    more = {"bias": Numbers(2, shift.dtype.name, grid), "subtract_bias": True}
    if shift.dtype.kind == "int":
        more = {"zero": Numbers(2, shift.dtype.name, grid)}
    layout = Blocks(
        1, groups, size, Packing("parts", bits), (Numbers(1, dtype, grid),), product_dtype=dtype,
        **more,  # type: ignore[arg-type]
    )  # fmt: skip
    assert prod(shape) == groups * size
    group = Group(group.family, group.label, group.name, shape, group.parts, group.dropped)
    return g.ready(group, f"quanto int{bits} g{size}", layout, codes, scale, shift)


FAMILY = Family(
    "quanto", "optimum-quanto", recognize, marks=("_data",), oracle="optimum-quanto 0.2.7"
)
