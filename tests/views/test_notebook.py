"""The display of a Checkpoint and of a Diff at a prompt and in a notebook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.views import notebook
from tests.views.parsed import Parsed

# How often an HTML parser may see an element that a file has smuggled in: never.
HOSTILE = [
    "<script>alert(1)</script>", "</td></table><img src=x onerror=alert(1)>", '" onmouseover="alert(1)', "a\x1b[2Jb",
    "&lt;b&gt;", "\u202egnp.exe", "\ud800", "</details>", "<!--", "'", "a\nb",
]  # fmt: skip


PLAIN = {"div", "strong", "details", "summary", "table", "thead", "tbody", "tr", "th", "td"}


def seen(thing: Any) -> Parsed:
    found = Parsed(thing._repr_html_())
    for tag, attributes in found.tags:
        assert tag in PLAIN
        assert attributes in ({}, {"style": "text-align:left"}, {"open": None})
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    layers = {f"layers.{n}.w": torch.ones(2, 3) for n in range(12)}
    torch.save({"model": layers, "epoch": 3, "names": ["a", "b"]}, tmp_path / "run.pth")
    return tmp_path / "run.pth"


def test_repr(path: Path, tmp_path: Path) -> None:
    """Shared parameters are counted once."""
    said = f"<Checkpoint {path}: torch-zip: 12 tensors, 72 parameters, 288 B in model>"
    assert repr(ckptkit.open(path)) == said
    assert repr(ckptkit.Checkpoint({})) == "<Checkpoint made here: 0 tensors, 0 parameters, 0 B>"
    weight = torch.ones(2, 3)
    for state, end in (
        ({"epoch": 3}, "torch-zip: no weights>"),
        ({"a": {"w": torch.ones(1)}, "b": {"w": torch.ones(2)}}, "could be the weights: a, b>"),
        ({"a": weight, "b": weight, "c": torch.ones(2, 3)}, "3 tensors, 12 parameters, 72 B>"),
    ):
        torch.save(state, tmp_path / "other.pth")
        assert repr(ckptkit.open(tmp_path / "other.pth")).endswith(end)
        assert "tensors" in end or "entries" in seen(ckptkit.open(tmp_path / "other.pth")).text


def test_html_is_folded_and_reads_headers_only(path: Path, lengths_read: list[int]) -> None:
    found = seen(ckptkit.open(path))
    assert "layers.{0..11}.w" in found.text and "288 B" in found.text
    assert "epoch" in found.text and "list of 2" in found.text
    assert len(found.all("tr")) == 5  # two headings, one row of weights, two other entries
    torch.save({"w": torch.ones(1 << 20)}, path)
    lengths_read.clear()
    ckptkit.open(path)._repr_html_()
    assert sum(lengths_read) < 1 << 19


def test_hostile_names_and_values(tmp_path: Path) -> None:
    torch.save(
        {"model": {name: torch.ones(1) for name in HOSTILE[:6] + HOSTILE[7:]}}, tmp_path / "run.pth"
    )
    plain = {name: name for name in HOSTILE if name.isprintable()}
    root = {"model": ckptkit.open(tmp_path / "run.pth").root["model"], **plain, "big": 10**5000}  # type: ignore[index, call-overload]
    found = seen(ckptkit.Checkpoint(root))
    assert "<script>alert(1)</script>" in found.text  # as text
    assert r"a\x1b[2Jb" in found.text and "\x1b" not in found.text
    assert "an integer of 16,610 bits" in found.text


def test_very_many_rows(tmp_path: Path) -> None:
    state = {f"{chr(97 + n % 26)}{n}x": torch.ones(n % 7 + 1) for n in range(1000)}
    torch.save(state, tmp_path / "run.pth")
    found = seen(ckptkit.open(tmp_path / "run.pth"))
    assert len(found.all("tr")) == notebook.ROWS + 1 and "and 800 more" in found.text


def test_diff(path: Path, tmp_path: Path) -> None:
    other = {f"layers.{n}.w": torch.ones(2, 3) for n in range(10)}
    other |= {"head": torch.ones(1), "<b>": torch.ones(2), "layers.0.w": torch.ones(4)}
    torch.save(other, tmp_path / "b.pth")
    torch.save({"a\x1b[2Jb": torch.ones(1)}, tmp_path / "c.pth")
    difference = ckptkit.diff(path, tmp_path / "b.pth")
    text = seen(difference).text
    for said in (
        "2 missing",
        "2 unexpected",
        "1 mismatched",
        "layers.{10..11}.w",
        "<b>",
        "float32 [4]",
    ):
        assert said in text
    assert str(difference).splitlines()[:2] == [difference.summary, "missing: head, <b>"]
    assert str(ckptkit.diff(path, tmp_path / "c.pth")).splitlines()[1] == r"missing: a\x1b[2Jb"


def test_diff_of_values(path: Path) -> None:
    other = path.with_name("b.pth")
    torch.save({f"layers.{n}.w": torch.full((2, 3), 1.0 + (n == 3)) for n in range(12)}, other)
    found = seen(ckptkit.diff(path, other, atol=0.0))
    assert "changed: 1" in found.text and "layers.3.w" in found.text
    equal, left = str(ckptkit.diff(path, path, values=False)).splitlines()
    assert equal == "same names, shapes and dtypes: 12 keys; values not compared"
    assert (
        left == "not compared: the values of tensors (--no-values); epoch, names (2 values) (--all)"
    )
