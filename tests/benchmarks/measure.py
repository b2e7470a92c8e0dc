"""Time and peak memory of commands that take turns.

This process stays small while it measures, and imports neither torch nor ckptkit nor matplotlib:
the peak memory of a child counts what its parent held when it started. Outputs are removed before
the clock starts, because on many virtual machines pages that were never touched cost several times
as much as others.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

DIGITS = 4  # that a figure has after its point: 0.1 ms, 100 bytes


class Cost(NamedTuple):
    """Of one run."""

    seconds: float  # from start to end
    cpu: float  # seconds of processor, of all threads
    mib: float  # peak resident memory; the pages of files that are mapped count


class Contestant(NamedTuple):
    """A command that takes part: `fresh` is a copy of `source` that it changes, made before the
    clock starts; it runs in every `every`th round."""

    name: str
    command: Sequence[str]
    source: str = ""
    fresh: str = ""
    every: int = 1


class Taken(NamedTuple):
    """The measures of one contestant, None for rounds without it; and the reason of its failure."""

    costs: list[Cost | None]
    failed: str = ""


class FailedError(Exception):
    """A command failed."""


# A user's Python keeps compiled modules; a build machine's may be told not to, which costs a third
# of the start-up.
ROOT = str(Path(__file__).parents[2])
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
}
ENVIRONMENT["PYTHONPATH"] = ROOT  # the program that makes a ZeRO folder is one of the tests'


_TOOK = re.compile(rb"^took ([0-9.e-]+) ([0-9.e-]+)$", re.MULTILINE)


def run(command: Sequence[str], folder: Path) -> Cost:
    """One run in `folder`. Raises FailedError with the end of what the command said.

    A program that prints ``took SECONDS CPU`` on standard error has measured its own part, without
    its start and imports.
    """
    start = time.perf_counter()
    child = subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    assert child.stderr is not None
    with child.stderr:
        said = child.stderr.read()
    _, status, usage = os.wait4(child.pid, 0)
    seconds = time.perf_counter() - start
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode and (said or child.returncode != 1):  # 1 alone: files differ
        raise FailedError(
            said.decode(errors="replace").strip()[-2000:] or f"exit code {child.returncode}"
        )
    cpu = usage.ru_utime + usage.ru_stime
    if took := _TOOK.search(said):
        seconds, cpu = float(took[1]), float(took[2])
    return Cost(seconds, cpu, usage.ru_maxrss / 1024)


def remove(path: Path) -> None:
    """Remove a file, or a folder with all that is in it."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def copy(source: str, destination: str) -> list[str]:
    """The command that copies a file or a folder, bytes and not references to them."""
    return ["cp", "-r", "--reflink=never", source, destination]


def ready(contestant: Contestant, folder: Path) -> None:
    """Remove every output (``out*``), and give the contestant its fresh copy.

    What is still to be written to disks is written before the clock starts.
    """
    for old in folder.glob("out*"):
        remove(old)
    if contestant.fresh:
        run(copy(contestant.source, contestant.fresh), folder)
    os.sync()


def take_turns(contestants: Sequence[Contestant], folder: Path, rounds: int) -> dict[str, Taken]:
    """Measure all contestants in turns. Every other round runs in reverse order; one that fails
    runs no more.
    """
    taken = {each.name: Taken([]) for each in contestants}
    for number in range(rounds):
        for each in contestants if number % 2 == 0 else reversed(contestants):
            costs, failed = taken[each.name]
            plays = not failed and number % each.every == 0
            try:
                costs.append(_once(each, folder) if plays else None)
            except FailedError as error:
                taken[each.name] = Taken([*costs, None], str(error))
    return taken


def _once(contestant: Contestant, folder: Path) -> Cost:
    ready(contestant, folder)
    cost = run(contestant.command, folder)
    return Cost(*(round(each, DIGITS) for each in cost))  # shown and kept alike
