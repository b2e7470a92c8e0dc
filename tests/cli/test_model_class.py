"""The user's model code fails, exits, prints or takes long: each is told, and no report suffers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ckptkit.cli import model_class
from tests.conftest import Run

LAZY = """
def __getattr__(name):
    raise ModuleNotFoundError("No module named 'flash_attn'", name="flash_attn")
"""
MODULE = "import os, sys, time, torch\nclass Net(torch.nn.Module):\n"
INIT = MODULE + "    def __init__(self):\n        super().__init__()\n        "
STATE = MODULE + "    def state_dict(self, *args, **options):\n        "
LOUD = f"""print("imported")
{INIT}print("made"); os.system("echo child"); os.write(1, b"raw\\n")
        self.fc = torch.nn.Linear(2, 2)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.save({"fc.weight": torch.ones(2, 2), "fc.bias": torch.ones(2)}, "net.pth")
    return tmp_path


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (LAZY, "cannot import net.py:Net: ModuleNotFoundError: No module named 'flash_attn'"),
        ("raise SystemExit(3)", "cannot import net.py: SystemExit: 3"),
        ("raise BaseException('no')", "cannot import net.py: BaseException: no"),
        (INIT + "sys.exit(3)", "cannot build Net: SystemExit: 3"),
        (INIT + "1 / 0", "cannot build Net: ZeroDivisionError"),
        (INIT + "raise BrokenPipeError", "cannot build Net: BrokenPipeError"),
        (STATE + "raise NotImplementedError", "Net.state_dict() fails: NotImplementedError"),
    ],
    ids=["getattr", "exit", "base", "exit in Net", "error in Net", "pipe in Net", "state_dict"],
)
@pytest.mark.parametrize("words", ["diff --model", "doctor --model", "check --like"])
def test_code_that_fails(code: str, said: str, words: str, folder: Path, run: Run) -> None:
    (folder / "net.py").write_text(code)
    command, option = words.split()
    done = run(command, "net.pth", option, "net.py:Net", "--json", cwd=folder)
    assert done.code == 3 and said in done.stderr, done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "model"


def test_an_interrupt_passes(folder: Path, run: Run) -> None:
    (folder / "net.py").write_text(INIT + "raise KeyboardInterrupt")
    assert run("diff", "net.pth", "--model", "net.py:Net", cwd=folder).code == 130


def test_what_it_prints_is_not_in_the_report(folder: Path, alone: Run) -> None:
    (folder / "net.py").write_text(LOUD)
    done = alone("diff", "net.pth", "--model", "net.py:Net", "--json", cwd=folder)
    assert done.code == 0 and json.loads(done.stdout)["equal"] is True
    assert {"imported", "made", "child", "raw"} <= set(done.stderr.split())


def test_code_that_takes_long(folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_class, "PATIENCE", 0.01)
    (folder / "net.py").write_text(INIT + "time.sleep(0.2); self.fc = torch.nn.Linear(2, 2)")
    done = run("diff", "net.pth", "--model", "net.py:Net", cwd=folder)
    assert done.code == 0
    assert "note: net.py:Net is still being imported and built" in done.stderr
    assert "Ctrl-C" in done.stderr
