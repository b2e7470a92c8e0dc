"""A layout as a table: which file holds which part, and how each tensor was cut. No name goes by a
default.

    Table(rules=((".*layernorm.*", Same()), (".*dense.weight", Cut(1)), ...),
          offsets=(Offset(r"layers\\.([0-9]+)\\.", by=("vp", "pp"), total=24),),
          copies=(("output_layer.weight", "embedding.weight"),))

The first rule that matches a name counts; offsets are numbers that begin anew in each part; copies
are stored twice.

Every layout gives `merge` its parts: where each stands on the grid, and what it holds by name. What
is checked, in this order: the grid is complete, names are the same along the axis that cuts, types
and shapes agree, each name has a rule, boxes cover, copies are equal, counts are those that were
said. A tensor that is listed as cut and whose parts are all equal is refused too: its table would
be wrong.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

from ckptkit.compute.arranged import contiguous, joined
from ckptkit.compute.mixing import has_mean, mean_record, sum_record
from ckptkit.compute.operation import stream
from ckptkit.core.bytesource import Folder
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import (
    CkptkitError,
    CorruptError,
    FormatError,
    PathError,
    TensorError,
    UnsupportedError,
    UsageError,
)
from ckptkit.core.limits import check
from ckptkit.core.options import Options
from ckptkit.core.pieces import Box
from ckptkit.core.pieces import part as part_of
from ckptkit.core.plan import OutputFile
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import NAMES, some, typed
from ckptkit.core.tree import Node, OrderedMapping, find
from ckptkit.core.weights import as_tensor
from ckptkit.formats import torch_zip
from ckptkit.formats.distributed.joining import Copies, Held, Joiner, Replica
from ckptkit.formats.distributed.reading import Reader
from ckptkit.formats.format import Probe

# YAML from a file: plain values, without the anchors and tags that make little text a lot.


_BYTES = 1 << 20


def parse(data: bytes, where: str) -> Any:
    """The values in a text of YAML or JSON. Raises UsageError."""
    import yaml

    if len(data) > _BYTES:
        raise UsageError(f"is larger than {_BYTES:,} bytes", where=where)
    try:
        events = list(yaml.parse(data, Loader=yaml.SafeLoader))
        if any(isinstance(event, yaml.events.AliasEvent) for event in events):
            raise UsageError("uses anchors, which ckptkit does not follow", where=where)
        return yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"is not YAML: {str(error).splitlines()[0]}", where=where) from error


# The verbs of a table: how the parts of a tensor that several ranks hold are its whole, and back.
#
#     Cut(dim)                 joined along a dimension
#     Cut(dim, blocks=2)       the same for each of so many blocks that every part has ([gate; up])
#     Cut(dim, blocks=(8, 4))  blocks of sizes in this ratio ([q; k]), `exact`: of these sizes in
# all
#     Widths(dim, ((4, 4), (2, 2)))  blocks of these widths in each part
#     Heads(from_, heads)      joined along dimension 0, and the rows of heads put in another order
#     Same()                   equal in all parts
#     Sum(), Mean()            added up, averaged; Mean of equal parts is one of them
#     Drop(reason)             left out
#     Refuse(reason)           known, and not put together
#
# Widths of parts are those of the files: they need not be equal.


Parts = Sequence[
    tuple[Tensor, str]
]  # those of one tensor in the order of the ranks, and the files that hold them


@dataclass(frozen=True, slots=True)
class Verb:
    """A way to merge the parts of a tensor."""

    def join(self, name: str, parts: Parts, joiner: Joiner) -> Tensor:
        """The whole. Raises CorruptError where the parts do not go together in this way."""
        raise NotImplementedError

    def cut(self, name: str, whole: Tensor, count: int) -> list[list[Box]]:
        """The boxes that each of `count` parts is made of. Raises UsageError where they do not come
        out even."""
        raise UsageError(
            f"{name!r} cannot be cut: its parts would not be the ones that were put together"
        )


@dataclass(frozen=True, slots=True)
class Cut(Verb):
    """Joined along a dimension, block by block."""

    dim: int
    blocks: int | tuple[int, ...] = 1
    exact: bool = False

    def join(self, name: str, parts: Parts, joiner: Joiner) -> Tensor:
        _alike(name, parts, self.dim)
        widths = [self._widths(name, tensor.shape[self.dim], file) for tensor, file in parts]
        made = _by_blocks(name, parts, self.dim, widths, joiner)
        expected = sum(self.blocks) if isinstance(self.blocks, tuple) else 0
        if self.exact and made.shape[self.dim] != expected:
            raise CorruptError(
                f"{name!r} has {made.shape[self.dim]:,} rows in all, and blocks of {expected:,}"
            )
        return made

    def _widths(self, name: str, size: int, file: str) -> list[int]:
        """The sizes of the blocks of a part."""
        if isinstance(self.blocks, int):
            if size % self.blocks:
                raise CorruptError(f"{name!r}: {size:,} rows in {file} are no {self.blocks} blocks")
            return [size // self.blocks] * self.blocks
        total = sum(self.blocks)
        widths = [size * block // total for block in self.blocks]
        if any(size * block % total for block in self.blocks):
            raise CorruptError(f"{name!r}: {size:,} rows in {file} are not cut like {self.blocks}")
        return widths

    def cut(self, name: str, whole: Tensor, count: int) -> list[list[Box]]:
        if self.dim >= len(whole.shape):
            raise UsageError(f"{name!r} has no dimension {self.dim} to be cut along")
        widths = self._widths(name, whole.shape[self.dim], "it")
        if any(width % count for width in widths):
            raise UsageError(f"{name!r}: {whole.shape} does not come out even in {count} parts")
        made: list[list[Box]] = []
        for rank in range(count):
            boxes, at, start = [], 0, 0
            for width in widths:
                own = width // count
                boxes.append(_slab(whole, self.dim, start + rank * own, own, at))
                at, start = at + own, start + width
            made.append(boxes)
        return made


@dataclass(frozen=True, slots=True)
class Widths(Verb):
    """Joined along a dimension, block by block, whose widths in each part are given."""

    dim: int
    blocks: tuple[tuple[int, ...], ...]  # of each block, by part

    def join(self, name: str, parts: Parts, joiner: Joiner) -> Tensor:
        _alike(name, parts, self.dim)
        widths = [[block[rank] for block in self.blocks if rank < len(block)]
                  for rank in range(len(parts))]  # fmt: skip
        for (tensor, file), own in zip(parts, widths, strict=True):
            size = tensor.shape[self.dim]
            if len(own) != len(self.blocks) or sum(own) != size:
                raise CorruptError(f"{name!r}: {size:,} rows in {file} are no blocks of {own}")
        return _by_blocks(name, parts, self.dim, widths, joiner)


@dataclass(frozen=True, slots=True)
class Heads(Verb):
    """Rows of heads, of ``h`` heads, ``3`` kinds and ``d`` rows, from the order `order` to head by
    head (h3d).

    Megatron-LM wrote ``3hd`` at first (checkpoint_version 0), ``hd3`` then (1), and ``h3d`` since.
    """

    order: str
    rows: int  # of one head

    def join(self, name: str, parts: Parts, joiner: Joiner) -> Tensor:
        first = _alike(name, parts, 0)
        held: list[Held] = []
        at = 0
        for tensor, file in parts:
            heads, rest = divmod(tensor.shape[0], 3 * self.rows)
            if rest:
                raise CorruptError(
                    f"{name!r}: {tensor.shape[0]:,} rows in {file} are no heads of {self.rows}"
                )
            sizes = {"3": 3, "h": heads, "d": self.rows}
            steps = {axis: _after(self.order, axis, sizes) for axis in self.order}
            for head, kind in product(range(heads), range(3)):
                start = head * steps["h"] + kind * steps["3"]
                box = self._box(tensor, start, steps["d"], at)
                held.append(Held(box, file))
                at += self.rows
        return joiner.tensor(name, first.dtype, _with(first.shape, 0, at), held)

    def _box(self, tensor: Tensor, start: int, step: int, at: int) -> Box:
        sizes = _with(tensor.shape, 0, self.rows)
        stride = (tensor.stride[0] * step, *tensor.stride[1:])
        offset = tensor.offset + start * tensor.stride[0]
        rows = Tensor(tensor.storage, tensor.dtype, sizes, stride, offset)
        return Box(_with((0,) * len(sizes), 0, at), sizes, rows)


def _after(order: str, axis: str, sizes: dict[str, int]) -> int:
    step = 1
    for each in order[order.index(axis) + 1 :]:
        step *= sizes[each]
    return step


@dataclass(frozen=True, slots=True)
class Same(Verb):
    """Equal in all parts."""

    def join(self, name: str, parts: Parts, joiner: Joiner) -> Tensor:
        return joiner.same(name, parts)

    def cut(self, name: str, whole: Tensor, count: int) -> list[list[Box]]:
        return [[Box((0,) * len(whole.shape), whole.shape, whole)] for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Sum(Verb):
    """Added up."""

    def join(self, name: str, parts: Parts, joiner: Joiner) -> Tensor:
        first = _numbers(name, parts)
        records = tuple(contiguous(tensor) for tensor, _ in parts)
        return _computed(first, Storage(sum_record(records, first.dtype)))


@dataclass(frozen=True, slots=True)
class Mean(Verb):
    """Averaged; equal parts are copied."""

    def join(self, name: str, parts: Parts, joiner: Joiner) -> Tensor:
        first = _numbers(name, parts)
        (tensor, file), *others = parts
        if all(
            joiner.copies.same(Replica(name, tensor, each, (file, place))) for each, place in others
        ):
            joiner.copies.equal += len(others)
            return joiner.plain(tensor)
        records = tuple(contiguous(each) for each, _ in parts)
        shares = (1.0,) * len(parts)
        return _computed(first, Storage(mean_record(records, (first.dtype,) * len(parts), shares)))


@dataclass(frozen=True, slots=True)
class Drop(Verb):
    """Left out."""

    reason: str


@dataclass(frozen=True, slots=True)
class Refuse(Verb):
    """Known, and not put together."""

    reason: str


def _by_blocks(
    name: str, parts: Parts, dim: int, widths: Sequence[Sequence[int]], joiner: Joiner
) -> Tensor:
    """The first blocks of all parts, then the second ones, and so on; `widths` are by part."""
    held: list[Held] = []
    at = 0
    for block in range(len(widths[0])):
        for (tensor, file), own in zip(parts, widths, strict=True):
            box = _slab(tensor, dim, sum(own[:block]), own[block], at)
            held += [Held(box, file)] if box.tensor.numel else []
            at += own[block]
    first = parts[0][0]
    return joiner.tensor(name, first.dtype, _with(first.shape, dim, at), held)


def _alike(name: str, parts: Parts, dim: int) -> Tensor:
    """The first of the parts, which agree in everything but one dimension."""
    (first, file), *_ = parts
    if dim >= len(first.shape):
        raise CorruptError(
            f"{name!r} is of shape {first.shape} in {file}: it has no dimension {dim}"
        )
    for tensor, place in parts:
        same = tensor.dtype == first.dtype and len(tensor.shape) == len(first.shape)
        if not same or _with(tensor.shape, dim, 0) != _with(first.shape, dim, 0):
            raise CorruptError(
                f"{name!r} is {first.dtype} {first.shape} in {file}, {tensor.dtype} "
                f"{tensor.shape} in {place}",
                hint="the files are not of one save",
            )
    return first


def _numbers(name: str, parts: Parts) -> Tensor:
    """The first of the parts, which are of one shape and type, and have a mean."""
    (first, file), *_ = parts
    for tensor, place in parts:
        if (tensor.dtype, tensor.shape) != (first.dtype, first.shape) or not has_mean(tensor.dtype):
            raise CorruptError(
                f"{name!r} is {first.dtype} {first.shape} in {file} and {tensor.dtype} "
                f"{tensor.shape} in {place}: "
                "they cannot be added up"
            )
    return first


def _computed(like: Tensor, storage: Storage) -> Tensor:
    return Tensor(storage, like.dtype, like.shape, contiguous_stride(like.shape))


def _slab(tensor: Tensor, dim: int, start: int, width: int, at: int) -> Box:
    """`width` indices of a dimension from `start`, which stand at index `at` of the result."""
    zeros = (0,) * len(tensor.shape)
    sizes = _with(tensor.shape, dim, width)
    return Box(_with(zeros, dim, at), sizes, part_of(tensor, _with(zeros, dim, start), sizes))


def _with(shape: Shape, dim: int, size: int) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


# A layout as a table: which file holds which part, and how each tensor was cut. No name goes by a
# default.
#
#     Table(rules=((".*layernorm.*", Same()), (".*dense.weight", Cut(1)), ...),
#           offsets=(Offset(r"layers\.([0-9]+)\.", by=("vp", "pp"), total=24),),
#           copies=(("output_layer.weight", "embedding.weight"),))
#
# The first rule that matches a name counts; offsets are numbers that begin anew in each part;
# copies
# are stored twice.
#
# Every layout gives `merge` its parts: where each stands on the grid, and what it holds by name.
# What
# is checked, in this order: the grid is complete, names are the same along the axis that cuts,
# types
# and shapes agree, each name has a rule, boxes cover, copies are equal, counts are those that were
# said. A tensor that is listed as cut and whose parts are all equal is refused too: its table would
# be wrong.


TP = "tp"  # the axis that cuts
_PEEK = 1 << 20  # bytes of a part that are read to see whether it is constant

At = Mapping[str, int]


class LayoutRow(NamedTuple):
    """A regular expression for whole names, and what is done with what it matches."""

    pattern: re.Pattern[str]
    verb: Verb

    def matches(self, name: str) -> bool:
        return self.pattern.fullmatch(name) is not None


def rule(pattern: str, verb: Verb) -> LayoutRow:
    """A row of a table."""
    return LayoutRow(re.compile(pattern), verb)


@dataclass(frozen=True, slots=True)
class Offset:
    """Numbers in names that begin at 0 in each part: group 1 of `pattern`, counted up along the
    axes `by`.

    The first axis counts slowest. ``total`` is how many there must be, None if nothing says it.
    """

    pattern: re.Pattern[str]
    by: tuple[str, ...]
    total: int | None = None
    what: str = "layers"


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The rules that merge the parts of a layout."""

    rules: tuple[LayoutRow, ...]
    offsets: tuple[Offset, ...] = ()
    copies: tuple[tuple[str, str], ...] = ()
    hint: str = "--parts names your own table of how it was cut: `ckptkit help parallel`"

    def verb(self, name: str) -> Verb:
        """Return the verb for a tensor. Raises UnsupportedError if no rule matches it."""
        for each in self.rules:
            if each.matches(name):
                return each.verb
        raise UnsupportedError(f"nothing says how {name[:80]!r} was cut", hint=self.hint)


@dataclass(frozen=True)
class RankFile:
    """One file: its coordinates on the grid, and its entries by name."""

    file: str
    at: At
    entries: Mapping[str, Node] = field(repr=False)


class Merged(NamedTuple):
    """The whole, and what is worth a warning."""

    tensors: OrderedMapping
    warnings: list[str]


def check_grid(parts: Sequence[RankFile], axes: Mapping[str, int], name: Mapping[str, str]) -> None:
    """Raise CorruptError unless there is one part at each point. `name` gives a file's name by
    axis."""
    check("ranks", prod(axes.values()), f"parts ({_sizes(axes)})")
    there = {_point(part.at, axes): part.file for part in parts}
    if len(there) < len(parts):
        twice = [part.file for part in parts if there[_point(part.at, axes)] != part.file]
        raise CorruptError(f"{twice[0]} has the same rank as another file")
    missing = [point for point in product(*map(range, axes.values())) if point not in there]
    if missing:
        places = [_place(point, axes, name) for point in missing[:NAMES]]
        total = len(there) + len(missing)
        raise CorruptError(
            f"{len(missing):,} of {total:,} parts are missing: {', '.join(places)}",
            hint="every process wrote its own file: fetch what is missing from where the rest came "
            "from",
        )
    stale = [part.file for part in parts if any(part.at[axis] >= n for axis, n in axes.items())]
    if stale:
        raise CorruptError(f"is of {_sizes(axes)}, but there are files of others: {stale[0]}")


def _point(at: At, axes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(at[axis] for axis in axes)


def _place(point: tuple[int, ...], axes: Mapping[str, int], names: Mapping[str, str]) -> str:
    of = zip(axes, point, strict=True)
    text = " ".join(f"{names.get(axis, axis.upper())} {n}" for axis, n in of if axes[axis] > 1)
    return text or "the only one"


def _sizes(axes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis.upper()} {n}" for axis, n in axes.items())


def merge(
    parts: Sequence[RankFile], axes: Mapping[str, int], table: ParallelLayout, joiner: Joiner
) -> Merged:
    """Every tensor, whole, under its name in the whole model.

    `axes` are the axes of the grid and their sizes, the one that cuts (``tp``) among them. Raises
    CorruptError for parts that do not go together, UnsupportedError for a name without a rule.
    """
    return _Merge(parts, axes, table, joiner).run()


class _Merge:
    def __init__(
        self,
        parts: Sequence[RankFile],
        axes: Mapping[str, int],
        table: ParallelLayout,
        joiner: Joiner,
    ) -> None:
        self.parts = parts
        self.axes = axes
        self.table = table
        self.joiner = joiner
        self.dropped: dict[str, list[str]] = {}
        self.constant: list[str] = []

    def run(self) -> Merged:
        named = {id(part): dict(part.entries) for part in self.parts}
        for offset in self.table.offsets:
            named = self._renumbered(offset, named)
        rows = self._rows(named)
        self._drop_copies(rows)
        made = OrderedMapping()
        for name, by_rank in rows.items():
            tensor = self._tensor(name, by_rank)
            if tensor is not None:
                made[name] = tensor
        return Merged(made, list(self._warnings()))

    # Names

    def _renumbered(
        self, offset: Offset, named: dict[int, dict[str, Node]]
    ) -> dict[int, dict[str, Node]]:
        """The names of all parts with their numbers counted up along the axes."""
        counts: dict[tuple[int, ...], int] = {}
        for part in self.parts:
            point = self._along(offset, part)
            numbers = {
                int(found[1]) for name in named[id(part)] if (found := offset.pattern.search(name))
            }
            count = len(numbers)
            if numbers != set(range(count)):
                raise CorruptError(
                    f"its {offset.what} in {part.file} are not numbered from 0: "
                    f"{sorted(numbers)[:8]}"
                )
            if counts.setdefault(point, count) != count:
                raise CorruptError(
                    f"{part.file} has {count:,} {offset.what}, another file of the same stage "
                    f"{counts[point]:,}"
                )
        starts: dict[tuple[int, ...], int] = {}
        total = 0
        for point in product(*(range(self.axes.get(axis, 1)) for axis in offset.by)):
            starts[point] = total
            total += counts.get(point, 0)
        if offset.total is not None and total not in (0, offset.total):
            raise CorruptError(
                f"its parts have {total:,} {offset.what} in all, its arguments say {offset.total:,}"
            )
        return {
            id(part): _shifted(offset, named[id(part)], starts[self._along(offset, part)])
            for part in self.parts
        }

    def _along(self, offset: Offset, part: RankFile) -> tuple[int, ...]:
        return tuple(part.at.get(axis, 0) for axis in offset.by)

    def _rows(
        self, named: dict[int, dict[str, Node]]
    ) -> dict[str, dict[int, list[tuple[Node, str]]]]:
        """By name and rank of the axis that cuts: what the files hold, more than one where they are
        copies."""
        rows: dict[str, dict[int, list[tuple[Node, str]]]] = {}
        for part in self.parts:
            for name, node in named[id(part)].items():
                rows.setdefault(name, {}).setdefault(part.at.get(TP, 0), []).append(
                    (node, part.file)
                )
        for name, by_rank in rows.items():
            lacking = [rank for rank in range(self.axes.get(TP, 1)) if rank not in by_rank]
            if lacking:
                has = next(iter(by_rank.values()))[0][1]
                raise CorruptError(
                    f"{name[:80]!r} is in {has}, but rank {lacking[0]} of {self.axes.get(TP, 1)} "
                    "has no part of it",
                    hint="the files are not of one save",
                )
        return rows

    def _drop_copies(self, rows: dict[str, dict[int, list[tuple[Node, str]]]]) -> None:
        """Take out what stands twice, once it is known to be equal."""
        for name, of in self.table.copies:
            if name not in rows or of not in rows:
                continue
            for rank, held in rows.pop(name).items():
                for node, file in held:
                    first, place = rows[of][rank][0]
                    tensor, other = as_tensor(first), as_tensor(node)
                    if tensor is None or other is None:
                        raise CorruptError(f"{name!r} or {of!r} is not a tensor")
                    self.joiner.same(f"{of} ({name})", [(tensor, place), (other, file)])
            self.dropped.setdefault(f"a copy of {of}", []).append(name)

    # Tensors

    def _tensor(self, name: str, by_rank: dict[int, list[tuple[Node, str]]]) -> Tensor | None:
        count = self.axes.get(TP, 1)
        verb = self._verb(name, count, held=len(by_rank[0]))
        if isinstance(verb, Drop):
            self.dropped.setdefault(verb.reason, []).append(name)
            return None
        parts = []
        for rank in range(count):
            held = [(_as_tensor(name, node, file), file) for node, file in by_rank[rank]]
            parts.append((held[0][0], held[0][1]))
            if len(held) > 1:
                self.joiner.same(name, held)
        if count == 1:
            return (
                self.joiner.plain(parts[0][0])
                if isinstance(verb, Cut)
                else verb.join(name, parts, self.joiner)
            )
        try:
            self._check_verb(name, verb, parts)
            return verb.join(name, parts, self.joiner)
        except CkptkitError as error:
            if error.hint is None:
                error.hint = self.table.hint
            raise

    def _verb(self, name: str, count: int, *, held: int) -> Verb:
        """The verb for a tensor that `held` files of the first rank have; Cut where it is whole."""
        try:
            verb = self.table.verb(name)
        except UnsupportedError:
            if count > 1:
                raise
            return Cut(0)  # nothing was cut
        if not isinstance(verb, Refuse):
            return verb
        if count == held == 1:
            return Cut(0)
        raise UnsupportedError(f"{name[:80]!r}: {verb.reason}", hint=self.table.hint)

    def _check_verb(self, name: str, verb: Verb, parts: Parts) -> None:
        """Raise CorruptError for parts that are all equal though they should be cut; constant ones
        may be."""
        (first, file), *others = parts
        if not isinstance(verb, Cut) or not first.numel:
            return
        copies = [Replica(name, first, each, (file, place)) for each, place in others]
        if any(
            (copy.other.dtype, copy.other.shape) != (first.dtype, first.shape) for copy in copies
        ):
            return
        if not all(
            self.joiner.copies.same(copy, always=copy.first.nbytes <= _PEEK) for copy in copies
        ):
            return
        if _is_constant(first):
            self.constant.append(name)
            return
        raise CorruptError(
            f"{name!r} is equal in all {len(parts)} parts, and should be cut along dimension "
            f"{verb.dim}",
            hint="the layout is another than it is taken for: --parts names a table of your own, "
            "which says `same` for it",
        )

    def _warnings(self) -> Iterator[str]:
        for reason, names in self.dropped.items():
            yield f"left out {some(names)}: {reason}"
        if self.constant:
            yield f"of one value in all parts, taken as cut all the same: {some(self.constant)}"


def _as_tensor(name: str, node: Node, file: str) -> Tensor:
    tensor = as_tensor(node)
    if tensor is None or tensor.storage is None or tensor.layout != "strided":
        raise UnsupportedError(f"{name[:80]!r} in {file} is not a plain tensor")
    return tensor


def _shifted(offset: Offset, entries: Mapping[str, Node], start: int) -> dict[str, Node]:
    made = {}
    for name, node in entries.items():
        found = offset.pattern.search(name)
        if found:
            name = f"{name[: found.start(1)]}{int(found[1]) + start}{name[found.end(1) :]}"
        made[name] = node
    return made


def _is_constant(tensor: Tensor) -> bool:
    """Return whether all sampled elements have the same bytes."""
    data = b""
    for piece in stream(contiguous(tensor).locate(), 0, min(tensor.nbytes, _PEEK)):
        data += piece
    unit = data[: tensor.dtype.itemsize]
    return data == unit * (len(data) // len(unit))


def flattened(root: Node) -> Iterator[tuple[str, Node]]:
    """The leaves of nested dicts under dotted names."""
    waiting: list[tuple[str, Node]] = [("", root)]
    while waiting:
        name, node = waiting.pop()
        if isinstance(node, dict) and all(isinstance(key, str) for key in node):
            below = [(f"{name}.{key}" if name else key, child) for key, child in node.items()]
            waiting.extend(reversed(below))
        else:
            yield name, node


# A table of one's own, in YAML (``--parts FILE``).
#
# ``files`` is an expression for names below the folder, whose groups are the axes: tp is the one
# that
# cuts. ``root`` is the entry that holds the state_dict. ``layers`` are numbers that begin anew
# along
# other axes. Of ``rules``, the first whose expression matches a whole name counts; there is no
# other. `ckptkit help parallel` shows one.


_KEYS = {"files", "root", "layers", "rules"}
_BLOCKS = re.compile(r"cut ([0-9])(?: blocks ([0-9]{1,4}))?")
_SIZES = re.compile(r"cut ([0-9]) sizes ([0-9 ]{1,200})")
_PLAIN: dict[str, Verb] = {"same": Same(), "sum": Sum(), "mean": Mean()}


class OwnTable:
    """The content of a table file. Raises UsageError."""

    def __init__(self, path: str) -> None:
        self.path = path
        content = self._content()
        if (
            not isinstance(content, dict)
            or not set(content) <= _KEYS
            or not {"files", "rules"} <= set(content)
        ):
            raise self._wrong(
                "is not a table with files and rules", f"it may have {', '.join(sorted(_KEYS))}"
            )
        self.files = self._pattern(content["files"])
        self.root = content.get("root")
        if TP not in self.files.groupindex:
            raise self._wrong(
                "names no rank in files", r"write (?P<tp>[0-9]+) in place of its number"
            )
        self.table = ParallelLayout(
            tuple(map(self._rule, self._list(content["rules"]))),
            self._offsets(content.get("layers")),
        )

    def _content(self) -> Any:
        try:
            with open(self.path, "rb") as file:
                data = file.read((1 << 20) + 1)
        except OSError as error:
            raise PathError(f"cannot be read: {error.strerror}", where=self.path) from error
        return parse(data, self.path)

    def _wrong(self, message: str, hint: str | None = None) -> UsageError:
        return UsageError(
            message, where=self.path, hint=hint or "`ckptkit help parallel` shows a table"
        )

    def _pattern(self, text: Any) -> re.Pattern[str]:
        try:
            return re.compile(text)
        except (re.error, TypeError) as error:
            raise self._wrong(f"{text!r} is not a regular expression: {error}") from error

    def _list(self, node: Any) -> list[Any]:
        if not isinstance(node, list):
            raise self._wrong("rules are no list")
        return node

    def _rule(self, node: Any) -> Any:
        if not isinstance(node, dict) or len(node) != 1:
            raise self._wrong(f"{node!r} is not a rule", "a rule is `- 'expression': verb`")
        ((pattern, word),) = node.items()
        return rule(self._pattern(pattern).pattern, self._verb(str(word)))

    def _verb(self, word: str) -> Verb:
        if word in _PLAIN:
            return _PLAIN[word]
        if word.startswith("drop"):
            return Drop(word.removeprefix("drop").strip() or "as the table says")
        if found := _BLOCKS.fullmatch(word):
            return Cut(int(found[1]), int(found[2] or 1) or 1)
        if found := _SIZES.fullmatch(word):
            return Cut(int(found[1]), tuple(map(int, found[2].split())), exact=True)
        raise self._wrong(
            f"{word!r} is no verb",
            "cut DIM, cut DIM blocks N, cut DIM sizes A B C, same, sum, mean, drop REASON",
        )

    def _offsets(self, node: Any) -> tuple[Offset, ...]:
        if node is None:
            return ()
        if not isinstance(node, dict) or not isinstance(node.get("by"), list):
            raise self._wrong("layers are not {pattern: ..., by: [axis]}")
        pattern = self._pattern(node.get("pattern"))
        axes = tuple(map(str, node["by"]))
        if not pattern.groups or not set(axes) <= set(self.files.groupindex):
            raise self._wrong(
                "layers count along axes that files do not name, or their pattern has no group"
            )
        return (Offset(pattern, axes),)


def read(probe: Probe, format: str) -> Checkpoint:
    """The state_dict that the files make by the table that was asked for."""
    assert probe.options.parts is not None
    own = OwnTable(probe.options.parts)
    reader, joiner = Reader(probe.folder), Joiner(Copies(probe.options.copies))
    parts = [
        RankFile(place, _at(found), _entries(reader, folder, name, own))
        for place, folder, name in _files(probe.folder)
        if (found := own.files.fullmatch(place))
    ]
    if not parts:
        raise UsageError(
            f"no file in {probe.name} has a name like {own.files.pattern!r}", where=own.path
        )
    axes = {axis: 1 + max(part.at[axis] for part in parts) for axis in own.files.groupindex}
    check_grid(parts, axes, {})
    merged = merge(parts, axes, own.table, joiner)
    detail = " x ".join(f"{axis} {n}" for axis, n in axes.items())
    return Checkpoint(
        merged.tensors, format, probe.folder, globals=tuple(reader.globals),
        warnings=(*merged.warnings, *joiner.copies.warnings(), *reader.warnings),
        about=f"{os.path.basename(own.path)}: {detail}",
    )  # fmt: skip


def _files(folder: Folder) -> list[tuple[str, Folder, str]]:
    """The files in the folder and in those below it: the path with slashes, the folder, and the
    name there."""
    below = set(folder.folders())
    found = [(name, folder, name) for name in folder.list() if name not in below]
    for each in sorted(below):
        inner = folder.sub(each)
        deeper = set(inner.folders())
        found += [(f"{each}/{name}", inner, name) for name in inner.list() if name not in deeper]
    return found


def _at(found: re.Match[str]) -> dict[str, int]:
    try:
        return {axis: int(number or 0) for axis, number in found.groupdict().items()}
    except ValueError as error:
        raise UsageError(
            f"the groups of files match something else than numbers: {found[0]!r}"
        ) from error


def _entries(reader: Reader, folder: Folder, name: str, own: OwnTable) -> dict[str, Node]:
    root = reader.read(name, folder).root
    if own.root:
        _, root = find(root, str(own.root))
    if not isinstance(root, dict):
        raise FormatError("holds no state_dict", where=name)
    return dict(flattened(root))


# Whole tensors cut into the parts of ranks by the table that puts them together.


def ranks_of(options: Options, name: str) -> int:
    """Return the number of parts that the options ask for. Raises UsageError if they give none."""
    if options.ranks is None:
        raise UsageError(
            f"{name} is cut into parts, and nothing says how many",
            hint=typed("--ranks 2", "ranks=2"),
        )
    return options.ranks


def cut(tensors: Mapping[str, Tensor], table: ParallelLayout, count: int) -> list[OrderedMapping]:
    """The entries of each of `count` parts. Raises UsageError for what does not come out even."""
    parts: list[dict[Node, Node]] = [{} for _ in range(count)]
    for name, tensor in tensors.items():
        if tensor.storage is None or tensor.layout != "strided":
            raise TensorError(f"{name[:80]!r} is not a plain tensor, and cannot be cut")
        verb = table.verb(name)
        if isinstance(verb, (Drop, Refuse)):
            raise UsageError(f"{name[:80]!r} has no place in parts: {verb.reason}")
        for part, boxes in zip(parts, verb.cut(name, tensor, count), strict=True):
            part[name] = tensor if isinstance(verb, Same) or count == 1 else _part(boxes)
    return [OrderedMapping(part) for part in parts]


def _part(boxes: list[Box]) -> Tensor:
    """A tensor of its own, made of the boxes at their offsets."""
    first = boxes[0].tensor
    shape: Shape = tuple(
        max(box.offsets[dim] + box.sizes[dim] for box in boxes) for dim in range(len(first.shape))
    )
    if len(boxes) == 1:
        storage = Storage(contiguous(first))
    else:
        storage = Storage(joined(first.dtype, shape, [(box.offsets, box.tensor) for box in boxes]))
    return Tensor(storage, first.dtype, shape, contiguous_stride(shape))


def file(name: str, root: Node, options: Options) -> OutputFile:
    """One file of a folder, as torch.save writes it."""
    plan = torch_zip.layout(Checkpoint(root), options)
    return replace(plan.files[0], name=name)
