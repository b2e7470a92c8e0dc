"""Recognize weights of GPTQ, AWQ, HQQ, bitsandbytes and gpt-oss."""

from __future__ import annotations

from math import prod

from ckptkit.compute.packing import Blocks, Numbers, Packing, ScaleGrid, ZeroPoint
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


def _not_int32(codes: Tensor, zeros: Tensor) -> str | None:
    """Return a reason that names the tensor that is not int32. Return None if both are int32."""
    for name, tensor in (("codes (qweight)", codes), ("qzeros", zeros)):
        if tensor.dtype.name != "int32":
            return f"its {name} are {tensor.dtype.name}, not int32"
    return None


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
    if (problem := _not_int32(codes, zeros)) is not None:
        return group.refused(problem)
    bits, odd = divmod(zeros.shape[-1] * 32, rows)
    if odd or bits not in _BITS or zeros.shape != (groups, rows * bits // 32):
        return group.refused(
            f"qzeros of shape {g.shown(zeros.shape)} do not fit scales of shape "
            f"{g.shown(scales.shape)} with codes of 2, 3, 4 or 8 bits"
        )
    columns = words * 32 // bits
    group.label, group.shape = f"gptq int{bits}", (rows, columns)
    if (problem := _packing(view)) is not None:
        return group.refused(problem)
    config, add = view.quantization, None  # `add` is added to each stored zero point
    if view.method in _METHODS or (not view.method and "bits" in config):
        add = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
    elif bits == 4 and (data := view.read(f"{stem}.qzeros", _SMALL)):
        add = _SYMMETRIC.get(bytes(set(data)))
    if add is None:
        return group.refused(
            "its checkpoint_format is unknown: gptq stores zero points minus 1, gptq_v2 does not",
            g.NEEDS_CONFIG,
        )
    width = _group_size(view, columns, groups)
    if index is not None:  # g_idx contains the group of each column
        width = (width or columns) if index.numel == columns else None
    if width is None:
        return group.refused(
            f"its group_size is unknown, or does not result in {groups} groups", g.NEEDS_CONFIG
        )
    grid = ScaleGrid(1, width, rows, groups, "columns")
    inputs = (codes, scales, zeros) if index is None else (codes, scales, zeros, index)
    layout = Blocks(
        1, rows, columns, Packing("columns", bits, stride=words), (g.numbers(1, scales, grid),),
        zero=ZeroPoint(2, bits, grid, add=add), index=0 if index is None else 3,
    )  # fmt: skip
    label = group.label + ("" if index is not None and width == columns else f" g{width}")
    return group.with_layout(label, layout, *inputs)


def _group_size(view: TensorView, columns: int, groups: int) -> int | None:
    """Return the number of columns in a group.

    Return None if the configuration contradicts the number of groups.
    """
    size = view.quantization.get("group_size")
    width = columns if size == -1 or (size is None and groups == 1) else size
    return width if type(width) is int and width > 0 and -(-columns // width) == groups else None


def _packing(view: TensorView) -> str | None:
    """Return the reason why ckptkit does not support the packing, or None for a supported one."""
    config = view.quantization
    form = str(config.get("checkpoint_format") or "gptq")
    if config.get("is_marlin_format") or form not in ("gptq", "gptq_v2"):
        name = form if form != "gptq" else "marlin"
        return f"ckptkit does not support its checkpoint_format {name}, the layout of a GPU kernel"
    if str(config.get("pack_dtype") or "int32") != "int32":
        return f"its pack_dtype is {config['pack_dtype']}, but ckptkit supports only int32"
    packing = str(config.get("packing_format") or _PACKING[0])
    return (
        None
        if packing in _PACKING
        else f"its packing_format is {packing}, but ckptkit supports only {_PACKING[0]}"
    )


GPTQ = QuantizationMethod(
    "gptq",
    "GPTQ, AutoRound",
    recognize_gptq,
    marks=("qweight",),
    oracle="GPTQModel f4c327a (7.3.4)",
)


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
    groups = scales.shape[0]
    if zeros is None:
        return group.refused("its qzeros are missing")
    if (problem := _not_int32(codes, zeros)) is not None:
        return group.refused(problem)
    if zeros.shape != (groups, words):
        return group.refused(
            f"qzeros of shape {g.shown(zeros.shape)} do not fit scales of shape "
            f"{g.shown(scales.shape)} with codes of 4 bits"
        )
    width = _group_size(view, columns, groups)
    if width is None:
        return group.refused(
            f"its group_size is unknown, or does not result in {groups} groups", g.NEEDS_CONFIG
        )
    grid = ScaleGrid(1, width, rows, groups, "columns")
    layout = Blocks(
        1, rows, columns, Packing("interleaved", 4), (g.numbers(1, scales, grid),),
        zero=ZeroPoint(2, 4, grid, "interleaved"),
    )  # fmt: skip
    return group.with_layout(f"awq int4 g{width}", layout, codes, scales, zeros)


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
    if packing != _PACKED.get(bits or 0, "?"):
        return group.refused(
            f"its packing is {packing!r} with {bits} bits, which ckptkit does not support"
        )
    assert bits is not None
    if len(shape) != 2 or min(shape) <= 0 or axis not in (0, 1) or scale is None or zero is None:
        return group.refused("its shape, axis, scale or zero is missing or invalid")
    size = size or shape[1 - axis]
    groups = prod(shape) // size
    rows, columns = (groups, size) if axis else (size, groups)
    dtype, each = ("int32", 10) if bits == 3 else ("uint8", 8 // bits)  # codes per element
    fits = scale.numel == zero.numel == groups and groups * size == prod(shape)
    is_whole = codes.dtype.name == dtype and codes.numel == -(-rows // each) * columns
    if not (fits and is_whole and g.is_scale(scale) and scale.dtype == zero.dtype):
        return group.refused(
            f"its scales or codes do not fit a weight of shape {g.shown(shape)} in groups of {size}"
        )
    grid = ScaleGrid(1, size, groups, 1) if axis else ScaleGrid(size, 1, 1, groups)
    layout = Blocks(
        1, rows, columns,
        Packing("parts", bits, high_first=True) if bits < 8 else Packing("flat", 8),
        (g.numbers(1, scale, grid),), zero=g.numbers(2, zero, grid),
        product_dtype=scale.dtype.name,
    )  # fmt: skip
    return group.with_layout(f"hqq int{bits} g{size}", layout, codes, scale, zero)


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
    shape, size, kind = (state.get(each) for each in ("shape", "blocksize", "quant_type"))
    is_shape = isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape)
    if not is_shape or type(size) is not int:
        return group.refused("its quant_state is not JSON with a shape and a blocksize")
    assert isinstance(shape, list)
    group.label, group.shape, count = f"{kind} {size}", tuple(shape), prod(shape)
    absmax = view.get(f"{name}.absmax", "float32", "uint8")
    table = view.get(f"{name}.quant_map", "float32")
    if kind not in ("nf4", "fp4") or absmax is None or table is None or table.numel != 16:
        return group.refused(
            f"ckptkit requires nf4 or fp4 with absmax and quant_map; its type is {kind!r}"
        )
    room = weight.nbytes - -(-count // 2)
    if size <= 0 or not 0 <= room < weight.dtype.itemsize or absmax.numel != -(-count // size):
        return group.refused(
            f"its codes or scales do not fit a weight of shape {g.shown(group.shape)} with blocks "
            f"of {size}"
        )
    inputs = [weight, absmax, table]
    scales = [Numbers(1, "float32", ScaleGrid(1, size, 1, absmax.numel))]
    if absmax.dtype.name == "uint8":
        nested = view.get(f"{name}.nested_absmax", "float32")
        codes = view.get(f"{name}.nested_quant_map", "float32")
        wide, offset = state.get("nested_blocksize"), state.get("nested_offset")
        is_given = type(wide) is int and wide > 0 and type(offset) is float
        if nested is None or codes is None or not is_given:
            return group.refused("its absmax is quantized, but the nested tensors are missing")
        assert type(wide) is int and type(offset) is float
        if nested.numel != -(-absmax.numel // wide) or codes.numel != 256:
            return group.refused(
                f"nested_absmax does not fit an absmax of {absmax.numel} elements in blocks of "
                f"{wide}, or nested_quant_map does not have 256 elements"
            )
        inputs += [nested, codes]
        grid = ScaleGrid(1, size * wide, 1, nested.numel)
        scales = [
            Numbers(1, "map", scales[0].grid, map=4),
            Numbers(3, "float32", grid, add=offset),
        ]
    layout = Blocks(
        1, 1, count, Packing("flat", 4, high_first=True), tuple(scales),
        table="map-signed" if kind == "fp4" else "map", map=2,
    )  # fmt: skip
    group.own = g.dtype_named(state.get("dtype"))
    return group.with_layout(group.label, layout, *inputs)


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
        return group.refused(
            f"an SCB of shape {g.shown(scale.shape)} does not fit a weight of shape "
            f"{g.shown(shape)}"
        )
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
            f"its scales ({other}) are missing or do not fit the codes",
            "the scales may be in another shard: give the folder or the index",
        )
    if ending == ".blocks":
        return group.in_blocks(_MXFP4, codes, scales, packing=Packing("flat", 4))
    group.shape = (*batch, columns, rows)
    scale = Numbers(1, "ldexp", ScaleGrid(32, 1, groups, rows, "columns"))
    layout = Blocks(prod(batch), columns, rows, Packing("turned", 4), (scale,), table="e2m1")
    return group.with_layout("mxfp4 1x32", layout, codes, scales)


GPT_OSS = QuantizationMethod(
    "mxfp4", "MXFP4 of gpt-oss", recognize_gpt_oss, marks=("blocks",), endings=("_blocks",),
    oracle="transformers 5.23.0, gpt-oss 7b58334",
)  # fmt: skip
