"""ckptkit extract"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptkit.cli import options

if TYPE_CHECKING:
    pass


@click.command("extract", cls=options.Writer)
@options.edit
@options.parts
@click.option(
    "--key",
    metavar="PATH",
    required=True,
    help="Path of the weights, or of another entry: its keys, joined by dots.",
)
def command(request: options.Request, key: str) -> None:
    """Write one entry as a checkpoint of its own.

    The reverse of wrap.

    \b
    Example: ckptkit extract run.pth model.pth --key model
    """
    from ckptkit.transforms.structure import extract

    request.run(lambda ck: extract(ck, key))
