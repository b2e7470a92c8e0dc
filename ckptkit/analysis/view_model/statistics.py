"""The view of the values of tensors: one number after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ckptkit.analysis.values import json_number, key_list
from ckptkit.analysis.view_model import Table
from ckptkit.core.text import escape

if TYPE_CHECKING:
    from ckptkit.analysis.stats import Statistics, TensorStats
    from ckptkit.compute import Histogram, Tally

WIDE = 16  # bins of a histogram in a table
MEASURED = ("mean", "std", "min", "max", "norm")  # in tables, in this order
ODD = {"nan": "NaN", "inf": "inf"}  # counts that a healthy tensor has not, by title
COLUMNS = ("name", "tensors", "count", *MEASURED, "zeros", *ODD.values(), "histogram")


def numbers(tally: Tally, kind: str) -> dict[str, Any]:
    """Return the statistics of the JSON schema.

    None where there is no value; complex numbers have no minimum and no maximum.
    """
    there, ordered = tally.finite > 0, kind != "complex"
    return {
        "count": tally.count,
        "nan": tally.nan,
        "inf": tally.infinite,
        "zeros": tally.zeros,
        "sparsity": tally.sparsity,
        "mean": tally.mean if there else None,
        "std": tally.std,
        "norm": tally.norm,
        "min": tally.low if ordered else None,
        "max": tally.high if ordered else None,
        "abs_max": tally.abs_max,
    }


def as_json(row: TensorStats) -> dict[str, Any]:
    """Return STATS of the JSON schema."""
    source = row.source
    place: dict[str, Any] = {"path": None, "keys": None, "shape": None}
    if source is not None:
        place = {"path": source.place, "keys": key_list(source.path), "shape": row.shape}
    found = numbers(row.tally, row.kind)
    histogram = row.tally.histogram
    return {
        "name": row.label,
        **place,
        "kind": row.kind,
        "dtypes": row.dtypes,
        "tensor_count": row.tensors,
        **{name: json_number(_plain(value)) for name, value in found.items()},
        "histogram": _bins(histogram) if histogram.counts else None,
    }


def _bins(histogram: Histogram) -> dict[str, Any]:
    edges = histogram.edges
    return {"start": edges[0], "width": edges[1] - edges[0], "counts": histogram.counts}


def _plain(value: Any) -> Any:
    return [value.real, value.imag] if isinstance(value, complex) else value


def table(
    rows: Iterable[TensorStats], found: Statistics, bars: Callable[[Sequence[int]], str]
) -> Table:
    """Return the table of the rows and the totals; `bars` draws the counts of a histogram."""
    cells = [_cells(row, escape(row.label) or "(root)", bars) for row in rows]
    if len(cells) > 1:
        several = len(found.totals) > 1
        cells += [_cells(row, f"all {row.kind}" * several or "all", bars) for row in found.totals]
    right = tuple(each for each in COLUMNS if each not in ("name", "histogram"))
    return Table("", COLUMNS, cells, right, len(cells)).without_empty()


def _cells(row: TensorStats, label: str, bars: Callable[[Sequence[int]], str]) -> tuple[str, ...]:
    found = numbers(row.tally, row.kind)
    return (
        label,
        f"{row.tensors:,}" if row.tensors > 1 else "",
        f"{found['count']:,}",
        *(short(found[name]) for name in MEASURED),
        f"{found['sparsity']:.1%}" if found["zeros"] else "",
        *(f"{found[name]:,}" if found[name] else "" for name in ODD),
        bars(row.tally.histogram.at_most(WIDE).counts),
    )


def measured(found: dict[str, Any]) -> list[str]:
    """Return the numbers of one tensor in words: ``mean 0.5``, ``3 zeros``."""
    named = [f"{name} {short(found[name])}" for name in MEASURED if found[name] is not None]
    return named + [f"{found[name]:,} {name}" for name in ("zeros", *ODD) if found[name]]


def short(value: Any) -> str:
    """Format a number with three digits."""
    if value is None:
        return ""
    if isinstance(value, complex):
        return f"{value.real:.3g}{value.imag:+.3g}j"
    return f"{value:,}" if isinstance(value, int) and abs(value) < 10**6 else f"{value:.3g}"
