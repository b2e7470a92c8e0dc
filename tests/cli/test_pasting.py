"""Commands in hints work when they are pasted, whatever the name of the file or folder."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from ckptkit.cli import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="names are bytes on Linux alone")

NAMES = [
    os.fsdecode(name)
    for name in (b"bad\xff\xfename.pth", b"two words.pth", b"-dash.pth", b"it's\n.pth")
]


def run(folder: Path, *words: str) -> tuple[int, str]:
    with chdir(folder):
        done = CliRunner().invoke(main, words)
    return done.exit_code, done.stdout + done.stderr


def pasted(folder: Path, command: str) -> int:
    """Run a command line as bash takes it apart."""
    shell = ["bash", "-c", f"ckptkit() {{ printf '%s\\0' \"$@\"; }}; {command}"]
    words = subprocess.run(shell, cwd=folder, capture_output=True, check=True).stdout.split(b"\0")
    return run(folder, *map(os.fsdecode, words[:-1]))[0]


def commands(text: str) -> Iterator[str]:
    """Yield the commands in the lines of an output."""
    for line in text.splitlines():
        _, found, rest = line.partition("ckptkit ")
        if found and rest.split()[0] in ("strip-module", "remap", "convert", "extract", "inspect"):
            yield f"ckptkit {rest}"


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_hints_of_a_file(name: str, tmp_path: Path) -> None:
    path = Path(name)
    with open(path, "wb") as file:
        torch.save({"model": {"module.a": torch.ones(2)}, "epoch": 3}, file)
    code, text = run(tmp_path, "inspect", "--", name)
    assert code == 0
    _, diagnosis = run(tmp_path, "doctor", "--", name)
    _, unknown = run(tmp_path, name) if not name.startswith("-") else (0, "")
    found = list(dict.fromkeys([*commands(text), *commands(diagnosis), *commands(unknown)]))
    assert len(found) >= 2 and all("\\udc" not in command for command in found)
    for command in found:
        assert pasted(tmp_path, command) == 0, command


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_hints_of_a_folder(name: str, tmp_path: Path) -> None:
    for each in (name, "x" + name):
        with open(each, "wb") as file:
            torch.save({"a": torch.ones(2)}, file)
    code, text = run(tmp_path, "strip-module", "--strict", ".", "new")
    assert code == 3
    one, _, every = text.partition("name one, e.g. ")[2].partition("; did you mean ")
    assert pasted(tmp_path, f"ckptkit inspect {one}") == 0
    assert not every
    code, text = run(tmp_path, "strip-module", ".", "new")
    assert pasted(tmp_path, text.partition("did you mean `")[2].partition("`")[0]) == 0
