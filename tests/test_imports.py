"""Commands work without torch, numpy, an unpickler, temporary files, and changes of their input."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from tests.matrix import NAMES, Fixture
from tests.spy import spied

READABLE = [fixture for fixture in map(Fixture, NAMES) if fixture.is_readable]
COMMANDS = (
    "inspect SRC",
    "inspect --json SRC",
    "add-module SRC DST",
    "remap SRC DST --to cpu",
    "remap SRC DST --device cuda:1=cuda:0",
)

HEAVY = ("torch", "numpy", "safetensors", "pickle")
QUIET = ([], 0)


def imported(folder: Path, *commands: list[str | Path]) -> list[tuple[int, list[str], int]]:
    """Return of each command, started one after the other in `folder`, its exit code, which heavy
    packages were imported, and how often pickle looked for a class."""
    return [
        (each.code, [name for name in HEAVY if name in each.modules], each.unpicklers)
        for each in spied(folder, *commands)
    ]


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
    reports = imported(
        tmp_path, *([each.get(word, word) for word in command.split()] for each in words)
    )
    ambiguous = 3 if command.startswith("add-module") else 0
    codes = [ambiguous if each.facts["weights"] is None else 0 for each in READABLE]
    assert reports == [(code, *QUIET) for code in codes]
    assert [hashes(fixture.path) for fixture in READABLE] == before
    written = {f"{n}.pth" for n, code in enumerate(codes) if code == 0 and "DST" in command}
    assert {path.name for path in tmp_path.iterdir()} == written


@pytest.mark.parametrize("name", ["torch-zip/dp_wrapped_cuda1.pth", "safetensors/net.safetensors"])
def test_convert_copies_without_torch(name: str, tmp_path: Path) -> None:
    source = Fixture(name).path
    before = hashes(source)
    there: list[str | Path] = ["convert", source, "out.safetensors"]
    back: list[str | Path] = ["convert", "out.safetensors", "back.pth"]
    assert imported(tmp_path, there, back) == [(0, *QUIET)] * 2
    assert hashes(source) == before
    assert {path.name for path in tmp_path.iterdir()} == {"out.safetensors", "back.pth"}


def test_scan_traces_pickles_without_pickle(tmp_path: Path) -> None:
    """In this process: of a folder, workers would send their verdicts as pickles."""
    reports = imported(tmp_path, *(["scan", "--workers", "1", each.path] for each in READABLE))
    assert {code for code, *_ in reports} <= {0, 1}
    assert all((heavy, unpicklers) == QUIET for _, heavy, unpicklers in reports)


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
    ((code, found, unpicklers),) = imported(
        tmp_path, ["convert", source, "out.pth", "--cast", dtype]
    )
    assert code == 0 and {*found} == heavy
    assert "torch" in heavy or unpicklers == 0
