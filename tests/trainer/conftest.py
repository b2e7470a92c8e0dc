"""Shared by the tests of the trainer: runs before their first epoch, replicas on one device."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from ckptkit.trainer import parallel
from ckptkit.trainer.config import Config
from ckptkit.trainer.run import Run, prepare
from tests.conftest import ROOT

Prepare = Callable[..., Run]
TEXT = (ROOT / "ckptkit/help/trainer.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| (S\d\d) \| .* \| `(.*)` \|$", TEXT, re.MULTILINE))  # of its table


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


@pytest.fixture
def prepared() -> Iterator[Prepare]:
    """``prepared(model="cnn")``: a small run on the CPU and on noise, unless said otherwise."""
    with ExitStack() as stack:

        def make(**options: Any) -> Run:
            config = Config(**{"data": "random", "width": 0.5, "devices": ("cpu",), **options})
            return prepare(config, stack.enter_context(parallel.group(config)))

        yield make


CPU = (torch.device("cpu"),)
HALVES = CPU * 2  # DataParallel with two devices, simulated


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Name -> gradient, all of them there."""
    found = {name: each.grad for name, each in model.named_parameters()}
    assert not [name for name, each in found.items() if each is None]
    return {name: each.clone() for name, each in found.items() if each is not None}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
