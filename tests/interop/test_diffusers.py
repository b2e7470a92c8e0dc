"""diffusers: a model and the folder of a pipeline, from_pretrained of what we wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.interop.conftest import Ckptkit, assert_same

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed (extra: interop)")
import torch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(4, 8), norm_num_groups=2,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )  # fmt: skip


NAMES = ["diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.bin"]


@pytest.mark.parametrize("theirs", NAMES)
@pytest.mark.parametrize("ours", NAMES)
def test_one_file(theirs: str, ours: str, model: Any, ckptkit: Ckptkit, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "theirs", safe_serialization=theirs.endswith("safetensors"))
    (tmp_path / "ours").mkdir()
    shutil.copy(tmp_path / "theirs/config.json", tmp_path / "ours")
    ckptkit("convert", tmp_path / "theirs" / theirs, tmp_path / "ours" / ours)
    found = diffusers.UNet2DModel.from_pretrained(
        tmp_path / "ours", use_safetensors=ours.endswith("safetensors")
    )
    assert_same(found.state_dict(), model.state_dict())


def test_pipeline(model: Any, ckptkit: Ckptkit, tmp_path: Path) -> None:
    """One part of a pipeline is replaced by what we wrote."""
    pipeline = diffusers.DDPMPipeline(
        unet=model, scheduler=diffusers.DDPMScheduler(num_train_timesteps=2)
    )
    pipeline.save_pretrained(tmp_path / "theirs")
    shutil.copytree(tmp_path / "theirs", tmp_path / "ours")
    (tmp_path / "ours/unet" / NAMES[0]).unlink()
    ckptkit("convert", tmp_path / "theirs/unet" / NAMES[0], tmp_path / "plain.pth")
    ckptkit("convert", tmp_path / "plain.pth", tmp_path / "ours/unet" / NAMES[0])
    found = diffusers.DDPMPipeline.from_pretrained(tmp_path / "ours")
    assert_same(found.unet.state_dict(), model.state_dict())


UNET = {
    "in_channels": 4, "out_channels": 5, "block_out_channels": (32, 64), "layers_per_block": 2,
    "cross_attention_dim": 24, "attention_head_dim": 8, "norm_num_groups": 8,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
}  # fmt: skip
VAE = {
    "in_channels": 3, "out_channels": 4, "latent_channels": 5, "layers_per_block": 2,
    "block_out_channels": (32, 64, 96), "norm_num_groups": 8,
    "down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3,
}  # fmt: skip
HEADS = {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 6}
JOINT = {**HEADS, "joint_attention_dim": 20, "pooled_projection_dim": 10}
CONFIGS = {
    "UNet2DConditionModel": UNET,
    "AutoencoderKL": VAE,
    "FluxTransformer2DModel": {**JOINT, "num_single_layers": 3, "axes_dims_rope": (2, 2, 4)},
    "SD3Transformer2DModel": {**JOINT, "caption_projection_dim": 32, "sample_size": 8},
    "PixArtTransformer2DModel": {**HEADS, "cross_attention_dim": 32, "caption_channels": 20,
                                 "sample_size": 8},
    "DiTTransformer2DModel": {**HEADS, "sample_size": 8},
}  # fmt: skip
NO_SIZES = ("attention_head_dim", "norm_num_groups", "sample_size", "axes_dims_rope")


@pytest.mark.parametrize("name", CONFIGS)
def test_each_size_of_config_json_is_compared(name: str, ckptkit: Ckptkit, tmp_path: Path) -> None:
    getattr(diffusers, name)(**CONFIGS[name]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "matches config.json" in ckptkit("check", tmp_path)
    for field, value in CONFIGS[name].items():
        if field in NO_SIZES or field.endswith("_types"):
            continue
        other = [*value, 7] if isinstance(value, tuple) else value + 1
        (tmp_path / "config.json").write_text(json.dumps({**config, field: other}))
        assert f"{field} is {other}" in ckptkit("check", tmp_path, code=1)
