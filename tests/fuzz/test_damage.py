"""Damaged files, in small: `python -m tests.fuzz.damage SECONDS` does the same for as long as it
takes."""

from __future__ import annotations

from collections import Counter

from tests.fuzz import saves
from tests.fuzz.damage import KINDS, files, rounds


def test_nothing_that_differs_is_written() -> None:
    outcomes = list(rounds(0, 110))
    assert {kind for kind, _, _ in outcomes} == set(KINDS)
    written = [outcome for _, _, outcome in outcomes if outcome.tensors]
    assert len(written) > len(outcomes) // 3
    assert any(outcome.how == "part" for outcome in written)


def test_no_tensor_is_wrong_with_or_without_checksums() -> None:
    counts: Counter[str] = Counter()
    for format, kind, count in saves.rounds(0, 32):
        assert not count["wrong"] and not count["mixed, not told"], (format, kind)
        counts.update(count)
    assert min(counts[what] for what in ("new", "old", "changed", "lost", "refused")) > 5


def test_the_files_that_are_damaged() -> None:
    names = {path.suffix for path in files()}
    assert {".pth", ".ckpt", ".safetensors"} <= names
    assert len(files()) >= 12
