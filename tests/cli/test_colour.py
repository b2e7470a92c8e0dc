"""Color is used on terminals only, and not if NO_COLOR is set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Ckptkit
from tests.conftest import COMMAND, ENVIRONMENT

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")

CALM = {name: value for name, value in ENVIRONMENT.items() if name not in ("NO_COLOR", "TERM")}


def on_terminal(*words: object, **env: str) -> str:
    """Return what a command shows on a terminal of 200 columns."""
    import pty

    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, *map(str, words)],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**CALM, "TERM": "xterm", "COLUMNS": "200", **env},
    )  # fmt: skip
    os.close(theirs)
    said = b""
    while piece := _read(ours):
        said += piece
    os.close(ours)
    process.wait()
    return said.decode().replace("\r\n", "\n")


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:  # the other side is gone
        return b""


RED, YELLOW, CYAN = (f"\x1b[{code}m" for code in (31, 33, 36))
OFF = "\x1b[0m"


def test_diff(run_pth: Path) -> None:
    torch.save({"head": torch.ones(7)}, "b.pth")
    said = on_terminal("diff", run_pth, "b.pth")
    assert f"\n{RED}different:{OFF} 1 missing" in said
    assert f"\n{YELLOW}unexpected{OFF} (only in A): " in said
    assert f"{RED}missing{OFF} (not in A): 1 key\n  head\n" in said


def test_doctor_warnings_errors(run_pth: Path) -> None:
    said = on_terminal("doctor", run_pth)
    assert f"\n{CYAN}1. note: The weights are in its entry 'model'" in said
    assert f"\n{RED}2. error: " in said
    assert f"\n{CYAN}hint:{OFF} all keys start with" in on_terminal("inspect", run_pth)
    said = on_terminal("inspect", "nowhere.pth")
    assert said.startswith(f"{RED}error:{OFF} nowhere.pth: ")


@pytest.mark.parametrize("env", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_not_wanted(run_pth: Path, env: dict[str, str]) -> None:
    for words in (["doctor", run_pth], ["inspect", run_pth], ["inspect", "nowhere.pth"]):
        assert "\x1b" not in on_terminal(*words, **env)


def test_an_empty_no_color_says_nothing(run_pth: Path) -> None:
    assert "\x1b[" in on_terminal("doctor", run_pth, NO_COLOR="")


def test_not_in_a_pipe(run_pth: Path, ckptkit: Ckptkit) -> None:
    for words in (
        ["doctor", run_pth],
        ["diff", run_pth, run_pth],
        ["inspect", run_pth],
        ["scan", run_pth],
    ):
        assert "\x1b" not in ckptkit(*words).output
