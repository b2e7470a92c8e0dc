"""The tensors of a quantized weight stay together, whatever becomes of their names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import ckptkit
from ckptkit import quantized
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import UsageError
from tests.quantized.made import ones, row, write
from tests.quantized.refusals import AO, BLOCKS, FP8, GPTQ, L, comfy, method, torchao, without


@pytest.fixture
def fp8(tmp_path: Path) -> Checkpoint:
    tensors = {**FP8, f"{L}.bias": ones([200]), "norm.weight": ones([4])}
    return ckptkit.open(write(tmp_path / "model.safetensors", tensors, config=BLOCKS))


def names(ck: Checkpoint) -> set[str]:
    return set(ck.weights)


def test_one_name_takes_the_others_along(fp8: Checkpoint) -> None:
    ck = ckptkit.rename(fp8, {f"{L}.weight": "fc.weight"})
    assert names(ck) == {"fc.weight", "fc.weight_scale_inv", f"{L}.bias", "norm.weight"}
    assert [group.name for group in quantized.find(ck).groups] == ["fc.weight"]


def test_a_part_alone_gets_no_other_name(fp8: Checkpoint) -> None:
    with pytest.raises(UsageError, match="fp8-block"):
        ckptkit.rename(fp8, {f"{L}.weight_scale_inv": "fc.scale_of_mine"})
    with pytest.raises(UsageError, match="cannot be renamed to"):
        ckptkit.rename(fp8, {f"{L}.weight": "fc.w"})


def test_parts_do_not_go_to_two_modules(fp8: Checkpoint) -> None:
    with pytest.raises(UsageError, match="would move to several modules"):
        ckptkit.rename(fp8, dict(zip(FP8, ("a.weight", "b.weight_scale_inv"), strict=True)))


@pytest.mark.parametrize("glob", [f"{L}.weight", "*.weight"])
def test_codes_are_dropped_with_their_scales(glob: str, fp8: Checkpoint) -> None:
    assert not any("scale" in name for name in names(ckptkit.select(fp8, drop=[glob])))


def test_codes_are_kept_with_their_scales(fp8: Checkpoint) -> None:
    assert names(ckptkit.select(fp8, keep=["*up_proj.weight"])) == set(FP8)


def test_the_weight_goes_by_its_own_name(tmp_path: Path) -> None:
    ck = ckptkit.open(write(tmp_path / "model.safetensors", {**GPTQ, "norm.weight": ones([4])}))
    assert names(ckptkit.select(ck, keep=["*up_proj.weight"])) == set(GPTQ)


def test_a_scale_alone_is_warned_of(fp8: Checkpoint) -> None:
    ck = ckptkit.select(fp8, drop=["*_scale_inv"])
    assert any("incomplete and useless" in warning for warning in ck.warnings)


def test_prefixes_keep_what_describes_them(tmp_path: Path) -> None:
    path = write(tmp_path / "ao.safetensors", AO, torchao("Int8Tensor", block_size=[1, 16]))
    ck = ckptkit.add_prefix(ckptkit.open(path), "model2.")
    assert json.loads(ck.extras["tensor_names"]) == [f"model2.{L}.weight"]
    (group,) = quantized.find(ck).groups
    assert group.name == f"model2.{L}.weight" and group.layout is not None
    (group,) = quantized.find(ckptkit.strip_prefix(ck, "model2.")).groups
    assert group.name == f"{L}.weight"


def test_layers_in_a_header_are_renamed(tmp_path: Path) -> None:
    tensors = without(comfy(format="x"), "comfy_quant")
    said = {"format_version": "1.0", "layers": {L: {"format": "float8_e4m3fn"}}}
    header = {"_quantization_metadata": json.dumps(said)}
    path = write(tmp_path / "model.safetensors", tensors, header)
    ck = ckptkit.rename(ckptkit.open(path), sub=[("up_proj", "fc1")])
    (group,) = quantized.find(ck).groups
    assert group.name == L.replace("up_proj", "fc1") + ".weight" and group.layout is not None


def test_dequantized_weights_are_cast_renamed_and_devices_kept(tmp_path: Path) -> None:
    tensors, config = {**GPTQ, "n.weight": row("F16", [2])}, method("gptq", group_size=32)
    path = write(tmp_path / "model.safetensors", tensors, config=config)
    ck = ckptkit.cast(ckptkit.dequantize(ckptkit.remap(ckptkit.open(path), "cuda:1")), "float64")
    tensor = ck.weights[f"{L}.weight"]
    assert (tensor.dtype.name, tensor.device, tensor.shape) == ("float64", "cuda:1", (16, 64))


def test_in_a_file_of_torch_too(tmp_path: Path) -> None:
    import torch

    state = {
        f"module.{L}.weight": torch.randn(256, 128).to(torch.float8_e4m3fn),
        f"module.{L}.weight_scale_inv": torch.rand(2, 1),
    }
    torch.save({"model": state, "epoch": 3}, tmp_path / "run.pth")
    (tmp_path / "config.json").write_text(json.dumps(BLOCKS))
    ck = ckptkit.strip_prefix(ckptkit.dequantize(ckptkit.open(tmp_path / "run.pth"), "float32"))
    ckptkit.save(ck, tmp_path / "out.pth")
    made = torch.load(tmp_path / "out.pth", weights_only=True)
    scale = state[f"module.{L}.weight_scale_inv"].repeat_interleave(128, 0)
    expected = state[f"module.{L}.weight"].float() * scale
    assert made["epoch"] == 3 and list(made["model"]) == [f"{L}.weight"]
    assert torch.equal(made["model"][f"{L}.weight"], expected)
