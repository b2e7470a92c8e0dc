"""ckptkit show"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ckptkit.cli import options, render
from ckptkit.core.errors import UsageError
from ckptkit.core.text import flatten, guess, shown_url

if TYPE_CHECKING:
    from ckptkit.analysis.slices import Picks
    from ckptkit.analysis.summary import TensorRow
    from ckptkit.cli import grid
    from ckptkit.compute.tallies import Histogram, Tally
    from ckptkit.core.checkpoint import Checkpoint
    from ckptkit.core.options import Options
    from ckptkit.core.tensor import Tensor

SCHEMA = "ckptkit.show/2"
ROWS = 12
BINS = 16  # of a histogram
BAR = 40  # characters of the longest bar of a histogram, at most
FIRST = 10  # places that --nan lists
COUNTED = 1 << 20  # elements that are read for their statistics without being asked for
LISTED = 1 << 20  # elements that --json prints


class Shown(NamedTuple):
    """A tensor of a file, and the selected part of it."""

    path: str
    name: str
    tensor: Tensor
    picks: Picks

    @property
    def part(self) -> Tensor:
        from ckptkit.analysis.slices import select

        return select(self.tensor, self.picks)

    def corner(self, rows: int, columns: int) -> grid.Corner:
        """Read the corner of a matrix, or as many elements of a vector."""
        from ckptkit.analysis.slices import plane, select
        from ckptkit.cli import grid
        from ckptkit.compute import tallies

        is_vector = sum(not pick.single for pick in self.picks) == 1
        picks = plane(self.picks, rows, rows * columns if is_vector else columns)
        cells = tallies.numbers(select(self.tensor, picks))
        if not cells.size:
            return grid.Corner(picks, [], columns)
        many = [pick for pick in picks if not pick.single]
        height = many[0].size if len(many) > 1 else 1
        return grid.Corner(picks, cells.reshape(height, -1).tolist(), columns)


@options.reads
@click.command("show")
@click.argument("file", metavar="FILE")
@click.argument("name", metavar="NAME", required=False)
@click.argument("index", metavar="[SLICE]", default="")
@click.option(
    "--with", "other", metavar="FILE", help="Show the same tensor of another file side by side."
)
@click.option(
    "--name-b", metavar="NAME", help="Name of the tensor in the other file, if different."
)
@click.option(
    "--rows", type=click.IntRange(min=1), default=ROWS, show_default=True, help="Rows of the grid."
)
@click.option(
    "--columns", type=click.IntRange(min=1), help="Columns of the grid. Default: as many as fit."
)
@click.option(
    "--stats",
    "counted",
    is_flag=True,
    help="Compute statistics of the whole part, even if it is large.",
)
@click.option(
    "--nan",
    "nonfinite",
    is_flag=True,
    help="Print where the first NaN and infinities are; without NAME, of all tensors.",
)
@options.as_json(SCHEMA)
@options.stored
@options.key
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

    SLICE selects a part as in Python: '[0, :, 3:7]'. Only the bytes of that part are read, however
    large the tensor is, also from a URL. Statistics cover the whole part if it has at most a
    million elements, or with --stats.

    \b
    Example: ckptkit show run.pth conv1.weight
             ckptkit show run.pth conv1.weight '[0, :, 0:3]' --with other.safetensors
             ckptkit show run.pth --nan
    """
    if nonfinite and (index or as_json):
        raise click.UsageError("--nan looks at the whole tensor, and prints lines")
    if name is None:
        if not nonfinite or other:
            raise click.UsageError("Missing argument 'NAME'.")
        return _all_nonfinite(file, read, stored)
    pairs = [(file, name), *([(other, name_b or name)] if other is not None else [])]
    with ExitStack() as stack:
        shown = [_chosen(stack, *pair, index, read, stored) for pair in pairs]
        if as_json:
            text = [*render.json_pieces(_facts(shown, counted)), "\n"]
        elif nonfinite:
            text = [f"{line}\n" for line in render.text_lines(flatten(map(_nonfinite, shown)))]
        else:
            corners = _corners(shown, rows, columns)
            lines = (*_grids(shown, corners), *_summaries(shown, corners, counted))
            text = [f"{line}\n" for line in lines]
    render.write(text)
    return 0


def _nonfinite(shown: Shown) -> Iterator[str]:
    """Yield where the first elements that are not finite are, and how many there are."""
    from ckptkit.compute import tallies

    nan, infinite = tallies.nonfinite(shown.tensor)
    yield f"{shown.path}: {shown.name}: {nan:,} NaN, {infinite:,} infinite"
    for index, kind in tallies.first_nonfinite(shown.tensor, FIRST):
        yield f"  {list(index)} {kind}"
    if nan + infinite > FIRST:
        yield f"  and {nan + infinite - FIRST:,} more"


def _all_nonfinite(file: str, read: Options, stored: bool) -> int:
    """Print where the first elements that are not finite are, of each tensor that has any."""
    from ckptkit.api import reading
    from ckptkit.cli.progress import Progress

    found: list[list[str]] = []
    with reading(file, read) as checkpoint:
        rows = [row for row in _rows(checkpoint, stored) if _may_be_nonfinite(row.tensor)]
        with Progress(f"reading {shown_url(file)}", sum(row.nbytes for row in rows)) as progress:
            for row in rows:
                lines = list(_nonfinite(Shown(shown_url(file), row.label, row.tensor, ())))
                progress(row.nbytes)
                if len(lines) > 1:
                    found.append(lines)
    what = f"{len(found):,} of {render.plural(len(rows), 'tensor')}" if found else "no tensor"
    render.emit_text(*flatten(found), f"{shown_url(file)}: {what} with NaN or infinities")
    return 0


def _may_be_nonfinite(tensor: Tensor) -> bool:
    """Return whether a tensor has elements that may be NaN or infinite."""
    has_elements = tensor.storage is not None and tensor.layout == "strided"
    return has_elements and tensor.dtype.kind in ("float", "complex")


def _rows(checkpoint: Checkpoint, stored: bool) -> list[TensorRow]:
    """Return all tensors; quantized weights as one each, unless `stored`."""
    from ckptkit.analysis.summary import summarize
    from ckptkit.quantized import look_through

    return summarize(checkpoint if stored else look_through(checkpoint)).rows


def _chosen(
    stack: ExitStack, file: str, name: str, index: str, read: Options, stored: bool
) -> Shown:
    from ckptkit.analysis.slices import parse
    from ckptkit.api import reading

    rows = _rows(stack.enter_context(reading(file, read)), stored)
    found = next((row for row in rows if row.name == name), None) or next(
        (r for r in rows if r.place == name), None
    )
    if found is None:
        raise UsageError(
            f"has no tensor {name!r}", where=shown_url(file), hint=_instead(name, rows)
        )
    return Shown(shown_url(file), name, found.tensor, parse(index, found.tensor.shape))


def _instead(name: str, rows: list[Any]) -> str | None:
    names = [row.label for row in rows[:5_000]]
    ending = [each for each in names if each.endswith(f".{name}") or name.endswith(f".{each}")]
    return guess(name, ending or names) or "`ckptkit inspect {where}` lists them"


def _corners(shown: list[Shown], rows: int, columns: int | None) -> list[grid.Corner]:
    """Read the corners; without `columns`, as many as fit with the digits that they need."""
    from ckptkit.cli import grid

    most = columns or grid.fitting(len(shown))
    corners = [each.corner(rows, most) for each in shown]
    if columns is not None:
        return corners
    fitting = min(most, grid.fitting(len(shown), grid.cell_width(corners)))
    return [corner.cut(rows, fitting) for corner in corners]


def _grids(shown: list[Shown], corners: list[grid.Corner]) -> Iterator[str]:
    """Yield a heading for each tensor, and one table of all, side by side."""
    from ckptkit.analysis.slices import show
    from ckptkit.cli import grid

    for each, corner in zip(shown, corners, strict=True):
        tensor = each.tensor
        where = f"{tensor.dtype} {render.shape(tensor.shape)} on {tensor.device}"
        yield from render.wrapped(
            render.escape(f"{each.path}: {each.name}, {where}: {show(corner.picks)}"), whole=True
        )
    yield ""
    yield from grid.lines(corners)


def _counted(shown: Shown, counted: bool, corner: grid.Corner | None = None) -> tuple[Tally, bool]:
    """Return the statistics, and whether they cover the whole part or only the corner."""
    from ckptkit.analysis.slices import select
    from ckptkit.compute import tallies, workers

    whole = counted or corner is None or shown.part.numel <= COUNTED
    part = shown.part if whole or corner is None else select(shown.tensor, corner.picks)
    found = tallies.Tally()
    for each in workers.ordered(tallies.tally, tallies.parts(part), lambda one: one.nbytes):
        found.add(each)
    return found, whole


def _summaries(shown: list[Shown], corners: list[grid.Corner], counted: bool) -> Iterator[str]:
    from ckptkit.analysis import view_model

    for each, corner in zip(shown, corners, strict=True):
        tally, whole = _counted(each, counted, corner)
        numbers = view_model.numbers(tally, each.tensor.dtype.kind)
        of = "" if whole else f" of {each.part.numel:,} (--stats reads all)"
        yield ""
        title = f"{each.path}: " if len(shown) > 1 else ""
        named = ", ".join(view_model.measured(numbers))
        counted_text = render.escape(f"{title}{render.plural(tally.count, 'value')}{of}: ")
        yield from render.wrapped(counted_text + named)
        yield from _histogram(tally.histogram.at_most(BINS))
    if len(shown) > 1:
        yield from _difference(*shown)


def _histogram(histogram: Histogram) -> Iterator[str]:
    """Yield a line for each bin: its smallest number, a bar, and how many numbers it has."""
    from ckptkit.cli import grid
    from ckptkit.cli.bars import horizontal_bars

    (texts,) = grid.texts([list(histogram.edges)[: len(histogram.counts)]])
    cell = max([grid.CELL, *map(len, texts)])
    edges = [f"{text:>{cell}}  " for text in texts]
    counts = [f" {count:,}" for count in histogram.counts]
    longest = max(map(len, edges), default=0) + max(map(len, counts), default=0)
    width = min(BAR, (render.terminal_width() or grid.PLAIN) - longest)
    bars = horizontal_bars(histogram.counts, max(1, width))
    yield from map("".join, zip(edges, bars, counts, strict=False))


def _difference(a: Shown, b: Shown) -> Iterator[str]:
    from ckptkit.compute.compare import compare

    ours, theirs = a.part, b.part
    yield ""
    if ours.shape != theirs.shape:
        yield f"not compared: {render.shape(ours.shape)} and {render.shape(theirs.shape)}"
    elif max(ours.numel, theirs.numel) > COUNTED:
        yield "not compared as a whole: `diff --values` does that"
    elif (found := compare(ours, theirs, atol=0.0)) is None:
        yield "equal in all values"
    else:
        largest = f"{found.largest:.3g}" if found.largest is not None else ""
        yield f"{found.count:,} of {ours.numel:,} values differ, by up to {largest}"


def _facts(shown: list[Shown], counted: bool) -> dict[str, Any]:
    return {"schema": SCHEMA, "tensors": [_json(each, counted) for each in shown]}


def _json(shown: Shown, counted: bool) -> dict[str, Any]:
    from ckptkit.analysis import view_model
    from ckptkit.analysis.slices import show
    from ckptkit.compute import tallies

    part = shown.part
    if part.numel > LISTED:
        raise UsageError(
            f"{part.numel:,} values are too many to list",
            where=shown.path,
            hint="select a part, as in '[0, :, 3:7]'",
        )
    tally, _ = _counted(shown, True)
    numbers = view_model.numbers(tally, part.dtype.kind)
    return {
        "file": shown.path,
        "name": shown.name,
        "dtype": shown.tensor.dtype.name,
        "shape": list(shown.tensor.shape),
        "device": shown.tensor.device,
        "slice": show(shown.picks),
        "selected": list(part.shape),
        "values": _listed(tallies.numbers(part).tolist()),
        "stats": {name: _listed(value) for name, value in numbers.items()},
    }


def _listed(value: Any) -> Any:
    """Return nested lists of JSON numbers; a complex number is a pair."""
    from ckptkit.analysis.summary import json_number

    if isinstance(value, list):
        return [_listed(each) for each in value]
    if isinstance(value, complex):
        return [json_number(value.real), json_number(value.imag)]
    return json_number(value)
