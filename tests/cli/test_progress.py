"""progress: silent in a pipe, silent for what is quick, a bar otherwise."""

from __future__ import annotations

import sys
from io import StringIO

import pytest

from ckptkit.cli import progress


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def work(monkeypatch: pytest.MonkeyPatch, stream: StringIO) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.Progress("writing", 3_000_000) as report:
        for _ in range(3):
            report(1_000_000)
    return stream.getvalue()


def test_what_is_quick_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert work(monkeypatch, Terminal()) == ""


def test_a_pipe_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", -1)
    assert work(monkeypatch, StringIO()) == ""


def test_a_terminal_shows_a_bar_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE", -1)
    shown = work(monkeypatch, Terminal())
    assert "writing" in shown and "3.00M" in shown


def test_the_total_may_come_with_the_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "PATIENCE", -1)
    with progress.Progress("writing") as report:
        report(1_000_000, 4_000_000)
    assert "4.00M" in stream.getvalue()
