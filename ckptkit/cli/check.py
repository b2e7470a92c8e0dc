"""ckptkit check"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import options, render
from ckptkit.core.errors import UsageError
from ckptkit.core.text import argument, shell_command, some

if TYPE_CHECKING:
    from ckptkit.analysis.config_check import Compared
    from ckptkit.core.checkpoint import Checkpoint

SCHEMA = "ckptkit.check/1"
FINDINGS = 1


@click.command("check")
@click.argument("file", metavar="FILE")
@click.option(
    "--expect", "lines", metavar="'NAME CONDITION'", multiple=True,
    help="Expect exists, missing, finite, count=N, shape=[N _], dtype=NAME, equal=NAME "
    "(repeatable).",
)  # fmt: skip
@click.option(
    "--like",
    metavar="OTHER",
    help="Expect the names and shapes of OTHER: a checkpoint, its index, or package.module:Class.",
)
@click.option(
    "--config", metavar="FILE", help="Sizes of the model; without it, config.json beside FILE."
)
@options.as_json(SCHEMA)
@click.option("--quiet", "-q", is_flag=True, help="Print only what is wrong.")
@options.key
def command(
    file: str,
    lines: tuple[str, ...],
    like: str | None,
    config: str | None,
    as_json: bool,
    quiet: bool,
    key: str | None,
) -> int:
    """Check expectations and config.json against tensors.

    FILE is a checkpoint, or a folder with one and its config.json: layers, experts, vocabulary,
    heads, the tied head and the dtype are compared, of diffusers' models also channels and blocks.
    Only headers are read, except for `finite` and `equal`. Exit code 1 if something is not as
    expected, 2 if there is nothing to compare.

    \b
    Example: ckptkit check model/
             ckptkit check run.pth --expect 'fc.* dtype=float32' --expect '* finite'
    """
    from ckptkit.analysis.config_check import compare
    from ckptkit.api import reading
    from ckptkit.edits import rules

    with reading(file, key=key) as checkpoint:
        place = checkpoint.source
        sizes = rules.find(place) if config is None else rules.read(config)
        compared = [] if sizes is None else compare(sizes, checkpoint.weights)
        fields = list(dict.fromkeys(each.field for each in compared))
        if not (fields or lines or like):
            raise _nothing(file, sizes is None)
        found = list(_findings(checkpoint, list(lines), like, sizes, compared))
    if as_json:
        facts = {"checked_config": sizes is not None, "compared": fields, "findings": found}
        render.emit_json({"schema": SCHEMA, "file": file, **facts})
    else:
        render.emit_text(*(f"{file}: {each['text']}" for each in found))
        if not found and not quiet:
            render.emit_text(f"{file}: {'; '.join(_agreeing(fields, len(lines), like))}")
    return FINDINGS if found else 0


def _nothing(file: str, no_config: bool) -> UsageError:
    """Return the error for a file with nothing to compare it with."""
    what = (
        "there is no config.json beside it"
        if no_config
        else "config.json has no field that ckptkit can compare with the tensors"
    )
    words = ("ckptkit", "check", "--expect", "* finite", *argument(file))
    return UsageError(
        f"nothing to check: {what}, and no --expect or --like is given",
        where=file,
        hint=shell_command(words),
    )


def _agreeing(fields: list[str], expectations: int, like: str | None) -> Iterator[str]:
    """Yield what a file agrees with."""
    if fields:
        yield f"matches config.json ({some(fields, len(fields))})"
    if like is not None:
        yield f"has the names and shapes of {like}"
    met = f"meets {render.plural(expectations, 'expectation')}"
    yield met if expectations else "no expectations given"


def _findings(
    checkpoint: Checkpoint, lines: list[str], like: str | None, config: Any,
    compared: list[Compared],
) -> list[dict[str, str]]:  # fmt: skip
    from ckptkit.edits.expect import Expectations
    from ckptkit.edits.rules import UnlikeError, check_like

    found = [
        {"code": "expectation", "text": text}
        for text in Expectations(lines, config).failures(checkpoint)
    ]
    found += [{"code": each.code, "text": str(each)} for each in compared if each.found is not None]
    if like is not None:
        from ckptkit.cli.like import expected

        try:
            check_like(checkpoint, expected(like), like)
        except UnlikeError as error:
            found.append({"code": "like", "text": error.message})
    return found
