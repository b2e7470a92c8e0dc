"""Wall time and peak memory of commands, in pairs.

This process stays small, and imports neither torch nor ckptkit: the peak memory of a child counts what its parent
held when it started. Outputs are removed before the clock starts, because on many virtual machines pages that were
never touched cost several times as much as others.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Cost(NamedTuple):
    """Of one run."""

    seconds: float
    mib: float  # peak resident memory


# A user's Python keeps compiled modules; a build machine's may be told not to, which costs a third of the start-up.
ROOT = str(Path(__file__).parents[2])
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
ENVIRONMENT["PYTHONPATH"] = ROOT  # the program that makes a ZeRO folder is one of the tests'


class Compared(NamedTuple):
    """One command beside another, over several pairs of runs."""

    seconds: float  # median
    mib: float  # largest
    ratio: float  # median over the pairs of this command's time to the other's
    best: float  # this command's best time to the other's best time


def run(command: Sequence[str], folder: Path) -> Cost:
    """One run in `folder`, after its outputs (``out*``) were removed. Exits with the command's message if it fails."""
    for old in folder.glob("out*"):
        remove(old)
    start = time.perf_counter()
    child = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.stderr is not None
    with child.stderr:
        if child.returncode:
            raise SystemExit(f"{' '.join(command)[:200]}: {child.stderr.read().decode()[-2000:]}")
    return Cost(seconds, usage.ru_maxrss / 1024)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def compare(command: Sequence[str], other: Sequence[str], folder: Path, pairs: int) -> Compared:
    """Both in turn, now one first and now the other."""
    ours, theirs = [], []
    for number in range(pairs):
        if number % 2:
            theirs.append(run(other, folder))
            ours.append(run(command, folder))
        else:
            ours.append(run(command, folder))
            theirs.append(run(other, folder))
    return Compared(
        seconds=statistics.median(cost.seconds for cost in ours),
        mib=max(cost.mib for cost in ours),
        ratio=statistics.median(a.seconds / b.seconds for a, b in zip(ours, theirs, strict=True)),
        best=min(cost.seconds for cost in ours) / min(cost.seconds for cost in theirs),
    )
