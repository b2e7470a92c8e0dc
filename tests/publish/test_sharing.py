"""Copies that can share the blocks of their input on a file system that lets files do so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.bytesource import LocalFile
from ckptkit.core.errors import OutputError
from ckptkit.core.plan import BLOCK
from ckptkit.publish import copying

STATE = {f"module.layers.{i}.weight": torch.randn(300, 301) + i for i in range(4)}


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each call that the kernel can carry out by sharing whole blocks."""
    found: list[int] = []
    copy = copying._copy_file_range

    def noted(fd: int, source: Any, offset: int, count: int) -> int:
        place = os.lseek(fd, 0, os.SEEK_CUR)
        if offset % BLOCK == place % BLOCK == count % BLOCK == 0:
            found.append(count)
        return copy(fd, source, offset, count)

    monkeypatch.setattr(copying, "_copy_file_range", noted)
    return found


def test_records_of_pth(shared: list[int], tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "in.pth")
    ckptkit.save(
        ckptkit.strip_prefix(ckptkit.open(tmp_path / "in.pth"), "module."), tmp_path / "out.pth"
    )
    whole = sum(each.nbytes for each in STATE.values())
    assert whole - 2 * BLOCK * len(STATE) <= sum(shared) <= whole
    for mmap in (False, True):
        found = torch.load(tmp_path / "out.pth", mmap=mmap)
        assert all(torch.equal(found[n.removeprefix("module.")], t) for n, t in STATE.items())
    more = os.path.getsize(tmp_path / "out.pth") - os.path.getsize(tmp_path / "in.pth")
    assert more < 2 * BLOCK  # the first record is padded, the others follow as they did


def test_the_buffer_of_safetensors(shared: list[int], tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "in.safetensors")
    stripped = ckptkit.strip_prefix(ckptkit.open(tmp_path / "in.safetensors"), "module.")
    ckptkit.save(stripped, tmp_path / "out.safetensors")
    whole = sum(each.nbytes for each in STATE.values())
    assert whole - 2 * BLOCK <= sum(shared) <= whole
    found = load_file(tmp_path / "out.safetensors")
    assert all(torch.equal(found[n.removeprefix("module.")], t) for n, t in STATE.items())


def test_short_ones_cost_no_padding(shared: list[int], tmp_path: Path) -> None:
    small = {name: tensor[:30] for name, tensor in STATE.items()}
    torch.save({n: t.clone() for n, t in small.items()}, tmp_path / "in.pth")
    ckptkit.save(ckptkit.open(tmp_path / "in.pth"), tmp_path / "out.safetensors")
    header = (tmp_path / "out.safetensors").read_bytes()
    assert int.from_bytes(header[:8], "little") < 800


def test_shared_bytes_need_no_space(
    shared: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cannot be shared does: the tensors of a .pth begin elsewhere in safetensors."""
    monkeypatch.setattr(LocalFile, "file_system", "xfs")
    torch.save(STATE, tmp_path / "in.pth")
    monkeypatch.setattr("ckptkit.publish.preflight.free", lambda path: 100_000)
    ck = ckptkit.open(tmp_path / "in.pth")
    ckptkit.save(ckptkit.strip_prefix(ck, "module."), tmp_path / "out.pth")
    assert sum(shared) > 1_000_000
    with pytest.raises(OutputError, match=r"needs 1,4[\d,]+ bytes, 100,000 are free"):
        ckptkit.save(ck, tmp_path / "out.safetensors")


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".npz"])
@pytest.mark.parametrize("kind", [".pth", ".safetensors"])
def test_the_same_bytes_from_every_file_system_and_from_none(
    kind: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(STATE, tmp_path / "in.pth")
    save_file(STATE, tmp_path / "in.safetensors")
    source = tmp_path / f"in{kind}"
    made = []
    for number, system in enumerate(("xfs", "tmpfs", "")):
        monkeypatch.setattr(LocalFile, "file_system", system)
        for given in (source, source.read_bytes()):
            out = tmp_path / f"{number}{suffix}"
            ckptkit.convert(given, out, force=True)
            made.append(out.read_bytes())
    assert len(set(made)) == 1
