"""ckptkit help: the manual, by topic, offline."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import click

from ckptkit.cli import COMMANDS, main, render
from ckptkit.core.text import meant

FOLDER = Path(__file__).parent.parent / "help"
SCHEMAS = FOLDER / "schemas"
WIDEST = 100  # columns of prose
# What only code hosts and tests read: hidden commands and remarks.
_REMARK = re.compile(r"^<!--.*?-->\n", re.DOTALL | re.MULTILINE)
_FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_BAR = re.compile(r"(?<!\\)\|")
_PARAGRAPHS = re.compile(r"\n(?=\n|#|- |\d+\. |\Z)")
_ITEM = re.compile(r"(- |\d+\. )")


def topics() -> dict[str, str]:
    """Return each topic with the first heading of its page."""
    found = {}
    for path in sorted(FOLDER.glob("*.md")):
        with path.open(encoding="utf-8") as page:
            found[path.stem] = page.readline().removeprefix("# ").strip()
    return found


def page(topic: str) -> Iterator[str]:
    """Yield the lines of the page of `topic`: tables in columns, and code indented.

    On a terminal, paragraphs and items of lists are wrapped anew.
    """
    text = _REMARK.sub("", (FOLDER / f"{topic}.md").read_text(encoding="utf-8"))
    for number, part in enumerate(_FENCED.split(text.strip())):  # prose and code in turns
        if number % 2:
            yield from ("", *(f"    {line}".rstrip() for line in part.splitlines()))
            continue
        if number and part:
            yield ""
        for is_table, lines in groupby(part.strip("\n").split("\n") if part else (), _is_row):
            if is_table:
                cells = (_BAR.split(line)[1:-1] for line in lines)
                heads, _, *rows = ([_cell(cell) for cell in row] for row in cells)
                yield from render.table(heads, rows)
            else:
                yield from _paragraphs("\n".join(lines))


def _is_row(line: str) -> bool:
    return line.startswith("|")


def _cell(text: str) -> str:
    return text.strip().replace(r"\|", "|")


def _paragraphs(text: str) -> Iterator[str]:
    from textwrap import wrap

    width = render.terminal_width()
    if width is None:
        yield from text.split("\n")
        return
    for paragraph in _PARAGRAPHS.split(text):
        if paragraph[:1] in ("", "\n"):
            yield ""
        paragraph = paragraph.strip("\n")
        if paragraph.startswith("    "):  # code
            yield from paragraph.split("\n")
            continue
        item = _ITEM.match(paragraph)
        yield from wrap(
            " ".join(paragraph.split()),
            min(width, WIDEST),
            subsequent_indent=" " * len(item[0]) if item else "",
            break_long_words=False,
            break_on_hyphens=False,
        )


@click.command("help")
@click.argument("topic", required=False)
@click.option(
    "--schema", metavar="NAME", help="Print the JSON schema NAME (see `ckptkit help json`)."
)
@click.pass_context
def command(ctx: click.Context, topic: str | None, schema: str | None) -> None:
    """Show a page of the manual, or the help of a command.

    Without TOPIC, list the topics.

    \b
    Example: ckptkit help
             ckptkit help formats
             ckptkit help json --schema inspect
    """
    known = topics()
    if schema is not None:
        schemas = sorted(path.stem for path in SCHEMAS.glob("*.json"))
        if schema not in schemas:
            raise _unknown(schema, schemas, "schema")
        render.emit((SCHEMAS / f"{schema}.json").read_text(encoding="utf-8").strip())
    elif topic is None:
        render.emit(*render.table(("topic", "page"), list(known.items())))
    elif topic in known:
        render.emit(*page(topic))
    elif topic in COMMANDS and ctx.parent is not None:
        found = main.get_command(ctx.parent, topic)
        assert found is not None
        render.emit(found.get_help(click.Context(found, info_name=topic, parent=ctx.parent)))
    else:
        raise _unknown(topic, [*known, *COMMANDS], "topic or command")


def _unknown(word: str, known: list[str], kind: str) -> click.UsageError:
    """Return the error for a word that is none of `known`; name the pages that mention it."""
    hint = f"{meant(word, {*known})}`ckptkit help` lists the topics"
    if kind != "schema":
        found = re.compile(rf"\b{re.escape(word)}", re.IGNORECASE).findall
        pages = {each: (FOLDER / f"{each}.md").read_text(encoding="utf-8") for each in topics()}
        counts = Counter({each: len(found(text)) for each, text in pages.items()})
        best = [each for each, count in counts.most_common(4) if count]
        if best:
            others = f", and so do {', '.join(best[1:])}" if best[1:] else ""
            hint = f"`ckptkit help {best[0]}` mentions it{others}"
    error = click.UsageError(f"No such {kind} {word!r}.")
    error.hint = hint  # type: ignore[attr-defined]
    return error
