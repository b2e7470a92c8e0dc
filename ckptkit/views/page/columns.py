"""The tensors of a page in columns: 100,000 of them take a few megabytes of JSON.

All strings of a file are escaped as on a terminal: no invisible characters, no change of text
direction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ckptkit.analysis.shares import Share
from ckptkit.core.text import escape, shape, size
from ckptkit.views.page.seen import Seen

if TYPE_CHECKING:
    from ckptkit.compute import Tally

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


class Columns:
    """All tensors, column by column; rare properties are mappings from tensor number to value."""

    def __init__(self, valued: bool) -> None:
        self.valued = valued
        self.labels: list[str] = []
        self.places: dict[int, str] = {}  # where they are not the labels
        self.shape: Table[str] = Table()
        self.dtype: Table[str] = Table()
        self.device: Table[str] = Table()
        self.role: Table[str] = Table()
        self.cells: dict[str, list[int]] = {
            name: []
            for name in ("shape", "dtype", "device", "role", "parameters", "nbytes", "stored")
        }
        self.same: dict[int, int] = {}
        self.remarks: dict[int, str] = {}
        self.stats: dict[int, dict[str, Any]] = {}

    def add(self, seen: Seen) -> None:
        """Add all tensors of a file."""
        held = Counter(row.storage for row in seen.summary.rows)
        for number, share in enumerate(seen.shares):
            self.add_one(share, seen.tallies.get(number), held)

    def add_one(self, share: Share, tally: Tally | None, held: Counter[int | None]) -> int:
        """Add one tensor; return its number. `held` counts the tensors of each storage."""
        number, row, cells = len(self.labels), share.row, self.cells
        self.labels.append(escape(share.label))
        if share.place != share.label:
            self.places[number] = escape(share.place)
        for name, text in (
            ("shape", shape(row.tensor.shape)),
            ("dtype", escape(row.dtype)),
            ("device", escape(row.tensor.device)),
            ("role", share.role),
        ):
            cells[name].append(getattr(self, name)(text))
        cells["parameters"].append(min(share.parameters, MOST))
        cells["nbytes"].append(min(share.nbytes, MOST))
        cells["stored"].append(min(row.nbytes, MOST))
        if share.same is not None:
            self.same[number] = share.same
        if remark := _remark(share, held):
            self.remarks[number] = remark
        if tally is not None:
            self.stats[number] = numbers(tally)
        return number

    def facts(self) -> dict[str, Any]:
        tables = {
            f"{name}s": list(getattr(self, name).numbers)
            for name in ("shape", "dtype", "device", "role")
        }
        return {
            "name": self.labels,
            "place": self.places,
            **self.cells,
            **tables,
            "same": self.same,
            "remark": self.remarks,
            "valued": self.valued,
            "stats": self.stats,
        }


def _remark(share: Share, held: Counter[int | None]) -> str:
    """Return a remark on a tensor that is not plain, strided and alone in its storage."""
    tensor, parts = share.row.tensor, []
    if tensor.layout != "strided":
        parts.append(tensor.layout)
    if tensor.kind == "ndarray":
        parts.append("numpy")
    if tensor.storage is not None and held[share.row.storage] > 1:
        parts.append(f"shares storage {share.row.storage}")
    if (
        tensor.storage is not None
        and tensor.layout == "strided"
        and tensor.storage.nbytes > share.row.nbytes
    ):
        parts.append(f"view of {size(tensor.storage.nbytes)}")
    return ", ".join(parts)


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
