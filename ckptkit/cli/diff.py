"""ckptkit diff"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import options, render
from ckptkit.core.text import is_url, shown_url

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ckptkit.analysis.diff import Diff
    from ckptkit.core.checkpoint import Checkpoint
    from ckptkit.core.options import Options

SCHEMA = "ckptkit.diff/2"
DIFFERENT = 1
UNSURE = 0.6  # confidence below which a pair is a guess


@options.reads
@click.command("diff")
@click.argument("a", metavar="A")
@click.argument("b", metavar="[B]", required=False)
@options.model
@options.model_arguments
@click.option(
    "--values", is_flag=True, help="Read the values of tensors too, and compare them byte for byte."
)
@click.option(
    "--all",
    "everything",
    is_flag=True,
    help="Not only the weights: compare optimizer, averages and values too.",
)
@click.option(
    "--atol",
    type=click.FloatRange(min=0),
    help="Compare elements with this absolute tolerance.",
)
@click.option(
    "--rtol",
    type=click.FloatRange(min=0),
    help="Compare elements with this relative tolerance.",
)
@options.stored
@options.as_json(SCHEMA)
@click.option(
    "--key", metavar="PATH", help="Path of the weights in A, if several entries could be meant."
)
@click.option(
    "--write-map",
    "write_map",
    metavar="FILE",
    help="Write the renamed keys as JSON, for `rename --map`.",
)
@click.option("--force", is_flag=True, help="Replace FILE of --write-map if it exists.")
@click.option(
    "--key-b",
    metavar="PATH",
    help="Like --key, for B ('' selects the whole file). Default: as --key.",
)
def command(as_json: bool, write_map: str | None, force: bool, **asked: Any) -> int:
    """Compare two checkpoints, or a checkpoint and a model.

    Compares keys, dtypes and shapes, and values on request. Exit code 1 if they differ. "missing"
    keys are in B or the model and not in A; "unexpected" keys only in A. Keys that look renamed are
    paired, each with a confidence. With --model, the model's code is imported and run.

    \b
    Example: ckptkit diff run.pth other.safetensors --values
             ckptkit diff run.pth --model models.py:CNN --arg classes=10 --write-map map.json
    """
    found = _compare(**asked)
    if as_json:
        other = None if asked["b"] is None else shown_url(asked["b"])
        render.emit_json(_facts(found, shown_url(asked["a"]), other, asked["spec"]))
    else:
        from ckptkit.cli import diff_text

        render.write(f"{line}\n" for line in diff_text.lines(found))
    if write_map is not None and not found.renamed:
        render.note("no key looks renamed: wrote no map")
    elif write_map is not None:
        _write_map(found, write_map, force, shown_url(asked["a"]), asked["read"])
    return 0 if found.equal else DIFFERENT


def _write_map(found: Diff, path: str, force: bool, name: str, read: Options) -> None:
    """Write the renamed keys as JSON, old name to new, and print the command that uses the file."""
    from json import dumps

    from ckptkit.analysis.advice import rename
    from ckptkit.core.plan import OutputFile, Plan
    from ckptkit.publish.publish import publish

    data = dumps({pair.old: pair.new for pair in found.renamed}, indent=1).encode() + b"\n"
    publish(Plan((OutputFile("", (data,)),)), path, force=force)
    guesses = sum(pair.confidence < UNSURE for pair in found.renamed)
    look = f", {guesses:,} of them guesses to check" if guesses else ""
    chosen = (*(() if read.key is None else ("--key", read.key)), *read.words)
    command = rename(name, path, *chosen)
    render.note(f"wrote {path}: {render.plural(len(found.renamed), 'name')}{look}", command)


def _compare(
    a: str,
    b: str | None,
    spec: str | None,
    args: dict[str, object],
    values: bool,
    atol: float | None,
    rtol: float | None,
    read: Options,
    key_b: str | None,
    stored: bool,
    everything: bool,
) -> Diff:
    from ckptkit.analysis.diff import compare_checkpoints, entire
    from ckptkit.api import reading
    from ckptkit.quantized import look_through_both

    if (b is None) == (spec is None):
        raise click.UsageError("say what to compare A with: B or --model MODEL")
    with ExitStack() as stack:
        first = stack.enter_context(reading(a, _of_file(a, read) if b is not None else read))
        if b is not None:
            key = read.key if key_b is None else key_b
            second = stack.enter_context(reading(b, _of_file(b, replace(read, key=key))))
            first, second = entire(first), entire(second)
            sides = (first, second) if stored else look_through_both(first, second)
            from ckptkit.cli.progress import Progress

            with Progress(f"comparing {shown_url(a)}", _nbytes(sides, everything)) as progress:
                return compare_checkpoints(
                    *sides,
                    everything=everything,
                    values=values,
                    atol=atol,
                    rtol=rtol,
                    name=shown_url(a),
                    progress=progress,
                )
        if values or everything or atol is not None or rtol is not None:
            raise click.UsageError("--values, --all, --atol and --rtol cannot be used with --model")
        from ckptkit.cli.model_class import built
        from ckptkit.loading.model import against_model

        assert spec is not None
        return against_model(first, built(spec, args), shown_url(a), stored=stored)


def _of_file(path: str, read: Options) -> Options:
    """Return the options for one of two inputs: --parts is about the folder among them."""
    return read if os.path.isdir(path) or is_url(path) else replace(read, parts=None)


def _nbytes(sides: Sequence[Checkpoint], everything: bool) -> int:
    """Return the bytes of the tensors to compare, about: those that only one side has count too."""
    from ckptkit.analysis.diff import has_weights

    if everything or not has_weights(*sides):
        from ckptkit.analysis.summary import summarize

        return sum(summarize(each).totals.nbytes for each in sides)
    return sum(sum(tensor.nbytes for tensor in each.weights.values()) for each in sides)


def _facts(found: Diff, a: str, b: str | None, model: str | None) -> dict[str, Any]:
    return {"schema": SCHEMA, "a": a, "b": b, "model": model, **found.as_json()}
