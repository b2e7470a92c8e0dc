"""stats: the table, the JSON schema, CSV, what is chosen and how it is arranged."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.cli.conftest import Ckptkit

Json = Callable[..., Any]


@pytest.fixture(autouse=True)
def file(here: None) -> None:
    weights = {
        "layers.0.w": torch.tensor([[1.0, -2.0], [0.0, 3.0]]),
        "layers.1.w": torch.tensor([[1.0, math.nan, math.inf]]),
        "steps": torch.tensor(7),
        "packed": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    }
    optimizer = {"state": {0: {"exp_avg": torch.zeros(2)}}}
    torch.save({"model": weights, "optimizer": optimizer}, "run.pth")


def test_the_table(ckptkit: Ckptkit) -> None:
    done = ckptkit("stats run.pth --flat", code=0)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0] == "name tensors count mean std min max norm zeros NaN inf histogram"
    assert lines[1].startswith("layers.0.w 4 0.5 2.08 -2 3 3.74 25.0%")
    assert any(line.startswith("all float 2 7") for line in lines)
    assert "NaN or infinite values in 1 tensor: layers.1.w" in done.stderr
    assert "1 tensor without statistics: packed (elements of quint8" in done.stderr
    folded = ckptkit("stats run.pth --fold").stdout.splitlines()[1]
    assert folded.split()[:3] == ["layers.{0..1}.w", "2", "7"]


def test_the_schema(as_json: Json) -> None:
    found = as_json("stats run.pth")
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
    (skipped,) = found["skipped"]
    assert skipped == {"name": "packed", "dtype": "quint8", "why": skipped["why"]}


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ("--fold", ["layers.{0..1}.w 2 7", "steps 1 1"]),
        ("--depth 1", ["layers 2 7", "steps 1 1"]),
        ("--all", ["layers.0.w 1 4", "layers.1.w 1 3", "steps 1 1", "optimizer.state.0.exp_avg 1 2"]),
        ("--keys *.0.*", ["layers.0.w 1 4"]),
        ("--keys model.s*", ["steps 1 1"]),
        ("--sort norm", ["steps 1 1", "layers.0.w 1 4", "layers.1.w 1 3"]),
        ("--sort nan", ["layers.1.w 1 3", "layers.0.w 1 4", "steps 1 1"]),
        ("--sort std", ["layers.0.w 1 4", "layers.1.w 1 3", "steps 1 1"]),
        ("--sort name", ["layers.0.w 1 4", "layers.1.w 1 3", "steps 1 1"]),
    ],
)  # fmt: skip
def test_what_is_chosen_and_how_it_is_arranged(words: str, rows: list[str], as_json: Json) -> None:
    found = as_json(f"stats run.pth {words}")
    listed = found["groups"] if "groups" in found else found["tensors"]
    shown = [f"{each['name']} {each['tensor_count']} {each['count']}" for each in listed]
    assert shown == rows


def test_csv(ckptkit: Ckptkit) -> None:
    rows = list(csv.DictReader(io.StringIO(ckptkit("stats run.pth --csv").stdout)))
    assert [row["name"] for row in rows] == ["layers.0.w", "layers.1.w", "steps"]
    assert rows[0]["shape"] == "2x2"
    assert float(rows[0]["std"]) == pytest.approx(math.sqrt(13 / 3), rel=1e-15)
    assert rows[1]["nan"] == "1" and rows[1]["std"] == ""


def test_nothing_to_show(ckptkit: Ckptkit) -> None:
    nothing = ckptkit("stats run.pth --keys nosuch", code=0)
    assert nothing.stdout == "" and "matches --keys nosuch" in nothing.stderr
    torch.save({"epoch": 3}, "empty.pth")
    assert ckptkit("stats empty.pth", code=0).stdout == ""


@pytest.mark.parametrize(
    "words", ["--json --csv", "--depth 1 --fold", "--depth 0", "--sort x", "run.pth --csv"]
)
def test_what_makes_no_sense_is_usage(ckptkit: Ckptkit, words: str) -> None:
    ckptkit(f"stats run.pth {words}", code=2)


def test_json_has_no_words_that_are_none(ckptkit: Ckptkit) -> None:
    """A norm of float64 may be infinite: then the word says so."""
    torch.save({"w": torch.tensor([1.7e308, -1.7e308], dtype=torch.float64)}, "large.pth")

    def refuse(word: str) -> None:
        raise AssertionError(word)

    found = json.loads(ckptkit("stats --json large.pth").stdout, parse_constant=refuse)
    assert found["tensors"][0]["norm"] == "Infinity"


def test_several_files(ckptkit: Ckptkit) -> None:
    torch.save({"w": torch.zeros(2)}, "a.pth")
    torch.save({"w": torch.ones(2)}, "b.pth")
    blocks = [f"{name}:\n{ckptkit(f'stats {name}').stdout}\n" for name in ("a.pth", "b.pth")]
    for words in ("a.pth b.pth", "[ab].pth"):
        assert ckptkit(f"stats {words}").stdout == "".join(blocks)
    whole = ckptkit("stats .").stdout  # a folder of checkpoints
    assert whole.replace("./", "").startswith("".join(blocks))
    lines = ckptkit("stats --json a.pth b.pth").stdout.splitlines()
    assert [json.loads(line)["tensors"][0]["mean"] for line in lines] == [0.0, 1.0]
    assert ckptkit("stats no.pth a.pth", code=3).stdout == blocks[0]
