"""Output fits a terminal of 60, 100 or 200 columns; in a pipe, nothing is cut."""

from __future__ import annotations

import os
import re
import sys

import pytest
import torch

from tests.cli.conftest import Ckptkit
from tests.cli.test_colour import on_terminal

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")

LAYER = "encoder.transformer.layers.{}.self_attention.query_key_value_projection.weight"
HEAD = "classification_head.final_projection_to_the_vocabulary_of_many_languages.weight"
ONLY_B = "classification_head.another_projection_with_a_name_that_takes_many_letters.weight"


class Attack:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("echo " + "a" * 150,)


@pytest.fixture
def files() -> None:
    """Write a.pth, b.pth and a file with a call, in the current folder."""
    weights = {LAYER.format(n): torch.randn(8, 16) for n in range(3)} | {HEAD: torch.randn(4, 8)}
    precise = 1 + torch.randn(300) * 1e-6
    torch.save({"w": precise}, "v.pth")
    torch.save({"w": precise + 1e-5}, "w.pth")
    torch.save(torch.nn.Linear(2, 2), "module.pth")
    torch.save({"model": weights, "note " * 10: "x" * 150}, "a.pth")
    changed = weights | {LAYER.format(0): torch.randn(8, 17), ONLY_B: torch.ones(2)}
    torch.save({"model": changed | {HEAD: weights[HEAD] + 1e-4}}, "b.pth")
    torch.save({"model": weights, "call": Attack()}, f"{'long' * 20}.pth")


CALLS = {
    "inspect": ("inspect", "a.pth"),
    "inspect --tree": ("inspect", "--tree", "a.pth"),
    "diff": ("diff", "a.pth", "b.pth"),
    "diff --values": ("diff", "--values", "a.pth", "b.pth"),
    "stats": ("stats", "a.pth"),
    "scan": ("scan", "."),
    "show": ("show", "a.pth", HEAD),
    "show a vector": ("show", "v.pth", "w"),
    "show --with": ("show", "v.pth", "w", "--with", "w.pth"),
    "doctor": ("doctor", "a.pth"),
    "doctor, a module": ("doctor", "module.pth"),
    "diff --all": ("diff", "--all", "a.pth", "b.pth"),
    "inspect --flat": ("inspect", "--flat", "a.pth"),
    "inspect --names": ("inspect", "--names", "a.pth"),
    "stats --fold": ("stats", "--fold", "a.pth"),
    "verify": ("verify", "a.pth"),
    "formats": ("formats",),
    "digest": ("digest", "a.pth"),
    "env": ("env",),
    "help": ("help",),
    "run --list": ("run", "--list"),
    "average": ("average", "a.pth", "a.pth", "mean.pth", "--force"),
    "remap": ("remap", "a.pth", "moved.pth", "--to", "cuda:0", "--force"),
    "convert": ("convert", "a.pth", "weights.safetensors", "--force"),
    "convert --dry-run": ("convert", "a.pth", "weights.safetensors", "--force", "--dry-run"),
    "batch": ("batch", "strip-module", "--into", "out", "a.pth", "b.pth", "--dry-run"),
}


def is_digest(line: str) -> bool:
    """Return whether this is a line of a manifest, which other programs read."""
    return re.match("[0-9a-f]{64}  |# ckptkit.digest", line) is not None


@pytest.mark.parametrize("columns", [60, 100, 200])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.usefixtures("files")
def test_no_line_is_longer_than_the_terminal(
    name: str, columns: int, ckptkit: Ckptkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hint stays whole: a command in it is pasted. So do long paths and names, and digests.

    In this process; the tests below, and those of colors, have a real terminal.
    """
    monkeypatch.setattr("ckptkit.cli.render.is_terminal", lambda stream: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    said = ckptkit(*CALLS[name]).output.splitlines()
    assert said
    pasted = ("hint: ", "ckptkit ", "error: ", "warning: ", "note: ")
    wide = [line for line in said if len(line) > columns and not line.lstrip().startswith(pasted)]
    assert [line for line in wide if len(line.split()) > 1 and not is_digest(line)] == []


@pytest.mark.usefixtures("files")
def test_names_are_shortened_in_the_middle() -> None:
    said = on_terminal("inspect", "a.pth", COLUMNS="100", NO_COLOR="1")
    (row,) = [line for line in said.splitlines() if line.startswith("classification_head")]
    assert "..." in row and ".weight  [4, 8]" in row
    assert "\nsame in all rows: dtype float32, device cpu\n" in said
    assert HEAD in on_terminal("inspect", "a.pth", COLUMNS="200", NO_COLOR="1")


@pytest.mark.parametrize("columns", ["60", "200"])
@pytest.mark.usefixtures("files")
def test_nothing_is_cut_in_a_pipe(
    columns: str, ckptkit: Ckptkit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for words in (CALLS["inspect"], CALLS["stats"], CALLS["diff --values"]):
        lines = ckptkit(*words).stdout.splitlines()
        assert any(line.startswith(f"{HEAD}  ") for line in lines), words
    assert f"  {ONLY_B}" in ckptkit(*CALLS["diff"]).stdout.splitlines()
    finding = ckptkit(*CALLS["scan"]).stdout.splitlines()[1]
    assert len(finding) > 200 and " calls " in finding and ": REDUCE at byte " in finding


@pytest.mark.usefixtures("files")
def test_a_row_that_does_not_fit_becomes_lines() -> None:
    said = on_terminal("stats", "a.pth", COLUMNS="60", NO_COLOR="1")
    assert "\nall\n  tensors 4, count 416, mean " in said
