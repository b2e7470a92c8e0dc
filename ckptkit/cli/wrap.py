"""ckptkit wrap"""

from __future__ import annotations

import click

from ckptkit.cli import options


@click.command("wrap")
@options.edit
@click.option("--key", metavar="NAME", required=True, help="The one key of the mapping around it.")
def command(edit: options.Edit, key: str) -> None:
    """Put a checkpoint under a key.

    DST is {NAME: everything}; extract is the way back.

    \b
    Example: ckptkit wrap plain.pth run.pth --key state_dict
    """
    from ckptkit.transforms.structure import wrap

    edit.run(lambda ck: wrap(ck, key))
