"""Integers and floats of 4 and 8 bits: GPTQ, AWQ, HQQ, bitsandbytes, gpt-oss."""

from __future__ import annotations

from math import prod
from typing import Any

from ckptkit.compute.packing import Blocks, Numbers, Packing, ScaleGrid, ZeroPoint
from ckptkit.core.tensor import Tensor
from ckptkit.quantized import group as g
from ckptkit.quantized.group import QuantizationMethod, QuantizedWeight, TensorView

# GPTQ: integers of 2, 3, 4 or 8 bits packed down the columns of [in, out], groups in ``g_idx``.
#
# Zero points are stored less one, unless ``checkpoint_format`` is ``gptq_v2``. Files of AutoRound
# are the same.


_BITS = (2, 3, 4, 8)
_METHODS = ("gptq", "auto-round", "intel/auto-round", "autoround", "auto_gptq")
_PACKING = ("auto_round:auto_gptq", "auto_gptq")
_SYMMETRIC = {b"\x77": 1, b"\x88": 0}  # all zero points alike: stored less one, or as they are
_SMALL = 1 << 20


def recognize_gptq(view: TensorView, mark: str) -> QuantizedWeight | None:
    """The module whose codes are called `mark`, if its scales say that words go down columns."""
    stem = mark.removesuffix(".qweight")
    codes, scales = view.get(mark), view.get(f"{stem}.scales", *g.FLOATS)
    if codes is None or scales is None or len(codes.shape) != 2 or len(scales.shape) != 2:
        return None
    if scales.shape[1] != codes.shape[1]:
        return None
    zeros, index = view.get(f"{stem}.qzeros"), view.get(f"{stem}.g_idx", "int32")
    parts = (mark, *view.present(stem, (".scales", ".qzeros", ".g_idx")))
    group = QuantizedWeight("gptq", "gptq", f"{stem}.weight", (), parts)
    if codes.dtype.name != "int32" or zeros is None or zeros.dtype.name != "int32":
        return g.refused(group, "its words are not of 32 bits, or it has no qzeros")
    return _with_bits(group, view, codes, scales, zeros, index)


def _with_bits(
    group: QuantizedWeight,
    view: TensorView,
    codes: Tensor,
    scales: Tensor,
    zeros: Tensor,
    index: Tensor | None,
) -> QuantizedWeight:
    words, rows = codes.shape
    bits, odd = divmod(zeros.shape[-1] * 32, rows)
    if odd or bits not in _BITS or zeros.shape != (scales.shape[0], rows * bits // 32):
        return g.refused(
            group, f"qzeros of {g.shown(zeros.shape)} fit no packing of 2, 3, 4 or 8 bits"
        )
    columns = words * 32 // bits
    group = QuantizedWeight(
        group.family, f"gptq int{bits}", group.name, (rows, columns), group.parts
    )
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


def _packing(view: TensorView) -> str | None:
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


def _version(view: TensorView, group: QuantizedWeight, bits: int) -> int | None:
    """Return the number to add to stored zero points, None if nothing tells."""
    if view.method in _METHODS or (not view.method and "bits" in view.quantization):
        return 0 if view.quantization.get("checkpoint_format") == "gptq_v2" else 1
    zeros = group.name.removesuffix(".weight") + ".qzeros"
    data = view.read(zeros, _SMALL) if bits == 4 else None
    return _SYMMETRIC.get(bytes(set(data))) if data else None


def _group_size(view: TensorView, columns: int, groups: int, index: Tensor | None) -> int | None:
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


GPTQ = QuantizationMethod(
    "gptq",
    "GPTQ, AutoRound",
    recognize_gptq,
    marks=("qweight",),
    oracle="GPTQModel f4c327a (7.3.4)",
)


# AWQ as AutoAWQ's ``gemm`` has it: eight rows of [out, in] in a word, in their own order.


def recognize_awq(view: TensorView, mark: str) -> QuantizedWeight | None:
    """The module whose codes are called `mark`, if its scales say that words hold eight columns."""
    stem = mark.removesuffix(".qweight")
    codes, scales = view.get(mark), view.get(f"{stem}.scales", *g.FLOATS)
    zeros = view.get(f"{stem}.qzeros")
    if codes is None or scales is None or len(codes.shape) != 2 or f"{stem}.g_idx" in view.tensors:
        return None
    columns, words = codes.shape
    rows = 8 * words
    parts = (mark, *view.present(stem, (".scales", ".qzeros")))
    group = QuantizedWeight("awq", "awq int4", f"{stem}.weight", (rows, columns), parts)
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


AWQ = QuantizationMethod(
    "awq", "AWQ gemm", recognize_awq, marks=("qweight",), oracle="AutoAWQ 0.2.9 (88e4c76)"
)


# HQQ: rows in the halves or quarters of bytes, groups along an axis, floats as zero points.


_SETTINGS = (
    ".shape", ".axis", ".group_size", ".nbits", ".channel_wise", ".compute_dtype",
    ".encoded_state_dict", ".offload_meta", ".optimize", ".packing", ".quant_scale", ".quant_zero",
    ".round_zero", ".stores_quant_config", ".unpack_view_dtype", ".view_as_float",
    ".scale_q", ".zero_q", ".meta_scale", ".meta_zero",
)  # fmt: skip
_PACKED = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}


def recognize_hqq(view: TensorView, mark: str) -> QuantizedWeight | None:
    """The layer whose codes are called `mark`."""
    stem = mark.removesuffix(".W_q")
    codes, scale, zero = view.tensors[mark], view.get(f"{stem}.scale"), view.get(f"{stem}.zero")
    parts = (mark, *view.present(stem, (".scale", ".zero")))
    shape = view.integers(f"{stem}.shape")
    group = QuantizedWeight(
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
    group: QuantizedWeight, bits: int, axis: int, size: int, inputs: tuple[Tensor, Tensor, Tensor]
) -> QuantizedWeight:
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


HQQ = QuantizationMethod("hqq", "HQQ", recognize_hqq, marks=("W_q",), oracle="hqq 0.2.8.post1")


# bitsandbytes: 4 bits (nf4, fp4) in blocks over the ends of rows; int8 with a scale for each row.
#
# The shape of a weight of 4 bits stands in a small JSON text only. Scales may be quantized
# themselves (``nested``).


_STATES = ("nf4", "fp4")
_INT8_FACTOR = 7.874015718698502e-3  # 1 / 127, as the library writes it


def recognize4(view: TensorView, mark: str) -> QuantizedWeight | None:
    """The weight whose state is the JSON text called `mark`."""
    name, _, _ = mark.partition(".quant_state.bitsandbytes__")
    weight = view.get(name)
    if weight is None or name == mark:
        return None
    others = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
    group = QuantizedWeight(
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
    group = QuantizedWeight(
        group.family, f"{state.get('quant_type')} {size}", name, tuple(shape), group.parts
    )
    return _four_bits(group, view, state, weight)


def _four_bits(
    group: QuantizedWeight, view: TensorView, state: dict[str, Any], weight: Tensor
) -> QuantizedWeight:
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


def recognize8(view: TensorView, mark: str) -> QuantizedWeight | None:
    """The weight of int8 whose scales are called `mark`."""
    stem = mark.removesuffix(".SCB")
    weight, scale = view.get(f"{stem}.weight", "int8"), view.get(mark, "float32")
    if weight is None or scale is None:
        return None
    dropped = view.present(stem, (".weight_format",))
    group = QuantizedWeight(
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


BITSANDBYTES = (
    QuantizationMethod(
        "bnb-4bit", "bitsandbytes 4 bit (nf4, fp4), nested too", recognize4,
        marks=("bitsandbytes__nf4", "bitsandbytes__fp4"), oracle="bitsandbytes 0.50.2",
    ),
    QuantizationMethod(
        "bnb-int8", "bitsandbytes int8", recognize8, marks=("SCB",), oracle="bitsandbytes 0.50.2"
    ),
)  # fmt: skip


# MXFP4 of gpt-oss, 16 bytes and an exponent for each 32 numbers, by both sets of names.
#
# Scales have no limit (ldexp): 2**128 times 0.5 is a number. transformers' weights are transposed:
# [experts, in, out].


def recognize_gpt_oss(view: TensorView, mark: str) -> QuantizedWeight | None:
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
    group = QuantizedWeight("mxfp4", "mxfp4", name, shape, (mark, *view.present("", (other,))))
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


GPT_OSS = QuantizationMethod(
    "mxfp4", "MXFP4 of gpt-oss", recognize_gpt_oss, marks=("blocks",), endings=("_blocks",),
    oracle="transformers 5.23.0, gpt-oss 7b58334",
)  # fmt: skip
