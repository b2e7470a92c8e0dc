"""The fixtures of the manifest, for tests that run over all of them; what torch reads is the
oracle."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import formats
from fixtures.making import reading
from tests.conftest import ROOT

FOLDER = ROOT / "fixtures"
MANIFEST: dict[str, Any] = json.loads((FOLDER / "manifest.json").read_text())
ENTRIES: dict[str, Any] = MANIFEST["fixtures"]
ALL = tuple(name for name, entry in ENTRIES.items() if "objects" not in entry)
# Checkpoints with Python objects that no reader but their own classes can compare.
OBJECTS = tuple(name for name in ENTRIES if name not in ALL)
# The trainer writes a file for each wrapper, form and device. OF_GRID has each of their values.
GRID = re.compile(r"torch-zip/(none|dp|ddp)_(bare|wrapped|full)_(cpu|cuda\d)\.pth")
OF_GRID = ("none_bare_cpu", "dp_wrapped_cuda1", "ddp_full_cuda3", "dp_bare_cuda0")
NAMES = tuple(name for name in ALL if not GRID.fullmatch(name) or Path(name).stem in OF_GRID)


@dataclass(frozen=True)
class Fixture:
    """One of them: where it is, and what the manifest says of it."""

    name: str

    @property
    def path(self) -> Path:
        return FOLDER / self.name

    @property
    def facts(self) -> dict[str, Any]:
        found: dict[str, Any] = ENTRIES[self.name]["facts"]
        return found

    @property
    def is_readable(self) -> bool:
        """Return whether ckptkit has a reader for it."""
        format = formats.by_name(self.facts["format"])
        return format is not None and format.readable

    def needs_reader(self) -> Fixture:
        """Itself; skips the test where ckptkit has none."""
        if not self.is_readable:
            pytest.skip(f"{self.facts['format']} is not read yet")
        return self

    def load(self) -> Any:
        """Return the content, read by the library that made the format."""
        return reading.load(self.path)

    def state(self) -> dict[str, torch.Tensor]:
        """Its state_dict, read likewise; skips the test where there is not just one."""
        if self.facts["weights"] is None:
            pytest.skip("holds two networks")
        return reading.state_of(self.load(), self.facts["weights"])


def of_net(names: Iterable[str] = NAMES) -> list[str]:
    """Return the fixtures that hold the weights of the trained net."""
    return [name for name in names if "accuracy" in ENTRIES[name]["facts"]]
