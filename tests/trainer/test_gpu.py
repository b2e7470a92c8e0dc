"""The command for machines with GPUs, as far as a machine without one can try it.

The mock of CUDA is a machine that has two GPUs by its own account and computes on the CPU: no check
may take that for a GPU.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from ckptkit.trainer import gpu, gpu_checks, loop, parallel
from ckptkit.trainer.checking import (
    CheckResult,
    DeviceCheck,
    Failed,
    GpuMachine,
    Witness,
    require,
    require_evidence,
    run_check,
    run_limited,
)
from ckptkit.trainer.config import Config
from ckptkit.trainer.gpu_checks import CHECKS, SMALL
from ckptkit.trainer.simulated import as_on_gpus, description, differences, simulated_cuda
from tests.matrix import FOLDER
from tests.trainer import slow_checks
from tests.trainer.conftest import ROWS

CPU = GpuMachine(0, "no GPU")
BY_NAME = {check.name: check for check in CHECKS}
QUICK = ["S02 S10", "S03", "S08", "S04", "S18", "S23", "resuming is exact", "amp computes"]
# What these check is tested beside them, in a shorter run.
LONG = [
    "S05", "S06", "S09", "S11", "S13", "S17", "S19", "S25 DDP with gloo", "S25 FSDP", "a run on the GPU",
    "amp in float16", "workers",
]  # fmt: skip
OTHERS = ["S01", "S02 seconds", "S07"]  # which other tests run
NEEDS_GPU = [check.name for check in CHECKS if check.needs]


def named(start: str) -> DeviceCheck:
    (check,) = [each for each in CHECKS if each.name.startswith(start)]
    return check


def test_every_row_has_a_check() -> None:
    """And every check is tried here, or named as one that needs a GPU."""
    starts = [*QUICK, *LONG, *OTHERS, *NEEDS_GPU]
    assert [named(start) for start in starts] == sorted(
        CHECKS, key=lambda check: starts.index(next(s for s in starts if check.name.startswith(s)))
    )
    assert set(re.findall(r"S\d\d", " ".join(BY_NAME))) == set(ROWS)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)]
)
def test_a_check_of_the_cpu_is_simulated_and_never_passed(name: str, tmp_path: Path) -> None:
    result = run_check(named(name), CPU, tmp_path / "check")
    assert (result.status, result.why, result.traceback) == ("simulated", "", "")
    assert set(result.devices) == {"cpu"}


@pytest.mark.parametrize("name", NEEDS_GPU)
def test_what_needs_a_gpu_is_not_possible_without_one(name: str, tmp_path: Path) -> None:
    result = run_check(named(name), CPU, tmp_path / "check")
    assert result.status == "not possible here"
    assert re.fullmatch(r"needs [12] GPUs?, but this machine has 0", result.why)


@pytest.mark.parametrize("name", ["S02 S10", "S02 seconds", "S03", "S18"])
def test_one_gpu_is_not_one_of_two_devices(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A check for two devices simulates both: one on the GPU and one on the CPU cannot compute."""
    monkeypatch.setattr(GpuMachine, "device", torch.device("meta"))
    result = run_check(named(name), GpuMachine(1, "one"), tmp_path / "check")
    assert (result.status, result.why, result.devices) == ("simulated", "", ["cpu"])


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVIDIA UNIX x86_64 Kernel Module  535.54.03  Tue Jun  6 22:20:39", "535.54.03"),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (a@b)\n"
            "GCC version:  gcc version 15.2.0\n",
            "580.159.04",
        ),
        ("", None),
    ],
)
def test_the_version_of_the_driver(text: str, version: str | None) -> None:
    assert gpu.driver_version(text) == version


@pytest.fixture
def mock_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[GpuMachine]:
    """A machine that names two GPUs, chooses the CPU in their place, and tags with their names."""
    choose, save = parallel.choose, torch.save

    def chosen(config: Config) -> tuple[torch.device, ...]:
        choose(config)
        return tuple(torch.device("cpu") for _ in config.devices or ("cpu",))

    monkeypatch.setattr(parallel, "available", lambda: ["cpu", "cuda:0", "cuda:1"])
    monkeypatch.setattr(parallel, "choose", chosen)
    monkeypatch.setattr(GpuMachine, "device", torch.device("cpu"))
    yield GpuMachine(2, "a mock")
    assert torch.save is save


@pytest.mark.parametrize("name", ["S01", "S03", "S04"])
def test_the_mock_is_caught(mock_gpus: GpuMachine, tmp_path: Path, name: str) -> None:
    """All computes well, on the CPU: the check has not passed."""
    result = run_check(named(name), mock_gpus, tmp_path / "check")
    assert result.status == "failed"
    assert re.fullmatch(r"Failed: needs [12] GPUs?, but its layers ran on cpu", result.why), (
        result.why
    )
    assert "require_evidence" in result.traceback


class Fake:
    """A witness of devices."""

    def __init__(self, *devices: str) -> None:
        self.devices = set(devices)
        self.gpus = sorted(devices)


@pytest.mark.parametrize(
    ("gpus", "devices", "processes", "why"),
    [
        (1, ["cuda:0"], [], None),
        (2, ["cuda:0"], [], "needs 2 GPUs, but its layers ran on cuda:0"),
        (2, ["cuda:0", "cuda:1"], [], None),
        (2, ["cuda:0", "cuda:1"], ["nccl"], "a single process exchanges nothing"),
        (2, ["cuda:0", "cuda:1"], ["nccl", "nccl"], None),
        (2, ["cuda:0", "cuda:1"], ["gloo", "gloo"], "used the backend gloo"),
        (1, ["cuda:0"], ["gloo", "gloo"], None),
    ],
)
def test_the_evidence(gpus: int, devices: list[str], processes: list[str], why: str | None) -> None:
    check, witness = DeviceCheck("any", gpus, slow_checks.passes), Fake(*devices)
    with nullcontext() if why is None else pytest.raises(Failed, match=why):
        require_evidence(
            check,
            witness,  # type: ignore[arg-type]
            [{"backend": each, "device": "cuda:0"} for each in processes],
        )


def test_the_witness_sees_layers_in_threads() -> None:
    with Witness() as witness:
        with torch.device("meta"):
            nn.LSTM(2, 2)(torch.zeros(1, 2))
        parallel.Replicated(nn.Linear(2, 2), (torch.device("cpu"),) * 2)(torch.zeros(4, 2))
    assert witness.devices == {"meta", "cpu"}
    nn.Linear(2, 2, device="meta")(torch.zeros(1, 2, device="meta"))
    assert witness.gpus == []


def test_every_failure_is_a_result(tmp_path: Path) -> None:
    def fails(on: GpuMachine, folder: Path) -> dict[str, Any]:
        require(1 > 2, "1 is not more")
        raise AssertionError

    def breaks(on: GpuMachine, folder: Path) -> dict[str, Any]:
        raise RuntimeError("CUDA | error\nmore")

    results = [
        run_check(DeviceCheck(each.__name__, 1, each), CPU, tmp_path / each.__name__)
        for each in (fails, breaks)
    ]
    assert [(each.status, each.why) for each in results] == [
        ("failed", "Failed: 1 is not more"),
        ("failed", "RuntimeError: CUDA | error\nmore"),
    ]
    assert 'raise RuntimeError("CUDA | error\\nmore")' in results[1].traceback
    found = gpu.report(results, CPU)
    assert found["counts"] == {"passed": 0, "simulated": 0, "not possible here": 0, "failed": 2}
    assert {"driver", "cuda", "cudnn", "nccl", "gpus"} <= set(found["versions"])
    text = gpu.as_markdown(found)
    assert "| breaks | failed |  | 0.0 | RuntimeError: CUDA / error more |" in text
    assert "Traceback (most recent call last)" in text


def test_switches_are_restored_after_a_failure(tmp_path: Path) -> None:
    def switches(on: GpuMachine, folder: Path) -> dict[str, Any]:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = True
        raise Failed("after it changed switches")

    torch.use_deterministic_algorithms(True)
    run_check(DeviceCheck("switches", 0, switches), CPU, tmp_path / "check")
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.backends.cudnn.benchmark


def is_alive(process: int) -> bool:
    """A zombie, which nothing has waited for yet, is not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_check_that_hangs_ends_with_its_processes(tmp_path: Path) -> None:
    started = monotonic()
    result = run_limited(DeviceCheck("hangs", 1, slow_checks.hangs), CPU, tmp_path / "1", limit=8)
    assert (result.status, result.why) == ("failed", "took longer than 8 s")
    assert monotonic() - started < 60
    child = int((tmp_path / "child").read_text())
    for _ in range(50):
        if not is_alive(child):
            break
        sleep(0.1)
    assert not is_alive(child)
    assert os.getpgid(0) != child


def test_a_process_that_breaks_is_a_failure(tmp_path: Path) -> None:
    broken = run_limited(DeviceCheck("breaks", 1, slow_checks.breaks), CPU, tmp_path / "1")
    assert (broken.status, broken.why) == ("failed", "the process ended with exit code 9")


def test_the_command_writes_both_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def passes(on: GpuMachine, folder: Path) -> dict[str, Any]:
        return {"table": ["a  b", "1  2"]}

    def fails(on: GpuMachine, folder: Path) -> dict[str, Any]:
        raise Failed("no")

    def here(check: DeviceCheck, on: GpuMachine, folder: Path, limit: float) -> CheckResult:
        return run_check(check, on, folder)

    monkeypatch.setattr(gpu, "run_limited", here)
    monkeypatch.setattr(gpu, "CHECKS", [DeviceCheck("one", 0, passes)])
    done = CliRunner().invoke(gpu.command, [str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert done.output.startswith("passed ")
    assert done.output.endswith("1 passed, 0 simulated, 0 not possible here, 0 failed\n")
    found = json.loads((tmp_path / "out/report.json").read_text())
    assert found["results"][0]["facts"] == {"table": ["a  b", "1  2"]}
    assert "```text\na  b\n1  2\n```" in (tmp_path / "out/report.md").read_text()
    monkeypatch.setattr(
        gpu, "CHECKS", [DeviceCheck("one", 0, passes), DeviceCheck("two", 0, fails)]
    )
    assert CliRunner().invoke(gpu.command, [str(tmp_path / "out")]).exit_code == 1
    assert CliRunner().invoke(gpu.command, [str(tmp_path / "out"), "--only", "ONE"]).exit_code == 0
    nothing = CliRunner().invoke(gpu.command, [str(tmp_path / "out"), "--only", "three"])
    assert nothing.exit_code == 2
    assert "no check name contains 'three'" in nothing.output


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full checkpoint of the CPU, with Adam."""
    path = tmp_path_factory.mktemp("plain") / "cpu.pth"
    config = replace(SMALL, devices=("cpu",), epochs=1, save_form="full", optimizer="adam")
    loop.train(config, path, log=loop.silent)
    return path


def twin(plain: Path, path: Path, **changes: Any) -> Path:
    """Save what a GPU would have left, or what `changes` make of it."""
    loaded = torch.load(plain, weights_only=True)
    moved = as_on_gpus(loaded, ["cuda:1"], changes.get("gpus", 2))
    if changes.get("step_too"):
        moved += [state["step"] for state in loaded["optimizer"]["state"].values()]
    if changes.get("rng_too"):
        moved += loaded["rng"]["cuda"]
    if changes.get("other_values"):
        loaded["model"]["fc3.bias"] += 1
        loaded["epoch"] = 7
    if changes.get("other_dtype"):
        loaded["model"]["fc3.bias"] = loaded["model"]["fc3.bias"].double()
        moved.append(loaded["model"]["fc3.bias"])
    if changes.get("other_order"):
        loaded["model"]["conv1.weight"] = loaded["model"].pop("conv1.weight")
    if changes.get("other_arguments"):
        loaded["args"]["devices"] = ["cuda:0"]
    with simulated_cuda(changes.get("index", 1), only=moved), path.open("wb") as file:
        torch.save(loaded, file)
    return path


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({}, None),
        ({"other_values": True}, None),
        ({"index": 0}, "model.conv1.weight: .* on cuda:1, not .* on cuda:0"),
        ({"step_too": True}, "optimizer.state.0.step: .* on cpu, not .* on cuda:1"),
        ({"rng_too": True}, "rng.cuda.0: uint8 .* on cpu, not .* on cuda:1"),
        ({"gpus": 1}, "rng.cuda.1: only in real.pth"),
        ({"other_dtype": True}, "model.fc3.bias: float32 .*, not float64"),
        ({"other_order": True}, "model.conv1.weight: .* of storage 0 .*, not .* of storage 9"),
        ({"other_arguments": True}, "args.devices.0: 'cuda:1', not 'cuda:0'"),
    ],
)
def test_the_tags_of_a_file_are_compared(
    plain: Path, tmp_path: Path, changes: dict[str, Any], found: str | None
) -> None:
    """Tags, lists, generator states and arguments, none of which map_location="cpu" would show."""
    real = twin(plain, tmp_path / "real.pth")
    other = twin(plain, tmp_path / "other.pth", **changes)
    messages = differences(real, other)
    if found is None:
        assert messages == []
    else:
        assert any(re.fullmatch(f"{found}.*", each) for each in messages), messages


def test_a_file_and_its_twin_are_told_apart_by_the_check(plain: Path, tmp_path: Path) -> None:
    real = twin(plain, tmp_path / "real.pth")
    gpu_checks.compare_with_twin(real, plain, ["cuda:1"], 2)
    bad = twin(plain, tmp_path / "bad.pth", step_too=True)
    with pytest.raises(Failed, match=r"bad\.pth differs from its simulation: optimizer"):
        gpu_checks.compare_with_twin(bad, plain, ["cuda:1"], 2)
    assert description(real)["rng.cuda"] == "list of 2"


@pytest.mark.parametrize("form", ["bare", "wrapped", "full"])
def test_what_a_gpu_wrote_is_what_is_simulated(form: str, tmp_path: Path) -> None:
    """The GPU was an H200: tags, layouts, order of storages, generator states, arguments."""
    config = replace(SMALL, devices=("cpu",), save_form=form, optimizer="adam")
    loop.train(config, tmp_path / "cpu.pth", log=loop.silent)
    real = FOLDER / f"cuda/none_{form}_cuda0.pth"
    gpu_checks.compare_with_twin(real, tmp_path / "cpu.pth", ["cuda:0"], 1)


def test_weights_that_differ_fail(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "one.pth")
    torch.save({"module.w": torch.ones(2) + 0.5}, tmp_path / "other.pth")
    with pytest.raises(Failed, match=r"differ by 0\.5"):
        gpu_checks.same_weights(tmp_path / "one.pth", tmp_path / "other.pth", 0.1)
    assert gpu_checks.same_weights(tmp_path / "one.pth", tmp_path / "other.pth", 0.5)
