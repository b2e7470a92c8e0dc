"""ckptkit rename"""

from __future__ import annotations

import click

from ckptkit.cli import options


@click.command("rename")
@options.edit
@options.mapping
@options.substitutions
@options.key
def command(
    edit: options.Edit,
    mapping: dict[str, str],
    substitutions: list[tuple[str, str]],
    key: str | None,
) -> None:
    """Give the weights other names.

    A name in the table gets exactly its new name; the expressions apply to all others, in the order given.

    \b
    Example: ckptkit rename run.pth new.pth --map names.json
             ckptkit rename run.pth new.pth --sub '^encoder\\.=backbone.'
    """
    if not mapping and not substitutions:
        raise click.UsageError(
            "no name is to change: say --map FILE, with names in it, or --sub REGEX=REPLACEMENT"
        )
    from ckptkit.transforms.keys import rename

    edit.run(lambda ck: rename(ck, mapping, substitutions), key=key)
