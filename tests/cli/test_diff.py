"""diff: exit codes, the JSON schema, models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.cli.conftest import Ckptkit

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.fc = torch.nn.Linear(4, width)
"""


@pytest.fixture
def ab(tmp_path: Path) -> tuple[Path, Path]:
    a = {
        "same": torch.ones(2),
        "mine": torch.ones(1),
        "shape": torch.ones(2),
        "value": torch.tensor([1.0, 2.0]),
    }
    b = {
        "same": torch.ones(2),
        "theirs": torch.ones(1),
        "shape": torch.ones(3),
        "value": torch.tensor([1.0, 3.0]),
    }
    torch.save({"model": a, "epoch": 1}, tmp_path / "a.pth")
    save_file(b, tmp_path / "b.safetensors")
    return tmp_path / "a.pth", tmp_path / "b.safetensors"


def test_the_schema(ckptkit: Ckptkit, ab: tuple[Path, Path]) -> None:
    result = ckptkit("diff", "--json", "--values", *ab)
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {
        "schema": "ckptkit.diff/1",
        "equal": False,
        "missing": ["theirs"],
        "unexpected": ["mine"],
        "mismatched": [
            {
                "name": "shape",
                "a": {"dtype": "float32", "shape": [2]},
                "b": {"dtype": "float32", "shape": [3]},
            }
        ],
        "changed": [{"name": "value", "count": 1, "first": 1, "largest": None}],
        "renamed": [],
        "reshaped": [],
        "strict_false": None,
        "advice": [],
    }


def test_the_text(ckptkit: Ckptkit, ab: tuple[Path, Path]) -> None:
    text = ckptkit("diff", "--atol", "0", *ab).stdout
    assert "missing (not in A): 1 key\n  theirs\n" in text
    assert "unexpected (only in A): 1 key\n  mine\n" in text
    assert ["shape", "float32", "[2]", "float32", "[3]"] in map(str.split, text.splitlines())
    assert ["value", "1", "1"] in map(str.split, text.splitlines())
    assert text.endswith(
        "different: 1 missing, 1 unexpected, 1 mismatched, 1 changed, of 3 keys on both sides\n"
    )


def test_equal_files(ckptkit: Ckptkit, ab: tuple[Path, Path]) -> None:
    result = ckptkit("diff", "--values", ab[0], ab[0])
    assert result.exit_code == 0
    assert result.stdout == "equal: 4 keys (names, dtypes, shapes and values)\n"


def test_a_prefix_is_noticed(ckptkit: Ckptkit, run_pth: Path, tmp_path: Path) -> None:
    weights = torch.load(run_pth, weights_only=True)["model"]
    plain = tmp_path / "plain.pth"
    torch.save({name.removeprefix("module."): tensor for name, tensor in weights.items()}, plain)
    result = ckptkit("diff", run_pth, plain)
    assert result.exit_code == 1
    assert f"hint: no key is missing after: ckptkit strip-module {run_pth}" in result.stdout


def test_keys_choose_the_sides(ckptkit: Ckptkit, tmp_path: Path) -> None:
    torch.save({"a": {"w": torch.ones(1)}, "b": {"w": torch.zeros(1)}}, tmp_path / "two.pth")
    torch.save({"w": torch.zeros(1)}, tmp_path / "one.pth")
    both = (tmp_path / "two.pth", tmp_path / "two.pth")
    assert ckptkit("diff", *both).exit_code == 3
    assert ckptkit("diff", "--values", "--key", "a", *both).exit_code == 0
    assert ckptkit("diff", "--values", "--key", "a", "--key-b", "b", *both).exit_code == 1
    assert (
        ckptkit(
            "diff", "--values", "--key", "b", "--key-b", "", both[0], tmp_path / "one.pth"
        ).exit_code
        == 0
    )


def test_a_model(ckptkit: Ckptkit, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(NET)
    torch.save(
        torch.nn.ModuleDict({"fc": torch.nn.Linear(4, 3)}).half().state_dict(),
        tmp_path / "half.pth",
    )
    spec = f"{tmp_path / 'nets.py'}:Net"
    assert ckptkit("diff", tmp_path / "half.pth", "--model", spec).exit_code == 0
    result = ckptkit("diff", "--json", tmp_path / "half.pth", "--model", spec, "--arg", "width=5")
    assert result.exit_code == 1
    found: Any = json.loads(result.stdout)
    assert [each["name"] for each in found["mismatched"]] == ["fc.weight", "fc.bias"]
    assert found["mismatched"][0]["b"]["shape"] == [5, 4]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["b", "--model", "nets:Net"],
        ["--model", "nets:Net", "--values"],
        ["--model", "nets:Net", "--arg", "width"],
        ["--model", "nets:Net", "--arg", "width={"],
        ["b", "--atol", "-1"],
    ],
)
def test_what_makes_no_sense_is_usage(
    ckptkit: Ckptkit, ab: tuple[Path, Path], arguments: list[str]
) -> None:
    assert ckptkit("diff", ab[0], *arguments).exit_code == 2
