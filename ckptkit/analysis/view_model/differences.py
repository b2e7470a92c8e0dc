"""The view of a diff: a table for each kind of difference, and the lines below them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ckptkit.analysis.diff import Diff, Kind, Renamed, Silent
from ckptkit.analysis.view_model import Table
from ckptkit.analysis.view_model.fold_pairs import fold_pairs
from ckptkit.core.fold import Item, fold
from ckptkit.core.text import escape, plural, shape

PAIRED = ("in A", "in B", "shape", "sure", "by")


def tables(found: Diff) -> Iterator[Table]:
    """Yield the tables that have rows."""
    made = (
        _pairs("renamed:", found.renamed),
        _pairs("renamed and reshaped?", found.reshaped),
        *_names(found),
        _mismatched(found),
        _changed(found),
    )
    return (table for table in made if table.rows)


def _pairs(title: str, pairs: Sequence[Renamed]) -> Table:
    rows = fold_pairs(
        (p.old, p.new, (_shapes(p.a, p.b), f"{p.confidence:.0%}", p.why)) for p in pairs
    )
    cells = [(escape(row.label), escape(row.other), *row.columns) for row in rows]
    return Table(title, PAIRED, cells, ("sure",), len(pairs))


def _names(found: Diff) -> Iterator[Table]:
    """Yield the names of one side alone, without those that look renamed."""
    paired = (*found.renamed, *found.reshaped)
    old, new = {pair.old for pair in paired}, {pair.new for pair in paired}
    for title, names, gone in (
        ("missing (not in A)", found.missing, new),
        ("unexpected (only in A)", found.unexpected, old),
    ):
        left = [name for name in names if name not in gone]
        rows = [(escape(row.label),) for row in fold(Item(name, (), 0) for name in left)]
        yield Table(title, ("name",), rows, things=len(left))


def _mismatched(found: Diff) -> Table:
    rows = fold(Item(name, (kind(a), kind(b)), 0) for name, a, b in found.mismatched)
    cells = [(escape(row.label), *row.columns) for row in rows]
    return Table("mismatched", ("name", "A", "B"), cells, things=len(found.mismatched))


def _changed(found: Diff) -> Table:
    headers = ("name", "elements", "largest difference")
    cells = [
        (escape(name), f"{each.count:,}", "" if each.largest is None else f"{each.largest:.3g}")
        for name, each in found.changed
    ]
    return Table("changed", headers, cells, headers[1:], len(found.changed))


def kind(side: Kind) -> str:
    """Return dtype and shape in one: ``float32 [2, 3]``."""
    return f"{side.dtype} {shape(side.shape)}"


def _shapes(a: Kind, b: Kind) -> str:
    return shape(a.shape) if a.shape == b.shape else f"{shape(a.shape)} -> {shape(b.shape)}"


def remarks(found: Diff) -> Iterator[str]:
    """Yield the lines below the tables, escaped: the summary first, advice last."""
    yield found.summary
    yield from _silent(found.silent, len(found.mismatched))
    if found.matching.unsearched:
        many = plural(found.matching.unsearched, "key")
        yield f"note: {many} of A not compared by name with all of B: too many"
    yield from hints(found.advice)


def hints(advice: Iterable[str]) -> Iterator[str]:
    """Yield advice as hints."""
    return (f"hint: {escape(each)}" for each in advice)


def _silent(silent: Silent | None, mismatched: int) -> Iterator[str]:
    """Yield what load_state_dict(strict=False) would not report."""
    if silent is None or not (silent.skipped or silent.kept):
        return
    skipped, kept = plural(silent.skipped, "tensor"), plural(silent.kept, "tensor")
    left_out, untouched = plural(silent.parameters, "parameter"), f"{silent.kept_parameters:,}"
    yield (
        f"strict=False would not report this: {skipped} of the file ({left_out}) would be left "
        f"out, {kept} of the model ({untouched} of {plural(silent.all_parameters, 'parameter')}) "
        "would keep their initial values"
    )
    if mismatched:
        yield f"strict=False would still refuse {plural(mismatched, 'key')} of another shape"
