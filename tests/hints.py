"""Commands in messages, and a copy of a folder to run each of them in."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple

from click import Context
from click.testing import CliRunner

from ckptkit.cli import main

# A command takes the text between backticks, a whole line, or the rest of a line after a colon.
_QUOTED = re.compile(r"`(ckptkit [^`]+)`")
_LINE = re.compile(r"(?:^\s*|: )(ckptkit ([a-z-]+).*)$", re.MULTILINE)  # or prose about ckptkit
KNOWN = frozenset(main.list_commands(Context(main)))
_BYTES = re.compile(r"\$'((?:[^'\\]|\\x[0-9a-f]{2})*)'")  # as `core.text.shell_word` quotes them


class Ran(NamedTuple):
    """A command that was run in ``folder``: its exit code, its output, and the paths it made."""

    words: list[str]
    code: int
    output: str
    folder: Path
    made: list[Path]

    def __str__(self) -> str:
        return f"{shlex.join(self.words)} -> {self.code}\n{self.output}"


def commands_in(text: str) -> list[list[str]]:
    """Return the ckptkit commands of `text` as lists of words, each command once."""
    quoted = [match[1] for match in _QUOTED.finditer(text)]
    lines = [match[1] for match in _LINE.finditer(text) if match[2] in KNOWN]
    return [_words(command) for command in dict.fromkeys([*quoted, *lines])]


def _words(command: str) -> list[str]:
    return shlex.split(_BYTES.sub(_plain, command))


def _plain(match: re.Match[str]) -> str:
    data = re.sub(r"\\x(..)", lambda byte: chr(int(byte[1], 16)), match[1]).encode("latin-1")
    return shlex.quote(os.fsdecode(data))


def run_each(commands: Iterable[list[str]], folder: Path, scratch: Path) -> Iterator[Ran]:
    """Run each command, with the words after ``ckptkit``, in a copy of `folder` of its own.

    The copies are made below `scratch`, which is outside `folder`; each is removed before the next
    is made. Raises what a command raises unforeseen.
    """
    for words in commands:
        copy = scratch / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy, symlinks=True)
        before = {*copy.rglob("*")}
        with chdir(copy):
            done = CliRunner().invoke(main, words[1:])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        new = sorted({*copy.rglob("*")} - before)
        made = [path for path in new if path.parent not in new]
        yield Ran(words, done.exit_code, done.output, copy, made)
