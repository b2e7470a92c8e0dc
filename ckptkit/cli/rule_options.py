"""--config and --arg: the sizes that rules need and that no shape says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import options

if TYPE_CHECKING:
    from ckptkit.rules.applying import Asked


def sizes(_: click.Context, parameter: click.Parameter, given: tuple[str, ...]) -> dict[str, int]:
    """Callback of --arg of rules: word to whole number."""
    found = {}
    for text in given:
        word, __, value = text.partition("=")
        if not word.isidentifier() or not (value.isascii() and value.isdigit()) or len(value) > 18:
            raise click.BadParameter(f"{text!r} is not of the form {parameter.metavar}")
        found[word] = int(value)
    return found


def with_sizes(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command --config and --arg, the sizes that rules need."""
    config = click.option(
        "--config",
        metavar="FILE",
        help="Sizes of the model, for rules; without it, config.json beside SRC.",
    )
    args = click.option(
        "--arg", "args", metavar="NAME=INT", multiple=True, callback=sizes,
        help="Argument NAME of the rules: a size (repeatable).",
    )  # fmt: skip
    return config(args(command))


def asked(
    request: options.Request, config: str | None, args: dict[str, int], reverse: bool = False
) -> Asked:
    """Make the settings for steps of rules from the options that `with_sizes` adds."""
    from ckptkit.rules import config as configuration
    from ckptkit.rules.applying import Asked

    sizes = None if config is None else configuration.read(config)
    return Asked(args, sizes, reverse, with_reports=request.options.dry_run)
