"""The command for machines with GPUs, as far as a machine without one can try it."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import ckptkit
from ckptkit.trainer import gpu, loop
from ckptkit.trainer.gpu import CHECKS, Failed, Hardware, Skip

CPU = Hardware(torch.device("cpu"), 0, "no GPU")
QUICK = [
    "S02 S10 S17 DataParallel over two devices",
    "S03 a loss on each device",
    "S04 memory report",
    "resuming is exact",
    "amp computes in bfloat16, also in the threads of replicas",
]
# What these check is tested beside them, in a shorter run.
LONG = [
    "S05 segments beside the article's figures",
    "S06 S24 recomputing with dropout",
    "S11 S12 S14 load and load_into onto the device",
    "S19 equal seeds give equal bytes",
    "DDP with gloo, two processes on one device",
    "FSDP saves, resumes, and is evaluated from its folder",
]


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)]
)
def test_a_check_passes_on_the_cpu(name: str, tmp_path: Path) -> None:
    result = gpu.run_check(CHECKS[name], name, CPU, tmp_path / "check")
    assert (result.status, result.why) == ("passed", "")


def test_what_needs_a_gpu_is_skipped_without_one(tmp_path: Path) -> None:
    skipped = set()
    for number, (name, function) in enumerate(CHECKS.items()):
        if name in (*QUICK, *LONG) or name.startswith(("S01", "S07")):
            continue
        result = gpu.run_check(function, name, CPU, tmp_path / str(number))
        assert (result.status, result.why) == ("skipped", "needs 1 GPU, this machine has 0")
        skipped.add(name)
    assert len(skipped) == 6


def test_every_failure_is_a_result(tmp_path: Path) -> None:
    def skips(on: Hardware, folder: Path) -> dict[str, Any]:
        raise Skip("too small")

    def fails(on: Hardware, folder: Path) -> dict[str, Any]:
        gpu.require(1 > 2, "1 is not more")
        raise AssertionError

    def breaks(on: Hardware, folder: Path) -> dict[str, Any]:
        raise RuntimeError("CUDA | error\nmore")

    results = [
        gpu.run_check(each, each.__name__, CPU, tmp_path / each.__name__)
        for each in (skips, fails, breaks)
    ]
    assert [(each.status, each.why) for each in results] == [
        ("skipped", "too small"),
        ("failed", "Failed: 1 is not more"),
        ("failed", "RuntimeError: CUDA | error\nmore"),
    ]
    text = gpu.as_markdown(results, CPU)
    assert "| breaks | failed | 0.0 | RuntimeError: CUDA / error more |" in text
    assert gpu.report(results, CPU)["results"][0]["status"] == "skipped"


def test_the_command_writes_both_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def passes(on: Hardware, folder: Path) -> dict[str, Any]:
        (folder.parent / "cuda").mkdir()
        (folder.parent / "cuda" / "none_bare_cuda0.pth").touch()
        return {"table": ["a  b", "1  2"]}

    def fails(on: Hardware, folder: Path) -> dict[str, Any]:
        raise Failed("no")

    monkeypatch.setattr(gpu, "CHECKS", {"one": passes})
    done = CliRunner().invoke(gpu.command, [str(tmp_path / "out")])
    assert done.exit_code == 0
    assert done.output.startswith("passed ")
    found = json.loads((tmp_path / "out/report.json").read_text())
    assert found["results"][0]["facts"] == {"table": ["a  b", "1  2"]}
    assert "```text\na  b\n1  2\n```" in (tmp_path / "out/report.md").read_text()
    assert (tmp_path / "out/cuda/none_bare_cuda0.pth").exists()
    monkeypatch.setattr(gpu, "CHECKS", {"one": passes, "two": fails})
    assert CliRunner().invoke(gpu.command, [str(tmp_path / "out")]).exit_code == 1


def test_differences_are_all_but_values(
    tmp_path: Path, simulated_cuda: Callable[..., AbstractContextManager[None]]
) -> None:
    config = replace(gpu.SMALL, devices=("cpu",), epochs=1, save_form="full", optimizer="adam")
    with simulated_cuda(0):
        loop.train(config, tmp_path / "real.pth", log=loop.silent)
    loop.train(replace(config, seed=3), tmp_path / "cpu.pth", log=loop.silent)
    moved = ckptkit.remap(ckptkit.open(tmp_path / "cpu.pth"), "cuda:0")
    ckptkit.save(moved, tmp_path / "simulated.pth")
    assert gpu.differences(tmp_path / "real.pth", tmp_path / "simulated.pth") == []
    other = torch.load(tmp_path / "cpu.pth", weights_only=True)
    other["model"]["fc3.bias"] = other["model"]["fc3.bias"].double()
    other["optimizer"]["more"] = 1
    torch.save(other, tmp_path / "other.pth")
    assert gpu.differences(tmp_path / "real.pth", tmp_path / "other.pth") == [
        "model.fc3.bias: torch.float32 [10]",
        "optimizer: other keys",
    ]


def test_weights_that_differ_fail(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "one.pth")
    torch.save({"w": torch.ones(2) + 0.5}, tmp_path / "other.pth")
    with pytest.raises(Failed, match=r"differ by 0\.5"):
        gpu.same_weights(tmp_path / "one.pth", tmp_path / "other.pth", 0.1)
    assert gpu.same_weights(tmp_path / "one.pth", tmp_path / "other.pth", 0.5)
