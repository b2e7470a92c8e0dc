"""The manual's table of what the trainer shows: each row is tested under its number, and its command
is run, at a small width."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import ckptkit
from ckptkit.cli import main
from ckptkit.trainer.gpu_checks import ARTICLE, CHECKS
from ckptkit.trainer.models import Cnn
from ckptkit.trainer.models.recomputing import LAYERS, UNITS
from tests.trainer.conftest import ROWS, TEXT, train

SMALL = ("--data", "random", "--width", "0.25", "--epochs", "1", "--force")
NET = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)[0]  # of row S18


def test_every_row_is_there_once() -> None:
    assert list(ROWS) == [f"S{number:02}" for number in range(1, 26)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with run.pth, wrapped, and plain.pth, without its prefix."""
    folder = tmp_path_factory.mktemp("rows")
    train(folder / "run.pth", epochs=1, parallel="dp", keep_module_prefix=True)
    stripped = ckptkit.strip_prefix(ckptkit.open(folder / "run.pth"), "module.")
    ckptkit.save(stripped, folder / "plain.pth")
    (folder / "net.py").write_text(NET.replace("10))", "10, 0.25))"))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, the current folder."""
    shutil.copytree(made, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def command_line(row: str) -> list[str]:
    """Return the words of a row; of training, at a small width, on the CPU if no device is named."""
    words = shlex.split(ROWS[row])
    if words[:2] == ["ckptkit", "train"]:
        words += [each for each in SMALL if each != "--force" or "--evaluate" not in words]
        words += [] if "--devices" in words else ["--devices", "cpu"]
        if {"crnn", "densenet", "generator", "mlp"} & {*words}:
            words += ["--batch-size", "256"]
    return words


LINES = {
    **dict.fromkeys(("S01", "S04", "S05", "S06", "S07", "S11", "S19", "S23", "S24"), "wrote run.pth"),
    **dict.fromkeys(("S08", "S15"), "accuracy 0."),
    "S02": "in the model: input [16, 3, 32, 32], output [16, 10] on cpu",
    "S03": "outside: input [32, 3, 32, 32], output [16, 10] on cpu + [16, 10] on cpu",
    "S13": "plain.pth",
    "S16": "part.pth",
    "S17": "simulated: 2 parts of each batch",
    "S18": "module.",
    "S20": torch.__version__,
    "S21": "float32",
    "S22": "fc1",
}  # fmt: skip


@pytest.mark.parametrize("row", LINES)
def test_a_command_runs(folder: Path, row: str) -> None:
    words = command_line(row)
    assert words[0] == "ckptkit"
    if row == "S13":
        (folder / "plain.pth").unlink()
    done = CliRunner().invoke(main, words[1:])
    assert done.exit_code == (row == "S18"), done.output  # 1: there are differences
    assert LINES[row] in done.output


@pytest.mark.parametrize("row", ["S09", "S10"])
def test_a_command_for_gpus_runs_or_names_the_devices(folder: Path, row: str) -> None:
    words = command_line(row)
    done = CliRunner().invoke(main, words[1:])
    if torch.cuda.device_count() > 1:
        assert done.exit_code == 0, done.output
    else:
        assert done.exit_code == 2
        assert "this machine has no device cuda:" in done.output
        assert "hint: use --devices with cpu" in done.output


def test_S21_the_types_of_tensors_are_those_of_torch() -> None:
    rows = dict(re.findall(r"`torch\.(\w+)` \| `(torch\.\w+)`", TEXT))
    assert len(rows) == 12
    for name, kind in rows.items():
        assert torch.empty(0, dtype=getattr(torch, name)).type() == kind


def test_S05_the_figures_of_the_article_are_those_of_lost_gradients() -> None:
    """Without the gradients and Adam's two averages of all but the last segment."""
    rows = re.findall(r"^\| (?:none|\d+) \| [\d.]+ MB \| (\d+) \| (\d+) \|$", TEXT, re.MULTILINE)
    assert [int(figure) for figure, _ in rows] == list(ARTICLE.values())
    sizes = [UNITS * (UNITS + 1)] * (LAYERS - 1) + [(UNITS + 1) * 100]
    for segments, (figure, explained) in zip(ARTICLE, rows, strict=True):
        last = LAYERS - (segments - 1) * (LAYERS // segments) if segments else LAYERS
        lost = 3 * 4 * sum(sizes[: LAYERS - last]) / 2**20
        assert int(explained) == round(ARTICLE[0] - lost)
        assert int(explained) == pytest.approx(int(figure), rel=0.04)


def test_the_functions_run(folder: Path) -> None:
    model = Cnn((3, 32, 32), 10, 0.25)
    names = {"ckptkit": ckptkit, "model": model}
    loaded = eval(ROWS["S12"], names)  # noqa: S307  # a line of our manual
    assert set(loaded) == {f"module.{name}" for name in model.state_dict()}
    assert eval(ROWS["S14"], names).complete  # noqa: S307


def test_the_number_of_checks_is_that_of_the_manual() -> None:
    found = re.findall(r"Without a GPU, (\d+) of the (\d+)\s+checks are\s+simulated", TEXT)
    simulated = [check for check in CHECKS if not check.needs]
    assert found == [(str(len(simulated)), str(len(CHECKS)))]


def test_every_row_is_run() -> None:
    others = {"S09", "S10", "S12", "S14", "S25"}
    assert LINES.keys() | others == set(ROWS)
