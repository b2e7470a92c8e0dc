"""Describe a parallel layout as a table. Each row describes how some tensors were split.

A row consists of a pattern for names and one of these instructions:

* ``same`` means that the tensor is replicated on all ranks.
* ``sum`` means that the merged tensor is the sum of the ranks' tensors.
* ``mean`` means that the merged tensor is the mean of the ranks' tensors.
* ``drop: reason`` means that the tensor is not written.
* ``refuse: reason`` means that ckptkit cannot join the tensor.
* A line such as ``[o i] -> [o (tp i)]`` maps the dimensions of a shard to dimensions of the
  complete tensor. The line is written in the notation of `ckptkit help rules`. The axis ``tp`` is
  the tensor-parallel rank.

The size of the axis after ``tp`` may differ from rank to rank. To split a complete tensor, ckptkit
applies the line in reverse. The first row that matches a name is used. If no row matches a name,
ckptkit raises an error.

The function :func:`merge` renumbers layers globally, and checks that the names, replicas, dtypes
and shapes on all ranks match. If the row of a tensor contains a line, but all shards of the tensor
are equal, :func:`merge` raises an error, because the table is wrong. If all elements of all shards
have the same value, :func:`merge` only adds a warning.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise, product
from math import gcd, prod
from typing import Any, NamedTuple

from ckptkit.compute.arranged import Arranged, contiguous
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
from ckptkit.core.plan import OutputFile
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import NAMES, some, typed
from ckptkit.core.tree import Node, OrderedMapping, find
from ckptkit.core.weights import as_tensor
from ckptkit.formats import torch_zip
from ckptkit.formats.distributed.joining import Copies, Joiner, Replica
from ckptkit.formats.distributed.reading import RankReader
from ckptkit.formats.format import Probe
from ckptkit.rules.arrange import ArrangedRule, Arrangement, SourceTensor
from ckptkit.rules.names import Settings, axis_words, evaluate
from ckptkit.rules.notation import MisfitError, Rule, RuleError, parse_rule

TP = "tp"  # name of the tensor-parallel axis
SAME, SUM, MEAN, DROP, REFUSE = "same", "sum", "mean", "drop", "refuse"
_PEEK = 1 << 20  # maximum number of bytes of a tensor that `_is_constant` reads

Parts = Sequence[tuple[Tensor, str]]  # the shards of a tensor in rank order, and their files


def cut(dim: int, blocks: int = 1, sizes: Sequence[int] = ()) -> str:
    """Return the line for tensors that are split along dimension `dim`.

    A tensor can consist of several blocks, such as [gate; up]. Each block is split over the ranks,
    and a shard contains one part of each block. For blocks of the same size, `blocks` is the number
    of blocks. For other blocks, `sizes` contains the size of each complete block.
    """
    before = "".join(f"a{n} " for n in range(dim))
    block, given = ("g ", f" with g={blocks}") if blocks > 1 else ("", "")
    if sizes:
        block, given = "p ", f" with p={len(sizes)} o={'|'.join(f'{n}/tp' for n in sizes)}"
    return f"[{before}({block}o) ...] -> [{before}({block}tp o) ...]{given}"


def cut_in_ratio(*sizes: int) -> str:
    """Return the line for tensors of several blocks ([q; k; v]).

    Each block is split along dimension 0.

    `sizes` contains the relative size of each block.
    """
    unit = gcd(*sizes)
    ratio = "|".join(str(n // unit) for n in sizes)
    return f"[(p n o) ...] -> [(p tp n o) ...] with p={len(sizes)} n={ratio}"


class LayoutRow(NamedTuple):
    """A regular expression that matches complete tensor names, and how these tensors were split.

    ``widths`` contains the width of each block on each rank, if the checkpoint lists these widths.
    With ``widths``, ``how`` describes the split of a single block.
    """

    pattern: re.Pattern[str]
    how: str
    widths: tuple[tuple[int, ...], ...] = ()

    @property
    def word(self) -> str:
        return self.how.partition(":")[0]


ROWS, COLUMNS = cut(0), cut(1)


def rows(*pairs: tuple[str, str]) -> tuple[LayoutRow, ...]:
    """Return the rows of a table. Each pair consists of a regular expression and an instruction."""
    return tuple(LayoutRow(re.compile(pattern), how) for pattern, how in pairs)


@dataclass(frozen=True, slots=True)
class Offset:
    """A rule for the layer or expert numbers in tensor names. Each rank counts from 0.

    Group 1 of `pattern` matches the number. `merge` replaces the numbers of each rank by global
    numbers. The global numbers increase along the axes `by`. The first axis varies slowest.
    ``total`` is the expected number of layers or experts, or None if it is unknown.
    """

    pattern: re.Pattern[str]
    by: tuple[str, ...]
    total: int | None = None
    what: str = "layers"


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """The rows of a layout, the numbers to replace in names, and pairs of equal tensors.

    In each pair of `copies`, the two tensors must be equal. The first tensor is dropped.
    """

    rules: tuple[LayoutRow, ...]
    offsets: tuple[Offset, ...] = ()
    copies: tuple[tuple[str, str], ...] = ()
    hint: str = "write a table for --parts that describes the split: see `ckptkit help parallel`"

    def row(self, name: str) -> LayoutRow:
        """Return the first row that matches `name`. Raises UnsupportedError if no row matches."""
        for each in self.rules:
            if each.pattern.fullmatch(name):
                return each
        raise UnsupportedError(f"how {name[:80]!r} was split is unknown", hint=self.hint)


@dataclass(frozen=True)
class RankFile:
    """The entries of one file by name, and the rank that wrote the file.

    ``at`` maps each axis to the rank's coordinate.
    """

    file: str
    at: Mapping[str, int]
    entries: Mapping[str, Node] = field(repr=False)


class Merged(NamedTuple):
    """The merged tensors by name, and warnings."""

    tensors: OrderedMapping
    warnings: list[str]


def check_grid(parts: Sequence[RankFile], axes: Mapping[str, int], name: Mapping[str, str]) -> None:
    """Raise CorruptError unless there is exactly one file for each rank.

    `axes` maps each axis to its size. Each combination of coordinates on the axes is a rank. `name`
    maps an axis to its name in messages.
    """
    sizes = " x ".join(f"{axis.upper()} {n}" for axis, n in axes.items())
    check("ranks", prod(axes.values()), f"parts ({sizes})")
    there: dict[tuple[int, ...], str] = {}
    for part in parts:
        point = tuple(part.at[axis] for axis in axes)
        if there.setdefault(point, part.file) != part.file:
            raise CorruptError(f"{part.file} has the same rank as another file")
    missing = [point for point in product(*map(range, axes.values())) if point not in there]
    if missing:
        shown = (
            " ".join(
                f"{name.get(axis, axis.upper())} {number}"
                for axis, number in zip(axes, point, strict=True)
                if axes[axis] > 1
            )
            for point in missing[:NAMES]
        )
        raise CorruptError(
            f"{len(missing):,} of {len(there) + len(missing):,} rank files are missing: "
            f"{', '.join(text or 'the only one' for text in shown)}",
            hint="every rank wrote its own file: copy the missing files from the same source",
        )
    stale = [part.file for part in parts if any(part.at[axis] >= n for axis, n in axes.items())]
    if stale:
        raise CorruptError(f"has {sizes}, but contains files of other ranks: {stale[0]}")


# Parsing and applying lines


@lru_cache(256)
def _line(how: str, count: int) -> tuple[Rule, Arrangement]:
    """Parse a line as a rule for `count` shards.

    If the size of an axis differs from rank to rank, ``Arrangement.ragged`` maps this axis to the
    axis before it.
    """
    left, _, right = how.partition(" -> ")
    labels = "|".join(map(str, range(count)))
    found = parse_rule(f"{{{TP}:{labels}}} {left} -> whole {right}")
    words = axis_words(found)
    known = evaluate(found, Settings({TP: count}))
    uneven = {
        word: before
        for axes in found.left.shape
        for before, word in pairwise(axes)
        if len(known.sizes.get(word, ())) > 1
    }
    for axes in found.right.shape:
        free = [word for word in axes if word != TP and word not in known.sizes]
        if TP in axes and free:
            uneven[free[0]] = TP
    return found, Arrangement(1, found, words, known, uneven)


@lru_cache(512)  # many layers have equal shapes and are split by the same line
def _joined(how: str, shapes: tuple[Shape, ...], names: tuple[str, ...] = ()) -> ArrangedRule:
    """Return the rule that joins shards of these shapes.

    Raises MisfitError or RuleError if the shapes do not match the line.
    """
    _, arrangement = _line(how, len(shapes))
    members = [
        SourceTensor(names[n] if names else str(n), (n,), shape) for n, shape in enumerate(shapes)
    ]
    (made,) = arrangement.solve({}, arrangement.known_sizes, members).layout.made
    return made


@lru_cache(512)
def _cut(how: str, shape: Shape, count: int) -> tuple[ArrangedRule, ...]:
    """Return the rules that split a tensor into `count` shards of the same shape.

    Raises MisfitError or RuleError if the shape does not match the line.
    """
    found, arrangement = _line(how, count)
    known = evaluate(found, Settings({TP: count}))
    uneven = {word: by for word, by in arrangement.ragged.items() if by != TP}
    back = Arrangement(1, found.reversed(), axis_words(found.reversed()), known, uneven)
    return back.solve({}, back.known_sizes, [SourceTensor("it", (), shape)]).layout.made


def _is_whole(how: str) -> bool:
    """Return whether the line leaves a tensor unchanged if there is only one rank."""
    found, _ = _line(how, 1)
    right = [
        axes if isinstance(axes, str) else tuple(word for word in axes if word != TP)
        for axes in found.right.shape
    ]
    return list(found.left.shape) == right


# Merging


def merge(
    parts: Sequence[RankFile], axes: Mapping[str, int], table: ParallelLayout, joiner: Joiner
) -> Merged:
    """Join the shards of each tensor. Return the tensors by their global names.

    `axes` maps each axis, including ``tp``, to its size. Raises CorruptError if the files do not
    match. Raises UnsupportedError if no row matches a name.
    """
    named = [dict(part.entries) for part in parts]
    for offset in table.offsets:
        named = _renumbered(offset, parts, named, axes)
    count = axes.get(TP, 1)
    # Maps a name and a tensor-parallel rank to nodes. Several nodes are replicas of each other.
    rows: dict[str, dict[int, list[tuple[Node, str]]]] = {}
    for part, entries in zip(parts, named, strict=True):
        for name, node in entries.items():
            rows.setdefault(name, {}).setdefault(part.at.get(TP, 0), []).append((node, part.file))
    for name, by_rank in rows.items():
        lacking = next((rank for rank in range(count) if rank not in by_rank), None)
        if lacking is not None:
            raise CorruptError(
                f"{name[:80]!r} is in {next(iter(by_rank.values()))[0][1]}, but rank {lacking} of "
                f"{count} has no shard of this tensor",
                hint="the files are of different saves",
            )
    dropped: dict[str, list[str]] = {}
    for name, of in table.copies:
        if name in rows and of in rows:
            for rank, held in rows.pop(name).items():
                joiner.same(f"{of} ({name})", _plain(of, [rows[of][rank][0], *held]))
            dropped.setdefault(f"a copy of {of}", []).append(name)
    made = OrderedMapping()
    constant: list[str] = []
    for name, by_rank in rows.items():
        row = _row(table, name, count, held=len(by_rank[0]))
        if row is not None and row.word == DROP:
            dropped.setdefault(row.how.partition(": ")[2], []).append(name)
            continue
        cut_parts = []
        for rank in range(count):
            held_here = _plain(name, by_rank[rank])
            joiner.same(name, held_here)
            cut_parts.append(held_here[0])
        try:
            made[name] = _whole(name, row, cut_parts, joiner, constant)
        except CkptkitError as error:
            error.hint = error.hint or table.hint
            raise
    warnings = [f"dropped {some(names)}: {reason}" for reason, names in dropped.items()]
    if constant:
        warnings.append(
            f"all elements are equal, so ckptkit cannot verify the split: {some(constant)}"
        )
    return Merged(made, warnings)


def _renumbered(
    offset: Offset,
    parts: Sequence[RankFile],
    named: Sequence[Mapping[str, Node]],
    axes: Mapping[str, int],
) -> list[dict[str, Node]]:
    """Return the entries of each file. Replace the numbers in names by global numbers."""
    counts: dict[tuple[int, ...], int] = {}
    points = [tuple(part.at.get(axis, 0) for axis in offset.by) for part in parts]
    for part, point, entries in zip(parts, points, named, strict=True):
        numbers = {int(found[1]) for name in entries if (found := offset.pattern.search(name))}
        if numbers != set(range(len(numbers))):
            raise CorruptError(
                f"the {offset.what} in {part.file} are not numbered 0, 1, 2 and so on: "
                f"{sorted(numbers)[:8]}"
            )
        if counts.setdefault(point, len(numbers)) != len(numbers):
            raise CorruptError(
                f"{part.file} has {len(numbers):,} {offset.what}, but another file of the same "
                f"stage has {counts[point]:,}"
            )
    starts, total = {}, 0
    for point in product(*(range(axes.get(axis, 1)) for axis in offset.by)):
        starts[point] = total
        total += counts.get(point, 0)
    if offset.total is not None and total not in (0, offset.total):
        raise CorruptError(
            f"its files have {total:,} {offset.what}, but its arguments give {offset.total:,}"
        )
    made: list[dict[str, Node]] = []
    for point, entries in zip(points, named, strict=True):
        made.append({})
        for name, node in entries.items():
            if found := offset.pattern.search(name):
                number = int(found[1]) + starts[point]
                name = f"{name[: found.start(1)]}{number}{name[found.end(1) :]}"
            made[-1][name] = node
    return made


def _row(table: ParallelLayout, name: str, count: int, *, held: int) -> LayoutRow | None:
    """Return the row of a tensor. Return None if the tensor has a single shard and needs no row.

    `count` is the number of tensor-parallel ranks. `held` is the number of files of tensor-parallel
    rank 0 that contain the tensor. Raises UnsupportedError if a tensor with several shards has no
    row, or has a row with ``refuse``.
    """
    try:
        row = table.row(name)
    except UnsupportedError:
        if count > 1:
            raise
        return None
    if row.word != REFUSE:
        return row
    if count == held == 1:
        return None
    raise UnsupportedError(f"{name[:80]!r}: {row.how.partition(': ')[2]}", hint=table.hint)


def _plain(name: str, held: Iterable[tuple[Node, str]]) -> list[tuple[Tensor, str]]:
    found = []
    for node, file in held:
        tensor = as_tensor(node)
        if tensor is None or tensor.storage is None or tensor.layout != "strided":
            raise UnsupportedError(f"{name[:80]!r} in {file} is not a strided tensor with data")
        found.append((tensor, file))
    return found


def _whole(
    name: str, row: LayoutRow | None, parts: Parts, joiner: Joiner, constant: list[str]
) -> Tensor:
    """Join the shards of a tensor.

    Add the name to `constant` if all elements of all shards are equal. If all elements are equal,
    the shards do not show whether the table is right.
    """
    (first, file), *others = parts
    if row is None or (not others and (row.word in (SAME, SUM, MEAN) or _is_whole(row.how))):
        return joiner.plain(first)
    if row.word == SAME:
        return joiner.same(name, parts)
    if row.word in (SUM, MEAN):
        return _computed(name, row.word, parts, joiner)
    dim = next(n for n, axes in enumerate(_line(row.how, 1)[0].right.shape) if TP in axes)
    for tensor, place in others:
        one, other = ((*t.shape[:dim], "", *t.shape[dim + 1 :]) for t in (first, tensor))
        if tensor.dtype != first.dtype or one != other:
            raise CorruptError(
                f"{name!r} is {first.dtype} {first.shape} in {file}, but {tensor.dtype} "
                f"{tensor.shape} in {place}",
                hint="the files are of different saves",
            )
    if row.widths:
        parts = _blocks(name, row, dim, parts)
    elif others and first.numel and all(tensor.shape == first.shape for tensor, _ in others):
        always = first.nbytes <= _PEEK
        copies = [Replica(name, first, tensor, (file, place)) for tensor, place in others]
        if all(joiner.copies.same(copy, always=always) for copy in copies):
            if not _is_constant(first):
                raise CorruptError(
                    f"all {len(parts)} shards of {name!r} are equal, but its rule splits it: "
                    f"{row.how!r}",
                    hint="ckptkit did not recognize the layout: write a table for --parts, in "
                    "which the rule of this tensor is `same`",
                )
            constant.append(name)
    tensors = [tensor for tensor, _ in parts]
    shapes = tuple(tensor.shape for tensor in tensors)
    try:
        made = _joined(row.how, shapes)
    except (MisfitError, RuleError):
        try:
            made = _joined(row.how, shapes, tuple(place for _, place in parts))
        except (MisfitError, RuleError) as error:
            message = error.message.removeprefix("rule 1: ")
            raise CorruptError(
                f"{name!r}: {message}",
                hint="the files are of different saves, or were split in another way",
            ) from error
    # Copy the cached tuple. Otherwise, tensors of equal shapes would share one tuple object, which
    # a pickle stores only once.
    shape = (*made.shape,)
    return joiner.arranged(name, first.dtype, shape, tensors, made.copies)


def _blocks(name: str, row: LayoutRow, dim: int, parts: Parts) -> list[tuple[Tensor, str]]:
    """Split each shard into its blocks. Sort the blocks by their number, then by rank."""
    starts = [0] * len(parts)
    found = []
    for rank, (tensor, file) in enumerate(parts):
        widths = [block[rank] for block in row.widths if rank < len(block)]
        size = tensor.shape[dim] if dim < len(tensor.shape) else 0
        if len(widths) != len(row.widths) or sum(widths) != size:
            raise CorruptError(
                f"{name!r} has {size:,} rows in {file}, but the widths of its blocks are {widths}"
            )
    for block in row.widths:
        for rank, (tensor, file) in enumerate(parts):
            start = tensor.offset + starts[rank] * tensor.stride[dim] if block[rank] else 0
            shape = (*tensor.shape[:dim], block[rank], *tensor.shape[dim + 1 :])
            found.append((replace(tensor, shape=shape, offset=start), file))
            starts[rank] += block[rank]
    return found


def _computed(name: str, word: str, parts: Parts, joiner: Joiner) -> Tensor:
    """Return the sum or mean of the ranks' tensors.

    The mean of equal tensors is the first tensor, unchanged.
    """
    (first, file), *others = parts
    for tensor, place in parts:
        if (tensor.dtype, tensor.shape) != (first.dtype, first.shape) or not has_mean(tensor.dtype):
            raise CorruptError(
                f"{name!r} is {first.dtype} {first.shape} in {file} and {tensor.dtype} "
                f"{tensor.shape} in {place}, so they cannot be added"
            )
    records = tuple(contiguous(tensor) for tensor, _ in parts)
    if word == SUM:
        record = sum_record(records, first.dtype)
    elif all(joiner.copies.same(Replica(name, first, t, (file, place))) for t, place in others):
        joiner.copies.equal += len(others)
        return joiner.plain(first)
    else:
        record = mean_record(records, (first.dtype,) * len(parts), (1.0,) * len(parts))
    return Tensor(Storage(record), first.dtype, first.shape, contiguous_stride(first.shape))


def _is_constant(tensor: Tensor) -> bool:
    """Return whether all elements in the first MiB of a tensor have the same bytes."""
    data = b"".join(stream(contiguous(tensor).locate(), 0, min(tensor.nbytes, _PEEK)))
    unit = data[: tensor.dtype.itemsize]
    return data == unit * (len(data) // len(unit))


def flattened(root: Node) -> Iterator[tuple[str, Node]]:
    """Yield (dotted name, value) of each value in nested dicts."""
    waiting: list[tuple[str, Node]] = [("", root)]
    while waiting:
        name, node = waiting.pop()
        if isinstance(node, dict) and all(isinstance(key, str) for key in node):
            below = [(f"{name}.{key}" if name else key, child) for key, child in node.items()]
            waiting.extend(reversed(below))
        else:
            yield name, node


# Splitting complete tensors according to a table


def ranks_of(options: Options, name: str) -> int:
    """Return the option `ranks`. Raises UsageError if the option is not set."""
    if options.ranks is None:
        raise UsageError(
            f"{name} is split over ranks, but the number of ranks is not given",
            hint=typed("--ranks 2", "ranks=2"),
        )
    return options.ranks


def cut_all(
    tensors: Mapping[str, Tensor], table: ParallelLayout, count: int
) -> list[OrderedMapping]:
    """Split tensors according to a table. Return a state_dict for each of `count` ranks.

    Raises UsageError if the size of a tensor is not divisible by the number of ranks.
    """
    parts: list[dict[Node, Node]] = [{} for _ in range(count)]
    for name, tensor in tensors.items():
        if tensor.storage is None or tensor.layout != "strided":
            raise TensorError(
                f"{name[:80]!r} cannot be split: it is not a strided tensor with data"
            )
        row = table.row(name)
        if row.word in (DROP, REFUSE):
            raise UsageError(f"{name[:80]!r} cannot be split: {row.how.partition(': ')[2]}")
        if row.word in (SUM, MEAN) or row.widths:
            raise UsageError(f"{name!r} cannot be split: ckptkit cannot reverse its rule")
        if row.word == SAME or count == 1:
            for part in parts:
                part[name] = tensor
            continue
        try:
            made = _cut(row.how, tensor.shape, count)
        except (MisfitError, RuleError) as error:
            raise UsageError(
                f"{name!r}: the shape {tensor.shape} is not divisible by {count} ranks: "
                f"{error.message.removeprefix('rule 1: ')}"
            ) from error
        record, dtype = contiguous(tensor), tensor.dtype
        for part, each in zip(parts, made, strict=True):
            shape = (*each.shape,)
            nbytes = dtype.nbytes(prod(shape))
            storage = Storage(Arranged((record,), each.copies, dtype.itemsize, nbytes))
            part[name] = Tensor(storage, dtype, shape, contiguous_stride(shape))
    return [OrderedMapping(part) for part in parts]


def file(name: str, root: Node, options: Options) -> OutputFile:
    """Plan one torch.save file of an output folder."""
    plan = torch_zip.layout(Checkpoint(root), options)
    return replace(plan.files[0], name=name)


# A user's table is a YAML file (``--parts FILE``) with these entries.
#
# * ``files`` is a regular expression that matches paths in the folder. The named groups of the
#   expression are the axes. Tensors are split along the axis ``tp``.
# * ``root`` is the key of the state_dict in each file.
# * ``layers`` contains a pattern for the layer number in a name, and a list of axes. Each rank
#   along the axes in ``layers`` counts its layers from 0.
#
# `ckptkit help parallel` shows an example.


_BYTES = 1 << 20
_KEYS = {"files", "root", "layers", "rules"}
_VERB = re.compile(
    r"(?P<word>same|sum|mean)|drop:?\s*(?P<why>.*)|(?P<line>\[.*\] -> \[.*)"
    r"|cut (?P<dim>[0-9])(?: blocks (?P<blocks>[0-9]{1,4})| sizes (?P<sizes>[0-9 ]{1,200}))?"
)


def parse(data: bytes, where: str) -> Any:
    """Parse YAML or JSON into dicts, lists, strings and numbers.

    Raises UsageError for invalid YAML and for aliases. With aliases, a short file can expand to a
    huge value.
    """
    import yaml

    if len(data) > _BYTES:
        raise UsageError(f"is larger than {_BYTES:,} bytes", where=where)
    try:
        events = list(yaml.parse(data, Loader=yaml.SafeLoader))
        if any(isinstance(event, yaml.events.AliasEvent) for event in events):
            raise UsageError("uses anchors, which ckptkit does not support", where=where)
        return yaml.safe_load(data)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"is not YAML: {str(error).splitlines()[0]}", where=where) from error


class OwnTable:
    """The parsed content of a user's table.

    Raises UsageError for invalid content, and PathError if the file cannot be read.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                content = parse(file.read(_BYTES + 1), path)
        except OSError as error:
            raise PathError(f"cannot be read: {error.strerror}", where=path) from error
        if (
            not isinstance(content, dict)
            or not set(content) <= _KEYS
            or not {"files", "rules"} <= set(content)
        ):
            raise self._wrong(
                "is not a table: the entry `files` or `rules` is missing, or an entry is unknown",
                f"a table may contain {', '.join(sorted(_KEYS))}",
            )
        self.files = self._pattern(content["files"])
        self.root = content.get("root")
        if TP not in self.files.groupindex:
            raise self._wrong(
                "its entry `files` has no group `tp` for the rank",
                r"write (?P<tp>[0-9]+) instead of the rank's number",
            )
        if not isinstance(content["rules"], list):
            raise self._wrong("its entry `rules` is not a list")
        rows = tuple(map(self._rule, content["rules"]))
        self.table = ParallelLayout(rows, self._offsets(content.get("layers")))

    def _wrong(self, message: str, hint: str | None = None) -> UsageError:
        return UsageError(
            message, where=self.path, hint=hint or "`ckptkit help parallel` shows a table"
        )

    def _pattern(self, text: Any) -> re.Pattern[str]:
        try:
            return re.compile(text)
        except (re.error, TypeError) as error:
            raise self._wrong(f"{text!r} is not a regular expression: {error}") from error

    def _rule(self, node: Any) -> LayoutRow:
        if not isinstance(node, dict) or len(node) != 1:
            raise self._wrong(f"{node!r} is not a rule", "a rule is `- 'expression': verb`")
        ((pattern, verb),) = node.items()
        found = _VERB.fullmatch(str(verb))
        if found is None:
            raise self._wrong(
                f"{verb!r} is not a verb",
                "use cut DIM, cut DIM blocks N, cut DIM sizes A B C, same, sum, mean, drop REASON, "
                "or a line such as `[o ...] -> [(tp o) ...]`",
            )
        if found["word"]:
            how = found["word"]
        elif found["why"] is not None:
            how = f"{DROP}: {found['why'] or 'by the table'}"
        elif found["line"]:
            how = found["line"]
            try:
                _line(how, 2)
            except RuleError as error:
                raise self._wrong(f"{how!r}: {error.message}", error.hint) from error
        else:
            sizes = [int(n) for n in (found["sizes"] or "").split()]
            how = cut(int(found["dim"]), int(found["blocks"] or 1), sizes)
        return LayoutRow(self._pattern(pattern), how)

    def _offsets(self, node: Any) -> tuple[Offset, ...]:
        if node is None:
            return ()
        if not isinstance(node, dict) or not isinstance(node.get("by"), list):
            raise self._wrong("its entry `layers` is not {pattern: ..., by: [axis]}")
        pattern = self._pattern(node.get("pattern"))
        axes = tuple(map(str, node["by"]))
        if not pattern.groups or not set(axes) <= set(self.files.groupindex):
            raise self._wrong(
                "the axes in `layers` are not named groups of `files`, or the pattern of `layers` "
                "has no group for the layer number"
            )
        return (Offset(pattern, axes),)


def read(probe: Probe, format: str) -> Checkpoint:
    """Merge all files according to the table in the option `parts`. Return the state_dict."""
    assert probe.options.parts is not None
    own = OwnTable(probe.options.parts)
    reader, joiner = RankReader(probe.folder), Joiner(Copies(probe.options.copies))
    parts = []
    for place, folder, name in _files(probe.folder):
        if not (found := own.files.fullmatch(place)):
            continue
        try:
            at = {axis: int(number or 0) for axis, number in found.groupdict().items()}
        except ValueError as error:
            raise UsageError(
                f"the groups of `files` match characters other than digits: {place!r}"
            ) from error
        root = reader.read(name, folder).root
        if own.root:
            _, root = find(root, str(own.root))
        if not isinstance(root, dict):
            raise FormatError("contains no state_dict", where=name)
        parts.append(RankFile(place, at, dict(flattened(root))))
    if not parts:
        raise UsageError(f"no file in {probe.name} matches {own.files.pattern!r}", where=own.path)
    axes = {axis: 1 + max(part.at[axis] for part in parts) for axis in own.files.groupindex}
    check_grid(parts, axes, {})
    merged = merge(parts, axes, own.table, joiner)
    detail = " x ".join(f"{axis} {n}" for axis, n in axes.items())
    return Checkpoint(
        merged.tensors, format, probe.folder, globals=tuple(reader.globals),
        warnings=(*merged.warnings, *joiner.copies.warnings(), *reader.warnings),
        about=f"{os.path.basename(own.path)}: {detail}",
    )  # fmt: skip


def _files(folder: Folder) -> Iterator[tuple[str, Folder, str]]:
    """Yield (path, folder, name in the folder) of each file in `folder` and its subfolders."""
    below = sorted(folder.folders())
    yield from ((name, folder, name) for name in folder.list() if name not in below)
    for each in below:
        inner = folder.sub(each)
        deeper = set(inner.folders())
        yield from ((f"{each}/{name}", inner, name) for name in inner.list() if name not in deeper)
