"""Edits of safetensors in place, and edits that need a new file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from ckptkit.core.bytesource import LocalFile, Memory
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.limits import LIMITS
from ckptkit.core.options import Options
from ckptkit.core.plan import Patch
from ckptkit.formats import safetensors
from ckptkit.formats import safetensors as ours
from ckptkit.formats.format import Probe

LONG = "a very long prefix that does not fit. " * 9


def held(folder: Path, **tensors: torch.Tensor) -> Checkpoint:
    path = folder / "x.safetensors"
    save_file(tensors, path)
    return ours.read(Probe(LocalFile(path)))


def renamed(checkpoint: Checkpoint, prefix: str = "", *names: str) -> Checkpoint:
    """With `prefix` before the names; of these tensors alone, if some are named."""
    kept = {name: tensor for name, tensor in checkpoint.root.items() if not names or name in names}
    return replace(checkpoint, root={f"{prefix}{name}": tensor for name, tensor in kept.items()})


def patch(before: Checkpoint, after: Checkpoint) -> Patch | None:
    return safetensors.patch(before, after, Options())


def test_only_a_file_is_edited_in_place(tmp_path: Path) -> None:
    inside = held(tmp_path, a=torch.ones(1024))
    copy = ours.read(Probe(Memory((tmp_path / "x.safetensors").read_bytes())))
    assert patch(inside, renamed(inside, "b")) is not None
    assert patch(copy, renamed(copy, "b")) is None


@pytest.mark.parametrize("kept", [("a", "c"), ("b", "c"), ("a", "b")])
def test_tensors_that_leave_a_hole(kept: tuple[str, ...], tmp_path: Path) -> None:
    """In the middle, at the beginning, at the end."""
    before = held(tmp_path, a=torch.ones(4), b=torch.ones(4), c=torch.ones(4))
    assert patch(before, renamed(before)) is not None
    assert patch(before, renamed(before, "", *kept)) is None


def test_a_tensor_of_another_file_is_not_there(tmp_path: Path) -> None:
    before = held(tmp_path, a=torch.ones(4))
    (tmp_path / "other").mkdir()
    other = held(tmp_path / "other", a=torch.ones(4))
    assert patch(before, replace(before, root=other.root)) is None


def test_a_tensor_that_is_too_much_to_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = held(tmp_path, a=torch.ones(1024), b=torch.ones(1024))
    after = renamed(before, LONG)
    branches = patch(before, after)
    size = (tmp_path / "x.safetensors").stat().st_size
    assert branches is not None and [edit.offset for edit in branches.edits] == [8, size]
    monkeypatch.setattr(safetensors, "_MOVED", 4095)
    assert patch(before, after) is None


def test_tensors_that_are_too_much_to_move_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The places of what moved are longer numbers, for which the place of one more may be
    needed."""
    for size in range(2, 400, 2):
        before = held(tmp_path, a=torch.ones(size), b=torch.ones(1024), c=torch.ones(1 << 16))
        branches = patch(before, renamed(before, LONG[:99]))
        if branches is not None and len(branches.edits) == 3:
            break
    assert branches is not None
    moved = [len(edit.data) for edit in branches.edits[1:]]
    assert moved == [4 * size, 4096]
    monkeypatch.setattr(safetensors, "_MOVED", sum(moved))
    assert patch(before, renamed(before, LONG[:99])) is not None
    monkeypatch.setattr(safetensors, "_MOVED", sum(moved) - 1)
    assert patch(before, renamed(before, LONG[:99])) is None


def test_a_header_that_would_be_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = held(tmp_path, a=torch.ones(1024), b=torch.ones(1024))
    after = renamed(before, LONG)
    assert patch(before, after) is not None
    monkeypatch.setattr(safetensors, "LIMITS", replace(LIMITS, safetensors_header_bytes=512))
    assert patch(before, after) is None


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": torch.ones(1), "b": torch.ones(1)},  # all of them are too few bytes
        {"a": torch.ones(1023, dtype=torch.uint8), "b": torch.ones(1, dtype=torch.uint8)},
        {"a": torch.ones(5, dtype=torch.uint8)},  # the file ends where nothing is aligned
    ],
)
def test_too_little_to_move(tensors: dict[str, torch.Tensor], tmp_path: Path) -> None:
    before = held(tmp_path, **tensors)
    assert patch(before, renamed(before, LONG * 2)) is None
