"""torchvision: files of its reference training, load_state_dict, and its download of weights, from
a file here."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from tests.interop.conftest import Ckptkit, assert_same

torchvision = pytest.importorskip(
    "torchvision", reason="torchvision is not installed (extra: interop)"
)
import torch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def made(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torchvision.models.shufflenet_v2_x0_5(num_classes=3)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """As references/classification/train.py saves under DistributedDataParallel with
    --model-ema."""
    model = torch.nn.DataParallel(made())
    ema = torch.optim.swa_utils.AveragedModel(
        made(1), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 30)
    path = tmp_path_factory.mktemp("torchvision") / "model_3.pth"
    checkpoint = {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "lr_scheduler": schedule.state_dict(),
        "epoch": 3, "args": Namespace(model="shufflenet_v2_x0_5"), "model_ema": ema.state_dict(),
    }  # fmt: skip
    torch.save(checkpoint, path)
    return path, (model.module, ema.module)


def test_recipe(trained: tuple[Path, Any], ckptkit: Ckptkit, tmp_path: Path) -> None:
    path, (model, _) = trained
    ckptkit("run", "torchvision", path, tmp_path / "ours.pth")
    found = made(2)
    found.load_state_dict(torch.load(tmp_path / "ours.pth", weights_only=True))
    assert_same(found.state_dict(), model.state_dict())


def test_average(trained: tuple[Path, Any], ckptkit: Ckptkit, tmp_path: Path) -> None:
    path, (_, ema) = trained
    ckptkit("ema", path, tmp_path / "ema.pth")
    ckptkit("strip-module", tmp_path / "ema.pth", tmp_path / "ours.pth")
    found = made(2)
    ckptkit("convert", tmp_path / "ours.pth", tmp_path / "net.pth", "--drop", "n_averaged")
    found.load_state_dict(torch.load(tmp_path / "net.pth", weights_only=True))
    assert_same(found.state_dict(), ema.state_dict())


def test_weights_of_torchvision(
    trained: tuple[Path, Any], ckptkit: Ckptkit, tmp_path: Path
) -> None:
    """A published file as get_state_dict fetches and checks it: its name holds the hash of what we
    wrote."""
    path, (model, _) = trained
    ckptkit("run", "torchvision", path, tmp_path / "ours.pth")
    data = (tmp_path / "ours.pth").read_bytes()
    named = tmp_path / f"net-{hashlib.sha256(data).hexdigest()[:8]}.pth"
    named.write_bytes(data)
    weights = torchvision.models.Weights(url=named.as_uri(), transforms=lambda: None, meta={})
    torch.hub.set_dir(tmp_path / "hub")
    found = torch.hub.load_state_dict_from_url(weights.url, check_hash=True, weights_only=True)
    assert_same(found, model.state_dict())
