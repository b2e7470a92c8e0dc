"""torchao and optimum-quanto: tensors whose class says how they are quantized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

from ckptkit.compute.packing import TARGET, Blocks, Numbers, Packing, ScaleGrid
from ckptkit.core.tensor import Shape, Tensor
from ckptkit.core.tree import Global, Object
from ckptkit.quantized import group as g
from ckptkit.quantized.group import QuantizationMethod, QuantizedWeight, TensorView

# torchao: a weight is several tensors, which the header of the file describes, type by type.


Data = dict[str, Any]
Inner = dict[str, Tensor]


def recognize_any(view: TensorView, mark: str) -> QuantizedWeight | None:
    """A weight in a file with a header, or a pickled one."""
    node = view.nodes[mark]
    return (
        recognize_pickled(view, mark, node)
        if isinstance(node, Object)
        else recognize_torchao(view, mark)
    )


def recognize_pickled(view: TensorView, name: str, node: Object) -> QuantizedWeight | None:
    """A subclass of torchao's: (rebuild, class, how it was made, attributes)."""
    args, tensor = node.args, node.tensor
    if (
        not isinstance(args, tuple)
        or len(args) != 4
        or tensor is None
        or not isinstance(args[1], Global)
    ):
        return None
    kind, attributes = args[1], args[3]
    if not kind.module.startswith("torchao.") or not isinstance(attributes, dict):
        return None
    inner = {
        key: each
        for key, each in attributes.items()
        if isinstance(key, str) and isinstance(each, Tensor)
    }
    data = {
        key: each for key, each in attributes.items() if isinstance(key, str) and key not in inner
    }
    group = QuantizedWeight(
        "torchao", "torchao", name, tensor.shape, (name,), own=g.dtype_named(tensor.dtype.name)
    )
    made = described(group, kind.name.rpartition(".")[2], data, inner)
    if made.layout is not None and made.shape != tensor.shape:
        return g.refused(
            made, f"its parts make {g.shown(made.shape)}, and it says {g.shown(tensor.shape)}"
        )
    return made


def recognize_torchao(view: TensorView, mark: str) -> QuantizedWeight | None:
    """The weight whose codes are called `mark`: ``fc._weight_qdata`` for ``fc.weight``."""
    head, _, last = mark.rpartition("._")
    name = (
        f"{head}.{last.removesuffix('_qdata')}"
        if head
        else mark.removeprefix("_").removesuffix("_qdata")
    )
    recorded = g.parsed(view.extras.get(name, "").encode())
    names, data = recorded.get("_tensor_data_names"), recorded.get("_data")
    if not isinstance(names, list) or not isinstance(data, dict):
        return None
    prefix = mark.removesuffix("qdata")
    inner = {
        str(each): view.tensors[f"{prefix}{each}"]
        for each in names
        if f"{prefix}{each}" in view.tensors
    }
    parts = (mark, *(f"{prefix}{each}" for each in inner if each != "qdata"))
    group = QuantizedWeight("torchao", "torchao", name, view.tensors[mark].shape, parts)
    if len(inner) != len(names):
        return g.refused(group, "some of its tensors are missing", "they may be in another shard")
    return described(group, str(recorded.get("_type")), data, inner)


def described(group: QuantizedWeight, kind: str, data: Data, inner: Inner) -> QuantizedWeight:
    """The group, from the type of torchao's tensor, its attributes and the tensors in it."""
    codes, scale = inner.get("qdata"), inner.get("scale")
    group = replace(group, label=f"torchao {kind}")
    if any(
        "pre_scale" in each
        for each in (*inner, *(key for key, value in data.items() if value is not None))
    ):
        return g.refused(
            group,
            "act_pre_scale changes what goes into the layer: the weight alone is not the model's",
        )
    if kind not in _READERS or codes is None or scale is None:
        return g.refused(
            group, f"{kind} has a layout of its own, made for a kernel", "torchao reads it"
        )
    made = _READERS[kind](group, data, codes, scale, inner)
    own = g.dtype_named(_dtype(data.get("dtype") or data.get("orig_dtype")))
    return (
        g.ready(made, made.label, made.layout, *made.inputs, own=own)
        if made.layout is not None
        else made
    )


def _dtype(dtype: Any) -> str:
    """The name of a dtype as JSON has it, or a pickle."""
    return str(dtype.get("_data") if isinstance(dtype, dict) else dtype).removeprefix("torch.")


def _grid(shape: Shape, block: Any, scale: Tensor) -> ScaleGrid | None:
    """The grid of blocks of a size that is given for each dimension."""
    if not isinstance(block, (list, tuple)) or len(block) != len(shape) or len(shape) != 2:
        return None
    if not all(type(n) is int and n > 0 for n in block):
        return None
    height, width = (min(n, size) if size else n for n, size in zip(block, shape, strict=True))
    grid = g.grid_of(shape, height, width)
    return grid if scale.numel == grid.rows * grid.columns else None


def _unfit(group: QuantizedWeight, scale: Tensor) -> QuantizedWeight:
    return g.refused(group, f"scales of {g.shown(scale.shape)} do not fit its blocks")


def _float8(
    group: QuantizedWeight, data: Data, codes: Tensor, scale: Tensor, inner: Inner
) -> QuantizedWeight:
    grid = _grid(codes.shape, data.get("block_size"), scale)
    if grid is None or codes.dtype.name not in g.FLOAT8 or not g.is_scale(scale):
        return _unfit(group, scale)
    layout = g.flat(codes.shape, 8, (Numbers(1, scale.dtype.name, grid),), table=codes.dtype.name)
    return g.ready(group, f"fp8 {_size(grid)}", layout, codes, scale)


def _integers(
    group: QuantizedWeight, data: Data, codes: Tensor, scale: Tensor, inner: Inner, dtype: str
) -> QuantizedWeight:
    grid, zero = _grid(codes.shape, data.get("block_size"), scale), inner.get("zero_point")
    if grid is None or codes.dtype.name != "int8" or not g.is_scale(scale):
        return _unfit(group, scale)
    point = None
    if zero is not None:
        if zero.numel != scale.numel or zero.dtype.name not in ("int8", "int16", "int32", "uint8"):
            return g.refused(group, f"zero points of {zero.dtype} {g.shown(zero.shape)} do not fit")
        point = Numbers(2, zero.dtype.name, grid)
    product = scale.dtype.name if dtype == "scale" else TARGET
    layout = g.flat(
        codes.shape, 8, (Numbers(1, scale.dtype.name, grid),), signed=True, zero=point,
        scale_dtype=product, product_dtype=product,
    )  # fmt: skip
    return g.ready(
        group, f"{dtype_word(data)} {_size(grid)}", layout, codes, scale, *([zero] if zero else [])
    )


def dtype_word(data: Data) -> str:
    """``int4`` of a tensor that holds integers of 4 bits in bytes."""
    name = _dtype(data.get("target_dtype") or "int8")
    return name if name.startswith(("int", "uint")) else "int8"


def _int8(
    group: QuantizedWeight, data: Data, codes: Tensor, scale: Tensor, inner: Inner
) -> QuantizedWeight:
    return _integers(group, data, codes, scale, inner, TARGET)


def _intx(
    group: QuantizedWeight, data: Data, codes: Tensor, scale: Tensor, inner: Inner
) -> QuantizedWeight:
    return _integers(group, data, codes, scale, inner, "scale")


def _mx(
    group: QuantizedWeight, data: Data, codes: Tensor, scale: Tensor, inner: Inner
) -> QuantizedWeight:
    is_fp4 = codes.dtype.name in ("uint8", "float4_e2m1fn_x2")
    shape = g.doubled(codes.shape) if is_fp4 else codes.shape
    numbers = _scales(data, shape, scale, "float8_e8m0fnu")
    if numbers is None or not (is_fp4 or codes.dtype.name in g.FLOAT8):
        return _unfit(group, scale)
    table = "e2m1" if is_fp4 else codes.dtype.name
    layout = g.flat(
        shape, 4 if is_fp4 else 8, (numbers,), table=table, scale_dtype=TARGET, product_dtype=TARGET
    )
    group = replace(group, shape=shape)
    return g.ready(group, f"mxfp{4 if is_fp4 else 8} 1x{numbers.grid.width}", layout, codes, scale)


def _nvfp4(
    group: QuantizedWeight, data: Data, codes: Tensor, scale: Tensor, inner: Inner
) -> QuantizedWeight:
    shape = g.doubled(codes.shape)
    group = replace(group, shape=shape)
    numbers, second = _scales(data, shape, scale, "float8_e4m3fn"), inner.get("per_tensor_scale")
    level = None if second is None else g.single(2, second, shape)
    if (
        numbers is None
        or codes.dtype.name not in ("uint8", "float4_e2m1fn_x2")
        or (second and level is None)
    ):
        return _unfit(group, scale)
    scales, inputs = (
        ((numbers, level), [second])
        if second is not None and level is not None
        else ((numbers,), [])
    )
    layout = g.flat(shape, 4, scales, table="e2m1")
    return g.ready(group, f"nvfp4 1x{numbers.grid.width}", layout, codes, scale, *inputs)


def _scales(data: Data, shape: Shape, scale: Tensor, dtype: str) -> Numbers | None:
    """Scales of one byte for each so many columns, perhaps in tiles."""
    size = data.get("block_size")
    if type(size) is not int or size <= 0 or len(shape) < 2 or shape[-1] % size:
        return None
    if scale.dtype.name not in (dtype, "uint8"):
        return None
    tiled = bool(data.get("is_swizzled_scales"))
    grid = g.grid_of(shape, 1, size, "tiles" if tiled else "rows")
    batches = g.matrix(shape)[0]
    count = (
        -(-grid.rows // 128) * 128 * (-(-grid.columns // 4) * 4)
        if tiled
        else batches * grid.rows * grid.columns
    )
    return Numbers(1, dtype, grid) if scale.numel == count and (batches == 1 or not tiled) else None


def _size(grid: ScaleGrid) -> str:
    return f"{grid.height}x{grid.width}"


_READERS: dict[str, Callable[[QuantizedWeight, Data, Tensor, Tensor, Inner], QuantizedWeight]] = {
    "Float8Tensor": _float8,
    "Int8Tensor": _int8,
    "IntxUnpackedToInt8Tensor": _intx,
    "MXTensor": _mx,
    "NVFP4Tensor": _nvfp4,
}
TORCHAO = QuantizationMethod(
    "torchao", "torchao Float8, Int8, Intx, MX, NVFP4; pickled ones too", recognize_any,
    endings=("_qdata",), subclasses=True, oracle="torchao 0.18.0",
)  # fmt: skip


# optimum-quanto: int8 and FP8 as they are, 4 and 2 bits in parts of bytes, in groups of 128.
#
# Of 4 and 2 bits the shape is not in the file: the rows are those of the bias.


# What wrappers put into names, which the qmap does not have.
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_BITS = {"qint4": 4, "qint2": 2}


def recognize_quanto(view: TensorView, mark: str) -> QuantizedWeight | None:
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
    group = QuantizedWeight(
        "quanto",
        "quanto",
        name,
        codes.shape,
        parts,
        view.present(stem, (".input_scale", ".output_scale")),
    )
    return _packed(group, view, stem, codes, scale) if packed else _plain(group, codes, scale)


def _plain(group: QuantizedWeight, codes: Tensor, scale: Tensor) -> QuantizedWeight:
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


def _packed(
    group: QuantizedWeight, view: TensorView, stem: str, codes: Tensor, scale: Tensor
) -> QuantizedWeight:
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
    group = QuantizedWeight(
        group.family, group.label, group.name, shape, group.parts, group.dropped
    )
    return g.ready(group, f"quanto int{bits} g{size}", layout, codes, scale, shift)


QUANTO = QuantizationMethod(
    "quanto", "optimum-quanto", recognize_quanto, marks=("_data",), oracle="optimum-quanto 0.2.7"
)
