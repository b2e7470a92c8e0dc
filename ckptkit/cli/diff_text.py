"""Text output of diff: tables of keys by kind of difference, a summary, hints."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence

from ckptkit.analysis.diff import Diff, Kind, Renamed, Silent
from ckptkit.cli.fold_pairs import fold_pairs
from ckptkit.cli.render import escape, is_terminal, labelled, plural, shape, table
from ckptkit.core.fold import Item, fold


def lines(found: Diff) -> Iterator[str]:
    yield from _pairs("renamed: in A", found.renamed)
    yield from _pairs("renamed and reshaped? in A", found.reshaped)
    paired = (*found.renamed, *found.reshaped)
    old, new = {pair.old for pair in paired}, {pair.new for pair in paired}
    for title, names, gone in (
        ("missing (not in A)", found.missing, new),
        ("unexpected (only in A)", found.unexpected, old),
    ):
        if left := [name for name in names if name not in gone]:
            yield labelled(f"{title}: {plural(len(left), 'key')}{' more' if gone else ''}")
            yield from (
                f"  {escape(row.label)}" for row in fold(Item(name, (), 0) for name in left)
            )
            yield ""
    if found.mismatched:
        rows = fold(Item(name, (_kind(a), _kind(b)), 0) for name, a, b in found.mismatched)
        yield from table(
            ("mismatched", "A", "B"), [(escape(row.label), *map(str, row.columns)) for row in rows]
        )
        yield ""
    if found.changed:
        cells = [
            (escape(name), f"{each.count:,}", "" if each.largest is None else f"{each.largest:.3g}")
            for name, each in found.changed
        ]
        yield from table(
            ("changed", "elements", "largest difference"),
            cells,
            right=("elements", "largest difference"),
        )
        yield ""
    yield labelled(found.summary)
    yield from _silent(found.silent, len(found.mismatched))
    if found.matching.unsearched:
        many = plural(found.matching.unsearched, "key")
        yield labelled(f"note: {many} of A not compared by name with all of B: too many")
    yield from (labelled(f"hint: {escape(each)}") for each in found.advice)


def _pairs(title: str, pairs: Sequence[Renamed]) -> Iterator[str]:
    """Yield a table of name pairs, or two lines per pair where the terminal is too narrow."""
    if not pairs:
        return
    rows = fold_pairs(
        (p.old, p.new, (*_shapes(p.a, p.b), f"{p.confidence:.0%}", p.why)) for p in pairs
    )
    cells = [(escape(row.label), escape(row.other), *row.columns) for row in rows]
    headers = (title, "in B", "shape", "sure", "by")
    widths = [max(map(len, column)) for column in zip(headers, *cells, strict=True)]
    if is_terminal(sys.stdout) and sum(widths) + 2 * len(widths) > _columns():
        yield f"{title} -> in B"
        for old, new, *rest in cells:
            yield from (f"  {old}", f"    -> {new}  {'  '.join(rest)}")
    else:
        yield from table(headers, cells, right=("sure",))
    yield ""


def _columns() -> int:
    from shutil import get_terminal_size

    return get_terminal_size().columns


def _shapes(a: Kind, b: Kind) -> Iterable[str]:
    return [shape(a.shape) if a.shape == b.shape else f"{shape(a.shape)} -> {shape(b.shape)}"]


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


def _kind(kind: Kind) -> str:
    return f"{kind.dtype} {shape(kind.shape)}"
