"""Recognize weights of GPTQ, AWQ, HQQ, bitsandbytes and gpt-oss."""

from __future__ import annotations

from math import prod
from typing import Any

from ckptkit.compute.packing import Numbers, Packing, ScaleGrid, ZeroPoint
from ckptkit.core.tensor import Tensor
from ckptkit.quantized import group as g
from ckptkit.quantized.group import QuantizationMethod, QuantizedWeight, TensorView

# GPTQ has integer codes of 2, 3, 4 or 8 bits.
#
# The codes are a transposed matrix [in, out]. Consecutive codes of a column are packed into an
# int32 element. ``g_idx`` contains the group of each input feature. Each zero point is stored
# minus 1, unless ``checkpoint_format`` is ``gptq_v2``. AutoRound writes the same files.


_BITS = (2, 3, 4, 8)
_METHODS = ("gptq", "auto-round", "intel/auto-round", "autoround", "auto_gptq")
_PACKING = ("auto_round:auto_gptq", "auto_gptq")
# ckptkit uses this table for files without a configuration. If all bytes of a tensor of zero points
# equal a key, the value is the number that must be added to each stored zero point.
_SYMMETRIC = {b"\x77": 1, b"\x88": 0}
_SMALL = 1 << 20


def recognize_gptq(view: TensorView, mark: str) -> QuantizedWeight | None:
    """Recognize a weight by `mark`, the name of its codes.

    Return None unless the shape of the scales shows that elements are packed as in GPTQ.
    """
    stem = mark.removesuffix(".qweight")
    codes, scales = view.get(mark), view.get(f"{stem}.scales", *g.FLOATS)
    if codes is None or scales is None or len(codes.shape) != 2 or len(scales.shape) != 2:
        return None
    (words, rows), groups = codes.shape, scales.shape[0]
    if scales.shape[1] != rows:
        return None
    zeros, index = view.get(f"{stem}.qzeros"), view.get(f"{stem}.g_idx", "int32")
    parts = (mark, *view.present(stem, (".scales", ".qzeros", ".g_idx")))
    group = QuantizedWeight("gptq", "gptq", f"{stem}.weight", (), parts)
    if zeros is None:
        return group.refused("its qzeros are missing")
    bits, odd = divmod(zeros.shape[-1] * 32, rows)
    fits = codes.dtype.name == zeros.dtype.name == "int32" and not odd and bits in _BITS
    group.shape = (rows, words * 32 // (bits or 32))
    if not fits or zeros.shape != (groups, rows * bits // 32):
        how = " with codes of 2, 3, 4 or 8 bits"
        return group.unfit(how, qweight=codes, scales=scales, qzeros=zeros)
    group.label = f"gptq int{bits}"
    config = view.quantization
    form = str(config.get("checkpoint_format") or "gptq")
    if config.get("is_marlin_format") and form == "gptq":
        form = "marlin"
    supported = (
        ("checkpoint_format", form, ("gptq", "gptq_v2")),
        ("pack_dtype", str(config.get("pack_dtype") or "int32"), ("int32",)),
        ("packing_format", str(config.get("packing_format") or _PACKING[0]), _PACKING),
    )
    for key, value, known in supported:
        if value not in known:
            return group.refused(
                f"its {key} is {value}, but ckptkit supports only {' and '.join(known)}"
            )
    add = None  # the number to add to each stored zero point
    if view.method in _METHODS or (not view.method and "bits" in config):
        add = 0 if form == "gptq_v2" else 1
    elif bits == 4 and (data := view.read(f"{stem}.qzeros", _SMALL)):
        add = _SYMMETRIC.get(bytes(set(data)))
    if add is None:
        return group.refused(
            "its checkpoint_format is unknown: gptq stores zero points minus 1, gptq_v2 does not",
            g.NEEDS_CONFIG,
        )
    packing = Packing("columns", bits, stride=words)
    return _in_groups(group, view, packing, codes, scales, zeros, index, add=add)


def _in_groups(
    group: QuantizedWeight, view: TensorView, packing: Packing, codes: Tensor, scales: Tensor,
    zeros: Tensor, index: Tensor | None = None, **zero: Any,
) -> QuantizedWeight:  # fmt: skip
    """Set the layout of a weight whose columns form groups of equal size.

    `index` contains the group of each column. Refuse the weight if the configuration contradicts
    the number of groups.
    """
    (rows, columns), groups = group.shape, scales.shape[0]
    size = view.quantization.get("group_size")
    width = columns if size == -1 or (size is None and groups == 1) else size
    fits = type(width) is int and width > 0 and -(-columns // width) == groups
    if index is not None:
        width, fits = width if fits else columns, index.numel == columns
    if not fits:
        return group.refused(
            f"its group_size is unknown, or does not result in {groups} groups", g.NEEDS_CONFIG
        )
    assert type(width) is int
    grid = ScaleGrid(1, width, rows, groups, "columns")
    return group.with_layout(
        group.label + ("" if index is not None and width == columns else f" g{width}"), packing,
        grid, codes, scales, zeros, *(() if index is None else (index,)),
        zero=ZeroPoint(2, packing.bits, grid, **zero), index=0 if index is None else 3,
    )  # fmt: skip


GPTQ = QuantizationMethod(
    "gptq", "GPTQ, AutoRound", recognize_gptq,
    marks=("qweight",), oracle="GPTQModel f4c327a (7.3.4)",
)  # fmt: skip


# AWQ in the ``gemm`` format of AutoAWQ has integer codes of 4 bits.
#
# The codes are a transposed matrix [in, out]. An int32 element contains the codes of eight
# consecutive output features, in a special order.


def recognize_awq(view: TensorView, mark: str) -> QuantizedWeight | None:
    """Recognize a weight by `mark`, the name of its codes.

    Return None unless the shape of the scales shows that elements are packed as in AWQ.
    """
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
        return group.refused(
            f"its version is {version}, the layout of a GPU kernel; ckptkit supports only gemm"
        )
    if scales.shape[1:] != (rows,):
        return None
    if zeros is None:
        return group.refused("its qzeros are missing")
    is_packed = codes.dtype.name == zeros.dtype.name == "int32"
    if not is_packed or zeros.shape != (scales.shape[0], words):
        return group.unfit(qweight=codes, scales=scales, qzeros=zeros)
    packing = Packing("interleaved", 4)
    return _in_groups(group, view, packing, codes, scales, zeros, kind="interleaved")


AWQ = QuantizationMethod(
    "awq", "AWQ gemm", recognize_awq, marks=("qweight",), oracle="AutoAWQ 0.2.9 (88e4c76)"
)


# HQQ has codes of 1, 2, 3, 4 or 8 bits, in groups along one of two axes. Zero points are floats.


_SETTINGS = (
    ".shape", ".axis", ".group_size", ".nbits", ".channel_wise", ".compute_dtype",
    ".encoded_state_dict", ".offload_meta", ".optimize", ".packing", ".quant_scale", ".quant_zero",
    ".round_zero", ".stores_quant_config", ".unpack_view_dtype", ".view_as_float",
    ".scale_q", ".zero_q", ".meta_scale", ".meta_zero",
)  # fmt: skip
_PACKED = {8: "8bit_u8", 4: "4bit_u8", 3: "3bit_32", 2: "2bit_u8", 1: "1bit_u8"}


def recognize_hqq(view: TensorView, mark: str) -> QuantizedWeight | None:
    """Recognize a weight by `mark`, the name of its codes."""
    stem = mark.removesuffix(".W_q")
    codes, scale, zero = view.tensors[mark], view.get(f"{stem}.scale"), view.get(f"{stem}.zero")
    parts = (mark, *view.present(stem, (".scale", ".zero")))
    shape, dropped = view.integers(f"{stem}.shape"), view.present(stem, _SETTINGS)
    group = QuantizedWeight("hqq", "hqq", f"{stem}.weight", shape or codes.shape, parts, dropped)
    if view.number(f"{stem}.quant_scale") or view.number(f"{stem}.quant_zero"):
        return group.refused("ckptkit does not support its quantized scales or zero points")
    bits, axis, size = (view.number(f"{stem}.{each}") for each in ("nbits", "axis", "group_size"))
    packing = view.text(f"{stem}.packing")
    if view.number(f"{stem}.view_as_float"):
        return group.refused("its codes are stored as floats (view_as_float)")
    if bits is None or packing != _PACKED.get(bits):
        return group.refused(
            f"its packing is {packing!r} with {bits} bits, which ckptkit does not support"
        )
    if len(shape) != 2 or min(shape) <= 0 or axis not in (0, 1) or scale is None or zero is None:
        return group.refused("its shape, axis, scale or zero is missing or invalid")
    size = size or shape[1 - axis]
    groups = prod(shape) // size
    stored = (groups, size) if axis else (size, groups)
    dtype, each = ("int32", 10) if bits == 3 else ("uint8", 8 // bits)  # codes per element
    fits = scale.numel == zero.numel == groups and groups * size == prod(shape)
    is_whole = codes.dtype.name == dtype and codes.numel == -(-stored[0] // each) * stored[1]
    if not (fits and is_whole and g.is_scale(scale) and scale.dtype == zero.dtype):
        return group.unfit(f" in groups of {size}", codes=codes, scales=scale, zero=zero)
    grid = ScaleGrid(1, size, groups, 1) if axis else ScaleGrid(size, 1, 1, groups)
    return group.with_layout(
        f"hqq int{bits} g{size}",
        Packing("parts", bits, high_first=True) if bits < 8 else Packing("flat", 8), grid, codes,
        scale, zero, shape=stored, zero=g.numbers(2, zero, grid), product_dtype=scale.dtype.name,
    )  # fmt: skip


HQQ = QuantizationMethod("hqq", "HQQ", recognize_hqq, marks=("W_q",), oracle="hqq 0.2.8.post1")


# bitsandbytes has 4-bit codes (nf4, fp4) or int8 codes.
#
# Each block of 4-bit codes has a scale. A block may extend over several rows. Each row of int8
# codes has a scale. The shape of a 4-bit weight is stored only as JSON in a small tensor. Scales
# may themselves be quantized (``nested``).


_INT8_FACTOR = 7.874015718698502e-3  # approximately 1 / 127, as in bitsandbytes


def recognize4(view: TensorView, mark: str) -> QuantizedWeight | None:
    """Recognize a 4-bit weight by `mark`, the name of the tensor that contains JSON."""
    name, _, _ = mark.partition(".quant_state.bitsandbytes__")
    weight = view.get(name)
    if weight is None or name == mark:
        return None
    others = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
    parts = (name, mark, *view.present(name, others))
    group = QuantizedWeight("bnb-4bit", "bnb 4bit", name, weight.shape, parts)
    state = view.json(mark)
    shape, size, kind, wide, offset = (
        state.get(each)
        for each in ("shape", "blocksize", "quant_type", "nested_blocksize", "nested_offset")
    )
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        return group.refused("its quant_state is not JSON with a shape and a blocksize")
    group.label, group.shape, count = f"{kind} {size}", tuple(shape), prod(shape)
    absmax = view.get(f"{name}.absmax", "float32", "uint8")
    table = view.get(f"{name}.quant_map", "float32")
    if kind not in ("nf4", "fp4") or absmax is None or table is None or table.numel != 16:
        return group.refused(
            f"ckptkit requires nf4 or fp4 with absmax and quant_map; its type is {kind!r}"
        )
    fits = type(size) is int and size > 0 and absmax.numel == -(-count // size)
    if not fits or not 0 <= weight.nbytes - -(-count // 2) < weight.dtype.itemsize:
        return group.unfit(f" with blocks of {size}", codes=weight, absmax=absmax)
    assert type(size) is int
    inputs = [weight, absmax, table]
    scales = [Numbers(1, "float32", ScaleGrid(1, size, 1, absmax.numel))]
    if absmax.dtype.name == "uint8":
        nested = view.get(f"{name}.nested_absmax", "float32")
        codes = view.get(f"{name}.nested_quant_map", "float32")
        is_given = type(wide) is int and wide > 0 and type(offset) is float
        if nested is None or codes is None or not is_given:
            return group.refused("its absmax is quantized, but the nested tensors are missing")
        assert type(wide) is int and type(offset) is float
        if nested.numel != -(-absmax.numel // wide) or codes.numel != 256:
            how = f" with blocks of {size} in blocks of {wide}"
            return group.unfit(how, absmax=absmax, nested_absmax=nested, nested_quant_map=codes)
        inputs += [nested, codes]
        grid = ScaleGrid(1, size * wide, 1, nested.numel)
        scales = [
            Numbers(1, "map", scales[0].grid, map=4),
            Numbers(3, "float32", grid, add=offset),
        ]
    group.own = g.dtype_named(state.get("dtype"))
    return group.with_layout(
        group.label, Packing("flat", 4, high_first=True), tuple(scales), *inputs, shape=(1, count),
        table="map-signed" if kind == "fp4" else "map", map=2,
    )  # fmt: skip


def recognize8(view: TensorView, mark: str) -> QuantizedWeight | None:
    """Recognize an int8 weight by `mark`, the name of its scales."""
    stem = mark.removesuffix(".SCB")
    name = f"{stem}.weight"
    weight, scale = view.get(name, "int8"), view.get(mark, "float32")
    if weight is None or scale is None:
        return None
    dropped, shape = view.present(stem, (".weight_format",)), weight.shape
    group = QuantizedWeight("bnb-int8", "bnb int8", name, shape, (name, mark), dropped)
    form = view.number(f"{stem}.weight_format") if dropped else 0
    if form != 0:
        return group.refused(f"its weight_format is {form}, but ckptkit supports only 0 (row)")
    if len(shape) != 2 or scale.shape != shape[:1]:
        return group.unfit(SCB=scale)
    grid = g.grid_of(shape, 1, shape[1])
    return group.flat("int8 row", grid, weight, scale, factor=_INT8_FACTOR)


BITSANDBYTES = (
    QuantizationMethod(
        "bnb-4bit", "bitsandbytes 4 bit (nf4, fp4), also with nested scales", recognize4,
        marks=("bitsandbytes__nf4", "bitsandbytes__fp4"), oracle="bitsandbytes 0.50.2",
    ),
    QuantizationMethod(
        "bnb-int8", "bitsandbytes int8", recognize8, marks=("SCB",), oracle="bitsandbytes 0.50.2"
    ),
)  # fmt: skip


# MXFP4 of gpt-oss. Tensors have the names of gpt-oss, or of transformers.
#
# A block of 32 codes has 16 bytes and an exponent. Codes and exponents are combined by ldexp, so
# 0.5 times 2**128 is finite. transformers stores transposed weights: [experts, in, out].


_MXFP4 = g.BlockForm("mxfp4 1x32", 32, ("uint8",), "ldexp")


def recognize_gpt_oss(view: TensorView, mark: str) -> QuantizedWeight | None:
    """Recognize a weight by `mark`, the name of its codes."""
    ending = "_blocks" if mark.endswith("_blocks") else ".blocks"
    name = mark.removesuffix(ending)
    other = name + ending.replace("blocks", "scales")
    codes, scales = view.get(mark, "uint8"), view.get(other, "uint8")
    if codes is None or len(codes.shape) < 3 or codes.shape[-1] != 16:
        return None
    *batch, rows, groups, _ = codes.shape
    columns = 32 * groups
    shape = (*batch, rows, columns)
    group = QuantizedWeight("mxfp4", "mxfp4", name, shape, (mark, *view.present("", (other,))))
    if scales is None or scales.shape != codes.shape[:-1]:
        return group.refused(
            f"its scales ({other}) are missing or do not fit the codes", g.ELSEWHERE
        )
    if ending == ".blocks":
        return group.in_blocks(_MXFP4, codes, scales, packing=Packing("flat", 4))
    group.shape = (*batch, columns, rows)
    scale = Numbers(1, "ldexp", ScaleGrid(32, 1, groups, rows, "columns"))
    packing = Packing("turned", 4)
    return group.with_layout("mxfp4 1x32", packing, (scale,), codes, scales, table="e2m1")


GPT_OSS = QuantizationMethod(
    "mxfp4", "MXFP4 of gpt-oss", recognize_gpt_oss, marks=("blocks",), endings=("_blocks",),
    oracle="transformers 5.23.0, gpt-oss 7b58334",
)  # fmt: skip
