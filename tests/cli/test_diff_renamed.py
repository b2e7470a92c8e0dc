"""diff of renamed keys: what it shows, the map that it writes, and that `rename` with it makes A
equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ckptkit.analysis.columns import fold_pairs
from tests.cli.conftest import Ckptkit

NETS = """
from torch import nn

class Net(nn.Module):
    def __init__(self, classes=5):
        super().__init__()
        parts = lambda: nn.ModuleDict({"attn": nn.Linear(4, 4), "mlp": nn.Linear(4, 8)})
        self.blocks = nn.ModuleList(parts() for _ in range(3))
        self.stem = nn.Linear(2, 4)
        self.head = nn.Linear(4, classes)
"""
RENAMED = (
    ("blocks.", "encoder.layer."),
    ("attn.", "attention."),
    ("mlp.", "feed_forward."),
    ("stem.", "in_proj."),
)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, str]:
    """A file whose names are others than those of the model, and the model."""
    (tmp_path / "nets.py").write_text(NETS)
    namespace: dict[str, type[torch.nn.Module]] = {}
    exec(NETS, namespace)
    state = {}
    for name, tensor in namespace["Net"]().state_dict().items():
        for new, old in RENAMED:
            name = name.replace(new, old)
        state[name] = tensor
    torch.save(state, tmp_path / "run.pth")
    return tmp_path / "run.pth", f"{tmp_path / 'nets.py'}:Net"


def test_folded_pairs_and_what_a_lenient_load_would_not_tell(
    ckptkit: Ckptkit, files: tuple[Path, str]
) -> None:
    result = ckptkit("diff", files[0], "--model", files[1], "--arg", "classes=7")
    assert result.exit_code == 1
    rows = [line.split() for line in result.stdout.splitlines()]
    folded = [
        "encoder.layer.{0..2}.attention.weight",
        "blocks.{0..2}.attn.weight",
        "[4,",
        "4]",
        "95%",
        "suffix",
    ]
    assert folded in rows
    assert "missing (not in A)" not in result.stdout
    assert ["head.weight", "float32", "[5,", "4]", "float32", "[7,", "4]"] in rows
    # 3 layers of 4*4+4 and 4*8+8, and 2*4+4; the head has 7*4+7 more
    assert "torch ignores 14 tensors of the file (192 parameters);" in result.stdout
    assert (
        "14 tensors of the model (192 of 227 parameters) keep their initial values" in result.stdout
    )
    assert "strict=False still refuses 2 keys with a different shape" in result.stdout


def test_the_map_makes_them_equal(
    ckptkit: Ckptkit, files: tuple[Path, str], tmp_path: Path
) -> None:
    path, model = files
    result = ckptkit("diff", path, "--model", model, "--write-map", tmp_path / "map.json")
    assert result.exit_code == 1
    assert f"hint: ckptkit rename --map {tmp_path / 'map.json'} {path}" in result.stderr
    assert (
        ckptkit("rename", path, tmp_path / "new.pth", "--map", tmp_path / "map.json").exit_code == 0
    )
    assert ckptkit("diff", tmp_path / "new.pth", "--model", model).exit_code == 0
    namespace: dict[str, type[torch.nn.Module]] = {}
    exec(NETS, namespace)
    namespace["Net"]().load_state_dict(torch.load(tmp_path / "new.pth", weights_only=True))


def test_a_map_is_not_replaced_unasked(
    ckptkit: Ckptkit, files: tuple[Path, str], tmp_path: Path
) -> None:
    (tmp_path / "map.json").write_text("mine")
    options = ("diff", files[0], "--model", files[1], "--write-map", tmp_path / "map.json")
    assert ckptkit(*options).exit_code == 2
    assert (tmp_path / "map.json").read_text() == "mine"
    assert ckptkit(*options, "--force").exit_code == 1
    assert json.loads((tmp_path / "map.json").read_text())["in_proj.weight"] == "stem.weight"


def test_the_schema(ckptkit: Ckptkit, files: tuple[Path, str]) -> None:
    found = json.loads(
        ckptkit("diff", "--json", files[0], "--model", files[1], "--arg", "classes=7").stdout
    )
    assert found["schema"] == "ckptkit.diff/1"
    assert len(found["missing"]) == len(found["unexpected"]) == len(found["renamed"]) == 14
    pair = next(pair for pair in found["renamed"] if pair["old"] == "in_proj.weight")
    assert {**pair, "confidence": 0, "why": ""} == {
        "old": "in_proj.weight",
        "new": "stem.weight",
        "a": {"dtype": "float32", "shape": [4, 2]},
        "b": {"dtype": "float32", "shape": [4, 2]},
        "confidence": 0,
        "why": "",
    }
    assert found["strict_false"]["all_parameters"] == 227


def test_reshaped_stands_apart(ckptkit: Ckptkit, tmp_path: Path) -> None:
    torch.save(
        {"net.a.weight": torch.ones(2, 2), "net.fc.weight": torch.ones(3, 2)}, tmp_path / "a.pth"
    )
    torch.save({"a.weight": torch.ones(2, 2), "fc.weight": torch.ones(5, 2)}, tmp_path / "b.pth")
    text = ckptkit("diff", tmp_path / "a.pth", tmp_path / "b.pth").stdout
    renamed, _, reshaped = text.partition("renamed and reshaped?")
    assert "net.a.weight" in renamed and "net.fc.weight" not in renamed
    assert "[3, 2] -> [5, 2]" in reshaped


def test_names_are_escaped(ckptkit: Ckptkit, tmp_path: Path) -> None:
    torch.save({"x\x1b[2J.w": torch.ones(2, 2)}, tmp_path / "a.pth")
    torch.save({"y\x1b[2J.w": torch.ones(2, 2)}, tmp_path / "b.pth")
    assert "\x1b" not in ckptkit("diff", tmp_path / "a.pth", tmp_path / "b.pth").stdout


def test_pairs_fold_along() -> None:
    def folded(*pairs: tuple[str, str]) -> list[tuple[str, str]]:
        return [(one.label, other.label) for one, other in fold_pairs((a, b, ()) for a, b in pairs)]

    assert folded(*((f"l.{n}.w", f"m.{n + 1}.v") for n in range(10))) == [
        ("l.{0..9}.w", "m.{1..10}.v")
    ]
    both = [(f"l.{n}.{m}", f"{n}.x.{m}") for n in range(3) for m in (0, 2)]
    assert folded(*both) == [("l.{0..2}.{0,2}", "{0..2}.x.{0,2}")]
    assert folded(("l.0", "a"), ("l.1", "b")) == [("l.0", "a"), ("l.1", "b")]
    assert folded(("l.0", "m.0"), ("l.1", "m.5")) == [("l.0", "m.0"), ("l.1", "m.5")]
