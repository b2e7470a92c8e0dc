"""The differences of two files, for the page: a state per tensor, and the other side's value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Any

from ckptkit.analysis.diff import Diff
from ckptkit.analysis.matching import Renamed
from ckptkit.compute.compare import compare
from ckptkit.compute.workers import ordered
from ckptkit.core.errors import TensorError
from ckptkit.core.text import escape, shape
from ckptkit.views.page.columns import Columns, numbers
from ckptkit.views.page.seen import Seen

SAME, UNCOMPARED = "same", "not compared"
STATES = (SAME, "missing", "unexpected", "mismatched", "renamed", "changed", UNCOMPARED)


def differences(
    columns: Columns, a: Seen, b: Seen, diff: Diff, *, everything: bool = False
) -> dict[str, Any]:
    """Return the states of the tensors in `columns`, and the tensors of the other file.

    `columns` holds the tensors of `a`; tensors that only `b` has are added to it. With `everything`
    the tensors beside the weights have been compared too, by their places.
    """
    states = _states(diff)
    paired = {pair.new for pair in (*diff.renamed, *diff.reshaped)}
    ours, theirs = _numbers(a, everything), _numbers(b, everything)
    found = [UNCOMPARED] * len(a.shares)
    for name, number in ours.items():
        found[number] = states.get(name, SAME)
    for name in diff.missing:
        if name not in paired:
            share = b.shares[theirs[name]]
            columns.add_one(share._replace(same=None), b.tallies.get(theirs[name]))
            found.append("missing")
    changes = _largest(a, b, [(ours[each.name], theirs[each.name]) for each in diff.changed])
    return {
        "states": STATES,
        "state": [STATES.index(each) for each in found],
        "other": {ours[name]: facts for name, facts in _others(diff, b, theirs, changes)},
        "values": diff.values_compared,
        "advice": list(map(escape, diff.advice)),
        "uncompared": list(map(escape, diff.uncompared)),
    }


def _numbers(seen: Seen, everything: bool) -> dict[str, int]:
    """Return the numbers of the tensors that were compared, by name; with `everything`, of those
    beside the weights by place, unless a weight has that name."""
    rows = [share.row for share in seen.shares]
    found = {row.name: number for number, row in enumerate(rows) if row.name is not None}
    for number, row in enumerate(rows if everything else ()):
        if row.name is None:
            found.setdefault(row.place, number)
    return found


def _largest(a: Seen, b: Seen, pairs: list[tuple[int, int]]) -> Iterator[float | None]:
    """Return the largest difference of values; None where it is not a number."""

    def one(pair: tuple[int, int]) -> float | None:
        i, j = pair
        ours, theirs = a.shares[i].row.tensor, b.shares[j].row.tensor
        try:
            found = compare(ours, theirs, atol=0.0)
        except TensorError:
            return None
        return (
            found.largest
            if found is not None and found.largest is not None and isfinite(found.largest)
            else None
        )

    return ordered(one, pairs, lambda pair: 2 * a.shares[pair[0]].row.nbytes)


def _states(diff: Diff) -> dict[str, str]:
    return {
        **dict.fromkeys(diff.unexpected, "unexpected"),
        **{each.name: "mismatched" for each in diff.mismatched},
        **{each.name: "changed" for each in diff.changed},
        **{pair.old: "renamed" for pair in (*diff.renamed, *diff.reshaped)},
    }


def _others(
    diff: Diff, b: Seen, theirs: dict[str, int], largest: Iterable[float | None]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Return the other file's counterpart of each tensor, by name."""
    for name, _, kind, *_ in diff.mismatched:
        yield name, {"dtype": kind.dtype, "shape": shape(kind.shape)}
    for pair in (*diff.renamed, *diff.reshaped):
        yield pair.old, _renamed(pair)
    for (name, change), by in zip(diff.changed, largest, strict=True):
        found: dict[str, Any] = {
            "changed": change.count,
            "largest": by,
            "relative": change.relative,
            "cosine": change.cosine,
        }
        if (tally := b.tallies.get(theirs[name])) is not None:
            found["norm"] = numbers(tally).get("norm")
        yield name, found


def _renamed(pair: Renamed) -> dict[str, Any]:
    other = {"dtype": pair.b.dtype, "shape": shape(pair.b.shape)} if pair.a != pair.b else {}
    return {
        "name": escape(pair.new),
        "confidence": round(pair.confidence, 2),
        "why": pair.why,
        **other,
    }
