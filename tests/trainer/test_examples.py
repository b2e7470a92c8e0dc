"""The examples: what their tables say, and that each runs as its docstring says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckptkit.trainer import examples
from ckptkit.trainer.examples import losses, recompute, segments, tensor_types

from ..conftest import ENVIRONMENT

CPU = torch.device("cpu")
NAMES = sorted(path.stem for path in Path(examples.__path__[0]).glob("[a-z]*.py"))


def test_S05_the_table_of_segments() -> None:
    measured = segments.measure(CPU, width=0.1)
    assert list(measured) == [0, 2, 5, 10]
    kept = [row.activations for row in measured.values()]
    assert sorted(kept, reverse=True) == kept
    assert len(set(kept)) == 4
    lines = segments.table(measured)
    assert [line.split()[0] for line in lines] == ["segments", "0", "2", "5", "10"]
    assert [line.split()[5] for line in lines[1:]] == ["1717", "1283", "1043", "959"]
    assert [line.split()[7] for line in lines[1:]] == ["1.000", "0.747", "0.607", "0.559"]


def test_S05_measuring_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    segments.measure(CPU, width=0.01)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("number", "figure"), segments.ARTICLE.items())
def test_S05_the_figures_of_the_article_are_those_of_lost_gradients(
    number: int, figure: int
) -> None:
    assert segments.broken_tape(number) == pytest.approx(figure, rel=0.04)


def test_S06_dropout_needs_the_random_state() -> None:
    measured = recompute.measure(CPU, width=0.5)
    kept, recomputed, without = measured.values()
    assert recomputed.activations == without.activations < 0.7 * kept.activations
    assert recomputed.equals(kept)
    assert not without.equals(kept)
    assert [line.split()[-1] for line in recompute.table(measured)[1:]] == [
        "equal",
        "equal",
        "different",
    ]


def test_S06_without_dropout_the_random_state_is_not_needed() -> None:
    kept, recomputed, without = recompute.measure(CPU, width=0.25, dropout=0.0).values()
    assert recomputed.equals(kept)
    assert without.equals(kept)


def test_S03_four_places_of_the_loss_give_equal_gradients() -> None:
    measured = losses.measure([CPU, CPU])
    assert list(measured) == ["gathered", "balanced", "inside forward", "on the CPU"]
    expected, whole = measured["gathered"]
    for gradients, _ in measured.values():
        torch.testing.assert_close(gradients, expected)
    assert [nbytes for _, nbytes in measured.values()] == [whole, whole // 2, whole // 2, 0]
    lines = losses.table(measured)
    assert [line.split()[-1] for line in lines[1:]] == ["equal"] * 4


def test_S21_the_types_of_tensors() -> None:
    rows = {dtype: names for dtype, *names in tensor_types.rows()}
    assert rows["torch.float32"] == ["torch.FloatTensor", "torch.cuda.FloatTensor"]
    assert rows["torch.int64"] == ["torch.LongTensor", "torch.cuda.LongTensor"]


@pytest.mark.processes
@pytest.mark.parametrize("name", NAMES)
def test_each_example_runs(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"ckptkit.trainer.examples.{name}"],
        env=ENVIRONMENT,
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) >= 4
    assert name in (examples.__doc__ or "")
