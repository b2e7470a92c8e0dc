"""ckptkit extract"""

from __future__ import annotations

import click

from ckptkit.cli import options


@click.command("extract")
@options.edit
@click.option(
    "--key", metavar="PATH", required=True, help="Where the entry is: keys joined by dots."
)
def command(edit: options.Edit, key: str) -> None:
    """Write one entry as a checkpoint of its own.

    wrap is the way back.

    \b
    Example: ckptkit extract run.pth model.pth --key model
    """
    from ckptkit.transforms.structure import extract

    edit.run(lambda ck: extract(ck, key))
