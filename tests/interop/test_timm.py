"""timm: what its CheckpointSaver and save_for_hf leave, and create_model from what we wrote."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests.interop.conftest import Ckptkit, assert_same

timm = pytest.importorskip("timm", reason="timm is not installed (extra: interop)")
import torch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

NAME = "test_resnet"


def made(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return timm.create_model(NAME, num_classes=3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    """A file of timm's train.py under DataParallel, and the model and its moving average that are
    in it."""
    from timm.utils import CheckpointSaver, ModelEmaV3

    folder = tmp_path_factory.mktemp("timm")
    model, ema = torch.nn.DataParallel(made()), ModelEmaV3(made(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    args = Namespace(model=NAME, lr=0.1)
    saver = CheckpointSaver(
        model, optimizer, args=args, model_ema=ema, checkpoint_dir=folder, unwrap_fn=lambda m: m
    )
    saver.save_checkpoint(epoch=3, metric=0.5)
    return folder / "checkpoint-3.pth.tar", model.module, ema.module


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_recipe(
    suffix: str, trained: tuple[Path, Any, Any], ckptkit: Ckptkit, tmp_path: Path
) -> None:
    path, _, ema = trained
    ours = tmp_path / f"ours{suffix}"
    ckptkit("run", "timm", path, ours)
    found = timm.create_model(NAME, num_classes=3, checkpoint_path=str(ours))
    assert_same(found.state_dict(), ema.state_dict())


def test_prefix(trained: tuple[Path, Any, Any], ckptkit: Ckptkit, tmp_path: Path) -> None:
    """The file with all that is in it, its weights without module.: timm takes the average where
    there is one."""
    path, model, ema = trained
    assert "checkpoint-3.pth.tar" in ckptkit("inspect", path, "--key", "state_dict")
    ours = tmp_path / "ours.pth.tar"
    ckptkit("strip-module", path, ours, "--key", "state_dict")
    for use_ema, expected in ((False, model), (True, ema)):
        found = made(2)
        timm.models.load_checkpoint(found, str(ours), use_ema=use_ema, weights_only=False)
        assert_same(found.state_dict(), expected.state_dict())


def test_resume(trained: tuple[Path, Any, Any], ckptkit: Ckptkit, tmp_path: Path) -> None:
    """A remapped file goes on where the other stopped."""
    path, model, _ = trained
    ckptkit("remap", path, tmp_path / "ours.pth.tar", "--to", "cpu")
    found = made(2)
    optimizer = torch.optim.SGD(found.parameters(), lr=0.5, momentum=0.9)
    epoch = timm.models.resume_checkpoint(found, str(tmp_path / "ours.pth.tar"), optimizer)
    assert epoch == 4 and optimizer.param_groups[0]["lr"] == 0.1
    assert_same(found.state_dict(), model.state_dict())
