"""Choosing devices, those of other machines included."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import ckptkit
from ckptkit.trainer import parallel
from ckptkit.trainer.config import Config
from ckptkit.trainer.models import build

from ..conftest import Run


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs, as far as choosing goes."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def chosen(*names: str, kind: str = "none", **options: Any) -> list[str]:
    config = Config(devices=names, parallel=kind, **options)
    return [str(device) for device in parallel.choose(config)]


def refusal(*names: str, kind: str = "dp", **options: Any) -> tuple[str, str | None]:
    with pytest.raises(ckptkit.CkptkitError) as caught:
        chosen(*names, kind=kind, **options)
    assert caught.value.exit_code == 2
    return caught.value.message, caught.value.hint


def test_S09_the_cpu_where_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert chosen() == chosen(kind="dp") == ["cpu"]


def test_S09_any_order_the_first_holds_the_model(two_gpus: None) -> None:
    both = ["cuda:0", "cuda:1"]
    assert chosen() == chosen("cuda") == both[:1]
    assert chosen("cuda:1") == both[1:]
    assert chosen(kind="dp") == chosen(kind="dp", output_device="cuda:1") == both
    assert chosen("cuda:1", "cuda:0", kind="dp") == both[::-1]


def test_S09_a_missing_device_names_those_that_are_there(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    hint = "use --devices with cpu, cuda:0, cuda:1"
    assert refusal("cuda:3") == ("this machine has no device cuda:3", hint)
    assert refusal(output_device="cuda:2") == ("this machine has no device cuda:2", hint)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert "CUDA_VISIBLE_DEVICES=0,1 renumbers" in (refusal("cuda:3")[1] or "")


def test_S10_the_first_device_must_be_one_that_can_share(two_gpus: None) -> None:
    assert refusal("cpu", "cuda:0")[0] == "cpu cannot be combined with other devices"
    assert refusal("cuda:1", "cuda:1")[0] == "--devices contains cuda:1 twice"
    assert refusal("cuda:0", "cuda:1", kind="none")[1] == "use --parallel dp"


def test_S02_the_cpu_twice_is_a_simulation() -> None:
    assert chosen("cpu", "cpu", kind="dp") == ["cpu", "cpu"]
    assert refusal("cpu", "cpu", kind="ddp")[0] == "--devices contains cpu twice"
    assert refusal("cpu", "cpu", kind="none")[1] == "use --parallel dp"


@pytest.mark.parametrize(
    ("model", "what"), [("generator", "ReflectionPad2d"), ("crnn", "CTC loss"), ("cnn", None)]
)
def test_S19_what_is_not_deterministic_on_a_gpu_is_refused(
    two_gpus: None, model: str, what: str | None
) -> None:
    assert chosen("cpu", model=model, deterministic=True) == ["cpu"]
    if what is None:
        assert chosen(model=model, deterministic=True) == ["cuda:0"]
        return
    message, hint = refusal(kind="none", model=model, deterministic=True)
    assert "no deterministic" in message and what in message
    assert hint == "use --devices cpu, or remove --deterministic"


def test_sync_batch_norm_takes_the_place_of_batch_norm(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = Config(model="densenet", width=0.25, parallel="ddp", sync_batch_norm=True)
    assert len(parallel.choose(config)) == 2
    refused = refusal("cpu", kind="ddp", sync_batch_norm=True)[0]
    assert refused == "SyncBatchNorm of torch works only on GPUs"
    monkeypatch.setattr(nn.parallel, "DistributedDataParallel", lambda model, **_: model)
    net = build(config, (3, 32, 32), 10)
    names = list(net.state_dict())
    made = parallel.wrap(net, config, parallel.ProcessGroup((torch.device("cpu"),)))
    kinds = {type(each) for each in made.modules()}
    assert nn.SyncBatchNorm in kinds and nn.BatchNorm2d not in kinds
    assert list(net.state_dict()) == names


class OneGpu:
    """The properties of a GPU."""

    name, total_memory, uuid = "GeForce GTX 1080 Ti", 11 << 30, "5da6e67e-fd5a-88fb"


def test_S20_env_shows_the_devices_and_the_uuids_of_gpus(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As nvidia-smi -L."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: OneGpu)
    found = json.loads(run("env", "--json").stdout)
    assert found["torch"] == torch.__version__
    assert [name for name in found["devices"] if name != "mps"] == ["cpu", "cuda:0"]
    uuids = [found["devices"][name]["uuid"] for name in ("cpu", "cuda:0")]
    assert uuids == [None, "5da6e67e-fd5a-88fb"]
    assert "5da6e67e-fd5a-88fb" in run("env").stdout
