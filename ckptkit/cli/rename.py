"""ckptkit rename"""

from __future__ import annotations

import click

from ckptkit.cli import options


@click.command("rename", cls=options.Writer)
@options.edit
@options.mapping
@options.substitutions
@options.key
def command(
    request: options.Request,
    mapping: dict[str, str],
    substitutions: list[tuple[str, str]],
    key: str | None,
) -> None:
    """Rename keys, by a table or by regular expressions.

    A name in the table of --map gets exactly its new name; --sub expressions apply to all other
    names, in the order given.

    \b
    Example: ckptkit rename run.pth new.pth --map names.json
             ckptkit rename run.pth new.pth --sub '^encoder\\.=backbone.'
    """
    if not mapping and not substitutions:
        raise click.UsageError(
            "nothing to rename: give --map FILE (not empty) or --sub REGEX=REPLACEMENT"
        )
    from ckptkit.transforms.keys import rename

    request.run(lambda ck: rename(ck, mapping, substitutions), key=key)
