"""diffusers: a model and the folder of a pipeline, from_pretrained of what we wrote."""

from __future__ import annotations

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


def test_shards_become_one_file(model: Any, ckptkit: Ckptkit, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "theirs", max_shard_size="10kB")
    assert len(list((tmp_path / "theirs").glob("*-of-*"))) > 1
    (tmp_path / "ours").mkdir()
    shutil.copy(tmp_path / "theirs/config.json", tmp_path / "ours")
    ckptkit("convert", tmp_path / "theirs", tmp_path / "ours" / NAMES[0], "--cast", "bfloat16")
    found = diffusers.UNet2DModel.from_pretrained(tmp_path / "ours", torch_dtype=torch.bfloat16)
    assert_same(
        found.state_dict(), {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    )


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
