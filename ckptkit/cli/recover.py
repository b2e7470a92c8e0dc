"""ckptkit recover"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ckptkit.cli import options

if TYPE_CHECKING:
    from ckptkit.cli.request import Request


@click.command("recover", cls=options.Writer)
@options.of("recover")
def command(request: Request, unverified: bool) -> Any:
    """Save the intact tensors of a truncated or damaged file.

    `recover` writes verified tensors to DST, and lists each lost tensor with the reason. If the
    file has checksums (torch.save), tensors with a wrong checksum are lost. safetensors files and
    files of torch before 1.6 have no checksums. If a file without checksums has the wrong length,
    its tensors may be shifted. Only --unverified writes such tensors. If a file without checksums
    has the right length, `recover` cannot detect damage. If the file overwrote an older save, a
    warning names tensors that may come from the older save.

    \b
    Example: ckptkit recover cut.pth intact.pth
    """
    from ckptkit import api

    # A dry run must change no file. If an edit was interrupted, `open_place` raises an error here,
    # because `recover` would undo the edit.
    if request.options.dry_run:
        from ckptkit.formats.format import open_place

        open_place(request.sources[0]).close()
    found = api.recover(request.sources[0], unverified=unverified)
    return request.run(source=found.checkpoint, lost=found.lost)
