"""Recognize weights of torchao and optimum-quanto."""

from __future__ import annotations

from typing import Any

from ckptkit.compute.packing import TARGET, Packing, ScaleGrid
from ckptkit.core.tensor import Shape, Tensor
from ckptkit.core.tree import Global, Object
from ckptkit.quantized import group as g
from ckptkit.quantized.group import QuantizationMethod, QuantizedWeight, TensorView

# A weight of torchao is an object of a tensor subclass, and contains several tensors.
#
# In a safetensors file, the header contains the class and attributes of each weight.


Data = dict[str, Any]
Inner = dict[str, Tensor]


def recognize_pickled(view: TensorView, name: str, node: Object) -> QuantizedWeight | None:
    """Recognize a pickled object of a torchao class."""
    args, tensor = node.args, node.tensor
    if not isinstance(args, tuple) or len(args) != 4 or tensor is None:
        return None
    _, kind, _, attributes = args
    is_torchao = isinstance(kind, Global) and kind.module.startswith("torchao.")
    if not is_torchao or not isinstance(attributes, dict):
        return None
    named = {key: each for key, each in attributes.items() if isinstance(key, str)}
    inner = {key: each for key, each in named.items() if isinstance(each, Tensor)}
    data = {key: each for key, each in named.items() if key not in inner}
    own = g.dtype_named(tensor.dtype.name)
    group = QuantizedWeight("torchao", "torchao", name, tensor.shape, (name,), own=own)
    made = described(group, kind.name.rpartition(".")[2], data, inner)
    if made.layout is not None and made.shape != tensor.shape:
        made.shape = tensor.shape
        return made.unfit(", which the pickle declares", codes=made.inputs[0])
    return made


def recognize_torchao(view: TensorView, mark: str) -> QuantizedWeight | None:
    """Recognize a pickled weight, or a weight in a safetensors file.

    In a safetensors file, `mark` is the name of its codes, such as ``fc._weight_qdata``.
    """
    node = view.nodes[mark]
    if isinstance(node, Object):
        return recognize_pickled(view, mark, node)
    head, _, last = mark.rpartition("._")
    name = f"{head}.{last}" if head else mark.removeprefix("_")
    name = name.removesuffix("_qdata")
    recorded = view.header(name)
    names, data = recorded.get("_tensor_data_names"), recorded.get("_data")
    if not isinstance(names, list) or not isinstance(data, dict):
        return None
    prefix = mark.removesuffix("qdata")
    found = {str(each): view.get(f"{prefix}{each}") for each in names}
    inner = {each: tensor for each, tensor in found.items() if tensor is not None}
    parts = (mark, *(f"{prefix}{each}" for each in inner if each != "qdata"))
    group = QuantizedWeight("torchao", "torchao", name, view.tensors[mark].shape, parts)
    if len(inner) != len(names):
        return group.refused("some of its tensors are missing", g.ELSEWHERE)
    return described(group, str(recorded.get("_type")), data, inner)


def described(group: QuantizedWeight, kind: str, data: Data, inner: Inner) -> QuantizedWeight:
    """Set the layout of a weight, according to its torchao class, attributes and inner tensors."""
    codes, scale, zero = (inner.get(each) for each in ("qdata", "scale", "zero_point"))
    group.label = f"torchao {kind}"
    given = [*inner, *(key for key, value in data.items() if value is not None)]
    if any("pre_scale" in each for each in given):
        return group.refused(f"the layer also computes with act_pre_scale, {g.NOT_ALONE}")
    if kind not in _KINDS or codes is None or scale is None:
        return group.refused(f"the bytes of {kind} are packed for a GPU kernel", "torchao reads it")
    own = _dtype(data.get("dtype") or data.get("orig_dtype"))
    group.own = g.dtype_named(own) or group.own
    group.shape, form, block = codes.shape, _KINDS[kind], data.get("block_size")
    if isinstance(form, g.BlockForm):
        if type(block) is not int or block <= 0 or codes.dtype.name not in _CODES:
            return group.unfit(f" with a block_size of {block}", codes=codes, scales=scale)
        second = inner.get("per_tensor_scale")  # optional
        form = form._replace(
            width=block, tiled=bool(data.get("is_swizzled_scales")),
            second=form.second if second is not None else "",
        )  # fmt: skip
        return group.in_blocks(form, codes, scale, second)
    grid = _grid(codes.shape, block, scale)
    is_float = kind == "Float8Tensor"
    fits = codes.dtype.name in (g.FLOAT8 if is_float else ("int8",)) and g.is_scale(scale)
    if grid is None or not fits:
        return group.unfit(f" with blocks of {block}", codes=codes, scales=scale)
    size = f"{grid.height}x{grid.width}"
    if is_float:
        return group.flat(f"fp8 {size}", grid, codes, scale)
    word = _dtype(data.get("target_dtype") or "int8")  # 4-bit integers are stored as int8
    label = f"{word if word.startswith(('int', 'uint')) else 'int8'} {size}"
    more = dict.fromkeys(g.IN_TARGET, scale.dtype.name if form == "scale" else TARGET)
    if zero is None:
        return group.flat(label, grid, codes, scale, **more)
    if zero.numel != scale.numel or zero.dtype.name not in ("int8", "int16", "int32", "uint8"):
        return group.unfit(scales=scale, zero_points=zero)
    point = g.numbers(2, zero, grid, dtype=zero.dtype.name)
    return group.flat(label, grid, codes, scale, zero, zero=point, **more)


def _dtype(dtype: Any) -> str:
    """Return the name of a dtype that was stored in JSON or in a pickle."""
    return str(dtype.get("_data") if isinstance(dtype, dict) else dtype).removeprefix("torch.")


def _grid(shape: Shape, block: Any, scale: Tensor) -> ScaleGrid | None:
    """Return the grid for a block size. Return None if the scales do not match the grid.

    `block` contains the block size along each dimension. A block may be larger than the dimension.
    """
    size = g.block_size(block)
    if size is None or len(shape) != 2:
        return None
    height, width = (min(n, most) if most else n for n, most in zip(size, shape, strict=True))
    grid = g.grid_of(shape, height, width)
    return grid if scale.numel == grid.rows * grid.columns else None


# Maps each class to the dtype in which codes and scales are multiplied, or to the block format.
_KINDS: dict[str, str | g.BlockForm] = {
    "Float8Tensor": "float32", "Int8Tensor": TARGET, "IntxUnpackedToInt8Tensor": "scale",
    "MXTensor": g.MX._replace(dtype="float8_e8m0fnu", **g.IN_TARGET),
    "NVFP4Tensor": g.BlockForm(
        "nvfp4 1x{width}", 16, ("float8_e4m3fn", "uint8"), "float8_e4m3fn", "multiply"
    ),
}  # fmt: skip
_CODES = ("uint8", "float4_e2m1fn_x2", *g.FLOAT8)  # dtypes of codes in blocks
TORCHAO = QuantizationMethod(
    "torchao", "torchao Float8, Int8, Intx, MX, NVFP4, also pickled", recognize_torchao,
    endings=("_qdata",), subclasses=True, oracle="torchao 0.18.0",
)  # fmt: skip


# optimum-quanto has int8 codes, FP8 codes, or packed codes of 4 or 2 bits in groups of 128.
#
# The file does not contain the shape of weights with 4 or 2 bits. The number of rows is the size of
# the bias.


# Name components that wrapper modules insert into tensor names, but not into the names in
# quanto_qmap.json.
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_BITS = {"qint4": 4, "qint2": 2}


def recognize_quanto(view: TensorView, mark: str) -> QuantizedWeight | None:
    """Recognize a weight by `mark`, the name of its codes."""
    is_packed = mark.endswith("._data._data")
    name = mark.removesuffix("._data").removesuffix("._data")
    stem = name.removesuffix(".weight")
    codes, scale = view.tensors[mark], view.get(f"{name}._scale", *g.FLOATS)
    if scale is None or (f"{name}._data._data" in view.tensors and not is_packed):
        return None
    parts = (mark, f"{name}._scale", *view.present(name, ("._shift",)))
    dropped, shape = view.present(stem, (".input_scale", ".output_scale")), codes.shape
    group = QuantizedWeight("quanto", "quanto", name, shape, parts, dropped)
    if is_packed:
        return _packed(group, view, stem, codes, scale)
    grid, _ = g.grid_for(shape, scale.shape) or (None, "")
    if len(shape) == 2 and scale.shape == (1, shape[1]):
        grid = grid or g.grid_of(shape, shape[0], 1)
    if grid is None or len(shape) != 2 or codes.dtype.name not in ("int8", *g.FLOAT8):
        return group.unfit(codes=codes, scales=scale)
    word = "int8" if codes.dtype.name == "int8" else "fp8"
    return group.flat(f"quanto {word}", grid, codes, scale, product_dtype=scale.dtype.name)


def _packed(
    group: QuantizedWeight, view: TensorView, stem: str, codes: Tensor, scale: Tensor
) -> QuantizedWeight:
    bare = ".".join(part for part in stem.split(".") if part not in _WRAPPERS)
    entry = view.qmap.get(stem, view.qmap.get(bare))
    bits = _BITS.get(str(entry.get("weights"))) if isinstance(entry, dict) else None
    shift, bias = view.get(f"{group.name}._shift"), view.get(f"{stem}.bias")
    if bits is None:
        return group.refused(
            "its bits are unknown", "put the quanto_qmap.json of the model beside the file"
        )
    if bias is None or len(bias.shape) != 1:
        return group.refused("its shape is unknown: the file contains neither the shape nor a bias")
    if shift is None or shift.shape != scale.shape or len(codes.shape) != 2:
        return group.refused("its tensor _shift is missing or does not have the shape of _scale")
    (rows,), (stored, size), groups = bias.shape, codes.shape, scale.numel
    fits = scale.shape == (groups, 1) and rows and groups % rows == 0
    if not fits or -(-groups * bits // 8) != stored:
        how = f" with {rows} rows, the size of the bias"
        return group.unfit(how, codes=codes, scales=scale)
    grid = ScaleGrid(1, size, groups, 1)
    which = "zero" if shift.dtype.kind == "int" else "bias"
    more = {which: g.numbers(2, shift, grid, dtype=shift.dtype.name)}
    group.shape = (rows, groups // rows * size)
    return group.with_layout(
        f"quanto int{bits} g{size}", Packing("parts", bits), grid, codes, scale, shift,
        shape=(groups, size), subtract_bias=True, product_dtype=scale.dtype.name, **more,
    )  # fmt: skip


QUANTO = QuantizationMethod(
    "quanto", "optimum-quanto", recognize_quanto, marks=("_data",), oracle="optimum-quanto 0.2.7"
)
