"""diff: exit codes, the JSON schema, models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

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
    ours = torch.load(ab[0], weights_only=True)["model"]["value"].double()
    theirs = load_file(ab[1])["value"].double()
    far = float((ours - theirs).norm() / ours.norm())
    near = float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0))
    assert json.loads(result.stdout) == {
        "schema": "ckptkit.diff/1",
        "a": str(ab[0]),
        "b": str(ab[1]),
        "model": None,
        "equal": False,
        "values_compared": True,
        "missing": ["theirs"],
        "unexpected": ["mine"],
        "mismatched": [
            {
                "name": "shape",
                "a": {"dtype": "float32", "shape": [2]},
                "b": {"dtype": "float32", "shape": [3]},
                "tolerance": None,
                "difference": None,
            }
        ],
        "changed": [
            {
                "name": "value",
                "count": 1,
                "first": 1,
                "largest": 1.0,
                "relative": pytest.approx(far),
                "cosine": pytest.approx(near),
                "distance": 1.0,
            }
        ],
        "renamed": [],
        "reshaped": [],
        "strict_false": None,
        "entries": [],
        "uncompared": ["epoch (--all)"],
        "advice": [],
    }


def test_the_text(ckptkit: Ckptkit, ab: tuple[Path, Path]) -> None:
    text = ckptkit("diff", "--atol", "0", *ab).stdout
    assert "missing (not in A): 1 key\n  theirs\n" in text
    assert "unexpected (only in A): 1 key\n  mine\n" in text
    assert ["shape", "float32", "[2]", "float32", "[3]"] in map(str.split, text.splitlines())
    assert ["value", "1", "1"] in [line.split()[:3] for line in text.splitlines()]
    assert text.endswith(
        "different: 1 missing, 1 unexpected, 1 mismatched, 1 changed, of 3 keys on both sides\n"
        "not compared: epoch (--all)\n"
    )


def test_equal_files(ckptkit: Ckptkit, ab: tuple[Path, Path]) -> None:
    result = ckptkit("diff", "--values", ab[0], ab[0])
    assert result.exit_code == 0
    assert result.stdout == (
        "equal: 4 keys (names, dtypes, shapes and values)\nnot compared: epoch (--all)\n"
    )


def test_equal_is_said_of_what_was_compared(ckptkit: Ckptkit, ab: tuple[Path, Path]) -> None:
    result = ckptkit("diff", "--no-values", ab[0], ab[0])
    assert result.stdout == (
        "same names, shapes and dtypes: 4 keys; values not compared\n"
        "not compared: the values of tensors (--no-values); epoch (--all)\n"
    )
    result = ckptkit("diff", ab[0], ab[0], "--keys", "s*")
    assert result.stdout == (
        "equal: 2 keys (names, dtypes, shapes and values)\n"
        "not compared: 2 keys that --keys excludes; epoch (--all)\n"
    )


def test_two_optimizers_alone(ckptkit: Ckptkit, tmp_path: Path) -> None:
    paths = [tmp_path / f"{lr}.bin" for lr in (0.1, 0.2)]
    for path, lr in zip(paths, (0.1, 0.2), strict=True):
        net = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
        net(torch.full((1, 2), lr)).sum().backward()
        optimizer.step()
        torch.save(optimizer.state_dict(), path)
    for options in ([], ["--all"], ["--key", ""]):
        found = json.loads(ckptkit("diff", *paths, "--values", "--json", *options).stdout)
        assert [each["name"] for each in found["changed"]] == ["state.0.momentum_buffer"]
        assert [each["path"] for each in found["entries"]] == ["param_groups.0.lr"]
        assert ckptkit("diff", paths[0], paths[0], "--values", *options).stdout.startswith(
            "equal: 2"
        )
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pth")
    assert "no weights" in ckptkit("diff", paths[0], tmp_path / "w.pth").stderr


TIED = """
import torch

class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
"""


@pytest.mark.parametrize(("name", "kept"), [("embed.weight", 0), ("head.weight", 0), ("x", 1)])
def test_tied_weights_of_a_model_count_once(
    name: str, kept: int, ckptkit: Ckptkit, tmp_path: Path
) -> None:
    """`load_state_dict(strict=False)` fills both names by one."""
    (tmp_path / "tied.py").write_text(TIED)
    torch.save({name: torch.ones(5, 3), "y": torch.ones(7)}, tmp_path / "a.pth")
    model = f"{tmp_path / 'tied.py'}:Tied"
    found = json.loads(ckptkit("diff", tmp_path / "a.pth", "--model", model, "--json").stdout)
    silent = found["strict_false"]
    assert (silent["kept"], silent["kept_parameters"]) == (kept, 15 * kept)
    assert silent["all_parameters"] == 15


def trained(path: Path, *, step: float, lr: float) -> Path:
    """A training checkpoint whose weights moved by `step`, a later layer farther."""
    model = {f"layers.{n}.w": torch.arange(6.0) + step * n for n in range(3)}
    model["head"] = torch.arange(4.0) + 100 * step
    state = {"exp_avg": torch.full((3,), step), "step": torch.tensor(3.0)}
    optimizer = {"state": {0: state}, "param_groups": [{"lr": lr, "params": [0]}]}
    torch.save({"model": model, "optimizer": optimizer, "epoch": 3}, path)
    return path


def test_the_last_line_says_what_was_not_compared(ckptkit: Ckptkit, tmp_path: Path) -> None:
    a = trained(tmp_path / "a.pth", step=0.0, lr=0.1)
    b = trained(tmp_path / "b.pth", step=0.5, lr=0.2)
    done = ckptkit("diff", "--no-values", a, b)
    assert done.exit_code == 0
    assert done.stdout.splitlines()[-1] == (
        "not compared: the values of tensors (--no-values); "
        "optimizer (2 tensors, 2 values), epoch (--all)"
    )
    done = ckptkit("diff", "--all", "--values", a, b)
    assert done.exit_code == 1
    assert "not compared" not in done.stdout


def test_all_compares_the_optimizer_and_values(ckptkit: Ckptkit, tmp_path: Path) -> None:
    a = trained(tmp_path / "a.pth", step=0.0, lr=0.1)
    b = trained(tmp_path / "b.pth", step=0.5, lr=0.2)
    found = json.loads(ckptkit("diff", "--all", "--values", "--json", a, b).stdout)
    assert "optimizer.state.0.exp_avg" in [each["name"] for each in found["changed"]]
    assert found["entries"] == [{"path": "optimizer.param_groups.0.lr", "a": "0.1", "b": "0.2"}]
    same = trained(tmp_path / "same.pth", step=0.0, lr=0.3)
    assert ckptkit("diff", "--values", a, same).exit_code == 0
    assert ckptkit("diff", "--all", a, same).exit_code == 1


def test_what_moved_most_comes_first_and_layers_are_one_row(
    ckptkit: Ckptkit, tmp_path: Path
) -> None:
    a = trained(tmp_path / "a.pth", step=0.0, lr=0.1)
    b = trained(tmp_path / "b.pth", step=0.5, lr=0.1)
    lines = [line.split() for line in ckptkit("diff", "--values", a, b).stdout.splitlines()]
    assert [line[0] for line in lines[:3]] == ["changed", "head", "layers.{1..2}.w"]
    assert lines[2][1:4] == ["2", "12", "1"]  # tensors, elements, the largest difference


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_different_dtypes_are_compared_in_the_wider(
    ckptkit: Ckptkit, tmp_path: Path, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weights = {"w": torch.randn(1000), "off": torch.randn(10)}
    cast = {name: tensor.to(dtype) for name, tensor in weights.items()}
    cast["off"] = cast["off"] * 2
    torch.save(weights, tmp_path / "a.pth")
    torch.save(cast, tmp_path / "b.pth")
    done = ckptkit("diff", "--values", "--json", tmp_path / "a.pth", tmp_path / "b.pth")
    by_name = {each["name"]: each for each in json.loads(done.stdout)["mismatched"]}
    assert by_name["w"]["tolerance"] == torch.finfo(dtype).eps
    assert by_name["w"]["difference"] is None
    assert by_name["off"]["difference"]["count"] == 10
    text = ckptkit("diff", "--values", tmp_path / "a.pth", tmp_path / "b.pth").stdout
    assert "equal within" in text and "differ by up to" in text


def test_a_prefix_is_noticed(ckptkit: Ckptkit, run_pth: Path, tmp_path: Path) -> None:
    weights = torch.load(run_pth, weights_only=True)["model"]
    plain = tmp_path / "plain.pth"
    torch.save({name.removeprefix("module."): tensor for name, tensor in weights.items()}, plain)
    result = ckptkit("diff", run_pth, plain)
    assert result.exit_code == 1
    assert f"hint: this makes all keys match: ckptkit strip-module {run_pth}" in result.stdout


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
        ["--model", "nets:Net", "--atol", "1"],
        ["nets:Net", "--all"],
        ["--model", "nets:Net", "--arg", "width"],
        ["nets.py:Net", "--arg", "width={"],
        ["b", "--atol", "-1"],
    ],
)
def test_what_makes_no_sense_is_usage(
    ckptkit: Ckptkit, ab: tuple[Path, Path], arguments: list[str]
) -> None:
    assert ckptkit("diff", ab[0], *arguments).exit_code == 2
