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
from ckptkit.trainer.config import MODELS, PREFIXED, Config, RequestError
from ckptkit.trainer.data import load
from ckptkit.trainer.models import build

from ..conftest import ENVIRONMENT
from .conftest import (
    CPU,
    FULL,
    HALVES,
    ROWS,
    SMALL,
    Prepare,
    gradients,
    loaded,
    same,
    trained,
)


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
    with log.shapes_traced(prepared(parallel="dp"), said.append):
        pass
    assert said[3:] == [
        "one device: batches are not split (--devices cpu,cpu simulates two devices)"
    ]


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


def test_replicated_keeps_to_the_cpu() -> None:
    model = parallel.Replicated(nn.Linear(2, 2), CPU, balanced=True)
    assert model.device_ids == []
    assert isinstance(model(torch.zeros(4, 2)), torch.Tensor)


# DDP and FSDP


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
    with pytest.raises(RequestError, match="FSDP needs a GPU for each process: 4 proc") as caught:
        parallel.join(torch.device("cuda:0"), 1, is_sharded=True)
    assert caught.value.hint == "use --nproc-per-node 1, --parallel ddp, or --devices cpu"


def config_of(model: str, **options: Any) -> Config:
    own: dict[str, dict[str, Any]] = {
        "mlp": {"segments": 2, "width": 0.05},
        "generator": {"segments": 2},
        "densenet": {"memory_efficient": True},
    }
    return replace(SMALL, model=model, epochs=1, **own.get(model, {}), **options)


@pytest.mark.parametrize("model", MODELS)
def test_F3_blocks_come_before_the_root(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parameters are in a block that is called as a whole, but for recurrent layers."""
    from torch.distributed import fsdp

    sharded: list[tuple[nn.Module, dict[str, Any]]] = []
    monkeypatch.setattr(
        fsdp, "fully_shard", lambda module, **options: sharded.append((module, options))
    )
    monkeypatch.setattr("torch.distributed.device_mesh.init_device_mesh", lambda *_: "mesh")
    config = config_of(model, amp=True)
    net = build(config, load(config).shape, 10)
    parallel.shard(net, config, parallel.ProcessGroup(CPU))
    modules = [module for module, _ in sharded]
    assert modules[-1] is net
    assert len({id(each) for each in modules}) == len(modules) > 3
    assert not any(isinstance(each, (nn.Sequential, nn.ModuleList)) for each in modules)
    covered = {id(each) for module in modules[:-1] for each in module.parameters()}
    left = [name for name, each in net.named_parameters() if id(each) not in covered]
    assert all(name.startswith("recurrent.") for name in left)
    for _, options in sharded:
        policy = options["mp_policy"]
        assert options["mesh"] == "mesh"
        assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("model", MODELS)
def test_F3_every_model_trains_by_blocks(model: str, tmp_path: Path) -> None:
    """Segments and recomputed bottlenecks included: the same weights as unsharded."""
    config = config_of(model, batch_size=128)
    loop.train(config, tmp_path / "plain", log=loop.silent)
    loop.train(replace(config, parallel="fsdp"), tmp_path / "sharded", log=loop.silent)
    found, expected = (loaded(tmp_path / name)["model"] for name in ("sharded", "plain"))
    torch.testing.assert_close(dict(found), dict(expected), rtol=1e-4, atol=1e-5)


def test_F3_bfloat16_shards(tmp_path: Path) -> None:
    found = trained(tmp_path, "sharded", epochs=1, parallel="fsdp", amp=True)["model"]
    assert {each.dtype for each in found.values()} == {torch.float32}


def test_fsdp_goes_on_from_its_folder_and_is_evaluated_from_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"parallel": "fsdp", "optimizer": "adam", "save_best": True, **FULL}
    one = trained(tmp_path, "two", **options)
    assert {path.name for path in tmp_path.iterdir()} == {"two", "two.epoch1", "two.best"}
    other = trained(tmp_path, "more", resume=tmp_path / "two.epoch1", **options)
    assert same(one["model"], other["model"])
    for name, state in one["optimizer"]["state"].items():
        assert same(state, other["optimizer"]["state"][name])
    accuracies = {
        loop.evaluate(replace(SMALL, parallel=kind), tmp_path / "two", log=loop.silent)
        for kind in ("fsdp", "none")
    }
    assert len(accuracies) == 1


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_S25_two_processes_give_what_one_gives(tmp_path: Path, kind: str) -> None:
    """By the command of the manual. FSDP leaves a folder of shards, which torch merges."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    _, *words = shlex.split(ROWS["S25"].replace("run.pth", "two").replace("ddp", kind))
    words += shlex.split("--data random --width 0.25 --devices cpu --batch-size 40 --epochs 2")
    words += ["--keep-module-prefix"] if kind == "ddp" else ["--save-form", "full"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", *words],
        cwd=tmp_path,
        env=ENVIRONMENT,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote two") == 1
    assert os.listdir(tmp_path) == ["two"]
    two = tmp_path / "two"
    if kind == "fsdp":
        assert {*os.listdir(two)} == {".metadata", "__0_0.distcp", "__1_0.distcp"}
        dcp_to_torch_save(two, tmp_path / "whole")
        two = tmp_path / "whole"
    whole = torch.load(two, weights_only=False)
    one = trained(tmp_path, "one", batch_size=40)["model"]
    prefix = "module." if kind == "ddp" else ""
    torch.testing.assert_close(
        dict(whole["model"]), {f"{prefix}{name}": value for name, value in one.items()}
    )
    assert whole["epoch"] == 2
    assert kind == "ddp" or whole["args"]["parallel"] == "fsdp"
