"""inspect --tree: names in groups, shares, the width of the terminal, and --keys and --sort."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from ckptkit.analysis.shares import shares
from ckptkit.analysis.summary import summarize
from ckptkit.cli import tree_text
from tests.analysis.made import checkpoint, tensor
from tests.cli.conftest import Ckptkit


@pytest.fixture
def file() -> None:
    parts = [
        (f"layers.{n}.{part}.weight", size)
        for n in range(2)
        for part, size in (("a", 10), ("b", 20))
    ]
    sizes = dict([*parts, ("head.proj.weight", 40), ("head", 100)])
    weights = {name: torch.zeros(size) for name, size in sizes.items()}
    optimizer = {"state": {0: {"m": torch.zeros(5)}}, "param_groups": []}
    torch.save({"model": weights, "optimizer": optimizer, "epoch": 3}, "run.pth")


def lines(ckptkit: Ckptkit, words: str) -> list[str]:
    """Return the lines of a tree; the shares stand after a bar."""
    said = ckptkit(f"inspect --tree {words}", code=0).stdout.split("\n\n")[0]
    return [re.sub(r"  +([\d,]+  +[<\d.]+%).*", r" | \1", line) for line in said.splitlines()]


def test_names_in_groups(ckptkit: Ckptkit, file: None) -> None:
    assert lines(ckptkit, "run.pth") == [
        "dict of 3 | 200  100.0%",
        "  model: dict of 6 | 200  100.0%",
        "    layers. 4 tensors | 60   30.0%",
        "      0. 2 tensors | 30   15.0%",
        "        a.weight: float32 [10] on cpu | 10    5.0%",
        "        b.weight: float32 [20] on cpu | 20   10.0%",
        "      1. 2 tensors | 30   15.0%",
        "        a.weight: float32 [10] on cpu | 10    5.0%",
        "        b.weight: float32 [20] on cpu | 20   10.0%",
        "    head.proj.weight: float32 [40] on cpu | 40   20.0%",
        "    head: float32 [100] on cpu | 100   50.0%",
        "  optimizer: dict of 2",
        "    state: dict of 1",
        "      0: dict of 1",
        "        m: float32 [5] on cpu",
        "    param_groups: list of 0",
        "  epoch: 3",
    ]


def test_keys(ckptkit: Ckptkit, file: None) -> None:
    """Values and what holds no such tensor are left out; the shares are those of all."""
    assert lines(ckptkit, "run.pth --keys layers.*.b.*") == [
        "dict of 3 | 40   20.0%",
        "  model: dict of 6 | 40   20.0%",
        "    layers. 2 tensors | 40   20.0%",
        "      0.b.weight: float32 [20] on cpu | 20   10.0%",
        "      1.b.weight: float32 [20] on cpu | 20   10.0%",
    ]
    assert lines(ckptkit, "run.pth --keys optimizer.*")[-1] == "        m: float32 [5] on cpu"


def test_no_such_key(ckptkit: Ckptkit, file: None) -> None:
    said = ckptkit("inspect --tree --keys nothing run.pth").stdout
    assert "no tensor name or path matches" in said and "dict of" not in said


@pytest.mark.parametrize(
    ("sort", "indent", "firsts"),
    [
        ("size", "    ", "head: layers. head.proj.weight: state: param_groups:"),
        ("name", "  ", "epoch: model: optimizer:"),
    ],
)
def test_sort(sort: str, indent: str, firsts: str, ckptkit: Ckptkit, file: None) -> None:
    found = lines(ckptkit, f"run.pth --sort {sort}")
    level = [line for line in found if re.match(rf"{indent}\S", line)]
    assert [line.split()[0] for line in level] == firsts.split()


def test_ties_count_once() -> None:
    weight = tensor(1, 2, 3)
    made = checkpoint({"a": weight, "b": weight, "c": tensor(1)})
    found = list(tree_text.tree(made.root, shares(summarize(made), made.root)))
    assert [line.split()[-2:] for line in found] == [
        ["100.0%", "█" * 20], ["75.0%", "█" * 15], ["on", "cpu"], ["25.0%", "█" * 5],
    ]  # fmt: skip


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_lines_fit_on_a_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "layers." + "very_long_name." * 12 + "weight"
    root: Any = {name: tensor(1), "text": "x" * 150, "b": tensor(*[0.0] * 9)}
    made = checkpoint(root)
    found = shares(summarize(made), made.root)
    piped = "\n".join(tree_text.tree(made.root, found))
    assert "very_long_name." * 12 in piped and "x" * 150 in piped
    monkeypatch.setattr(tree_text, "terminal_width", lambda: width)
    shown = list(tree_text.tree(made.root, found))
    assert max(map(len, shown)) < width
    assert sum("90.0%" in line for line in shown) == 1
    assert any("█" in line for line in shown) == (width >= 72)


def test_nothing_to_share(ckptkit: Ckptkit) -> None:
    torch.save({"empty": torch.zeros(0), "n": 1}, "e.pth")
    assert lines(ckptkit, "e.pth") == ["dict of 2", "  empty: float32 [0] on cpu", "  n: 1"]
