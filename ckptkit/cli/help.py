"""ckptkit help: show the manual by topic, and search it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import copy
from inspect import cleandoc
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import click

from ckptkit.cli import COMMANDS, main, options, render
from ckptkit.core import __version__
from ckptkit.core.text import meant

FOLDER = Path(__file__).parent.parent / "help"
SCHEMAS = FOLDER / "schemas"
WIDEST = 100  # maximum width of prose, in characters
PIPED = 120  # maximum width of a table without a terminal, in characters
LINES = 3  # maximum number of printed matching lines of a page
# Text that is only for code hosts and tests: HTML comments and pictures.
_REMARK = re.compile(r"^<!--.*?-->\n|^!\[[^\n]*\)\n\n?", re.DOTALL | re.MULTILINE)
_FENCED = re.compile(r"^```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_BAR = re.compile(r"(?<!\\)\|")
_PARAGRAPHS = re.compile(r"\n(?=\n|#|- |\d+\. |\Z)")
_ITEM = re.compile(r"(- |\d+\. )")


def topics() -> dict[str, str]:
    """Map each topic to the first heading of its page."""
    found = {}
    for path in sorted(FOLDER.glob("*.md")):
        with path.open(encoding="utf-8") as page:
            found[path.stem] = page.readline().removeprefix("# ").strip()
    return found


def page(topic: str, piped: int | None = PIPED) -> Iterator[str]:
    """Yield the lines of the page of `topic`. Align the columns of tables, and indent code.

    On a terminal, wrap paragraphs and list items to the width of the terminal. In a pipe or
    file, tables are at most `piped` characters wide.
    """
    text = _REMARK.sub("", (FOLDER / f"{topic}.md").read_text(encoding="utf-8"))
    # even parts are prose, odd parts are code
    for number, part in enumerate(_FENCED.split(text.strip())):
        if number % 2:
            yield from ("", *(f"    {line}".rstrip() for line in part.splitlines()))
            continue
        if number and part:
            yield ""
        texts = part.strip("\n").split("\n") if part else []
        for is_table, lines in groupby(texts, lambda line: line.startswith("|")):
            if is_table:
                cells = (_BAR.split(line)[1:-1] for line in lines)
                heads, _, *rows = (
                    [cell.strip().replace(r"\|", "|") for cell in row] for row in cells
                )
                yield from render.table(heads, rows, whole=True, piped=piped)
            else:
                yield from _paragraphs("\n".join(lines))


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


class Hit(NamedTuple):
    """A line of the manual that contains a word.

    `shown_by` is the command that prints the page. `heading` is the heading above the line.
    """

    shown_by: str
    heading: str
    line: str


def search(word: str) -> Iterator[Hit]:
    """Search the manual and the options of all commands. Yield each line or option that contains
    `word`."""
    found = re.compile(rf"(?<![^\W_]){re.escape(word)}", re.IGNORECASE).search
    for topic in topics():
        heading = ""
        text = _REMARK.sub("", (FOLDER / f"{topic}.md").read_text(encoding="utf-8"))
        for line in text.splitlines():
            if line.startswith("#"):
                heading = line.lstrip("# ")
            if found(line):
                yield Hit(f"ckptkit help {topic}", heading, line.strip("#|` "))
    for name in COMMANDS:
        command = main.get_command(click.Context(main), name)
        assert command is not None
        for option in command.params:
            text = f"{', '.join(option.opts)}: {getattr(option, 'help', '')}"
            if isinstance(option, click.Option) and found(text):
                yield Hit(f"ckptkit {name} --help-all", "option", text)


def _found(word: str) -> Iterator[str]:
    """Yield the pages that contain `word`, each with its first matching lines.

    Sort pages by the number of matching lines, largest first.
    """
    pages: dict[str, list[Hit]] = {}
    for hit in search(word):
        pages.setdefault(hit.shown_by, []).append(hit)
    for shown_by, hits in sorted(pages.items(), key=lambda page: -len(page[1])):
        yield f"{shown_by}: {render.plural(len(hits), 'line')}"
        for hit in hits[:LINES]:
            yield from (f"  {line}" for line in render.wrapped(f"{hit.heading}: {hit.line}"))


def manual() -> Iterator[str]:
    """Yield a man page in roff: all commands with their options, and the topics of the manual."""

    def plain(text: str) -> str:
        lines = text.replace("\\", r"\e").replace("-", r"\-").replace("\b\n", "").splitlines()
        return "\n".join(rf"\&{line}" if line[:1] in (".", "'") else line for line in lines)

    yield f'.TH CKPTKIT 1 "" "ckptkit {__version__}" "User Commands"'
    yield from (".SH NAME", plain("ckptkit - " + (main.help or "").partition("\n")[0].rstrip(".")))
    yield from (
        ".SH SYNOPSIS",
        r".B ckptkit",
        r"\fICOMMAND\fR [\fIOPTION\fR]... \fIFILE\fR...",
        ".SH COMMANDS",
    )
    root = click.Context(main, info_name="ckptkit", **main.context_settings)
    for context in _commands(root):
        usage = " ".join(context.command.collect_usage_pieces(context))
        yield from (
            ".SS " + plain(f"{context.command_path} {usage}"),
            ".nf",
            plain(cleandoc(context.command.help or "")),
            ".fi",
        )
        for option in filter(lambda each: isinstance(each, click.Option), context.command.params):
            option = copy(option)
            option.hidden = False  # type: ignore[attr-defined]
            record = option.get_help_record(context)
            if record is not None:
                yield from (".TP", rf"\fB{plain(record[0])}\fR", plain(record[1]))
    yield ".SH EXIT STATUS"
    yield from (f"{plain(line)}\n.br" for line in page("exit-codes", None) if line[:1].isdigit())
    yield ".SH SEE ALSO"
    yield plain(f"ckptkit help TOPIC, where TOPIC is one of: {', '.join(topics())}")


def _commands(parent: click.Context) -> Iterator[click.Context]:
    """Yield a context for each command, and for each command of a group such as `lora`.

    Skip the commands of `batch`, because they repeat the options of other commands.
    """
    assert isinstance(parent.command, click.Group)
    for name in parent.command.list_commands(parent):
        command = parent.command.get_command(parent, name)
        assert command is not None
        yield (context := click.Context(command, info_name=name, parent=parent))
        if isinstance(command, click.Group) and name != "batch":
            yield from _commands(context)


def _check(ctx: click.Context) -> None:
    """Raise UsageError for an unknown schema, or for words that the manual does not contain."""
    words, schema = ctx.params["words"], ctx.params["schema"]
    schemas = sorted(path.stem for path in SCHEMAS.glob("*.json"))
    if schema is not None and schema not in schemas:
        raise _unknown(schema, schemas, "schema")
    word = " ".join(words)
    if words and word not in (*topics(), *COMMANDS) and next(search(word), None) is None:
        raise _unknown(word, [*topics(), *COMMANDS], "topic, command or word")


@click.command("help", cls=options.Command, check=_check)
@click.argument("words", metavar="[TOPIC|COMMAND|WORD...]", nargs=-1)
@options.of("help")
@click.pass_context
def command(ctx: click.Context, words: tuple[str, ...], schema: str | None, man: bool) -> None:
    """Show a page of the manual, or the help of a command.

    `help` searches for any other WORD in the manual and in the options of all commands. Without
    WORD, `help` lists the topics. The last example installs the man page, if the folder exists.

    \b
    Example: ckptkit help
             ckptkit help formats
             ckptkit help prefix
             ckptkit help json --schema inspect
             ckptkit help --man > ~/.local/share/man/man1/ckptkit.1
    """
    topic = " ".join(words)
    if schema is not None:
        render.emit((SCHEMAS / f"{schema}.json").read_text(encoding="utf-8").strip())
    elif man:
        render.emit(*manual())
    elif not topic:
        render.emit(*render.table(("topic", "page"), list(topics().items())))
    elif topic in topics():
        render.emit(*page(topic))
    elif topic in COMMANDS and ctx.parent is not None:
        found = main.get_command(ctx.parent, topic)
        assert found is not None
        render.emit(found.get_help(click.Context(found, info_name=topic, parent=ctx.parent)))
    else:
        render.emit(*_found(topic))


def _unknown(word: str, known: list[str], kind: str) -> click.UsageError:
    """Return the error for a word that is not in `known`."""
    error = click.UsageError(f"No such {kind} {word!r}.")
    hint = f"{meant(word, {*known})}`ckptkit help` lists the topics"
    error.hint = hint  # type: ignore[attr-defined]
    return error
