"""Killed at any call and at any moment: the output is the old one or the new one, and the next run
tidies up."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import COMMAND
from tests.safety.injection import ALIKE, CHANGES, leftovers
from tests.safety.works import WORKS, Bench, Work, outcomes

# To be killed at, once the others were tried.
LETHAL = tuple(name for name in CHANGES if name not in ("openat", "close"))
KILLS = int(os.environ.get("CKPTKIT_KILLS", "20"))  # at random moments, of all works together


@pytest.mark.parametrize("name", WORKS)
def test_DS_01_DS_22_killed_at_every_call(name: str, small: Path, tmp_path: Path) -> None:
    """At each write, rename, fsync, close and whatever else changes a file."""
    bench, found = Bench(name, small, tmp_path), []
    for call in bench.calls(CHANGES if name in ("new", "patched") else LETHAL):
        done, state = bench.disturbed(call, "signal=KILL", killed=True)
        assert done.code == -signal.SIGKILL, call
        found.append(state)
    assert found[0] == "old" and {"old", "new"} == set(found) and len(found) > 4
    assert found == sorted(found, key=["old", "new"].index)


@pytest.mark.parametrize("name", WORKS)
def test_DS_02_killed_at_any_moment(name: str, large: Path, tmp_path: Path) -> None:
    work, chance = WORKS[name], random.Random(KILLS)
    if name == "folder":
        work = Work([*work.arguments[:-2], "5MB", "--durable"], work.output)
    start = time.monotonic()
    expected = outcomes(work, tmp_path / "whole", large)
    usual = time.monotonic() - start
    for at in range(-(-KILLS // len(WORKS))):
        folder = work.prepare(tmp_path / str(at), large)
        kill(work, folder, usual, chance)
        expected.check(folder, killed=True)
        empty(folder)


def kill(work: Work, folder: Path, usual: float, chance: random.Random) -> int:
    """End the command while it writes: from when its temporary appears, or anywhere after its first
    third. Its code."""
    with subprocess.Popen(
        [*COMMAND, *work.arguments], cwd=folder, env=ALIKE, stdout=subprocess.DEVNULL
    ) as child:
        if chance.random() < 0.5:
            while child.poll() is None and not leftovers(folder):
                time.sleep(0.001)
            time.sleep(chance.random() ** 2 * 0.3 * usual)
        else:
            time.sleep(usual * (0.3 + 0.6 * chance.random()))
        child.kill()
    assert child.returncode in (0, -signal.SIGKILL)
    return child.returncode


def empty(folder: Path) -> None:
    """Give back the room that the files of a folder take."""
    for path in folder.rglob("*"):
        if path.is_file():
            path.unlink()
