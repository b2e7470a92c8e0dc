"""diff: exit codes, the JSON schema, models, and keys that look renamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptkit.analysis.columns import fold_pairs
from tests.cli.conftest import Ckptkit

NETS = """
from torch import nn

class Net(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.fc = nn.Linear(4, width)

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

class Renamed(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        parts = lambda: nn.ModuleDict({"attn": nn.Linear(4, 4), "mlp": nn.Linear(4, 8)})
        self.blocks = nn.ModuleList(parts() for _ in range(3))
        self.stem = nn.Linear(2, 4)
        self.head = nn.Linear(4, classes)
"""
MINE = {"same": torch.ones(2), "mine": torch.ones(1), "shape": torch.ones(2), "value": torch.tensor([1.0, 2.0])}  # fmt: skip
THEIRS = {"same": torch.ones(2), "theirs": torch.ones(1), "shape": torch.ones(3), "value": torch.tensor([1.0, 3.0])}  # fmt: skip
Differs = Callable[[str], Any]


@pytest.fixture(autouse=True)
def files(here: None) -> None:
    Path("nets.py").write_text(NETS)
    torch.save({"model": MINE, "epoch": 1}, "a.pth")
    save_file(THEIRS, "b.safetensors")


@pytest.fixture
def differs(ckptkit: Ckptkit) -> Differs:
    """``differs("a.pth b.pth")``: the JSON of files that differ."""
    return lambda words: json.loads(ckptkit(f"diff --json {words}", code=1).stdout)


def test_the_schema(differs: Differs) -> None:
    found = differs("--values a.pth b.safetensors")
    ours = torch.load("a.pth", weights_only=True)["model"]["value"].double()
    theirs = load_file("b.safetensors")["value"].double()
    far = float((ours - theirs).norm() / ours.norm())
    near = float(torch.nn.functional.cosine_similarity(ours, theirs, dim=0))
    a, b = {"dtype": "float32", "shape": [2]}, {"dtype": "float32", "shape": [3]}
    assert found == {
        "schema": "ckptkit.diff/1", "a": "a.pth", "b": "b.safetensors", "model": None, "equal": False,
        "values_compared": True, "missing": ["theirs"], "unexpected": ["mine"],
        "mismatched": [{"name": "shape", "a": a, "b": b, "tolerance": None, "difference": None}],
        "changed": [{
            "name": "value", "count": 1, "first": 1, "largest": 1.0, "relative": pytest.approx(far),
            "cosine": pytest.approx(near), "distance": 1.0,
        }],
        "renamed": [], "reshaped": [], "strict_false": None, "entries": [],
        "uncompared": ["epoch (--all)"], "advice": [],
    }  # fmt: skip


def test_the_text(ckptkit: Ckptkit) -> None:
    text = ckptkit("diff --atol 0 a.pth b.safetensors").stdout
    assert "missing (not in A): 1 key\n  theirs\n" in text
    assert "unexpected (only in A): 1 key\n  mine\n" in text
    assert ["shape", "float32", "[2]", "float32", "[3]"] in map(str.split, text.splitlines())
    assert ["value", "1", "1"] in [line.split()[:3] for line in text.splitlines()]
    assert text.endswith(
        "different: 1 missing, 1 unexpected, 1 mismatched, 1 changed, of 3 keys on both sides\n"
        "not compared: epoch (--all)\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--values", "equal: 4 keys (names, dtypes, shapes and values)\nnot compared: epoch (--all)\n"),
        ("--no-values", "same names, shapes and dtypes: 4 keys; values not compared\n"
         "not compared: the values of tensors (--no-values); epoch (--all)\n"),
        ("--keys s*", "equal: 2 keys (names, dtypes, shapes and values)\n"
         "not compared: 2 keys that --keys excludes; epoch (--all)\n"),
    ],
)  # fmt: skip
def test_equal_is_said_of_what_was_compared(words: str, said: str, ckptkit: Ckptkit) -> None:
    assert ckptkit(f"diff a.pth a.pth {words}", code=0).stdout == said


def test_two_optimizers_alone(ckptkit: Ckptkit, differs: Differs) -> None:
    for lr in (0.1, 0.2):
        net = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
        net(torch.full((1, 2), lr)).sum().backward()
        optimizer.step()
        torch.save(optimizer.state_dict(), f"{lr}.bin")
    for options in ("--values", "--values --all", "--values --key ''"):
        found = differs(f"0.1.bin 0.2.bin {options}")
        assert [each["name"] for each in found["changed"]] == ["state.0.momentum_buffer"]
        assert [each["path"] for each in found["entries"]] == ["param_groups.0.lr"]
        assert ckptkit(f"diff 0.1.bin 0.1.bin {options}").stdout.startswith("equal: 2")
    torch.save({"w": torch.ones(2)}, "w.pth")
    assert "no weights" in ckptkit("diff 0.1.bin w.pth").stderr


@pytest.mark.parametrize(("name", "kept"), [("embed.weight", 0), ("head.weight", 0), ("x", 1)])
def test_tied_weights_of_a_model_count_once(name: str, kept: int, ckptkit: Ckptkit) -> None:
    """`load_state_dict(strict=False)` fills both names by one."""
    torch.save({name: torch.ones(5, 3), "y": torch.ones(7)}, "a.pth")
    silent = json.loads(ckptkit("diff a.pth nets.py:Tied --json").stdout)["strict_false"]
    assert (silent["kept"], silent["kept_parameters"]) == (kept, 15 * kept)
    assert silent["all_parameters"] == 15


@pytest.fixture
def trained() -> None:
    """Three training checkpoints: the weights of b moved, a later layer farther; same has another
    learning rate."""
    for name, step, lr in (("a", 0.0, 0.1), ("b", 0.5, 0.2), ("same", 0.0, 0.3)):
        model = {f"layers.{n}.w": torch.arange(6.0) + step * n for n in range(3)}
        model["head"] = torch.arange(4.0) + 100 * step
        state = {"exp_avg": torch.full((3,), step), "step": torch.tensor(3.0)}
        optimizer = {"state": {0: state}, "param_groups": [{"lr": lr, "params": [0]}]}
        torch.save({"model": model, "optimizer": optimizer, "epoch": 3}, f"{name}.pth")


@pytest.mark.usefixtures("trained")
def test_the_optimizer_and_values_are_compared_if_asked_for(
    ckptkit: Ckptkit, differs: Differs
) -> None:
    assert ckptkit("diff --no-values a.pth b.pth", code=0).stdout.splitlines()[-1] == (
        "not compared: the values of tensors (--no-values); "
        "optimizer (2 tensors, 2 values), epoch (--all)"
    )
    assert "not compared" not in ckptkit("diff --all --values a.pth b.pth", code=1).stdout
    found = differs("--all --values a.pth b.pth")
    assert "optimizer.state.0.exp_avg" in [each["name"] for each in found["changed"]]
    assert found["entries"] == [{"path": "optimizer.param_groups.0.lr", "a": "0.1", "b": "0.2"}]
    ckptkit("diff --values a.pth same.pth", code=0)
    ckptkit("diff --all a.pth same.pth", code=1)


@pytest.mark.usefixtures("trained")
def test_what_moved_most_comes_first_and_layers_are_one_row(ckptkit: Ckptkit) -> None:
    lines = list(map(str.split, ckptkit("diff --values a.pth b.pth").stdout.splitlines()))
    assert [line[0] for line in lines[:3]] == ["changed", "head", "layers.{1..2}.w"]
    assert lines[2][1:4] == ["2", "12", "1"]  # tensors, elements, the largest difference


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_different_dtypes_are_compared_in_the_wider(
    ckptkit: Ckptkit, differs: Differs, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weights = {"w": torch.randn(1000), "off": torch.randn(10)}
    torch.save(weights, "a.pth")
    torch.save({"w": weights["w"].to(dtype), "off": weights["off"].to(dtype) * 2}, "b.pth")
    by_name = {each["name"]: each for each in differs("--values a.pth b.pth")["mismatched"]}
    assert by_name["w"]["tolerance"] == torch.finfo(dtype).eps
    assert by_name["w"]["difference"] is None
    assert by_name["off"]["difference"]["count"] == 10
    text = ckptkit("diff --values a.pth b.pth").stdout
    assert "equal within" in text and "differ by up to" in text


def test_a_prefix_is_noticed(ckptkit: Ckptkit, run_pth: Path) -> None:
    weights = torch.load(run_pth, weights_only=True)["model"]
    torch.save({name.removeprefix("module."): each for name, each in weights.items()}, "plain.pth")
    text = ckptkit("diff run.pth plain.pth", code=1).stdout
    assert "hint: this makes all keys match: ckptkit strip-module run.pth" in text


def test_keys_choose_the_sides(ckptkit: Ckptkit) -> None:
    torch.save({"a": {"w": torch.ones(1)}, "b": {"w": torch.zeros(1)}}, "two.pth")
    torch.save({"w": torch.zeros(1)}, "one.pth")
    for words, code in (
        ("two.pth two.pth", 3),
        ("two.pth two.pth --key a", 0),
        ("two.pth two.pth --key a --key-b b", 1),
        ("two.pth one.pth --key b --key-b ''", 0),
    ):
        ckptkit(f"diff --values {words}", code=code)


def test_a_model(ckptkit: Ckptkit, differs: Differs) -> None:
    net = torch.nn.ModuleDict({"fc": torch.nn.Linear(4, 3)})
    torch.save(net.half().state_dict(), "half.pth")
    ckptkit("diff half.pth --model nets.py:Net", code=0)
    found = differs("half.pth --model nets.py:Net --arg width=5")
    assert [each["name"] for each in found["mismatched"]] == ["fc.weight", "fc.bias"]
    assert found["mismatched"][0]["b"]["shape"] == [5, 4]


@pytest.mark.parametrize(
    "words",
    [
        "", "b --model nets:Net", "--model nets:Net --atol 1", "nets:Net --all",
        "--model nets:Net --arg width", "nets.py:Net --arg width={", "b --atol -1",
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_usage(ckptkit: Ckptkit, words: str) -> None:
    ckptkit(f"diff a.pth {words}", code=2)


# Keys that look renamed

PARTS = {"blocks.": "encoder.layer.", "attn.": "attention.", "mlp.": "feed_forward.", "stem.": "in_proj."}  # fmt: skip
MODEL = "renamed.pth --model nets.py:Renamed"


@pytest.fixture
def renamed() -> torch.nn.Module:
    """A file whose names are others than those of the model, and the model."""
    space: dict[str, type[torch.nn.Module]] = {}
    exec(NETS, space)
    state = {}
    for name, tensor in space["Renamed"]().state_dict().items():
        for new, old in PARTS.items():
            name = name.replace(new, old)
        state[name] = tensor
    torch.save(state, "renamed.pth")
    return space["Renamed"]()


@pytest.mark.usefixtures("renamed")
def test_folded_pairs_and_what_a_lenient_load_would_not_tell(ckptkit: Ckptkit) -> None:
    text = ckptkit(f"diff {MODEL} --arg classes=7", code=1).stdout
    rows = [" ".join(line.split()) for line in text.splitlines()]
    pair = "encoder.layer.{0..2}.attention.weight blocks.{0..2}.attn.weight [4, 4] 95% suffix"
    assert pair in rows and "missing (not in A)" not in text
    assert "head.weight float32 [5, 4] float32 [7, 4]" in rows
    # 3 layers of 4*4+4 and 4*8+8, and 2*4+4; the head has 7*4+7 more
    assert "torch ignores 14 tensors of the file (192 parameters);" in text
    kept = "14 tensors of the model (192 of 227 parameters) keep their initial values"
    assert kept in text and "strict=False still refuses 2 keys with a different shape" in text


def test_the_map_makes_them_equal(ckptkit: Ckptkit, renamed: torch.nn.Module) -> None:
    result = ckptkit(f"diff {MODEL} --write-map map.json", code=1)
    assert "hint: ckptkit rename --map map.json renamed.pth" in result.stderr
    ckptkit("rename renamed.pth new.pth --map map.json", code=0)
    ckptkit("diff new.pth --model nets.py:Renamed", code=0)
    renamed.load_state_dict(torch.load("new.pth", weights_only=True))


@pytest.mark.usefixtures("renamed")
def test_a_map_is_not_replaced_unasked(ckptkit: Ckptkit) -> None:
    path = Path("map.json")
    path.write_text("mine")
    ckptkit(f"diff {MODEL} --write-map map.json", code=2)
    assert path.read_text() == "mine"
    ckptkit(f"diff {MODEL} --write-map map.json --force", code=1)
    assert json.loads(path.read_text())["in_proj.weight"] == "stem.weight"


@pytest.mark.usefixtures("renamed")
def test_the_schema_of_renamed_keys(differs: Differs) -> None:
    found = differs(f"{MODEL} --arg classes=7")
    assert len(found["missing"]) == len(found["unexpected"]) == len(found["renamed"]) == 14
    pair = next(pair for pair in found["renamed"] if pair["old"] == "in_proj.weight")
    side = {"dtype": "float32", "shape": [4, 2]}
    assert {**pair, "confidence": 0, "why": ""} == {
        "old": "in_proj.weight", "new": "stem.weight", "a": side, "b": side, "confidence": 0, "why": "",
    }  # fmt: skip
    assert found["strict_false"]["all_parameters"] == 227


def test_reshaped_stands_apart(ckptkit: Ckptkit) -> None:
    torch.save({"net.a.weight": torch.ones(2, 2), "net.fc.weight": torch.ones(3, 2)}, "a.pth")
    torch.save({"a.weight": torch.ones(2, 2), "fc.weight": torch.ones(5, 2)}, "b.pth")
    text = ckptkit("diff a.pth b.pth").stdout
    renamed, _, reshaped = text.partition("renamed and reshaped?")
    assert "net.a.weight" in renamed and "net.fc.weight" not in renamed
    assert "[3, 2] -> [5, 2]" in reshaped


@pytest.mark.parametrize(
    ("pairs", "folded"),
    [
        ([(f"l.{n}.w", f"m.{n + 1}.v") for n in range(10)], [("l.{0..9}.w", "m.{1..10}.v")]),
        ([(f"l.{n}.{m}", f"{n}.x.{m}") for n in range(3) for m in (0, 2)],
         [("l.{0..2}.{0,2}", "{0..2}.x.{0,2}")]),
        ([("l.0", "a"), ("l.1", "b")], [("l.0", "a"), ("l.1", "b")]),
        ([("l.0", "m.0"), ("l.1", "m.5")], [("l.0", "m.0"), ("l.1", "m.5")]),
    ],
)  # fmt: skip
def test_pairs_fold_along(pairs: list[tuple[str, str]], folded: list[tuple[str, str]]) -> None:
    found = fold_pairs((a, b, ()) for a, b in pairs)
    assert [(one.label, other.label) for one, other in found] == folded
