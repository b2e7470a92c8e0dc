"""Make reports from the results of inspect, diff and stats.

A report consists of a title, tables and remarks. All strings in a report are escaped. The terminal,
the notebook, the HTML page and the browser print these reports.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptkit.analysis import columns
from ckptkit.analysis.columns import Table, fold_pairs
from ckptkit.analysis.summary import Plain, Summary, TensorRow, Value
from ckptkit.core.text import (
    Folded,
    Item,
    escape,
    family,
    flatten,
    fold,
    plural,
    ranges,
    shape,
    shell_word,
    size,
    some,
    unfolded,
)
from ckptkit.core.tree import Path, join, key_text
from ckptkit.formats.table import GGUF

if TYPE_CHECKING:
    from ckptkit.analysis.diff import Changed, Diff
    from ckptkit.analysis.stats import Statistics, TensorStats
    from ckptkit.compute.tallies import Tally
    from ckptkit.lora.reading import Adapter


LISTED = 8  # maximum number of items of a list that a table shows
LONG = 200  # maximum number of characters of a value in a table
ENTRIES = ("name", "value")  # headers of the tables of values, objects and metadata
PAIRED = ("in A", "in B", "shape", "sure", "by")
NAMES = ("name",)

Values = tuple[tuple[str, Plain], ...]  # (type, value) pairs of a row


class Report(NamedTuple):
    """The content of a page: a title, remarks, tables, and notes below the tables."""

    title: str
    remarks: list[str]
    tables: Iterable[Table]
    notes: Iterable[str] = ()


def of_checkpoint(
    summary: Summary, rows: Sequence[TensorRow], *, flat: bool = False, sort: str = "file"
) -> Report:
    """Return the report of `inspect` without warnings and hints. `rows` contains the tensors to
    show.

    If `flat` is false, each entry with training state is one row.
    """
    state: list[str] = []
    if not flat and summary.weights and len(rows) == len(summary.rows):
        places = [row.path for row in summary.rows] + [value.path for value in summary.values]
        found = dict.fromkeys(_entry(path) for path in places if len(path) > 1)
        own = _entry(summary.weights)
        state = [name for name in found if name != own and _TRAINING.fullmatch(name)]
        rows = [row for row in rows if _entry(row.path) not in state]
    tables = columns.tables(rows, flat=flat, sort=sort, among=summary.rows)
    folded = [_training_state(summary, state)] if state else []
    return Report(
        f"{escape(summary.path)}: {described(summary)}",
        list(_remarks(summary, rows)),
        flatten((tables, folded, listings(summary, state))),
    )


# Names of entries with training state, such as optimizers.
_TRAINING = re.compile(r".*(optim|sched|loops|callback|scaler|rng|random_state|sampler).*", re.I)


def _entry(path: Path) -> str:
    """Return the first key of a path as a string."""
    return key_text(path[0]) if path else ""


def _training_state(summary: Summary, entries: list[str]) -> Table:
    """Return the table of entries with training state. A row contains the number of tensors, their
    size and the first values."""
    cells = []
    for entry in entries:
        tensors = [row for row in summary.rows if _entry(row.path) == entry]
        values = [value for value in summary.values if _entry(value.path) == entry]
        texts = []
        for path, kind, value, _ in values[:3]:
            last = tuple(key for key in path[1:] if not isinstance(key, int))[-1:]
            texts.append(f"{escape(join(last))}: {value_text(kind, value)}")
        more = f", ... ({len(values):,})" if len(values) > len(texts) else ""
        nbytes = sum(row.nbytes for row in tensors)
        count = f"{len(tensors):,}" if tensors else ""
        cells.append(
            (escape(entry), count, size(nbytes) if tensors else "", ", ".join(texts) + more)
        )
    headers = ("entry", "tensors", "size", "values")
    title = "training state (--flat shows all)"
    return Table(title, headers, cells, headers[1:3], len(cells)).without_empty()


BRIEF = ("file", "format", "size", "tensors", "parameters", "dtypes", "weights")


def brief(summary: Summary) -> tuple[str, ...]:
    """Return the row of a file in the table of ``inspect --brief``. BRIEF contains the headers."""
    totals = summary.totals
    dtypes = Counter(
        row.dtype for row in summary.rows if row.name is not None or not summary.weights
    )
    named = summary.weights is not None and any(row.name is not None for row in summary.rows)
    return (
        escape(summary.path),
        escape(summary.format),
        size(summary.size),
        f"{totals.tensors:,}",
        f"{totals.parameters:,}",
        ", ".join(dtype for dtype, _ in dtypes.most_common(2)) + " ..." * (len(dtypes) > 2),
        escape(join(summary.weights or ())) or ("the whole file" if named else ""),
    )


def larger(a: Summary, b: Summary) -> str:
    """Return a sentence that names the larger of two files and the difference in size.

    The sentence lists the entries that cause the difference.
    """
    if a.size == b.size:
        names = f"{escape(a.path)} and {escape(b.path)}"
        return f"{names} have the same size: {size(a.size)}"
    big, small = (a, b) if a.size > b.size else (b, a)
    parts: Counter[str] = Counter()
    for side, sign in ((big, 1), (small, -1)):
        for row in side.rows:
            parts["the weights" if row.name is not None else _entry(row.path)] += sign * row.nbytes
    more = big.size - small.size
    parts["values and headers"] = more - parts.total()
    found = sorted(filter(lambda part: part[1], parts.items()), key=lambda part: -abs(part[1]))
    where = [f"{escape(name)} {'-+'[by > 0]}{size(abs(by))}" for name, by in found]
    return f"{escape(big.path)} is {size(more)} larger than {escape(small.path)}: {some(where)}"


def described(summary: Summary) -> str:
    """Return the format, the size and the totals of a checkpoint."""
    totals = summary.totals
    version, model = (f" {summary.version}" * bool(summary.version), summary.model)
    about = f"{escape(summary.format)}{version}, {size(summary.size)}"
    model = f", {cut(model)}" if model else ""
    if not totals.tensors:
        return f"{about}: no tensors{model}"
    nbytes = size(totals.nbytes)
    if totals.storage_nbytes != totals.nbytes:
        nbytes += f" in {size(totals.storage_nbytes)} of storage"
    counts = f"{plural(totals.tensors, 'tensor')}, {plural(totals.parameters, 'parameter')}"
    return f"{about}: {counts}, {nbytes}{model}"


def _remarks(summary: Summary, rows: Sequence[TensorRow]) -> Iterator[str]:
    if summary.about:
        yield escape(summary.about)
    if summary.part is not None:
        yield escape(f"this is {summary.part}")
    if summary.adapter is not None:
        yield escape(adapter_line(summary.adapter))
    if summary.weights is not None and rows:
        yield f"weights: {escape(join(summary.weights)) or 'the whole file'}"
    logical = [(row, row.group) for row in rows if row.group is not None and row.is_logical]
    kinds = Counter(row.dtype for row, _ in logical)
    if kinds:
        total = sum(row.name is not None for row in rows)
        each = ", ".join(f"{number:,} {kind}" for kind, number in kinds.items())
        parts = any(group.label != group.inputs[0].dtype.name for _, group in logical)
        yield escape(
            f"quantized: {len(logical):,} of {total:,} weights ({each})"
            + "; --stored shows their parts" * parts
        )


def adapter_line(adapter: Adapter, *, command: bool = True) -> str:
    """Return a line that describes an adapter. By default, the line contains the command that
    merges the adapter."""
    what = f"adapter of {adapter.layout}, {adapter_facts(adapter)}"
    if command:
        path = shell_word(adapter.path)
        what += f"; `lora merge BASE {path} OUT` merges the adapter into its base"
    return what + (f" ({adapter.base})" if adapter.base else "")


def adapter_facts(adapter: Adapter) -> str:
    """Return the method of an adapter, its modules, ranks, alphas and targets."""
    facts = adapter.facts
    found = [adapter.method, plural(len(adapter.modules), "module")]
    found += [f"{name} {facts[name]}" for name in ("rank", "alpha", "targets") if name in facts]
    return ", ".join(found)


def listings(summary: Summary, folded: Sequence[str] = ()) -> Iterator[Table]:
    """Yield the tables of values, objects and metadata. Do not include the attributes of a pickled
    module.

    `folded` contains the root entries whose values are in another table.
    """
    values = [
        value
        for value in summary.values
        if not summary.in_module(value.path) and _entry(value.path) not in folded
    ]
    objects = [each for each in summary.objects if not summary.in_module(each.path)]
    named = fold(Item(join(each.path), each.global_, 0) for each in objects)
    metadata = [Folded(name, text, 0, 1) for name, text in summary.extras.items()]
    for title, rows, count, text in (
        ("metadata" if summary.format == GGUF.name else "values", _series(_values(values)),
         len(values), _series_text),
        ("objects", named, len(objects), cut),
        ("metadata", metadata, len(metadata), cut),
    ):  # fmt: skip
        cells = [(escape(row.label) or "(root)", text(row.columns)) for row in rows]
        yield Table(title, ENTRIES, cells, total=count)


def _values(values: list[Value]) -> Iterator[tuple[str, Values]]:
    """Yield (label, values) for each row, the shortest paths first. A list is one row, such as
    ``betas.{0..1}``."""
    nearest = sorted(values, key=lambda value: len(value.path))
    for parent, group in groupby(nearest, key=lambda value: join(value.path[:-1])):
        same = list(group)
        keys = [each.path[-1] if each.path else None for each in same]
        positions = [key if isinstance(key, int) else None for key in keys]
        if len(same) > 1 and positions == list(range(len(same))):
            label = f"{parent}{'.' * bool(parent)}{{0..{len(same) - 1}}}"
            yield label, tuple((value.type, value.value) for value in same)
        else:
            yield from ((join(value.path), ((value.type, value.value),)) for value in same)


def _series(rows: Iterable[tuple[str, Values]]) -> list[Folded]:
    """Fold rows whose labels differ only in an index, such as the losses of all epochs.

    If all values are equal, the folded row contains the value once. Rows whose values are lists are
    folded only if more than LISTED rows differ only in an index.
    """
    found = list(rows)
    gone: set[int] = set()  # indices of rows that are folded into another row
    groups: defaultdict[Hashable, list[int]] = defaultdict(list)
    for position, (label, values) in enumerate(found):
        groups[family(label), tuple(kind for kind, _ in values)].append(position)
    for positions in groups.values():
        series = [found[position][1] for position in positions]
        together = fold(Item(found[position][0], (), 0) for position in positions)
        few_lists = len(series) <= LISTED and max(map(len, series)) > 1
        if len(together) == 1 and not few_lists and len({*series}) > 1:
            gone.update(positions[1:])
            found[positions[0]] = (together[0].label, tuple(flatten(series)))
    return fold(Item(*row, 0) for position, row in enumerate(found) if position not in gone)


def _series_text(columns: Any) -> str:
    texts = [value_text(kind, value) for kind, value in columns[:LISTED]]
    return ", ".join(texts) + (f", ... ({len(columns):,})" if len(columns) > LISTED else "")


def value_text(kind: str, value: Plain) -> str:
    """Return a value as in Python source. Escape the string and cut long strings."""
    text = cut(str(value))
    return f"'{text}'" if kind == "str" else text


def cut(text: str) -> str:
    """Escape a string. For a long string, return the first LONG characters and the length."""
    if len(text) <= LONG:
        return escape(text)
    return f"{escape(text[:LONG])}... ({len(text):,} characters)"


def of_diff(found: Diff, *, flat: bool = False, sort: str = "change") -> Report:
    """Return the report of `diff` with the summary, all tables that are not empty, and the hints.

    If `flat` is false, names that differ only in an index are folded into one row. `sort` is the
    order of the changed tensors: "change" (largest first), "name", or "file" (order of the file).
    """
    rows_of = unfolded if flat else fold
    paired = (*found.renamed, *found.reshaped)
    partners = {pair.old for pair in paired} | {pair.new for pair in paired}

    def module(name: str) -> int | None:
        """Return a number that is equal for tensors in modules of the same structure."""
        return None if found.modules is None else found.modules(name)

    made = []
    for title, pairs in (("renamed:", found.renamed), ("renamed and reshaped?", found.reshaped)):
        named = []
        for pair in pairs:
            shapes = " -> ".join(dict.fromkeys((shape(pair.a.shape), shape(pair.b.shape))))
            named.append((pair.old, pair.new, (shapes, f"{pair.confidence:.0%}", pair.why)))
        rows = fold_pairs(named, rows_of)
        cells = [(escape(a.label), escape(b.label), *a.columns[-1]) for a, b in rows]
        made.append(Table(title, PAIRED, cells, ("sure",), len(pairs)))
    for title, names in (
        ("missing (not in A)", found.missing),
        ("unexpected (only in A)", found.unexpected),
    ):
        left = [name for name in names if name not in partners]
        folded = rows_of(Item(name, module(name), 0) for name in left)
        made.append(Table(title, NAMES, [(escape(row.label),) for row in folded], (), len(left)))
    items = []
    for name, a, b, tolerance, difference in found.mismatched:
        closeness = ""  # stays empty unless only the dtypes differ and the values were compared
        if difference is not None:
            closeness = f"differ by up to {difference.largest:.3g}"
        elif tolerance is not None:
            closeness = f"equal within {tolerance:.2g}"
        kinds = [f"{each.dtype} {shape(each.shape)}" for each in (a, b)]
        items.append(Item(name, (*kinds, closeness, module(name)), 0))
    cells = [(escape(row.label), *row.columns[:3]) for row in rows_of(items)]
    headers = ("name", "A", "B", "values")
    made.append(Table("mismatched", headers, cells, (), len(items)).without_empty())
    groups: dict[Hashable, list[Changed]] = {}
    unexplained = found.unexplained
    for each in unexplained:
        kind = each.name if flat else (family(each.name), module(each.name))
        groups.setdefault(kind, []).append(each)
    made += [_changed(list(groups.values()), len(unexplained), sort), entries(found)]
    return Report(found.summary, [], [table for table in made if table.rows], list(_notes(found)))


def _changed(groups: list[list[Changed]], count: int, sort: str) -> Table:
    """Return the table of tensors whose values differ. Each group of tensors is one row."""
    headers = ("name", "tensors", "elements", "max |d|", "|d|/|a|", "cosine")
    rows = []
    for group in groups:
        largest, relative, cosine = (
            [number for number in numbers if number is not None]
            for numbers in zip(*((d.largest, d.relative, d.cosine) for _, d in group), strict=True)
        )
        cells = (
            escape(ranges(each.name for each in group)),
            f"{len(group):,}" if len(group) > 1 else "",
            f"{sum(each.difference.count for each in group):,}",
            f"{max(largest):.3g}" if largest else "",
            f"{max(relative):.3g}" if relative else "",
            f"{min(cosine):.6f}" if cosine else "",
        )
        rows.append((max(relative, default=-1.0), cells))  # -1 sorts last
    if sort == "change":
        rows.sort(key=lambda row: row[0], reverse=True)
    elif sort == "name":
        rows.sort(key=lambda row: row[1])
    table = Table("changed", headers, [cells for _, cells in rows], headers[1:], count)
    return table.without_empty() if rows else table


def entries(found: Diff) -> Table:
    """Return the table of differences between values that are not tensors."""
    cells = []
    for path, a, b in found.entries:
        texts = ["(absent)" if text is None else cut(text) for text in (a, b)]
        cells.append((escape(path) or "(root)", *texts))
    return Table("values", ("path", "A", "B"), cells, (), len(cells))


def _notes(found: Diff) -> Iterator[str]:
    if found.explanations:
        from ckptkit.analysis.explained import lines

        yield from map(escape, lines(found.explanations, found.changed))
    silent = found.silent
    if silent is not None and (silent.skipped or silent.kept):
        skipped, kept = plural(silent.skipped, "tensor"), plural(silent.kept, "tensor")
        lost, in_all = (plural(n, "parameter") for n in (silent.parameters, silent.all_parameters))
        its = "keeps its initial value" if silent.kept == 1 else "keep their initial values"
        yield (
            f"strict=False does not report these tensors: torch ignores {skipped} of the file "
            f"({lost}); {kept} of the model ({silent.kept_parameters:,} of {in_all}) {its}"
        )
        if found.mismatched:
            many = plural(len(found.mismatched), "key")
            yield f"strict=False still refuses {many} with a different shape"
    if found.matching.unsearched:
        many = plural(found.matching.unsearched, "key")
        yield f"note: too many keys: {many} of A were not compared with all names of B"
    yield from (f"hint: {escape(each)}" for each in found.advice)
    if found.uncompared:
        yield f"not compared: {escape('; '.join(found.uncompared))}"


WIDE = 16  # number of histogram bins in a table
MEASURED = ("mean", "std", "min", "max", "norm")  # column headers for statistics, in this order
ODD = {"nan": "NaN", "inf": "inf"}  # name in JSON -> column header
COLUMNS = ("name", "tensors", "count", *MEASURED, "zeros", *ODD.values(), "histogram")


def numbers(tally: Tally, kind: str) -> dict[str, Any]:
    """Return the statistics of a tensor for JSON.

    If a tensor has no finite elements, the mean, the minimum and similar statistics are None. For
    complex numbers, the minimum and maximum are None.
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
) -> Table:
    """Return the table of statistics with the totals. `bars` formats the counts of a histogram."""

    def cells(row: TensorStats, label: str) -> tuple[str, ...]:
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

    made = [cells(row, escape(row.label) or "(root)") for row in rows]
    if len(made) > 1:
        several = len(found.totals) > 1
        made += [cells(row, f"all {row.kind}" * several or "all") for row in found.totals]
    return Table("", COLUMNS, made, COLUMNS[1:-1], len(made)).without_empty()


def measured(found: dict[str, Any]) -> list[str]:
    """Return the statistics of one tensor as strings, such as ``mean 0.5`` and ``3 zeros``."""
    named = [f"{name} {short(found[name])}" for name in MEASURED if found[name] is not None]
    return named + [f"{found[name]:,} {name}" for name in ("zeros", *ODD) if found[name]]


def short(value: Any) -> str:
    """Format a number with three significant digits."""
    if value is None:
        return ""
    if isinstance(value, complex):
        return f"{value.real:.3g}{value.imag:+.3g}j"
    return f"{value:,}" if isinstance(value, int) and abs(value) < 10**6 else f"{value:.3g}"
