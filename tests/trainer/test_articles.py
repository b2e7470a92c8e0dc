"""What the articles and the manual say about torch, each by its row's number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ckptkit
from ckptkit.trainer import parallel
from ckptkit.trainer.config import table

from .conftest import HALVES


def test_S02_the_official_demo(capsys: pytest.CaptureFixture[str]) -> None:
    """100 rows of 5 numbers in batches of 30, over two devices: the lines that torch's page shows."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(5, 2)

        def forward(self, rows: Tensor) -> Tensor:
            output: Tensor = self.fc(rows)
            print(f"In Model: input {list(rows.shape)} output {list(output.shape)}")
            return output

    model = parallel.Replicated(Model(), HALVES)
    expected = []
    for batch in torch.randn(100, 5).split(30):
        print(f"Outside: input {list(batch.shape)} output {list(model(batch).shape)}")
        half, whole = (15, 30) if len(batch) == 30 else (5, 10)
        expected += [f"In Model: input [{half}, 5] output [{half}, 2]"] * 2
        expected.append(f"Outside: input [{whole}, 5] output [{whole}, 2]")
    assert capsys.readouterr().out.splitlines() == expected


def test_S09_dim_and_output_device_reach_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        nn.DataParallel,
        "__init__",
        lambda self, *rest: given.append(rest) or nn.Module.__init__(self),
    )
    devices, model = (torch.device("cuda:0"), torch.device("cuda:1")), nn.Linear(2, 2)
    parallel.Replicated(model, devices, output_device="cuda:1", dim=1)
    parallel.Replicated(model, devices)
    assert given == [(model, [*devices], devices[1], 1), (model, [*devices], None, 0)]


def test_S17_time_first_outputs_are_joined_along_dim_1() -> None:
    """[65, 32, 5530] in halves: along dim 0 [130, 16, 5530], along dim 1 what it was."""

    class Reader(nn.Module):
        def forward(self, columns: Tensor) -> Tensor:
            """Return [time, batch, 5530] of [batch, 1, time] or [time, batch, 1]."""
            columns = columns.permute(2, 0, 1) if columns.shape[1] == 1 else columns
            return columns.expand(-1, -1, 5530)

    columns = torch.zeros(32, 1, 65)
    assert parallel.Replicated(Reader(), HALVES)(columns).shape == (130, 16, 5530)
    wrapped = parallel.Replicated(Reader(), HALVES, dim=1)
    assert wrapped(columns.permute(2, 0, 1)).shape == (65, 32, 5530)


@pytest.mark.filterwarnings("ignore:Named tensors:UserWarning")
def test_S21_named_tensors_are_gone_or_not_saved(tmp_path: Path) -> None:
    """The third article names the dims of images. Such tensors could never be saved."""
    try:
        images: Any = torch.randn(2, 3, 4, 4, names=("N", "C", "H", "W"))  # type: ignore[call-overload]
    except TypeError:
        assert not hasattr(torch.zeros(1), "align_to")  # torch 2.13
        return
    with pytest.raises(RuntimeError, match=r"[Nn]amed tensors"):
        torch.save({"images": images}, tmp_path / "named.pth")


def test_S21_the_default_type_decides_what_is_saved(tmp_path: Path) -> None:
    try:
        torch.set_default_dtype(torch.float64)
        torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "net.pth")
    finally:
        torch.set_default_dtype(torch.float32)
    weights = ckptkit.open(tmp_path / "net.pth").weights
    assert {str(each.dtype) for each in weights.values()} == {"float64"}


def test_S21_tensors_go_to_numpy_and_back() -> None:
    """The third article excepts CharTensor, int8; numpy takes it. It takes no bfloat16."""
    for dtype in (torch.float16, torch.float32, torch.float64, torch.uint8, torch.int8,
                  torch.int16, torch.int32, torch.int64, torch.bool):  # fmt: skip
        tensor = torch.tensor([0, 1, 3]).to(dtype)
        assert torch.equal(torch.from_numpy(np.array(tensor.numpy())), tensor)
    with pytest.raises(TypeError, match="BFloat16"):
        torch.zeros(1, dtype=torch.bfloat16).numpy()


def test_S25_ddp_is_what_torch_recommends() -> None:
    """Of the two, DataParallel is the one whose page says to use the other."""
    said = nn.DataParallel.__doc__ or ""
    assert "DistributedDataParallel" in said and "recommended" in said
    assert "ddp" in table()["parallel"][1].split("torch ")[1]
