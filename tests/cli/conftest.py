"""The command line in this process, and files that torch made."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ckptkit.cli import main

Ckptkit = Callable[..., Result]


class Terminal(StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test works in a folder of its own."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def ckptkit() -> Ckptkit:
    """``ckptkit("inspect --json", path)``: the result, its exit code, what it printed.

    The first argument is split as a shell splits it. `code` is the exit code that must come.
    """

    def invoke(words: str = "", *args: object, code: int | None = None) -> Result:
        given = [os.fspath(arg) if isinstance(arg, Path) else str(arg) for arg in args]
        result = CliRunner().invoke(main, [*shlex.split(words), *given])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        assert code in (None, result.exit_code), result.output
        return result

    return invoke


@pytest.fixture
def as_json(ckptkit: Ckptkit) -> Callable[..., Any]:
    """``as_json("inspect", path)``: what the command prints with --json, exit code 0."""

    def invoke(*args: object) -> Any:
        return json.loads(ckptkit(*args, "--json", code=0).stdout)

    return invoke


@pytest.fixture
def run_pth() -> Path:
    """A checkpoint as a training script leaves it, from a DataParallel model."""
    path = Path("run.pth")
    path.write_bytes(_trained())
    return path


@cache
def _trained() -> bytes:
    import torch

    torch.manual_seed(0)
    model = torch.nn.DataParallel(
        torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    wrapped = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "name": "näme",
    }
    with TemporaryDirectory() as folder:
        path = Path(folder, "run.pth")
        torch.save({**wrapped, "loss": float("nan")}, path)
        return path.read_bytes()
