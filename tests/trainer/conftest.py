"""Shared by the tests of the trainer: small runs on noise, and runs before their first epoch."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

import ckptkit
from ckptkit.cli import main
from ckptkit.trainer import gpu_checks, loop, parallel
from ckptkit.trainer.config import Config, RunFiles
from ckptkit.trainer.run import Run, prepare
from tests.conftest import ROOT, Done

Prepare = Callable[..., Run]
TEXT = (ROOT / "ckptkit/help/trainer.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| (S\d\d) \| .* \| `(.*)` \|$", TEXT, re.MULTILINE))  # of its table
CPU = (torch.device("cpu"),)
HALVES = CPU * 2  # DataParallel with two devices, simulated
SMALL = replace(gpu_checks.SMALL, devices=("cpu",))
FULL = gpu_checks.FULL
WORDS = (
    "--data",
    "random",
    "--width",
    "0.25",
    "--devices",
    "cpu",
    "--epochs",
    "1",
)  # much the same


@pytest.fixture(autouse=True)
def undisturbed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No torchrun around, and no test leaves torch stricter than it was.

    One thread: several that wait for each other on cores that others use are slower by orders of
    magnitude.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    yield
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def train(out: Path, **options: Any) -> list[str]:
    """Train a small run, whose files are among the options. Return the lines that it prints."""
    files = RunFiles.of(options)
    said: list[str] = []
    loop.train(replace(SMALL, **options), out, files, log=said.append)
    return said


def loaded(path: Path) -> Any:
    if path.is_dir():
        return ckptkit.load(path, whole=True, mmap=False)
    return torch.load(path, weights_only=True)


def trained(folder: Path, name: str = "run.pth", **options: Any) -> Any:
    """Return the content of the checkpoint of a small run."""
    train(folder / name, **options)
    return loaded(folder / name)


def invoked(*arguments: object) -> Done:
    done = CliRunner().invoke(main, ["train", *map(str, arguments)])
    return Done(done.exit_code, done.stdout, done.stderr)


@pytest.fixture
def prepared() -> Iterator[Prepare]:
    """``prepared(model="cnn")``: a small run on the CPU and on noise, unless said otherwise."""
    with ExitStack() as stack:

        def make(**options: Any) -> Run:
            config = Config(**{"data": "random", "width": 0.5, "devices": ("cpu",), **options})
            return prepare(config, stack.enter_context(parallel.group(config)))

        yield make


class Rank:
    """A process of several, which computes alone: sums of all processes go to `totals`."""

    device = torch.device("cpu")

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world
        self.totals: tuple[float, ...] = ()

    def of_rank_0(self, value: Tensor) -> Tensor:
        return value

    def all_reduce_sum(self, *values: float) -> list[float]:
        self.totals = values
        return list(values)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Name -> gradient, all of them there."""
    found = {name: each.grad for name, each in model.named_parameters()}
    assert not [name for name, each in found.items() if each is None]
    return {name: each.clone() for name, each in found.items() if each is not None}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
