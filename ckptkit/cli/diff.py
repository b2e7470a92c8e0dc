"""ckptkit diff"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import options, reading, render
from ckptkit.core.text import flatten, is_url, shown_url

if TYPE_CHECKING:
    from ckptkit.analysis.columns import Table
    from ckptkit.analysis.diff import Diff
    from ckptkit.core.options import Options

SCHEMA = "ckptkit.diff/1"
DIFFERENT = 1
UNSURE = 0.6  # pairs with a lower confidence are counted as uncertain


def _check(ctx: click.Context) -> None:
    """If B names a model class, use B as --model.

    Raise UsageError unless exactly one of B and --model is given. Also raise UsageError if --fold
    and --json are given.
    """
    given = ctx.params
    b = given["b"]
    if given["spec"] is None and b is not None and reading.is_model(b):
        given["spec"], given["b"] = b, None
    if (given["b"] is None) == (given["spec"] is None):
        raise click.UsageError("give either B or --model MODEL to compare with A")
    if given["fold"] and given["as_json"]:
        raise click.UsageError("--json lists each tensor; remove --fold")


@click.command("diff", cls=reading.Reader, check=_check)
@click.argument("a", metavar="A")
@click.argument("b", metavar="[B]", required=False)
@options.of("diff")
def command(
    a: str,
    b: str | None,
    as_json: bool,
    write_map: str | None,
    force: bool,
    fold: bool | None,
    sort: str,
    spec: str | None,
    args: dict[str, object],
    read: Options,
    key_b: str | None,
    stored: bool,
    globs: tuple[str, ...],
    **how: Any,
) -> int:
    """Compare two checkpoints, or a checkpoint and a model.

    Compares keys, dtypes, shapes and values. The exit code is 1 if A and B differ. "missing" keys
    are only in B or the model. "unexpected" keys are only in A. `diff` pairs keys that look
    renamed, and prints the confidence of each pair. If one file is a GGUF file, `diff` applies the
    recipe for its architecture, and ignores differences that the GGUF types explain. For a model
    (file.py:Class as B or as --model), `diff` compares only keys and shapes. `diff` imports and
    runs the code of the model.

    \b
    Example: ckptkit diff epoch1.pth epoch2.pth
             ckptkit diff run.pth models.py:CNN --arg classes=10 --write-map map.json
    """
    from json import dumps

    from ckptkit import api
    from ckptkit.analysis.advice import rename
    from ckptkit.analysis.diff import entire
    from ckptkit.run.comparing import compared

    name = shown_url(a)
    matches = render.matcher(globs) if globs else None
    with ExitStack() as stack:
        if b is None:
            first = stack.enter_context(api.reading(a, read))
            del how["values"]  # the values of a model are not compared
            if any(value not in (None, False) for value in how.values()):
                what = "a model has only keys and shapes: remove --all, --atol and --rtol"
                raise click.UsageError(what)
            from ckptkit.cli.model_class import built
            from ckptkit.loading.model import against_model

            assert spec is not None
            found = against_model(first, built(spec, args), name, stored=stored, matches=matches)
        else:
            other = read if key_b is None else replace(read, key=key_b)
            opened = []
            for path, given in ((a, read), (b, other)):
                if not os.path.isdir(path) and not is_url(path):
                    given = replace(given, parts=None)  # --parts applies only to folders and URLs
                opened.append(entire(stack.enter_context(api.reading(path, given))))
            found = compared(
                opened[0], opened[1], stored=stored, name=name, matches=matches, **how,
                watched=lambda nbytes: render.Progress(f"comparing {name}", nbytes),
            )  # fmt: skip
    if as_json:
        about = {"a": name, "b": None if b is None else shown_url(b), "model": spec}
        render.emit_json({"schema": SCHEMA, **about, **found.as_json()})
    else:
        render.write(f"{line}\n" for line in _lines(found, fold is False, sort))
    if write_map is not None and not found.renamed:
        render.note("no key looks renamed: no map written")
    elif write_map is not None:
        names = {pair.old: pair.new for pair in found.renamed}
        render.publish(f"{dumps(names, indent=1)}\n".encode(), write_map, force)
        guesses = sum(pair.confidence < UNSURE for pair in found.renamed)
        look = f", {guesses:,} of them uncertain" if guesses else ""
        chosen = (*(() if read.key is None else ("--key", read.key)), *read.words)
        what = f"wrote {write_map}: {render.plural(len(names), 'name')}{look}"
        render.note(what, rename(name, write_map, *chosen))
    return 0 if found.explained else DIFFERENT


def _lines(found: Diff, flat: bool, sort: str) -> Iterator[str]:
    """Yield a table for each kind of difference, then the summary lines."""
    from ckptkit.analysis import view_model

    report = view_model.of_diff(found, flat=flat, sort=sort)
    for each in report.tables:
        if len(each.headers) == 1:  # print a table with a single column as a list
            more = " more" if found.renamed or found.reshaped else ""
            yield render.labelled(f"{each.title}: {render.plural(each.total, 'key')}{more}")
            yield from render.listed(name for (name,) in each.rows)
        elif each.headers == view_model.PAIRED:
            yield from _pairs(each)
        else:
            headers = (each.title, *each.headers[1:])
            yield from render.table(headers, each.rows, right=each.right)
        yield ""
    for line in (report.title, *report.notes):
        first, *rest = render.wrapped(line)
        yield from (render.labelled(first), *rest)


def _pairs(found: Table) -> Iterator[str]:
    """Yield a table of pairs of names. On a narrow terminal, yield two lines for each pair
    instead."""
    headers = (f"{found.title} {found.headers[0]}", *found.headers[1:])
    widths = [max(map(len, column)) for column in zip(headers, *found.rows, strict=True)]
    width = render.terminal_width()
    if width is None or sum(widths) + 2 * len(widths) <= width:
        yield from render.table(headers, found.rows, right=found.right)
        return
    yield f"{headers[0]} -> in B"
    for old, new, *rest in found.rows:
        yield from flatten(map(render.wrapped, (f"  {old}", f"    -> {new}  {'  '.join(rest)}")))
