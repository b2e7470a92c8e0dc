"""ckptkit show: print as many values of a tensor as fit, with enough digits to distinguish them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import options, reading, render
from ckptkit.cli.options import missing
from ckptkit.core.errors import UsageError
from ckptkit.core.text import flatten, guess, shown_url

if TYPE_CHECKING:
    from ckptkit.analysis.slices import Pick, Picks
    from ckptkit.analysis.summary import TensorRow
    from ckptkit.compute.tallies import Histogram, Tally
    from ckptkit.core.checkpoint import Checkpoint
    from ckptkit.core.options import Options
    from ckptkit.core.tensor import Tensor

SCHEMA = "ckptkit.show/1"
FOUND = 1  # exit code of --nan if it finds NaN or infinities
ROWS = 12
BINS = 16  # maximum number of histogram bins
BAR = 40  # maximum width of a histogram bar, in characters
FIRST = 10  # maximum number of positions that --nan lists
# If a slice has more elements than this, the statistics without --stats cover only the printed
# values.
COUNTED = 1 << 20
LISTED = 1 << 20  # maximum number of elements that --json prints
CELL = 10  # minimum width of a number and the space before it, in characters
PLAIN = 100  # width of a line without a terminal, in characters
LABEL = 8  # width of the column of row indices, in characters
# Minimum and maximum number of significant digits. 17 digits distinguish all float64 numbers.
FEWEST, MOST = 3, 17
MARK = "*"  # marks a number that differs from the first table


@dataclass
class Shown:
    """A tensor of a file, the selected slice, and the printed corner of the slice.

    `cells` contains the printed numbers by row. A vector is one row, printed in lines of `columns`
    numbers.
    """

    path: str
    name: str
    tensor: Tensor
    picks: Picks
    corner: Picks = ()
    cells: Sequence[list[Any]] = ()
    columns: int = 0

    @property
    def part(self) -> Tensor:
        from ckptkit.analysis.slices import select

        return select(self.tensor, self.picks)

    def fit(self, rows: int, columns: int) -> None:
        """Read the first rows and columns of a matrix, or the first elements of a vector.

        If the cells were already read, keep only the first columns.
        """
        from ckptkit.analysis.slices import plane, select
        from ckptkit.compute import tallies

        is_vector = len(many(self.picks)) == 1
        width = rows * columns if is_vector else columns
        self.corner, self.columns = plane(self.picks, rows, width), columns
        if not self.cells:
            numbers = tallies.numbers(select(self.tensor, self.corner))
            height = 1 if is_vector else next((pick.size for pick in many(self.corner)), 1)
            self.cells = numbers.reshape(height, -1).tolist() if numbers.size else []
        self.cells = [row[:width] for row in self.cells]


def many(picks: Picks) -> list[Pick]:
    """Return the dimensions of a slice: two for a matrix, one for a vector, none for a number."""
    return [pick for pick in picks if not pick.single]


def _check(ctx: click.Context) -> None:
    given = ctx.params
    if given["nonfinite"] and (given["index"] or given["as_json"]):
        raise click.UsageError("--nan reads the whole tensor: remove SLICE and --json")
    if given["name"] is None and (not given["nonfinite"] or given["other"]):
        raise missing(ctx, "name")


@click.command("show", cls=reading.Reader, check=_check)
@click.argument("file", metavar="FILE")
@click.argument("name", metavar="NAME", required=False)
@click.argument("index", metavar="[SLICE]", default="")
@options.of("show")
def command(
    file: str,
    name: str | None,
    index: str,
    other: str | None,
    name_b: str | None,
    rows: int,
    columns: int | None,
    counted: bool,
    nonfinite: bool,
    as_json: bool,
    stored: bool,
    read: Options,
) -> int:
    """Show the values and statistics of one tensor.

    SLICE selects elements as in Python: '[0, :, 3:7]'. `show` reads only the bytes of the slice,
    also from a URL. If the slice has more than a million elements, the statistics cover only the
    printed values. With --stats, the statistics cover the complete slice.

    \b
    Example: ckptkit show run.pth conv1.weight
             ckptkit show run.pth conv1.weight '[0, :, 0:3]' --with other.safetensors
             ckptkit show run.pth --nan
    """
    from ckptkit import api

    if name is None:
        return _print_nonfinite(file, read, stored)
    pairs = [(file, name), *([(other, name_b or name)] if other is not None else [])]
    lines: Iterable[str]
    code = 0
    with ExitStack() as stack:
        shown = []
        for path, each in pairs:
            found = _rows(stack.enter_context(api.reading(path, read)), stored)
            shown.append(_chosen(shown_url(path), each, index, found))
        if as_json:
            facts = {"schema": SCHEMA, "tensors": [_facts(each) for each in shown]}
            text = [*render.json_pieces(facts), "\n"]
        else:
            if nonfinite:
                seen = list(map(_nonfinite, shown))
                code = FOUND * any(len(each) > 1 for each in seen)
                lines = render.text_lines(flatten(seen))
            else:
                lines = _values(shown, rows, columns, counted)
            text = [f"{line}\n" for line in lines]
    render.write(text)
    return code


def _rows(checkpoint: Checkpoint, stored: bool) -> list[TensorRow]:
    """Print the warnings, and return all tensors. Unless `stored` is true, return each quantized
    weight as one tensor."""
    from ckptkit.analysis.summary import summarize
    from ckptkit.quantized import dequantized_view

    summary = summarize(checkpoint if stored else dequantized_view(checkpoint))
    where = shown_url(checkpoint.name or "")
    for each in summary.warnings:
        render.warn(f"{where}: {each}")
    return summary.rows


def _chosen(file: str, name: str, index: str, rows: list[TensorRow]) -> Shown:
    """Return the tensor with this name or path, and the slice `index` of the tensor.

    Raises UsageError for a missing tensor or an invalid slice.
    """
    from ckptkit.analysis.slices import parse

    found = [row for row in rows if row.name == name] or [row for row in rows if row.place == name]
    if not found:
        names = [row.label for row in rows[:5_000]]
        ending = [each for each in names if each.endswith(f".{name}") or name.endswith(f".{each}")]
        hint = guess(name, ending or names) or "`ckptkit inspect {where}` lists them"
        raise UsageError(f"has no tensor {name!r}", where=file, hint=hint)
    return Shown(file, name, found[0].tensor, parse(index, found[0].tensor.shape))


def _nonfinite(shown: Shown) -> list[str]:
    """Return a line with the number of NaN and the number of infinities. For each of the first NaN
    and infinities, add a line with its position."""
    from ckptkit.compute import tallies

    nan, infinite = tallies.nonfinite(shown.tensor)
    lines = [f"{shown.path}: {shown.name}: {nan:,} NaN, {infinite:,} infinite"]
    for index, kind in tallies.first_nonfinite(shown.tensor, FIRST):
        lines.append(f"  {list(index)} {kind}")
    if nan + infinite > FIRST:
        lines.append(f"  and {nan + infinite - FIRST:,} more")
    return lines


def _print_nonfinite(file: str, read: Options, stored: bool) -> int:
    """For each tensor, print the positions of the first NaN and infinities."""
    from ckptkit import api

    found: list[list[str]] = []
    name = shown_url(file)
    with api.reading(file, read) as checkpoint:
        rows = [
            row
            for row in _rows(checkpoint, stored)
            if row.tensor.storage is not None
            and row.tensor.layout == "strided"
            and row.tensor.dtype.kind in ("float", "complex")
        ]
        with render.Progress(f"reading {name}", sum(row.nbytes for row in rows)) as progress:
            for row in rows:
                found.append(_nonfinite(Shown(name, row.label, row.tensor, ())))
                progress(row.nbytes)
    found = [lines for lines in found if len(lines) > 1]
    what = f"{len(found):,} of {render.plural(len(rows), 'tensor')}" if found else "no tensor"
    render.emit_text(*flatten(found), f"{name}: {what} with NaN or infinities")
    return FOUND if found else 0


def _values(shown: list[Shown], rows: int, columns: int | None, counted: bool) -> Iterator[str]:
    """Yield a heading for each tensor, one table of all tensors side by side, and the statistics of
    each tensor.

    Without `columns`, show as many columns as fit with the necessary digits.
    """
    from ckptkit.analysis import view_model
    from ckptkit.analysis.slices import show

    across = ((render.terminal_width() or PLAIN) - LABEL) // len(shown)  # width of one table
    most = columns or max(1, across // CELL)
    for each in shown:
        each.fit(rows, most)
    fitting = most if columns is not None else min(most, max(1, across // _cell(shown)))
    for each in shown:
        each.fit(rows, fitting)
        where = f"{each.tensor.dtype} {render.shape(each.tensor.shape)} on {each.tensor.device}"
        title = render.escape(f"{each.path}: {each.name}, {where}: {show(each.corner)}")
        yield from render.wrapped(title, whole=True)
    yield ""
    yield from _grid(shown)
    for each in shown:
        tally, whole = _counted(each, counted)
        named = ", ".join(view_model.measured(view_model.numbers(tally, each.tensor.dtype.kind)))
        of = "" if whole else f" of {each.part.numel:,} (--stats reads all)"
        title = f"{each.path}: " if len(shown) > 1 else ""
        text = render.escape(f"{title}{render.plural(tally.count, 'value')}{of}: ")
        yield ""
        yield from render.wrapped(text + named)
        yield from _histogram(tally.histogram.at_most(BINS))
    if len(shown) > 1:
        yield ""
        yield _difference(*(each.part for each in shown))


def _counted(shown: Shown, counted: bool) -> tuple[Tally, bool]:
    """Return the statistics, and whether the statistics cover the complete slice."""
    from ckptkit.analysis.slices import select
    from ckptkit.compute import tallies, workers

    whole = counted or shown.part.numel <= COUNTED
    part = shown.part if whole else select(shown.tensor, shown.corner)
    found = tallies.Tally()
    for each in workers.ordered(tallies.tally, tallies.parts(part), lambda one: one.nbytes):
        found.add(each)
    return found, whole


def _histogram(histogram: Histogram) -> Iterator[str]:
    """Yield a line for each bin: its lower bound, a bar, and the number of values in it."""
    (texts,) = _texts([list(histogram.edges)[: len(histogram.counts)]])
    cell = max([CELL, *map(len, texts)])
    edges = [f"{text:>{cell}}  " for text in texts]
    counts = [f" {count:,}" for count in histogram.counts]
    longest = max(map(len, edges), default=0) + max(map(len, counts), default=0)
    width = min(BAR, (render.terminal_width() or PLAIN) - longest)
    bars = render.horizontal_bars(histogram.counts, max(1, width))
    yield from map("".join, zip(edges, bars, counts, strict=False))


def _difference(ours: Tensor, theirs: Tensor) -> str:
    from ckptkit.compute.compare import compare

    if ours.shape != theirs.shape:
        return f"not compared: {render.shape(ours.shape)} and {render.shape(theirs.shape)}"
    if max(ours.numel, theirs.numel) > COUNTED:
        return "not compared completely; `diff` compares all values"
    found = compare(ours, theirs, atol=0.0)
    if found is None:
        return "all values are equal"
    largest = f"{found.largest:.3g}" if found.largest is not None else ""
    return f"{found.count:,} of {ours.numel:,} values differ, by up to {largest}"


def _facts(shown: Shown) -> dict[str, Any]:
    from ckptkit.analysis import view_model
    from ckptkit.analysis.slices import show
    from ckptkit.analysis.summary import json_number
    from ckptkit.compute import tallies

    def plain(value: Any) -> Any:
        """Return nested lists of JSON numbers. A complex number becomes a list [real,
        imaginary]."""
        if isinstance(value, list):
            return [plain(each) for each in value]
        if isinstance(value, complex):
            return [json_number(value.real), json_number(value.imag)]
        return json_number(value)

    part = shown.part
    if part.numel > LISTED:
        what = f"{part.numel:,} values are too many to list"
        raise UsageError(what, where=shown.path, hint="select a part, as in '[0, :, 3:7]'")
    numbers = view_model.numbers(_counted(shown, True)[0], part.dtype.kind)
    return {
        "file": shown.path,
        "name": shown.name,
        "dtype": shown.tensor.dtype.name,
        "shape": list(shown.tensor.shape),
        "device": shown.tensor.device,
        "slice": show(shown.picks),
        "selected": list(part.shape),
        "values": plain(tallies.numbers(part).tolist()),
        "stats": {name: plain(value) for name, value in numbers.items()},
    }


# Tables of numbers


def _texts(rows: Iterable[list[Any]]) -> list[list[str]]:
    """Format numbers with enough digits to distinguish the values."""
    rows = list(rows)
    numbers = [each for each in flatten(rows) if each == each]  # without NaN
    digits, different = FEWEST, len(set(numbers))
    while digits < MOST and len({_text(each, digits) for each in numbers}) < different:
        digits += 1
    return [[_text(each, digits) for each in row] for row in rows]


def _text(number: Any, digits: int) -> str:
    if isinstance(number, int):
        return str(number)
    if not isinstance(number, complex):
        return f"{number:.{digits}g}"
    sign = "-" if math.copysign(1, number.imag) < 0 else "+"
    return f"{number.real:.{digits}g}{sign}{abs(number.imag):.{digits}g}j"


def _cell(shown: list[Shown]) -> int:
    """Return the width of a cell, including its mark and the space before it."""
    texts = flatten(_texts(flatten(each.cells for each in shown)))
    return max(CELL, max(map(len, texts), default=0) + 1 + (len(shown) > 1))


def _grid(shown: list[Shown]) -> Iterator[str]:
    """Yield the tables side by side, with row and column indices. Mark the numbers that differ from
    the first table."""
    if not all(each.cells for each in shown):
        yield "no elements"
        return
    texts = iter(_texts(chain.from_iterable(each.cells for each in shown)))
    tables = [list(_lines(each, [next(texts) for _ in each.cells])) for each in shown]
    cell, side = _cell(shown), max(len(label) for label, _ in tables[0])
    heads = ["".join(f"{head:>{cell}}" for head in _heads(each)) for each in shown]
    if any(heads):
        yield (" " * side + "  |".join(heads)).rstrip()
    for row in zip_longest(*tables, fillvalue=("", [])):
        label, first = row[0]
        parts = []
        for _, cells in row:
            pairs = zip_longest(cells, first[: len(cells)], fillvalue=(None, ""))
            marked = (
                text + MARK * (not _equal(number, other)) for (number, text), (other, _) in pairs
            )
            parts.append("".join(f"{each:>{cell}}" for each in marked))
        yield (f"{label:>{side}}" + "  |".join(parts)).rstrip()


def _equal(number: Any, other: Any) -> bool:
    """Return whether two numbers are equal, or both NaN. `other` is None if it does not exist."""
    both_nan = other is not None and number != number and other != other
    return bool(number == other or both_nan)


def _lines(shown: Shown, texts: list[list[str]]) -> Iterator[tuple[str, list[tuple[Any, str]]]]:
    """Yield (index, pairs of number and formatted number) for each line of a matrix or vector."""
    picks, columns = many(shown.corner), shown.columns
    rows = [list(zip(*row, strict=True)) for row in zip(shown.cells, texts, strict=True)]
    step = 1
    if len(picks) == 1:
        rows = [rows[0][at : at + columns] for at in range(0, len(rows[0]), columns)]
        step, picks = columns, picks * (len(rows) > 1)
    for number, row in enumerate(rows):
        yield str(picks[0].start + number * step * picks[0].step) if picks else "", row


def _heads(shown: Shown) -> list[str]:
    """Return the column indices.

    If a vector has several lines, an index such as ``+3`` counts from the start of each line.
    """
    picks = many(shown.corner)
    if len(picks) == 1 and picks[0].size > shown.columns:
        return [f"+{at * picks[0].step}" for at in range(shown.columns)]
    return [str(pick.start + at * pick.step) for pick in picks[-1:] for at in range(pick.size)]
