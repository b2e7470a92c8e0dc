"""The command for machines with GPUs, as far as a machine without one can try it.

The mock of CUDA is a machine that has two GPUs by its own account and computes on the CPU: no check
may take that for a GPU.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from ckptkit.trainer import gpu, gpu_checks, parallel
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
from ckptkit.trainer.gpu_checks import CHECKS
from ckptkit.trainer.simulated import as_on_gpus, description, differences, simulated_cuda
from tests.matrix import FOLDER
from tests.trainer import slow_checks
from tests.trainer.conftest import ROWS, train

CPU = GpuMachine(0, "no GPU")
SLOW = [
    "S05", "S06", "S09", "S11", "S25 DDP with gloo", "S25 FSDP", "a run on the GPU", "amp in float16",
    "S02 seconds", "S07",
]  # fmt: skip
NEEDS_GPU = [check.name for check in CHECKS if check.needs]
QUICK = [check.name for check in CHECKS if not check.needs and not check.name.startswith((*SLOW,))]


def named(start: str) -> DeviceCheck:
    (check,) = [each for each in CHECKS if each.name.startswith(start)]
    return check


def test_every_row_has_a_check() -> None:
    assert set(re.findall(r"S\d\d", " ".join(check.name for check in CHECKS))) == set(ROWS)


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
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
    witness, reports = Witness(), [{"backend": each} for each in processes]
    witness.devices = set(devices)
    with nullcontext() if why is None else pytest.raises(Failed, match=why):
        require_evidence(DeviceCheck("any", gpus, slow_checks.hangs), witness, reports)


def test_the_witness_sees_layers_in_threads() -> None:
    with Witness() as witness:
        with torch.device("meta"):
            nn.LSTM(2, 2)(torch.zeros(1, 2))
        parallel.Replicated(nn.Linear(2, 2), (torch.device("cpu"),) * 2)(torch.zeros(4, 2))
    assert witness.devices == {"meta", "cpu"}
    nn.Linear(2, 2, device="meta")(torch.zeros(1, 2, device="meta"))
    assert witness.gpus == []


def passes(on: GpuMachine) -> dict[str, Any]:
    return {"table": ["a  b", "1  2"]}


def fails(on: GpuMachine) -> dict[str, Any]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = True
    require(1 > 2, "1 is not more")
    raise AssertionError


def raises(on: GpuMachine) -> dict[str, Any]:
    raise RuntimeError("CUDA | error\nmore")


def test_the_command_writes_both_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every failure is a result, after which the switches of torch are as before."""

    def here(check: DeviceCheck, on: GpuMachine, folder: Path, limit: float) -> CheckResult:
        return run_check(check, on, folder)

    def command(*words: str) -> Result:
        return CliRunner().invoke(gpu.command, [str(tmp_path / "out"), *words])

    monkeypatch.setattr(gpu, "run_limited", here)
    checks = [DeviceCheck(each.__name__, 0, each) for each in (passes, fails, raises)]
    monkeypatch.setattr(gpu, "CHECKS", checks)
    torch.use_deterministic_algorithms(True)
    done = command()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.backends.cudnn.benchmark
    assert done.exit_code == 1
    assert done.output.startswith("passed ")
    assert done.output.endswith("1 passed, 0 simulated, 0 not possible here, 2 failed\n")
    found = json.loads((tmp_path / "out/report.json").read_text())
    assert {"driver", "cuda", "cudnn", "nccl", "gpus"} <= set(found["versions"])
    assert found["results"][0]["facts"] == {"table": ["a  b", "1  2"]}
    assert [(each["status"], each["why"]) for each in found["results"]] == [
        ("passed", ""),
        ("failed", "Failed: 1 is not more"),
        ("failed", "RuntimeError: CUDA | error\nmore"),
    ]
    assert 'raise RuntimeError("CUDA | error\\nmore")' in found["results"][2]["traceback"]
    text = (tmp_path / "out/report.md").read_text()
    assert "```text\na  b\n1  2\n```" in text
    assert "| raises | failed |  | 0.0 | RuntimeError: CUDA / error more |" in text
    assert "Traceback (most recent call last)" in text
    assert command("--only", "PASSES").exit_code == 0
    nothing = command("--only", "three")
    assert nothing.exit_code == 2
    assert "no check name contains 'three'" in nothing.output


def is_alive(process: int) -> bool:
    """A zombie, which nothing has waited for yet, is not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_a_check_that_hangs_ends_with_its_processes(tmp_path: Path) -> None:
    check = DeviceCheck("hangs", 1, slow_checks.hangs)
    for limit in (8, 240):  # a busy machine takes longer to start the check
        started = monotonic()
        result = run_limited(check, CPU, tmp_path / f"{limit}", limit)
        assert (result.status, result.why) == ("failed", f"took longer than {limit} s")
        assert monotonic() - started < limit + 50
        if (tmp_path / "child").exists():
            break
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


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full checkpoint of the CPU, with Adam."""
    path = tmp_path_factory.mktemp("plain") / "cpu.pth"
    train(path, epochs=1, save_form="full", optimizer="adam")
    return path


Change = Callable[[dict[str, Any], list[torch.Tensor]], object]  # of a tree, and what is tagged


def twin(plain: Path, path: Path, change: Change | None = None, index: int = 1) -> Path:
    """Save what a GPU would have left, or what `change` makes of it."""
    tree = torch.load(plain, weights_only=True)
    tagged = as_on_gpus(tree, ["cuda:1"], 2)
    if change is not None:
        change(tree, tagged)
    with simulated_cuda(index, only=tagged), path.open("wb") as file:
        torch.save(tree, file)
    return path


def steps_too(tree: dict[str, Any], tagged: list[torch.Tensor]) -> None:
    tagged += [state["step"] for state in tree["optimizer"]["state"].values()]


def other_values(tree: dict[str, Any], tagged: list[torch.Tensor]) -> None:
    tree["model"]["fc3.bias"] += 1
    tree["epoch"] = 7


def other_dtype(tree: dict[str, Any], tagged: list[torch.Tensor]) -> None:
    tree["model"]["fc3.bias"] = tree["model"]["fc3.bias"].double()
    tagged.append(tree["model"]["fc3.bias"])


def other_order(tree: dict[str, Any], tagged: list[torch.Tensor]) -> None:
    tree["model"]["conv1.weight"] = tree["model"].pop("conv1.weight")


@pytest.mark.parametrize(
    ("change", "index", "found"),
    [
        (None, 1, None),
        (other_values, 1, None),
        (None, 0, "model.conv1.weight: .* on cuda:1, not .* on cuda:0"),
        (steps_too, 1, "optimizer.state.0.step: .* on cpu, not .* on cuda:1"),
        (lambda tree, tagged: tagged.extend(tree["rng"]["cuda"]), 1, "rng.cuda.0: uint8 .* on cpu, not .* on cuda:1"),
        (lambda tree, tagged: tree["rng"]["cuda"].pop(), 1, "rng.cuda.1: only in real.pth"),
        (other_dtype, 1, "model.fc3.bias: float32 .*, not float64"),
        (other_order, 1, "model.conv1.weight: .* of storage 0 .*, not .* of storage 9"),
        (lambda tree, tagged: tree["args"].update(devices=["cuda:0"]), 1, "args.devices.0: 'cuda:1', not 'cuda:0'"),
    ],
)  # fmt: skip
def test_the_tags_of_a_file_are_compared(
    plain: Path, tmp_path: Path, change: Change | None, index: int, found: str | None
) -> None:
    """Tags, lists, generator states and arguments, none of which map_location="cpu" would show."""
    real = twin(plain, tmp_path / "real.pth")
    messages = differences(real, twin(plain, tmp_path / "other.pth", change, index))
    if found is None:
        assert messages == []
    else:
        assert any(re.fullmatch(f"{found}.*", each) for each in messages), messages


def test_a_file_and_its_twin_are_told_apart_by_the_check(plain: Path, tmp_path: Path) -> None:
    real = twin(plain, tmp_path / "real.pth")
    gpu_checks.compare_with_twin(real, plain, ["cuda:1"], 2)
    bad = twin(plain, tmp_path / "bad.pth", steps_too)
    with pytest.raises(Failed, match=r"bad\.pth differs from its simulation: optimizer"):
        gpu_checks.compare_with_twin(bad, plain, ["cuda:1"], 2)
    assert description(real)["rng.cuda"] == "list of 2"


@pytest.mark.parametrize("form", ["bare", "wrapped", "full"])
def test_what_a_gpu_wrote_is_what_is_simulated(form: str, tmp_path: Path) -> None:
    """The GPU was an H200: tags, layouts, order of storages, generator states, arguments."""
    train(tmp_path / "cpu.pth", save_form=form, optimizer="adam")
    real = FOLDER / f"cuda/none_{form}_cuda0.pth"
    gpu_checks.compare_with_twin(real, tmp_path / "cpu.pth", ["cuda:0"], 1)


def test_weights_that_differ_fail(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "one.pth")
    torch.save({"module.w": torch.ones(2) + 0.5}, tmp_path / "other.pth")
    with pytest.raises(Failed, match=r"differ by 0\.5"):
        gpu_checks.same_weights(replace(CPU, folder=tmp_path), most=0.1)
    assert gpu_checks.same_weights(replace(CPU, folder=tmp_path), most=0.5)
