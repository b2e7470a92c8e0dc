"""Commands work without torch, numpy, an unpickler, temporary files, and changes of their input."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ENVIRONMENT
from tests.matrix import NAMES, Fixture

READABLE = [fixture for fixture in map(Fixture, NAMES) if fixture.is_readable]
COMMANDS = (
    "inspect SRC",
    "inspect --json SRC",
    "add-module SRC DST",
    "remap SRC DST --to cpu",
    "remap SRC DST --device cuda:1=cuda:0",
)

# Runs command lines, a JSON list, one after the other; then says how each ended, and what was
# imported and whether pickle looked for a class meanwhile.
SPY = """
import json, os, sys
unpicklers = []
sys.addaudithook(lambda event, args: unpicklers.append(args) if event == "pickle.find_class" else None)
from ckptkit.cli import main
def leave(code):
    raise SystemExit(code)
os._exit = leave  # how the program ends: we have something to say first
def report(command):
    sys.argv[1:] = command
    unpicklers.clear()
    code = 0
    try:
        code = main()
    except SystemExit as exit:
        code = exit.code
    heavy = sorted({"torch", "numpy", "safetensors", "pickle"} & set(sys.modules))
    return {"code": code or 0, "heavy": heavy, "unpicklers": len(unpicklers)}
print(json.dumps([report(command) for command in json.load(sys.stdin)]), file=sys.stderr)
"""
QUIET = {"heavy": [], "unpicklers": 0}


def spied(folder: Path, *commands: list[str | Path]) -> list[dict[str, Any]]:
    """Return what each command imported, started one after the other in `folder`."""
    done = subprocess.run(
        [sys.executable, "-c", SPY],
        input=json.dumps([list(map(str, command)) for command in commands]),
        capture_output=True, encoding="utf-8", cwd=folder, env={**ENVIRONMENT, "TMPDIR": str(folder)}, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    reports: list[dict[str, Any]] = json.loads(done.stderr.splitlines()[-1])
    return reports


def files_of(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def hashes(path: Path) -> dict[Path, str]:
    return {file: hashlib.sha256(file.read_bytes()).hexdigest() for file in files_of(path)}


@pytest.mark.parametrize("command", COMMANDS)
def test_no_torch_no_unpickler_nothing_left(command: str, tmp_path: Path) -> None:
    before = [hashes(fixture.path) for fixture in READABLE]
    words: list[dict[str, str | Path]] = [
        {"SRC": fixture.path, "DST": f"{n}.pth"} for n, fixture in enumerate(READABLE)
    ]
    reports = spied(
        tmp_path, *([each.get(word, word) for word in command.split()] for each in words)
    )
    ambiguous = 3 if command.startswith("add-module") else 0
    codes = [ambiguous if each.facts["weights"] is None else 0 for each in READABLE]
    assert reports == [{"code": code, **QUIET} for code in codes]
    assert [hashes(fixture.path) for fixture in READABLE] == before
    written = {f"{n}.pth" for n, code in enumerate(codes) if code == 0 and "DST" in command}
    assert {path.name for path in tmp_path.iterdir()} == written


@pytest.mark.parametrize("name", ["torch-zip/dp_wrapped_cuda1.pth", "safetensors/net.safetensors"])
def test_convert_copies_without_torch(name: str, tmp_path: Path) -> None:
    source = Fixture(name).path
    before = hashes(source)
    there: list[str | Path] = ["convert", source, "out.safetensors"]
    back: list[str | Path] = ["convert", "out.safetensors", "back.pth"]
    assert spied(tmp_path, there, back) == [{"code": 0, **QUIET}] * 2
    assert hashes(source) == before
    assert {path.name for path in tmp_path.iterdir()} == {"out.safetensors", "back.pth"}


def test_scan_traces_pickles_without_pickle(tmp_path: Path) -> None:
    """In this process: of a folder, workers would send their verdicts as pickles."""
    reports = spied(tmp_path, *(["scan", "--workers", "1", each.path] for each in READABLE))
    assert all(report["code"] in (0, 1) for report in reports)
    assert {(*report["heavy"], report["unpicklers"]) for report in reports} == {(0,)}


def test_importing_the_library_imports_nothing_heavy() -> None:
    heavy = "{'torch', 'numpy', 'click', 'pickle'}"
    program = f"import ckptkit, sys; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("dtype", "heavy"),
    [
        *((dtype, {"numpy", "pickle"}) for dtype in ("bfloat16", "float8_e4m3fn")),
        # the spy sees: torch is imported for types that are rarely cast to
        ("float8_e8m0fnu", {"numpy", "pickle", "torch"}),
    ],
)
def test_floats_are_cast_without_torch(dtype: str, heavy: set[str], tmp_path: Path) -> None:
    """numpy imports pickle."""
    source = Fixture("torch-zip/none_bare_cpu.pth").path
    (report,) = spied(tmp_path, ["convert", source, "out.pth", "--cast", dtype])
    assert report["code"] == 0 and set(report["heavy"]) == heavy
    assert "torch" in heavy or report["unpicklers"] == 0
