"""What the manual says of options and edits, made of their lists.

``python -m tests.edits_pages`` writes ``ckptkit/help/output.md``, the options that --help hides, and
the table of steps in ``ckptkit/help/recipes.md``; a test says when that is due.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

import ckptkit
from ckptkit import edits
from ckptkit.cli import main

HELP = Path(ckptkit.__file__).parent / "help"
PAGE, RECIPES = HELP / "output.md", HELP / "recipes.md"
START, END = "<!-- steps -->\n", "<!-- end -->\n"
OTHERS = {
    "config": "Generate config.json from the training arguments in the file",
    "expect": "Check names, shapes and values, like `ckptkit check --expect`",
    "gguf": "Refuse a GGUF file of another architecture, and generate config.json from its metadata",
    "recipe": "Apply the recipe for the architecture of a GGUF file: `gguf-*`",
}
HEAD = """# Advanced options

`--help` shows common options, and `--help-all` shows all options. Every command that writes also has the options in the
first table. (`convert` and `run` show `--all` and `--shard-size` in `--help`, and `batch` shows `--workers`.)

"""
FOLDERS = """
Commands that read folders of several ranks also have these options:

"""
RULES = """
With `--rule`, `convert` also has these options:

"""


def page() -> str:
    """Return the whole page."""
    writing, everything = hidden("remap"), hidden("convert")
    folders = {name: row for name, row in hidden("inspect").items() if name not in writing}
    rules = {name: row for name, row in everything.items() if name not in {**writing, **folders}}
    parts = (HEAD, *table(writing), FOLDERS, *table(folders), RULES, *table(rules))
    return "".join(parts)


def hidden(name: str) -> dict[str, tuple[str, str]]:
    """Return the hidden options of a command: their names, metavars and help."""
    context = click.Context(main)
    command = main.get_command(context, name)
    assert command is not None
    found = {}
    for option in command.params:
        if isinstance(option, click.Option) and option.hidden:
            option.hidden = False
            found[option.opts[0]] = option.get_help_record(context) or ("", "")
            option.hidden = True
    return found


def table(options: dict[str, tuple[str, str]]) -> Iterator[str]:
    yield "| option | |\n|---|---|\n"
    for words, text in options.values():
        yield f"| `{words.replace('|', chr(92) + '|')}` | {' '.join(text.split())} |\n"


def recipes() -> str:
    """Return the page of recipes, with the table of steps."""
    before, _, rest = RECIPES.read_text(encoding="utf-8").partition(START)
    return f"{before}{START}{''.join(steps())}{END}{rest.partition(END)[2]}"


def steps() -> Iterator[str]:
    """Yield a row for each edit that recipes have."""
    yield "| step | | `convert` | command | Python |\n|---|---|---|---|---|\n"
    for edit in edits.EDITS:
        flags = [
            f"`{option.flag if option.convert is None else option.convert}`"
            for option in edit.options
            if edit.in_convert and not option.rare and option.convert != ""
        ]
        command = f"`{edit.command}`" if edit.command else ""
        name = edit.place.partition(":")[2]
        python = f"`{name}`" if edit.public else ""
        about = edit.about.removesuffix(".")
        yield f"| `{edit.word}` | {about} | {', '.join(flags)} | {command} | {python} |\n"
    for word, about in OTHERS.items():
        yield f"| `{word}` | {about} | | | |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    RECIPES.write_text(recipes(), encoding="utf-8")
