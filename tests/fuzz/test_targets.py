"""Seeded inputs for every target: the same in each run, about a minute in all. More:
CKPTKIT_FUZZ=20."""

from __future__ import annotations

import io
import os
import pickletools
import tempfile
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.mutations import LONGEST, mutated
from tests.fuzz.oracle import Oracle
from tests.fuzz.pickles import generate
from tests.fuzz.targets import TARGETS, Target, _archive, attempt, inputs

TIMES = float(os.environ.get("CKPTKIT_FUZZ", "1"))


@pytest.mark.parametrize("name", TARGETS)
def test_2Y_RS_01_RS_02_only_our_own_errors_leave(name: str) -> None:
    """And every input takes little memory and time."""
    for data in inputs(name, 0, max(int(TIMES * TARGETS[name].count), len(TARGETS[name].seeds()))):
        try:
            attempt(TARGETS[name], data)
        except Exception as error:
            raise AssertionError(
                f"{error!r}: python -m tests.fuzz {name} --once {_kept(data)}"
            ) from error


def _kept(data: bytes) -> str:
    with tempfile.NamedTemporaryFile(prefix="ckptkit-fuzz-", delete=False) as file:
        file.write(data)
    return file.name


# The tools themselves


def test_equal_seeds_give_equal_inputs() -> None:
    first, second, other = (list(inputs("zip", seed, 60)) for seed in (1, 1, 2))
    assert first == second != other
    assert any(a != b for a, b in pairwise(first)) and max(map(len, first)) <= LONGEST


def test_changes_reach_everything() -> None:
    seeds, tokens = [bytes(64), b"123"], [b"token"]
    made = [mutated(Random(seed), seeds, tokens) for seed in range(500)]
    assert {len(each) > 64 for each in made} == {True, False} and any(
        b"token" in each for each in made
    )


@pytest.mark.parametrize("plain", [True, False])
def test_generated_pickles_are_mostly_whole(plain: bool) -> None:
    """So that what they hold is looked at, and not only that they are broken."""
    whole = 0
    for seed in range(60):
        try:
            pickletools.dis(generate(Random(seed).randbytes(300), plain=plain), out=io.StringIO())
            whole += 1
        except Exception:
            continue
    assert whole > 36


def test_plain_pickles_are_read_by_torch_and_the_oracle_sees_differences(tmp_path: Path) -> None:
    import torch

    said = []
    paths = [tmp_path / name for name in ("in.pth", "lost.pth", "changed.pth", "empty.pth")]
    torch.save({"a": torch.zeros(2), "b": 1}, paths[0])
    torch.save({"a": torch.zeros(2)}, paths[1])
    torch.save({"a": -torch.zeros(2), "b": 1}, paths[2])
    paths[3].write_bytes(b"")
    with closing(Oracle()) as oracle:
        for seed in range(40):
            path = tmp_path / f"{seed}.pth"
            path.write_bytes(_archive(generate(Random(seed).randbytes(100), plain=True)))
            said.append(oracle.compare(path, path))
        of_copies = [oracle.compare(paths[0], each).partition(" ")[0] for each in paths]
        refused = oracle.compare(paths[0], paths[3])
    assert said.count("equal") > 20 and {each.split()[0] for each in said} <= {"equal", "refused"}
    assert of_copies == ["equal", "differs", "differs", "copy"] and "copy refused" in refused


@pytest.mark.parametrize("size", [1 << 30, 0])
def test_too_much_memory_is_seen(size: int) -> None:
    target = Target(lambda data: print(end=(b"1" * size)[:0].decode()), lambda: [b""], (), 1)
    if size and not Path("/proc/self/clear_refs").exists():
        pytest.skip("this system does not say how much memory was used")
    if size:
        with pytest.raises(AssertionError, match="bytes"):
            attempt(target, b"")
    else:
        attempt(target, b"")
