"""An output has the same bytes whatever the kernel copies, and wherever its bytes come from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.publish import copying

STATE = {f"module.layers.{i}.weight": torch.randn(300, 301) + i for i in range(4)}


@pytest.mark.parametrize("suffix", [".pth", ".safetensors", ".npz"])
@pytest.mark.parametrize("kind", [".pth", ".safetensors"])
def test_copied_or_read_or_from_memory(
    kind: str, suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save(STATE, tmp_path / "in.pth")
    save_file(STATE, tmp_path / "in.safetensors")
    source = tmp_path / f"in{kind}"
    made = []
    for number, block in enumerate((1, 4096, 1 << 60)):
        monkeypatch.setattr(copying, "BLOCK", block)
        for given in (source, source.read_bytes()):
            out = tmp_path / f"{number}{suffix}"
            ckptkit.convert(given, out, force=True)
            made.append(out.read_bytes())
    assert len(set(made)) == 1
