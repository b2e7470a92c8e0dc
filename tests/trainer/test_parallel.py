"""Several devices: replicas simulated on the CPU, and real processes under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import ckptkit
from ckptkit.trainer import loop, memory, parallel, shapes
from ckptkit.trainer.config import PREFIXED, Config

from ..conftest import ENVIRONMENT
from .conftest import Prepare, TwoReplicas, gradients

CPU = (torch.device("cpu"),)


@pytest.mark.parametrize("kind", PREFIXED)
def test_S02_wrappers_give_their_prefix_on_the_cpu(prepared: Prepare, kind: str) -> None:
    run = prepared(parallel=kind)
    bare = list(run.model.state_dict())
    assert list(run.wrapped.state_dict()) == [f"module.{name}" for name in bare]
    loop.test(run)


def test_S02_the_split_is_shown(prepared: Prepare) -> None:
    run = prepared(parallel="dp")
    run.wrapped = TwoReplicas(run.model, CPU)
    said: list[str] = []
    with shapes.trace(run, said.append):
        run.wrapped(run.data.train[0][:30])
        run.wrapped(run.data.train[0][:30])
    assert said == [
        "in the model: input [15, 3, 32, 32], output [15, 10] on cpu",
        "outside: input [30, 3, 32, 32], output [30, 10] on cpu",
    ]
    run.wrapped(run.data.train[0][:8])
    assert len(said) == 2


@pytest.mark.parametrize("batch", [32, 33])
def test_S03_balanced_gradients_are_those_of_dp(prepared: Prepare, batch: int) -> None:
    """The replicas are simulated; the loss, and whether outputs are joined, is the code that GPUs
    use."""
    run = prepared(parallel="dp")
    inputs, targets = (part[:batch] for part in run.data.train)
    joined = TwoReplicas(run.model, CPU)
    loss = run.loss(joined(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = gradients(run.model)
    run.model.zero_grad()
    balanced = TwoReplicas(run.model, CPU, balanced=True)
    outputs = balanced(inputs)
    assert [len(each) for each in outputs] == [len(half) for half in inputs.chunk(2)]
    apart = run.loss(outputs, targets)
    apart.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(apart, loss)
    torch.testing.assert_close(gradients(run.model), expected)


def test_S03_balanced_training_ends_where_dp_ends(prepared: Prepare) -> None:
    ends = []
    for kind in ("dp", "dp-balanced"):
        run = prepared(parallel=kind)
        run.wrapped = TwoReplicas(run.model, CPU, balanced=kind == "dp-balanced")
        loop.train_epoch(run, memory.Tracker(run, None))
        ends.append(run.model.state_dict())
    torch.testing.assert_close(*ends)


def test_torchrun_is_not_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(ckptkit.CkptkitError, match="--parallel dp needs one") as caught,
        parallel.group(Config(parallel="dp")),
    ):
        pass
    assert caught.value.hint == "--parallel ddp"


def test_a_sharded_model_cannot_load_a_file(tmp_path: Path) -> None:
    config = Config(parallel="fsdp", data="random", devices=("cpu",), width=0.5)
    with pytest.raises(ckptkit.CkptkitError, match="cannot load a file"):
        loop.evaluate(config, tmp_path / "any.pth")


def test_fsdp_alone_leaves_a_folder(tmp_path: Path) -> None:
    config = Config(parallel="fsdp", data="random", devices=("cpu",), width=0.5, epochs=1)
    loop.train(config, tmp_path / "shards", say=lambda line: None)
    assert {path.name for path in (tmp_path / "shards").iterdir()} == {".metadata", "__0_0.distcp"}


def torchrun(folder: Path, out: str, *options: str) -> str:
    """Two processes train together; what they print."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    command += [
        "-m",
        "ckptkit.trainer",
        out,
        "--data",
        "random",
        "--width",
        "0.5",
        "--devices",
        "cpu",
        *options,
    ]
    environment = {**ENVIRONMENT, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.processes
def test_S25_two_processes_of_ddp_give_what_one_gives(tmp_path: Path) -> None:
    said = torchrun(
        tmp_path,
        "two.pth",
        "--parallel",
        "ddp",
        "--batch-size",
        "20",
        "--epochs",
        "2",
        "--keep-module-prefix",
    )
    assert said.count("wrote two.pth") == 1
    assert sorted(os.listdir(tmp_path)) == ["two.pth"]
    config = Config(data="random", width=0.5, devices=("cpu",), batch_size=40, epochs=2)
    loop.train(config, tmp_path / "one.pth", say=lambda line: None)
    two = torch.load(tmp_path / "two.pth", weights_only=True)["model"]
    one = torch.load(tmp_path / "one.pth", weights_only=True)["model"]
    torch.testing.assert_close(dict(two), {f"module.{name}": value for name, value in one.items()})


@pytest.mark.processes
def test_S25_two_processes_of_fsdp_leave_a_folder_of_shards(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    options = ("--parallel", "fsdp", "--batch-size", "20", "--epochs", "2", "--save-form", "full")
    said = torchrun(tmp_path, "shards", *options)
    assert said.count("wrote shards") == 1
    assert {path.name for path in (tmp_path / "shards").iterdir()} == {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
    }
    dcp_to_torch_save(tmp_path / "shards", tmp_path / "whole.pth")
    whole = torch.load(tmp_path / "whole.pth", weights_only=False)
    config = Config(data="random", width=0.5, devices=("cpu",), batch_size=40, epochs=2)
    loop.train(config, tmp_path / "one.pth", say=lambda line: None)
    one = torch.load(tmp_path / "one.pth", weights_only=True)["model"]
    torch.testing.assert_close(whole["model"], dict(one))
    assert whole["epoch"] == 2
    assert whole["args"]["parallel"] == "fsdp"


def test_replicated_keeps_to_the_cpu() -> None:
    model = parallel.Replicated(nn.Linear(2, 2), CPU, balanced=True)
    assert model.device_ids == []
    assert isinstance(model(torch.zeros(4, 2)), torch.Tensor)
