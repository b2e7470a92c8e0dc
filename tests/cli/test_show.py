"""show: the grid, what is read for it, two files, JSON, pictures."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptkit.core.text import flatten
from tests.cli.conftest import Ckptkit
from tests.remote.servers import serving


@pytest.fixture
def file(tmp_path: Path) -> Path:
    weights = {
        "w": torch.arange(24.0).reshape(2, 3, 4),
        "half": torch.tensor([0.1, math.nan, math.inf], dtype=torch.bfloat16),
        "count": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "complex": torch.tensor([1 + 2j]),
        "packed": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    }
    torch.save({"model": weights}, tmp_path / "run.pth")
    return tmp_path / "run.pth"


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_the_grid(ckptkit: Ckptkit, file: Path) -> None:
    result = ckptkit("show", file, "w", "[1, :, 1:]")
    lines = rows(result.stdout)
    assert lines[0][1:] == ["w,", "float32", "[2,", "3,", "4]", "on", "cpu:", "[1,", "0:3,", "1:4]"]
    assert lines[2:6] == [
        ["1", "2", "3"],
        ["0", "13", "14", "15"],
        ["1", "17", "18", "19"],
        ["2", "21", "22", "23"],
    ]
    assert "9 values: mean 18, std 3.57, min 13, max 23, norm 54.9" in result.stdout


def test_a_corner_and_more_of_it(ckptkit: Ckptkit, file: Path) -> None:
    assert "[0, 0:2, 0:1]" in ckptkit("show", file, "w", "--rows", "2", "--columns", "1").stdout
    assert ckptkit("show", file, "model.w").exit_code == 0
    scalar = ckptkit("show", file, "count").stdout
    assert "int64 [] on cpu: []" in scalar and "1 value: mean 7" in scalar
    assert "no elements" in ckptkit("show", file, "empty").stdout
    assert "1+2j" in ckptkit("show", file, "complex").stdout


def test_no_more_is_read_than_is_shown(
    ckptkit: Ckptkit, tmp_path: Path, lengths_read: list[int]
) -> None:
    torch.save({"w": torch.zeros(2_000, 2_000), "small": torch.zeros(1)}, tmp_path / "large.pth")
    ckptkit("inspect", tmp_path / "large.pth")
    headers = sum(lengths_read)
    for command in (
        ["w"],
        ["w", "[1999, :8]"],
        ["w", "[::500, 7]"],
        ["w", "--with", str(tmp_path / "large.pth")],
    ):
        lengths_read.clear()
        assert ckptkit("show", tmp_path / "large.pth", *command).exit_code == 0
        assert (
            sum(lengths_read) < 2 * headers + 6 * 12 * 8_000
        )  # a row of 8,000 bytes is read, gaps included, or less
    lengths_read.clear()
    assert "4,000,000 values: " in ckptkit("show", tmp_path / "large.pth", "w", "--stats").stdout
    assert sum(lengths_read) > 16_000_000
    assert "(--stats reads all)" in ckptkit("show", tmp_path / "large.pth", "w").stdout


def test_no_more_is_fetched_than_is_shown(ckptkit: Ckptkit, tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    tensors = {f"w{n}": torch.full((1_000, 1_000), float(n)) for n in range(8)}
    save_file(tensors, tmp_path / "large.safetensors")
    with serving(tmp_path) as server:
        result = ckptkit("show", f"{server.root}/large.safetensors", "w5", "[500, :4]")
    assert result.exit_code == 0 and "4 values: mean 5" in result.stdout
    assert sum(request.stop - request.start for request in server.requests) < 1 << 20


def test_two_files_side_by_side(ckptkit: Ckptkit, file: Path, tmp_path: Path) -> None:
    other = torch.arange(24.0).reshape(2, 3, 4)
    other[1, 2, 3] = 99
    save_file({"x": other}, tmp_path / "b.safetensors")
    result = ckptkit(
        "show",
        file,
        "w",
        "1",
        "--with",
        tmp_path / "b.safetensors",
        "--name-b",
        "x",
        "--columns",
        "4",
    )
    assert ["2", "20", "21", "22", "23", "|", "20", "21", "22", "99*"] in rows(result.stdout)
    assert "1 of 12 values differ, by up to 76" in result.stdout
    same = ckptkit("show", file, "half", "--with", file)
    assert "all values are equal" in same.stdout and "*" not in same.stdout
    assert (
        "not compared: [2, 3, 4] and [3]"
        in ckptkit("show", file, "w", "--with", file, "--name-b", "half").stdout
    )


def test_the_schema(ckptkit: Ckptkit, file: Path) -> None:
    found: Any = json.loads(ckptkit("show", file, "half", "--json").stdout)
    assert found["schema"] == "ckptkit.show/1"
    (shown,) = found["tensors"]
    assert shown.pop("stats")["nan"] == 1
    exact = float(torch.tensor(0.1, dtype=torch.bfloat16))
    assert shown == {
        "file": str(file), "name": "half", "dtype": "bfloat16", "shape": [3], "device": "cpu", "slice": "[0:3]",
        "selected": [3], "values": [exact, "NaN", "Infinity"],
    }  # fmt: skip
    both = json.loads(ckptkit("show", file, "w", "0, 0", "--with", file, "--json").stdout)[
        "tensors"
    ]
    assert [each["values"] for each in both] == [[0.0, 1.0, 2.0, 3.0]] * 2
    assert json.loads(ckptkit("show", file, "complex", "0", "--json").stdout)["tensors"][0][
        "values"
    ] == [1.0, 2.0]


def test_json_of_too_much(ckptkit: Ckptkit, tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1_100, 1_000)}, tmp_path / "large.pth")
    result = ckptkit("show", tmp_path / "large.pth", "w", "--json")
    assert result.exit_code == 2 and "1,100,000 values" in result.stderr


def test_what_is_not_there(ckptkit: Ckptkit, file: Path) -> None:
    result = ckptkit("show", file, "complexe")
    assert result.exit_code == 2 and "did you mean complex?" in result.stderr
    assert ckptkit("show", file, "w", "5").exit_code == 2
    assert ckptkit("show", file, "packed").exit_code == 3


def test_names_are_escaped(ckptkit: Ckptkit, tmp_path: Path) -> None:
    torch.save({"a\x1b[31m": torch.ones(1)}, tmp_path / "odd.pth")
    result = ckptkit("show", tmp_path / "odd.pth", "a\x1b[31m")
    assert result.exit_code == 0 and "\x1b" not in result.stdout


def test_a_vector_takes_several_lines(ckptkit: Ckptkit, tmp_path: Path) -> None:
    torch.save({"v": torch.arange(100, 164)}, tmp_path / "v.pth")
    shown = ckptkit("show", tmp_path / "v.pth", "v", "[2:]", "--columns", 20, "--rows", 3)
    assert "int64 [64] on cpu: [2:62]" in shown.stdout
    grid = rows(shown.stdout.split("\n\n")[1])
    assert grid[0] == [f"+{n}" for n in range(20)]
    assert grid[1:] == [
        [str(start), *map(str, range(100 + start, 120 + start))] for start in (2, 22, 42)
    ]


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
def test_different_numbers_look_different(
    values: torch.Tensor, ckptkit: Ckptkit, tmp_path: Path
) -> None:
    torch.save({"w": values}, tmp_path / "w.pth")
    _, grid, *_ = ckptkit("show", tmp_path / "w.pth", "w").stdout.split("\n\n")
    texts = list(flatten(line.split()[1:] for line in grid.splitlines()[1:]))
    assert len(texts) == values.numel()
    assert len(set(texts)) == len(set(values.flatten().tolist()))
    numbers = torch.tensor([float(text) for text in texts], dtype=torch.float64)
    assert torch.allclose(numbers, values.flatten().double(), rtol=1e-2)


@pytest.mark.parametrize("words", [[], ["\x1b[31mred"]])
def test_names_with_nan_are_escaped(words: list[str], ckptkit: Ckptkit, tmp_path: Path) -> None:
    torch.save({"\x1b[31mred": torch.tensor([math.nan])}, tmp_path / "nan.pth")
    shown = ckptkit("show", tmp_path / "nan.pth", *words, "--nan").stdout
    assert "\x1b" not in shown and r"\x1b[31mred: 1 NaN" in shown


def test_the_bins_of_a_histogram_look_different(ckptkit: Ckptkit, tmp_path: Path) -> None:
    torch.save({"w": 1 + torch.randn(300, dtype=torch.float64) * 1e-9}, tmp_path / "w.pth")
    *_, histogram = ckptkit("show", tmp_path / "w.pth", "w").stdout.split("\n\n")
    starts = [line.split()[0] for line in histogram.splitlines()[1:]]
    assert len(starts) > 4 and len(set(starts)) == len(starts)
