"""The view of a checkpoint: a heading, remarks, tables of tensors, lists of the rest."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from ckptkit.analysis.summary import Summary, TensorRow, Value
from ckptkit.analysis.values import Plain
from ckptkit.analysis.view_model import Table, tensors
from ckptkit.core.text import Folded, Item, escape, family, flatten, fold, plural, size
from ckptkit.core.tree import join

LISTED = 8  # values of a list; JSON and the tree show all
LONG = 200  # characters of a value; likewise


Values = tuple[tuple[str, Plain], ...]  # of a row: type and value of each


class Listing(NamedTuple):
    """Entries that are not tensors, by name, escaped: values, objects or metadata.

    `things` is their number before folding.
    """

    title: str
    rows: list[tuple[str, str]]
    things: int


def heading(summary: Summary) -> str:
    """Return one line about the file: its path, and `described`."""
    return f"{escape(summary.path)}: {described(summary)}"


def described(summary: Summary) -> str:
    """Return the format, the size and the totals of a checkpoint."""
    totals = summary.totals
    about = f"{escape(summary.format)}, {size(summary.size)}"
    if not totals.tensors:
        return f"{about}: no tensors"
    stored = totals.storage_nbytes != totals.nbytes
    nbytes = size(totals.nbytes) + (
        f" in {size(totals.storage_nbytes)} of storage" if stored else ""
    )
    counts = f"{plural(totals.tensors, 'tensor')}, {plural(totals.parameters, 'parameter')}"
    return f"{about}: {counts}, {nbytes}"


def remarks(summary: Summary, rows: Sequence[TensorRow]) -> Iterator[str]:
    """Yield lines about the whole checkpoint, escaped; `rows` are those that are shown."""
    if summary.about:
        yield escape(summary.about)
    if summary.part is not None:
        yield escape(f"this is {summary.part}")
    if summary.weights is not None and rows:
        yield f"weights: {escape(join(summary.weights)) or 'the whole file'}"
    grouped = [row for row in rows if row.group is not None]
    if kinds := Counter(row.dtype for row in grouped if row.is_logical):
        total = sum(row.name is not None for row in rows)
        each = ", ".join(f"{number:,} {kind}" for kind, number in kinds.items())
        yield escape(
            f"quantized: {sum(kinds.values()):,} of {total:,} weights ({each}); --stored shows "
            "their parts"
        )


def tables(
    summary: Summary, rows: Iterable[TensorRow], *, flat: bool = False, sort: str = "file"
) -> Iterator[Table]:
    """Yield the table of the weights, and that of the other tensors; `rows` are those shown."""
    rows = list(rows)
    weights = [row for row in rows if row.name is not None]
    others = [row for row in rows if row.name is None] if len(weights) < len(rows) else []
    parts = {"": weights, "other tensors": others} if weights else {"": others}
    yield from tensors.tables(parts, flat=flat, sort=sort, among=summary.rows)


def listings(summary: Summary) -> Iterator[Listing]:
    """Yield what is not a tensor; of a pickled module, without the attributes inside it."""
    values = [value for value in summary.values if not summary.in_module(value.path)]
    objects = [each for each in summary.objects if not summary.in_module(each.path)]
    named = fold(Item(join(each.path), each.global_, 0) for each in objects)
    metadata = [Folded(name, text, 0, 1) for name, text in summary.extras.items()]
    yield _listing("values", _series(_values(values)), _value, len(values))
    yield _listing("objects", named, _text, len(objects))
    yield _listing("metadata", metadata, _text, len(metadata))


def _listing(title: str, rows: list[Folded], text: Callable[[Any], str], count: int) -> Listing:
    return Listing(
        title, [(escape(row.label) or "(root)", text(row.columns)) for row in rows], count
    )


def _values(values: list[Value]) -> Iterator[tuple[str, Values]]:
    """Yield values, those near the root first; a list is one row, as ``betas.{0..1}``."""
    nearest = sorted(values, key=lambda value: len(value.path))
    for parent, group in groupby(nearest, key=lambda value: join(value.path[:-1])):
        same = list(group)
        keys = [value.path[-1] if value.path else None for value in same]
        positions = [key if isinstance(key, int) else None for key in keys]
        if len(same) > 1 and positions == list(range(len(same))):
            label = f"{parent}{'.' * bool(parent)}{{0..{len(same) - 1}}}"
            yield label, tuple((value.type, value.value) for value in same)
        else:
            yield from ((join(value.path), ((value.type, value.value),)) for value in same)


def _series(rows: Iterable[tuple[str, Values]]) -> list[Folded]:
    """Fold values that differ only in an index: the history of a loss is one row with its values.

    Values that are all equal are shown once; a few lists stay rows of their own.
    """
    found = list(rows)
    gone: set[int] = set()  # positions of rows that are part of another
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for position, (label, values) in enumerate(found):
        groups[family(label), tuple(kind for kind, _ in values)].append(position)
    for positions in groups.values():
        same = [found[position] for position in positions]
        series = [values for _, values in same]
        together = fold(Item(label, (), 0) for label, _ in same)
        if len(together) == 1 and _differ(series):
            gone.update(positions[1:])
            found[positions[0]] = (together[0].label, tuple(flatten(series)))
    return fold(Item(*row, 0) for position, row in enumerate(found) if position not in gone)


def _differ(series: Sequence[Values]) -> bool:
    """Return whether values are shown one after another: not all equal, and no few lists."""
    short = len(series) <= LISTED and max(map(len, series)) > 1
    return not short and len({*series}) > 1


def _value(columns: Any) -> str:
    texts = [value_text(kind, value) for kind, value in columns[:LISTED]]
    return ", ".join(texts) + (f", ... ({len(columns):,})" if len(columns) > LISTED else "")


def _text(columns: object) -> str:
    return cut(str(columns))


def value_text(kind: str, value: Plain) -> str:
    """Return a value as Python would write it, escaped and cut."""
    text = cut(str(value))
    return f"'{text}'" if kind == "str" else text


def cut(text: str) -> str:
    """Return text, escaped; of a long one, its beginning and length."""
    if len(text) <= LONG:
        return escape(text)
    return f"{escape(text[:LONG])}... ({len(text):,} characters)"
