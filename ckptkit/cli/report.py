"""ckptkit report"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from ckptkit.cli import options, render
from ckptkit.cli.options import Command, missing
from ckptkit.core.errors import CkptkitError
from ckptkit.core.text import shown_url

if TYPE_CHECKING:
    from ckptkit.core.checkpoint import Checkpoint

SCHEMA = "ckptkit.report/1"
PAGES, PICTURES = (".html", ".htm"), (".svg", ".png", ".pdf")


def _check(ctx: click.Context) -> None:
    """If --output is missing, use the last argument as DST. Raise UsageError for contradicting
    options."""
    given = ctx.params
    places = [each for each in (given["file"], given["other"], given.pop("dst")) if each]
    if given["output"] is None:
        if len(places) < 2:
            raise missing(ctx, "dst")
        given["output"] = places.pop()
    if len(places) > 2:
        raise click.UsageError("name DST once: as the last argument, or with --output")
    given["file"], given["other"] = (*places, None)[:2]
    if given["other"] is None and (given["everything"] or given["values"] is False):
        option = "--all" if given["everything"] else "--no-values"
        raise click.UsageError(f"{option} needs OTHER: name two files to compare")
    suffix = _suffix(given["output"])
    if suffix not in (*PAGES, *PICTURES):
        kinds = ", ".join((*PAGES[:1], *PICTURES))
        raise click.UsageError(f"{given['output']}: the suffix must be one of {kinds}")
    if suffix in PICTURES and (given["other"] is not None or given["values"]):
        raise click.UsageError("OTHER and --values require a page (.html)")
    if suffix in PAGES and (given["by"] is not None or given["title"] is not None):
        raise click.UsageError("--by and --title require a picture (.svg, .png, .pdf)")


def _suffix(path: str) -> str:
    return os.path.splitext(path)[1].lower()


@click.command("report", cls=Command, check=_check)
@click.argument("file", metavar="FILE")
@click.argument("other", metavar="[OTHER]", required=False)
@click.argument("dst", metavar="DST", required=False)
@options.of("report")
def command(
    file: str,
    other: str | None,
    output: str,
    values: bool | None,
    everything: bool,
    by: str | None,
    title: str | None,
    force: bool,
    as_json: bool,
    quiet: bool,
    stored: bool,
    key: str | None,
    key_b: str | None,
) -> int:
    """Write a page or a picture of a checkpoint.

    The page (.html) shows the distribution of parameters and bytes, and a searchable and sortable
    table of all tensors. The page also shows dtypes, devices, unused storage, and the problems that
    prevent loading. With OTHER, the page shows the differences, and how much each layer changed.
    The page is one file that works offline. By default, `report` reads only headers; with OTHER, it
    also reads the values of tensors.

    The picture (.svg, .png, .pdf) contains only the treemap, for papers and model cards. Pictures
    need matplotlib.

    \b
    Example: ckptkit report run.pth run.html
             ckptkit report epoch1.pth epoch9.pth moved.html
             ckptkit report run.pth run.svg
    """
    from ckptkit import api
    from ckptkit.quantized import dequantized_view, dequantized_views

    suffix = _suffix(output)
    with ExitStack() as stack:
        found = [stack.enter_context(api.reading(file, key=key))]
        if other is not None:
            key = key if key_b is None else key_b
            found.append(stack.enter_context(api.reading(other, key=key)))
        if not stored and len(found) > 1 and all(map(_has_weights, found)):
            found = list(dequantized_views(*found))
        elif not stored:
            found = list(map(dequantized_view, found))
        if suffix in PAGES:
            data, count = _page(found, values, everything)
        else:
            data, count = _picture(found[0], suffix[1:], by or "parameters", title)
    render.publish(data, output, force)
    if as_json:
        inputs = [shown_url(name) for name in (file, other) if name is not None]
        facts = {"inputs": inputs, "output": output, "tensor_count": count, "size": len(data)}
        render.emit_json({"schema": SCHEMA, **facts})
    elif not quiet:
        what = f"{render.plural(count, 'tensor')}, {render.size(len(data))}"
        render.emit_text(f"wrote {output}: {what}")
    return 0


def _has_weights(checkpoint: Checkpoint) -> bool:
    try:
        return checkpoint.selection is not None
    except CkptkitError:
        return False


def _page(found: list[Checkpoint], values: bool | None, everything: bool) -> tuple[bytes, int]:
    from ckptkit.analysis.diff import compare_checkpoints
    from ckptkit.analysis.summary import summarize
    from ckptkit.views.page import facts, page, page_file

    total = sum(summarize(checkpoint).totals.nbytes for checkpoint in found)
    compares = len(found) > 1 and values is not False
    diff = other = None
    with render.Progress("reading", total * (bool(values) + compares)) as progress:
        seen = [page_file(checkpoint, progress if values else None) for checkpoint in found]
        if len(found) > 1:
            other = seen[1]
            diff = compare_checkpoints(
                *found,
                everything=everything,
                values=compares,
                name=shown_url(found[0].name or ""),
                progress=progress,
            )
    shown = facts(seen[0], other, diff, everything=everything)
    return page(shown), len(seen[0].shares)


def _picture(checkpoint: Checkpoint, kind: str, by: str, title: str | None) -> tuple[bytes, int]:
    from ckptkit.analysis.shares import branches, shares
    from ckptkit.analysis.summary import summarize
    from ckptkit.views.treemap import drawn

    summary = summarize(checkpoint)
    tree = branches(shares(summary, checkpoint.root))
    name = shown_url(summary.path).rstrip("/").rpartition("/")[2] if title is None else title
    return drawn(tree, kind, by, name), len(summary.rows)
