"""ckptkit recover"""

from __future__ import annotations

import click

from ckptkit.cli import options


@click.command("recover")
@options.edit
def command(edit: options.Edit) -> None:
    """Save what is whole of a cut or damaged file.

    Tensors whose bytes are there go to DST, those whose bytes are gone are named. Where the file has checksums, bytes
    that do not have theirs count as gone.

    \b
    Example: ckptkit recover cut.pth what-is-left.pth
    """
    from ckptkit.api import recover

    found = recover(edit.src)
    edit.run(source=found.checkpoint, lost=found.lost)
