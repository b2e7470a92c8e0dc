"""The tensors of a page in columns: 100,000 of them take a few megabytes of JSON.

All strings of a file are escaped as on a terminal: no invisible characters, no change of text
direction.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ckptkit.analysis import columns
from ckptkit.analysis.shares import Share, grown
from ckptkit.core.text import escape
from ckptkit.views.page.seen import Seen
from ckptkit.views.page.treemap import arranged, numbered

if TYPE_CHECKING:
    from ckptkit.compute.tallies import Tally

BINS = 32
LARGEST = 1e300  # what is above becomes none: a browser does arithmetic with it
MOST = 1 << 53  # the largest whole number that every browser counts with
T = TypeVar("T", bound=Hashable)


class Table(Generic[T]):
    """Numbers for values that occur often."""

    def __init__(self) -> None:
        self.numbers: dict[T, int] = {}

    def __call__(self, value: T) -> int:
        return self.numbers.setdefault(value, len(self.numbers))


# Facts that are columns, each with a table of its values, and facts that few tensors have.
COLUMNS = tuple(fact for fact in columns.BRIEF if fact.title and fact is not columns.SIZE)
MARKS = tuple(fact for fact in columns.BRIEF if not fact.title)
AMOUNTS = ("parameters", "nbytes", "stored")


class Columns:
    """All tensors, column by column; rare properties are mappings from tensor number to value."""

    def __init__(self, valued: bool) -> None:
        self.valued = valued
        self.labels: list[str] = []
        self.shares: list[Share] = []
        self.places: dict[int, str] = {}  # where they are not the labels
        named = (*(fact.name for fact in COLUMNS), "role")
        self.tables: dict[str, Table[str]] = {name: Table() for name in named}
        self.cells: dict[str, list[int]] = {name: [] for name in (*named, *AMOUNTS)}
        self.same: dict[int, int] = {}
        self.marks: dict[str, dict[int, str]] = {fact.name: {} for fact in MARKS}
        self.stats: dict[int, dict[str, Any]] = {}

    def add(self, seen: Seen) -> None:
        """Add all tensors of a file."""
        for number, share in enumerate(seen.shares):
            self.add_one(share, seen.tallies.get(number))

    def add_one(self, share: Share, tally: Tally | None) -> int:
        """Add one tensor; return its number."""
        number, row, cells = len(self.labels), share.row, self.cells
        self.labels.append(escape(share.label))
        self.shares.append(share)
        if share.place != share.label:
            self.places[number] = escape(share.place)
        for fact in COLUMNS:
            cells[fact.name].append(self.tables[fact.name](fact.text(fact.value(row))))
        cells["role"].append(self.tables["role"](share.role))
        cells["parameters"].append(min(share.parameters, MOST))
        cells["nbytes"].append(min(share.nbytes, MOST))
        cells["stored"].append(min(row.nbytes, MOST))
        if share.same is not None:
            self.same[number] = share.same
        for fact in MARKS:
            if mark := fact.text(fact.value(row)):
                self.marks[fact.name][number] = mark
        if tally is not None:
            self.stats[number] = numbers(tally)
        return number

    def facts(self) -> dict[str, Any]:
        """Return all columns as JSON values."""
        return {
            "name": self.labels,
            "place": self.places,
            "facts": {fact.name: fact.title for fact in COLUMNS},
            **self.cells,
            **{f"{name}s": list(table.numbers) for name, table in self.tables.items()},
            "same": self.same,
            **self.marks,
            "valued": self.valued,
            "stats": self.stats,
        }


def treemap(shares: Sequence[Share], unused: int) -> dict[str, Any]:
    """Return the tree of names, and how its branches are placed on the page."""
    root, labels = grown(shares), Table[str]()
    rows = {id(share): number for number, share in enumerate(shares)}
    found, numbers = numbered(root, rows)
    bytes_placed = arranged(root, numbers, "nbytes", unused)
    placed = arranged(root, numbers, "parameters")
    return {
        "label": [labels(escape(label)) for label in found.label],
        "labels": list(labels.numbers),
        "parent": found.parent,
        "row": found.row,
        "nbytes": bytes_placed,
        "parameters": None if placed == bytes_placed else placed,
    }


def numbers(tally: Tally) -> dict[str, Any]:
    """Return statistics with six digits, without infinities (no JSON) and complex numbers."""
    histogram = tally.histogram.at_most(BINS)
    edges = histogram.edges
    found: dict[str, Any] = {
        "count": tally.count,
        "zeros": tally.zeros,
        "nan": tally.nan,
        "inf": tally.infinite,
    }
    if tally.finite:
        found |= {"norm": tally.norm, "std": tally.std, "min": tally.low, "max": tally.high}
        found["mean"] = None if isinstance(tally.mean, complex) else tally.mean
    if histogram.counts:
        found |= {"from": edges[0], "to": edges[-1], "bins": histogram.counts}
    return {name: _short(value) for name, value in found.items()}


def _short(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if abs(value) < LARGEST else None
