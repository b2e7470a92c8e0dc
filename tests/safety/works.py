"""The work of the data safety tests on a folder, and the states that it may be in afterwards."""

from __future__ import annotations

import shutil
import subprocess
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

import ckptkit
from ckptkit.api import convert
from ckptkit.publish import in_place
from tests.conftest import COMMAND, ENVIRONMENT, Done
from tests.safety.injection import (
    CHANGES,
    Call,
    calls,
    injected,
    leftovers,
    needs_strace,
    snapshot,
)

OLD = b"what was there before"


@dataclass(frozen=True)
class Work:
    """A command that makes `output` of run.pth, which may be that file itself, and whether
    something is there."""

    arguments: Sequence[str]
    output: str = "out.pth"
    replaces: bool = False

    @property
    def in_place(self) -> bool:
        return self.output == "run.pth"

    def prepare(self, folder: Path, source: Path) -> Path:
        """Make the folder in which the command runs, with a copy of `source`."""
        folder.mkdir(parents=True)
        shutil.copy(source, folder / "run.pth")
        if self.replaces and not self.in_place:
            (folder / self.output).write_bytes(OLD)
        return folder

    def parts(self, folder: Path) -> dict[str, bytes]:
        """The output as it is in `folder`, none if it is not there."""
        return {
            name: data
            for name, data in snapshot(folder).items()
            if name.split("/")[0] == self.output
        }

    def again(self, folder: Path) -> None:
        """The next command that writes the same output, in this process."""
        if self.in_place:
            done = convert(
                folder / "run.pth", None, partial(ckptkit.add_prefix, prefix="x."), in_place=True
            )
        elif self.output == "out":
            done = convert(folder / "run.pth", folder / self.output, format="sharded")
        else:
            done = convert(folder / "run.pth", folder / self.output, force=True)
        done.checkpoint.close()


def make_source(path: Path, numel: int = 1 << 14, count: int = 2) -> Path:
    """A checkpoint whose keys begin with ``module.``: `count` weights of `numel` float32, and as
    many short biases."""
    weights = {f"module.{i}.weight": torch.full((numel,), float(i)) for i in range(count)}
    biases = {f"module.{i}.bias": torch.full((8,), float(i)) for i in range(count)}
    torch.save({"model": OrderedDict({**weights, **biases}), "epoch": 3}, path)
    return path


WORKS = {
    "new": Work(["strip-module", "run.pth", "out.pth"]),
    "durable": Work(["strip-module", "run.pth", "out.pth", "--durable", "--verify"]),
    "replaced": Work(["strip-module", "run.pth", "out.pth", "--force"], replaces=True),
    "folder": Work(
        ["convert", "run.pth", "out", "--format", "sharded", "--shard-size", "60kB", "--durable"],
        "out",
    ),
    "patched": Work(["strip-module", "run.pth", "--in-place"], "run.pth", replaces=True),
    "rewritten": Work(
        ["convert", "run.pth", "--in-place", "--strip", "module."], "run.pth", replaces=True
    ),
}


@dataclass(frozen=True)
class Outcomes:
    """The states of a folder: before and after a command, each a snapshot."""

    work: Work
    before: dict[str, bytes]
    after: dict[str, bytes]

    def check(self, folder: Path, killed: bool) -> str:
        """That the output is the old one or the new one, whole, and the source untouched; which of
        them it is.

        A killed run may leave one temporary, which the next one removes, or the journal of an edit
        in place, which the next edit uses.
        """
        left = leftovers(folder)
        journals = [path for path in folder.iterdir() if path.name.endswith(".ckptkit-journal")]
        assert len(left) + len(journals) <= killed, (left, journals)
        if journals:
            in_place.check_journals(str(folder / "run.pth"), undo=True)
            assert not journals[0].exists()
        found = {
            name: data for name, data in snapshot(folder).items() if name.split("/")[0] not in left
        }
        assert found in (self.before, self.after), sorted(found)
        state = "old" if found == self.before else "new"
        if left:
            self.work.again(folder)
            assert leftovers(folder) == []
        return state


def outcomes(work: Work, folder: Path, source: Path) -> Outcomes:
    """Return the states before and after the command when it is not disturbed."""
    before = snapshot(work.prepare(folder, source))
    command = [*COMMAND, *work.arguments]
    done = subprocess.run(
        command, cwd=folder, env=ENVIRONMENT, capture_output=True, encoding="utf-8"
    )
    assert done.returncode == 0, done.stderr
    return Outcomes(work, before, snapshot(folder))


class Bench:
    """A work that is watched, and then disturbed at its calls, in a folder of its own each time."""

    def __init__(self, name: str, source: Path, place: Path, *more: str) -> None:
        needs_strace()
        work = WORKS[name]
        self.work = replace(work, arguments=[*work.arguments, *more])
        self.source, self.place, self.watched = source, place, place / "watched"
        self.expected = outcomes(self.work, place / "whole", source)

    def calls(self, names: Sequence[str] = CHANGES) -> list[Call]:
        return calls(self.work.arguments, self.work.prepare(self.watched, self.source), names)

    def disturbed(self, call: Call, what: str, killed: bool = False) -> tuple[Done, str]:
        """Inject `what` at a call. Return how the command ended, and which output is there."""
        folder = self.work.prepare(self.place / f"{call.name}{call.number}", self.source)
        done = injected(self.work.arguments, folder, call, what)
        return done, self.expected.check(folder, killed)
