"""report: what the suffix makes, what goes with what, and that OUT is written whole or not at
all."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from ckptkit.core.bytesource import LocalFile
from tests.cli.conftest import Ckptkit
from tests.matrix import NAMES, Fixture
from tests.views.page import made
from tests.views.page.test_report import told


@pytest.fixture(autouse=True)
def files(here: None) -> None:
    made.training(Path("run.pth"))
    made.other(Path("b.pth"))


@pytest.fixture
def matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, which draws pictures, is not installed")


def text_of(path: str) -> str:
    return Path(path).read_text(encoding="utf-8")


def test_a_page(ckptkit: Ckptkit) -> None:
    said = ckptkit("report run.pth -o report.html", code=0).stdout
    assert re.fullmatch(r"wrote report\.html: 10 tensors, \d+\.\d kB\n", said)
    text = text_of("report.html")
    assert text.startswith("<!doctype html>") and '"valued":false' in text and len(text) < 60_000
    assert ckptkit("report -q run.pth --force --output report.html").stdout == ""


def test_as_json(as_json: Callable[..., Any]) -> None:
    assert as_json("report run.pth run.pth -o x.html") == {
        "schema": "ckptkit.report/1", "inputs": ["run.pth"] * 2, "output": "x.html",
        "tensor_count": 10, "size": os.path.getsize("x.html"),
    }  # fmt: skip


def test_values_and_two_files(ckptkit: Ckptkit) -> None:
    ckptkit("report run.pth b.pth --values -o diff.html", code=0)
    text = text_of("diff.html")
    assert '"valued":true' in text and '"values":true' in text and '"changed":1' in text


def test_two_files_whole(ckptkit: Ckptkit) -> None:
    """`report --all` compares what is beside the weights by its place."""
    whole = torch.load("run.pth")
    whole["optimizer"]["state"][0]["exp_avg"][0, 0] = 3
    whole["optimizer"]["state"][0]["step"] = torch.zeros(2)
    del whole["slice"]
    whole["epoch"] = 8
    torch.save(whole, "whole.pth")
    ckptkit("report run.pth whole.pth --all --values -o x.html", code=0)
    found = told(Path("x.html").read_bytes())
    diff, names = found["diff"], found["tensors"]["name"]
    states = {name: diff["states"][state] for name, state in zip(names, diff["state"], strict=True)}
    changed = "optimizer.state.0.exp_avg"
    assert states.pop(changed) == "changed"
    assert states.pop("slice") == "unexpected"
    assert states.pop("optimizer.state.0.step") == "missing"
    assert states.keys() == made.state_dict().keys() and set(states.values()) == {"same"}
    assert diff["other"][str(names.index(changed))]["largest"] == 3
    assert diff["entries"] == {"count": 1, "rows": [["epoch", "7", "8"]]}
    assert diff["uncompared"] == []


def test_keys_of_both(ckptkit: Ckptkit) -> None:
    torch.save({"a": {"w": torch.zeros(1)}, "b": {"w": torch.zeros(2)}}, "two.pth")
    torch.save({"w": torch.zeros(2)}, "one.pth")
    assert "--key" in ckptkit("report two.pth one.pth -o x.html", code=3).stderr
    assert not Path("x.html").exists()
    ckptkit("report two.pth one.pth -o x.html --key b --key-b ''", code=0)
    assert '"state":[6,0]' in text_of("x.html")  # a.w is not compared, b.w is the same


@pytest.mark.parametrize("name", NAMES)
def test_every_fixture(ckptkit: Ckptkit, name: str) -> None:
    ckptkit("report", Fixture(name).needs_reader().path, "-o", "x.html", code=0)


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
@pytest.mark.parametrize("by", ["parameters", "bytes"])
@pytest.mark.usefixtures("matplotlib")
def test_a_picture(ckptkit: Ckptkit, suffix: str, by: str) -> None:
    for number in range(2):
        ckptkit(f"report run.pth --by {by} -o {number}.{suffix}", code=0)
    first, second = (Path(f"{number}.{suffix}").read_bytes() for number in range(2))
    assert first.startswith({"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}[suffix])
    assert first == second


@pytest.mark.usefixtures("matplotlib")
def test_what_a_picture_says(ckptkit: Ckptkit, tmp_path: Path) -> None:
    ckptkit("report", tmp_path / "run.pth", "-o", "a.svg")
    ckptkit("report run.pth -o b.svg --title 'A $mall <net>' --by bytes")
    a, b = text_of("a.svg"), text_of("b.svg")
    for part in (
        ">run.pth<",
        ">624 parameters<",
        "embed.weight",
        "model.layers.*.attn.weight  192<",
    ):
        assert part in a
    for part in ("exp_avg", str(tmp_path), "<dc:date>"):
        assert part not in a
    assert ">A $mall &lt;net&gt;<" in b and "exp_avg" in b


@pytest.mark.usefixtures("matplotlib")
def test_PG_05_hostile_names_in_a_picture(ckptkit: Ckptkit, tmp_path: Path) -> None:
    path = made.hostile(tmp_path / "$\\frac{run.pth")
    for suffix in ("svg", "png"):
        ckptkit("report", path, "-o", f"x.{suffix}", code=0)
    tags = {element.tag.rpartition("}")[2] for element in ElementTree.parse("x.svg").iter()}
    assert not tags & {"script", "img", "foreignObject"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("", "DST"),
        ("-o x.jpg", ".html, .svg, .png, .pdf"),
        ("-o html", ".html"),
        ("run.pth", "the suffix must be one of"),
        ("run.pth x.html -o x.html", "name DST once"),
        ("run.pth -o x.svg", "require a page"),
        ("--values -o x.svg", "require a page"),
        ("--by bytes -o x.html", "require a picture"),
        ("--key nothing -o x.html", "nothing"),
        ("--all -o x.html", "--all needs OTHER"),
        ("x.html --no-values", "--no-values needs OTHER"),
    ],
)
def test_usage(ckptkit: Ckptkit, words: str, said: str) -> None:
    assert said in ckptkit(f"report run.pth {words}", code=2).stderr
    assert not Path("x.html").exists()


@pytest.mark.parametrize("words", ["x.html", "run.pth x.html", "-o x.html"])
def test_the_last_argument_is_the_output(ckptkit: Ckptkit, words: str) -> None:
    ckptkit(f"report run.pth {words}", code=0)
    assert Path("x.html").exists()


@pytest.mark.usefixtures("matplotlib")
def test_nothing_to_draw(ckptkit: Ckptkit) -> None:
    torch.save({"n": 1}, "n.pth")
    assert "no parameters to draw" in ckptkit("report n.pth -o n.png", code=2).stderr
    ckptkit("report n.pth -o n.html", code=0)


def test_what_is_there_is_not_replaced(ckptkit: Ckptkit) -> None:
    Path("x.html").write_text("mine")
    ckptkit("report run.pth -o x.html", code=2)
    assert text_of("x.html") == "mine"
    ckptkit("report run.pth -o x.html --force", code=0)
    assert text_of("x.html") != "mine"


def test_no_matplotlib(ckptkit: Ckptkit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in ckptkit("report run.pth -o x.svg", code=2).stderr
    ckptkit("report run.pth -o x.html", code=0)


def test_a_file_that_cannot_be_read(ckptkit: Ckptkit) -> None:
    Path("bad.pth").write_bytes(b"no checkpoint")
    ckptkit("report bad.pth -o x.html", code=3)
    assert not Path("x.html").exists()


def test_no_tensor_is_read(ckptkit: Ckptkit, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"big": torch.ones(1 << 20)}, "big.pth")
    read: list[int] = []
    original = LocalFile.read
    monkeypatch.setattr(LocalFile, "read", lambda *args: (read.append(args[2]), original(*args))[1])
    assert ckptkit("report big.pth -o x.html").exit_code == 0
    assert sum(read) < 1 << 18


@pytest.mark.parametrize(("options", "compared"), [("", True), ("--no-values", False)])
def test_values_of_two_files_are_compared_unless_it_is_declined(
    ckptkit: Ckptkit, options: str, compared: bool
) -> None:
    ckptkit(f"report run.pth b.pth x.html {options}", code=0)
    found = told(Path("x.html").read_bytes())
    assert (found["diff"]["values"], found["tensors"]["valued"]) == (compared, False)
    assert bool(found["diff"]["parts"]) == compared and found["diff"]["layers"]
