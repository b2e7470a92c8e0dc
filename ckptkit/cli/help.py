"""ckptkit help: the manual, by topic, offline."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import click

from ckptkit.cli import COMMANDS, render
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
    return {path.stem: _title(path) for path in _pages()}


def _pages() -> list[Path]:
    return sorted(FOLDER.glob("*.md"))


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as page:
        return page.readline().removeprefix("# ").strip()


def page(topic: str) -> Iterator[str]:
    """Yield the lines of the page of `topic`: tables in columns, and code indented."""
    text = _REMARK.sub("", (FOLDER / f"{topic}.md").read_text(encoding="utf-8"))
    prose, *others = _FENCED.split(text.strip())
    yield from _prose(prose)
    for number, part in enumerate(others):
        if number % 2 == 0:
            yield from ("", *(f"    {line}".rstrip() for line in part.splitlines()))
        elif part:
            yield from ("", *_prose(part))


def _prose(text: str) -> Iterator[str]:
    for is_table, lines in groupby(text.strip("\n").split("\n"), _is_row):
        if is_table:
            yield from _table(lines)
        else:
            yield from _paragraphs("\n".join(lines))


def _is_row(line: str) -> bool:
    return line.startswith("|")


def _table(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines of a table of Markdown, in which ``\\|`` is a bar."""
    heads, _, *rows = (
        [cell.strip().replace(r"\|", "|") for cell in _BAR.split(line)[1:-1]] for line in lines
    )
    yield from render.table(heads, rows)


def _paragraphs(text: str) -> Iterator[str]:
    """Yield lines; on a terminal, paragraphs and items of lists are wrapped anew."""
    width = render.terminal_width()
    if width is None:
        yield from text.split("\n")
        return
    from textwrap import wrap

    for paragraph in _PARAGRAPHS.split(text):
        if paragraph[:1] in ("", "\n"):
            yield ""
        paragraph = paragraph.strip("\n")
        item = _ITEM.match(paragraph)
        is_code = paragraph.startswith("    ")
        yield from (
            paragraph.split("\n")
            if is_code
            else wrap(
                " ".join(paragraph.split()),
                min(width, WIDEST),
                subsequent_indent=" " * len(item[0]) if item else "",
                break_long_words=False,
                break_on_hyphens=False,
            )
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
    if schema is not None:
        render.emit(_schema(schema))
    elif topic is None:
        render.emit(*render.table(("topic", "page"), list(topics().items())))
    elif topic in topics():
        render.emit(*page(topic))
    elif topic in COMMANDS and ctx.parent is not None:
        group = ctx.parent.command
        found = group.get_command(ctx.parent, topic) if isinstance(group, click.Group) else None
        assert found is not None
        render.emit(found.get_help(click.Context(found, info_name=topic, parent=ctx.parent)))
    else:
        raise _unknown(topic, [*topics(), *COMMANDS], "topic or command", _mentioning(topic))


def _schema(name: str) -> str:
    known = sorted(path.name.removesuffix(".json") for path in SCHEMAS.glob("*.json"))
    if name not in known:
        raise _unknown(name, known, "schema")
    return (SCHEMAS / f"{name}.json").read_text(encoding="utf-8").strip()


def _unknown(word: str, known: list[str], kind: str, pages: Sequence[str] = ()) -> click.UsageError:
    error = click.UsageError(f"No such {kind} {word!r}.")
    hint = f"{meant(word, {*known})}`ckptkit help` lists the topics"
    if pages:
        others = f", and so do {', '.join(pages[1:])}" if pages[1:] else ""
        hint = f"`ckptkit help {pages[0]}` mentions it{others}"
    error.hint = hint  # type: ignore[attr-defined]
    return error


def _mentioning(word: str) -> list[str]:
    """Return the topics whose pages mention a word most often, at most four."""
    found = re.compile(rf"\b{re.escape(word)}", re.IGNORECASE).findall
    counts = {path.stem: len(found(path.read_text(encoding="utf-8"))) for path in _pages()}
    return sorted(filter(counts.get, counts), key=lambda topic: -counts[topic])[:4]
