"""What the articles ask, answer or leave open beside the rows' commands, each by its row's number."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.jit.frontend import FrontendError
from torch.utils.checkpoint import CheckpointError, checkpoint

import ckptkit
from ckptkit.core.errors import CkptkitError
from ckptkit.trainer import log, loop, parallel
from ckptkit.trainer.config import Config, RunFiles
from ckptkit.trainer.log import SavedBytes
from ckptkit.trainer.models import DenseNet

from ..conftest import Run
from .conftest import HALVES, same


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


class Halves(nn.Module):
    """The article's net of two halves of 11 linear layers; `way` is how checkpoint is called."""

    def __init__(self, way: str, dummy: float = 1.0, units: int = 40) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (
            nn.Sequential(*(nn.Linear(units, units) for _ in range(11))) for _ in range(2)
        )
        self.way, self.dummy = way, nn.Parameter(torch.full((1,), dummy))

    def forward(self, inputs: Tensor) -> Tensor:
        how: dict[str, Any] = {"use_reentrant": self.way != "today"}
        first, second = self.first, self.second
        if self.way == "none":
            outputs: Tensor = second(first(inputs))
            return outputs
        if self.way == "layer":
            middle = checkpoint(first, inputs + self.dummy - self.dummy, **how)
        elif self.way == "added":
            middle = checkpoint(first, inputs + self.dummy, **how)
        elif self.way == "argument":
            middle = checkpoint(lambda x, unused: first(x), inputs, self.dummy, **how)
        else:
            middle = checkpoint(first, inputs, **how)
        return self.finished(middle, how)

    def finished(self, middle: Tensor, how: dict[str, Any]) -> Tensor:
        outputs: Any = checkpoint(self.second, middle, **how)
        assert isinstance(outputs, Tensor)
        return outputs


def stepped(model: Halves) -> tuple[int, dict[str, Tensor | None]]:
    """Return the bytes kept for the backward pass and the gradients."""
    inputs = torch.linspace(-1, 1, 64 * 40).view(64, 40)
    with SavedBytes(model) as saved:
        model(inputs).square().sum().backward()
    return saved.peak, {name: each.grad for name, each in model.named_parameters()}


def layers(found: dict[str, Tensor | None]) -> dict[str, Tensor]:
    return {name: each for name, each in found.items() if name != "dummy" and each is not None}


def test_S06_checkpoint_in_two_halves_keeps_less() -> None:
    kept, expected = stepped(Halves("none"))
    less, found = stepped(Halves("today"))
    assert less < 0.6 * kept
    assert same(layers(found), layers(expected))
    assert len(layers(found)) == 44


def test_S06_the_second_pair_of_figures_is_of_another_net() -> None:
    """1717 and 1283 MB again, but 22 layers take 0.32 GB where 72 take 1.1 GB."""
    layer, mib = 1000 * 1001, 2**20
    first, second = (4 * 4 * (count * layer + 100 * 1001) / mib for count in (71, 21))
    assert round(first) == 1086
    assert round(second) == 322
    libraries = 1717 - first
    assert 500 < libraries < 700
    assert libraries + second < 1283 - 300  # no figure of this net


@pytest.mark.parametrize("way", ["layer", "argument"])
@pytest.mark.parametrize("dummy", [0.0, 1.0])
def test_S06_the_dummy_may_be_zero(way: str, dummy: float) -> None:
    """The open question below the first article: yes, what counts is that it requires a gradient.

    Zero is better in a layer: ``x + 1 - 1`` is rounded.
    """
    _, expected = stepped(Halves("none"))
    model = Halves(way, dummy)
    _, found = stepped(model)
    exact = dummy == 0 or way == "argument"
    torch.testing.assert_close(layers(found), layers(expected))
    assert same(layers(found), layers(expected)) == exact
    moved = found["dummy"]
    assert moved is None or not moved.any()  # nothing that an optimizer would change


def test_S06_a_dummy_that_is_only_added_is_trained() -> None:
    """It begins as zero and does not stay it."""
    _, found = stepped(Halves("added", 0.0))
    moved = found["dummy"]
    assert moved is not None
    assert moved.abs() > 0


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_S06_without_a_dummy_the_reentrant_kind_breaks_the_tape() -> None:
    """The second half is cut off too: its input comes from the first."""
    with pytest.raises(RuntimeError, match="does not require grad"):
        stepped(Halves("reentrant"))


def test_S06_limits_of_autograd_grad() -> None:
    """The last article: checkpointing does not work with torch.autograd.grad. Today's kind does."""
    model, inputs = nn.Linear(3, 2), torch.ones(4, 3, requires_grad=True)
    old: Tensor = checkpoint(model, inputs, use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"incompatible with \.grad"):
        torch.autograd.grad(old.sum(), inputs)
    new: Tensor = checkpoint(model, inputs, use_reentrant=False)
    (found,) = torch.autograd.grad(new.sum(), inputs)
    assert torch.equal(found, model.weight.sum(0).expand(4, 3))


def test_S06_a_second_pass_that_differs_is_noticed() -> None:
    """The last article: it cannot be. Today's kind compares the shapes of what is saved."""
    sizes = iter((3, 5))

    def changes(inputs: Tensor) -> Tensor:
        wide = inputs.repeat(next(sizes), 1)
        return (wide * wide.exp()).sum(0)

    outputs: Tensor = checkpoint(changes, torch.ones(1, 2, requires_grad=True), use_reentrant=False)
    with pytest.raises(CheckpointError, match="different metadata"):
        outputs.sum().backward()


class Recomputed(nn.Module):
    """The smallest model that recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        return checkpoint(self.layer, inputs, use_reentrant=False)  # type: ignore[no-any-return]


@pytest.mark.parametrize("model", [Recomputed(), DenseNet((1, 16, 16), 10, 0.25)])
def test_S24_models_that_recompute_are_not_scripted(model: nn.Module) -> None:
    """The last article: memory_efficient is not supported in JIT. Nor is checkpoint itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        with pytest.raises(FrontendError):
            torch.jit.script(model)
        plain = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        assert isinstance(torch.jit.script(plain), torch.jit.ScriptModule)


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
