"""CRC-32 of every library that may be found, against Python's own."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator

import pytest

from ckptkit.core import bytesource
from ckptkit.core.bytesource import LARGE, _fastest, crc32

DATA = bytes(range(256)) * 1024


@pytest.fixture(autouse=True)
def found_anew() -> Iterator[None]:
    _fastest.cache_clear()
    yield
    _fastest.cache_clear()


@pytest.mark.parametrize("size", [0, 1, LARGE - 1, LARGE, len(DATA)])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_the_sum_is_that_of_zlib(kind: type, size: int) -> None:
    data = kind(DATA[:size])
    assert crc32(data) == zlib.crc32(DATA[:size])
    assert crc32(data, 0xDEADBEEF) == zlib.crc32(DATA[:size], 0xDEADBEEF)


def test_without_the_extra_it_is_zlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "isal", None)
    assert _fastest() is zlib.crc32
    assert crc32(DATA) == zlib.crc32(DATA)


def test_with_the_extra_large_ones_are_summed_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    isal_zlib = pytest.importorskip("isal.isal_zlib")
    assert _fastest() is isal_zlib.crc32
    monkeypatch.setattr(bytesource, "_fastest", lambda: lambda data, start: 7)
    assert crc32(DATA) == 7
    assert crc32(DATA[:100]) == zlib.crc32(DATA[:100])
