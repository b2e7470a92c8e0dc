"""What the commands do without: torch, numpy, an unpickler, temporary files, and any change of their input."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ENVIRONMENT, ROOT

FIXTURES = ROOT / "fixtures"
INPUTS = (
    "torch-zip/digits_dp_cuda1.pth",
    "torch-legacy/digits_dp_cuda1.pth",
    "torch-zip/digits_module.pth",
    "torch-zip/views_ties_dtypes.pth",
    "safetensors/digits.safetensors",
    "sharded/digits-safetensors",
    "sharded/digits-bin",
    "pickle/arrays.pkl",
)

# Runs the command line, then writes what was imported and whether pickle made an unpickler.
SPY = """
import json, os, sys
unpicklers = []
sys.addaudithook(lambda event, args: unpicklers.append(args) if event == "pickle.find_class" else None)
sys.argv[0] = "ckptkit"
from ckptkit.cli import main
def leave(code):
    raise SystemExit(code)
os._exit = leave  # how the program ends: we have something to say first
code = 0
try:
    code = main()
except SystemExit as exit:
    code = exit.code
heavy = sorted({"torch", "numpy", "safetensors", "pickle"} & set(sys.modules))
print(json.dumps({"code": code, "heavy": heavy, "unpicklers": len(unpicklers)}), file=sys.stderr)
"""


def spied(folder: Path, *args: str | Path) -> dict[str, Any]:
    """What a command imported, started in `folder` with TMPDIR there too."""
    environment = {**ENVIRONMENT, "TMPDIR": str(folder)}
    command = [sys.executable, "-c", SPY, *map(str, args)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", cwd=folder, env=environment, timeout=60)
    report: dict[str, Any] = json.loads(done.stderr.splitlines()[-1])
    assert report["code"] in (0, None), done.stderr
    return report


def files_of(path: Path) -> list[Path]:
    return sorted(path.iterdir()) if path.is_dir() else [path]


def hashes(path: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files_of(path)}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize(
    "command",
    [
        ["inspect", "SRC"],
        ["inspect", "--json", "SRC"],
        ["strip-module", "SRC", "out.pth"],
        ["remap", "SRC", "out.pth", "--to", "cpu"],
        ["remap", "SRC", "out.pth", "--map", "cuda:1=cuda:0"],
    ],
    ids=" ".join,
)
def test_no_torch_no_unpickler_nothing_left(name: str, command: list[str], tmp_path: Path) -> None:
    source = FIXTURES / name
    before = hashes(source)
    report = spied(tmp_path, *(source if arg == "SRC" else arg for arg in command))
    assert report["heavy"] == []
    assert report["unpicklers"] == 0
    assert hashes(source) == before
    assert {path.name for path in tmp_path.iterdir()} <= {"out.pth"}


@pytest.mark.parametrize("name", ["torch-zip/digits_dp_cuda1.pth", "safetensors/digits.safetensors"])
def test_convert_copies_without_torch(name: str, tmp_path: Path) -> None:
    source = FIXTURES / name
    before = hashes(source)
    there = spied(tmp_path, "convert", source, "out.safetensors")
    back = spied(tmp_path, "convert", "out.safetensors", "back.pth")
    assert there["heavy"] == back["heavy"] == []
    assert hashes(source) == before
    assert {path.name for path in tmp_path.iterdir()} == {"out.safetensors", "back.pth"}


def test_importing_the_library_imports_nothing_heavy() -> None:
    program = "import ckptkit, sys; print(sorted({'torch', 'numpy', 'click', 'tabulate', 'pickle'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_the_spy_sees(tmp_path: Path) -> None:
    """torch is imported where it is needed: a cast is."""
    report = spied(tmp_path, "convert", FIXTURES / "torch-zip/digits_cpu.pth", "out.pth", "--cast", "float16")
    assert "torch" in report["heavy"]
