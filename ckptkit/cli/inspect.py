"""ckptkit inspect"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from ckptkit.cli import options, render
from ckptkit.core.errors import CkptkitError, InputError
from ckptkit.core.text import shell_word, shown_url

if TYPE_CHECKING:
    from ckptkit.analysis.summary import Summary, TensorRow
    from ckptkit.core.checkpoint import Checkpoint
    from ckptkit.core.options import Options

SCHEMA = "ckptkit.inspect/2"
T = TypeVar("T")


class Wanted(NamedTuple):
    """The selection of tensors to show, and the form of the output."""

    globs: tuple[str, ...]
    sort: str
    flat: bool
    tree: bool
    names: bool
    digest: bool
    stored: bool


@options.reads
@click.command("inspect")
@click.argument("files", metavar="FILE...", nargs=-1, required=True)
@options.as_json(SCHEMA)
@click.option(
    "--digest", is_flag=True, help="With --json: read all tensors and add the SHA-256 of each."
)
@click.option(
    "--tree",
    is_flag=True,
    help="Print a tree of all values, with bars for parameters, instead of tables.",
)
@click.option("--names", is_flag=True, help="Print the names of the weights alone, one per line.")
@click.option(
    "--keys",
    "globs",
    metavar="GLOB",
    multiple=True,
    help="Only tensors whose names or paths match (repeatable).",
)
@click.option(
    "--sort",
    type=click.Choice(["file", "size", "name"]),
    default="file",
    help="Order of the rows.",
)
@click.option("--flat", is_flag=True, help="One row per tensor: do not fold layers.{0..31}.weight.")
@options.stored
@click.option(
    "--textconv",
    is_flag=True,
    help="Print one line per tensor and value, with digests, for git diff.",
)
@options.key
def command(
    files: tuple[str, ...],
    as_json: bool,
    textconv: bool,
    read: Options,
    **wanted: Any,
) -> int:
    """Show what checkpoints contain: tensors, values and objects.

    Reads headers only and runs nothing. Of several files, those that cannot be read are reported
    and the others shown.

    \b
    Example: ckptkit inspect run.pth
             ckptkit inspect --names run.pth
             ckptkit inspect --json --digest run.pth
             git config diff.ckptkit.textconv 'ckptkit inspect --textconv'
    """
    if textconv and (as_json or len(files) > 1):
        raise click.UsageError("--textconv takes one FILE, and not --json")
    if textconv:
        return _textconv(files[0], read)
    want = Wanted(**wanted)
    if want.names and (as_json or want.tree):
        raise click.UsageError("--names prints lines of names: leave out --json and --tree")
    if want.digest and not as_json:
        raise click.UsageError("--digest needs --json")
    failures: list[CkptkitError] = []
    if as_json:
        from ckptkit.analysis import json_facts

        found = _each(files, read, lambda ck: _facts(ck, want), failures, json_facts.failure)
        render.emit_json({"schema": SCHEMA, "files": found})
    else:
        _print(_each(files, read, lambda ck: _lines(ck, want), failures))
    return InputError.exit_code if failures else 0


def _print(files: Iterable[Iterable[str]]) -> None:
    """Print the lines of each file, an empty line between files."""
    for number, lines in enumerate(files):
        render.emit(*[""] * bool(number))
        render.write(f"{line}\n" for line in lines)


def _textconv(file: str, read: Options) -> int:
    from ckptkit.cli import textconv

    render.write(f"{line}\n" for line in textconv.lines(file, read))
    return 0


def _each(
    files: Sequence[str],
    read: Options,
    show: Callable[[Checkpoint], T],
    failures: list[CkptkitError],
    failed: Callable[[CkptkitError], T] | None = None,
) -> Iterator[T]:
    """Yield the result of `show` for each file. A single file raises before anything is printed.

    Of a file that cannot be read, yield what `failed` makes of its error.
    """
    shown = _readable(files, read, show, failures, failed)
    return chain(list(islice(shown, 1)), shown)


def _readable(
    files: Sequence[str],
    read: Options,
    show: Callable[[Checkpoint], T],
    failures: list[CkptkitError],
    failed: Callable[[CkptkitError], T] | None,
) -> Iterator[T]:
    from ckptkit.api import reading

    for file in files:
        try:
            with reading(file, read) as checkpoint:
                shown = show(checkpoint)
        except CkptkitError as error:
            if len(files) == 1:
                raise
            render.error(str(error.at(shown_url(file))), error.hint)
            failures.append(error)
            if failed is not None:
                yield failed(error)
        else:
            yield shown


def _facts(checkpoint: Checkpoint, want: Wanted) -> dict[str, Any]:
    from ckptkit.analysis import json_facts
    from ckptkit.analysis.summary import summarize
    from ckptkit.quantized import look_through

    summary = summarize(checkpoint if want.stored or want.digest else look_through(checkpoint))
    rows = _rows(summary, want)
    digests = _digests(rows) if want.digest else None
    return json_facts.file(summary, rows, digests, is_selection=bool(want.globs))


def _digests(rows: list[TensorRow]) -> list[str | None]:
    from ckptkit.analysis.digests import sha256_each
    from ckptkit.cli.progress import Progress

    with Progress("digest", sum(row.nbytes for row in rows)) as progress:
        return list(sha256_each(((row.place, row.tensor) for row in rows), progress))


def _lines(checkpoint: Checkpoint, want: Wanted) -> Iterator[str]:
    from ckptkit.analysis.advice import advise
    from ckptkit.analysis.summary import summarize
    from ckptkit.cli import summary_text
    from ckptkit.quantized import look_through

    checkpoint = checkpoint if want.stored else look_through(checkpoint)
    summary = summarize(checkpoint)
    rows = _rows(summary, want)
    if want.names:
        return (render.escape(row.name) for row in rows if row.name is not None)
    if want.tree:
        shown = _tree(checkpoint, summary, rows, want)
    else:
        shown = summary_text.lines(summary, rows, flat=want.flat, sort=want.sort)
    warnings = (*summary.warnings, *_unmatched(want, rows))
    hints = (*_wider(want, rows, summary), *advise(summary))
    remarks = [*(f"warning: {each}" for each in warnings), *(f"hint: {each}" for each in hints)]
    return chain(
        shown,
        _selected(rows, want),
        [""] * bool(remarks),
        (render.labelled(render.escape(each)) for each in remarks),
    )


def _selected(rows: list[TensorRow], want: Wanted) -> Iterator[str]:
    """Yield the totals of what --keys selects."""
    if not want.globs or not rows:
        return
    from ckptkit.analysis.summary import selected

    tensors, parameters, nbytes = selected(rows)
    yield ""
    yield (
        f"selected: {render.plural(tensors, 'tensor')}, {parameters:,} parameters, "
        f"{render.size(nbytes)}"
    )


def _tree(
    checkpoint: Checkpoint, summary: Summary, rows: list[TensorRow], want: Wanted
) -> Iterator[str]:
    from ckptkit.analysis.shares import shares
    from ckptkit.cli.tree_text import tree

    found = shares(summary, checkpoint.root)
    if not want.globs:
        return tree(checkpoint.root, found, sort=want.sort)
    chosen = set(map(id, rows))
    return tree(checkpoint.root, found, lambda share: id(share.row) in chosen, want.sort)


def _unmatched(want: Wanted, rows: list[TensorRow]) -> tuple[str, ...]:
    return (
        (f"no tensor name or path matches --keys {', '.join(want.globs)}",)
        if want.globs and not rows
        else ()
    )


def _wider(want: Wanted, rows: list[TensorRow], summary: Summary) -> Iterator[str]:
    """Return a hint with wider globs that match inside names, where nothing matched."""
    for glob in want.globs if not rows else ():
        wide = f"*{glob.strip('*')}*"
        if count := sum(map(render.matcher([wide]), (row.place for row in summary.rows))):
            yield f"{render.plural(count, 'tensor')} with --keys {shell_word(wide)}"


def _rows(summary: Summary, want: Wanted) -> list[TensorRow]:
    from ckptkit.analysis.summary import matching

    rows = matching(summary.rows, want.globs)
    if want.sort == "size":
        rows = sorted(rows, key=lambda row: -row.nbytes)
    elif want.sort == "name":
        rows = sorted(rows, key=lambda row: row.label)
    return rows
