"""MXFP4 of gpt-oss, 16 bytes and an exponent for each 32 numbers, by both sets of names.

Scales have no limit (ldexp): 2**128 times 0.5 is a number. transformers' weights are transposed:
[experts, in, out].
"""

from __future__ import annotations

from ckptkit.compute.packing import Blocks, Numbers, Packing, ScaleGrid
from ckptkit.quantized import group as g
from ckptkit.quantized.group import Family, Group, View


def recognize(view: View, mark: str) -> Group | None:
    """The weight whose codes are called `mark`."""
    ending = "_blocks" if mark.endswith("_blocks") else ".blocks"
    name = mark.removesuffix(ending)
    other = name + ending.replace("blocks", "scales")
    codes, scales = view.get(mark, "uint8"), view.get(other, "uint8")
    if codes is None or len(codes.shape) < 3 or codes.shape[-1] != 16:
        return None
    *batch, rows, groups, _ = codes.shape
    is_turned = ending == "_blocks"
    columns = 32 * groups
    shape = (*batch, columns, rows) if is_turned else (*batch, rows, columns)
    group = Group("mxfp4", "mxfp4", name, shape, (mark, *view.present("", (other,))))
    if scales is None or scales.shape != codes.shape[:-1]:
        return g.refused(
            group, f"its scales ({other}) are missing or do not fit", "they may be in another shard"
        )
    batches, _, _ = g.matrix(shape)
    if is_turned:
        grid = ScaleGrid(32, 1, groups, rows, "columns")
        layout = Blocks(
            batches, columns, rows, Packing("turned", 4), (Numbers(1, "ldexp", grid),), table="e2m1"
        )
    else:
        layout = g.flat(shape, 4, (Numbers(1, "ldexp", g.grid_of(shape, 1, 32)),), table="e2m1")
    return g.ready(group, "mxfp4 1x32", layout, codes, scales)


FAMILY = Family(
    "mxfp4", "MXFP4 of gpt-oss", recognize, marks=("blocks",), endings=("_blocks",),
    oracle="transformers 5.23.0, gpt-oss 7b58334",
)  # fmt: skip
