"""Text output of diff: tables of keys by kind of difference, a summary, hints."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from ckptkit.analysis.diff import Diff
from ckptkit.analysis.view_model import Table, differences
from ckptkit.cli.render import is_terminal, labelled, plural, table


def lines(found: Diff) -> Iterator[str]:
    """Yield a block for each kind of difference, and the lines below them."""
    paired = bool(found.renamed or found.reshaped)
    for each in differences.tables(found):
        yield from _block(each, paired)
        yield ""
    yield from map(labelled, differences.remarks(found))


def _block(found: Table, paired: bool) -> Iterator[str]:
    """Yield a table whose first heading is its title; names alone are a list."""
    if len(found.headers) == 1:
        more = " more" if paired else ""
        yield labelled(f"{found.title}: {plural(found.things, 'key')}{more}")
        yield from (f"  {name}" for (name,) in found.rows)
        return
    is_pairs = found.headers == differences.PAIRED
    title = f"{found.title} {found.headers[0]}" if is_pairs else found.title
    headers = (title, *found.headers[1:])
    widths = [max(map(len, column)) for column in zip(headers, *found.rows, strict=True)]
    if is_pairs and is_terminal(sys.stdout) and sum(widths) + 2 * len(widths) > _columns():
        yield f"{title} -> in B"
        for old, new, *rest in found.rows:
            yield from (f"  {old}", f"    -> {new}  {'  '.join(rest)}")
    else:
        yield from table(headers, found.rows, right=found.right)


def _columns() -> int:
    from shutil import get_terminal_size

    return get_terminal_size().columns
