"""ckptkit stats"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import options, render
from ckptkit.cli.bars import bars
from ckptkit.cli.progress import Progress
from ckptkit.core.text import some

if TYPE_CHECKING:
    from ckptkit.analysis import summary
    from ckptkit.analysis.stats import Statistics, TensorStats
    from ckptkit.compute import Histogram, Tally
    from ckptkit.core.checkpoint import Checkpoint

SCHEMA = "ckptkit.stats/1"
SHOWN = 8  # names in a warning
WIDE = 16  # bins of a histogram in a table
NUMBERS = (
    "count",
    "nan",
    "inf",
    "zeros",
    "sparsity",
    "mean",
    "std",
    "norm",
    "min",
    "max",
    "abs_max",
)
COLUMNS = (
    "name",
    "tensors",
    "count",
    "mean",
    "std",
    "min",
    "max",
    "norm",
    "zeros",
    "NaN",
    "inf",
    "histogram",
)


@click.command("stats")
@click.argument("file", metavar="FILE")
@click.option(
    "--keys",
    "globs",
    metavar="GLOB",
    multiple=True,
    help="Only tensors whose names or paths match (repeatable).",
)
@click.option(
    "--all", "everything", is_flag=True, help="All tensors of the file, not only the weights."
)
@click.option(
    "--depth",
    type=click.IntRange(min=1),
    metavar="N",
    help="Group names by their first N components.",
)
@click.option(
    "--fold", is_flag=True, help="Group names that differ only in an index: layers.*.weight."
)
@click.option(
    "--sort",
    type=click.Choice(["file", "name", *NUMBERS]),
    default="file",
    help="Order of the rows; by numbers, largest first.",
)
@click.option("--json", "as_json", is_flag=True, help=f"Print one JSON object (schema {SCHEMA}).")
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values, full precision.")
@options.stored
@options.key
def command(
    file: str,
    globs: tuple[str, ...],
    everything: bool,
    depth: int | None,
    fold: bool,
    sort: str,
    as_json: bool,
    as_csv: bool,
    stored: bool,
    key: str | None,
) -> int:
    """Show statistics of tensor values, per tensor or per group.

    Mean, standard deviation, minimum, maximum, norm, zeros, NaN, infinities and a histogram. NaN
    and infinities are counted and excluded from all else. Reads every tensor once, without torch.

    \b
    Example: ckptkit stats run.pth
             ckptkit stats run.pth --fold --sort norm
             ckptkit stats run.pth --depth 2 --csv
    """
    from ckptkit.analysis import stats
    from ckptkit.api import open_checkpoint
    from ckptkit.quantized import look_through

    if (as_json and as_csv) or (depth is not None and fold):
        raise click.UsageError("--json and --csv exclude each other, and so do --depth and --fold")
    by_depth = None if depth is None else stats.depth(depth)
    label = stats.family if fold else by_depth
    form = _form(as_json, as_csv)
    with closing(open_checkpoint(file, key=key)) as opened:
        checkpoint = opened if stored else look_through(opened)
        rows = _chosen(checkpoint, globs, everything)
        found = stats.Statistics(rows, label)
        _print(checkpoint, found, sort, form, sum(row.nbytes for row in rows))
    if not as_json:
        for line, hint in _remarks(found, globs):
            render.warn(line, hint)
    return 0


def _form(as_json: bool, as_csv: bool) -> str:
    if as_json:
        return "json"
    return "csv" if as_csv else "text"


def _print(checkpoint: Checkpoint, found: Statistics, sort: str, form: str, nbytes: int) -> None:
    """Read and print: the table when everything is known, JSON and CSV row by row.

    No progress bar is drawn between their lines.
    """
    with Progress("reading", nbytes) as progress:
        quiet = form != "text" and render.is_terminal(sys.stdout)
        rows = _arranged(found, found.rows() if quiet else found.rows(progress), sort)
        if form == "json":
            render.emit_json(_facts(checkpoint, found, rows))
        elif form == "csv":
            render.write(_csv(rows))
        else:
            lines = list(_lines(rows, found))
    if form == "text":
        render.emit(*lines)


def _chosen(
    checkpoint: Checkpoint, globs: tuple[str, ...], everything: bool
) -> list[summary.TensorRow]:
    """Return the weights, or all tensors where there are none, that match the globs."""
    from ckptkit.analysis.summary import summarize

    rows = summarize(checkpoint).rows
    weights = [] if everything else [row for row in rows if row.name is not None]
    matches = render.matcher(globs or "*")
    return [
        row
        for row in weights or rows
        if (row.name is not None and matches(row.name)) or matches(row.place)
    ]


def _arranged(found: Statistics, rows: Iterator[TensorStats], sort: str) -> Iterator[TensorStats]:
    """Yield the rows to show, in file order one by one if no other order is requested."""
    if found.grouped:
        for _ in rows:
            pass
        rows = iter(found.groups)
    if sort == "file":
        yield from rows
    elif sort == "name":
        yield from sorted(rows, key=lambda row: row.label)
    else:
        yield from sorted(
            rows, key=lambda row: -float("-inf" if (n := _numbers(row)[sort]) is None else abs(n))
        )


def _numbers(row: TensorStats) -> dict[str, Any]:
    return facts_of(row.tally, row.kind)


def facts_of(tally: Tally, kind: str) -> dict[str, Any]:
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


def _facts(
    checkpoint: Checkpoint, found: Statistics, rows: Iterator[TensorStats]
) -> dict[str, Any]:
    """Return the JSON object; totals come last, since they are only known then."""
    return {
        "schema": SCHEMA,
        "path": checkpoint.name,
        "format": checkpoint.format,
        "groups" if found.grouped else "tensors": map(_json, rows),
        "totals": _totals(found),
        "skipped": _skipped(found),
    }


def _totals(found: Statistics) -> Iterator[dict[str, Any]]:
    yield from map(_json, found.totals)


def _skipped(found: Statistics) -> Iterator[dict[str, Any]]:
    yield from ({"name": each.name, "dtype": each.dtype, "why": each.why} for each in found.skipped)


def _json(row: TensorStats) -> dict[str, Any]:
    from ckptkit.analysis.values import key_list

    source = row.source
    place = (
        {}
        if source is None
        else {"path": source.place, "keys": key_list(source.path), "shape": row.shape}
    )
    numbers = {name: render.json_number(_plain(value)) for name, value in _numbers(row).items()}
    histogram = row.tally.histogram
    return {
        "name": row.label,
        **place,
        "kind": row.kind,
        "dtypes": row.dtypes,
        "tensors": row.tensors,
        **numbers,
        "histogram": _bins(histogram) if histogram.counts else None,
    }


def _bins(histogram: Histogram) -> dict[str, Any]:
    edges = histogram.edges
    return {"start": edges[0], "width": edges[1] - edges[0], "counts": histogram.counts}


def _plain(value: Any) -> Any:
    return [value.real, value.imag] if isinstance(value, complex) else value


def _cell(name: str) -> str:
    """Return a name that no spreadsheet takes for a formula."""
    return (
        f"'{render.escape(name)}" if name.startswith(("=", "+", "-", "@")) else render.escape(name)
    )


def _csv(rows: Iterable[TensorStats]) -> Iterator[str]:
    """Yield CSV lines; a complex mean is written as in Python."""
    import csv
    import io

    buffer = io.StringIO()
    lines = csv.writer(buffer, lineterminator="\n")
    lines.writerow(("name", "dtype", "shape", "tensors", *NUMBERS))
    for row in rows:
        shape = "" if row.shape is None else "x".join(map(str, row.shape))
        numbers = ("" if value is None else value for value in _numbers(row).values())
        lines.writerow((_cell(row.label), " ".join(row.dtypes), shape, row.tensors, *numbers))
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()
    yield buffer.getvalue()


def _lines(rows: Iterable[TensorStats], found: Statistics) -> Iterator[str]:
    cells = [_cells(row, render.escape(row.label) or "(root)") for row in rows]
    if len(cells) > 1:
        cells += [
            _cells(row, f"all {row.kind}" if len(found.totals) > 1 else "all")
            for row in found.totals
        ]
    used = [n for n, _ in enumerate(COLUMNS) if any(row[n] for row in cells)]
    headers = [COLUMNS[n] for n in used]
    kept = [[row[n] for n in used] for row in cells]
    yield from render.table(
        headers, kept, right=[each for each in headers if each not in ("name", "histogram")]
    )


def _cells(row: TensorStats, label: str) -> list[str]:
    numbers = _numbers(row)
    values = [short(numbers[name]) for name in ("mean", "std", "min", "max", "norm")]
    zeros = f"{numbers['sparsity']:.1%}" if numbers["zeros"] else ""
    odd = [f"{numbers[name]:,}" if numbers[name] else "" for name in ("nan", "inf")]
    tensors = f"{row.tensors:,}" if row.tensors > 1 else ""
    histogram = bars(row.tally.histogram.at_most(WIDE).counts)
    return [label, tensors, f"{numbers['count']:,}", *values, zeros, *odd, histogram]


def short(value: Any) -> str:
    """Format a number with three digits."""
    if value is None:
        return ""
    if isinstance(value, complex):
        return f"{value.real:.3g}{value.imag:+.3g}j"
    return f"{value:,}" if isinstance(value, int) and abs(value) < 10**6 else f"{value:.3g}"


def _remarks(found: Statistics, globs: tuple[str, ...]) -> Iterator[tuple[str, str | None]]:
    """Yield remarks (NaN, skipped tensors) and hints."""
    names = [row.label for row in found.odd]
    if names:
        yield (
            f"NaN or infinite values in {render.plural(len(names), 'tensor')}: "
            f"{some(names, SHOWN)}",
            None,
        )
    if found.skipped:
        names = [f"{each.name} ({each.why})" for each in found.skipped]
        quantized = any(each.dtype.startswith("q") for each in found.skipped)
        hint = (
            "`ckptkit convert --dequantize` converts quantized weights to float32"
            if quantized
            else None
        )
        yield (
            f"{render.plural(len(names), 'tensor')} without statistics: {some(names, SHOWN)}",
            hint,
        )
    if globs and not found.totals and not found.skipped:
        yield f"no tensor name or path matches --keys {', '.join(globs)}", None
