"""stats: the table, the JSON schema, CSV, what is chosen and how it is arranged."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli.conftest import Ckptkit


@pytest.fixture
def file(tmp_path: Path) -> Path:
    weights = {
        "layers.0.w": torch.tensor([[1.0, -2.0], [0.0, 3.0]]),
        "layers.1.w": torch.tensor([[1.0, math.nan, math.inf]]),
        "steps": torch.tensor(7),
        "packed": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    }
    torch.save(
        {"model": weights, "optimizer": {"state": {0: {"exp_avg": torch.zeros(2)}}}},
        tmp_path / "run.pth",
    )
    return tmp_path / "run.pth"


def words(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_the_table(ckptkit: Ckptkit, file: Path) -> None:
    result = ckptkit("stats", file, "--flat")
    assert result.exit_code == 0
    lines = words(result.stdout)
    columns = [
        "name",
        "tensors",
        "count",
        "mean",
        "std",
        "min",
        "max",
        "norm",
        "zeros",
        "NaN",
        "inf",
        "histogram",
    ]
    assert lines[0] == columns
    assert lines[1][:8] == ["layers.0.w", "4", "0.5", "2.08", "-2", "3", "3.74", "25.0%"]
    assert ["all", "float", "2", "7"] in [line[:4] for line in lines]
    assert "NaN or infinite values in 1 tensor: layers.1.w" in result.stderr
    assert "1 tensor without statistics: packed (elements of quint8" in result.stderr


def test_the_schema(as_json: Callable[..., Any], file: Path) -> None:
    found = as_json("stats", file)
    assert list(found) == ["schema", "file", "format", "tensors", "totals", "skipped"]
    assert found["schema"] == "ckptkit.stats/1"
    first, second, steps = found["tensors"]
    histogram = first.pop("histogram")
    assert first == {
        "name": "layers.0.w", "path": "model.layers.0.w", "keys": ["model", "layers.0.w"], "shape": [2, 2],
        "kind": "float", "dtypes": ["float32"], "tensor_count": 1, "count": 4, "nan": 0, "inf": 0, "zeros": 1,
        "sparsity": 0.25, "mean": 0.5, "std": pytest.approx(math.sqrt(13 / 3)), "norm": pytest.approx(math.sqrt(14)),
        "min": -2.0, "max": 3.0, "abs_max": 3.0,
    }  # fmt: skip
    assert sum(histogram["counts"]) == 4
    assert histogram["start"] <= -2 < histogram["start"] + histogram["width"]
    assert (second["nan"], second["inf"], second["mean"], second["std"]) == (1, 1, 1.0, None)
    assert (steps["kind"], steps["min"], steps["shape"]) == ("int", 7, [])
    assert [(each["kind"], each["count"]) for each in found["totals"]] == [("float", 7), ("int", 1)]
    assert found["skipped"] == [
        {"name": "packed", "dtype": "quint8", "why": found["skipped"][0]["why"]}
    ]


def test_groups(ckptkit: Ckptkit, as_json: Callable[..., Any], file: Path) -> None:
    found = as_json("stats", file, "--fold")
    assert [(each["name"], each["tensor_count"], each["count"]) for each in found["groups"]] == [
        ("layers.{0..1}.w", 2, 7),
        ("steps", 1, 1),
    ]
    assert [each["name"] for each in as_json("stats", file, "--depth", "1")["groups"]] == [
        "layers",
        "steps",
    ]
    assert words(ckptkit("stats", file, "--fold").stdout)[1][:3] == ["layers.{0..1}.w", "2", "7"]


def test_what_is_chosen(as_json: Callable[..., Any], ckptkit: Ckptkit, file: Path) -> None:
    names = [each["name"] for each in as_json("stats", file, "--all")["tensors"]]
    assert names == ["layers.0.w", "layers.1.w", "steps", "optimizer.state.0.exp_avg"]
    assert [each["name"] for each in as_json("stats", file, "--keys", "*.0.*")["tensors"]] == [
        "layers.0.w"
    ]
    assert [each["name"] for each in as_json("stats", file, "--keys", "model.s*")["tensors"]] == [
        "steps"
    ]
    nothing = ckptkit("stats", file, "--keys", "nosuch")
    assert (nothing.exit_code, nothing.stdout) == (0, "")
    assert "matches --keys nosuch" in nothing.stderr


def test_the_order(as_json: Callable[..., Any], file: Path) -> None:
    def sorted_by(sort: str) -> list[str]:
        return [each["name"] for each in as_json("stats", file, "--sort", sort)["tensors"]]

    assert sorted_by("norm") == ["steps", "layers.0.w", "layers.1.w"]
    assert sorted_by("nan") == ["layers.1.w", "layers.0.w", "steps"]
    assert sorted_by("std") == ["layers.0.w", "layers.1.w", "steps"]
    assert sorted_by("name") == ["layers.0.w", "layers.1.w", "steps"]


def test_csv(ckptkit: Ckptkit, file: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(ckptkit("stats", file, "--csv").stdout)))
    assert [row["name"] for row in rows] == ["layers.0.w", "layers.1.w", "steps"]
    assert rows[0]["shape"] == "2x2" and float(rows[0]["std"]) == pytest.approx(
        math.sqrt(13 / 3), rel=1e-15
    )
    assert rows[1]["nan"] == "1" and rows[1]["std"] == ""


def test_no_weights_at_all(ckptkit: Ckptkit, tmp_path: Path) -> None:
    torch.save({"epoch": 3}, tmp_path / "empty.pth")
    result = ckptkit("stats", tmp_path / "empty.pth")
    assert (result.exit_code, result.stdout) == (0, "")


@pytest.mark.parametrize(
    "options", [["--json", "--csv"], ["--depth", "1", "--fold"], ["--depth", "0"], ["--sort", "x"]]
)
def test_what_makes_no_sense_is_usage(ckptkit: Ckptkit, file: Path, options: list[str]) -> None:
    assert ckptkit("stats", file, *options).exit_code == 2


def test_names_are_escaped(ckptkit: Ckptkit, tmp_path: Path) -> None:
    torch.save({"a\x1b[31m\n": torch.tensor([math.nan])}, tmp_path / "odd.pth")
    for options in ([], ["--csv"]):
        result = ckptkit("stats", tmp_path / "odd.pth", *options)
        assert "\x1b" not in result.stdout + result.stderr
        assert r"a\x1b[31m\n" in result.stdout


def test_json_has_no_words_that_are_none(ckptkit: Ckptkit, tmp_path: Path) -> None:
    """A norm of float64 may be infinite: then the word says so."""
    torch.save(
        {"w": torch.tensor([1.7e308, -1.7e308], dtype=torch.float64)}, tmp_path / "large.pth"
    )

    def refuse(word: str) -> None:
        raise AssertionError(word)

    found = json.loads(
        ckptkit("stats", "--json", tmp_path / "large.pth").stdout, parse_constant=refuse
    )
    assert found["tensors"][0]["norm"] == "Infinity"


def test_several_files(ckptkit: Ckptkit, tmp_path: Path) -> None:
    paths = [tmp_path / "a.pth", tmp_path / "b.pth"]
    for number, path in enumerate(paths):
        torch.save({"w": torch.full((2,), float(number))}, path)
    alone = [ckptkit("stats", path).stdout for path in paths]
    blocks = [f"{path}:\n{table}\n" for path, table in zip(paths, alone, strict=True)]
    assert ckptkit("stats", *paths).stdout == "".join(blocks)
    assert ckptkit("stats", tmp_path / "*.pth").stdout == "".join(blocks)
    assert ckptkit("stats", tmp_path).stdout == "".join(blocks)  # a folder of checkpoints
    found = [json.loads(line) for line in ckptkit("stats", "--json", *paths).stdout.splitlines()]
    assert [each["tensors"][0]["mean"] for each in found] == [0.0, 1.0]
    missing = ckptkit("stats", tmp_path / "no.pth", paths[0])
    assert missing.exit_code == 3 and missing.stdout == blocks[0]
    assert ckptkit("stats", *paths, "--csv").exit_code == 2
