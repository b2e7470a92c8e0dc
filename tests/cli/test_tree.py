"""inspect --tree: names in groups, shares, the width of the terminal, and --keys and --sort."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit.analysis.shares import shares
from ckptkit.analysis.summary import summarize
from ckptkit.cli import tree_text
from tests.analysis.made import checkpoint, tensor
from tests.cli.conftest import Ckptkit


@pytest.fixture
def file(tmp_path: Path) -> Path:
    weights = {
        f"layers.{n}.{part}.weight": torch.zeros(size)
        for n in range(2)
        for part, size in (("a", 10), ("b", 20))
    }
    weights["head.proj.weight"] = torch.zeros(40)
    weights["head"] = torch.zeros(100)
    root = {
        "model": weights,
        "optimizer": {"state": {0: {"m": torch.zeros(5)}}, "param_groups": []},
        "epoch": 3,
    }
    torch.save(root, tmp_path / "run.pth")
    return tmp_path / "run.pth"


def lines(ckptkit: Ckptkit, *args: object) -> list[str]:
    result = ckptkit("inspect", "--tree", *args)
    assert result.exit_code == 0, result.stderr
    return [
        re.sub(r"  +([\d,]+  +[<\d.]+%).*", r" | \1", line)
        for line in result.stdout.split("\n\n")[0].splitlines()
    ]


def test_names_in_groups(ckptkit: Ckptkit, file: Path) -> None:
    assert lines(ckptkit, file) == [
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


def test_keys(ckptkit: Ckptkit, file: Path) -> None:
    """Values and what holds no such tensor are left out; the shares are those of all."""
    assert lines(ckptkit, file, "--keys", "layers.*.b.*") == [
        "dict of 3 | 40   20.0%",
        "  model: dict of 6 | 40   20.0%",
        "    layers. 2 tensors | 40   20.0%",
        "      0.b.weight: float32 [20] on cpu | 20   10.0%",
        "      1.b.weight: float32 [20] on cpu | 20   10.0%",
    ]
    assert lines(ckptkit, file, "--keys", "optimizer.*")[-1] == "        m: float32 [5] on cpu"


def test_no_such_key(ckptkit: Ckptkit, file: Path) -> None:
    result = ckptkit("inspect", "--tree", "--keys", "nothing", file)
    assert "no tensor name or path matches" in result.stdout and "dict of" not in result.stdout


def test_sort(ckptkit: Ckptkit, file: Path) -> None:
    by_size = [
        line
        for line in lines(ckptkit, file, "--sort", "size")
        if line.startswith("    ") and line[4] != " "
    ]
    assert [line.split()[0] for line in by_size] == [
        "head:",
        "layers.",
        "head.proj.weight:",
        "state:",
        "param_groups:",
    ]
    by_name = lines(ckptkit, file, "--sort", "name")
    assert [line.split()[0] for line in by_name if re.match("  [a-z]", line)] == [
        "epoch:",
        "model:",
        "optimizer:",
    ]


def test_ties_count_once() -> None:
    weight = tensor(1, 2, 3)
    made = checkpoint({"a": weight, "b": weight, "c": tensor(1)})
    found = list(tree_text.tree(made.root, shares(summarize(made), made.root)))
    assert [line.split()[-2:] for line in found] == [
        ["100.0%", "█" * 20], ["75.0%", "█" * 15], ["on", "cpu"], ["25.0%", "█" * 5],
    ]  # fmt: skip


@pytest.mark.parametrize("width", [40, 80, 120, 200])
def test_lines_fit_on_a_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    root: Any = {
        "layers." + "very_long_name." * 12 + "weight": tensor(1),
        "text": "x" * 150,
        "b": tensor(*[0.0] * 9),
    }
    made = checkpoint(root)
    found = shares(summarize(made), made.root)
    piped = list(tree_text.tree(made.root, found))
    assert any("very_long_name." * 12 in line for line in piped) and any(
        "x" * 150 in line for line in piped
    )
    monkeypatch.setattr(tree_text, "terminal_width", lambda: width)
    shown = list(tree_text.tree(made.root, found))
    assert max(map(len, shown)) < width
    assert sum("90.0%" in line for line in shown) == 1
    assert any("█" in line for line in shown) == (width >= 72)


def test_nothing_to_share(ckptkit: Ckptkit, tmp_path: Path) -> None:
    torch.save({"empty": torch.zeros(0), "n": 1}, tmp_path / "e.pth")
    assert lines(ckptkit, tmp_path / "e.pth") == [
        "dict of 2",
        "  empty: float32 [0] on cpu",
        "  n: 1",
    ]
