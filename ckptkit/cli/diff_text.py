"""The differences for people: what is missing, too much, mismatched, changed; a line that sums up; the advice."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.cli.fold import Item, fold
from ckptkit.cli.render import escape, plural, shape, table
from ckptkit.reports.diff import Diff, Kind


def lines(found: Diff) -> Iterator[str]:
    for title, names in (("missing (not in A)", found.missing), ("unexpected (only in A)", found.unexpected)):
        if names:
            yield f"{title}: {plural(len(names), 'key')}"
            yield from (f"  {escape(row.label)}" for row in fold(Item(name, (), 0) for name in names))
            yield ""
    if found.mismatched:
        rows = fold(Item(name, (_kind(a), _kind(b)), 0) for name, a, b in found.mismatched)
        yield from table(("mismatched", "A", "B"), [(escape(row.label), *map(str, row.columns)) for row in rows])
        yield ""
    if found.changed:
        cells = [
            (escape(name), f"{each.count:,}", "" if each.largest is None else f"{each.largest:.3g}")
            for name, each in found.changed
        ]
        yield from table(("changed", "elements", "largest difference"), cells, right=("elements", "largest difference"))
        yield ""
    yield _sum(found)
    yield from (f"hint: {escape(each)}" for each in found.advice)


def _sum(found: Diff) -> str:
    compared = "names, dtypes, shapes and values" if found.values_compared else "names, dtypes and shapes"
    if found.equal:
        return f"equal: {plural(found.common, 'key')} ({compared})"
    counts = [f"{len(found.missing):,} missing", f"{len(found.unexpected):,} unexpected"]
    counts.append(f"{len(found.mismatched):,} mismatched")
    if found.values_compared:
        counts.append(f"{len(found.changed):,} changed")
    return f"different: {', '.join(counts)}, of {plural(found.common, 'key')} on both sides"


def _kind(kind: Kind) -> str:
    return f"{kind.dtype} {shape(kind.shape)}"
