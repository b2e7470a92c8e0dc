"""GPTQ: integers of 2, 3, 4 or 8 bits packed down the columns of [in, out], groups in ``g_idx``.

Zero points are stored less one, unless ``checkpoint_format`` is ``gptq_v2``. Files of AutoRound are
the same.
"""

from __future__ import annotations

from ckptkit.compute.packing import Blocks, Numbers, Packing, ScaleGrid, ZeroPoint
from ckptkit.core.tensor import Tensor
from ckptkit.quantized import group as g
from ckptkit.quantized.group import Family, Group, View

_BITS = (2, 3, 4, 8)
_METHODS = ("gptq", "auto-round", "intel/auto-round", "autoround", "auto_gptq")
_PACKING = ("auto_round:auto_gptq", "auto_gptq")
_SYMMETRIC = {b"\x77": 1, b"\x88": 0}  # all zero points alike: stored less one, or as they are
_SMALL = 1 << 20


def recognize(view: View, mark: str) -> Group | None:
    """The module whose codes are called `mark`, if its scales say that words go down columns."""
    stem = mark.removesuffix(".qweight")
    codes, scales = view.get(mark), view.get(f"{stem}.scales", *g.FLOATS)
    if codes is None or scales is None or len(codes.shape) != 2 or len(scales.shape) != 2:
        return None
    if scales.shape[1] != codes.shape[1]:
        return None
    zeros, index = view.get(f"{stem}.qzeros"), view.get(f"{stem}.g_idx", "int32")
    parts = (mark, *view.present(stem, (".scales", ".qzeros", ".g_idx")))
    group = Group("gptq", "gptq", f"{stem}.weight", (), parts)
    if codes.dtype.name != "int32" or zeros is None or zeros.dtype.name != "int32":
        return g.refused(group, "its words are not of 32 bits, or it has no qzeros")
    return _with_bits(group, view, codes, scales, zeros, index)


def _with_bits(
    group: Group, view: View, codes: Tensor, scales: Tensor, zeros: Tensor, index: Tensor | None
) -> Group:
    words, rows = codes.shape
    bits, odd = divmod(zeros.shape[-1] * 32, rows)
    if odd or bits not in _BITS or zeros.shape != (scales.shape[0], rows * bits // 32):
        return g.refused(
            group, f"qzeros of {g.shown(zeros.shape)} fit no packing of 2, 3, 4 or 8 bits"
        )
    columns = words * 32 // bits
    group = Group(group.family, f"gptq int{bits}", group.name, (rows, columns), group.parts)
    if (problem := _packing(view)) is not None:
        return g.refused(group, problem)
    add = _version(view, group, bits)
    if add is None:
        return g.refused(
            group,
            "whether its zero points are stored less one (gptq) or not (gptq_v2) is not known",
            g.NEEDS_CONFIG,
        )
    width = _group_size(view, columns, scales.shape[0], index)
    if width is None:
        return g.refused(
            group,
            f"its group_size is not known, or does not give {scales.shape[0]} groups",
            g.NEEDS_CONFIG,
        )
    grid = ScaleGrid(1, width, rows, scales.shape[0], "columns")
    zero = ZeroPoint(2, bits, grid, add=add)
    inputs = (codes, scales, zeros) if index is None else (codes, scales, zeros, index)
    layout = Blocks(
        1, rows, columns, Packing("columns", bits, stride=words),
        (Numbers(1, scales.dtype.name, grid),),
        zero=zero, index=0 if index is None else 3,
    )  # fmt: skip
    label = f"gptq int{bits}" + ("" if index is not None and width == columns else f" g{width}")
    return g.ready(group, label, layout, *inputs)


def _packing(view: View) -> str | None:
    """Return the error in the packing that the configuration names, if there is one."""
    config = view.quantization
    form = str(config.get("checkpoint_format") or "gptq")
    if config.get("is_marlin_format") or form not in ("gptq", "gptq_v2"):
        name = form if form != "gptq" else "marlin"
        return f"its checkpoint_format is {name}, the layout of a kernel"
    if str(config.get("pack_dtype") or "int32") != "int32":
        return f"its pack_dtype is {config['pack_dtype']}"
    packing = str(config.get("packing_format") or _PACKING[0])
    return None if packing in _PACKING else f"its packing_format is {packing}"


def _version(view: View, group: Group, bits: int) -> int | None:
    """Return the number to add to stored zero points, None if nothing tells."""
    if view.method in _METHODS or (not view.method and "bits" in view.quantization):
        return 0 if view.quantization.get("checkpoint_format") == "gptq_v2" else 1
    zeros = group.name.removesuffix(".weight") + ".qzeros"
    data = view.read(zeros, _SMALL) if bits == 4 else None
    return _SYMMETRIC.get(bytes(set(data))) if data else None


def _group_size(view: View, columns: int, groups: int, index: Tensor | None) -> int | None:
    """Columns of a group."""
    if index is not None and index.numel != columns:
        return None
    size = view.quantization.get("group_size")
    if type(size) is int and (size == -1 or size > 0):
        width = columns if size == -1 else size
        if -(-columns // width) == groups:
            return width
        return columns if index is not None else None
    return columns if index is not None or groups == 1 else None


FAMILY = Family(
    "gptq", "GPTQ, AutoRound", recognize, marks=("qweight",), oracle="GPTQModel f4c327a (7.3.4)"
)
