"""Cast tensors, drop the unused bytes of storages, and apply functions to tensors.

`cast` and `compact` replace complete storages. Therefore, views stay views and tied weights stay
tied. The functions of this module read no elements. A new storage contains an operation of
:mod:`ckptkit.compute`. The operation computes the bytes when the checkpoint is written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

from ckptkit.compute.arranged import contiguous
from ckptkit.compute.numbers import FLOATS, INVERSES, Compute, cast_record
from ckptkit.compute.operation import RecordSlice
from ckptkit.compute.torch_bridge import applied
from ckptkit.core import arguments
from ckptkit.core import dtypes as table
from ckptkit.core.bytesource import Pending
from ckptkit.core.checkpoint import Checkpoint, NoOpWarning, edit
from ckptkit.core.dtypes import DType, DTypeLike
from ckptkit.core.errors import CkptkitError, FormatError, TensorError, UsageError
from ckptkit.core.tensor import Storage, Tensor, TypedStorage
from ckptkit.core.text import flatten, plural, quoted
from ckptkit.core.tree import Node, Object, nodes, rebuild
from ckptkit.core.weights import Weights, as_tensor
from ckptkit.edits import quantized_names
from ckptkit.edits.quantized_names import matching

# Rebuild functions of torch whose result has the dtype of the tensor arguments. All other rebuild
# functions have a dtype argument.
_OF_TENSORS = ("_rebuild_sparse_tensor", "_rebuild_sparse_csr_tensor", "_rebuild_nested_tensor",
               "_rebuild_parameter", "_rebuild_parameter_with_state")  # fmt: skip


DEFAULT = "*"  # the glob whose dtype applies to all other weights


@edit
def cast(ck: Checkpoint, dtypes: DTypeLike | Mapping[str, DTypeLike]) -> Checkpoint:
    """Cast all floating-point weights, or only the weights whose names match a glob.

    `dtypes` is one dtype, or a mapping from globs to dtypes. In ``{"*": "bfloat16", "*norm*":
    "float32"}``, ``*`` is the default, and any other glob overrides the default. The order of the
    globs does not matter. Integer, bool, complex and quantized weights stay unchanged. If tensors
    share a storage, they also share a storage after the cast. If tensors of one storage get
    different dtypes, the tensors get separate storages, with a warning.

    Raises UsageError in these cases:

    - A dtype is unknown.
    - A glob matches nothing.
    - Two globs with different dtypes match the same name.
    - A glob matches codes or scales of quantized weights.
    """
    weights = ck.required
    given = {DEFAULT: dtypes}
    if isinstance(dtypes, Mapping):
        given = dict(arguments.mapping("dtypes", dtypes))
    parsed = {glob: _float(dtype) for glob, dtype in given.items()}
    default = parsed.pop(DEFAULT, None)
    globs = matching(parsed, weights.nodes)
    wanted: dict[str, DType] = {}
    for name in weights.nodes:
        hits = {glob: parsed[glob] for glob, names in globs.items() if name in names}
        if len(set(hits.values())) > 1:
            raise UsageError(
                f"{name!r} matches {quoted(hits)}, which have different dtypes",
                hint="make a glob narrower; a dtype without a glob applies to all other weights",
            )
        if (target := next(iter(hits.values()), default)) is not None:
            wanted[name] = target
    quantized_names.refuse(ck, wanted, "codes and scales of quantized weights cannot be cast")
    targets: dict[int, DType] = {}  # id of a tensor -> new dtype
    left: list[str] = []
    for name, target in wanted.items():
        node = weights.nodes[name]
        tensor = as_tensor(node)
        if tensor is None or tensor.dtype.kind != "float" or tensor.dtype.name == target.name:
            continue
        calls = list(_calls(node))
        is_fixed = any(not each.global_ or each.global_.name not in _OF_TENSORS for each in calls)
        has_numpy = tensor.kind != "ndarray" or target.numpy is not None
        if is_fixed or not has_numpy or not _is_castable(tensor.dtype):
            left.append(name)
            continue
        # A sparse tensor contains an inner tensor with its values. Cast this inner tensor too.
        inner = (as_tensor(each) for call in calls for each in _parts(call))
        same = (each for each in inner if each is not None and each.dtype == tensor.dtype)
        targets.update((id(each), target) for each in (tensor, *same))
    fixed = "not cast, because the pickle stores the dtype of these tensors separately"
    warnings = [f"{fixed}: {quoted(left)}"] if left else []
    if not targets:
        nothing = "nothing to cast: all weights that can be cast already have this dtype"
        return ck.with_root(ck.root, warnings=[*warnings, NoOpWarning(nothing)])
    new = _Cast(targets)
    root = rebuild(ck.root, new)
    if split := new.split:
        names = [name for name, tensor in weights.tensors.items() if id(tensor.storage) in split]
        warnings.append(
            f"these weights no longer share memory with tensors of another dtype: {quoted(names)}"
        )
    if new.frozen:
        warnings.append(
            f"cleared requires_grad of {plural(new.frozen, 'tensor')}, because torch cannot load "
            "requires_grad for this dtype"
        )
    pairs = Counter(
        f"{tensor.dtype.name} -> {targets[id(tensor)].name}"
        for tensor in weights.tensors.values()
        if id(tensor) in targets
    )
    notes = [f"cast {plural(number, 'weight')}: {pair}" for pair, number in pairs.items()]
    return ck.with_root(root, notes=notes, warnings=warnings)


def parsed_dtype(name: DTypeLike) -> DType:
    """Return the dtype `name`. Raises UsageError for an unknown dtype."""
    try:
        return table.parse(name)
    except FormatError as error:
        raise UsageError(error.message, hint=error.hint) from error


def _float(name: DTypeLike) -> DType:
    dtype = parsed_dtype(name)
    if not _is_castable(dtype):
        raise UsageError(
            f"{dtype.name!r} is not a floating-point type to cast to",
            hint="use, for example, float32, float16 or bfloat16",
        )
    return dtype


def _is_castable(dtype: DType) -> bool:
    return dtype.kind == "float" and dtype.bits % 8 == 0 and dtype.packed == 1


def _calls(node: Node) -> Iterator[Object]:
    """Yield the calls that rebuild the tensor `node` and its inner tensors. Yield each call once,
    and outer calls first."""
    waiting = [node] if isinstance(node, Object) else []
    seen: set[int] = set()
    while waiting:
        call = waiting.pop()
        if id(call) not in seen:
            seen.add(id(call))
            yield call
            waiting.extend(
                each
                for each in _parts(call)
                if isinstance(each, Object) and each.tensor is not None
            )


def _parts(call: Object) -> Iterator[Node]:
    for arg in call.args:
        yield from arg if isinstance(arg, tuple) else (arg,)


class _Cast:
    """A function for `rebuild` that casts tensors.

    If two tensors have the same old storage, old dtype and new dtype, they share one new storage.
    """

    def __init__(self, targets: Mapping[int, DType]) -> None:
        self._targets = targets
        self._storages: dict[tuple[int, str, str], Storage] = {}
        # Map the id of each storage to the old and new dtype of the first tensor on the storage.
        # `_split` contains the ids of storages whose tensors have several old dtypes, or several
        # new dtypes.
        self._users: dict[int, tuple[DType | None, DType | None]] = {}
        self._split: set[int] = set()
        self.frozen = 0  # number of tensors whose requires_grad was cleared

    def __call__(self, leaf: Node) -> Node:
        if not isinstance(leaf, (Tensor, TypedStorage)):
            return leaf
        target, old = self._targets.get(id(leaf)), leaf.storage
        use = (leaf.dtype, target)
        if old is not None and self._users.setdefault(id(old), use) != use:
            self._split.add(id(old))
        if target is None or isinstance(leaf, TypedStorage):
            return leaf
        if leaf.requires_grad and leaf.kind == "tensor" and target.storage is None:
            # torch rebuilds a tensor of this dtype with _rebuild_tensor_v3. _rebuild_tensor_v3
            # raises an error if requires_grad is set.
            leaf = replace(leaf, requires_grad=False)
            self.frozen += 1
        if old is None:
            return replace(leaf, dtype=target)
        key = (id(old), leaf.dtype.name, target.name)
        if key not in self._storages:
            record = old.record
            length = old.nbytes // leaf.dtype.itemsize * leaf.dtype.itemsize
            if length < old.nbytes:
                record = RecordSlice(record, 0, length)
            made = cast_record(record, leaf.dtype, target, big_endian=old.big_endian)
            self._storages[key] = Storage(made, old.device)
        return on(self._storages[key], leaf, target)

    @property
    def split(self) -> set[int]:
        """The ids of cast storages whose tensors have several old dtypes, or several new dtypes."""
        return self._split & {storage for storage, _, _ in self._storages}


@edit
def compute(ck: Checkpoint, expressions: Mapping[str, str]) -> Checkpoint:
    """In the weights that match a glob, replace each element x by the value of an expression.

    `expressions` maps globs to ``x - 1``, ``x + 1``, ``log(-x)`` or ``-exp(x)``. Expressions are
    computed in float32, or in float64 for float64 weights. The result is rounded to the dtype of
    the weight. Tied weights stay tied.

    Raises UsageError in these cases:

    - An expression is unknown.
    - A glob matches nothing.
    - Two globs match the same name.
    - A glob matches a quantized weight.

    Raises TensorError for a tensor that is not a strided floating-point tensor.
    """
    weights = ck.required
    for given in expressions.values():
        if given not in INVERSES:
            hint = f"use one of {', '.join(map(repr, INVERSES))}"
            raise UsageError(f"{given!r} is not a supported expression", hint=hint)
    chosen: dict[str, str] = {}
    for glob, names in matching(expressions, weights.nodes).items():
        for name in names:
            if name in chosen:
                raise UsageError(f"{name!r} matches two globs", hint="make a glob narrower")
            chosen[name] = expressions[glob]
    quantized_names.refuse(ck, chosen, "expressions cannot compute with codes")

    def computed(name: str, tensor: Tensor) -> Tensor:
        if tensor.storage is None:
            return tensor
        operation = Compute(chosen[name], tensor.dtype.name, name)
        return tensor.remade(Pending(operation, (contiguous(tensor),), tensor.nbytes))

    for name in chosen:
        tensor = as_tensor(weights.nodes[name])
        is_plain = isinstance(weights.nodes[name], Tensor) and tensor and tensor.layout == "strided"
        if tensor is None or not is_plain or tensor.dtype.name not in FLOATS:
            raise TensorError(f"{name!r} is not a strided floating-point tensor")
    swap = _made_once(weights, chosen, computed)
    counts = Counter(chosen.values())
    notes = [
        f"computed {each} for the elements of {plural(n, 'weight')}" for each, n in counts.items()
    ]
    return ck.with_root(rebuild(ck.root, swap=swap), notes=notes)


def on(
    storage: Storage, like: Tensor, dtype: DType | None = None, offset: int | None = None
) -> Tensor:
    """Return a tensor on `storage` with the shape and stride of `like`.

    This code passes every field, because `dataclasses.replace` is 1.5x slower.
    """
    where = like.offset if offset is None else offset
    return Tensor(
        storage, dtype or like.dtype, like.shape, like.stride, where, like.requires_grad, like.kind,
        like.layout, like.conj, like.neg,
    )  # fmt: skip


@edit
def compact(ck: Checkpoint) -> Checkpoint:
    """Remove unused bytes from storages: the bytes that belong to no tensor.

    If tensors overlap or are adjacent, they stay in one storage, so views and tied weights are
    kept. A storage stays unchanged if tensors use all its bytes, or if the checkpoint contains the
    storage itself as a value.
    """
    storages: dict[int, Storage] = {}
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)  # start and end in bytes
    units: dict[int, int] = defaultdict(lambda: 1)  # alignment of the spans
    whole: set[int] = set()  # storages that must stay unchanged
    for leaf in nodes(ck.root):
        if not isinstance(leaf, (Tensor, TypedStorage)) or leaf.storage is None:
            continue
        key = id(leaf.storage)
        storages[key] = leaf.storage
        if isinstance(leaf, TypedStorage) or leaf.layout != "strided" or leaf.dtype.bits % 8:
            whole.add(key)
            continue
        units[key] = max(units[key], leaf.dtype.itemsize)
        if 0 not in leaf.shape:
            start, length = leaf.extent
            spans[key].append((start, start + length))
    parts: dict[int, list[tuple[int, Storage]]] = {}
    for key, old in storages.items():
        joined = _joined(spans[key], units[key], old.nbytes)
        if key not in whole and sum(end - start for start, end in joined) < old.nbytes:
            parts[key] = [
                (
                    start,
                    replace(old, record=RecordSlice(old.record, start, end - start), crc32=None),
                )
                for start, end in joined or [[0, 0]]
            ]
    if not parts:
        return ck.unchanged("nothing to compact: no storage has unused bytes")

    def cut(leaf: Node) -> Node:
        found = parts.get(id(leaf.storage)) if isinstance(leaf, Tensor) else None
        if found is None:
            return leaf
        if 0 in leaf.shape:
            return on(found[0][1], leaf, offset=0)
        start, storage = found[bisect_right(found, leaf.extent[0], key=itemgetter(0)) - 1]
        return on(storage, leaf, offset=leaf.offset - start * 8 // leaf.dtype.bits)

    kept = sum(storage.nbytes for each in parts.values() for _, storage in each)
    saved = sum(storages[key].nbytes for key in parts) - kept
    note = f"dropped {saved:,} unused bytes of {plural(len(parts), 'storage')}"
    return ck.with_root(rebuild(ck.root, cut), notes=[note])


def _joined(spans: list[tuple[int, int]], unit: int, end: int) -> list[list[int]]:
    """Align spans to multiples of `unit`, and join spans that overlap or are adjacent."""
    joined: list[list[int]] = []
    aligned = ((start // unit * unit, min(-(-stop // unit) * unit, end)) for start, stop in spans)
    for start, stop in sorted(aligned):
        if joined and start <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], stop)
        else:
            joined.append([start, stop])
    return joined


Function = Callable[..., Any]


@edit
def map_weights(ck: Checkpoint, function: Function, keys: str | Iterable[str] = "*") -> Checkpoint:
    """Apply `function` to the weights that match a glob of `keys`.

    `function` takes a tensor and returns a tensor. If `function` has two parameters, it takes the
    name and the tensor. ckptkit calls `function` when the result is read or written. Tied weights
    stay tied. Raises UsageError for a glob that matches nothing, and for a glob that matches codes
    of quantized weights.
    """
    arguments.function("function", function)
    has_name = arguments.takes_two(function)
    weights = ck.required
    hits = set(flatten(matching(keys, weights.nodes).values()))
    names = [name for name in weights.nodes if name in hits]
    quantized_names.refuse(ck, names, "a function cannot compute with codes")
    tensors = {name: as_tensor(weights.nodes[name]) for name in names}
    chosen = {
        name: None
        for name, tensor in tensors.items()
        if tensor and tensor.layout == "strided" and tensor.dtype.kind != "quantized"
    }
    left = [name for name in names if name not in chosen]

    def mapped(name: str, tensor: Tensor) -> Tensor:
        try:
            return applied(tensor, partial(function, name) if has_name else function)
        except CkptkitError as error:
            error.message = f"{name}: {error.message}"
            raise

    swap = _made_once(weights, chosen, mapped)
    skipped = "function not applied to sparse tensors, quantized tensors and tensor subclasses"
    warnings = [f"{skipped}: {quoted(left)}"] if left else []
    root = rebuild(ck.root, swap=swap)
    notes = [f"mapped {plural(len(chosen), 'weight')}"]
    return ck.with_root(root, notes=notes, warnings=warnings)


def _made_once(
    weights: Weights, chosen: Mapping[str, object], make: Callable[[str, Tensor], Tensor]
) -> dict[int, Node]:
    """Return a dict from ids of the chosen weights to their new tensors.

    Weights with the same elements and the same value in `chosen` get the same new tensor.
    """
    made: dict[object, Tensor] = {}
    swap: dict[int, Node] = {}
    for name, how in chosen.items():
        tensor = as_tensor(weights.nodes[name])
        assert tensor is not None
        key = tensor.elements_key, how
        if key not in made:
            made[key] = make(name, tensor)
        swap[id(weights.nodes[name])] = made[key]
    return swap
