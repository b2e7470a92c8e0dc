"""Text output of `inspect`: a heading, a folded table of tensors, values and objects."""

from __future__ import annotations

from collections.abc import Iterator

from ckptkit.analysis import view_model
from ckptkit.analysis.columns import Table
from ckptkit.analysis.summary import Summary, TensorRow
from ckptkit.cli.render import table, wrapped
from ckptkit.core.text import flatten

SHOWN = 40  # values, objects or metadata entries; --json and --tree show all


def lines(summary: Summary, rows: list[TensorRow], *, flat: bool, sort: str) -> Iterator[str]:
    """Yield everything except warnings and hints; of a pickled module, its weights only."""
    report = view_model.of_checkpoint(summary, rows, flat=flat, sort=sort)
    yield from wrapped(report.title, whole=True)
    yield from flatten(map(wrapped, report.remarks))
    for found in report.tables:
        yield from _listed(found) if found.headers == view_model.ENTRIES else tabled(found)


def tabled(found: Table) -> Iterator[str]:
    """Yield a table below its title."""
    yield f"\n{found.title}\n" if found.title else ""
    yield from table(found.headers, found.rows, right=found.right)


def _listed(found: Table) -> Iterator[str]:
    if not found.rows:
        return
    yield f"\n{found.title}"
    yield from flatten(wrapped(f"  {name}: {text}") for name, text in found.rows[:SHOWN])
    if len(found.rows) > SHOWN:
        yield f"  and {len(found.rows) - SHOWN:,} more: --tree shows all"
