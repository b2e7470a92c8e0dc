"""The facts that the page shows, as JSON values. Strings of a file are escaped as on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckptkit import quantized
from ckptkit.analysis import view_model
from ckptkit.analysis.shares import OPTIMIZER
from ckptkit.analysis.summary import Summary
from ckptkit.analysis.view_model import entries
from ckptkit.core import __version__
from ckptkit.core.text import escape
from ckptkit.core.tree import join
from ckptkit.diagnosis import content
from ckptkit.diagnosis.facts import Facts
from ckptkit.views.page.columns import MOST, Columns, treemap
from ckptkit.views.page.differences import differences
from ckptkit.views.page.seen import Seen

if TYPE_CHECKING:
    from ckptkit.analysis.diff import Diff

SCHEMA = "ckptkit.page/1"
LISTED = 400  # values, objects or metadata entries


def facts(
    a: Seen, b: Seen | None = None, diff: Diff | None = None, *, everything: bool = False
) -> dict[str, Any]:
    """Return all facts about one file, or about two and their differences.

    `everything`: the differences are of all tensors and values, not of the weights alone.
    """
    columns = Columns(bool(a.tallies))
    columns.add(a)
    files = [_file(each) for each in (a, b) if each is not None]
    found: dict[str, Any] = {"schema": SCHEMA, "ckptkit": __version__, "files": files}
    if b is not None and diff is not None:
        found["diff"] = differences(columns, a, b, diff, everything=everything)
        values = entries(diff)
        found["diff"]["entries"] = {"count": values.things, "rows": values.rows[:LISTED]}
    placed = treemap(columns.shares, min(a.summary.totals.unused_nbytes, MOST))
    return {**found, "tensors": columns.facts(), "treemap": placed}


def _file(seen: Seen) -> dict[str, Any]:
    summary, totals = seen.summary, seen.summary.totals
    whole = seen.checkpoint
    # A page is read on other machines than this one.
    found = quantized.find(whole)
    causes = content.causes(
        Facts(summary.path, summary, whole.root, quantized=found, for_here=False)
    )
    return {
        "name": escape(summary.path),
        "format": summary.format,
        "size": summary.size,
        "weights": None if summary.weights is None else escape(join(summary.weights)),
        "totals": {name: min(number, MOST) for name, number in totals._asdict().items()},
        "optimizer": sum(share.nbytes for share in seen.shares if share.role == OPTIMIZER),
        "tied": sum(share.same is not None for share in seen.shares),
        "causes": [
            {
                "level": cause.level,
                "title": escape(cause.title),
                "explanation": escape(cause.explanation),
                "command": None if cause.command is None else escape(cause.command),
            }
            for cause in causes
        ],
        "warnings": list(map(escape, summary.warnings)),
        **_others(summary),
    }


def _others(summary: Summary) -> dict[str, Any]:
    """Return values, objects and metadata, up to a limit."""
    return {
        listing.title: {"count": listing.things, "rows": listing.rows[:LISTED]}
        for listing in view_model.listings(summary)
    }
