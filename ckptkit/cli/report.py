"""ckptkit report"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import options, render
from ckptkit.cli.progress import Progress
from ckptkit.core.text import shown_url

if TYPE_CHECKING:
    from ckptkit.core.checkpoint import Checkpoint
    from ckptkit.views.page import Seen

SCHEMA = "ckptkit.report/2"
PAGES, PICTURES = (".html", ".htm"), (".svg", ".png", ".pdf")


@click.command("report")
@click.argument("file", metavar="FILE")
@click.argument("other", metavar="[OTHER]", required=False)
@click.option(
    "--output",
    "-o",
    metavar="OUT",
    required=True,
    help="Output file: a page (.html) or a picture (.svg, .png, .pdf).",
)
@click.option(
    "--values",
    is_flag=True,
    help="Read the values of tensors too: add statistics and histograms, and compare.",
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Not only the weights: compare optimizer, averages and values too, with OTHER.",
)
@click.option(
    "--by",
    type=click.Choice(["parameters", "bytes"]),
    help="Scale the areas of the picture by parameters (default) or bytes.",
)
@click.option(
    "--title",
    metavar="TEXT",
    help="Title of the picture. Default: the name of FILE.",
)
@click.option("--force", is_flag=True, help="Replace OUT if it exists.")
@options.as_json(SCHEMA)
@click.option("--quiet", "-q", is_flag=True, help="Print only errors.")
@options.stored
@options.key
@click.option(
    "--key-b",
    metavar="PATH",
    help="Like --key, for OTHER ('' selects the whole file). Default: as --key.",
)
def command(
    file: str,
    other: str | None,
    output: str,
    values: bool,
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
    """Make a page or a picture of a checkpoint.

    The page (.html) shows where parameters and bytes are, a searchable and sortable table of all
    tensors, dtypes, devices, unused storage, and what keeps the file from loading; with OTHER, how
    the two differ. It is one self-contained file that works offline. Reads headers only, unless
    --values is given.

    The picture (.svg, .png, .pdf) is the treemap alone, for papers and model cards; it needs
    matplotlib.

    \b
    Example: ckptkit report run.pth -o run.html
             ckptkit report run.pth other.safetensors --values -o diff.html
             ckptkit report run.pth -o run.svg
    """
    if everything and other is None:
        raise click.UsageError("--all compares with OTHER")
    kind = _kind(
        output, plain=other is None and not values, styled=by is not None or title is not None
    )
    with ExitStack() as stack:
        keys = (key, key if key_b is None else key_b)
        named = zip((file, other), keys, strict=True)
        found = [_opened(stack, name, each) for name, each in named if name is not None]
        if not stored:
            found = _looked_through(found)
        if kind in PAGES:
            data, count = _page(found, values, everything)
        else:
            data, count = _picture(found[0], kind[1:], by or "parameters", title)
    _publish(data, output, force=force)
    inputs = [shown_url(name) for name in (file, other) if name is not None]
    facts = {"inputs": inputs, "output": output, "tensor_count": count, "size": len(data)}
    _report(facts, as_json, quiet)
    return 0


def _report(facts: dict[str, Any], as_json: bool, quiet: bool) -> None:
    """Print what was written."""
    if as_json:
        render.emit_json({"schema": SCHEMA, **facts})
    elif not quiet:
        tensors, size = render.plural(facts["tensor_count"], "tensor"), render.size(facts["size"])
        render.emit_text(f"wrote {facts['output']}: {tensors}, {size}")


def _kind(output: str, *, plain: bool, styled: bool) -> str:
    """Return the suffix of OUT, which chooses what to make; raise UsageError for other options.

    `plain`: one file and no --values; `styled`: with options that only pictures have.
    """
    suffix = os.path.splitext(output)[1].lower()
    if suffix not in (*PAGES, *PICTURES):
        raise click.UsageError(
            f"{output}: the suffix chooses what to make: {', '.join((*PAGES[:1], *PICTURES))}"
        )
    if suffix in PICTURES and not plain:
        raise click.UsageError("OTHER and --values need a page (.html)")
    if suffix in PAGES and styled:
        raise click.UsageError("--by and --title need a picture (.svg, .png, .pdf)")
    return suffix


def _opened(stack: ExitStack, name: str, key: str | None) -> Checkpoint:
    from ckptkit.api import reading

    return stack.enter_context(reading(name, key=key))


def _looked_through(found: list[Checkpoint]) -> list[Checkpoint]:
    from ckptkit.quantized import look_through, look_through_both

    return (
        list(look_through_both(*found))
        if len(found) > 1 and _have_weights(found)
        else list(map(look_through, found))
    )


def _have_weights(found: list[Checkpoint]) -> bool:
    from ckptkit.core.errors import CkptkitError

    try:
        return all(each.selection is not None for each in found)
    except CkptkitError:
        return False


def _page(found: list[Checkpoint], values: bool, everything: bool) -> tuple[bytes, int]:
    from ckptkit.analysis.diff import compare_checkpoints
    from ckptkit.views.page import facts, page

    seen = _seen(found, values)
    diff = None
    if len(found) > 1:
        name = shown_url(found[0].name or "")
        diff = compare_checkpoints(*found, everything=everything, values=values, name=name)
    other = seen[1] if len(seen) > 1 else None
    shown = facts(seen[0], other, diff, everything=everything)
    return page(shown), len(seen[0].shares)


def _seen(found: list[Checkpoint], values: bool) -> list[Seen]:
    from ckptkit.views.page import look

    if not values:
        return list(map(look, found))
    from ckptkit.analysis.summary import summarize

    total = sum(summarize(checkpoint).totals.nbytes for checkpoint in found)
    with Progress("reading", total) as progress:
        return [look(checkpoint, progress) for checkpoint in found]


def _picture(checkpoint: Checkpoint, kind: str, by: str, title: str | None) -> tuple[bytes, int]:
    from ckptkit.analysis.shares import grown, shares
    from ckptkit.analysis.summary import summarize
    from ckptkit.views.treemap import drawn

    summary = summarize(checkpoint)
    tree = grown(shares(summary, checkpoint.root))
    name = shown_url(summary.path).rstrip("/").rpartition("/")[2] if title is None else title
    return drawn(tree, kind, by, name), len(summary.rows)


def _publish(data: bytes, path: str, *, force: bool) -> None:
    from ckptkit.core.plan import OutputFile, Plan
    from ckptkit.publish.publish import publish

    publish(Plan((OutputFile("", (data,)),)), path, force=force)
