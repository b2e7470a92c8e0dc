"""browse: where it does not run, and in a terminal of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Ckptkit
from tests.conftest import COMMAND, ENVIRONMENT


def test_it_needs_a_terminal(ckptkit: Ckptkit, run_pth: Path) -> None:
    result = ckptkit("browse", run_pth, code=2)
    assert (
        "needs a terminal" in result.stderr
        and f"`ckptkit inspect --tree {run_pth}`" in result.stderr
    )


def test_it_needs_textual(ckptkit: Ckptkit, run_pth: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ckptkit.cli.render.is_terminal", lambda stream: True)
    for name in [
        name
        for name in sys.modules
        if name.split(".")[0] == "textual" or name == "ckptkit.views.browser"
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "textual", None)
    assert "pip install textual" in ckptkit("browse", run_pth, code=2).stderr


def test_a_file_that_cannot_be_read(ckptkit: Ckptkit, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("textual", reason="textual, which browse is made with, is not installed")
    monkeypatch.setattr("ckptkit.cli.render.is_terminal", lambda stream: True)
    Path("bad.pth").write_bytes(b"no checkpoint")
    assert ckptkit("browse bad.pth").exit_code == 3


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_in_a_terminal(run_pth: Path) -> None:
    """Down, and out with the command."""
    pytest.importorskip("textual", reason="textual, which browse is made with, is not installed")
    import pty

    ours, theirs = pty.openpty()
    environment = {**ENVIRONMENT, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(
        [*COMMAND, "browse", run_pth], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    seen, keys, quiet = b"", [b"\x1b[B", b"c"], 0
    try:
        for _ in range(600):
            more = _read(ours)
            seen, quiet = seen + more, 0 if more else quiet + 1
            if keys and quiet > 5 and b"optimizer" in seen:  # all that was asked for is drawn
                os.write(ours, keys.pop(0))
                quiet = 0
            if process.poll() is not None:
                break
        while more := _read(ours):
            seen += more
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert process.returncode == 0, seen[-500:]
    assert f"ckptkit inspect {run_pth} --tree --keys 'model.module.*'" in seen.decode(
        errors="replace"
    ).replace("\r\n", "")


def _read(terminal: int) -> bytes:
    from select import select

    if not select([terminal], [], [], 0.1)[0]:
        return b""
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # nobody is at the other end any more
        return b""
