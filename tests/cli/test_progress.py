"""progress: silent in a pipe, silent for what is quick, a bar otherwise."""

from __future__ import annotations

import gzip
import os
import pickle
import sys
from io import StringIO
from pathlib import Path

import pytest

from ckptkit.cli import render
from ckptkit.scanning.files import scan_all
from ckptkit.scanning.verdict import FileVerdict
from tests.cli.conftest import Ckptkit, Terminal


@pytest.mark.parametrize(
    ("stream", "patience", "shown"),
    [(Terminal, render.PATIENCE, False), (StringIO, -1, False), (Terminal, -1, True)],
    ids=["quick", "pipe", "terminal"],
)
def test_a_terminal_shows_a_bar_after_a_while(
    stream: type[StringIO], patience: float, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream())
    monkeypatch.setattr(render, "PATIENCE", patience)
    with render.Progress("writing", 3_000_000) as report:
        for _ in range(3):
            report(1_000_000)
    with render.Progress("writing") as report:  # the total may come with the parts
        report(1_000_000, 4_000_000)
    said = sys.stderr.getvalue()  # type: ignore[attr-defined]
    assert [part in said for part in ("writing", "3.00M", "4.00M")] == [shown] * 3
    assert shown or said == ""


@pytest.mark.parametrize("words", [["scan"], ["digest"], ["stats"], ["verify"]], ids="".join)
def test_progress_shows_the_bar_in_a_pipe(
    words: list[str], ckptkit: Ckptkit, run_pth: Path
) -> None:
    assert "B/s" not in ckptkit(*words, run_pth).stderr
    for asked in ([*words, run_pth, "--progress"], ["--progress", *words, run_pth]):
        result = ckptkit(*asked)
        assert "B/s" in result.stderr and result.stdout == ckptkit(*words, run_pth).stdout


def test_scan_names_each_file(ckptkit: Ckptkit, run_pth: Path) -> None:
    (run_pth.parent / "not-a-pickle.bin").write_bytes(bytes(2_000))
    shown = ckptkit("--progress scan", run_pth.parent).stderr
    assert "scanning" in shown and str(run_pth) in shown
    total = run_pth.stat().st_size + 2_000
    assert f"{total / 1000:.2f}kB" in shown


def test_scan_counts_inside_a_file() -> None:
    """The bar of one large file moves, and ends at its size."""
    with gzip.open(Path("a.pkl.gz"), "wb", compresslevel=0) as file:
        file.write(pickle.dumps({"x": os.urandom(1 << 25)}))
    Path("b.bin").write_bytes(bytes(5_000))
    seen: list[tuple[str, int]] = []
    paths = [Path("a.pkl.gz"), Path("b.bin")]
    results = scan_all(paths, workers=1, progress=lambda *part: seen.append(part))
    assert isinstance(next(results), FileVerdict)
    assert len(seen) > 4 and {path for path, _ in seen} == {str(paths[0])}
    assert len(list(results)) == 1
    for path in paths:
        counted = [nbytes for name, nbytes in seen if name == str(path)]
        assert sum(counted) == path.stat().st_size and min(counted) > 0


def test_progress_after_two_dashes_is_a_file(ckptkit: Ckptkit) -> None:
    assert "--progress: does not exist" in ckptkit("scan -- --progress").stderr
