"""show: the grid, what is read for it, two files, JSON, NaN and infinities."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptkit.core.text import flatten
from tests.cli.conftest import Ckptkit
from tests.remote.servers import serving

SIZED = torch.arange(24.0).reshape(2, 3, 4)


@pytest.fixture(autouse=True)
def file(here: None) -> None:
    weights = {
        "w": SIZED,
        "half": torch.tensor([0.1, math.nan, math.inf], dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "complex": torch.tensor([1 + 2j]),
        "packed": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
        "v": torch.arange(100, 164),
    }
    torch.save({"model": weights}, "run.pth")


def rows(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines()]


def test_the_grid(ckptkit: Ckptkit) -> None:
    text = ckptkit("show run.pth w '[1, :, 1:]'").stdout
    assert rows(text)[0] == "run.pth: w, float32 [2, 3, 4] on cpu: [1, 0:3, 1:4]"
    assert rows(text)[2:6] == ["1 2 3", "0 13 14 15", "1 17 18 19", "2 21 22 23"]
    assert "9 values: mean 18, std 3.57, min 13, max 23, norm 54.9" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("w --rows 2 --columns 1", "[0, 0:2, 0:1]"),
        ("model.w", "24 values"),
        ("count", "int64 [] on cpu: []"),
        ("count", "1 value: mean 7"),
        ("empty", "no elements"),
        ("complex", "1+2j"),
    ],
)
def test_a_corner_and_more_of_it(words: str, said: str, ckptkit: Ckptkit) -> None:
    assert said in ckptkit(f"show run.pth {words}", code=0).stdout


def test_no_more_is_read_than_is_shown(ckptkit: Ckptkit, lengths_read: list[int]) -> None:
    torch.save({"w": torch.zeros(2_000, 2_000), "small": torch.zeros(1)}, "large.pth")
    ckptkit("inspect large.pth")
    headers = sum(lengths_read)
    for words in ("w", "w '[1999, :8]'", "w '[::500, 7]'", "w --with large.pth"):
        lengths_read.clear()
        ckptkit(f"show large.pth {words}", code=0)
        # a row of 8,000 bytes is read, gaps included, or less
        assert sum(lengths_read) < 2 * headers + 6 * 12 * 8_000
    lengths_read.clear()
    assert "4,000,000 values: " in ckptkit("show large.pth w --stats").stdout
    assert sum(lengths_read) > 16_000_000
    assert "(--stats reads all)" in ckptkit("show large.pth w").stdout


def test_no_more_is_fetched_than_is_shown(ckptkit: Ckptkit, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    tensors = {f"w{n}": torch.full((1_000, 1_000), float(n)) for n in range(8)}
    save_file(tensors, "large.safetensors")
    with serving(tmp_path) as server:
        result = ckptkit(f"show {server.root}/large.safetensors w5 '[500, :4]'", code=0)
    assert "4 values: mean 5" in result.stdout
    assert sum(request.stop - request.start for request in server.requests) < 1 << 20


def test_two_files_side_by_side(ckptkit: Ckptkit) -> None:
    other = SIZED.clone()
    other[1, 2, 3] = 99
    save_file({"x": other}, "b.safetensors")
    text = ckptkit("show run.pth w 1 --with b.safetensors --name-b x --columns 4").stdout
    assert "2 20 21 22 23 | 20 21 22 99*" in rows(text)
    assert "1 of 12 values differ, by up to 76" in text
    same = ckptkit("show run.pth half --with run.pth").stdout
    assert "all values are equal" in same and "*" not in same
    shapes = ckptkit("show run.pth w --with run.pth --name-b half").stdout
    assert "not compared: [2, 3, 4] and [3]" in shapes


def test_the_schema(as_json: Callable[..., Any]) -> None:
    found = as_json("show run.pth half")
    assert found["schema"] == "ckptkit.show/1"
    (shown,) = found["tensors"]
    assert shown.pop("stats")["nan"] == 1
    exact = float(torch.tensor(0.1, dtype=torch.bfloat16))
    assert shown == {
        "file": "run.pth", "name": "half", "dtype": "bfloat16", "shape": [3], "device": "cpu",
        "slice": "[0:3]", "selected": [3], "values": [exact, "NaN", "Infinity"],
    }  # fmt: skip
    both = as_json("show run.pth w '0, 0' --with run.pth")["tensors"]
    assert [each["values"] for each in both] == [[0.0, 1.0, 2.0, 3.0]] * 2
    assert as_json("show run.pth complex 0")["tensors"][0]["values"] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("large.pth w --json", 2, "1,100,000 values"),
        ("run.pth complexe", 2, "did you mean complex?"),
        ("run.pth w 5", 2, ""),
        ("run.pth packed", 3, ""),
        ("run.pth", 2, ""),
    ],
)
def test_what_cannot_be_shown(words: str, code: int, said: str, ckptkit: Ckptkit) -> None:
    torch.save({"w": torch.zeros(1_100, 1_000)}, "large.pth")
    assert said in ckptkit(f"show {words}", code=code).stderr


def test_a_vector_takes_several_lines(ckptkit: Ckptkit) -> None:
    text = ckptkit("show run.pth v [2:] --columns 20 --rows 3").stdout
    assert "int64 [64] on cpu: [2:62]" in text
    heads, *lines = rows(text.split("\n\n")[1])
    assert heads.split() == [f"+{n}" for n in range(20)]
    assert lines == [" ".join(map(str, (n, *range(100 + n, 120 + n)))) for n in (2, 22, 42)]


@pytest.mark.parametrize(
    "values",
    [
        1 + torch.randn(64) * 1e-6,
        1 + torch.randn(12, 3, dtype=torch.float64) * 1e-14,
        torch.arange(40) + 2**60,
        torch.randn(5, 5).bfloat16(),
        torch.cat([torch.randn(30) * 1e30, torch.randn(30) * 1e-30]),
    ],
)
def test_different_numbers_look_different(values: torch.Tensor, ckptkit: Ckptkit) -> None:
    torch.save({"w": values}, "w.pth")
    _, grid, *_ = ckptkit("show w.pth w").stdout.split("\n\n")
    texts = list(flatten(line.split()[1:] for line in grid.splitlines()[1:]))
    assert len(texts) == values.numel()
    assert len(set(texts)) == len(set(values.flatten().tolist()))
    numbers = torch.tensor([float(text) for text in texts], dtype=torch.float64)
    assert torch.allclose(numbers, values.flatten().double(), rtol=1e-2)


def test_the_bins_of_a_histogram_look_different(ckptkit: Ckptkit) -> None:
    torch.save({"w": 1 + torch.randn(300, dtype=torch.float64) * 1e-9}, "w.pth")
    *_, histogram = ckptkit("show w.pth w").stdout.split("\n\n")
    starts = [line.split()[0] for line in histogram.splitlines()[1:]]
    assert len(starts) > 4 and len(set(starts)) == len(starts)


# NaN and infinities


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_nan(dtype: torch.dtype, ckptkit: Ckptkit) -> None:
    values = torch.zeros(300, 1000)
    values[7, 31], values[299, 999], values[0, 5] = math.nan, -math.inf, math.inf
    torch.save({"w": values.to(dtype).t(), "none": torch.arange(3)}, "a.pth")
    first, *lines = ckptkit("show a.pth w --nan", code=1).stdout.splitlines()
    assert first.endswith(": w: 1 NaN, 2 infinite")
    odd = (~torch.isfinite(values.t())).nonzero().tolist()
    assert lines == [f"  {at} {kind}" for at, kind in zip(odd, ("inf", "nan", "-inf"), strict=True)]
    assert "0 NaN" in ckptkit("show a.pth none --nan", code=0).stdout


def test_nan_of_all_tensors(ckptkit: Ckptkit) -> None:
    bad = torch.ones(3, 4)
    bad[1, 2], bad[2, 3] = math.nan, math.inf
    meta = torch.empty(3, device="meta")
    saved = {"fine": torch.ones(5), "bad": bad, "count": torch.tensor(3), "meta": meta}
    state = {0: {"exp_avg": bad[1:].clone()}}
    torch.save({"model": saved, "optimizer": {"state": state}}, "a.pth")
    assert ckptkit("show a.pth --nan", code=1).stdout.splitlines() == [
        "a.pth: bad: 1 NaN, 1 infinite", "  [1, 2] nan", "  [2, 3] inf",
        "a.pth: optimizer.state.0.exp_avg: 1 NaN, 1 infinite", "  [0, 2] nan", "  [1, 3] inf",
        "a.pth: 2 of 3 tensors with NaN or infinities",
    ]  # fmt: skip
    torch.save({"fine": torch.ones(5)}, "b.pth")
    assert "no tensor with NaN" in ckptkit("show b.pth --nan", code=0).stdout


def test_nan_lists_the_first(ckptkit: Ckptkit) -> None:
    torch.save({"w": torch.full((4, 5), math.nan)}, "a.pth")
    lines = ckptkit("show a.pth w --nan").stdout.splitlines()
    assert lines[1] == "  [0, 0] nan" and lines[-1] == "  and 10 more" and len(lines) == 12
