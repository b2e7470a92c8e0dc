"""report: what the suffix makes, what goes with what, and that OUT is written whole or not at
all."""

from __future__ import annotations

import os
import re
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


@pytest.fixture
def file() -> Path:
    return made.training(Path("run.pth"))


def test_a_page(ckptkit: Ckptkit, file: Path) -> None:
    out = Path("report.html")
    result = ckptkit("report", file, "-o", out, code=0)
    assert re.fullmatch(rf"wrote {re.escape(str(out))}: 10 tensors, \d+\.\d kB\n", result.stdout)
    text = out.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and '"valued":false' in text and len(text) < 60_000
    assert ckptkit("report -q", file, "--force", "--output", out).stdout == ""


def test_as_json(as_json: Callable[..., Any], file: Path) -> None:
    assert as_json("report run.pth run.pth -o x.html") == {
        "schema": "ckptkit.report/1", "inputs": ["run.pth"] * 2, "output": "x.html",
        "tensor_count": 10, "size": os.path.getsize("x.html"),
    }  # fmt: skip


def test_values_and_two_files(ckptkit: Ckptkit, file: Path) -> None:
    other, out = made.other(Path("b.pth")), Path("diff.html")
    assert ckptkit("report", file, other, "--values", "-o", out).exit_code == 0
    text = out.read_text(encoding="utf-8")
    assert '"valued":true' in text and '"values":true' in text and '"changed":1' in text


def test_two_files_whole(ckptkit: Ckptkit) -> None:
    """`report --all` compares what is beside the weights by its place."""
    a, b, out = made.training(Path("a.pth")), Path("b.pth"), Path("x.html")
    whole = torch.load(a)
    whole["optimizer"]["state"][0]["exp_avg"][0, 0] = 3
    whole["optimizer"]["state"][0]["step"] = torch.zeros(2)
    del whole["slice"]
    whole["epoch"] = 8
    torch.save(whole, b)
    assert ckptkit("report", a, b, "--all", "--values", "-o", out).exit_code == 0
    found = told(out.read_bytes())
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
    out = Path("x.html")
    assert "--key" in ckptkit("report two.pth one.pth -o x.html", code=3).stderr
    assert not out.exists()
    ckptkit("report two.pth one.pth -o x.html --key b --key-b ''", code=0)
    # a.w is not compared, b.w is the same
    assert '"state":[6,0]' in out.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_every_fixture(ckptkit: Ckptkit, name: str) -> None:
    path = Fixture(name).needs_reader().path
    result = ckptkit("report", path, "-o", "x.html")
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
@pytest.mark.parametrize("by", ["parameters", "bytes"])
def test_a_picture(ckptkit: Ckptkit, file: Path, suffix: str, by: str) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, which draws pictures, is not installed")
    for number in range(2):
        result = ckptkit("report", file, "--by", by, "-o", f"{number}.{suffix}")
        assert result.exit_code == 0, result.stderr
    data = (Path(f"0.{suffix}")).read_bytes()
    assert data.startswith({"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}[suffix])
    assert data == (Path(f"1.{suffix}")).read_bytes()


def test_what_a_picture_says(ckptkit: Ckptkit, file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, which draws pictures, is not installed")
    ckptkit("report", file, "-o", "a.svg")
    ckptkit("report", file, "-o", "b.svg", "--title", "A $mall <net>", "--by", "bytes")
    a, b = ((Path(f"{name}.svg")).read_text(encoding="utf-8") for name in "ab")
    assert (
        ">run.pth<" in a and ">624 parameters<" in a and "embed.weight" in a and "exp_avg" not in a
    )
    assert ">A $mall &lt;net&gt;<" in b and "exp_avg" in b
    assert "model.layers.*.attn.weight  192<" in a
    assert str(tmp_path) not in a and "<dc:date>" not in a


def test_PG_05_hostile_names_in_a_picture(ckptkit: Ckptkit, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, which draws pictures, is not installed")
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
def test_usage(ckptkit: Ckptkit, file: Path, words: str, said: str) -> None:
    assert said in ckptkit(f"report run.pth {words}", code=2).stderr
    assert not Path("x.html").exists()


@pytest.mark.parametrize("words", ["x.html", "run.pth x.html", "-o x.html"])
def test_the_last_argument_is_the_output(ckptkit: Ckptkit, file: Path, words: str) -> None:
    ckptkit(f"report run.pth {words}", code=0)
    assert Path("x.html").exists()


def test_nothing_to_draw(ckptkit: Ckptkit) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, which draws pictures, is not installed")
    torch.save({"n": 1}, "n.pth")
    assert "no parameters to draw" in ckptkit("report n.pth -o n.png", code=2).stderr
    assert ckptkit("report n.pth -o n.html").exit_code == 0


def test_what_is_there_is_not_replaced(ckptkit: Ckptkit, file: Path) -> None:
    out = Path("x.html")
    out.write_text("mine")
    assert ckptkit("report", file, "-o", out).exit_code == 2 and out.read_text() == "mine"
    assert ckptkit(f"report {file} -o {out} --force").exit_code == 0 and out.read_text() != "mine"


def test_no_matplotlib(ckptkit: Ckptkit, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert "pip install matplotlib" in ckptkit("report", file, "-o", "x.svg", code=2).stderr
    assert ckptkit("report", file, "-o", "x.html").exit_code == 0


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


def test_values_of_two_files_are_compared_unless_it_is_declined(
    ckptkit: Ckptkit, file: Path
) -> None:
    other, out = made.other(Path("b.pth")), Path("x.html")
    for options, compared, valued in (((), True, False), (("--no-values",), False, False)):
        assert ckptkit("report", file, other, out, "--force", *options).exit_code == 0
        found = told(out.read_bytes())
        assert (found["diff"]["values"], found["tensors"]["valued"]) == (compared, valued)
        assert bool(found["diff"]["parts"]) == compared and found["diff"]["layers"]
