"""The README as a program: its blocks, the commands in them, and a folder to run these in.

- A ``console`` block holds commands after ``$`` and their output. All of them run in order, in one copy of the
  checkout's fixtures, standard error included, 200 columns wide; what an earlier one writes, a later one may use. A
  line that ends in a backslash goes on; ``$?`` is the exit code of the command before.
- A line ``...`` stands for any lines, ``...`` in a line for any characters.
- ``<!-- setup``, commands, ``-->`` run at their place and are not shown: they make what the next block needs.
- ``<!-- not run: REASON -->`` above a block leaves it out; Python is checked for types all the same.
- The ``python`` blocks are one program.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

from click.testing import CliRunner

from ckptkit.cli import main
from tests import forked
from tests.conftest import ENVIRONMENT, ROOT

README = ROOT / "README.md"
COLUMNS = "200"
# Commands that need a shell. These two do: a pipe gets their notes before their lines.
_SHELL = re.compile(r"[|<>;&$`*?~{\[\n]|^ckptkit (?:batch|digest)")
_QUOTED = re.compile(r"'[^']*'|\s# .*")  # and comments
_PYTHON = re.compile(r"^python -c '([^']*)'$", re.MULTILINE)

# What this file is about, in order: blocks between fences, and hidden commands.
_BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>.+?) -->\n)?```(?P<language>\w+)\n(?P<shown>.*?)^```$"
    r"|^<!-- setup\n(?P<setup>.*?)^-->$",
    re.DOTALL | re.MULTILINE,
)
_EXAMPLE = re.compile(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


class Block(NamedTuple):
    """``language`` is ``setup`` for hidden commands; ``line`` is that of the first line of
    ``text``, from 1."""

    language: str
    text: str
    line: int
    reason: str | None  # why it is not run


class Example(NamedTuple):
    """A command and the output that is shown below it: None where nothing is."""

    command: str
    shown: str | None
    line: int


def blocks(text: str, *languages: str) -> list[Block]:
    """The blocks of these languages, in order."""
    return [block for block in map(_block, _BLOCK.finditer(text)) if block.language in languages]


def _block(match: re.Match[str]) -> Block:
    group = "setup" if match["setup"] is not None else "shown"
    line = match.string.count("\n", 0, match.start(group)) + 1
    return Block(match["language"] or "setup", match[group], line, match["reason"])


def examples(text: str) -> Iterator[Example]:
    """All commands that are run, in order."""
    for block in blocks(text, "console", "setup"):
        if block.reason is None:
            yield from (
                [Example(block.text, None, block.line)]
                if block.language == "setup"
                else _examples(block)
            )


def _examples(block: Block) -> Iterator[Example]:
    for match in _EXAMPLE.finditer(block.text):
        yield Example(match[1], match[2], block.line + block.text.count("\n", 0, match.start()))


def program(text: str, run: bool) -> str:
    """The ``python`` blocks at their lines; with `run` without those that are not to be run."""
    lines = [""] * (text.count("\n") + 1)
    for block in blocks(text, "python"):
        if block.reason is None or not run:
            shown = block.text.splitlines()
            lines[block.line - 1 : block.line - 1 + len(shown)] = shown
    return "\n".join(lines) + "\n"


def pattern(shown: str) -> str:
    """A regular expression for output as the README shows it."""
    return "".join(map(_line_pattern, shown.splitlines())) + r"\n*"


def _line_pattern(line: str) -> str:
    if line == "...":
        return r"(?:.*\n)*"
    return re.escape(line).replace(r"\.\.\.", ".*") + r"[ \t]*\n"


def is_shown(shown: str, said: str) -> bool:
    return re.fullmatch(pattern(shown), said) is not None


def sandbox(folder: Path) -> Path:
    """A folder with the fixtures, and with ckptkit as a command."""
    shutil.copytree(ROOT / "fixtures", folder / "fixtures")
    (folder / "bin").mkdir()
    for name, words in (("ckptkit", "-m ckptkit"), ("python", "")):
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
        script.chmod(0o755)
    return folder


class Session:
    """Commands one after the other, as a person types them. Each has a shell of its own, with the
    last exit code; ckptkit on its own runs in this process, and Python in a fork of one that has
    imported torch, which saves their start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.code = 0

    def run(self, command: str) -> str:
        """Return its output, standard error included."""
        if script := _PYTHON.search(command):
            before = self._shell(command[: script.start()])
            done = forked.program(script[1], cwd=self.folder)
            self.code = done.returncode
            after = command[script.end() :].strip()
            return before + done.output + (self.run(after) if after and not self.code else "")
        one = command.replace("\\\n", " ")
        if one.startswith("ckptkit ") and not _SHELL.search(_QUOTED.sub("", one)):
            environment = {"TMPDIR": str(self.folder), "COLUMNS": COLUMNS, "CKPTKIT_HINTS": ""}
            with chdir(self.folder), patch.dict(os.environ, environment):
                called = CliRunner().invoke(main, shlex.split(one, comments=True)[1:])
            if not isinstance(called.exception, (SystemExit, type(None))):
                raise called.exception
            self.code = called.exit_code
            return called.output
        return self._shell(command)

    def _shell(self, command: str) -> str:
        done = shell(f"(exit {self.code})\n{command}", self.folder, strict=False)
        self.code = done.returncode
        return done.stdout


def shell(command: str, folder: Path, strict: bool = True) -> subprocess.CompletedProcess[str]:
    """Run in bash; `strict`: stop at the first failure."""
    path = f"{folder}/bin{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-uo", "pipefail", *["-e"] * strict, "-c", command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", cwd=folder,
        env={**ENVIRONMENT, "PATH": path, "TMPDIR": str(folder), "COLUMNS": COLUMNS}, timeout=120,
    )  # fmt: skip


def words(command: str, folder: Path) -> list[str]:
    """The arguments that bash gives to ckptkit in a command line that calls it once."""
    calls = shell(f"ckptkit() {{ printf '%s\\0' call \"$@\"; }}; {command}", folder)
    call, *found, end = calls.stdout.split("\0")
    assert (call, end) == ("call", "") and "call" not in found and not calls.returncode, command
    return found


def refreshed(text: str, run: Callable[[str], str]) -> str:
    """The README with today's output where it is another; `run` gives what a command prints."""

    def renewed(match: re.Match[str]) -> str:
        block = _block(match)
        if block.reason is not None or block.language not in ("console", "setup"):
            return match[0]
        if block.language == "setup":
            run(block.text)
            return match[0]
        return match[0].replace(
            block.text, "".join(_again(example, run) for example in _examples(block))
        )

    return _BLOCK.sub(renewed, text)


def _again(example: Example, run: Callable[[str], str]) -> str:
    said = run(example.command)
    shown = example.shown or ""
    return f"$ {example.command}\n{shown if is_shown(shown, said) else said}"
