"""The nouns of this room: tensors that are one weight, and what a recognizer may look at."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from ckptkit.compute.arranged import contiguous
from ckptkit.compute.dequantize import Dequantize
from ckptkit.compute.operation import stream
from ckptkit.compute.packing import Blocks, Numbers, Packing, ScaleGrid
from ckptkit.core.bytesource import ByteSource, Folder, Pending
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.core.errors import CkptkitError
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.tree import Node

SMALL = 64 << 10  # bytes of a tensor that a recognizer may read
CONFIG_BYTES = 4 << 20
NEEDS_CONFIG = "put the config.json of the model beside the file"  # a hint
FLOAT8 = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
FLOATS = ("float32", "bfloat16", "float16", "float64")


@dataclass(slots=True, eq=False)
class QuantizedWeight:
    """Tensors of a checkpoint that are one weight.

    ``parts`` are their names, the codes first; ``dropped`` the names of what serves nothing else.
    ``layout`` and ``inputs`` say how the weight follows from them, or ``reason`` why that cannot be
    done, with a ``hint``. ``own`` is the dtype that the file says the weight had.
    """

    family: str
    label: str
    name: str
    shape: Shape
    parts: tuple[str, ...]
    dropped: tuple[str, ...] = ()
    layout: Blocks | None = None
    inputs: tuple[Tensor, ...] = ()
    reason: str = ""
    hint: str | None = None
    own: str | None = None
    nbytes: int = 0  # that are stored

    @property
    def members(self) -> tuple[str, ...]:
        """All names that belong to it."""
        return (*self.parts, *self.dropped)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def tensor(self, dtype: DType, device: str = "cpu") -> Tensor:
        """The weight as a tensor whose bytes are computed when they are needed."""
        assert self.layout is not None
        records = tuple(map(contiguous, self.inputs))
        layout = replace(self.layout, target=dtype.name)
        record = Pending(Dequantize(layout), records, dtype.nbytes(self.numel))
        return Tensor(Storage(record, device), dtype, self.shape, contiguous_stride(self.shape))


@dataclass(frozen=True, slots=True)
class QuantizationMethod:
    """A way of quantizing, and who says what it means.

    `recognize` gets a view and the name of a mark that it has.
    ``marks`` are last components of names, ``endings`` are endings of those; ``subclasses``:
    pickled subclasses of tensors are asked about too. ``written``: the word for `--quantize`.
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


class TensorView:
    """The facts that a recognizer may read: names, dtypes, shapes, small tensors, files beside
    them.
    """

    def __init__(
        self, ck: Checkpoint, nodes: Mapping[str, Node], tensors: Mapping[str, Tensor]
    ) -> None:
        self.nodes = nodes
        self.tensors = tensors
        self.extras = ck.extras
        self._source = ck.source

    def get(self, name: str, *dtypes: str) -> Tensor | None:
        """The tensor of that name, if it is there and of one of the dtypes (if any are named)."""
        found = self.tensors.get(name)
        return found if found is not None and (not dtypes or found.dtype.name in dtypes) else None

    def present(self, stem: str, suffixes: Iterable[str]) -> tuple[str, ...]:
        """Return the names `stem + suffix` that exist."""
        return tuple(stem + each for each in suffixes if stem + each in self.tensors)

    def read(self, name: str, limit: int = SMALL) -> bytes | None:
        """The bytes of a small tensor, None if it is not there or not small."""
        tensor = self.tensors.get(name)
        if tensor is None or tensor.storage is None or tensor.nbytes > limit:
            return None
        return b"".join(stream(contiguous(tensor).locate()))

    def number(self, name: str) -> int | None:
        """The only element of a tensor of integers."""
        tensor, data = self.tensors.get(name), self.read(name)
        if (
            tensor is None
            or data is None
            or tensor.numel != 1
            or tensor.dtype.kind not in ("int", "bool")
        ):
            return None
        return int.from_bytes(data, "little", signed=tensor.dtype.name.startswith("int"))

    def integers(self, name: str) -> tuple[int, ...]:
        """All elements of a small tensor of integers."""
        tensor, data = self.tensors.get(name), self.read(name)
        if tensor is None or data is None or tensor.dtype.kind != "int":
            return ()
        size, signed = tensor.dtype.itemsize, tensor.dtype.name.startswith("int")
        starts = range(0, len(data), size)
        return tuple(int.from_bytes(data[at : at + size], "little", signed=signed) for at in starts)

    def text(self, name: str) -> str | None:
        """The text that a tensor of bytes holds."""
        data = self.read(name)
        return None if data is None else data.decode("utf-8", "replace")

    def json(self, name: str) -> dict[str, Any]:
        """The JSON object that a tensor of bytes holds, an empty one if it holds none."""
        return parsed(self.read(name) or b"")

    @cached_property
    def config(self) -> dict[str, Any]:
        """``config.json`` beside the checkpoint."""
        return read_json_of(self._source, "config.json")

    @cached_property
    def quantization(self) -> dict[str, Any]:
        """``quantization_config``, or what ``hf_quant_config.json`` says."""
        found = quantization_of(self.config)
        if found:
            return found
        older = read_json_of(self._source, "hf_quant_config.json")
        inner = older.get("quantization")
        return {"quant_method": "modelopt", **inner} if isinstance(inner, dict) else {}

    @property
    def method(self) -> str:
        """``quant_method``, in small letters."""
        method = self.quantization.get("quant_method") or ""
        if not method and "quant_algo" in self.quantization:
            return "modelopt"
        return str(method).lower()

    @cached_property
    def qmap(self) -> dict[str, Any]:
        """``quanto_qmap.json`` beside the checkpoint."""
        return read_json_of(self._source, "quanto_qmap.json")


def configured(source: ByteSource | Folder | None) -> str:
    """``quant_method`` of the configuration beside a checkpoint, "" if there is none."""
    return str(quantization_of(read_json_of(source, "config.json")).get("quant_method") or "")


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """``quantization_config`` of a configuration, wherever it stands."""
    for holder in (config, config.get("text_config")):
        found = holder.get("quantization_config") if isinstance(holder, dict) else None
        if isinstance(found, dict):
            return found
    found = config.get("compression_config")
    return found if isinstance(found, dict) else {}


def parsed(data: bytes) -> dict[str, Any]:
    """A JSON object, an empty one for anything else."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_json_of(source: ByteSource | Folder | None, name: str) -> dict[str, Any]:
    """The JSON object in the file `name` beside a checkpoint, an empty one if there is none."""
    return parsed(read_bytes_of(source, name) or b"")


def read_bytes_of(source: ByteSource | Folder | None, name: str) -> bytes | None:
    """The file `name` beside a checkpoint, None if it is not there or far too large."""
    if source is None:
        return None
    folder = source if isinstance(source, Folder) else (source.folder_and_name() or (None,))[0]
    try:
        if folder is None or name not in folder:
            return None
        file = folder.open(name)
        return file.read(0, file.size) if file.size <= CONFIG_BYTES else None
    except CkptkitError:
        return None


# What recognizers have in common


def refused(group: QuantizedWeight, reason: str, hint: str | None = None) -> QuantizedWeight:
    """The group, which cannot be dequantized."""
    return replace(group, reason=reason, hint=hint, layout=None, inputs=())


def ready(
    group: QuantizedWeight, label: str, layout: Blocks, *inputs: Tensor, own: str | None = None
) -> QuantizedWeight:
    """The group, with what is needed to dequantize it."""
    name, shape, own = (
        group.name,
        group.shape,
        own or group.own,
    )  # `replace` takes five times as long
    parts, dropped = group.parts, group.dropped
    return QuantizedWeight(
        group.family, label, name, shape, parts, dropped, layout, inputs, own=own
    )


def scale_dtype(tensor: Tensor) -> str:
    """Return the dtype to read a scale as: bytes are exponents."""
    return "exponent" if tensor.dtype.name == "uint8" else tensor.dtype.name


def blocks_of(shape: Sequence[int], height: int, width: int) -> Shape:
    """The shape of an array with one number for each block of a matrix (or of several)."""
    if len(shape) < 2:
        return (-1,)  # that nothing has
    *batch, rows, columns = shape
    return (*batch, -(-rows // height), -(-columns // width))


def matrix(shape: Shape) -> tuple[int, int, int]:
    """Batches, rows and columns of a tensor of any rank."""
    if len(shape) < 2:
        return 1, 1, prod(shape)
    return prod(shape[:-2]), shape[-2], shape[-1]


def plain(shape: Shape) -> Shape:
    """A shape without dimensions of one element."""
    return tuple(n for n in shape if n != 1)


def grid_of(shape: Shape, height: int, width: int, order: str = "rows") -> ScaleGrid:
    """The grid of blocks of `height` x `width` over the last two dimensions of a shape."""
    _, rows, columns = matrix(shape)
    return ScaleGrid(height, width, -(-rows // height), -(-columns // width), order)


def whole(shape: Shape) -> ScaleGrid:
    """The grid of one block."""
    _, rows, columns = matrix(shape)
    return ScaleGrid(max(1, rows), max(1, columns), 1, 1)


def single(
    input: int, tensor: Tensor, shape: Shape, *, combine: str = "multiply"
) -> Numbers | None:
    """A scale for the whole tensor, or one for each batch; None if it is neither."""
    batches, _, _ = matrix(shape)
    if tensor.numel not in (1, batches):
        return None
    return Numbers(input, tensor.dtype.name, whole(shape), combine, shared=tensor.numel == 1)


def flat(
    shape: Shape, bits: int, scales: tuple[Numbers, ...], *, high_first: bool = False, **more: Any
) -> Blocks:
    """A layout whose codes lie in the order of the elements."""
    batches, rows, columns = matrix(shape)
    return Blocks(batches, rows, columns, Packing("flat", bits, high_first), scales, **more)


def doubled(shape: Shape) -> Shape:
    """The shape of codes of 4 bits, two of which are one stored element."""
    return (*shape[:-1], 2 * shape[-1]) if shape else shape


def is_scale(tensor: Tensor) -> bool:
    """Return whether a tensor can hold floating-point scales."""
    return tensor.dtype.name in FLOATS


def dtype_named(text: object) -> str | None:
    """The dtype of a text such as ``torch.bfloat16``; None if weights are not of it."""
    name = str(text).removeprefix("torch.")
    return name if name in FLOATS and name in BY_NAME else None


def shown(shape: Shape) -> str:
    """``[4, 8]``."""
    return str(list(shape))


def block_label(kind: str, height: int, width: int) -> str:
    """``fp8 128x128``."""
    return f"{kind} {height}x{width}"
