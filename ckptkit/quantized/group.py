"""Classes and functions that the recognizers of all quantization methods use.

A recognizer is a function that finds the tensors of one quantized weight.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

from ckptkit.compute.arranged import contiguous
from ckptkit.compute.dequantize import Dequantize
from ckptkit.compute.ggml import GgmlDequantize
from ckptkit.compute.operation import stream
from ckptkit.compute.packing import TARGET, Blocks, Numbers, Packing, ScaleGrid
from ckptkit.core.bytesource import ByteSource, Folder, Pending, small_file_beside
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import shape as shape_text
from ckptkit.core.tree import Node

CONFIG = "config.json"
SMALL = 64 << 10  # maximum number of bytes of a tensor that a recognizer reads
NEEDS_CONFIG = "put the config.json of the model beside the file"  # a hint
# The end of the reason why the weights of some layers are not dequantized.
NOT_ALONE = "so the dequantized weight alone would give wrong results"
ELSEWHERE = "the missing tensor may be in another shard: give the folder or the index"  # a hint
FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
FLOATS = ("float32", "bfloat16", "float16", "float64")
EXPONENTS = ("uint8", "float8_e8m0fnu")  # dtypes of scales that are powers of two
# Arguments of `Blocks` for quantization methods that round scales and products to the target dtype.
IN_TARGET: dict[str, Any] = {"scale_dtype": TARGET, "product_dtype": TARGET}


class BlockForm(NamedTuple):
    """A format in which each block of `width` codes has a scale of one byte.

    `stored` lists the possible dtypes of the scales in the file. ckptkit decodes scales as `dtype`.
    If `dtype` is "", ckptkit decodes scales as the dtype in the file. `second` is the operation
    that combines a second scale with the first scale, or "" if there is no second scale. See
    `Blocks` for the other fields.
    """

    label: str
    width: int
    stored: tuple[str, ...] = EXPONENTS
    dtype: str = ""
    second: str = ""
    tiled: bool = False
    high_first: bool = False
    table: str = ""  # "" means e2m1 for 4-bit codes; 8-bit codes have their own dtype
    scale_dtype: str = "float32"
    product_dtype: str = "float32"


MX = BlockForm("mxfp{bits} 1x{width}", 32)
NVFP4 = BlockForm("nvfp4 1x16", 16, ("float8_e4m3fn",), second="multiply")


@dataclass(slots=True, eq=False)
class QuantizedWeight:
    """The tensors of a checkpoint that form one weight.

    ``parts`` contains the names of these tensors, with the codes first. ``dropped`` contains names
    of tensors that the weight does not need, such as scales of activations. ``layout`` and
    ``inputs`` describe how to compute the weight. If ckptkit cannot compute the weight, ``reason``
    and ``hint`` explain why. ``own`` is the dtype before quantization, if the file records it.
    """

    family: str
    label: str
    name: str
    shape: Shape
    parts: tuple[str, ...]
    dropped: tuple[str, ...] = ()
    layout: Blocks | GgmlDequantize | None = None
    inputs: tuple[Tensor, ...] = ()
    reason: str = ""
    hint: str | None = None
    own: str | None = None
    nbytes: int = 0  # number of stored bytes

    @property
    def members(self) -> tuple[str, ...]:
        """Names of all tensors of the weight, including dropped tensors."""
        return (*self.parts, *self.dropped)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def tensor(self, dtype: DType, device: str = "cpu") -> Tensor:
        """Return the weight as a tensor. The weight is dequantized when its bytes are read."""
        assert self.layout is not None
        records = tuple(map(contiguous, self.inputs))
        layout = replace(self.layout, target=dtype.name)
        operation = Dequantize(layout) if isinstance(layout, Blocks) else layout
        record = Pending(operation, records, dtype.nbytes(self.numel))
        return Tensor(Storage(record, device), dtype, self.shape, contiguous_stride(self.shape))

    # A recognizer creates a QuantizedWeight and calls one of these methods to complete the weight.

    def refused(self, reason: str, hint: str | None = None) -> QuantizedWeight:
        """Record why ckptkit cannot dequantize the weight."""
        self.reason, self.hint, self.layout, self.inputs = reason, hint, None, ()
        return self

    def unfit(self, how: str = "", **tensors: Tensor) -> QuantizedWeight:
        """Refuse the weight, because the shapes or dtypes of `tensors` are wrong."""
        told = ", ".join(
            f"{name} of dtype {tensor.dtype} and shape {shape_text(tensor.shape)}"
            for name, tensor in tensors.items()
        ).replace("_", " ")
        return self.refused(f"{told} do not fit a weight of shape {shape_text(self.shape)}{how}")

    def with_layout(
        self, label: str, packing: Packing, scales: ScaleGrid | tuple[Numbers, ...],
        *inputs: Tensor, shape: Shape | None = None, **more: Any,
    ) -> QuantizedWeight:  # fmt: skip
        """Set the label, the layout and the input tensors: the codes, the scales and others.

        `scales` may be the grid of the scales. `shape` is the shape in which the codes are stored,
        if it differs from the shape of the weight. See `Blocks` for `more`.
        """
        if isinstance(scales, ScaleGrid):
            scales = (numbers(1, inputs[1], scales),)
        layout = Blocks(*matrix(shape or self.shape), packing, scales, **more)
        self.label, self.layout, self.inputs = label, layout, inputs
        return self

    def flat(
        self, label: str, grid: ScaleGrid, codes: Tensor, *inputs: Tensor, **more: Any
    ) -> QuantizedWeight:
        """Set a layout with one 8-bit code for each element, and one scale for each block."""
        is_integer = codes.dtype.name == "int8"
        more |= {"table": None if is_integer else codes.dtype.name, "signed": is_integer}
        return self.with_layout(label, Packing("flat", 8), grid, codes, *inputs, **more)

    def in_blocks(
        self, form: BlockForm, codes: Tensor, scale: Tensor, second: Tensor | None = None, *,
        packing: Packing | None = None,
    ) -> QuantizedWeight:  # fmt: skip
        """Set a layout in which each row is divided into blocks.

        Refuse the weight if the scales do not match. The default packing stores codes in the order
        of the elements, with two 4-bit codes in a byte. For 4-bit codes in the default packing, the
        method computes ``shape``. For other codes, ``shape`` must already be the shape of the
        weight.
        """
        if packing is None:
            packing = Packing("flat", 8 if codes.dtype.name in FLOAT8 else 4, form.high_first)
            if packing.bits == 4:
                self.shape = doubled(codes.shape)
        bits, width, shape = packing.bits, form.width, self.shape
        self.label = form.label.format(bits=bits, width=width)
        grid = grid_of(shape, 1, width, "tiles" if form.tiled else "rows")
        batches, rows, columns = matrix(shape)
        fits = len(shape) > 1 and scale.dtype.name in form.stored
        how = f" with blocks of {width}"
        if form.tiled:  # tiles of 128 x 4 scales, with padding
            how += " in tiles of 128x4"
            padded = -(-rows // 128) * 128 * (-(-columns // width // 4) * 4)
            fits = fits and batches == 1 and columns % width == 0 and scale.numel == padded
        else:
            fits = fits and scale.shape == blocks_of(shape, 1, width)
        scales, inputs = [numbers(1, scale, grid, dtype=form.dtype)], [codes, scale]
        if form.second:
            how += ", or its second scale is missing"
            if second is not None:
                scales.append(numbers(2, second, single_block(shape), combine=form.second))
                inputs.append(second)
            fits = fits and second is not None and second.numel in (1, batches)
        if not fits:
            return self.unfit(how, scales=scale)
        return self.with_layout(
            self.label, packing, tuple(scales), *inputs,
            table=form.table or (codes.dtype.name if bits == 8 else "e2m1"),
            scale_dtype=form.scale_dtype, product_dtype=form.product_dtype,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class QuantizationMethod:
    """A quantization method, and the function that recognizes its weights.

    `recognize` is called with a TensorView and the name of a tensor. This name must have one of
    ``marks`` as its last component, or end with one of ``endings``. If ``subclasses`` is True,
    `recognize` is also called for pickled tensor subclasses. ``written`` is the value of
    `--quantize` that selects this method, or "" if ckptkit cannot write this method.
    """

    name: str
    title: str
    recognize: Callable[[TensorView, str], QuantizedWeight | None]
    marks: tuple[str, ...] = ()
    endings: tuple[str, ...] = ()
    subclasses: bool = False
    oracle: str = ""
    read: bool = True
    written: str = ""


@dataclass
class TensorView:
    """Gives recognizers access to names, dtypes, shapes, small tensors and configuration files."""

    ck: Checkpoint
    nodes: Mapping[str, Node]
    tensors: Mapping[str, Tensor]

    def get(self, name: str, *dtypes: str) -> Tensor | None:
        """Return the tensor `name`. Return None if the tensor is missing or has none of `dtypes`.

        Without `dtypes`, any dtype is allowed.
        """
        found = self.tensors.get(name)
        return found if found is not None and (not dtypes or found.dtype.name in dtypes) else None

    def present(self, stem: str, suffixes: Iterable[str]) -> tuple[str, ...]:
        """Return each `stem + suffix` that is the name of a tensor."""
        return tuple(stem + each for each in suffixes if stem + each in self.tensors)

    def read(self, name: str, limit: int = SMALL) -> bytes | None:
        """Return the bytes of a tensor. Return None if the tensor is missing or exceeds `limit`."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.storage is None or tensor.nbytes > limit:
            return None
        return b"".join(stream(contiguous(tensor).locate()))

    def number(self, name: str) -> int | None:
        """Return the element of an integer tensor with one element.

        Return None for any other tensor.
        """
        found = self.integers(name)
        return found[0] if len(found) == 1 else None

    def integers(self, name: str) -> tuple[int, ...]:
        """Return the elements of a small integer tensor. Return () for any other tensor."""
        tensor, data = self.tensors.get(name), self.read(name)
        if tensor is None or data is None or tensor.dtype.kind not in ("int", "bool"):
            return ()
        size, signed = tensor.dtype.itemsize, tensor.dtype.name.startswith("int")
        starts = range(0, len(data), size)
        return tuple(int.from_bytes(data[at : at + size], "little", signed=signed) for at in starts)

    def text(self, name: str) -> str | None:
        """Return the bytes of a small tensor as a string. Return None for any other tensor."""
        data = self.read(name)
        return None if data is None else data.decode("utf-8", "replace")

    def json(self, name: str) -> dict[str, Any]:
        """Parse the bytes of a small tensor as a JSON object. Return {} for invalid bytes."""
        return parsed(self.read(name) or b"")

    def header(self, name: str) -> dict[str, Any]:
        """Parse an entry of the file's header as a JSON object. Return {} for invalid JSON."""
        return parsed(self.ck.extras.get(name, "").encode())

    @cached_property
    def config(self) -> dict[str, Any]:
        """Contents of the file ``config.json`` in the folder of the checkpoint."""
        return read_json_of(self.ck.source, CONFIG)

    @cached_property
    def quantization(self) -> dict[str, Any]:
        """The entry ``quantization_config`` of config.json.

        If this entry is missing, return the entry ``quantization`` of hf_quant_config.json.
        """
        found = quantization_of(self.config)
        if found:
            return found
        older = read_json_of(self.ck.source, "hf_quant_config.json")
        inner = older.get("quantization")
        return {"quant_method": "modelopt", **inner} if isinstance(inner, dict) else {}

    @property
    def method(self) -> str:
        """The entry ``quant_method`` of the configuration, in lower case."""
        method = self.quantization.get("quant_method") or ""
        if not method and "quant_algo" in self.quantization:
            return "modelopt"
        return str(method).lower()

    @cached_property
    def qmap(self) -> dict[str, Any]:
        """Contents of the file ``quanto_qmap.json`` in the folder of the checkpoint."""
        return read_json_of(self.ck.source, "quanto_qmap.json")


def configured(source: ByteSource | Folder | None) -> str:
    """Return the ``quant_method`` in the config.json of a checkpoint, or "" if it is missing."""
    return str(quantization_of(read_json_of(source, CONFIG)).get("quant_method") or "")


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``quantization_config`` of a configuration or of its ``text_config``."""
    for holder in (config, config.get("text_config")):
        found = holder.get("quantization_config") if isinstance(holder, dict) else None
        if isinstance(found, dict):
            return found
    found = config.get("compression_config")
    return found if isinstance(found, dict) else {}


def parsed(data: bytes) -> dict[str, Any]:
    """Parse a JSON object. Return {} if `data` is not a JSON object."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_json_of(source: ByteSource | Folder | None, name: str) -> dict[str, Any]:
    """Read a JSON object from the file `name` in the folder of a checkpoint.

    Return {} if the file is missing or is not a JSON object.
    """
    return parsed(small_file_beside(source, name) or b"")


def with_config(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Checkpoint:
    """Set the configuration of the checkpoint. If the output is a folder, ckptkit writes the
    configuration as config.json."""
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    files = {**dict(checkpoint.companions), CONFIG: text.encode("utf-8", "surrogatepass")}
    return replace(checkpoint, companions=tuple(files.items()))


# Functions for recognizers


def numbers(
    input: int, tensor: Tensor, grid: ScaleGrid, *, dtype: str = "", combine: str = "multiply"
) -> Numbers:
    """Return Numbers for a tensor of scales or zero points.

    The default `dtype` is `scale_dtype(tensor)`. If the tensor has only as many values as one batch
    has blocks, all batches share these values.
    """
    is_shared = tensor.numel == grid.rows * grid.columns
    return Numbers(input, dtype or scale_dtype(tensor), grid, combine, shared=is_shared)


def scale_dtype(tensor: Tensor) -> str:
    """Return the dtype for decoding a tensor of scales. uint8 scales are exponents of 2."""
    return "exponent" if tensor.dtype.name == "uint8" else tensor.dtype.name


def blocks_of(shape: Sequence[int], height: int, width: int) -> Shape:
    """Return the shape of an array with one number for each block of a tensor.

    Blocks extend over the last two dimensions.
    """
    if len(shape) < 2:
        return (-1,)  # matches no shape
    *batch, rows, columns = shape
    return (*batch, -(-rows // height), -(-columns // width))


def matrix(shape: Shape) -> tuple[int, int, int]:
    """Return (batches, rows, columns) for the shape of a tensor with any number of dimensions."""
    if len(shape) < 2:
        return 1, 1, prod(shape)
    return prod(shape[:-2]), shape[-2], shape[-1]


def grid_of(shape: Shape, height: int, width: int, order: str = "rows") -> ScaleGrid:
    """Divide the last two dimensions of a shape into blocks of `height` x `width`."""
    _, rows, columns = matrix(shape)
    return ScaleGrid(height, width, -(-rows // height), -(-columns // width), order)


def single_block(shape: Shape) -> ScaleGrid:
    """Return the grid in which the last two dimensions are a single block."""
    _, rows, columns = matrix(shape)
    return ScaleGrid(max(1, rows), max(1, columns), 1, 1)


def grid_for(
    shape: Shape, scale: Shape, sizes: Iterable[tuple[int, int]] = ()
) -> tuple[ScaleGrid, str] | None:
    """Return the grid for scales of shape `scale`, and the name of the grid.

    There may be one scale for the tensor, one scale for each row, or one scale for each block.
    `sizes` contains the possible block sizes (height, width). Return None if no grid matches.
    """
    if all(n == 1 for n in scale):
        return single_block(shape), "tensor"
    if scale in ((*shape[:-1], 1), shape[:-1]):
        return grid_of(shape, 1, shape[-1]), "channel"
    for height, width in sizes:
        if scale == blocks_of(shape, height, width):
            label = f"{height}x{width}" if height > 1 else f"g{width}"
            return grid_of(shape, height, width), label
    return None


def block_size(given: object) -> tuple[int, int] | None:
    """Return (height, width) of blocks from a configuration. Return None for an invalid value."""
    if isinstance(given, (list, tuple)) and len(given) == 2:
        height, width = given
        if type(height) is int and type(width) is int and height > 0 and width > 0:
            return height, width
    return None


def doubled(shape: Shape) -> Shape:
    """Return the shape of the weight for an array of bytes with two codes in each byte."""
    return (*shape[:-1], 2 * shape[-1]) if shape else shape


def is_scale(tensor: Tensor | None) -> bool:
    """Return True if a tensor may contain floating-point scales."""
    return tensor is not None and tensor.dtype.name in FLOATS


def dtype_named(text: object) -> str | None:
    """Parse a dtype such as ``torch.bfloat16``. Return None unless the dtype is floating-point."""
    name = str(text).removeprefix("torch.")
    return name if name in FLOATS and name in BY_NAME else None
