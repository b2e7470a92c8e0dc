"""ckptkit add-module"""

from __future__ import annotations

import click

from ckptkit.cli import options


@click.command("add-module")
@options.edit
@click.option(
    "--prefix",
    metavar="P",
    default="module.",
    show_default=True,
    help="What to put before each key.",
)
@options.keys
def command(edit: options.Edit, prefix: str, keys: tuple[str, ...]) -> None:
    """Put module. before the keys.

    That is how DataParallel expects them.

    \b
    Example: ckptkit add-module plain.pth run.pth
    """
    from ckptkit.transforms.keys import add_prefix

    edit.run(lambda ck: add_prefix(ck, prefix, keys=keys), key=options.only(keys))
