"""ckptkit add-module"""

from __future__ import annotations

import click

from ckptkit.cli import options


@click.command("add-module", cls=options.Writer)
@options.edit
@click.option(
    "--prefix",
    metavar="P",
    default="module.",
    show_default=True,
    help="Prefix to add to each key.",
)
@options.keys
def command(request: options.Request, prefix: str, keys: tuple[str, ...]) -> None:
    """Add the prefix 'module.' to the keys.

    DataParallel and DistributedDataParallel expect it.

    The reverse of strip-module.

    \b
    Example: ckptkit add-module plain.pth run.pth
    """
    from ckptkit.transforms.keys import add_prefix

    request.run(lambda ck: add_prefix(ck, prefix, keys=keys), key=options.only(keys))
