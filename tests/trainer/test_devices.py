"""Choosing devices, those of other machines included."""

from __future__ import annotations

import json

import pytest
import torch

import ckptkit
from ckptkit.trainer import parallel
from ckptkit.trainer.config import Config

from ..conftest import Run


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with two GPUs, as far as choosing goes."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


def chosen(*names: str, kind: str = "none") -> list[str]:
    config = Config(devices=names, parallel=kind)
    return [str(device) for device in parallel.choose(config)]


def refusal(*names: str, kind: str = "dp") -> tuple[str, str | None]:
    with pytest.raises(ckptkit.CkptkitError) as caught:
        chosen(*names, kind=kind)
    assert caught.value.exit_code == 2
    return str(caught.value), caught.value.hint


def test_S09_the_cpu_where_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert chosen() == chosen(kind="dp") == ["cpu"]


def test_S09_any_order_the_first_holds_the_model(two_gpus: None) -> None:
    assert chosen() == ["cuda:0"]
    assert chosen("cuda") == ["cuda:0"]
    assert chosen("cuda:1") == ["cuda:1"]
    assert chosen(kind="dp") == ["cuda:0", "cuda:1"]
    assert chosen("cuda:1", "cuda:0", kind="dp") == ["cuda:1", "cuda:0"]


def test_S09_a_missing_device_names_those_that_are_there(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert refusal("cuda:3") == (
        "this machine has no device cuda:3",
        "use --devices with cpu, cuda:0, cuda:1",
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert "CUDA_VISIBLE_DEVICES=0,1 renumbers" in (refusal("cuda:3")[1] or "")


def test_S10_the_first_device_must_be_one_that_can_share(two_gpus: None) -> None:
    assert refusal("cpu", "cuda:0")[0] == "cpu cannot be combined with other devices"
    assert refusal("cuda:1", "cuda:1")[0] == "--devices contains cuda:1 twice"
    assert refusal("cuda:0", "cuda:1", kind="none")[1] == "use --parallel dp"


def test_S19_what_is_not_deterministic_on_a_gpu_is_refused(two_gpus: None) -> None:
    for model, what in (("generator", "ReflectionPad2d"), ("crnn", "CTC loss")):
        with pytest.raises(ckptkit.CkptkitError, match=f"no deterministic .*{what}") as caught:
            parallel.choose(Config(model=model, deterministic=True))
        assert caught.value.hint == "use --devices cpu, or remove --deterministic"
        parallel.choose(Config(model=model, deterministic=True, devices=("cpu",)))
    parallel.choose(Config(deterministic=True))


def test_S02_the_cpu_twice_is_a_simulation() -> None:
    assert chosen("cpu", "cpu", kind="dp") == ["cpu", "cpu"]
    assert refusal("cpu", "cpu", kind="ddp")[0] == "--devices contains cpu twice"
    assert refusal("cpu", "cpu", kind="none")[1] == "use --parallel dp"


def test_S20_env_shows_the_devices(run: Run) -> None:
    found = json.loads(run("env", "--json").stdout)
    assert found["torch"] == torch.__version__
    assert [name for name in parallel.available() if name != "mps"] == [
        name for name in found["devices"] if name == "cpu" or name.startswith("cuda")
    ]
