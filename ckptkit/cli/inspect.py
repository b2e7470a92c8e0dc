"""ckptkit inspect"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from ckptkit.cli import options, render
from ckptkit.errors import CkptkitError, InputError
from ckptkit.remote import urls

if TYPE_CHECKING:
    from ckptkit.checkpoint import Checkpoint
    from ckptkit.reports.summary import Row, Summary

SCHEMA = "ckptkit.inspect/1"
T = TypeVar("T")


class Wanted(NamedTuple):
    """Which tensors to show, and how."""

    globs: tuple[str, ...]
    sort: str
    flat: bool
    tree: bool
    digest: bool


@click.command("inspect")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help=f"Print one JSON object (schema {SCHEMA}).")
@click.option("--digest", is_flag=True, help="With --json: read every tensor and add its SHA-256.")
@click.option("--tree", is_flag=True, help="Show every value at its place instead of tables.")
@click.option("--keys", "globs", metavar="GLOB", multiple=True, help="Only tensors with such a name or path.")
@click.option("--sort", type=click.Choice(["file", "size", "name"]), default="file", help="Order of the tensors.")
@click.option("--flat", is_flag=True, help="One row per tensor: do not fold layers.{0..31}.weight.")
@options.key
def command(files: tuple[str, ...], as_json: bool, key: str | None, **wanted: Any) -> int:
    """Show what is in checkpoints.

    Lists tensors, values and objects with their places and devices. Reads headers only and runs nothing.
    Of several files, those that cannot be read are reported and the others shown.

    \b
    Example: ckptkit inspect run.pth
             ckptkit inspect --json --digest run.pth
    """
    want = Wanted(**wanted)
    if want.digest and not as_json:
        raise click.UsageError("--digest goes with --json")
    failures: list[CkptkitError] = []
    if as_json:
        render.emit_json({"schema": SCHEMA, "files": _each(files, key, lambda ck: _facts(ck, want), failures)})
    else:
        for number, lines in enumerate(_each(files, key, lambda ck: _lines(ck, want), failures)):
            render.emit(*[""] * bool(number))
            render.write(f"{line}\n" for line in lines)
    return InputError.exit_code if failures else 0


def _each(
    files: Sequence[str], key: str | None, show: Callable[[Checkpoint], T], failures: list[CkptkitError]
) -> Iterator[T]:
    """What `show` makes of each file. One file alone raises, before anything is printed."""
    shown = _readable(files, key, show, failures)
    return chain(list(islice(shown, 1)), shown)


def _readable(
    files: Sequence[str], key: str | None, show: Callable[[Checkpoint], T], failures: list[CkptkitError]
) -> Iterator[T]:
    from ckptkit.convert import open_checkpoint

    for file in files:
        try:
            with closing(open_checkpoint(file, key=key)) as checkpoint:
                shown = show(checkpoint)
        except CkptkitError as error:
            if len(files) == 1:
                raise
            render.warn(str(error.at(urls.shown(file))), error.hint)
            failures.append(error)
        else:
            yield shown


def _facts(checkpoint: Checkpoint, want: Wanted) -> dict[str, Any]:
    from ckptkit.cli import summary_json
    from ckptkit.reports.summary import summarize

    summary = summarize(checkpoint)
    rows = _rows(summary, want)
    return summary_json.file(summary, rows, _digests(rows) if want.digest else None)


def _digests(rows: list[Row]) -> list[str | None]:
    from ckptkit.cli.progress import Progress
    from ckptkit.reports.digest import sha256
    from ckptkit.tree import join

    found = []
    with Progress("digest", sum(row.nbytes for row in rows)) as progress:
        for row in rows:
            try:
                found.append(sha256(row.tensor))
            except CkptkitError as error:
                error.message = f"{join(row.path)}: {error.message}"
                raise
            progress(row.nbytes)
    return found


def _lines(checkpoint: Checkpoint, want: Wanted) -> Iterator[str]:
    from ckptkit.cli import summary_text
    from ckptkit.reports.advice import advise
    from ckptkit.reports.summary import summarize

    summary = summarize(checkpoint)
    rows = _rows(summary, want)
    if want.tree:
        shown = summary_text.tree(checkpoint.root)
    else:
        shown = summary_text.lines(summary, rows, flat=want.flat, sort=want.sort)
    warnings = (*summary.warnings, *_unmatched(want, rows))
    said = [*(f"warning: {each}" for each in warnings), *(f"hint: {each}" for each in advise(summary))]
    return chain(shown, [""] * bool(said), map(render.escape, said))


def _unmatched(want: Wanted, rows: list[Row]) -> tuple[str, ...]:
    return (f"no name or path of a tensor matches --keys {', '.join(want.globs)}",) if want.globs and not rows else ()


def _rows(summary: Summary, want: Wanted) -> list[Row]:
    rows = summary.rows
    if want.globs:
        matches = render.matcher(want.globs)
        rows = [row for row in rows if (row.name is not None and matches(row.name)) or matches(row.place)]
    if want.sort == "size":
        rows = sorted(rows, key=lambda row: -row.nbytes)
    elif want.sort == "name":
        rows = sorted(rows, key=lambda row: row.name or row.place)
    return rows
