"""Shared fixtures of the tests of formats."""

from __future__ import annotations

from typing import Any

import pytest

from ckptkit.core.bytesource import LocalFile


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of everything that is read of local files; a test fails when it comes to more than 100 MB."""
    seen: list[int] = []

    def counting(method: str) -> None:
        read = getattr(LocalFile, method)

        def counted(source: LocalFile, offset: int, what: Any) -> Any:
            seen.append(what if isinstance(what, int) else len(what))
            assert sum(seen) < 100_000_000
            return read(source, offset, what)

        monkeypatch.setattr(LocalFile, method, counted)

    counting("read")
    counting("read_into")
    return seen
