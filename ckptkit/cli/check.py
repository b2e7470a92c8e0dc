"""ckptkit check"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import options, render

if TYPE_CHECKING:
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
    heads, the tied head and the dtype are compared. Only headers are read, except for `finite` and
    `equal`. Exit code 1 if something is not as expected.

    \b
    Example: ckptkit check model/
             ckptkit check run.pth --expect 'fc.* dtype=float32' --expect '* finite'
    """
    from ckptkit.api import reading
    from ckptkit.rules import config as configuration

    with reading(file, key=key) as checkpoint:
        place = checkpoint.source
        sizes = configuration.find(place) if config is None else configuration.read(config)
        found = list(_findings(checkpoint, list(lines), like, sizes))
    if as_json:
        render.emit_json(
            {"schema": SCHEMA, "file": file, "checked_config": sizes is not None, "findings": found}
        )
    else:
        render.emit_text(*(f"{file}: {each['text']}" for each in found))
        if not found and not quiet:
            against = " and config.json" if sizes is not None else ""
            render.emit_text(f"{file}: as expected ({len(lines)} expectations{against})")
    return FINDINGS if found else 0


def _findings(
    checkpoint: Checkpoint, lines: list[str], like: str | None, config: Any
) -> list[dict[str, str]]:
    from ckptkit.analysis.config_check import mismatches
    from ckptkit.rules.expecting import Expectations
    from ckptkit.rules.likeness import UnlikeError, check_like

    found = [
        {"code": "expectation", "text": text}
        for text in Expectations(lines, config).failures(checkpoint)
    ]
    if config is not None:
        found += [
            {"code": each.code, "text": str(each)}
            for each in mismatches(config, checkpoint.weights)
        ]
    if like is not None:
        from ckptkit.cli.like import expected

        try:
            check_like(checkpoint, expected(like), like)
        except UnlikeError as error:
            found.append({"code": "like", "text": error.message})
    return found
