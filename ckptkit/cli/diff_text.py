"""Text output of diff: tables of keys by kind of difference, a summary, hints."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.analysis import view_model
from ckptkit.analysis.columns import Table
from ckptkit.analysis.diff import Diff
from ckptkit.cli.render import labelled, listed, plural, table, terminal_width, wrapped
from ckptkit.core.text import flatten


def lines(found: Diff) -> Iterator[str]:
    """Yield a block for each kind of difference, and the lines below them."""
    paired = bool(found.renamed or found.reshaped)
    report = view_model.of_diff(found)
    for each in report.tables:
        yield from _block(each, paired)
        yield ""
    yield from flatten(map(_remark, (report.title, *report.notes)))


def _remark(line: str) -> list[str]:
    first, *rest = wrapped(line)
    return [labelled(first), *rest]


def _block(found: Table, paired: bool) -> Iterator[str]:
    """Yield a table whose first heading is its title; names alone are a list."""
    if len(found.headers) == 1:
        more = " more" if paired else ""
        yield labelled(f"{found.title}: {plural(found.things, 'key')}{more}")
        yield from listed(name for (name,) in found.rows)
        return
    is_pairs = found.headers == view_model.PAIRED
    title = f"{found.title} {found.headers[0]}" if is_pairs else found.title
    headers = (title, *found.headers[1:])
    widths = [max(map(len, column)) for column in zip(headers, *found.rows, strict=True)]
    width = terminal_width()
    if is_pairs and width is not None and sum(widths) + 2 * len(widths) > width:
        yield f"{title} -> in B"
        for old, new, *rest in found.rows:
            yield from wrapped(f"  {old}")
            yield from wrapped(f"    -> {new}  {'  '.join(rest)}")
    else:
        yield from table(headers, found.rows, right=found.right)
