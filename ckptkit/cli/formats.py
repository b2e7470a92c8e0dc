"""ckptkit formats"""

from __future__ import annotations

import click

from ckptkit.cli import render


@click.command("formats")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """List what can be read and written.

    \b
    Example: ckptkit formats
    """
    from ckptkit.formats import FORMATS

    rows = [
        (each.name, each.title, each.readable, each.layout is not None, each.rewrite_as, each.suffixes)
        for each in FORMATS
    ]
    if as_json:
        names = ("name", "title", "readable", "writable", "rewritten_as", "suffixes")
        listed = [dict(zip(names, row, strict=True)) for row in rows]
        render.emit_json({"schema": "ckptkit.formats/1", "formats": listed})
    else:
        cells = [
            (name, _yes(readable), f"as {again}" if again else _yes(writable), " ".join(suffixes), title)
            for name, title, readable, writable, again, suffixes in rows
        ]
        render.emit(*render.table(("name", "read", "write", "suffixes", "what it is"), cells))


def _yes(can: bool) -> str:
    return "yes" if can else "no"
