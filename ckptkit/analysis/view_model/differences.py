"""The view of a diff: a table for each kind of difference, and the lines below them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

from ckptkit.analysis.diff import Changed, Diff, Kind, Mismatch, Renamed, Silent
from ckptkit.analysis.view_model import Table
from ckptkit.analysis.view_model.fold_pairs import fold_pairs
from ckptkit.core.text import Item, escape, family, fold, plural, shape

PAIRED = ("in A", "in B", "shape", "sure", "by")


def tables(found: Diff) -> Iterator[Table]:
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
        rows = fold(Item(name, _module(found, name), 0) for name in left)
        cells = [(escape(row.label),) for row in rows]
        yield Table(title, ("name",), cells, things=len(left))


def _mismatched(found: Diff) -> Table:
    rows = fold(
        Item(
            each.name,
            (kind(each.a), kind(each.b), _closeness(each), _module(found, each.name)),
            0,
        )
        for each in found.mismatched
    )
    cells = [(escape(row.label), *row.columns[:3]) for row in rows]
    headers = ("name", "A", "B", "values")
    return Table("mismatched", headers, cells, things=len(found.mismatched)).without_empty()


def _closeness(found: Mismatch) -> str:
    """Return how near the values of different dtypes are, if they were compared."""
    if found.tolerance is None:
        return ""
    if found.difference is None:
        return f"equal within {found.tolerance:.2g}"
    return f"differ by up to {found.difference.largest:.3g}"


def _changed(found: Diff) -> Table:
    """Return the tensors of other values, what moved most first; layers of a kind are one row."""
    headers = ("name", "tensors", "elements", "max |d|", "|d|/|a|", "cosine")
    if not found.changed:
        return Table("changed", headers, [])

    groups: dict[Hashable, list[Changed]] = {}
    for each in found.changed:
        key = (family(each.name), _module(found, each.name))
        groups.setdefault(key, []).append(each)
    rows = sorted(groups.values(), key=_movement, reverse=True)
    cells = [_moved(family(row[0].name), row) for row in rows]
    table = Table("changed", headers, cells, headers[1:], len(found.changed))
    return table.without_empty()


def _movement(group: Sequence[Changed]) -> float:
    """Return the largest relative distance; what has none comes last."""
    known = [each.difference.relative for each in group]
    return max((each for each in known if each is not None), default=-1.0)


def _moved(label: str, group: Sequence[Changed]) -> tuple[str, ...]:
    """Return the cells of tensors of one kind: those that moved most."""
    found = [each.difference for each in group]
    labels = [row.label for row in fold(Item(each.name, (), 0) for each in group)]
    return (
        escape(labels[0] if len(labels) == 1 else label),
        f"{len(group):,}" if len(group) > 1 else "",
        f"{sum(each.count for each in found):,}",
        _extreme(max, (each.largest for each in found), ".3g"),
        _extreme(max, (each.relative for each in found), ".3g"),
        _extreme(min, (each.cosine for each in found), ".6f"),
    )


def _extreme(
    choose: Callable[[list[float]], float], numbers: Iterable[float | None], form: str
) -> str:
    """Return the largest or smallest of the numbers that are known, as text; "" if none is."""
    known = [each for each in numbers if each is not None]
    return format(choose(known), form) if known else ""


def entries(found: Diff) -> Table:
    """Return the values beside the tensors that differ."""
    cells = [
        (escape(each.path) or "(root)", *(_side(text) for text in (each.a, each.b)))
        for each in found.entries
    ]
    return Table("values", ("path", "A", "B"), cells, things=len(cells))


def _side(text: str | None) -> str:
    from ckptkit.analysis.view_model.contents import cut

    return "(absent)" if text is None else cut(text)


def _module(found: Diff, name: str) -> int | None:
    """Return the kind of the module that a tensor is in."""
    return None if found.modules is None else found.modules(name)


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
    if found.uncompared:
        yield f"not compared: {escape('; '.join(found.uncompared))}"


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
