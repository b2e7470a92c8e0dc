"""ckptkit wrap"""

from __future__ import annotations

from typing import Any

import click

from ckptkit.cli import options


@click.command("wrap")
@options.edit
@click.option("--key", metavar="NAME", required=True, help="The key of the mapping around it.")
@click.option(
    "--set",
    "beside",
    metavar="NAME=JSON",
    multiple=True,
    callback=options.arguments,
    help="A value to put beside it (repeatable).",
)
def command(edit: options.Edit, key: str, beside: dict[str, Any]) -> None:
    """Put a checkpoint under a key.

    DST is {NAME: everything}, with what --set says beside it; extract is the way back.

    \b
    Example: ckptkit wrap plain.pth run.pth --key state_dict
             ckptkit wrap plain.pth run.ckpt --key state_dict --set 'pytorch-lightning_version="2.0.0"'
    """
    from ckptkit import formats
    from ckptkit.core.errors import UsageError
    from ckptkit.formats.table import TORCH_ZIP
    from ckptkit.transforms.structure import wrap

    shards = edit.shard_size is not None
    chosen = formats.for_writing(
        edit.dst or edit.src, edit.format, keep=TORCH_ZIP.name, shards=shards
    )
    if chosen.everything in ("never", "asked") and not edit.everything:
        hint = "--all keeps it" if chosen.everything == "asked" else "name a .pth"
        raise UsageError(
            f"{chosen.name} holds weights alone, and no entry around them",
            where=edit.dst,
            hint=hint,
        )
    edit.run(lambda ck: wrap(ck, key, beside))
