"""Checkpoints that the tests of data safety copy and edit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.safety.works import make_source


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """130 kB: long enough for a copy inside the kernel."""
    return make_source(tmp_path_factory.mktemp("small") / "run.pth")


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 MB, so that a copy takes a while."""
    return make_source(tmp_path_factory.mktemp("large") / "run.pth", 1 << 18, 20)
