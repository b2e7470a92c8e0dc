"""ckptkit recover"""

from __future__ import annotations

import click

from ckptkit.cli import options


@click.command("recover")
@click.option(
    "--unverified",
    is_flag=True,
    help="Also keep tensors that nothing proves to be whole: they may be garbage.",
)
@options.edit
def command(edit: options.Edit, unverified: bool) -> None:
    """Save what is whole of a cut or damaged file.

    Tensors that are whole go to DST, the others are named. Where the file has checksums (torch.save), bytes without
    theirs are lost. safetensors and old torch files have none: if the length of such a file is wrong, its tensors may
    be shifted, and are kept with --unverified only. Damage that leaves the length as it was cannot be seen in them.

    \b
    Example: ckptkit recover cut.pth what-is-left.pth
    """
    from ckptkit.api import recover

    found = recover(edit.src, unverified=unverified)
    edit.run(source=found.checkpoint, lost=found.lost)
