"""Interrupted at any call: nothing is left, and the exit code says so."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import COMMAND
from tests.safety.injection import ALIKE, leftovers
from tests.safety.works import WORKS, Bench, outcomes

INTERRUPTED = 130


@pytest.mark.parametrize("name", ["new", "folder", "patched", "rewritten"])
def test_DS_18_interrupted_at_every_call(name: str, small: Path, tmp_path: Path) -> None:
    """By Ctrl-C, or by who wants the process to end. At its very end that may be too late."""
    bench, found = Bench(name, small, tmp_path), []
    seen = bench.calls()
    some = [each for each in seen if each.name not in ("close", "openat") or each is seen[-1]]
    for at, call in enumerate(some):
        done, state = bench.disturbed(call, f"signal={('INT', 'TERM', 'HUP')[at % 3]}")
        ended = (done.code, done.stderr.strip())
        is_late = call is seen[-1] and ended == (0, "")
        assert ended == (INTERRUPTED, "error: interrupted") or is_late, call
        found.append(state)
    assert found[0] == "old" and found == sorted(found, key=["old", "new"].index)


def test_DS_18_twice(large: Path, tmp_path: Path) -> None:
    """The second Ctrl-C may find us tidying up: the output is whole or not there, whatever else."""
    work = WORKS["replaced"]
    expected = outcomes(work, tmp_path / "whole", large)
    folder = work.prepare(tmp_path / "twice", large)
    with subprocess.Popen(
        [*COMMAND, *work.arguments], cwd=folder, env=ALIKE, stderr=subprocess.PIPE
    ) as child:
        while child.poll() is None and not leftovers(folder):
            time.sleep(0.001)
        child.send_signal(signal.SIGINT)
        time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        assert child.stderr is not None
        said = child.stderr.read()
    assert child.returncode in (0, INTERRUPTED) and b"Traceback" not in said
    expected.check(folder, killed=True)
