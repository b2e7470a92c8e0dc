"""Memory: what is reported, and that it does not grow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptkit.trainer import log, loop, parallel
from ckptkit.trainer.config import RequestError

from .conftest import Prepare, train, trained


def test_saved_counts_each_storage_once_and_no_parameters() -> None:
    layer = nn.Linear(10, 20, bias=False)
    inputs = torch.randn(5, 10)
    with log.SavedBytes(layer) as saved:
        outputs = layer(inputs) * layer(inputs)
    assert saved.now == 4 * (5 * 10 + 2 * 5 * 20)
    outputs.sum().backward()
    del outputs
    assert saved.now == 0
    assert saved.peak == 4 * (5 * 10 + 2 * 5 * 20)


def test_S04_a_report_for_each_step(tmp_path: Path) -> None:
    """The size of the model is what modelsize prints: 4 bytes for each parameter."""
    report = tmp_path / "memory.jsonl"
    weights = trained(tmp_path, epochs=1, batch_size=128, memory_report=report)["model"]
    steps = [json.loads(line) for line in report.read_text().splitlines()]
    size = 4 * sum(each.numel() for each in weights.values())
    assert [each["step"] for each in steps] == [1, 2, 3, 4]
    for each in steps:
        assert each["parameters"] == each["gradients"] == each["optimizer"] == size
        assert each["activations"] > 128 * 3 * 32 * 32 * 4
        assert each["peak"] == {"cpu": 3 * size + each["activations"]}


def test_S05_the_report_does_not_change_the_weights(tmp_path: Path) -> None:
    """It draws no random numbers: with and without it, the same bytes."""
    options: dict[str, Any] = {"model": "mlp", "width": 0.05, "epochs": 1, "save_form": "full"}
    train(tmp_path / "without.pth", **options)
    train(tmp_path / "with.pth", **options, memory_report=tmp_path / "memory.jsonl")
    assert (tmp_path / "with.pth").read_bytes() == (tmp_path / "without.pth").read_bytes()


def test_S04_activations_on_a_gpu_are_those_of_the_forward_pass(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Gradients that the backward pass allocates do not count."""
    allocated = [1000]
    for name, value in {
        "memory_allocated": lambda device: allocated[-1],
        "max_memory_allocated": lambda device: 9000,
        "memory_reserved": lambda device: 20000,
        "mem_get_info": lambda device: (70000, 100000),
        "reset_peak_memory_stats": lambda device: None,
        "synchronize": lambda device: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    run = prepared(batch_size=512)
    run.model.register_forward_hook(lambda *_: allocated.append(1500))
    run.group = parallel.ProcessGroup((torch.device("cuda:0"),))
    with log.memory_report(run, tmp_path / "memory.jsonl") as step, step():
        loss = run.loss(run.wrapped(run.data.train[0][:8]), run.data.train[1][:8])
        allocated.append(7000)  # gradients
        loss.backward()  # type: ignore[no-untyped-call]
    row = json.loads((tmp_path / "memory.jsonl").read_text())
    assert row["activations"] == 500
    assert row["peak"] == {"cuda:0": 9000}
    assert row["reserved"] == {"cuda:0": 20000}
    assert row["used"] == {"cuda:0": 30000}  # as nvidia-smi shows it
    assert row["seconds"] > 0


def test_a_snapshot_needs_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match="records the allocator of a GPU"):
        train(tmp_path / "run.pth", memory_snapshot=tmp_path / "snapshot.pickle")
    called: list[Any] = []
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda **how: called.append(how))
    monkeypatch.setattr(memory, "_dump_snapshot", called.append)
    run: Any = type("Fake", (), {"group": parallel.ProcessGroup((torch.device("cuda:0"),))})()
    with pytest.raises(ValueError, match="within"), log.memory_snapshot(run, tmp_path / "s"):
        raise ValueError("within")
    assert called == [{}, str(tmp_path / "s"), {"enabled": None}]


def test_S08_memory_does_not_grow_over_epochs(prepared: Prepare) -> None:
    """And evaluation keeps nothing."""
    run = prepared(batch_size=128)
    with log.SavedBytes(run.model) as saved:
        loop.test(run)
        assert saved.peak == 0
        loop.train_epoch(run)
        peak = saved.peak
        for _ in range(3):
            loop.train_epoch(run)
            assert saved.now == 0
    assert saved.peak == peak > 0
