"""ckptkit recover"""

from __future__ import annotations

from typing import Any

import click

from ckptkit.cli import options, reading
from ckptkit.cli.request import Request


@click.command("recover", cls=options.Writer)
@reading.flag(
    "--unverified", "Also keep tensors that cannot be proven intact; they may be garbage."
)
def command(request: Request, unverified: bool) -> Any:
    """Save the intact tensors of a cut or damaged file.

    Tensors that are proven intact go to DST; the others are listed with the reason. Where the file
    has checksums (torch.save), data that fails its checksum is lost. safetensors and files of torch
    before 1.6 have none: if the length of such a file is wrong, its tensors may be shifted, and
    only --unverified keeps them. Damage that does not change the length cannot be detected in them.
    A warning says if tensors may be of an older save that the file was written over.

    \b
    Example: ckptkit recover cut.pth intact.pth
    """
    from ckptkit.api import recover

    if request.options.dry_run:  # `recover` would undo an interrupted edit in place
        from ckptkit.formats.format import open_place

        open_place(request.sources[0]).close()
    found = recover(request.sources[0], unverified=unverified)
    return request.run(source=found.checkpoint, lost=found.lost)
