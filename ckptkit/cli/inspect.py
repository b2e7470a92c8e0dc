"""ckptkit inspect"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import options, reading, render
from ckptkit.core.errors import InputError
from ckptkit.core.text import flatten, shell_word

if TYPE_CHECKING:
    from ckptkit.analysis.summary import Summary, TensorRow
    from ckptkit.core.checkpoint import Checkpoint
    from ckptkit.core.options import Options

SCHEMA = "ckptkit.inspect/1"
# maximum number of printed values, objects or metadata entries; --json and --tree print all
SHOWN = 40


@click.command("inspect", cls=reading.Reader)
@reading.files
@options.of("inspect")
def command(files: tuple[str, ...], as_json: bool, read: Options, **wanted: Any) -> int:
    """Show what checkpoints contain: tensors, values and objects.

    Reads only headers and runs no code. If a file is unreadable, `inspect` prints an error and
    shows the other files. For two files, `inspect` also prints which file is larger, and in which
    entries. For a folder of checkpoints, `inspect` shows each checkpoint. Each entry of training
    state (optimizer, scheduler, loops) is one line. --flat shows its contents. `ckptkit FILE` is
    short for `ckptkit inspect FILE`.

    \b
    Example: ckptkit inspect run.pth
             ckptkit inspect --brief runs
             ckptkit inspect --names run.pth
             ckptkit inspect --json --digest run.pth
    """
    want = SimpleNamespace(**wanted)
    if as_json + want.names + want.tree + want.brief > 1:
        raise click.UsageError("--json, --names, --tree and --brief cannot be combined")
    if want.fold and as_json:
        raise click.UsageError("--json lists each tensor; remove --fold")
    if want.digest and not as_json:
        raise click.UsageError("--digest needs --json")

    from ckptkit.analysis import view_model
    from ckptkit.analysis.summary import summarize
    from ckptkit.quantized import dequantized_view

    summaries: list[Summary] = []

    def look(file: str) -> dict[str, Any] | None:
        from ckptkit.api import reading

        with reading(file, read) as checkpoint:
            if as_json:
                return _facts(checkpoint, want)
            seen = checkpoint if want.stored else dequantized_view(checkpoint)
            summaries.append(summarize(seen))
            lines = iter(()) if want.brief else _lines(seen, summaries[-1], want)
        if not want.brief and len(summaries) > 1:
            render.emit("")
        render.write(f"{line}\n" for line in lines)
        return None

    failures = reading.each_of(files, look, schema=SCHEMA if as_json else "")
    if want.brief:
        numbers = view_model.BRIEF[2:5]
        rows = list(map(view_model.brief, summaries))
        render.emit(*render.table(view_model.BRIEF, rows, right=numbers))
    if len(summaries) == 2 and not want.names:
        render.emit("", *render.wrapped(view_model.larger(*summaries)))
    return InputError.exit_code if failures else 0


def _facts(checkpoint: Checkpoint, want: Any) -> dict[str, Any]:
    from ckptkit.analysis import json_facts
    from ckptkit.analysis.summary import summarize
    from ckptkit.quantized import dequantized_view

    summary = summarize(checkpoint if want.stored or want.digest else dequantized_view(checkpoint))
    rows, digests = _rows(summary, want), None
    if want.digest:
        from ckptkit.analysis.digests import sha256_each

        with render.Progress("digest", sum(row.nbytes for row in rows)) as progress:
            digests = list(sha256_each(((row.place, row.tensor) for row in rows), progress))
    return json_facts.file(summary, rows, digests, is_selection=bool(want.globs))


def _lines(checkpoint: Checkpoint, summary: Summary, want: Any) -> Iterator[str]:
    from ckptkit.analysis.advice import advise
    from ckptkit.analysis.summary import selected

    rows = _rows(summary, want)
    if want.names:
        return (render.escape(row.name) for row in rows if row.name is not None)
    if want.tree:
        from ckptkit.analysis.shares import shares
        from ckptkit.cli.tree_text import tree

        chosen = {id(row) for row in rows} if want.globs else None
        shown = tree(checkpoint.root, shares(summary, checkpoint.root), chosen, want.sort)
    else:
        shown = _tables(summary, rows, want)
    total, remarks = [], [f"warning: {each}" for each in summary.warnings]
    if want.globs and rows:
        tensors, parameters, nbytes = selected(rows)
        what = f"{render.plural(tensors, 'tensor')}, {parameters:,} parameters"
        total = ["", f"selected: {what}, {render.size(nbytes)}"]
    elif want.globs:
        remarks.append(f"warning: no tensor name or path matches --keys {', '.join(want.globs)}")
        for glob in want.globs:  # suggest a glob that matches inside names
            wide = f"*{glob.strip('*')}*"
            if count := sum(map(render.matcher([wide]), (row.place for row in summary.rows))):
                what = f"--keys {shell_word(wide)} matches {render.plural(count, 'tensor')}"
                remarks.append(f"hint: {what}")
    remarks += [f"hint: {each}" for each in advise(summary)]
    labelled = (render.labelled(render.escape(each)) for each in remarks)
    return chain(shown, total, [""] * bool(remarks), labelled)


def _rows(summary: Summary, want: Any) -> list[TensorRow]:
    from ckptkit.analysis.summary import matching

    rows = matching(summary.rows, want.globs)
    if want.sort == "size":
        return sorted(rows, key=lambda row: -row.nbytes)
    return sorted(rows, key=lambda row: row.label) if want.sort == "name" else rows


def _tables(summary: Summary, rows: list[TensorRow], want: Any) -> Iterator[str]:
    """Yield a heading and the tables of tensors, values and objects. Skip values and objects inside
    a pickled module."""
    from ckptkit.analysis import view_model

    report = view_model.of_checkpoint(summary, rows, flat=want.fold is False, sort=want.sort)
    yield from render.wrapped(report.title, whole=True)
    yield from flatten(map(render.wrapped, report.remarks))
    for found in report.tables:
        if found.headers != view_model.ENTRIES:
            yield f"\n{found.title}\n" if found.title else ""
            yield from render.table(found.headers, found.rows, right=found.right)
        elif found.rows:
            yield f"\n{found.title}"
            texts = (f"  {name}: {text}" for name, text in found.rows[:SHOWN])
            yield from flatten(map(render.wrapped, texts))
            if len(found.rows) > SHOWN:
                yield f"  and {len(found.rows) - SHOWN:,} more: --tree shows all"
