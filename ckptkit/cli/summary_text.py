"""Text output of `inspect`: a heading, a folded table of tensors, values and objects."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.analysis import view_model
from ckptkit.analysis.columns import ViewTable
from ckptkit.analysis.summary import Summary, TensorRow
from ckptkit.cli.render import table, wrapped
from ckptkit.core.text import flatten

SHOWN = 40  # values, objects or metadata entries; --json and --tree show all


def lines(summary: Summary, rows: list[TensorRow], *, flat: bool, sort: str) -> Iterator[str]:
    """Yield everything except warnings and hints; of a pickled module, its weights only."""
    yield from wrapped(view_model.heading(summary), whole=True)
    yield from flatten(map(wrapped, view_model.checkpoint_remarks(summary, rows)))
    for found in view_model.checkpoint_tables(summary, rows, flat=flat, sort=sort):
        yield from tabled(found)
    for listing in view_model.listings(summary):
        yield from _listed(listing)


def tabled(found: ViewTable) -> Iterator[str]:
    """Yield a table below its title."""
    yield f"\n{found.title}\n" if found.title else ""
    yield from table(found.headers, found.rows, right=found.right)


def _listed(listing: view_model.Listing) -> Iterator[str]:
    if not listing.rows:
        return
    yield f"\n{listing.title}"
    yield from flatten(wrapped(f"  {name}: {text}") for name, text in listing.rows[:SHOWN])
    if len(listing.rows) > SHOWN:
        yield f"  and {len(listing.rows) - SHOWN:,} more: --tree shows all"
