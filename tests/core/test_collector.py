"""Python's garbage collector does not walk a checkpoint while it is read."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.core.errors import FormatError

MANY = 5_000  # tensors: more objects than the collector waits for


@pytest.fixture
def collections() -> Iterator[list[str]]:
    """The phases of the collections that have begun or ended."""
    found: list[str] = []

    def note(phase: str, info: object) -> None:
        found.append(phase)

    gc.callbacks.append(note)
    yield found
    gc.callbacks.remove(note)


@pytest.mark.parametrize("suffix", ["pth", "safetensors"])
def test_nothing_is_collected_while_a_file_is_read(
    suffix: str, tmp_path: Path, collections: list[str]
) -> None:
    weights = {f"layers.{i}.weight": torch.zeros(1) for i in range(MANY)}
    path = tmp_path / f"a.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)(weights, path)
    collections.clear()
    ck = ckptkit.open(path)
    assert collections.count("start") <= 1  # when it is on again
    assert gc.isenabled()
    assert len(ck.weights) == MANY


def test_it_goes_on_after_a_failure(tmp_path: Path) -> None:
    (tmp_path / "a.pth").write_bytes(b"no checkpoint")
    with pytest.raises(FormatError):
        ckptkit.open(tmp_path / "a.pth")
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(1)}, tmp_path / "a.pth")
    gc.disable()
    try:
        ckptkit.open(tmp_path / "a.pth")
        assert not gc.isenabled()
    finally:
        gc.enable()
