"""report: what the suffix makes, what goes with what, and that OUT is written whole or not at
all."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from ckptkit.core.bytesource import LocalFile
from tests.cli.conftest import Ckptkit
from tests.matrix import NAMES, Fixture
from tests.views.page import made
from tests.views.page.test_report import told


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return made.training(tmp_path / "run.pth")


def test_a_page(ckptkit: Ckptkit, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    result = ckptkit("report", file, "-o", out)
    assert result.exit_code == 0, result.stderr
    assert re.fullmatch(rf"wrote {re.escape(str(out))}: 10 tensors, \d+\.\d kB\n", result.stdout)
    text = out.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>") and '"valued":false' in text and len(text) < 60_000
    assert ckptkit("report", "-q", file, "--force", "--output", out).stdout == ""


def test_as_json(ckptkit: Ckptkit, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.html"
    found = json.loads(ckptkit("report", "--json", file, file, "-o", out).stdout)
    size = out.stat().st_size
    assert found == {
        "schema": "ckptkit.report/1", "inputs": [str(file)] * 2, "output": str(out), "tensor_count": 10, "size": size,
    }  # fmt: skip


def test_values_and_two_files(ckptkit: Ckptkit, file: Path, tmp_path: Path) -> None:
    other, out = made.other(tmp_path / "b.pth"), tmp_path / "diff.html"
    assert ckptkit("report", file, other, "--values", "-o", out).exit_code == 0
    text = out.read_text(encoding="utf-8")
    assert '"valued":true' in text and '"values":true' in text and '"changed":1' in text


def test_two_files_whole(ckptkit: Ckptkit, tmp_path: Path) -> None:
    """`report --all` compares what is beside the weights by its place."""
    a, b, out = made.training(tmp_path / "a.pth"), tmp_path / "b.pth", tmp_path / "x.html"
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


def test_all_needs_another_file(ckptkit: Ckptkit, tmp_path: Path) -> None:
    path = made.training(tmp_path / "a.pth")
    done = ckptkit("report", path, "--all", "-o", tmp_path / "x.html")
    assert done.exit_code == 2 and "--all" in done.stderr


def test_keys_of_both(ckptkit: Ckptkit, tmp_path: Path) -> None:
    torch.save({"a": {"w": torch.zeros(1)}, "b": {"w": torch.zeros(2)}}, tmp_path / "two.pth")
    torch.save({"w": torch.zeros(2)}, tmp_path / "one.pth")
    out = tmp_path / "x.html"
    result = ckptkit("report", tmp_path / "two.pth", tmp_path / "one.pth", "-o", out)
    assert result.exit_code == 3 and "--key" in result.stderr and not out.exists()
    words = (
        "report",
        tmp_path / "two.pth",
        tmp_path / "one.pth",
        "-o",
        out,
        "--key",
        "b",
        "--key-b",
        "",
    )
    assert ckptkit(*words).exit_code == 0
    assert '"state":[6,0]' in out.read_text(
        encoding="utf-8"
    )  # a.w is not compared, b.w is the same


@pytest.mark.parametrize("name", NAMES)
def test_every_fixture(ckptkit: Ckptkit, name: str, tmp_path: Path) -> None:
    path = Fixture(name).needs_reader().path
    result = ckptkit("report", path, "-o", tmp_path / "x.html")
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
@pytest.mark.parametrize("by", ["parameters", "bytes"])
def test_a_picture(ckptkit: Ckptkit, file: Path, tmp_path: Path, suffix: str, by: str) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, which draws pictures, is not installed")
    for number in range(2):
        result = ckptkit("report", file, "--by", by, "-o", tmp_path / f"{number}.{suffix}")
        assert result.exit_code == 0, result.stderr
    data = (tmp_path / f"0.{suffix}").read_bytes()
    assert data.startswith({"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}[suffix])
    assert data == (tmp_path / f"1.{suffix}").read_bytes()


def test_what_a_picture_says(ckptkit: Ckptkit, file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, which draws pictures, is not installed")
    ckptkit("report", file, "-o", tmp_path / "a.svg")
    ckptkit("report", file, "-o", tmp_path / "b.svg", "--title", "A $mall <net>", "--by", "bytes")
    a, b = ((tmp_path / f"{name}.svg").read_text(encoding="utf-8") for name in "ab")
    assert (
        ">run.pth<" in a and ">624 parameters<" in a and "embed.weight" in a and "exp_avg" not in a
    )
    assert ">A $mall &lt;net&gt;<" in b and "exp_avg" in b
    assert "model.layers.*.attn.weight  192<" in a
    assert str(tmp_path) not in a and "<dc:date>" not in a


def test_PG_05_hostile_names_in_a_picture(ckptkit: Ckptkit, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, which draws pictures, is not installed")
    from xml.etree import ElementTree

    path = made.hostile(tmp_path / "$\\frac{run.pth")
    for suffix in ("svg", "png"):
        result = ckptkit("report", path, "-o", tmp_path / f"x.{suffix}")
        assert result.exit_code == 0, result.stderr
    tags = {
        element.tag.rpartition("}")[2] for element in ElementTree.parse(tmp_path / "x.svg").iter()
    }
    assert not tags & {"script", "img", "foreignObject"}


def test_usage(ckptkit: Ckptkit, file: Path, tmp_path: Path) -> None:
    for words, said in (
        ((file,), "DST"),
        ((file, "-o", "x.jpg"), ".html, .svg, .png, .pdf"),
        ((file, "-o", "html"), ".html"),
        ((file, file), "the suffix must be one of"),
        ((file, file, "x.html", "-o", "x.html"), "name DST once"),
        ((file, file, "-o", "x.svg"), "require a page"),
        ((file, "--values", "-o", "x.svg"), "require a page"),
        ((file, "--by", "bytes", "-o", "x.html"), "require a picture"),
        ((file, "--key", "nothing", "-o", tmp_path / "x.html"), "nothing"),
    ):
        result = ckptkit("report", *words)
        assert result.exit_code == 2 and said in result.stderr, words
    assert not (tmp_path / "x.html").exists()


def test_the_last_argument_is_the_output(ckptkit: Ckptkit, file: Path, tmp_path: Path) -> None:
    for words in ((file, "a.html"), (file, file, "b.html"), (file, "-o", "c.html")):
        *places, name = (tmp_path / each if str(each).endswith(".html") else each for each in words)
        assert ckptkit("report", *places, name).exit_code == 0 and name.exists(), words


def test_nothing_to_draw(ckptkit: Ckptkit, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib, which draws pictures, is not installed")
    torch.save({"n": 1}, tmp_path / "n.pth")
    result = ckptkit("report", tmp_path / "n.pth", "-o", tmp_path / "n.png")
    assert result.exit_code == 2 and "no parameters to draw" in result.stderr
    assert ckptkit("report", tmp_path / "n.pth", "-o", tmp_path / "n.html").exit_code == 0


def test_what_is_there_is_not_replaced(ckptkit: Ckptkit, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.html"
    out.write_text("mine")
    assert ckptkit("report", file, "-o", out).exit_code == 2 and out.read_text() == "mine"
    assert (
        ckptkit("report", file, "-o", out, "--force").exit_code == 0 and out.read_text() != "mine"
    )


def test_no_matplotlib(
    ckptkit: Ckptkit, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    result = ckptkit("report", file, "-o", tmp_path / "x.svg")
    assert result.exit_code == 2 and "pip install matplotlib" in result.stderr
    assert ckptkit("report", file, "-o", tmp_path / "x.html").exit_code == 0


def test_a_file_that_cannot_be_read(ckptkit: Ckptkit, tmp_path: Path) -> None:
    (tmp_path / "bad.pth").write_bytes(b"no checkpoint")
    result = ckptkit("report", tmp_path / "bad.pth", "-o", tmp_path / "x.html")
    assert result.exit_code == 3 and not (tmp_path / "x.html").exists()


def test_no_tensor_is_read(
    ckptkit: Ckptkit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"big": torch.ones(1 << 20)}, tmp_path / "big.pth")
    read: list[int] = []
    original = LocalFile.read
    monkeypatch.setattr(LocalFile, "read", lambda *args: (read.append(args[2]), original(*args))[1])
    assert ckptkit("report", tmp_path / "big.pth", "-o", tmp_path / "x.html").exit_code == 0
    assert sum(read) < 1 << 18


def test_values_of_two_files_are_compared_unless_it_is_declined(
    ckptkit: Ckptkit, file: Path, tmp_path: Path
) -> None:
    other, out = made.other(tmp_path / "b.pth"), tmp_path / "x.html"
    for options, compared, valued in (((), True, False), (("--no-values",), False, False)):
        assert ckptkit("report", file, other, out, "--force", *options).exit_code == 0
        found = told(out.read_bytes())
        assert (found["diff"]["values"], found["tensors"]["valued"]) == (compared, valued)
        assert bool(found["diff"]["parts"]) == compared and found["diff"]["layers"]
    alone = ckptkit("report", file, out, "--force", "--no-values")
    assert alone.exit_code == 2 and "--no-values needs OTHER" in alone.stderr
