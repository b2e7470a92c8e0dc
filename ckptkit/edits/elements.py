"""Elements of tensors: cast, cut to what is used, and changed by a function of the caller.

Casts and cuts replace storages as wholes, so that views stay views and ties stay ties. Nothing is
computed or read here: a new storage only says from what it will be made (:mod:`ckptkit.compute`).
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import translate
from typing import Any

from ckptkit.compute.numbers import cast_record
from ckptkit.compute.operation import RecordSlice
from ckptkit.compute.torch_bridge import applied
from ckptkit.core import arguments
from ckptkit.core import dtypes as table
from ckptkit.core.checkpoint import Checkpoint, NoEffect, edit
from ckptkit.core.dtypes import DType, DTypeLike
from ckptkit.core.errors import CkptkitError, FormatError, UsageError
from ckptkit.core.tensor import Storage, Tensor, TypedStorage
from ckptkit.core.text import guess, plural, quoted
from ckptkit.core.tree import Node, Object, nodes, rebuild
from ckptkit.core.weights import Weights, as_tensor
from ckptkit.edits import groups
from ckptkit.edits.nodes import on

# Calls whose result has the dtype of the tensors among their arguments; others name it themselves.
_OF_TENSORS = ("_rebuild_sparse_tensor", "_rebuild_sparse_csr_tensor", "_rebuild_nested_tensor",
               "_rebuild_parameter", "_rebuild_parameter_with_state")  # fmt: skip


DEFAULT = "*"  # the glob of the dtype that is for all other weights


@edit
def cast(ck: Checkpoint, dtypes: DTypeLike | Mapping[str, DTypeLike]) -> Checkpoint:
    """Cast floating-point weights: all of them, or those whose names match a glob.

    `dtypes` is one dtype, or glob -> dtype in any order; ``*`` is the default, which other globs
    override (``{"*": "bfloat16", "*norm*": "float32"}``). Integers, bools,
    complex and quantized weights stay. Tensors on one storage are cast together; those that then
    differ in dtype get storages of their own, which is said in a warning. Raises UsageError for an
    unknown dtype, for a glob that matches nothing, for two that want different dtypes of one name,
    and for one that matches codes or scales of quantized weights.
    """
    weights = ck.required
    rules = _rules(dtypes, weights)
    met = (name for name in weights.nodes if any(pattern.match(name) for pattern, _ in rules))
    groups.refuse(ck, met, "codes are not numbers to cast, and scales must keep their bits")
    wanted, left = _wanted(weights, rules)
    new = _Cast(wanted)
    warnings = (
        [f"not cast, as their dtype is part of how they are made: {quoted(left)}"] if left else []
    )
    if not wanted:
        warnings.append(
            NoEffect("no floating-point weight has another dtype than that: nothing is cast")
        )
        return ck.with_root(ck.root, warnings=warnings)
    root = rebuild(ck.root, new)
    if split := new.split:
        names = [name for name, tensor in weights.tensors.items() if id(tensor.storage) in split]
        warnings.append(
            f"no longer share memory with tensors that have another dtype now: {quoted(names)}"
        )
    if new.frozen:
        warnings.append(
            "no longer requires_grad, which torch cannot load with 8 bits: "
            f"{plural(new.frozen, 'tensor')}"
        )
    return ck.with_root(root, notes=_cast_notes(weights, wanted), warnings=warnings)


def _cast_notes(weights: Weights, wanted: Mapping[int, DType]) -> list[str]:
    pairs = Counter(
        (tensor.dtype.name, wanted[id(tensor)].name)
        for tensor in weights.tensors.values()
        if id(tensor) in wanted
    )
    return [
        f"cast {plural(number, 'weight')}: {old} -> {new}" for (old, new), number in pairs.items()
    ]


def _rules(
    dtypes: DTypeLike | Mapping[str, DTypeLike], weights: Weights
) -> list[tuple[re.Pattern[str], DType]]:
    """Return patterns and targets, the default last."""
    given = {DEFAULT: dtypes}
    if isinstance(dtypes, Mapping):
        given = dict(arguments.mapping("dtypes", dtypes))
    default = [(DEFAULT, given.pop(DEFAULT))] if DEFAULT in given else []
    rules = {glob: (re.compile(translate(glob)), _float(dtype)) for glob, dtype in given.items()}
    for glob, (pattern, _) in rules.items():
        if not any(map(pattern.match, weights.nodes)) and weights.nodes:
            raise UsageError(f"no weight matches {glob!r}", hint=guess(glob, weights.nodes))
    _check_overlap(rules, weights)
    return [
        *rules.values(),
        *((re.compile(translate(glob)), _float(dtype)) for glob, dtype in default),
    ]


def _check_overlap(rules: Mapping[str, tuple[re.Pattern[str], DType]], weights: Weights) -> None:
    """Raise UsageError if two globs want different dtypes of one weight."""
    for name in weights.nodes if len(rules) > 1 else ():
        met = {glob: dtype for glob, (pattern, dtype) in rules.items() if pattern.match(name)}
        if len(set(met.values())) > 1:
            raise UsageError(
                f"{name!r} matches {quoted(met)}, which differ",
                hint="make one of them narrower; a dtype without a glob is for all other weights",
            )


def _float(name: DTypeLike) -> DType:
    try:
        dtype = table.parse(name)
    except FormatError as error:
        raise UsageError(error.message, hint=error.hint) from error
    if not _is_castable(dtype):
        raise UsageError(
            f"{dtype.name!r} is not a floating-point type to cast to",
            hint="e.g. float32, float16, bfloat16",
        )
    return dtype


def _is_castable(dtype: DType) -> bool:
    return dtype.kind == "float" and dtype.bits % 8 == 0 and dtype.packed == 1


def _wanted(
    weights: Weights, rules: list[tuple[re.Pattern[str], DType]]
) -> tuple[dict[int, DType], list[str]]:
    """Return targets by id of the tensor, and the names of weights that cannot be cast."""
    wanted: dict[int, DType] = {}
    left: list[str] = []
    for name, node in weights.nodes.items():
        target = next((dtype for pattern, dtype in rules if pattern.match(name)), None)
        tensor = as_tensor(node)
        if (
            target is None
            or tensor is None
            or tensor.dtype.kind != "float"
            or tensor.dtype.name == target.name
        ):
            continue
        if _is_fixed(node, tensor, target):
            left.append(name)
        else:
            wanted.update((id(each), target) for each in _made_of(node, tensor))
    return wanted, left


def _is_fixed(node: Node, tensor: Tensor, target: DType) -> bool:
    calls = (each.global_ for each in _calls(node))
    if any(made is None or made.name not in _OF_TENSORS for made in calls):
        return True
    return not _is_castable(tensor.dtype) or (tensor.kind == "ndarray" and target.numpy is None)


def _made_of(node: Node, tensor: Tensor) -> Iterator[Tensor]:
    """Return the tensor of a node, and those inside it of its dtype (values of a sparse one)."""
    yield tensor
    for call in _calls(node):
        inner = (each if isinstance(each, Tensor) else as_tensor(each) for each in _parts(call))
        yield from (each for each in inner if each is not None and each.dtype == tensor.dtype)


def _calls(node: Node) -> Iterator[Object]:
    """The calls that make a tensor and those that it is made of, each once, the outermost first."""
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
    """Leaf -> leaf, with one new storage for each old one and pair of dtypes."""

    def __init__(self, wanted: Mapping[int, DType]) -> None:
        self._wanted = wanted
        self._storages: dict[tuple[int, str, str], Storage] = {}
        self._users: dict[
            int, tuple[DType | None, DType | None]
        ] = {}  # dtype and target of a storage's first user
        self._split: set[int] = set()
        self.frozen = 0  # tensors that had to lose their requires_grad

    def __call__(self, leaf: Node) -> Node:
        if not isinstance(leaf, (Tensor, TypedStorage)):
            return leaf
        target = self._wanted.get(id(leaf))
        use = (leaf.dtype, target)
        if leaf.storage is not None and self._users.setdefault(id(leaf.storage), use) != use:
            self._split.add(id(leaf.storage))
        return (
            leaf if target is None or isinstance(leaf, TypedStorage) else self._cast(leaf, target)
        )

    def _cast(self, leaf: Tensor, target: DType) -> Tensor:
        if leaf.requires_grad and leaf.kind == "tensor" and target.storage is None:
            leaf = replace(
                leaf, requires_grad=False
            )  # _rebuild_tensor_v3 raises for it; parameters are made otherwise
            self.frozen += 1
        if leaf.storage is None:
            return replace(leaf, dtype=target)
        key = (id(leaf.storage), leaf.dtype.name, target.name)
        if key not in self._storages:
            self._storages[key] = _cast_storage(leaf.storage, leaf.dtype, target)
        return on(self._storages[key], leaf, target)

    @property
    def split(self) -> set[int]:
        """Ids of the storages that were cast, but not for all of their users alike."""
        return self._split & {storage for storage, _, _ in self._storages}


def _cast_storage(storage: Storage, source: DType, target: DType) -> Storage:
    length = storage.nbytes // source.itemsize * source.itemsize
    record = storage.record if length == storage.nbytes else RecordSlice(storage.record, 0, length)
    return Storage(
        cast_record(record, source, target, big_endian=storage.big_endian), storage.device
    )


@edit
def compact(ck: Checkpoint) -> Checkpoint:
    """Cut every storage to the parts that tensors of the whole tree span.

    Tensors that overlap or touch stay on one storage, so views and ties are kept; a storage that is
    used from end to end is left alone, and so is one that the file refers to as a whole.
    """
    uses = _uses(ck.root)
    cuts = {key: cut for key, use in uses.items() if (cut := use.cut()) is not None}
    if not cuts:
        return ck.with_root(
            ck.root,
            warnings=[NoEffect("every storage is used from end to end: there is nothing to cut")],
        )
    saved = sum(uses[key].storage.nbytes - cut.nbytes for key, cut in cuts.items())
    root = rebuild(ck.root, lambda leaf: _on_part(leaf, cuts))
    return ck.with_root(
        root, notes=[f"cut {plural(len(cuts), 'storage')} to what is used: {saved:,} bytes less"]
    )


def _on_part(leaf: Node, cuts: Mapping[int, _Cut]) -> Node:
    cut = cuts.get(id(leaf.storage)) if isinstance(leaf, Tensor) else None
    return leaf if cut is None else cut.place(leaf)


@dataclass
class _Use:
    """The use of a storage in a tree: spans of tensors in bytes, and their alignment."""

    storage: Storage
    spans: list[tuple[int, int]] = field(default_factory=list)  # start and end
    unit: int = 1
    whole: bool = False

    def cut(self) -> _Cut | None:
        """Return the parts to keep, None if that is everything."""
        if self.whole:
            return None
        parts = list(_merged(sorted(self._aligned()))) or [(0, 0)]
        if sum(end - start for start, end in parts) == self.storage.nbytes:
            return None
        record, device, big = self.storage.record, self.storage.device, self.storage.big_endian
        storages = [
            Storage(RecordSlice(record, start, end - start), device, None, big)
            for start, end in parts
        ]
        return _Cut([start for start, _ in parts], storages)

    def _aligned(self) -> Iterator[tuple[int, int]]:
        for start, end in self.spans:
            yield (
                start // self.unit * self.unit,
                min(-(-end // self.unit) * self.unit, self.storage.nbytes),
            )


@dataclass(frozen=True)
class _Cut:
    """The parts of a storage that are kept: where they begin, in bytes, and their new storages."""

    starts: list[int]
    storages: list[Storage]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in self.storages)

    def place(self, tensor: Tensor) -> Tensor:
        if 0 in tensor.shape:
            return on(self.storages[0], tensor, offset=0)
        at = bisect_right(self.starts, tensor.extent[0]) - 1
        return on(
            self.storages[at],
            tensor,
            offset=tensor.offset - self.starts[at] * 8 // tensor.dtype.bits,
        )


def _uses(root: Node) -> dict[int, _Use]:
    uses: dict[int, _Use] = {}
    for leaf in nodes(root):
        if not isinstance(leaf, (Tensor, TypedStorage)) or leaf.storage is None:
            continue
        use = uses.setdefault(id(leaf.storage), _Use(leaf.storage))
        if isinstance(leaf, TypedStorage) or leaf.layout != "strided" or leaf.dtype.bits % 8:
            use.whole = True
            continue
        use.unit = max(use.unit, leaf.dtype.itemsize)
        if 0 not in leaf.shape:
            start, length = leaf.extent
            use.spans.append((start, start + length))
    return uses


def _merged(spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Sorted spans, those that overlap or touch joined."""
    held: tuple[int, int] | None = None
    for start, end in spans:
        if held is not None and start <= held[1]:
            held = (held[0], max(held[1], end))
        else:
            if held is not None:
                yield held
            held = (start, end)
    if held is not None:
        yield held


Function = Callable[[Any], Any]


@edit
def map_weights(ck: Checkpoint, function: Function, keys: str | Iterable[str] = "*") -> Checkpoint:
    """Apply `function`, from tensor to tensor, to the weights that match a glob of `keys`.

    It is applied when the result is read or written. Tied weights stay tied. Raises UsageError for
    a glob that matches nothing or codes of quantized weights.
    """
    arguments.function("function", function)
    weights = ck.required
    names = list(_matching(weights, keys))
    groups.refuse(ck, names, "a function would take codes for numbers")
    swap: dict[int, Node] = {}
    views: dict[object, Tensor] = {}
    left = []
    for name in names:
        node = weights.nodes[name]
        tensor = as_tensor(node)
        if tensor is None or tensor.layout != "strided" or tensor.dtype.kind == "quantized":
            left.append(name)
            continue
        view = (id(tensor.storage), tensor.dtype, tensor.offset, tensor.shape, tensor.stride)
        if view not in views:
            views[view] = _applied(name, tensor, function)
        swap[id(node)] = views[view]
    warnings = [f"not mapped, as they are made of other tensors: {quoted(left)}"] if left else []
    root = rebuild(ck.root, swap=swap)
    notes = [f"mapped {plural(len(names) - len(left), 'weight')}"]
    return ck.with_root(root, notes=notes, warnings=warnings)


def _applied(name: str, tensor: Tensor, function: Function) -> Tensor:
    try:
        return applied(tensor, function)
    except CkptkitError as error:
        error.message = f"{name}: {error.message}"
        raise


def _matching(weights: Weights, globs: Iterable[str]) -> Iterator[str]:
    patterns = {glob: re.compile(translate(glob)) for glob in globs}
    for glob, pattern in patterns.items():
        if not any(map(pattern.match, weights.nodes)):
            raise UsageError(f"no weight matches {glob!r}", hint=guess(glob, weights.nodes))
    return (name for name in weights.nodes if any(each.match(name) for each in patterns.values()))
