"""The README's table of what the trainer shows: each row is tested under its number, and its
command is understood."""

from __future__ import annotations

import re
import shlex

import pytest

import ckptkit
from ckptkit.cli import main
from tests.conftest import ROOT

TEXT = (ROOT / "ckptkit/help/trainer.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (S\d\d) \| .* \| `(.*)` \|$", TEXT, re.MULTILINE)


def test_every_row_is_there_once() -> None:
    assert [row for row, _ in ROWS] == [f"S{number:02}" for number in range(1, 26)]


@pytest.mark.parametrize(("row", "command"), ROWS)
def test_a_row_has_a_test_and_a_command(row: str, command: str) -> None:
    named = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(rf"def test_(S\d\d_)*{row}_", path.read_text())
    ]
    assert named
    if not command.startswith(("ckptkit ", "torchrun ")):
        name = re.match(r"ckptkit\.(\w+)\(", command)
        assert name is not None
        assert name[1] in ckptkit.__all__
        return
    words = shlex.split(
        command.replace("torchrun --nproc-per-node 2 -m ckptkit.trainer", "ckptkit train")
    )
    chosen = main.get_command(main.make_context("ckptkit", [], resilient_parsing=True), words[1])
    assert chosen is not None
    chosen.make_context(words[1], words[2:])
