"""The conformance suite over folders of stages 2 and 3, of two and three ranks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from tests.formats.conformance import FormatConformance, State
from tests.formats.deepspeed.making import Run
from tests.formats.test_conformance import TYPED, zip_boundaries


class TestStage2(FormatConformance):
    name = "deepspeed"
    views = False
    dtypes = [name for name in TYPED if not name.startswith("q")]
    stage, ranks = 2, 2

    def make(self, folder: Path, state: State) -> Path:
        """Single precision is trained, everything else is frozen."""
        trained = {name: tensor for name, tensor in state.items() if tensor.dtype == torch.float32}
        frozen = {name: tensor for name, tensor in state.items() if name not in trained}
        self.whole = trained | frozen
        return Run(trained, ranks=self.ranks, stage=self.stage, frozen=frozen).save(folder / "made")

    def oracle(self, path: Path) -> State:
        return self.whole

    def boundaries(self, data: bytes) -> Iterable[int]:
        return zip_boundaries(data)


class TestStage3(TestStage2):
    stage, ranks = 3, 3
