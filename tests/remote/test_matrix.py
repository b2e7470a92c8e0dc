"""Every fixture behind a URL: what is read there is what is read here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

import ckptkit
from ckptkit.analysis.summary import TensorRow, summarize
from ckptkit.api import convert
from tests.matrix import NAMES, Fixture


@pytest.fixture
def store() -> Iterator[fsspec.AbstractFileSystem]:
    found = fsspec.filesystem("memory")
    found.store.clear()
    yield found
    found.store.clear()
    found.pseudo_dirs[:] = [""]


def described(row: TensorRow) -> tuple[object, ...]:
    """Everything about a tensor but where its bytes are."""
    tensor = row.tensor
    geometry = tensor.dtype, tensor.shape, tensor.stride, tensor.offset, tensor.device
    return (row.name, row.path, row.storage, *geometry)


@pytest.mark.parametrize("name", NAMES)
def test_a_fixture_behind_a_url(
    name: str, store: fsspec.AbstractFileSystem, tmp_path: Path
) -> None:
    fixture = Fixture(name).needs_reader()
    store.put(str(fixture.path), f"/fixtures/{fixture.path.name}", recursive=fixture.path.is_dir())
    url = f"memory://fixtures/{fixture.path.name}"
    here, there = (summarize(ckptkit.open(place)) for place in (fixture.path, url))
    assert here.rows
    for fact in ("format", "size", "totals", "globals"):
        assert getattr(there, fact) == getattr(here, fact)
    assert list(map(described, there.rows)) == list(map(described, here.rows))
    convert(url, tmp_path / "there.pth")
    convert(fixture.path, tmp_path / "here.pth")
    assert (tmp_path / "there.pth").read_bytes() == (tmp_path / "here.pth").read_bytes()
