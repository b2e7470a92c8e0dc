"""ckptkit stats"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from ckptkit.cli import options, reading, render
from ckptkit.core.text import shown_url, some

if TYPE_CHECKING:
    from ckptkit.analysis.stats import Statistics, TensorStats
    from ckptkit.core.options import Options

SCHEMA = "ckptkit.stats/1"
SHOWN = 8  # maximum number of names in a warning
NUMBERS = (
    "count", "nan", "inf", "zeros", "sparsity", "mean", "std", "norm", "min", "max", "abs_max",
)  # fmt: skip


@click.command("stats", cls=reading.Reader)
@reading.files
@options.of("stats")
def command(
    files: tuple[str, ...],
    globs: tuple[str, ...],
    everything: bool,
    depth: int | None,
    fold: bool | None,
    sort: str,
    as_json: bool,
    as_csv: bool,
    stored: bool,
    read: Options,
) -> int:
    """Show statistics of tensor values, per tensor or per group.

    Prints mean, standard deviation, minimum, maximum, norm, zeros, NaN, infinities and a histogram.
    `stats` counts NaN and infinities, and ignores them in all other statistics. `stats` reads every
    tensor once, without torch. With --json, each of several files is one JSON object on its own
    line.

    \b
    Example: ckptkit stats run.pth
             ckptkit stats run.pth --flat --sort norm
             ckptkit stats run.pth --depth 2 --csv
    """
    from ckptkit import api
    from ckptkit.analysis import json_facts, stats, view_model
    from ckptkit.core.text import family
    from ckptkit.quantized import dequantized_view

    if (as_json and as_csv) or (depth is not None and fold):
        raise click.UsageError(
            "--json and --csv cannot be combined; --depth and --fold cannot be combined"
        )
    if as_csv and len(files) > 1:
        raise click.UsageError("--csv takes one FILE")
    if fold is None:  # JSON and CSV have a row for each tensor
        fold = not (as_json or as_csv or depth is not None)
    label = None if depth is None else stats.depth(depth)
    if fold:  # --depth excludes --fold
        label = family

    def look(file: str) -> None:
        with api.reading(file, read) as opened:
            checkpoint = opened if stored else dequantized_view(opened)
            modules = stats.modules(checkpoint) if fold else None
            sources = stats.chosen(checkpoint, globs, everything)
            with render.Progress("reading", sum(row.nbytes for row in sources)) as progress:
                found = stats.statistics(sources, label, modules, progress, fork=True)
                rows = found.groups if found.grouped else found.rows
                rows = rows if sort == "file" else _sorted(rows, sort)
                if as_json:
                    facts = json_facts.statistics(checkpoint.name, checkpoint.format, found, rows)
                    text = [*render.json_pieces({"schema": SCHEMA, **facts}), "\n"]
                elif as_csv:
                    text = [_csv(rows)]
                else:
                    shown = view_model.statistics_table(rows, found, render.bars)
                    lines = list(render.table(shown.headers, shown.rows, right=shown.right))
                    if len(files) > 1 or file not in files:  # files of a folder are not in `files`
                        lines = [f"{render.escape(shown_url(file))}:", *lines, ""]
                    text = [f"{line}\n" for line in lines]
        render.write(text)
        if not as_json:
            _warn(found, globs, shown_url(file), read.key)

    failures = reading.each_of(files, look, walks=not as_csv)
    return failures[0].exit_code if failures else 0


def _sorted(rows: Iterable[TensorStats], sort: str) -> list[TensorStats]:
    from ckptkit.analysis import view_model

    def order(row: TensorStats) -> float:
        number = view_model.numbers(row.tally, row.kind)[sort]
        return float("inf") if number is None else -abs(number)

    return sorted(rows, key=(lambda row: row.label) if sort == "name" else order)


def _csv(rows: Iterable[TensorStats]) -> str:
    """Return CSV. A complex mean is written as in Python (``1+2j``)."""
    import csv
    import io

    from ckptkit.analysis import view_model

    buffer = io.StringIO()
    lines = csv.writer(buffer, lineterminator="\n")
    lines.writerow(("name", "dtype", "shape", "tensors", *NUMBERS))
    for row in rows:
        # A quote keeps spreadsheets from reading a name as a formula.
        name = f"{chr(39) * row.label.startswith(('=', '+', '-', '@'))}{render.escape(row.label)}"
        shape = "" if row.shape is None else "x".join(map(str, row.shape))
        numbers = view_model.numbers(row.tally, row.kind).values()
        cells = ("" if value is None else value for value in numbers)
        lines.writerow((name, " ".join(row.dtypes), shape, row.tensors, *cells))
    return buffer.getvalue()


def _warn(found: Statistics, globs: tuple[str, ...], file: str, key: str | None) -> None:
    """Print warnings about NaN, skipped tensors, and globs without matches."""
    from ckptkit.analysis.advice import convert

    if found.odd:
        names = [row.label for row in found.odd]
        count = render.plural(len(names), "tensor")
        render.warn(f"NaN or infinite values in {count}: {some(names, SHOWN)}")
    if found.skipped:
        names = [f"{each.name} ({each.why})" for each in found.skipped]
        hint = None
        if any(each.dtype.startswith("q") for each in found.skipped):
            chosen = () if key is None else ("--key", key)
            command = convert(file, "float", *chosen, "--dequantize")
            hint = f"to convert quantized weights to float32: {command}"
        count = render.plural(len(names), "tensor")
        render.warn(f"{count} without statistics: {some(names, SHOWN)}", hint)
    if globs and not found.totals and not found.skipped:
        render.warn(f"no tensor name or path matches --keys {', '.join(globs)}")
