"""An output has the same bytes on every file system."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.publish import copying, parallel_write

STATE = {f"module.layers.{i}.weight": torch.randn(300, 301) + i for i in range(4)}


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".npz"])
@pytest.mark.parametrize("kind", [".pth", ".safetensors"])
def test_from_every_file_system_and_from_memory(
    kind: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(STATE, tmp_path / "in.pth")
    save_file(STATE, tmp_path / "in.safetensors")
    source = tmp_path / f"in{kind}"
    made = []
    for number, system in enumerate(("xfs", "tmpfs", "")):
        for module in (copying, parallel_write):
            monkeypatch.setattr(module, "file_system", lambda fd, system=system: system)
        for given in (source, source.read_bytes()):
            out = tmp_path / f"{number}{suffix}"
            ckptkit.convert(given, out, force=True)
            made.append(out.read_bytes())
    assert len(set(made)) == 1
