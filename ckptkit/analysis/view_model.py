"""The view model of inspect, diff and stats: headings, tables, lists and remarks, decided once.

In: the facts of `analysis`. Out: texts and tables, which the terminal, the notebook, the page and
the browser print.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptkit.analysis import columns
from ckptkit.analysis.columns import ViewTable, fold_pairs
from ckptkit.analysis.summary import Plain, Summary, TensorRow, Value
from ckptkit.core.text import Folded, Item, escape, family, flatten, fold, plural, shape, size
from ckptkit.core.tree import join

if TYPE_CHECKING:
    from ckptkit.analysis.diff import Changed, Diff, Kind, Renamed
    from ckptkit.analysis.stats import Statistics, TensorStats
    from ckptkit.compute.tallies import Tally


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


def checkpoint_remarks(summary: Summary, rows: Sequence[TensorRow]) -> Iterator[str]:
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


def checkpoint_tables(
    summary: Summary, rows: Iterable[TensorRow], *, flat: bool = False, sort: str = "file"
) -> Iterator[ViewTable]:
    """Yield the table of the weights, and that of the other tensors; `rows` are those shown."""
    rows = list(rows)
    weights = [row for row in rows if row.name is not None]
    others = [row for row in rows if row.name is None] if len(weights) < len(rows) else []
    parts = {"": weights, "other tensors": others} if weights else {"": others}
    yield from columns.tables(parts, flat=flat, sort=sort, among=summary.rows)


def listings(summary: Summary) -> Iterator[Listing]:
    """Yield what is not a tensor; of a pickled module, without the attributes inside it."""
    values = [value for value in summary.values if not summary.in_module(value.path)]
    objects = [each for each in summary.objects if not summary.in_module(each.path)]
    named = fold(Item(join(each.path), each.global_, 0) for each in objects)
    metadata = [Folded(name, text, 0, 1) for name, text in summary.extras.items()]
    for title, rows, count in (
        ("values", _series(_values(values)), len(values)),
        ("objects", named, len(objects)),
        ("metadata", metadata, len(metadata)),
    ):
        text = _series_text if title == "values" else cut
        labels = (escape(row.label) or "(root)" for row in rows)
        texts = (text(row.columns) for row in rows)
        yield Listing(title, list(zip(labels, texts, strict=True)), count)


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
        few_lists = len(series) <= LISTED and max(map(len, series)) > 1
        if len(together) == 1 and not few_lists and len({*series}) > 1:
            gone.update(positions[1:])
            found[positions[0]] = (together[0].label, tuple(flatten(series)))
    return fold(Item(*row, 0) for position, row in enumerate(found) if position not in gone)


def _series_text(columns: Any) -> str:
    texts = [value_text(kind, value) for kind, value in columns[:LISTED]]
    return ", ".join(texts) + (f", ... ({len(columns):,})" if len(columns) > LISTED else "")


def value_text(kind: str, value: Plain) -> str:
    """Return a value as Python would write it, escaped and cut."""
    text = cut(str(value))
    return f"'{text}'" if kind == "str" else text


def cut(text: str) -> str:
    """Return text, escaped; of a long one, its beginning and length."""
    if len(text) <= LONG:
        return escape(text)
    return f"{escape(text[:LONG])}... ({len(text):,} characters)"


PAIRED = ("in A", "in B", "shape", "sure", "by")


def diff_tables(found: Diff) -> Iterator[ViewTable]:
    """Yield the tables that have rows."""
    made = (
        _pairs("renamed:", found.renamed),
        _pairs("renamed and reshaped?", found.reshaped),
        *_names(found),
        _mismatched(found),
        _changed(found),
        entries(found),
    )
    return (table for table in made if table.rows)


def _pairs(title: str, pairs: Sequence[Renamed]) -> ViewTable:
    def shapes(a: Kind, b: Kind) -> str:
        return shape(a.shape) if a.shape == b.shape else f"{shape(a.shape)} -> {shape(b.shape)}"

    rows = fold_pairs(
        (p.old, p.new, (shapes(p.a, p.b), f"{p.confidence:.0%}", p.why)) for p in pairs
    )
    cells = [(escape(row.label), escape(row.other), *row.columns) for row in rows]
    return ViewTable(title, PAIRED, cells, ("sure",), len(pairs))


def _names(found: Diff) -> Iterator[ViewTable]:
    """Yield the names of one side alone, without those that look renamed."""
    paired = (*found.renamed, *found.reshaped)
    old, new = {pair.old for pair in paired}, {pair.new for pair in paired}
    for title, names, gone in (
        ("missing (not in A)", found.missing, new),
        ("unexpected (only in A)", found.unexpected, old),
    ):
        left = [name for name in names if name not in gone]
        rows = fold(Item(name, _module(found, name), 0) for name in left)
        cells = [(escape(row.label),) for row in rows]
        yield ViewTable(title, ("name",), cells, things=len(left))


def _mismatched(found: Diff) -> ViewTable:
    items = []
    for name, a, b, tolerance, difference in found.mismatched:
        closeness = ""  # how near values of different dtypes are, if they were compared
        if difference is not None:
            closeness = f"differ by up to {difference.largest:.3g}"
        elif tolerance is not None:
            closeness = f"equal within {tolerance:.2g}"
        items.append(Item(name, (kind(a), kind(b), closeness, _module(found, name)), 0))
    cells = [(escape(row.label), *row.columns[:3]) for row in fold(items)]
    headers = ("name", "A", "B", "values")
    return ViewTable("mismatched", headers, cells, things=len(items)).without_empty()


def _changed(found: Diff) -> ViewTable:
    """Return the tensors of other values, what moved most first; layers of a kind are one row."""
    headers = ("name", "tensors", "elements", "max |d|", "|d|/|a|", "cosine")
    groups: dict[Hashable, list[Changed]] = {}
    for each in found.changed:
        groups.setdefault((family(each.name), _module(found, each.name)), []).append(each)
    rows = []
    for group in groups.values():
        differences = [each.difference for each in group]
        labels = [row.label for row in fold(Item(each.name, (), 0) for each in group)]
        largest, relative, cosine = (
            [each for each in numbers if each is not None]
            for numbers in (
                [each.largest for each in differences],
                [each.relative for each in differences],
                [each.cosine for each in differences],
            )
        )
        cells = (
            escape(labels[0] if len(labels) == 1 else family(group[0].name)),
            f"{len(group):,}" if len(group) > 1 else "",
            f"{sum(each.count for each in differences):,}",
            f"{max(largest):.3g}" if largest else "",
            f"{max(relative):.3g}" if relative else "",
            f"{min(cosine):.6f}" if cosine else "",
        )
        rows.append((max(relative, default=-1.0), cells))  # what has no distance comes last
    rows.sort(key=lambda row: row[0], reverse=True)
    table = ViewTable("changed", headers, [cells for _, cells in rows], headers[1:])
    return table._replace(things=len(found.changed)).without_empty() if rows else table


def entries(found: Diff) -> ViewTable:
    """Return the values beside the tensors that differ."""
    cells = [
        (
            escape(each.path) or "(root)",
            *("(absent)" if text is None else cut(text) for text in (each.a, each.b)),
        )
        for each in found.entries
    ]
    return ViewTable("values", ("path", "A", "B"), cells, things=len(cells))


def _module(found: Diff, name: str) -> int | None:
    """Return the kind of the module that a tensor is in."""
    return None if found.modules is None else found.modules(name)


def kind(side: Kind) -> str:
    """Return dtype and shape in one: ``float32 [2, 3]``."""
    return f"{side.dtype} {shape(side.shape)}"


def diff_remarks(found: Diff) -> Iterator[str]:
    """Yield the lines below the tables, escaped: the summary first, advice last."""
    yield found.summary
    silent = found.silent
    if silent is not None and (silent.skipped or silent.kept):
        skipped, kept = plural(silent.skipped, "tensor"), plural(silent.kept, "tensor")
        left_out, all_of = (
            plural(n, "parameter") for n in (silent.parameters, silent.all_parameters)
        )
        yield (
            f"strict=False would not report this: {skipped} of the file ({left_out}) would be left "
            f"out, {kept} of the model ({silent.kept_parameters:,} of {all_of}) would keep their "
            "initial values"
        )
        if found.mismatched:
            many = plural(len(found.mismatched), "key")
            yield f"strict=False would still refuse {many} of another shape"
    if found.matching.unsearched:
        many = plural(found.matching.unsearched, "key")
        yield f"note: {many} of A not compared by name with all of B: too many"
    yield from hints(found.advice)
    if found.uncompared:
        yield f"not compared: {escape('; '.join(found.uncompared))}"


def hints(advice: Iterable[str]) -> Iterator[str]:
    """Yield advice as hints."""
    return (f"hint: {escape(each)}" for each in advice)


WIDE = 16  # bins of a histogram in a table
MEASURED = ("mean", "std", "min", "max", "norm")  # in tables, in this order
ODD = {"nan": "NaN", "inf": "inf"}  # counts that a healthy tensor has not, by title
COLUMNS = ("name", "tensors", "count", *MEASURED, "zeros", *ODD.values(), "histogram")


def numbers(tally: Tally, kind: str) -> dict[str, Any]:
    """Return the statistics of the JSON schema.

    None where there is no value; complex numbers have no minimum and no maximum.
    """
    there, ordered = tally.finite > 0, kind != "complex"
    return {
        "count": tally.count,
        "nan": tally.nan,
        "inf": tally.infinite,
        "zeros": tally.zeros,
        "sparsity": tally.sparsity,
        "mean": tally.mean if there else None,
        "std": tally.std,
        "norm": tally.norm,
        "min": tally.low if ordered else None,
        "max": tally.high if ordered else None,
        "abs_max": tally.abs_max,
    }


def statistics_table(
    rows: Iterable[TensorStats], found: Statistics, bars: Callable[[Sequence[int]], str]
) -> ViewTable:
    """Return the table of the rows and the totals; `bars` draws the counts of a histogram."""
    cells = [_cells(row, escape(row.label) or "(root)", bars) for row in rows]
    if len(cells) > 1:
        several = len(found.totals) > 1
        cells += [_cells(row, f"all {row.kind}" * several or "all", bars) for row in found.totals]
    right = tuple(each for each in COLUMNS if each not in ("name", "histogram"))
    return ViewTable("", COLUMNS, cells, right, len(cells)).without_empty()


def _cells(row: TensorStats, label: str, bars: Callable[[Sequence[int]], str]) -> tuple[str, ...]:
    found = numbers(row.tally, row.kind)
    return (
        label,
        f"{row.tensors:,}" if row.tensors > 1 else "",
        f"{found['count']:,}",
        *(short(found[name]) for name in MEASURED),
        f"{found['sparsity']:.1%}" if found["zeros"] else "",
        *(f"{found[name]:,}" if found[name] else "" for name in ODD),
        bars(row.tally.histogram.at_most(WIDE).counts),
    )


def measured(found: dict[str, Any]) -> list[str]:
    """Return the numbers of one tensor in words: ``mean 0.5``, ``3 zeros``."""
    named = [f"{name} {short(found[name])}" for name in MEASURED if found[name] is not None]
    return named + [f"{found[name]:,} {name}" for name in ("zeros", *ODD) if found[name]]


def short(value: Any) -> str:
    """Format a number with three digits."""
    if value is None:
        return ""
    if isinstance(value, complex):
        return f"{value.real:.3g}{value.imag:+.3g}j"
    return f"{value:,}" if isinstance(value, int) and abs(value) < 10**6 else f"{value:.3g}"
