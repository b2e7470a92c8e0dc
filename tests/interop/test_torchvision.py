"""torchvision: files of its reference training, load_state_dict, and its download of weights, from
a file here."""

from __future__ import annotations

import hashlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

import ckptkit as library
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


def test_diff_and_load_into(trained: tuple[Path, Any]) -> None:
    """Another number of classes, as everybody has who starts from published weights."""
    path, _ = trained
    checkpoint = library.strip_prefix(library.open(path, key="model"), "module.")
    model = torchvision.models.shufflenet_v2_x0_5(num_classes=5)
    found = library.diff(checkpoint, model)
    assert [name for name, *_ in found.mismatched] == ["fc.weight", "fc.bias"] and not found.missing
    report = library.load_into(model, checkpoint, strict=False)
    assert report.mismatched.keys() == {"fc.weight", "fc.bias"}


def test_names_of_old_densenets(ckptkit: Ckptkit, tmp_path: Path) -> None:
    """Published files have norm.1 where the module has norm1; torchvision's loader renames them as
    --sub does."""
    torch.manual_seed(0)
    net = torchvision.models.DenseNet(
        growth_rate=2, block_config=(1, 1), num_init_features=4, bn_size=1, num_classes=2
    )
    old = {_old(name): tensor for name, tensor in net.state_dict().items()}
    assert old.keys() != net.state_dict().keys()
    torch.save(old, tmp_path / "old.pth")
    pattern = r"(denselayer\d+\.(?:norm|relu|conv))\.([12])\.=\1\2."
    ckptkit("rename", tmp_path / "old.pth", tmp_path / "ours.pth", "--sub", pattern)
    found = torch.load(tmp_path / "ours.pth", weights_only=True)
    assert_same(found, net.state_dict())


def _old(name: str) -> str:
    for part in ("norm", "conv"):
        name = name.replace(f".{part}1.", f".{part}.1.").replace(f".{part}2.", f".{part}.2.")
    return name
