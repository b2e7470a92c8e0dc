"""Every command explains itself: what it does, an example that parses, every option."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import click
import pytest

from ckptkit.cli import COMMANDS, batch, main


def commands() -> list[list[str]]:
    return [[name] for name in COMMANDS] + [["batch", name] for name in batch.COMMANDS]


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
def test_its_examples_parse(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parse each example, without its files; redirections belong to the shell."""
    monkeypatch.chdir(tmp_path)
    for line in examples(found(words)):
        if not line.startswith("ckptkit "):
            assert "ckptkit " in line  # a way to call it
            continue
        for name in re.findall(r"--map (\S+\.json)", line):
            (tmp_path / name).write_text(json.dumps({"a": "b"}))
        given = shlex.split(re.split(r" [|>]", line)[0])[1:]
        assert given[: len(words)] == words
        if "..." in given:  # of batch: any options
            continue
        named = 2 if given[0] == "batch" else 1
        parent = click.Context(main, **main.context_settings)
        context = found(given[:named]).make_context("example", given[named:], parent)
        assert not context.args


def test_the_whole() -> None:
    said = main.get_help(click.Context(main))
    for name in COMMANDS:
        assert re.search(rf"^  {name}  +\S", said, re.MULTILINE), name
    assert "Example: ckptkit inspect run.pth" in said and "--version" in said
