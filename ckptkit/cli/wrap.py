"""ckptkit wrap"""

from __future__ import annotations

from typing import Any

import click

from ckptkit.cli import options, parsing


@click.command("wrap", cls=options.Writer)
@options.edit
@click.option("--key", metavar="NAME", required=True, help="Path of the weights in DST: a new key.")
@click.option(
    "--set",
    "beside",
    metavar="NAME=JSON",
    multiple=True,
    callback=parsing.arguments,
    help="Add this entry beside it (repeatable).",
)
def command(request: options.Request, key: str, beside: dict[str, Any]) -> None:
    """Put a checkpoint under a key of a new mapping.

    DST is {NAME: everything}, plus the values of --set. The reverse of extract.

    \b
    Example: ckptkit wrap plain.pth run.pth --key state_dict
             ckptkit wrap net.pth run.ckpt --key state_dict --set 'pytorch-lightning_version="2.6"'
    """
    from ckptkit import formats
    from ckptkit.core.errors import UsageError
    from ckptkit.formats.table import TORCH_ZIP
    from ckptkit.transforms.structure import wrap

    shards = request.options.shard_size is not None
    chosen = formats.for_writing(
        request.dst or request.src, request.options.format, keep=TORCH_ZIP.name, shards=shards
    )
    if chosen.everything in ("never", "asked") and not request.options.everything:
        hint = "--all keeps it" if chosen.everything == "asked" else "name a .pth"
        raise UsageError(
            f"{chosen.name} holds only weights, without an entry around them",
            where=request.dst,
            hint=hint,
        )
    request.run(lambda ck: wrap(ck, key, beside))
