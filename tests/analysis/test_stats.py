"""Statistics of checkpoints: torch says the same of each fixture; ties, groups, what has no
numbers."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import api as convert
from ckptkit.analysis.stats import Statistics, TensorStats, depth, statistics
from ckptkit.analysis.summary import summarize
from ckptkit.compute import workers
from ckptkit.core.text import family
from ckptkit.core.tree import Node
from tests.analysis.made import checkpoint, tensor, view
from tests.matrix import NAMES, Fixture


def of(root: Node, label: Any = None) -> tuple[list[TensorStats], Statistics]:
    found = statistics(summarize(checkpoint(root)).rows, label)
    return found.rows, found


@pytest.mark.parametrize("name", NAMES)
def test_torch_says_the_same(name: str) -> None:
    fixture = Fixture(name).needs_reader()
    state = fixture.state()
    rows = summarize(convert.open_checkpoint(fixture.path)).rows
    for row in statistics([row for row in rows if row.name is not None]).rows:
        want = state[row.label]
        assert row.shape == tuple(want.shape)
        want = torch.as_tensor(want)
        real = want.detach().to_dense() if want.layout != torch.strided else want.detach()
        values = real.to(torch.complex128 if real.is_complex() else torch.float64).reshape(-1)
        tally = row.tally
        assert tally.count == values.numel()
        assert tally.nan == int(values.isnan().sum())
        finite = values[values.isfinite()]
        if finite.numel() > 1:
            assert tally.std == pytest.approx(finite.std().item(), rel=1e-9, abs=1e-15)
            assert tally.norm == pytest.approx(finite.norm().item(), rel=1e-9)
            assert tally.mean == pytest.approx(finite.mean().item(), rel=1e-9, abs=1e-12)
            if not finite.is_complex():
                assert (tally.low, tally.high) == (finite.min().item(), finite.max().item())


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux alone")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@pytest.mark.parametrize("name", NAMES[::5])
def test_forked_processes_say_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    results = workers.results

    def noted(function: Callable[[int], Any], count: int, processes: int) -> Any:
        calls.append(count)
        return results(function, count, processes)

    monkeypatch.setattr(workers, "FORKED", 1)
    monkeypatch.setattr(workers, "BATCH", 1000)
    monkeypatch.setattr(workers, "processors", lambda: 2)
    monkeypatch.setattr(workers, "can_fork", lambda: True)
    monkeypatch.setattr(workers, "results", noted)
    fixture = Fixture(name).needs_reader()
    whole = summarize(convert.open_checkpoint(fixture.path))
    here, there = statistics(whole.rows), statistics(whole.rows, fork=True)
    assert str(there) == str(here)  # as texts, since NaN is not equal to itself
    assert len(calls) == (sum(row.nbytes for row in whole.rows if row.tensor.storage) > 0)


def test_what_has_no_numbers_is_skipped_by_name(tmp_path: Path) -> None:
    weights = {
        "plain": torch.ones(2),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "meta": torch.ones(3, device="meta"),
    }
    torch.save(weights, tmp_path / "odd.pth")
    found = statistics(summarize(convert.open_checkpoint(tmp_path / "odd.pth")).rows)
    assert [row.label for row in found.rows] == ["plain"]
    skipped = [(each.name, each.dtype) for each in found.skipped]
    assert skipped == [("quantized", "qint8"), ("meta", "float32")]
    assert "qint8" in found.skipped[0].why and "meta" in found.skipped[1].why


def test_ties_are_read_once_and_count_once_in_totals(
    lengths_read: list[int], tmp_path: Path
) -> None:
    table = torch.arange(12.0).reshape(3, 4)
    tied = {"a.in": table, "a.out": table, "b.t": table.t(), "b.in": table}
    torch.save(tied, tmp_path / "tied.pth")
    rows = summarize(convert.open_checkpoint(tmp_path / "tied.pth")).rows
    lengths_read.clear()
    found = statistics(rows, depth(1))
    assert [row.tally.count for row in found.rows] == [12] * 4
    groups = [(row.label, row.tensors, row.tally.count) for row in found.groups]
    assert groups == [("a", 1, 12), ("b", 2, 24)]
    (total,) = found.totals
    assert (total.tensors, total.tally.count) == (2, 24)  # the transposed view is another tensor
    assert sum(lengths_read) == 2 * 48


def test_kinds_do_not_mix(tmp_path: Path) -> None:
    torch.save(torch.nn.BatchNorm1d(4).state_dict(), tmp_path / "norm.pth")
    rows = summarize(convert.open_checkpoint(tmp_path / "norm.pth")).rows
    found = statistics(rows, lambda name: "norm")
    assert len(found.rows) == 5
    groups = [(row.label, row.kind, row.tensors) for row in found.groups]
    assert groups == [("norm", "float", 4), ("norm", "int", 1)]
    totals = [(row.label, row.kind, row.tally.count) for row in found.totals]
    assert totals == [("", "float", 16), ("", "int", 1)]


def test_groups_are_the_numbers_of_their_tensors() -> None:
    root: dict[Node, Node] = {f"layers.{n}.w": tensor(*range(n, n + 5)) for n in range(4)}
    rows, found = of(root, family)
    (group,) = found.groups
    numbers = torch.tensor([float(n + i) for n in range(4) for i in range(5)], dtype=torch.float64)
    assert (group.label, group.tensors) == ("layers.{0..3}.w", 4)
    assert (group.dtypes, group.shape) == (("float32",), None)
    assert group.tally.mean == pytest.approx(numbers.mean().item())
    assert group.tally.std == pytest.approx(numbers.std().item())
    assert (group.tally.low, group.tally.high) == (0, 7)
    assert group.tally.histogram == found.totals[0].tally.histogram
    assert [row.tally.low for row in rows] == [0, 1, 2, 3]  # which stay as they were


def test_labels() -> None:
    assert depth(2)("a.b.c") == "a.b" and depth(2)("a") == "a"
    assert family("layers.10.w1.3") == "layers.*.w1.*"
    assert family("10") == "*" and family("v2.x") == "v2.x"


def test_tensors_with_odd_values_are_listed() -> None:
    whole = tensor(1, math.nan, math.inf, 4)
    _, found = of({"bad": whole, "good": view(whole, (1,)), "worse": tensor(-math.inf)})
    odd = [(row.label, row.tally.nan, row.tally.infinite) for row in found.odd]
    assert odd == [("bad", 1, 1), ("worse", 0, 1)]


def test_a_file_that_is_cut_names_the_tensor(tmp_path: Path) -> None:
    from ckptkit.core.bytesource import Memory, Range
    from ckptkit.core.dtypes import BY_NAME
    from ckptkit.core.errors import TruncatedError
    from ckptkit.core.tensor import Storage, Tensor

    cut = Tensor(Storage(Range(Memory(bytes(8)), 0, 16)), BY_NAME["float32"], (4,), (1,))
    with pytest.raises(TruncatedError, match=r"layer\.w: "):
        of({"layer.w": cut})
