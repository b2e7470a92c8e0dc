"""Text output of `inspect`: a heading, a folded table of tensors, values and objects."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.analysis.summary import Summary, TensorRow
from ckptkit.analysis.view_model import Table, contents
from ckptkit.cli.render import table, wrapped
from ckptkit.core.text import flatten

SHOWN = 40  # values, objects or metadata entries; --json and --tree show all


def lines(summary: Summary, rows: list[TensorRow], *, flat: bool, sort: str) -> Iterator[str]:
    """Yield everything except warnings and hints; of a pickled module, its weights only."""
    yield from wrapped(contents.heading(summary), whole=True)
    yield from flatten(map(wrapped, contents.remarks(summary, rows)))
    for found in contents.tables(summary, rows, flat=flat, sort=sort):
        yield from tabled(found)
    for listing in contents.listings(summary):
        yield from _listed(listing)


def tabled(found: Table) -> Iterator[str]:
    """Yield a table below its title."""
    yield f"\n{found.title}\n" if found.title else ""
    yield from table(found.headers, found.rows, right=found.right)


def _listed(listing: contents.Listing) -> Iterator[str]:
    if not listing.rows:
        return
    yield f"\n{listing.title}"
    yield from flatten(wrapped(f"  {name}: {text}") for name, text in listing.rows[:SHOWN])
    if len(listing.rows) > SHOWN:
        yield f"  and {len(listing.rows) - SHOWN:,} more: --tree shows all"
