"""ckptkit wrap"""

from __future__ import annotations

from typing import Any

import click

from ckptkit.cli import options


@click.command("wrap")
@options.edit
@click.option("--key", metavar="NAME", required=True, help="The key of the mapping around it.")
@click.option(
    "--set",
    "beside",
    metavar="NAME=JSON",
    multiple=True,
    callback=options.arguments,
    help="A value to put beside it (repeatable).",
)
def command(edit: options.Edit, key: str, beside: dict[str, Any]) -> None:
    """Put a checkpoint under a key.

    DST is {NAME: everything}, with what --set says beside it; extract is the way back.

    \b
    Example: ckptkit wrap plain.pth run.pth --key state_dict
             ckptkit wrap plain.pth run.ckpt --key state_dict --set 'pytorch-lightning_version="2.0.0"'
    """
    from ckptkit.transforms.structure import wrap

    edit.run(lambda ck: wrap(ck, key, beside))
