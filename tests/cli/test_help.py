"""Every command explains itself: what it does, an example that parses, every option."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from ckptkit.cli import COMMANDS, help, main, options, render
from tests.conftest import Run


def commands() -> list[list[str]]:
    return [[name] for name in COMMANDS] + [["batch", name] for name in options.BATCHABLE]


def found(words: list[str]) -> click.Command:
    command: click.Command | None = main
    for word in words:
        assert isinstance(command, click.Group)
        command = command.get_command(click.Context(command), word)
    assert command is not None
    return command


def examples(command: click.Command) -> list[str]:
    """The lines of the paragraph that starts with Example:."""
    text = (command.help or "").partition("Example:")[2]
    return [line.strip() for line in text.strip("\n").splitlines() if line.strip()]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_it_has_a_sentence_an_example_and_words_for_every_option(words: list[str]) -> None:
    command = found(words)
    first = (command.help or "").partition("\n")[0]
    assert first.endswith(".") and len(command.get_short_help_str(79)) <= 79
    assert examples(command)
    for option in command.params:
        if isinstance(option, click.Option):
            assert option.help and option.help[0].isupper(), option.name


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_its_examples_parse(words: list[str]) -> None:
    """Parse each example, without its files; redirections belong to the shell."""
    for line in examples(found(words)):
        if not line.startswith("ckptkit "):
            assert "ckptkit " in line  # a way to call it
            continue
        for name in re.findall(r"--map (\S+\.json)", line):
            (Path(name)).write_text(json.dumps({"a": "b"}))
        given = shlex.split(re.split(r" [|>]", line)[0])[1:]
        assert given[: len(words)] == words
        if "..." in given:  # of batch: any options
            continue
        named = 2 if given[0] == "batch" else 1
        parent = click.Context(main, **main.context_settings)
        called = found(given[:named])
        context = called.make_context("example", given[named:], parent)
        if isinstance(called, click.Group):  # the words of one of its commands
            continue
        assert not context.args


@pytest.mark.parametrize(("name", "most"), [("strip-module", 22), ("convert", 55)])
def test_the_help_fits_a_screen(name: str, most: int, run: Run) -> None:
    """Options that few need are hidden until --help-all, and work all the same."""
    shown = run(name, "--help", env={"COLUMNS": "80"}).stdout.splitlines()
    assert len(shown) <= most and any("--help-all" in line for line in shown)
    text, everything = "".join(shown), run(name, "--help-all").stdout
    command = found([name])
    assert "--durable" not in text
    assert all(
        option in everything
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--")
    )
    assert all(f"\n{section}:" in everything for section in ("Options", "Output", "Execution"))
    assert run(name, "--help", env={"COLUMNS": "80"}).stdout.splitlines() == shown


PAGE = """# Rules

A rule with a long line: aaaaaaaaaa bbbbbbbbbb cccccccccc dddddddddd eeeeeeeeee
goes on here.
- an item of a list: ffffffffff gggggggggg hhhhhhhhhh iiiiiiiiii
- another

| written | means |
|---|---|
| `{p:q\\|k\\|v}` | labels |

It is used so:

```sh
ckptkit convert aaaaaaaaaaaaaaaaaaaa bbbbbbbbbbbbbbbbbbbbbbbb ccccccccccc

ckptkit help
```
<!-- hidden -->
The end.
"""


NARROW = """# Rules

A rule with a long line: aaaaaaaaaa
bbbbbbbbbb cccccccccc dddddddddd
eeeeeeeeee goes on here.
- an item of a list: ffffffffff
  gggggggggg hhhhhhhhhh iiiiiiiiii
- another
"""
REST = """
written      means
`{p:q|k|v}`  labels

It is used so:

    ckptkit convert aaaaaaaaaaaaaaaaaaaa bbbbbbbbbbbbbbbbbbbbbbbb ccccccccccc

    ckptkit help

The end."""


def test_pages_in_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables have their bars, code is indented and never wrapped, prose is wrapped at words."""
    Path("rules.md").write_text(PAGE)
    monkeypatch.setattr(help, "FOLDER", tmp_path)
    head = PAGE.partition("\n| written")[0]
    assert "\n".join(help.page("rules")) == head + REST
    monkeypatch.setattr(render, "terminal_width", lambda: 40)
    assert "\n".join(help.page("rules")) == NARROW + REST


@pytest.mark.parametrize("topic", sorted(help.topics()))
def test_no_page_shows_marks_of_tables_or_fences(topic: str) -> None:
    lines = list(help.page(topic))
    marks = "|", "```", "<!--", "!["
    assert not [line for line in lines if line.startswith(marks) or r"\|" in line]
    assert lines[-1]


@pytest.mark.parametrize("width", [60, 80, 110, 200])
def test_no_word_of_a_page_is_broken_or_cut(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All words stand in the page itself, and prose fits."""
    monkeypatch.setattr(render, "terminal_width", lambda: width)
    for topic in help.topics():
        source = (help.FOLDER / f"{topic}.md").read_text().replace(r"\|", "|")
        words = {word.rstrip(",:") for word in re.split(r"[\s|]+", source)}
        lines = list(help.page(topic))
        told = {word.rstrip(",:") for line in lines for word in re.split(r"[\s|]+", line)}
        assert told - words <= {"the", "same", "in", "all", "rows"}, topic
        wide = [line for line in lines if len(line) > width and not line.startswith("    ")]
        assert all(len(max(line.split(), key=len)) > width // 2 for line in wide), topic


@pytest.mark.parametrize("topic", help.topics())
def test_no_row_of_a_table_is_wider_than_120_columns_in_a_pipe(topic: str) -> None:
    source = {line.strip() for line in (help.FOLDER / f"{topic}.md").read_text().splitlines()}
    rows = [line for line in help.page(topic) if line.strip() not in source]
    code = "    "
    assert max((len(line) for line in rows if not line.startswith(code)), default=0) <= help.PIPED


def test_the_man_page_contains_the_commands_of_groups_and_is_well_formed() -> None:
    page = "\n".join(help.manual())
    for title in ("delta make", "lora merge", "convert", "batch"):
        assert f".SS ckptkit {title} " in page
    assert r"\fB\-\-encoding [xor|overwrite|auto]\fR" in page
    if shutil.which("groff") is not None:
        checked = subprocess.run(
            ["groff", "-man", "-Tutf8", "-ww"], input=page, capture_output=True, text=True
        )
        assert checked.returncode == 0 and checked.stderr == ""
