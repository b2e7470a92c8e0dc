"""The README is true: its commands run, and what they print is what it shows.

A ``console`` block holds commands after ``$`` and their output; a line ``...`` stands for any lines. All of them run in
order, in a copy of the checkout's fixtures. ``python -m tests.test_readme`` puts today's output where it is another.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import ckptkit
from ckptkit.cli import COMMANDS
from tests.conftest import ENVIRONMENT, ROOT

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")


def blocks(language: str, text: str = TEXT) -> list[str]:
    """The fenced blocks of a language, without their fences."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def named(name: str) -> str:
    """The block that follows the line ``<!-- name -->``."""
    return TEXT.split(f"<!-- {name} -->\n```sh\n")[1].split("\n```")[0]


def examples(block: str) -> list[tuple[str, str]]:
    """Commands and the output that is shown below each."""
    return re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)


def sandbox(folder: Path) -> Path:
    """A folder with the fixtures, and with ckptkit as a command."""
    shutil.copytree(ROOT / "fixtures", folder / "fixtures")
    (folder / "bin").mkdir()
    script = folder / "bin/ckptkit"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m ckptkit "$@"\n')
    script.chmod(0o755)
    return folder


def shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run as in a terminal, standard error included."""
    path = f"{folder}/bin{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", cwd=folder,
        env={**ENVIRONMENT, "PATH": path, "TMPDIR": str(folder), "COLUMNS": "200"}, timeout=120,
    )  # fmt: skip


def pattern(shown: str) -> str:
    """A regular expression for output as the README shows it."""
    lines = [r"(?:.*\n)*" if line == "..." else re.escape(line) + r"[ \t]*\n" for line in shown.splitlines()]
    return "".join(lines) + r"\n*"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sandbox(tmp_path_factory.mktemp("readme"))


def test_main_job(tmp_path: Path) -> None:
    """The first command, without what sets up."""
    lines = named("main job").splitlines()
    setup = [line for line in lines if "pip install" in line]
    assert len(setup) == 1
    done = shell("\n".join(line for line in lines if line not in setup), sandbox(tmp_path))
    assert done.returncode == 0, done.stdout
    for word in ("inspect", "strip-module", "remap", "diff", "convert"):
        assert f"ckptkit {word}" in "\n".join(lines)


def test_tests_command() -> None:
    assert named("tests").splitlines()[0].endswith("pytest")


def test_examples(folder: Path) -> None:
    """In order: later ones use what earlier ones wrote."""
    found = [example for block in blocks("console") for example in examples(block)]
    assert len(found) >= 5
    for command, shown in found:
        said = shell(f"{command} || true", folder).stdout
        assert re.fullmatch(pattern(shown), said), f"$ {command}\n{said}"


def test_library(tmp_path: Path) -> None:
    """All blocks are one program."""
    program = "\n".join(blocks("python"))
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, encoding="utf-8", cwd=sandbox(tmp_path), env=ENVIRONMENT, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(blocks("python")) == 2


def test_every_command_and_public_name_is_in_it() -> None:
    for command in COMMANDS:
        assert f"ckptkit {command}" in TEXT, command
    for name in ckptkit.__all__:
        assert name.startswith("__") or re.search(rf"`[^`\n]*\b{name}\b|ckptkit\.{name}\b", TEXT), name


def test_every_field_of_inspect_json_is_documented(folder: Path) -> None:
    section = TEXT.split("## inspect --json")[1].split("\n## ")[0]
    documented = set(re.findall(r"`(\w+)`", section))
    done = shell("ckptkit inspect --json --digest fixtures/torch-zip/namespace_and_numpy.pth", folder)
    (file,) = json.loads(done.stdout)["files"]
    parts = [file, file["totals"], file["tensors"][0], file["values"][0], *file["objects"][:1]]
    assert {field for part in parts for field in part} <= documented


def test_installs_from_the_checkout() -> None:
    """The package index has another project of this name."""
    assert not re.search(r"pip3? install (?:[^.\n]* )?ckptkit", TEXT)


def refresh() -> None:
    """Put what the commands print today into the README."""
    with tempfile.TemporaryDirectory() as name:
        where = sandbox(Path(name))

        def renewed(match: re.Match[str]) -> str:
            return "```console\n" + "".join(map(run_again, examples(match[1]))) + "```"

        def run_again(example: tuple[str, str]) -> str:
            command, shown = example
            said = shell(f"{command} || true", where).stdout
            return f"$ {command}\n{shown if re.fullmatch(pattern(shown), said) else said}"

        README.write_text(re.sub(r"^```console\n(.*?)^```$", renewed, TEXT, flags=re.DOTALL | re.MULTILINE))


if __name__ == "__main__":
    refresh()
