"""Adapters in other commands: inspect, diff, scan, doctor and the page name rank, alpha, targets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ckptkit.lora.reading import read_adapter
from tests.conftest import Run

CONFIG = {"peft_type": "LORA", "r": 2, "lora_alpha": 6, "base_model_name_or_path": "org/tiny"}


def adapter(
    folder: Path, *paths: str, rank: int = 2, suffix: str = "safetensors", **more: Any
) -> Path:
    folder.mkdir()
    tensors = {f"base_model.model.{p}.lora_A.weight": torch.ones(rank, 5) for p in paths}
    tensors |= {f"base_model.model.{p}.lora_B.weight": torch.ones(4, rank) for p in paths}
    if suffix == "bin":
        torch.save(tensors, folder / "adapter_model.bin")
    else:
        save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | {"r": rank} | more))
    return folder


def base(folder: Path, *paths: str) -> Path:
    path = folder / "base.safetensors"
    save_file({f"{name}.weight": torch.ones(4, 5) for name in paths}, path)
    return path


LINE = "adapter of peft, LORA, 2 modules, rank 2, alpha 6, targets q_proj, to_out.0"
PATHS = "layers.0.q_proj", "blocks.1.attn.to_out.0"


def test_inspect(tmp_path: Path, in_process: Run) -> None:
    path = adapter(tmp_path / "a", *PATHS)
    shown = in_process("inspect", path).stdout.replace("\n", " ")
    assert LINE in shown and "(org/tiny)" in shown
    found = json.loads(in_process("inspect", "--json", path).stdout)["files"][0]["adapter"]
    assert found == {
        "layout": "peft", "method": "LORA", "modules": 2, "ranks": [2], "alphas": [6.0],
        "targets": ["q_proj", "to_out.0"], "base_model": "org/tiny",
    }  # fmt: skip


def test_targets_of_names_with_underscores(tmp_path: Path) -> None:
    name = "lora_unet_down_blocks_0_attentions_1_transformer_blocks_0_attn1_to_out_0"
    file = tmp_path / "k.safetensors"
    save_file({f"{name}.lora_down.weight": torch.ones(2, 5),
               f"{name}.lora_up.weight": torch.ones(4, 2)}, file)  # fmt: skip
    assert read_adapter(file).targets == ["attn1_to_out.0"]


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_scan(suffix: str, tmp_path: Path, in_process: Run) -> None:
    path = adapter(tmp_path / "a", *PATHS, suffix=suffix)
    done = in_process("scan", path / f"adapter_model.{suffix}")
    assert done.code == 0, done.stderr
    assert LINE in done.stdout.replace("\n", " ").replace("  ", " ")
    assert "adapter" not in in_process("scan", base(tmp_path, "fc")).stdout.partition(":")[2]
    assert "adapter of" not in in_process("scan", "--quiet", path).stdout


def test_diff_of_two_adapters(tmp_path: Path, in_process: Run) -> None:
    """Equal tensors with another alpha are different adapters."""
    one = adapter(tmp_path / "a", "layers.0.q_proj")
    two = adapter(tmp_path / "b", "layers.0.q_proj", lora_alpha=12)
    done = in_process("diff", "--json", one, two)
    assert done.code == 1
    found = json.loads(done.stdout)
    assert found["entries"] == [{"path": "adapter: alpha", "a": "6", "b": "12"}]
    assert not found["changed"]
    other = adapter(tmp_path / "c", "layers.0.k_proj", rank=3, base_model_name_or_path=None)
    entries = json.loads(in_process("diff", "--json", one, other).stdout)["entries"]
    assert {each["path"].removeprefix("adapter: "): (each["a"], each["b"]) for each in entries} == {
        "rank": ("2", "3"), "targets": ("q_proj", "k_proj"), "base model": ("org/tiny", None),
    }  # fmt: skip
    assert in_process("diff", one, one).code == 0


def test_diff_of_an_adapter_and_its_base(tmp_path: Path, in_process: Run) -> None:
    path, model = adapter(tmp_path / "a", "fc", lora_alpha=0.01), base(tmp_path, "fc")
    for names in ((path, model), (model, path)):
        done = in_process("diff", *names)
        assert done.code == 1
        command = done.stdout.rpartition("ckptkit ")[2].split()
        assert command[:2] == ["lora", "check"]
        checked = in_process(*command)
        assert checked.code == 0, checked.stdout


def test_the_page(tmp_path: Path, in_process: Run) -> None:
    path, page = adapter(tmp_path / "a", *PATHS), tmp_path / "page.html"
    assert in_process("report", path, page).code == 0
    assert "It is an adapter (LORA, 2 modules, rank 2, alpha 6" in page.read_text("utf-8")
