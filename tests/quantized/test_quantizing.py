"""Weights quantized by rounding to nearest, against the formulas of the libraries, computed by
torch."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from ckptkit.core.errors import TensorError, UsageError
from ckptkit.edits.quantized import quantize
from tests.conftest import Run
from tests.torch_equality import bits

NAME = "model.layers.0.mlp.up_proj.weight"


def saved(weight: torch.Tensor, folder: Path) -> Path:
    others = {"model.embed_tokens.weight": torch.randn(128, 128), "model.odd.weight": torch.randn(100, 40),
              "model.norm.weight": torch.ones(4)}  # fmt: skip
    folder.mkdir()
    save_file({NAME: weight, **others}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def weights(dtype: torch.dtype) -> torch.Tensor:
    made = torch.randn(256, 384, generator=torch.Generator().manual_seed(3))
    made[:128, :128] = 0
    made[0, 128], made[1, 128] = 1e-30, -0.0
    made[128:160, 0] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4)
    return made.to(dtype)


def fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """transformers 5.23.0, integrations/finegrained_fp8.py, Fp8Quantize."""
    blocks = weight.float().reshape(2, 128, 3, 128)
    largest = blocks.abs().amax(dim=(1, 3))
    scales = torch.where(largest > 0, 448.0 / largest.clamp(min=1e-38), torch.ones_like(largest))
    codes = (blocks * scales[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.reshape(weight.shape), 1.0 / scales


def mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """compressed-tensors 0.20.0, quantization/utils/mxfp_utils.py: 4 bits."""
    groups = weight.float().reshape(len(weight), -1, 32)
    largest = groups.abs().amax(-1).contiguous().view(torch.int32) + (1 << 21)
    exponents = ((largest >> 23) - 2).clamp(0, 255)
    scaled = torch.ldexp(groups.double(), -(exponents - 127)[..., None]).reshape(-1)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    distance = (scaled.abs().clamp(max=6)[:, None] - table).abs()
    even = torch.tensor([0, 1, 0, 1, 0, 1, 0, 1]) * 1e-12
    codes = (distance + even).argmin(1).to(torch.uint8) | ((scaled < 0).to(torch.uint8) << 3)
    packed = codes[0::2] | (codes[1::2] << 4)
    return packed.reshape(len(weight), -1), exponents.to(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["fp8-block", "mxfp4"])
def test_codes_and_scales_are_those_of_the_library(
    kind: str, dtype: torch.dtype, tmp_path: Path, run: Run
) -> None:
    folder = saved(weights(dtype), tmp_path / "in")
    done = run("convert", folder, tmp_path / "out", "--format", "sharded", "--quantize", kind)
    assert done.code == 0, done.stderr
    found = load_file(tmp_path / "out" / "model.safetensors")
    codes, scales = (fp8 if kind == "fp8-block" else mxfp4)(weights(dtype))
    ends = ("", "_scale_inv") if kind == "fp8-block" else ("_packed", "_scale")
    for end, expected in zip(ends, (codes, scales), strict=True):
        assert bits(found[NAME + end]) == bits(expected), end
    kept = "model.embed_tokens.weight"
    assert found[kept].dtype == torch.float32 and kept in done.stdout
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "llama" and config["quantization_config"]["quant_method"]
    back = ckptkit.load(ckptkit.dequantize(ckptkit.open(tmp_path / "out"), "float32"))
    error = (back[NAME] - weights(dtype).float()).abs()
    assert error.max() < (0.3 if kind == "fp8-block" else 1.1)


def test_codes_are_not_quantized_again(tmp_path: Path) -> None:
    ck = quantize(ckptkit.open(saved(weights(torch.float32), tmp_path / "in")), "mxfp4")
    with pytest.raises(UsageError, match="mxfp4"):
        quantize(ck, "fp8-block")


def test_what_cannot_be_quantized_is_said(tmp_path: Path) -> None:
    save_file({"norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(UsageError, match="has no matrix that can be quantized"):
        quantize(ckptkit.open(tmp_path / "model.safetensors"), "fp8-block")
    with pytest.raises(UsageError, match="int3"):
        quantize(ckptkit.open(tmp_path / "model.safetensors"), "int3")


@pytest.mark.parametrize("kind", ["fp8-block", "mxfp4"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
def test_a_block_with_no_number_is_refused(kind: str, value: float, tmp_path: Path) -> None:
    """One scale stands for a block: it would spoil its neighbors."""
    weight = torch.randn(128, 128, dtype=torch.float64)
    weight[3, 5] = value
    torch.save({"odd.weight": weight}, tmp_path / "in.pth")
    with pytest.raises(TensorError, match=r"'odd\.weight' contains NaN"):
        made = quantize(ckptkit.open(tmp_path / "in.pth"), kind)
        ckptkit.save(made, tmp_path / "out.safetensors")
    assert not (tmp_path / "out.safetensors").exists()
