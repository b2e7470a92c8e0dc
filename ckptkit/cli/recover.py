"""ckptkit recover"""

from __future__ import annotations

from typing import Any

import click

from ckptkit.cli import options, reading
from ckptkit.cli.request import Request


@click.command("recover", cls=options.Writer)
@reading.flag(
    "--unverified", "Also keep tensors without proof that they are intact; they may be garbage."
)
def command(request: Request, unverified: bool) -> Any:
    """Save the intact tensors of a truncated or damaged file.

    Tensors that are proven intact go to DST. The lost tensors are listed with the reason. In a file
    with checksums (torch.save), data with a wrong checksum is lost. safetensors and files of torch
    before 1.6 have no checksums. If the length of such a file is wrong, its tensors may be shifted;
    only --unverified keeps them. Damage with the same length cannot be detected in such files. If
    the file overwrote an older save, a warning names tensors that may be older.

    \b
    Example: ckptkit recover cut.pth intact.pth
    """
    from ckptkit.api import recover

    if request.options.dry_run:  # opening for writing would undo an interrupted edit
        from ckptkit.formats.format import open_place

        open_place(request.sources[0]).close()
    found = recover(request.sources[0], unverified=unverified)
    return request.run(source=found.checkpoint, lost=found.lost)
