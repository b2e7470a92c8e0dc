"""An option has one meaning: the same type and the same first words in every command."""

from __future__ import annotations

from collections import defaultdict

import click
import pytest

from ckptkit.cli import main

ELSEWHERE = {"train"}  # a program of its own
# Words of the help that are equal in all commands; 3 of other options.
WORDS = {
    "--all": 2,
    "--arg": 2,
    "--config": 2,
    "--force": 1,
    "--output": 2,
    "--prefix": 2,
    "--quiet": 2,
    "--strict": 1,
}


def by_name() -> dict[str, list[tuple[str, click.Option]]]:
    """Return the options by name, each with its command."""
    found: defaultdict[str, list[tuple[str, click.Option]]] = defaultdict(list)
    context = click.Context(main)
    for name in main.list_commands(context):
        command = main.get_command(context, name)
        assert command is not None
        for parameter in command.params if name not in ELSEWHERE else ():
            if isinstance(parameter, click.Option):
                for option in parameter.opts[:1]:
                    found[option].append((name, parameter))
    return found


SHARED = {name: options for name, options in by_name().items() if len(options) > 1}


def test_the_options_that_many_commands_have_are_among_them() -> None:
    assert {"--key", "--values", "--all", "--prefix", "--device", "--force", "--json"} <= {*SHARED}
    assert len(SHARED["--key"]) > 10 and {"--strip", "--add"} <= {*by_name()}


@pytest.mark.parametrize("name", SHARED)
def test_one_meaning(name: str) -> None:
    read = click.types.FuncParamType  # a text that is read at once
    kinds = {
        ("text" if isinstance(option.type, read) else option.type.name, option.is_flag)
        for _, option in SHARED[name]
    }
    assert len(kinds) == 1, [command for command, _ in SHARED[name]]
    texts = [(option.help or "").replace(",", "").split() for _, option in SHARED[name]]
    assert len({tuple(words[: WORDS.get(name, 3)]) for words in texts}) == 1, texts
