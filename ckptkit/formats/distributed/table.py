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

The YAML files in the folder ``layouts`` contain the rows of known layouts. The option `parts` names
the YAML file of a user's table, with these entries:

* ``files`` is a regular expression that matches paths in the folder. The named groups of the
  expression are the axes. Tensors are split along the axis ``tp``.
* ``root`` is the key of the state_dict in each file.
* ``layers`` contains a pattern for the layer number in a name, and a list of axes. Each rank
  along the axes in ``layers`` counts its layers from 0.
* ``rules`` is a list of rows. `ckptkit help parallel` shows an example.

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
from math import prod
from pathlib import Path
from string import Template
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
    UnsupportedError,
    UsageError,
)
from ckptkit.core.limits import check
from ckptkit.core.options import Options
from ckptkit.core.plan import OutputFile
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import flatten, some, typed
from ckptkit.core.tree import Node, OrderedMapping, find, walk
from ckptkit.core.weights import as_tensor
from ckptkit.formats import torch_zip
from ckptkit.formats.distributed.joining import MIXED, Joiner
from ckptkit.formats.distributed.meshes import view
from ckptkit.formats.distributed.reading import RankReader, check_ranks
from ckptkit.formats.format import Probe
from ckptkit.rules.arrange import ArrangedRule, Arrangement, SourceTensor
from ckptkit.rules.names import KnownSizes, Settings, axis_words
from ckptkit.rules.notation import MisfitError, Rule, RuleError, parse_rule

TP = "tp"  # name of the tensor-parallel axis
SAME, SUM, MEAN, DROP, REFUSE = "same", "sum", "mean", "drop", "refuse"
_PEEK = 1 << 20  # maximum number of bytes of a tensor that `_is_constant` reads
_BYTES = 1 << 20  # maximum size of a table
_HINT = "write a table for --parts that describes the split: see `ckptkit help parallel`"
_ENTRIES = {"files", "root", "layers", "rules"}
_VERB = re.compile(
    r"same|sum|mean|(?P<word>drop|refuse):?\s*(?P<why>.*)|(?P<line>\[.*\] -> \[.*)"
    r"|cut (?P<dim>[0-9])(?: blocks (?P<blocks>[0-9]{1,9})| sizes (?P<sizes>[0-9 ]{1,200}))?"
)

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

    @property
    def reason(self) -> str:
        return self.how.partition(": ")[2]


def parse_rows(rules: Sequence[Any]) -> tuple[LayoutRow, ...]:
    """Parse the rules of a table. Raises UsageError for an invalid rule."""
    made = []
    for node in rules:
        if not isinstance(node, dict) or len(node) != 1:
            raise UsageError(f"{node!r} is not a rule", hint="a rule is `- 'expression': verb`")
        ((pattern, verb),) = node.items()
        found = _VERB.fullmatch(str(verb))
        if found is None:
            raise UsageError(
                f"{verb!r} is not a verb",
                hint="use cut DIM, cut DIM blocks N, cut DIM sizes A B C, same, sum, mean, drop "
                "REASON, refuse REASON, or a line such as `[o ...] -> [(tp o) ...]`",
            )
        how = str(verb)
        if found["word"]:
            how = f"{found['word']}: {found['why'] or 'by the table'}"
        elif found["line"]:
            try:
                _line(how, 2)
            except RuleError as error:
                raise UsageError(f"{how!r}: {error.message}", hint=error.hint) from error
        elif found["dim"]:
            sizes = [int(n) for n in (found["sizes"] or "").split()]
            how = cut(int(found["dim"]), int(found["blocks"] or 1), sizes)
        made.append(LayoutRow(_pattern(pattern), how))
    return tuple(made)


def _pattern(text: Any) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except (re.error, TypeError) as error:
        raise UsageError(f"{text!r} is not a regular expression: {error}", hint=_SEE) from error


def known_rows(layout: str, **values: object) -> tuple[LayoutRow, ...]:
    """Return the rows of a file in the folder ``layouts``.

    `values` replaces the words that begin with $.
    """
    path = Path(__file__).with_name("layouts") / f"{layout}.yaml"
    rules = parse(path.read_bytes(), str(path))
    return parse_rows(
        [
            {pattern: Template(verb).substitute(values) for pattern, verb in rule.items()}
            for rule in rules
        ]
    )


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

    def row(self, name: str, *, alone: bool = False) -> LayoutRow:
        """Return the first row that matches `name`.

        Raises UnsupportedError if no row matches. If `alone` is true, return a row with ``same``
        instead, because a tensor that is not split needs no row.
        """
        for each in self.rules:
            if each.pattern.fullmatch(name):
                return each
        if alone:
            return LayoutRow(re.compile(""), SAME)
        raise UnsupportedError(f"how {name[:80]!r} was split is unknown", hint=_HINT)


@dataclass(frozen=True)
class RankFile:
    """The entries of one file by name, and the rank that wrote the file.

    ``at`` maps each axis to the rank's coordinate.
    """

    file: str
    at: Mapping[str, int]
    entries: Mapping[str, Node] = field(repr=False)


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

    def shown(point: Sequence[int]) -> str:
        named = zip(axes, point, strict=True)
        return " ".join(f"{name.get(a, a.upper())} {n}" for a, n in named if axes[a] > 1)

    check_ranks(there, [*product(*map(range, axes.values()))], shown)


def positive(values: Mapping[Any, Any], *names: str) -> int | None:
    """Return the first positive integer among the values of `names`, or None."""
    found = (values.get(name) for name in names)
    return next((n for n in found if type(n) is int and 0 < n < 1 << 31), None)


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
    known = KnownSizes(found, Settings({TP: count}))
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
def _joined(how: str, shapes: tuple[Shape, ...], files: tuple[str, ...]) -> ArrangedRule:
    """Return the rule that joins shards of these shapes.

    Raises MisfitError or RuleError if the shapes do not match the line.
    """
    _, arrangement = _line(how, len(shapes))
    members = [
        SourceTensor(file, (n,), shape)
        for n, (file, shape) in enumerate(zip(files, shapes, strict=True))
    ]
    (made,) = arrangement.solve({}, arrangement.known_sizes, members).layout.made
    return made


@lru_cache(512)
def _cut(how: str, shape: Shape, count: int) -> tuple[ArrangedRule, ...]:
    """Return the rules that split a tensor into `count` shards of the same shape.

    Raises MisfitError or RuleError if the shape does not match the line.
    """
    found, arrangement = _line(how, count)
    known = KnownSizes(found, Settings({TP: count}))
    uneven = {word: by for word, by in arrangement.ragged.items() if by != TP}
    back = Arrangement(1, found.reversed(), axis_words(found.reversed()), known, uneven)
    return back.solve({}, back.known_sizes, [SourceTensor("it", (), shape)]).layout.made


# Merging


def merge(
    parts: Sequence[RankFile], count: int, table: ParallelLayout, joiner: Joiner
) -> OrderedMapping:
    """Join the shards of each tensor. Return the tensors by their global names.

    `count` is the number of tensor-parallel ranks. Raises CorruptError if the files do not match.
    Raises UnsupportedError if no row matches a name.
    """
    named: Sequence[Mapping[str, Node]] = [part.entries for part in parts]
    for offset in table.offsets:
        named = _renumbered(offset, parts, named)
    shards = _shards(parts, named, count)
    dropped: dict[str, list[str]] = {}
    for name, of in table.copies:
        if name in shards and of in shards:
            for original, held in zip(shards[of], shards.pop(name), strict=True):
                joiner.same(f"{of} ({name})", _strided(of, [original[0], *held]))
            dropped.setdefault(f"a copy of {of}", []).append(name)
    made, constant = OrderedMapping(), list[str]()
    for name, by_rank in shards.items():
        row = table.row(name, alone=count == 1)
        if row.word == REFUSE and len(by_rank[0]) == count == 1:
            row = row._replace(how=SAME)
        if row.word == REFUSE:
            raise UnsupportedError(f"{name[:80]!r}: {row.reason}", hint=_HINT)
        if row.word == DROP:
            dropped.setdefault(row.reason, []).append(name)
            continue
        tensors = []
        for held in by_rank:
            replicas = _strided(name, held)
            joiner.same(name, replicas)
            tensors.append(replicas[0])
        try:
            made[name] = _whole(name, row, tensors, joiner, constant)
        except CkptkitError as error:
            error.hint = error.hint or _HINT
            raise
    joiner.notes += [f"dropped {some(names)}: {reason}" for reason, names in dropped.items()]
    if constant:
        joiner.notes.append(
            f"all elements are equal, so ckptkit cannot verify the split: {some(constant)}"
        )
    return made


def _shards(
    parts: Sequence[RankFile], named: Sequence[Mapping[str, Node]], count: int
) -> dict[str, list[list[tuple[Node, str]]]]:
    """Map each name to the nodes on each tensor-parallel rank. The nodes of a rank are replicas."""
    shards: dict[str, list[list[tuple[Node, str]]]] = {}
    for part, entries in zip(parts, named, strict=True):
        for name, node in entries.items():
            by_rank = shards.setdefault(name, [[] for _ in range(count)])
            by_rank[part.at[TP]].append((node, part.file))
    for name, by_rank in shards.items():
        if [] in by_rank:
            raise CorruptError(
                f"{name[:80]!r} is in {next(filter(None, by_rank))[0][1]}, but rank "
                f"{by_rank.index([])} of {count} has no shard of this tensor",
                hint=MIXED,
            )
    return shards


def _renumbered(
    offset: Offset, parts: Sequence[RankFile], named: Sequence[Mapping[str, Node]]
) -> list[dict[str, Node]]:
    """Return the entries of each file. Replace the numbers in names by global numbers."""
    counts: dict[tuple[int, ...], int] = {}
    points = [tuple(part.at[axis] for axis in offset.by) for part in parts]
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
    for point in sorted(counts):
        starts[point] = total
        total += counts[point]
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


def _strided(name: str, held: Iterable[tuple[Node, str]]) -> list[tuple[Tensor, str]]:
    found = []
    for node, file in held:
        tensor = as_tensor(node)
        if tensor is None or tensor.storage is None or tensor.layout != "strided":
            raise UnsupportedError(f"{name[:80]!r} in {file} is not a strided tensor with data")
        found.append((tensor, file))
    return found


def _whole(name: str, row: LayoutRow, parts: Parts, joiner: Joiner, constant: list[str]) -> Tensor:
    """Join the shards of a tensor.

    Add the name to `constant` if all elements of all shards are equal. If all elements are equal,
    the shards do not show whether the table is right.
    """
    (first, file), *others = parts
    left, _, right = row.how.partition(" with ")[0].partition(" -> ")
    is_whole = not others and (row.word in (SUM, MEAN) or left == right.replace(f"{TP} ", ""))
    if row.word == SAME or is_whole:
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
                hint=MIXED,
            )
    if row.widths:
        parts = _blocks(name, row, dim, parts)
    elif others and first.numel and all(tensor.shape == first.shape for tensor, _ in others):
        always = first.nbytes <= _PEEK
        if all(joiner.compare(first, tensor, always=always) for tensor, _ in others):
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
        made = _joined(row.how, shapes, tuple(place for _, place in parts))
    except (MisfitError, RuleError) as error:
        message = error.message.removeprefix("rule 1: ")
        raise CorruptError(
            f"{name!r}: {message}", hint=f"{MIXED}, or were split in another way"
        ) from error
    # Copy the cached tuple. Otherwise, tensors of equal shapes would share one tuple object, which
    # a pickle stores only once.
    return joiner.arranged(name, first.dtype, (*made.shape,), tensors, made.copies)


def _blocks(name: str, row: LayoutRow, dim: int, parts: Parts) -> list[tuple[Tensor, str]]:
    """Split each shard into its blocks. Sort the blocks by their number, then by rank."""
    blocks: list[list[tuple[Tensor, str]]] = [[] for _ in row.widths]
    for rank, (tensor, file) in enumerate(parts):
        widths = [block[rank] for block in row.widths if rank < len(block)]
        size = tensor.shape[dim] if dim < len(tensor.shape) else 0
        if len(widths) != len(row.widths) or sum(widths) != size:
            raise CorruptError(
                f"{name!r} has {size:,} rows in {file}, but the widths of its blocks are {widths}"
            )
        start = 0
        for block, width in zip(blocks, widths, strict=True):
            sizes = (*tensor.shape[:dim], width, *tensor.shape[dim + 1 :])
            at = tuple(start if n == dim else 0 for n in range(len(sizes)))
            block.append((view(tensor, at, sizes), file))
            start += width
    return list(flatten(blocks))


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
    elif all(joiner.compare(first, tensor) for tensor, _ in others):
        joiner.equal += len(others)
        return joiner.plain(first)
    else:
        record = mean_record(records, (first.dtype,) * len(parts), (1.0,) * len(parts))
    return Tensor(Storage(record), first.dtype, first.shape, contiguous_stride(first.shape))


def _is_constant(tensor: Tensor) -> bool:
    """Return whether all elements in the first MiB of a tensor have the same bytes."""
    data = b"".join(stream(contiguous(tensor).locate(), 0, min(tensor.nbytes, _PEEK)))
    unit = data[: tensor.dtype.itemsize]
    return data == unit * (len(data) // len(unit))


def read_parts(
    reader: RankReader, files: re.Pattern[str], key: str = "", *, below: bool = False
) -> list[RankFile]:
    """Read the files whose paths match `files`. The named groups of `files` are the axes.

    `key` is the key of the state_dict in each file, or "". If `below` is true, also read files in
    subfolders.
    """
    parts = []
    for place, folder, name in _files(reader.folder, below=below):
        if not (found := files.fullmatch(place)):
            continue
        try:
            at = {axis: int(number or 0) for axis, number in found.groupdict().items()}
        except ValueError as error:
            raise UsageError(
                f"the groups of `files` match characters other than digits: {place!r}"
            ) from error
        root = reader.read(name, folder).root
        if key:
            _, root = find(root, key)
        if not isinstance(root, dict):
            raise FormatError("contains no state_dict", where=name)
        parts.append(RankFile(place, at, dict(flattened(root))))
    return parts


def _files(folder: Folder, *, below: bool) -> Iterator[tuple[str, Folder, str]]:
    """Yield (path, folder, name in the folder) of each file in `folder`.

    If `below` is true, also yield the files in its subfolders.
    """
    folders = folder.folders()
    yield from ((name, folder, name) for name in folder.list() if name not in folders)
    for each in folders if below else ():
        yield from (
            (f"{each}/{name}", inner, name)
            for _, inner, name in _files(folder.sub(each), below=False)
        )


def flattened(root: Node) -> Iterator[tuple[str, Node]]:
    """Yield (dotted name, value) of each value in nested dicts."""
    found = walk(root, lambda path, node: not _has_names(node))
    return ((".".join(path), node) for path, node in found if not _has_names(node))


def _has_names(node: Node) -> bool:
    return isinstance(node, dict) and all(isinstance(key, str) for key in node)


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
    parts = [OrderedMapping() for _ in range(count)]
    for name, tensor in tensors.items():
        _strided(name, [(tensor, "the input")])
        row = table.row(name)
        if row.word in (DROP, REFUSE, SUM, MEAN):
            why = row.reason or "ckptkit cannot reverse its rule"
            raise UsageError(f"{name[:80]!r} cannot be split: {why}")
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
    return parts


def file(name: str, root: Node, options: Options) -> OutputFile:
    """Plan one torch.save file of an output folder."""
    plan = torch_zip.layout(Checkpoint(root), options)
    return replace(plan.files[0], name=name)


# A user's table


_SEE = "`ckptkit help parallel` shows a table"


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


def _own_table(content: Any) -> tuple[re.Pattern[str], ParallelLayout]:
    """Return the entry `files` and the layout of a user's table.

    Raises UsageError for invalid content.
    """
    if not isinstance(content, dict) or not {"files", "rules"} <= set(content) <= _ENTRIES:
        raise UsageError(
            "is not a table: the entry `files` or `rules` is missing, or an entry is unknown",
            hint=f"a table may contain {', '.join(sorted(_ENTRIES))}",
        )
    files, layers, rules = _pattern(content["files"]), content.get("layers"), content["rules"]
    if TP not in files.groupindex:
        raise UsageError(
            "its entry `files` has no group `tp` for the rank",
            hint=r"write (?P<tp>[0-9]+) instead of the rank's number",
        )
    if not isinstance(rules, list):
        raise UsageError("its entry `rules` is not a list", hint=_SEE)
    offsets: tuple[Offset, ...] = ()
    if layers is not None:
        by = layers.get("by") if isinstance(layers, dict) else None
        pattern = _pattern(layers.get("pattern")) if isinstance(by, list) else re.compile("")
        if not pattern.groups or not set(map(str, by or ())) <= set(files.groupindex):
            raise UsageError(
                "its entry `layers` is not {pattern: ..., by: [axis]}, in which the pattern has a "
                "group for the layer number, and the axes are named groups of `files`",
                hint=_SEE,
            )
        offsets = (Offset(pattern, tuple(map(str, by or ()))),)
    return files, ParallelLayout(parse_rows(rules), offsets)


def read(probe: Probe) -> Checkpoint:
    """Merge all files according to the table in the option `parts`. Return the state_dict."""
    path = probe.options.parts
    assert path is not None
    try:
        with open(path, "rb") as source:
            content = parse(source.read(_BYTES + 1), path)
        files, layout = _own_table(content)
    except OSError as error:
        raise PathError(f"cannot be read: {error.strerror}", where=path) from error
    except UsageError as error:
        raise error.at(path) from error.__cause__
    reader, joiner = RankReader(probe.folder), Joiner(probe)
    parts = read_parts(reader, files, str(content.get("root") or ""), below=True)
    if not parts:
        raise UsageError(f"no file in {probe.name} matches {files.pattern!r}", where=path)
    axes = {axis: 1 + max(part.at[axis] for part in parts) for axis in files.groupindex}
    check_grid(parts, axes, {})
    merged = merge(parts, axes[TP], layout, joiner)
    detail = " x ".join(f"{axis} {n}" for axis, n in axes.items())
    return joiner.checkpoint(merged, reader, f"{os.path.basename(path)}: {detail}")
