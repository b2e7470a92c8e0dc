"""List the tensors, values, objects and totals of a checkpoint without reading tensor bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from operator import lt
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ckptkit import quantized
from ckptkit.core import dtypes
from ckptkit.core.bytesource import ByteSource, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import RUNS_CODE, AmbiguousError, CkptkitError, Notice
from ckptkit.core.limits import LIMITS
from ckptkit.core.tensor import Storage, Tensor, TypedStorage
from ckptkit.core.text import and_more, matcher, plural
from ckptkit.core.tree import (
    ByteString,
    Global,
    Node,
    Object,
    Path,
    StoredBytes,
    StoredList,
    join,
    key_text,
    walk,
)
from ckptkit.core.weights import Weights, inner_tensors, place_of
from ckptkit.lora.reading import Adapter, adapter_of
from ckptkit.pickles.judge import describe, refused_by_weights_only
from ckptkit.pickles.policy import is_harmful

if TYPE_CHECKING:
    from ckptkit.core.checkpoint import PartOf
    from ckptkit.formats.distributed.meshes import Piece
    from ckptkit.quantized import QuantizedWeight


Plain = bool | int | float | str | None
Key = str | int

# Maximum length of a byte string whose content is shown. Of a longer one, only the length is shown.
BYTES_SHOWN = 1_024
# For larger integers, show the number of bits, because Python refuses to print the digits.
EXACT = 1 << 8 * LIMITS.int_bytes
# Number of bytes of a file signature, and minimum number of bytes of an embedded file.
_HEAD, _LEAST = 4, 64
_HEADS = {
    b"PK\3\4": "zip archive",
    **{bytes((0x80, protocol)): "pickle" for protocol in range(2, 6)},
}
_SCALARS = frozenset({bool, float, str, type(None)})


def plain(node: Node) -> tuple[str, Plain] | None:
    """Return (type, value) of a node that is printed as one value, or None for other nodes."""
    kind = node.__class__
    if kind in _SCALARS:
        return ("none" if node is None else kind.__name__), node
    if kind is int:
        return "int", number(node)
    if kind is Object:
        return _object(node)
    if kind is Global:
        is_dtype = node.name in dtypes.BY_NAME or node.name in dtypes.ALIASES
        return ("torch.dtype", str(node)) if node.module == "torch" and is_dtype else None
    if isinstance(node, StoredBytes):
        return "bytes", f"{node.extent.length:,} bytes"
    if isinstance(node, (bytes, bytearray)):
        # Show short byte strings as in Python source, but without b'...'.
        text = f"{len(node):,} bytes" if len(node) > BYTES_SHOWN else repr(bytes(node))[2:-1]
        return "bytes", text
    if isinstance(node, StoredList):
        return "array", str(node)
    if isinstance(node, TypedStorage):
        return "storage", f"{node.elements:,} x {node.dtype or 'byte'} on {node.storage.device}"
    if isinstance(node, (ByteString, complex)):
        return "str" if isinstance(node, ByteString) else "complex", str(node)
    return None


def inner_file(node: Node) -> tuple[str, int] | None:
    """If the node is a byte string that contains a file, return the kind and length of the file.
    Otherwise, return None."""
    if isinstance(node, StoredBytes):
        size, head, extent = node.extent.length, b"", node.extent
        if isinstance(extent, Range):
            head = extent.source.read(extent.offset, min(size, _HEAD))
    elif isinstance(node, (bytes, bytearray)):
        size, head = len(node), bytes(node[:_HEAD])
    else:
        return None
    kind = next((name for start, name in _HEADS.items() if head.startswith(start)), None)
    return (kind, size) if kind is not None and size >= _LEAST else None


def _object(node: Object) -> tuple[str, Plain] | None:
    """Return (type, value) of a NumPy scalar, torch.Size, torch.device or torch.layout, or None."""
    made, value = node.global_, cast("Plain | complex", node.value)
    if made is None:
        return None
    if value is not None:
        if isinstance(value, complex):
            value = str(value)
        return (
            "numpy.scalar" if made.name == "scalar" else str(made),
            number(value) if type(value) is int else value,
        )
    args = node.args if isinstance(node.args, tuple) else ()
    kind = str(made).replace("torch.serialization._get_layout", "torch.layout")
    if kind == "torch.device" and args:
        return kind, ":".join(map(key_text, args))
    if kind in ("torch.layout", "torch.Size") and len(args) == 1:
        is_list = kind == "torch.Size" and isinstance(args[0], list)
        return kind, key_text(tuple(args[0]) if is_list else args[0])
    return None


def number(value: int) -> int | str:
    """Return an integer. If the integer has too many digits to print, return a description."""
    return value if -EXACT < value < EXACT else f"<integer of {value.bit_length():,} bits>"


def key_list(path: Path) -> list[Key]:
    """Return the keys of a path for JSON. Keys that are not strings or integers become strings."""
    return [
        key
        if key.__class__ is str or (key.__class__ is int and -EXACT < key < EXACT)
        else key_text(key)
        for key in path
    ]


def json_number(value: Any) -> Any:
    """Replace NaN and infinities by their names, because JSON cannot represent them.

    Return all other values unchanged.
    """
    if not isinstance(value, float) or math.isfinite(value):
        return value
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


class TensorRow(NamedTuple):
    """A tensor of the checkpoint, or a quantized weight that consists of several tensors.

    `storage` is the index of the storage in file order, or None for a tensor without a storage.
    ``group`` is the quantized weight that contains the tensor. If `is_logical` is true, the row
    represents the complete quantized weight, and ``nbytes`` is the number of stored bytes.
    """

    name: str | None  # key of a weight, or None for any other tensor
    path: Path
    tensor: Tensor
    storage: int | None
    nbytes: int  # number of elements * itemsize, or number of bytes of `local`
    local: Piece | None = None  # for a distributed tensor: the shard in this file
    # The inner tensors of a tensor subclass. The inner tensors also have their own rows.
    inside: tuple[Tensor, ...] = ()
    group: QuantizedWeight | None = None
    is_shared: bool = False  # True if other tensors use the same storage

    @property
    def is_logical(self) -> bool:
        """True if the row represents a complete quantized weight."""
        return self.group is not None and self.storage is None and self.tensor.storage is not None

    @property
    def dtype(self) -> str:
        """The dtype of a tensor, or the quantization type of a quantized weight."""
        return (
            self.group.label
            if self.group is not None and self.is_logical
            else self.tensor.dtype.name
        )

    @property
    def device(self) -> str:
        """The device tag of the tensor. For a shard or a tensor subclass, the tag of the first
        inner tensor."""
        held = self.inside if self.local is None else self.local.local()
        return held[0].device if held else self.tensor.device

    @property
    def place(self) -> str:
        """The path as a string with dots."""
        return join(self.path)

    def memory(self, number: int) -> tuple[object, ...]:
        """Return a dict key that is equal for tied tensors. `number` is the index of the row."""
        if self.storage is None:
            return (number,)
        return self.storage, self.tensor.offset, self.tensor.shape

    @property
    def label(self) -> str:
        """The key of a weight, or the path of any other tensor."""
        return self.place if self.name is None else self.name


class Value(NamedTuple):
    """A value that is not a tensor, and its path.

    `type` is none, bool, int, float, str, bytes, complex, storage, array, or a dotted class name.
    For a long list, ``array`` is the list, and `value` is a string with the first items.
    """

    path: Path
    type: str
    value: Plain
    array: StoredList | None = None

    def exact(self) -> str:
        """Return a string that identifies the value. For a long array, the string contains a
        SHA-256."""
        if self.array is None:
            return repr(self.value)
        if len(self.array) == len(self.array.first):
            return str(self.value)
        whole = repr(list(self.array)).encode(errors="surrogatepass")
        import hashlib  # the import costs 3 ms

        return f"{self.value} (sha256 {hashlib.sha256(whole).hexdigest()[:16]})"


class Opaque(NamedTuple):
    """A class, a function, or a Python object that is neither a tensor nor a simple value."""

    path: Path
    global_: str


class EmbeddedFile(NamedTuple):
    """A byte string that contains a complete file, such as a zip archive or a pickle."""

    path: Path
    kind: str
    nbytes: int


class Totals(NamedTuple):
    """The totals of all tensors.

    - `tensors`: number of all tensors
    - `parameters`: number of elements of the weights, or of all tensors if there are no weights
    - `nbytes`: sum of the bytes of all tensors, as if each tensor were contiguous
    - `storage_nbytes`: sum of the bytes of all storages
    - `unused_nbytes`: number of storage bytes that no tensor uses

    Elements that several tensors share count once as parameters.
    """

    tensors: int
    parameters: int
    nbytes: int
    storage_nbytes: int
    unused_nbytes: int


@dataclass(frozen=True)
class Summary:
    """The content of a checkpoint, as `inspect` shows it.

    `weights` is the path of the state_dict. If there is no state_dict, or if the choice between
    several state_dicts is ambiguous, `weights` is None.
    """

    path: str
    format: str
    size: int
    weights: Path | None
    rows: list[TensorRow] = field(repr=False)
    values: list[Value] = field(repr=False)
    objects: list[Opaque] = field(repr=False)
    globals: tuple[Global, ...]
    extras: Mapping[str, str]
    warnings: tuple[str, ...]
    totals: Totals
    others: tuple[Path, ...] = ()  # paths of other state_dicts
    inner: tuple[EmbeddedFile, ...] = ()
    is_module: bool = False  # True if the weights belong to a pickled module
    part: PartOf | None = None  # set if the file contains only one rank or shard of a checkpoint
    about: str = ""  # sentence about how ckptkit read a folder
    version: str = ""  # version of the file format, or ""
    model: str = ""  # architecture of the model, or ""
    chosen: tuple[str, ...] = ()  # command line options that select the same weights
    words: tuple[str, ...] = ()  # the options in `chosen` that change how ckptkit reads a folder
    adapter: Adapter | None = None  # None if the checkpoint is not a LoRA adapter

    @property
    def refused(self) -> list[str]:
        """The classes and functions of the file that `torch.load(weights_only=True)` refuses."""
        return [str(name) for name in self.globals if refused_by_weights_only(name)]

    def survives_dropping(self) -> bool:
        """Return True if enough data is left after `--objects drop`.

        - If the checkpoint has weights, at least one tensor must be left.
        - If the checkpoint has tensors but no weights, all tensors must be left.
        - If the checkpoint has no tensors, at least one value must be left.
        """
        inside = {place_of(each.path) for each in self.objects}

        def is_outside(path: Path) -> bool:
            keys = place_of(path)
            return not any(keys[:depth] in inside for depth in range(len(keys) + 1))

        rows = [row.tensor.kind != "ndarray" and is_outside(row.path) for row in self.rows]
        if rows:
            return any(rows) if self.weights is not None else all(rows)
        return any(row.value is not None and is_outside(row.path) for row in self.values)

    def in_module(self, path: Path) -> bool:
        """Return True if `path` is inside the pickled module that contains the weights."""
        base = self.weights if self.is_module else None
        return base is not None and len(path) > len(base) and _same(path[: len(base)], base)


def summarize(checkpoint: Checkpoint) -> Summary:
    """Return the summary of `checkpoint` without reading tensor bytes.

    Raises LimitError if the tree is nested too deep. Raises UsageError if the node at the `key` of
    the checkpoint is not a dict of tensors.
    """
    warnings = [*checkpoint.warnings]
    weights = None
    try:
        weights = checkpoint.selection
        if weights is not None and weights.module is not None:
            warnings += weights.module.unread
    except AmbiguousError as error:
        warnings.append(error.message)
    source, size = checkpoint.source, 0  # size of the file or of the complete folder
    if source is not None:
        size = source.size if isinstance(source, ByteSource) else source.nbytes()
    survey = _Survey(weights, checkpoint)
    survey.run(checkpoint.root)
    return Summary(
        path=checkpoint.name or "",
        format=checkpoint.format,
        size=size,
        weights=None if weights is None else weights.path,
        rows=survey.rows,
        values=survey.values,
        objects=survey.objects,
        globals=checkpoint.globals,
        extras=checkpoint.extras,
        warnings=(*warnings, *survey.warnings()),
        totals=_totals(survey.rows, [each.record.length for each in survey.numbers]),
        others=() if weights is None else weights.others,
        is_module=weights is not None and weights.is_module,
        part=checkpoint.part,
        about=checkpoint.about,
        version=checkpoint.version,
        model=checkpoint.model,
        inner=tuple(survey.inner),
        chosen=checkpoint.chosen,
        words=checkpoint.words,
        adapter=adapter_of(checkpoint),
    )


_new = tuple.__new__
_NO_DEPTH = 1 << 62  # larger than the depth of any node


class _Survey:
    """A traversal of a tree that collects the rows of tensors, the values and the objects."""

    def __init__(self, weights: Weights | None, checkpoint: Checkpoint) -> None:
        self.weights = weights
        self.parts = {} if weights is None else quantized.find(checkpoint).by_member
        self.logical = checkpoint.logical if isinstance(checkpoint.logical, dict) else {}
        self.rows: list[TensorRow] = []
        self.values: list[Value] = []
        self.objects: list[Opaque] = []
        self.inner: list[EmbeddedFile] = []
        self.harmful: dict[str, list[Path]] = {}
        self.numbers: dict[Storage, int] = {}  # storage -> index in file order

    def run(self, root: Node) -> None:
        """Visit every node once for each of its paths.

        Skip the nodes below a tensor or value. The traversal is depth-first, so the nodes below a
        node directly follow the node and have longer paths.
        """
        target = self.weights.node if self.weights else self
        name_of = _naming(self.weights)
        shown = _NO_DEPTH  # depth of the tensor or value whose children are skipped
        base: int | None = None  # depth of the state_dict, or None outside the state_dict

        for path, node in walk(root):
            depth = len(path)
            if depth > shown:
                continue
            shown = _NO_DEPTH
            if base is not None and depth <= base:
                base = None
            if node is target and self.weights and _same(path, self.weights.path):
                base = depth
            kind = node.__class__
            if kind is Tensor:
                self._tensor(path, node, None if base is None else name_of(path, base))
            elif kind is Object and node.tensor is not None:
                self._rebuilt(path, node, None if base is None else name_of(path, base))
                shown = depth
            elif (value := plain(node)) is not None:
                if isinstance(node, TypedStorage):
                    self._number(node.storage)
                elif value[0] == "bytes" and (inner := inner_file(node)) is not None:
                    self.inner.append(EmbeddedFile(path, *inner))
                array = node if kind is StoredList else None
                self.values.append(Value(path, *value, array))
                shown = depth
            elif kind is Object or kind is Global:
                made = describe(node if kind is Global else node.callable)
                self.objects.append(Opaque(path, made))
                if kind is Object and is_harmful(node):
                    self.harmful.setdefault(made, []).append(path)
        # Set `is_shared` for the tensors that share a storage with another tensor.
        held = [row.storage for row in self.rows if row.storage is not None]
        if not all(map(lt, held, islice(held, 1, None))):  # most files share no storage
            counts = Counter(held)
            for number, row in enumerate(self.rows):
                if row.storage is not None and counts[row.storage] > 1:
                    self.rows[number] = row._replace(is_shared=True)

    def _rebuilt(self, path: Path, node: Object, name: str | None) -> None:
        """Add the rows of a tensor subclass, or the row of a shard of a distributed tensor.

        The rows of inner tensors follow the row of the tensor subclass. The number of bytes of the
        tensor subclass is the sum of the bytes of the inner tensors.
        """
        assert node.tensor is not None
        piece = None
        if node.global_ is not None and node.global_.name == "_rebuild_from_type_v2":
            from ckptkit.formats.distributed.meshes import piece_of  # few files contain shards

            with suppress(CkptkitError):
                piece = piece_of(node)
        if piece is not None:
            held = piece.local()
            numbers = [self._number(each.storage) for each in held if each.storage is not None]
            nbytes = sum(each.nbytes for each in held)
            number = numbers[0] if numbers else None
            self.rows.append(TensorRow(name, path, node.tensor, number, nbytes, piece))
            return
        self._tensor(path, node.tensor, name)
        if node.tensor.layout == "subclass":
            below = list(inner_tensors(node.args))
            tensors = tuple(tensor for _, tensor in below)
            nbytes = sum(tensor.nbytes for tensor in tensors)
            self.rows[-1] = self.rows[-1]._replace(nbytes=nbytes, inside=tensors)
            for keys, tensor in below:
                self._tensor((*path, *keys), tensor, None)

    def _tensor(self, path: Path, tensor: Tensor, name: str | None) -> None:
        if self.logical and id(tensor) in self.logical:
            _, group = self.logical[id(tensor)]
            self.rows.append(TensorRow(name, path, tensor, None, group.nbytes, group=group))
            return
        storage, numbers = tensor.storage, self.numbers
        number = None if storage is None else numbers.setdefault(storage, len(numbers))
        group = self.parts.get(name) if self.parts and name is not None else None
        row = name, path, tensor, number, tensor.nbytes, None, (), group, False
        self.rows.append(_new(TensorRow, row))  # `_new` is twice as fast as TensorRow(...)

    def _number(self, storage: Storage) -> int:
        return self.numbers.setdefault(storage, len(self.numbers))

    def warnings(self) -> Iterator[str]:
        """Yield warnings about harmful calls, and about weights that ckptkit cannot dequantize."""
        for made, (first, *more) in self.harmful.items():
            place = join(first) or "the root"
            text = f"loading this file with pickle would call {made} (the value at {place})"
            text += and_more(len(more))
            yield Notice(RUNS_CODE, text, call=made, values=1 + len(more))
        reasons: dict[tuple[str, str], set[str]] = {}
        for group in self.parts.values():
            if group.reason:
                reasons.setdefault((group.family, group.reason), set()).add(group.name)
        for (family, reason), names in reasons.items():
            many = plural(len(names), "quantized weight")
            yield f"cannot dequantize {many} ({family}): {reason}"


def _totals(rows: Sequence[TensorRow], free: list[int]) -> Totals:
    """Return the totals of all tensors.

    `free` contains the size of each storage in bytes. The function subtracts the bytes that tensors
    use.
    """
    stored = sum(free) + sum([row.nbytes for row in rows if row.group and row.is_logical])
    contiguous = 0
    for _, _, _, storage, nbytes, _, inside, _, _ in rows:
        if storage is not None:
            free[storage] -= nbytes
        if not inside:
            contiguous += nbytes
    # Count the parameters of the weights. If there are no weights, count the parameters of all
    # tensors. Count shared elements once.
    counted = [row for row in rows if row.name is not None]
    counted = counted or [row for row in rows if not row.inside]
    shared = [row for row in counted if row.is_shared]
    alone = [row for row in counted if not row.is_shared] if shared else counted
    shapes = Counter([row.tensor.shape for row in alone])
    different = {row.memory(0): row.tensor.numel for row in shared}
    return Totals(
        tensors=len(rows),
        parameters=sum([prod(shape) * n for shape, n in shapes.items()]) + sum(different.values()),
        nbytes=contiguous,
        storage_nbytes=stored,
        unused_nbytes=sum([rest for rest in free if rest > 0]),
    )


def _same(path: Path, other: Path) -> bool:
    """Return True if two paths are equal.

    Compare keys that are not strings or integers by identity, because `==` on crafted keys can take
    very long.
    """
    return len(path) == len(other) and all(
        a is b or (a.__class__ is b.__class__ and isinstance(a, (str, int)) and a == b)
        for a, b in zip(path, other, strict=True)
    )


def _naming(weights: Weights | None) -> Callable[[Path, int], str | None]:
    """Return a function that returns the key of the weight at a path.

    The arguments of the function are the path of the weight and the length of the state_dict's
    path. If the node at the path is not a weight, the function returns None.
    """
    nodes = {} if weights is None else weights.nodes
    places = weights.module.places if weights and weights.module is not None else {}

    def by_key(path: Path, base: int) -> str | None:
        return path[base] if len(path) == base + 1 and path[base] in nodes else None

    def by_place(path: Path, base: int) -> str | None:
        below = path[base:]
        return places.get(below) if all(isinstance(key, (str, int)) for key in below) else None

    return by_place if weights and weights.is_module else by_key


def selected(rows: Sequence[TensorRow]) -> tuple[int, int, int]:
    """Return the numbers of tensors, parameters and bytes of the selected rows. Count the
    parameters of tied tensors once."""
    different = {row.tensor.elements_key: row for row in rows}.values()
    parameters = sum(row.tensor.numel for row in different)
    return len(rows), parameters, sum(row.nbytes for row in different)


def matching(rows: list[TensorRow], globs: Sequence[str]) -> list[TensorRow]:
    """Return the rows whose name or path matches a glob. If `globs` is empty, return all rows."""
    if not globs:
        return rows
    matches = matcher(globs)
    return [
        row for row in rows if (row.name is not None and matches(row.name)) or matches(row.place)
    ]
