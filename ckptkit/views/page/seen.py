"""A checkpoint that has been read, ready for a page."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ckptkit.analysis.shares import Share, shares
from ckptkit.analysis.summary import Summary, summarize
from ckptkit.core.checkpoint import Checkpoint

if TYPE_CHECKING:
    from ckptkit.compute.tallies import Tally


@dataclass(frozen=True)
class Seen:
    """A checkpoint, its summary, and the statistics of its tensors by number, if computed."""

    checkpoint: Checkpoint
    summary: Summary
    shares: list[Share]
    tallies: dict[int, Tally] = field(default_factory=dict)


def look(checkpoint: Checkpoint, progress: Callable[[int], None] | None = None) -> Seen:
    """Read the headers; with `progress`, which gets byte counts, also read every tensor."""
    summary = summarize(checkpoint)
    tallies = {}
    if progress is not None:
        from ckptkit.analysis.stats import Statistics

        numbers = {id(row): number for number, row in enumerate(summary.rows)}
        rows = Statistics(summary.rows).rows(progress)
        tallies = {numbers[id(row.source)]: row.tally for row in rows}
    return Seen(checkpoint, summary, shares(summary, checkpoint.root), tallies)
