"""Several devices: replicas simulated on the CPU, and real processes under torchrun."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import ckptkit
from ckptkit.trainer import log, loop, parallel
from ckptkit.trainer.config import PREFIXED, Config, RunFiles, SavingError

from ..conftest import ENVIRONMENT
from .conftest import CPU, HALVES, ROWS, Prepare, gradients, same


@pytest.mark.parametrize("kind", PREFIXED)
def test_S02_wrappers_give_their_prefix_on_the_cpu(prepared: Prepare, kind: str) -> None:
    run = prepared(parallel=kind)
    bare = list(run.model.state_dict())
    assert list(run.wrapped.state_dict()) == [f"module.{name}" for name in bare]
    loop.test(run)


def test_S02_the_split_is_shown(prepared: Prepare) -> None:
    run = prepared(parallel="dp", devices=("cpu", "cpu"))
    said: list[str] = []
    with log.shapes_traced(run, said.append):
        run.wrapped(run.data.train[0][:30])
        run.wrapped(run.data.train[0][:30])
    assert said == [
        "simulated: 2 parts of each batch, one after the other on the CPU",
        "in the model: input [15, 3, 32, 32], output [15, 10] on cpu",
        "outside: input [30, 3, 32, 32], output [30, 10] on cpu",
    ]
    run.wrapped(run.data.train[0][:8])
    assert len(said) == 3


@pytest.mark.parametrize("batch", [32, 33])
def test_S03_balanced_gradients_are_those_of_dp(prepared: Prepare, batch: int) -> None:
    """The replicas are simulated; the loss, and whether outputs are joined, is the code that GPUs
    use."""
    run = prepared(parallel="dp")
    inputs, targets = (part[:batch] for part in run.data.train)
    joined = parallel.Replicated(run.model, HALVES)
    loss = run.loss(joined(inputs), targets)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = gradients(run.model)
    run.model.zero_grad()
    balanced = parallel.Replicated(run.model, HALVES, balanced=True)
    outputs = balanced(inputs)
    assert [len(each) for each in outputs] == [len(half) for half in inputs.chunk(2)]
    apart = run.loss(outputs, targets)
    apart.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(apart, loss)
    torch.testing.assert_close(gradients(run.model), expected)


def test_torchrun_is_not_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(ckptkit.CkptkitError, match="--parallel dp uses one") as caught,
        parallel.group(Config(parallel="dp")),
    ):
        pass
    assert caught.value.hint == "use --parallel ddp"


def test_S02_one_device_says_that_nothing_is_split(prepared: Prepare) -> None:
    said: list[str] = []
    with log.shapes_traced(prepared(parallel="dp"), said.append):
        pass
    assert said == ["one device: batches are not split (--devices cpu,cpu simulates two devices)"]


def test_S17_crnn_is_joined_along_the_batch(prepared: Prepare) -> None:
    run = prepared(model="crnn", width=0.25, parallel="dp", devices=("cpu", "cpu"))
    assert run.wrapped.eval()(run.data.train[0][:6]).shape[0] == 6


def test_amp_reaches_the_threads_of_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch runs each replica in a thread, inside an autocast without a dtype; here on the CPU,
    where that means bfloat16 too, and so with float16 as what the thread would use."""
    kinds = []

    def in_threads(replicas: list[Callable[[], None]], *_: object) -> list[None]:
        def work(replica: Callable[[], None]) -> None:
            with torch.autocast("cpu", torch.float16):
                replica()

        threads = [Thread(target=work, args=(replica,)) for replica in replicas]
        for thread in threads:
            thread.start()
            thread.join()
        return [None] * len(threads)

    class Layer(nn.Linear):
        def forward(self) -> None:  # type: ignore[override]
            kinds.append(super().forward(torch.ones(1, 2)).dtype)

    monkeypatch.setattr(nn.DataParallel, "parallel_apply", lambda self, *rest: in_threads(*rest))
    for amp in (torch.bfloat16, None):
        parallel.Replicated(nn.Linear(2, 2), CPU, amp=amp).parallel_apply([Layer(2, 2)] * 2, [], [])
    assert kinds == [torch.bfloat16] * 2 + [torch.float32] * 2


def test_gradients_are_exchanged_once_per_step(prepared: Prepare) -> None:
    run = prepared(parallel="ddp", batch_size=100, accumulate=3)
    exchanges: list[int] = []

    def count(state, bucket):  # type: ignore[no-untyped-def]  # torch checks annotations
        exchanges.append(1)
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    run.wrapped.register_comm_hook(None, count)  # type: ignore[operator]
    loop.train_epoch(run)
    assert len(exchanges) == len(loop.batches(run)) == 2


def test_nccl_is_told_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(dist, "init_process_group", lambda **options: said.append(options))
    for processes in ("2", "4"):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
        monkeypatch.setenv("WORLD_SIZE", processes)
        parallel.join(torch.device("cuda:1"), 2)
    assert said == [
        {"backend": "nccl", "device_id": torch.device("cuda:1")},
        {"backend": "gloo"},  # more processes than GPUs
    ]


def test_fsdp_goes_on_from_its_folder_and_is_evaluated_from_it(tmp_path: Path) -> None:
    config = Config(
        parallel="fsdp", data="random", devices=("cpu",), width=0.5, epochs=2, save_form="full",
        optimizer="adam", save_every=1, save_best=True,
    )  # fmt: skip
    accuracy = loop.train(config, tmp_path / "two", log=loop.silent)
    names = {"two", "two.epoch1", "two.best"}
    assert {path.name for path in tmp_path.iterdir()} == names
    files = RunFiles(resume=tmp_path / "two.epoch1")
    loop.train(config, tmp_path / "more", files, log=loop.silent)
    one, other = (ckptkit.load(tmp_path / name, whole=True) for name in ("two", "more"))
    assert same(one["model"], other["model"])
    for name, state in one["optimizer"]["state"].items():
        assert same(state, other["optimizer"]["state"][name])
    assert loop.evaluate(config, tmp_path / "two", log=loop.silent) == accuracy
    plain = replace(config, parallel="none")
    assert loop.evaluate(plain, tmp_path / "two", log=loop.silent) == accuracy


@pytest.mark.parametrize(("before", "after"), [("fsdp", "none"), ("ddp", "fsdp")])
def test_a_run_goes_on_under_another_kind(tmp_path: Path, before: str, after: str) -> None:
    """Optimizers name parameters in one kind and number them in the other."""
    config = Config(
        data="random", devices=("cpu",), width=0.5, epochs=2, save_form="full", save_every=1
    )
    start = replace(config, parallel=before)
    loop.train(start, tmp_path / "start", log=loop.silent)
    said: list[str] = []
    files = RunFiles(resume=tmp_path / "start.epoch1")
    loop.train(replace(config, parallel=after), tmp_path / "end", files, log=said.append)
    assert f"--parallel {after} instead of --parallel {before}" in said[0]
    one, other = (ckptkit.load(tmp_path / name, whole=True) for name in ("start", "end"))
    torch.testing.assert_close(dict(other["model"]), dict(one["model"]))


def test_a_sharded_model_says_what_does_not_fit(tmp_path: Path) -> None:
    config = Config(parallel="fsdp", data="random", devices=("cpu",), width=0.5)
    torch.save({"fc1.weight": torch.ones(1), "module.x": torch.ones(1)}, tmp_path / "other.pth")
    with pytest.raises(ckptkit.CkptkitError, match="does not fit cnn; missing, unexpected or with"):
        loop.evaluate(config, tmp_path / "other.pth")


def test_shards_that_cannot_be_written_are_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.checkpoint import filesystem

    def full(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(filesystem.FileSystemWriter, "write_data", full)
    config = Config(parallel="fsdp", data="random", devices=("cpu",), width=0.5, epochs=1)
    with pytest.raises(SavingError, match=r"shards: cannot be written: .*disk full"):
        loop.train(config, tmp_path / "shards", log=loop.silent)
    assert not list(tmp_path.iterdir())


def torchrun(folder: Path, out: str, kind: str, *options: str) -> str:
    """Two processes train together, by the command of the manual; what they print."""
    _, *words = shlex.split(ROWS["S25"].replace("run.pth", out).replace("ddp", kind))
    small = shlex.split("--data random --width 0.5 --devices cpu --batch-size 40 --epochs 2")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
    done = subprocess.run(
        [*command, *small, *options], cwd=folder, env=ENVIRONMENT, capture_output=True,
        encoding="utf-8", timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.processes
def test_S25_two_processes_of_ddp_give_what_one_gives(tmp_path: Path) -> None:
    said = torchrun(tmp_path, "two.pth", "ddp", "--keep-module-prefix")
    assert said.count("wrote two.pth") == 1
    assert sorted(os.listdir(tmp_path)) == ["two.pth"]
    config = Config(data="random", width=0.5, devices=("cpu",), batch_size=40, epochs=2)
    loop.train(config, tmp_path / "one.pth", log=loop.silent)
    two = torch.load(tmp_path / "two.pth", weights_only=True)["model"]
    one = torch.load(tmp_path / "one.pth", weights_only=True)["model"]
    torch.testing.assert_close(dict(two), {f"module.{name}": value for name, value in one.items()})


@pytest.mark.processes
def test_S25_two_processes_of_fsdp_leave_a_folder_of_shards(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    said = torchrun(tmp_path, "shards", "fsdp", "--save-form", "full")
    assert said.count("wrote shards") == 1
    assert {path.name for path in (tmp_path / "shards").iterdir()} == {
        ".metadata",
        "__0_0.distcp",
        "__1_0.distcp",
    }
    dcp_to_torch_save(tmp_path / "shards", tmp_path / "whole.pth")
    whole = torch.load(tmp_path / "whole.pth", weights_only=False)
    config = Config(data="random", width=0.5, devices=("cpu",), batch_size=40, epochs=2)
    loop.train(config, tmp_path / "one.pth", log=loop.silent)
    one = torch.load(tmp_path / "one.pth", weights_only=True)["model"]
    torch.testing.assert_close(whole["model"], dict(one))
    assert whole["epoch"] == 2
    assert whole["args"]["parallel"] == "fsdp"


def test_replicated_keeps_to_the_cpu() -> None:
    model = parallel.Replicated(nn.Linear(2, 2), CPU, balanced=True)
    assert model.device_ids == []
    assert isinstance(model(torch.zeros(4, 2)), torch.Tensor)
