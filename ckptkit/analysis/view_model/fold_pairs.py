"""Fold pairs of names that differ only in an index: ``layers.{0..3}.w`` and ``blocks.{1..4}.w``."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

from ckptkit.core.text import Item, fold

_INDEX = re.compile(r"(?<![^.])(0|[1-9][0-9]{0,17})(?![^.])")  # as in fold
_RANGES = re.compile(r"\{[^}]*\}|[0-9]+")


class FoldedPair(NamedTuple):
    label: str
    other: str
    columns: Any  # Hashable
    rows: int


class _Other(NamedTuple):
    """The second name of a pair: texts between indices, and index differences to the first."""

    texts: tuple[str, ...]
    steps: tuple[int, ...]
    columns: Hashable
    first: tuple[str, ...]  # texts of the first name


def fold_pairs(pairs: Iterable[tuple[str, str, Hashable]]) -> list[FoldedPair]:
    """Fold pairs (name, other name, value) whose values are equal and whose indices run in step."""
    items = (Item(label, _other(label, other, columns), 0) for label, other, columns in pairs)
    return [
        FoldedPair(row.label, _label(row.label, row.columns), row.columns.columns, row.rows)
        for row in fold(items)
    ]


def _other(label: str, other: str, columns: Hashable) -> _Other:
    parts, others = _INDEX.split(label), _INDEX.split(other)
    if len(parts) != len(others):
        others = [other]  # nothing goes along: such pairs stand alone
    steps = tuple([int(b) - int(a) for a, b in zip(parts[1::2], others[1::2], strict=False)])
    return _Other(tuple(others[::2]), steps, columns, tuple(parts[::2]))


def _label(label: str, other: _Other) -> str:
    """Return the second label, with the index ranges that folding gave the first."""
    pieces = [other.texts[0]]
    for ranges, step, text in zip(
        _ranges(label, other.first), other.steps, other.texts[1:], strict=False
    ):
        pieces += [_moved(ranges, step), text]
    return "".join(pieces)


def _moved(ranges: str, step: int) -> str:
    """Return index ranges with `step` added to each number."""
    return re.sub("[0-9]+", lambda found: str(int(found[0]) + step), ranges)


def _ranges(label: str, texts: tuple[str, ...]) -> Iterator[str]:
    at = len(texts[0])
    for text in texts[1:]:
        found = _RANGES.match(label, at)
        assert found is not None
        yield found[0]
        at = found.end() + len(text)
