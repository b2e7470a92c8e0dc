"""The pickle machine does what CPython's two do; 20,000 of the strings of tests/fuzz/machines.py."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptkit.pickles import machine
from tests.fuzz.machines import MEMORY, difference, strings

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    """C's memo is as long as the largest index says."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_changed_pickles_do_what_they_do_in_cpython() -> None:
    for data in strings(6_000, seed=0):
        assert difference(data) is None, data


def index_cut_at_20_characters(self: machine.Machine, form: object) -> int:
    line = self._line()
    return int(line[:20] if form is machine._INDEX else line.removesuffix(b"L"))


def test_it_finds_an_index_that_is_read_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.Machine, "_number", index_cut_at_20_characters)
    assert any(difference(data) for data in strings(10_000, seed=8))


def test_it_finds_octal_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_INT", re.compile(rb"-?[0-9]+"))
    assert any(difference(data) for data in strings(1_000, seed=0))


def test_it_finds_tensors_that_are_stored_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = machine.Machine._tensor

    def elsewhere(self: machine.Machine, found: re.Match[bytes], stack: list[object]) -> bool:
        places = [int.from_bytes(found[n], "little") for n in (5, 8, 10, 12, 14, 15, 16)]
        run = tensor(self, found, stack)
        if not run:  # as if nothing had compared them
            monkeypatch.setattr(machine, "_NEXT", _number(places) - len(self.memo) * machine._ONES)
            run = tensor(self, found, stack)
            monkeypatch.setattr(machine, "_NEXT", NEXT)
        return run

    monkeypatch.setattr(machine.Machine, "_tensor", elsewhere)
    assert any(difference(data) for data in strings(5_000, seed=0))


NEXT = machine._NEXT


def _number(places: list[int]) -> int:
    return sum(place << 32 * n for n, place in enumerate(places))


def test_it_finds_tensors_of_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_numbers", lambda code: (*code[1:-1:2],))
    assert any(difference(data) for data in strings(1_000, seed=0))
