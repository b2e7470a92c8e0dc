"""ckptkit stats"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import options, render
from ckptkit.cli.bars import bars
from ckptkit.cli.progress import Progress
from ckptkit.core.text import shown_url, some

if TYPE_CHECKING:
    from ckptkit.analysis.stats import Statistics, TensorStats
    from ckptkit.core.checkpoint import Checkpoint
    from ckptkit.core.options import Options

SCHEMA = "ckptkit.stats/2"
SHOWN = 8  # names in a warning
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


@options.reads
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
    "--all", "everything", is_flag=True, help="Not only the weights: all tensors of the file."
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
@options.as_json(SCHEMA)
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
    read: Options,
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
    from ckptkit.api import reading
    from ckptkit.core.text import family
    from ckptkit.quantized import look_through

    if (as_json and as_csv) or (depth is not None and fold):
        raise click.UsageError("--json and --csv exclude each other, and so do --depth and --fold")
    label = family if fold else None if depth is None else stats.depth(depth)
    form = _form(as_json, as_csv)
    with reading(file, read) as opened:
        checkpoint = opened if stored else look_through(opened)
        rows = stats.chosen(checkpoint, globs, everything)
        found = stats.Statistics(rows, label, stats.modules(checkpoint) if fold else None)
        with Progress("reading", sum(row.nbytes for row in rows)) as progress:
            text = list(_text(checkpoint, found, _arranged(found, progress, sort), form))
    render.write(text)
    if not as_json:
        for line, hint in _remarks(found, globs, shown_url(file), read.key):
            render.warn(line, hint)
    return 0


def _form(as_json: bool, as_csv: bool) -> str:
    if as_json:
        return "json"
    return "csv" if as_csv else "text"


def _text(
    checkpoint: Checkpoint, found: Statistics, rows: Iterator[TensorStats], form: str
) -> Iterator[str]:
    """Yield the output in pieces."""
    from ckptkit.analysis import json_facts, view_model

    if form == "json":
        facts = json_facts.statistics(checkpoint.name, checkpoint.format, found, rows)
        yield from render.json_pieces({"schema": SCHEMA, **facts})
        yield "\n"
    elif form == "csv":
        yield from _csv(rows)
    else:
        shown = view_model.statistics_table(rows, found, bars)
        lines = render.table(shown.headers, shown.rows, right=shown.right)
        yield from (f"{line}\n" for line in lines)


def _arranged(
    found: Statistics, progress: Callable[[int], None], sort: str
) -> Iterator[TensorStats]:
    """Yield the rows to show, in file order one by one if no other order is requested."""
    rows = found.rows(progress, fork=True)
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
    from ckptkit.analysis import view_model

    return view_model.numbers(row.tally, row.kind)


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


def _remarks(
    found: Statistics, globs: tuple[str, ...], file: str, key: str | None
) -> Iterator[tuple[str, str | None]]:
    """Yield remarks (NaN, skipped tensors) and hints."""
    from ckptkit.analysis.advice import convert

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
        chosen = () if key is None else ("--key", key)
        command = convert(file, "float", *chosen, "--dequantize")
        hint = f"to convert quantized weights to float32: {command}" if quantized else None
        yield (
            f"{render.plural(len(names), 'tensor')} without statistics: {some(names, SHOWN)}",
            hint,
        )
    if globs and not found.totals and not found.skipped:
        yield f"no tensor name or path matches --keys {', '.join(globs)}", None
