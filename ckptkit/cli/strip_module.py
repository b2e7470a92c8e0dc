"""ckptkit strip-module"""

from __future__ import annotations

import click

from ckptkit.cli import options


@click.command("strip-module", cls=options.Writer)
@options.edit
@click.option(
    "--prefix",
    "prefixes",
    metavar="P",
    multiple=True,
    help="Prefix to remove instead of 'module.' (repeatable).",
)
@options.keys
def command(edit: options.Edit, prefixes: tuple[str, ...], keys: tuple[str, ...]) -> None:
    """Remove the leading 'module.' from the keys.

    DataParallel and DistributedDataParallel add it. Only a leading prefix is removed, once, and
    _metadata is renamed with it.

    \b
    Example: ckptkit strip-module run.pth plain.pth
             ckptkit strip-module --in-place --prefix _orig_mod. run.pth
    """
    from ckptkit.transforms.keys import strip_prefix

    edit.run(lambda ck: strip_prefix(ck, *prefixes, keys=keys), key=options.only(keys))
