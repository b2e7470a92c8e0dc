"""AWQ as AutoAWQ's ``gemm`` has it: eight rows of [out, in] in a word, in their own order."""

from __future__ import annotations

from ckptkit.compute.packing import Blocks, Numbers, Packing, ScaleGrid, ZeroPoint
from ckptkit.quantized import group as g
from ckptkit.quantized.group import Family, Group, View


def recognize(view: View, mark: str) -> Group | None:
    """The module whose codes are called `mark`, if its scales say that words hold eight columns."""
    stem = mark.removesuffix(".qweight")
    codes, scales = view.get(mark), view.get(f"{stem}.scales", *g.FLOATS)
    zeros = view.get(f"{stem}.qzeros")
    if codes is None or scales is None or len(codes.shape) != 2 or f"{stem}.g_idx" in view.tensors:
        return None
    columns, words = codes.shape
    rows = 8 * words
    parts = (mark, *view.present(stem, (".scales", ".qzeros")))
    group = Group("awq", "awq int4", f"{stem}.weight", (rows, columns), parts)
    version = str(view.quantization.get("version") or "gemm").lower()
    if view.method == "awq" and version != "gemm":
        return g.refused(
            group, f"its version is {version}: only gemm has a layout that is not of a kernel"
        )
    if scales.shape[1:] != (rows,):
        return None
    groups = scales.shape[0]
    if (
        codes.dtype.name != "int32"
        or zeros is None
        or zeros.shape != (groups, words)
        or zeros.dtype.name != "int32"
    ):
        return g.refused(group, "its qzeros are missing or do not fit")
    size = view.quantization.get("group_size")
    width = columns if size == -1 or (size is None and groups == 1) else size
    if type(width) is not int or width <= 0 or -(-columns // width) != groups:
        return g.refused(
            group, f"its group_size is not known, or does not give {groups} groups", g.NEEDS_CONFIG
        )
    grid = ScaleGrid(1, width, rows, groups, "columns")
    layout = Blocks(
        1, rows, columns, Packing("interleaved", 4), (Numbers(1, scales.dtype.name, grid),),
        zero=ZeroPoint(2, 4, grid, "interleaved"),
    )  # fmt: skip
    return g.ready(group, f"awq int4 g{width}", layout, codes, scales, zeros)


FAMILY = Family("awq", "AWQ gemm", recognize, marks=("qweight",), oracle="AutoAWQ 0.2.9 (88e4c76)")
