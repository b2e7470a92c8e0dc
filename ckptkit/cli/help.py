"""ckptkit help: the manual, by topic, offline."""

from __future__ import annotations

import re
from pathlib import Path

import click

from ckptkit.cli import COMMANDS, render
from ckptkit.core.text import meant

FOLDER = Path(__file__).parent.parent / "help"
SCHEMAS = FOLDER / "schemas"
# What only code hosts and tests read: hidden commands, fences, remarks.
_HIDDEN = re.compile(r"^<!--.*?-->\n|^```\w*\n", re.DOTALL | re.MULTILINE)


def topics() -> dict[str, str]:
    """Return each topic with the first heading of its page."""
    return {path.stem: _title(path) for path in sorted(FOLDER.glob("*.md"))}


def _title(path: Path) -> str:
    with path.open(encoding="utf-8") as page:
        return page.readline().removeprefix("# ").strip()


def page(topic: str) -> str:
    """Return the page of `topic` as a terminal shows it."""
    return _HIDDEN.sub("", (FOLDER / f"{topic}.md").read_text(encoding="utf-8")).strip()


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
        render.emit(page(topic))
    elif topic in COMMANDS and ctx.parent is not None:
        group = ctx.parent.command
        found = group.get_command(ctx.parent, topic) if isinstance(group, click.Group) else None
        assert found is not None
        render.emit(found.get_help(click.Context(found, info_name=topic, parent=ctx.parent)))
    else:
        raise _unknown(topic, [*topics(), *COMMANDS], "topic or command")


def _schema(name: str) -> str:
    known = sorted(path.name.removesuffix(".json") for path in SCHEMAS.glob("*.json"))
    if name not in known:
        raise _unknown(name, known, "schema")
    return (SCHEMAS / f"{name}.json").read_text(encoding="utf-8").strip()


def _unknown(word: str, known: list[str], kind: str) -> click.UsageError:
    error = click.UsageError(f"No such {kind} {word!r}.")
    hint = f"{meant(word, known)}`ckptkit help` lists the topics"
    error.hint = hint  # type: ignore[attr-defined]
    return error
