"""ckptkit formats"""

from __future__ import annotations

import click

from ckptkit.cli import options, render

KEEPS = {
    "always": "everything",
    "asked": "weights; --all: everything",
    "nested": "nested values",
    "never": "weights",
}


@click.command("formats")
@options.of("formats")
def command(as_json: bool) -> None:
    """List the formats that ckptkit reads and writes.

    \b
    Example: ckptkit formats
    """
    from ckptkit.formats.table import FORMATS

    listed = [each for each in FORMATS if each.readable or each.layout is not None]
    if as_json:
        facts = [
            {
                "name": each.name,
                "title": each.title,
                "readable": each.readable,
                "writable": each.layout is not None,
                "rewritten_as": each.rewrite_as,
                "everything": each.everything if each.layout is not None else None,
                "remote": "where folders can be listed" if each.listed else "any",
                "recoverable": each.recover is not None,
                "suffixes": each.suffixes,
            }
            for each in listed
        ]
        render.emit_json({"schema": "ckptkit.formats/1", "formats": facts})
        return
    rows = []
    for each in listed:
        read, writable = "yes" if each.readable else "no", each.layout is not None
        write = "yes" if writable else "no"
        write = f"as {each.rewrite_as}" if each.rewrite_as else write
        kept = KEEPS[each.everything] if writable else ""
        remote = "not http" if each.listed else "yes"
        recover = "yes" if each.recover is not None else ""
        suffixes = " ".join(each.suffixes)
        rows.append((each.name, read, write, kept, remote, recover, suffixes, each.title))
    header = ("name", "read", "write", "keeps", "remote", "recover", "suffixes", "description")
    render.emit(*render.table(header, rows))
