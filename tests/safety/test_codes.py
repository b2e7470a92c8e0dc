"""Every code in the name of a test, or of a row, is explained in tests/safety/README.md, and none is left over."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent.parent


def test_every_code_is_explained_and_used() -> None:
    explained = set(re.findall(r"^\| ([A-Z]{2}_[0-9]{2}) \|", _text("safety/README.md"), re.M))
    used = set()
    for path in TESTS.rglob("test_*.py"):
        text = path.read_text()
        for name in re.findall(r"def (test_[A-Z0-9]\w+)", text):
            used |= set(re.findall(r"(?<=_)[A-Z]{2}_[0-9]{2}(?=_)", name))
        for row in re.findall(r'"((?:[A-Z]{1,2}_[0-9]{2}_?)+)"', text):
            used |= set(re.findall(r"(?<![A-Z])[A-Z]{2}_[0-9]{2}", row))
    assert used == explained


def _text(name: str) -> str:
    return (TESTS / name).read_text()
