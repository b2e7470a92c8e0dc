"""What the articles ask beside the rows' commands, each by its row's number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ckptkit
from ckptkit.core.errors import CkptkitError
from ckptkit.trainer import log, loop, parallel
from ckptkit.trainer.config import Config, RunFiles

from ..conftest import Run
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
    for batch in torch.randn(100, 5).split(30):
        print(f"Outside: input {list(batch.shape)} output {list(model(batch).shape)}")
    whole = ["In Model: input [15, 5] output [15, 2]"] * 2 + [
        "Outside: input [30, 5] output [30, 2]"
    ]
    last = ["In Model: input [5, 5] output [5, 2]"] * 2 + ["Outside: input [10, 5] output [10, 2]"]
    assert capsys.readouterr().out.splitlines() == whole * 3 + last


def test_S04_the_size_of_a_model_is_in_the_report(tmp_path: Path) -> None:
    """What modelsize prints: 4 bytes for each parameter, before any step."""
    config = Config(data="random", width=0.25, devices=("cpu",), epochs=1, batch_size=256)
    files = RunFiles(memory_report=tmp_path / "memory.jsonl")
    loop.train(config, tmp_path / "run.pth", files, log=loop.silent)
    row = json.loads((tmp_path / "memory.jsonl").read_text().splitlines()[0])
    weights = ckptkit.open(tmp_path / "run.pth").weights
    assert row["parameters"] == 4 * sum(each.numel for each in weights.values())
    assert log.total_bytes(nn.Linear(3, 2).parameters()) == 4 * (3 * 2 + 2)


def test_S09_dim_and_output_device_reach_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        nn.DataParallel,
        "__init__",
        lambda self, *rest: given.append(rest) or nn.Module.__init__(self),
    )
    devices = torch.device("cuda:0"), torch.device("cuda:1")
    model = nn.Linear(2, 2)
    parallel.Replicated(model, devices, output_device="cuda:1", dim=1)
    parallel.Replicated(model, devices)
    assert given == [
        (model, list(devices), torch.device("cuda:1"), 1),
        (model, list(devices), None, 0),
    ]


def test_S09_an_output_device_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    chosen = parallel.choose(Config(parallel="dp", output_device="cuda:1"))
    assert [str(each) for each in chosen] == ["cuda:0", "cuda:1"]
    with pytest.raises(CkptkitError, match="this machine has no device cuda:2"):
        parallel.choose(Config(parallel="dp", output_device="cuda:2"))


def test_S17_time_first_outputs_are_joined_along_dim_1() -> None:
    """[65, 32, 5530] in halves: along dim 0 [130, 16, 5530], along dim 1 what it was."""

    class TimeFirst(nn.Module):
        def forward(self, columns: Tensor) -> Tensor:
            return columns.permute(2, 0, 1).expand(-1, -1, 5530)

    columns = torch.zeros(32, 1, 65)
    assert parallel.Replicated(TimeFirst(), HALVES)(columns).shape == (130, 16, 5530)

    class Reader(nn.Module):
        def forward(self, columns: Tensor) -> Tensor:
            return columns.expand(-1, -1, 5530)

    wrapped = parallel.Replicated(Reader(), HALVES, dim=1)
    assert wrapped(columns.permute(2, 0, 1)).shape == (65, 32, 5530)


class OneGpu:
    """The properties of a GPU."""

    name, total_memory, uuid = "GeForce GTX 1080 Ti", 11 << 30, "5da6e67e-fd5a-88fb"


def test_S20_env_shows_the_uuids_of_gpus(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """As nvidia-smi -L."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: OneGpu)
    found = json.loads(run("env", "--json").stdout)["devices"]
    assert found["cuda:0"]["uuid"] == "5da6e67e-fd5a-88fb"
    assert found["cpu"]["uuid"] is None
    assert "5da6e67e-fd5a-88fb" in run("env").stdout


@pytest.mark.filterwarnings("ignore:Named tensors:UserWarning")
def test_S21_named_tensors_are_gone_or_not_saved(tmp_path: Path) -> None:
    """The third article names the dims of images. Such tensors could never be saved."""
    try:
        images: Any = torch.randn(2, 3, 4, 4, names=("N", "C", "H", "W"))  # type: ignore[call-overload]
    except TypeError:
        assert not hasattr(torch.zeros(1), "align_to")  # torch 2.13
        return
    assert images.align_to("N", "H", "W", "C").shape == (2, 4, 4, 3)
    with pytest.raises(RuntimeError, match=r"[Nn]amed tensors"):
        torch.save({"images": images}, tmp_path / "named.pth")


@pytest.fixture
def float32_by_default() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def test_S21_the_default_type_decides_what_is_saved(
    tmp_path: Path, float32_by_default: None
) -> None:
    for dtype, name in ((torch.float64, "float64"), (torch.float32, "float32")):
        torch.set_default_dtype(dtype)
        torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "net.pth")
        weights = ckptkit.open(tmp_path / "net.pth").weights
        assert {str(each.dtype) for each in weights.values()} == {name}


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
    assert "DistributedDataParallel" in (nn.DataParallel.__doc__ or "")
    assert "recommended" in (nn.DataParallel.__doc__ or "")
    assert "ddp" in Config.__dataclass_fields__["parallel"].metadata["help"].split("torch ")[1]
