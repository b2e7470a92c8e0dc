"""Rows that differ only in an index become one: ``layers.{0..31}.attn.weight``.

An index is a part between dots that is a number. Each folded row stands for exactly the rows that its ranges spell
out: folding goes over one index after the other, last first, and joins only what is equal in all else.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

_INDEX = re.compile(r"(?<![^.])(0|[1-9][0-9]{0,17})(?![^.])")
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


class _Block(NamedTuple):
    first: int  # position of its first row
    indices: Indices
    nbytes: int
    rows: int


def fold(items: Iterable[Item]) -> list[Folded]:
    """Fewer rows, each at the place of the first that it stands for."""
    groups: dict[tuple[tuple[str, ...], Hashable], list[_Block]] = {}
    for position, (label, columns, nbytes) in enumerate(items):
        parts = _INDEX.split(label)
        indices = tuple([(int(each),) for each in parts[1::2]])
        groups.setdefault((tuple(parts[::2]), columns), []).append(_Block(position, indices, nbytes, 1))
    found = sorted(
        (block.first, Folded(_label(texts, block.indices), columns, block.nbytes, block.rows))
        for (texts, columns), blocks in groups.items()
        for block in _joined(blocks, len(texts) - 1)
    )
    return [row for _, row in found]


def unfolded(items: Iterable[Item]) -> list[Folded]:
    """The same rows, one for each."""
    return [Folded(label, columns, nbytes, 1) for label, columns, nbytes in items]


def _joined(blocks: list[_Block], dimensions: int) -> Iterable[_Block]:
    for dimension in reversed(range(dimensions)):
        if len(blocks) > 1:
            blocks = list(_along(blocks, dimension))
    return blocks


def _along(blocks: list[_Block], dimension: int) -> Iterator[_Block]:
    """Blocks that agree in every index but one, put together."""
    together: dict[tuple[Indices, Indices], list[_Block]] = {}
    for block in blocks:
        rest = block.indices[:dimension], block.indices[dimension + 1 :]
        together.setdefault(rest, []).append(block)
    for (before, after), same in together.items():
        values = tuple([value for block in same for value in block.indices[dimension]])
        nbytes, rows = sum(block.nbytes for block in same), sum(block.rows for block in same)
        yield _Block(same[0].first, (*before, values, *after), nbytes, rows)


def _label(texts: tuple[str, ...], indices: Indices) -> str:
    pieces = [texts[0]]
    for values, text in zip(indices, texts[1:], strict=True):
        pieces += [_ranges(values), text]
    return "".join(pieces)


def _ranges(values: tuple[int, ...]) -> str:
    """``7``, ``{0..31}``, ``{0..3,5}``; many runs are cut short."""
    ordered = sorted(set(values))
    if len(ordered) == 1:
        return str(ordered[0])
    runs: list[list[int]] = []
    for value in ordered:
        if runs and value == runs[-1][-1] + 1:
            runs[-1][1:] = [value]
        else:
            runs.append([value])
    texts = ["..".join(map(str, run)) for run in runs]
    if len(texts) > RUNS:
        texts[3:-1] = [".."]
    return "{" + ",".join(texts) + "}"
