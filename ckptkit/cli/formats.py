"""ckptkit formats"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ckptkit.cli import render

if TYPE_CHECKING:
    from ckptkit.formats.format import Format


@click.command("formats")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """List the formats that can be read and written.

    \b
    Example: ckptkit formats
    """
    from ckptkit.formats.table import FORMATS

    listed = [each for each in FORMATS if each.readable or each.layout is not None]
    if as_json:
        render.emit_json({"schema": "ckptkit.formats/1", "formats": list(map(_facts, listed))})
    else:
        header = ("name", "read", "write", "keeps", "remote", "recover", "suffixes", "what it is")
        render.emit(*render.table(header, list(map(_cells, listed))))


def _facts(format: Format) -> dict[str, object]:
    return {
        "name": format.name,
        "title": format.title,
        "readable": format.readable,
        "writable": format.layout is not None,
        "rewritten_as": format.rewrite_as,
        "everything": format.everything if format.layout is not None else None,
        "remote": "where folders can be listed" if format.listed else "any",
        "recoverable": format.recover is not None,
        "suffixes": format.suffixes,
    }


_KEEPS = {
    "always": "everything",
    "asked": "weights; --all: everything",
    "nested": "nested values",
    "never": "weights",
}


def _cells(format: Format) -> tuple[str, ...]:
    writable = format.layout is not None
    return (
        format.name,
        _yes(format.readable),
        f"as {format.rewrite_as}" if format.rewrite_as else _yes(writable),
        _KEEPS[format.everything] if writable else "",
        "not http" if format.listed else "yes",
        "yes" if format.recover is not None else "",
        " ".join(format.suffixes),
        format.title,
    )


def _yes(can: bool) -> str:
    return "yes" if can else "no"
