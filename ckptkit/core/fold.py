"""Folding of rows that differ only in an index: ``layers.{0..31}.attn.weight``.

An index is a part between dots that is a number. Each folded row represents exactly the rows that
its ranges spell out: folding goes over one index after the other, last first, and joins only rows
that are equal in all else.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from ckptkit.core.text import some

_INDEX = r"(0|[1-9][0-9]{0,17})"
_split = re.compile(rf"(?<![^.]){_INDEX}(?![^.])").split
_last_index = re.compile(rf"((?:.*\.)?){_INDEX}((?:\..*)?)", re.DOTALL).fullmatch
COUNTERS = ("num_batches_tracked", "step")
RUNS = 8  # runs of numbers that are spelled out between braces

Indices = tuple[tuple[int, ...], ...]  # for each index in a name, the values that it takes


class Item(NamedTuple):
    label: str
    columns: Hashable  # what must be equal
    nbytes: int


class Folded(NamedTuple):
    label: str
    columns: Any  # Hashable
    nbytes: int  # of all
    rows: int


_Block = tuple[int, Indices, int, int]  # joined rows: position of the first, indices, bytes, number


class Modules:
    """The kinds of modules, by what each holds directly: a linear layer is no batch norm.

    `tensors` are names with dtype and number of dimensions, of the whole checkpoint, each once. A
    kind is the sum of the hashes of its parts: a set for each module would take more memory than
    the tensors.
    """

    def __init__(self, tensors: Iterable[tuple[str, str, int]] = ()) -> None:
        self._kinds = kinds = dict[str, int]()
        for name, dtype, dimensions in tensors:
            module, _, last = name.rpartition(".")
            if not last.isdecimal():  # the items of a list are no parts of a module
                kinds[module] = kinds.get(module, 0) + hash((last, dtype, dimensions))

    def __call__(self, name: str) -> int | None:
        """Return the kind of the module that a tensor is in; None for one in a list, or a counter.

        Counters of training (steps, batches) are alike in modules of all kinds.
        """
        module, _, last = name.rpartition(".")
        return None if last in COUNTERS else self._kinds.get(module)


def fold(items: Iterable[Item | tuple[str, Hashable, int]]) -> list[Folded]:
    """Join rows that differ only in an index, each at the place of the first that it represents."""
    found: list[tuple[int, Folded]] = []
    runs: dict[tuple[str, str, Hashable], _Run] = {}
    values = _Values()
    for position, (label, columns, nbytes) in enumerate(items):
        if (last := _last_index(label)) is None:
            found.append((position, Folded(label, columns, nbytes, 1)))
            continue
        before, index, after = last.groups()
        run = runs.get((before, after, columns))
        if run is None:
            run = runs[before, after, columns] = _Run(position)
        run.values.append(values[index])
        run.nbytes += nbytes
    groups: defaultdict[tuple[tuple[str, ...], Hashable], list[_Block]] = defaultdict(list)
    for (before, after, columns), run in runs.items():
        parts = _split(before)
        groups[(*parts[::2], after), columns].append(run.block(parts[1::2]))
    for (texts, columns), blocks in groups.items():
        for first, indices, nbytes, count in _joined(blocks, len(texts) - 2):
            found.append((first, Folded(_label(texts, indices), columns, nbytes, count)))
    return [row for _, row in sorted(found)]


class _Run:
    """Rows that agree in all but their last index. Little for each: there may be a million."""

    __slots__ = ("first", "nbytes", "values")

    def __init__(self, first: int) -> None:
        self.first = first
        self.values: list[int] = []
        self.nbytes = 0

    def block(self, others: Iterable[str]) -> _Block:
        """Return the joined rows; `others` are the indices before the last one."""
        indices = (*[(int(index),) for index in others], tuple(self.values))
        return self.first, indices, self.nbytes, len(self.values)


class _Values(dict[str, int]):
    """The value of an index, by its text: many names have the same ones."""

    def __missing__(self, text: str) -> int:
        self[text] = value = int(text)
        return value


def family(name: str) -> str:
    """Return the label of names that differ in indices alone: ``layers.*.weight``."""
    return "*".join(_split(name)[::2])


def ranges(names: Iterable[str]) -> str:
    """Return the label of names that differ in indices alone, as ``{0,2}.weight``."""
    return some([row.label for row in fold(Item(name, (), 0) for name in names)])


def unfolded(items: Iterable[Item | tuple[str, Hashable, int]]) -> list[Folded]:
    """Return the same rows, unjoined."""
    return [Folded(label, columns, nbytes, 1) for label, columns, nbytes in items]


def _joined(blocks: list[_Block], dimensions: int) -> Iterable[_Block]:
    for dimension in reversed(range(dimensions)):
        if len(blocks) > 1:
            blocks = list(_along(blocks, dimension))
    return blocks


def _along(blocks: list[_Block], dimension: int) -> Iterator[_Block]:
    """Join blocks that agree in every index but one."""
    together: defaultdict[Indices, list[_Block]] = defaultdict(list)
    for block in blocks:
        indices = block[1]
        together[indices[:dimension] + indices[dimension + 1 :]].append(block)
    for same in together.values():
        first, indices, _, _ = same[0]
        values = tuple(chain.from_iterable([block[1][dimension] for block in same]))
        nbytes, rows = sum([block[2] for block in same]), sum([block[3] for block in same])
        yield first, (*indices[:dimension], values, *indices[dimension + 1 :]), nbytes, rows


def _label(texts: tuple[str, ...], indices: Indices) -> str:
    pieces = [texts[0]]
    for values, text in zip(indices, texts[1:], strict=True):
        pieces += [_ranges(values), text]
    return "".join(pieces)


def _ranges(values: tuple[int, ...]) -> str:
    """Format numbers as ``7``, ``{0..31}``, ``{0..3,5}``; many runs are cut short."""
    ordered = sorted(set(values))
    if len(ordered) == 1:
        return str(ordered[0])
    texts = []
    first = last = ordered[0]
    for value in (*ordered[1:], -1):  # which ends the last run
        if value != last + 1:
            texts.append(f"{first}..{last}" if last > first else str(first))
            first = value
        last = value
    if len(texts) > RUNS:
        texts[3:-1] = [".."]
    return "{" + ",".join(texts) + "}"
