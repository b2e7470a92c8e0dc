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

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import NamedTuple

from ckptkit.compute.arranged import contiguous
from ckptkit.compute.operation import stream
from ckptkit.core.errors import CkptkitError, CorruptError, UnsupportedError
from ckptkit.core.limits import check
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import NAMES, some
from ckptkit.core.tree import Node, OrderedMapping
from ckptkit.core.weights import as_tensor
from ckptkit.formats.parallel.copies import Copy
from ckptkit.formats.parallel.joining import Joiner
from ckptkit.formats.parallel.verbs import Cut, Drop, Parts, Refuse, Verb

TP = "tp"  # the axis that cuts
_PEEK = 1 << 20  # bytes of a part that are read to see whether it is constant

At = Mapping[str, int]


class Rule(NamedTuple):
    """A regular expression for whole names, and what is done with what it matches."""

    pattern: re.Pattern[str]
    verb: Verb

    def matches(self, name: str) -> bool:
        return self.pattern.fullmatch(name) is not None


def rule(pattern: str, verb: Verb) -> Rule:
    """A row of a table."""
    return Rule(re.compile(pattern), verb)


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
class Table:
    """The rules that merge the parts of a layout."""

    rules: tuple[Rule, ...]
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
    parts: Sequence[RankFile], axes: Mapping[str, int], table: Table, joiner: Joiner
) -> Merged:
    """Every tensor, whole, under its name in the whole model.

    `axes` are the axes of the grid and their sizes, the one that cuts (``tp``) among them. Raises
    CorruptError for parts that do not go together, UnsupportedError for a name without a rule.
    """
    return _Merge(parts, axes, table, joiner).run()


class _Merge:
    def __init__(
        self, parts: Sequence[RankFile], axes: Mapping[str, int], table: Table, joiner: Joiner
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
        copies = [Copy(name, first, each, (file, place)) for each, place in others]
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
