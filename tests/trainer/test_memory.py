"""Memory: what is reported, and that it does not grow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ckptkit.trainer import loop, memory
from ckptkit.trainer.config import Config, Files

from .conftest import Prepare


def test_saved_counts_each_storage_once_and_no_parameters() -> None:
    layer = nn.Linear(10, 20, bias=False)
    inputs = torch.randn(5, 10)
    with memory.Saved(layer) as saved:
        outputs = layer(inputs) * layer(inputs)
    assert saved.now == 4 * (5 * 10 + 2 * 5 * 20)
    outputs.sum().backward()
    del outputs
    assert saved.now == 0
    assert saved.peak == 4 * (5 * 10 + 2 * 5 * 20)


def test_S04_a_report_for_each_step(tmp_path: Path) -> None:
    report = tmp_path / "memory.jsonl"
    config = Config(data="random", width=0.5, devices=("cpu",), epochs=1, batch_size=128)
    loop.train(config, tmp_path / "run.pth", Files(memory_report=report), say=lambda line: None)
    steps = [json.loads(line) for line in report.read_text().splitlines()]
    weights = torch.load(tmp_path / "run.pth", weights_only=True)["model"]
    size = sum(each.nbytes for each in weights.values())
    assert [each["step"] for each in steps] == [1, 2, 3, 4]
    for each in steps:
        assert each["parameters"] == each["gradients"] == each["optimizer"] == size
        assert each["activations"] > 128 * 3 * 32 * 32 * 4
        assert each["peak"] == {"cpu": 3 * size + each["activations"]}


def test_S05_the_table_of_segments() -> None:
    measured = memory.segments(width=0.1)
    assert list(measured) == [0, 2, 5, 10]
    assert sorted(measured.values(), reverse=True) == list(measured.values())
    lines = memory.segments_table(measured)
    assert [line.split()[0] for line in lines] == ["segments", "0", "2", "5", "10"]
    assert [line.split()[4] for line in lines[1:]] == ["1717", "1283", "1043", "959"]
    assert [line.split()[6] for line in lines[1:]] == ["1.000", "0.747", "0.607", "0.559"]


@pytest.mark.parametrize(("segments", "figure"), memory.ARTICLE.items())
def test_S05_the_figures_of_the_article_are_those_of_lost_gradients(
    segments: int, figure: int
) -> None:
    assert memory.broken_tape(segments) == pytest.approx(figure, rel=0.04)


def test_S03_a_balanced_loss_needs_less_on_the_first_device(prepared: Prepare) -> None:
    lines = memory.tables(prepared(parallel="dp-balanced"))
    assert "simulated" in lines[0]
    joined, balanced = (float(line.split()[1]) for line in lines[1:])
    assert balanced < 0.8 * joined


def test_no_table_where_nothing_is_compared(prepared: Prepare) -> None:
    assert memory.tables(prepared()) == []


def test_S08_memory_does_not_grow_over_epochs(prepared: Prepare) -> None:
    run = prepared(batch_size=128)
    tracker = memory.Tracker(run, None)
    with memory.Saved(run.model) as saved:
        loop.train_epoch(run, tracker)
        peak = saved.peak
        for _ in range(3):
            loop.train_epoch(run, tracker)
            assert saved.now == 0
    assert saved.peak == peak > 0


def test_S08_a_sum_of_losses_that_are_tensors_would_grow(prepared: Prepare) -> None:
    """The test above would detect this."""
    run = prepared(batch_size=128)
    inputs, targets = run.data.train
    total: Tensor | float = 0.0
    with memory.Saved(run.model) as saved:
        for part in range(0, 512, 128):
            total += run.loss(run.wrapped(inputs[part : part + 128]), targets[part : part + 128])
        assert saved.now > 3 * saved.peak / 4
    assert isinstance(total, Tensor)


def test_S08_evaluation_keeps_nothing(prepared: Prepare) -> None:
    run = prepared()
    with memory.Saved(run.model) as saved:
        loop.test(run)
    assert saved.peak == 0
