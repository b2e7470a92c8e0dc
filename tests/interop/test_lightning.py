"""Lightning: checkpoints of its Trainer, load_from_checkpoint and fit(ckpt_path) of what we
wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.conftest import Ckptkit, assert_same

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module", params=["lightning.pytorch", "pytorch_lightning"])
def pl(request: pytest.FixtureRequest) -> Any:
    return pytest.importorskip(
        request.param, reason=f"{request.param} is not installed (extra: interop)"
    )


class Net(torch.nn.Sequential):  # type: ignore[misc, name-defined, unused-ignore]
    def __init__(self, width: int = 3) -> None:
        super().__init__(
            torch.nn.Linear(4, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 2)
        )


@pytest.fixture(scope="module")
def module(pl: Any) -> Any:
    """A class of a LightningModule."""

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.model = Net(width)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.model(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters())
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    return Module


def fit(pl: Any, module: Any, folder: Path, epochs: int, **options: Any) -> tuple[Any, Path]:
    """The trained module and the file that was left."""
    torch.manual_seed(0)
    net = module(width=5)
    data = torch.utils.data.TensorDataset(torch.arange(32.0).reshape(8, 4))
    trainer = pl.Trainer(
        max_epochs=epochs, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[pl.callbacks.ModelCheckpoint(folder, filename="{epoch}")],
    )  # fmt: skip
    trainer.fit(net, torch.utils.data.DataLoader(data, batch_size=4), **options)
    return net, folder / f"epoch={epochs - 1}.ckpt"


@pytest.fixture(scope="module")
def trained(pl: Any, module: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    return fit(pl, module, tmp_path_factory.mktemp("lightning"), 1)


def test_recipe_gives_the_plain_network(
    trained: tuple[Any, Path], ckptkit: Ckptkit, tmp_path: Path
) -> None:
    net, path = trained
    ckptkit("run", "lightning", path, tmp_path / "net.pth")
    plain = Net(5)
    plain.load_state_dict(torch.load(tmp_path / "net.pth", weights_only=True))
    assert_same(plain.state_dict(), net.model.state_dict())


@pytest.mark.parametrize("command", [("remap", "--to", "cpu"), ("convert", "--cast", "float64")])
def test_load_from_checkpoint(
    command: tuple[str, ...], trained: tuple[Any, Path], module: Any, ckptkit: Ckptkit, tmp_path: Path
) -> None:  # fmt: skip
    """With the hyperparameters that the file keeps beside the weights."""
    net, path = trained
    name, *options = command
    ckptkit(name, path, tmp_path / "ours.ckpt", *options)
    found = module.load_from_checkpoint(tmp_path / "ours.ckpt")
    assert found.hparams.width == 5
    assert_same(found.state_dict(), net.state_dict())


def test_weights_go_back_into_a_checkpoint(
    trained: tuple[Any, Path], module: Any, ckptkit: Ckptkit, tmp_path: Path
) -> None:
    """The plain network as safetensors, and from there to what load_from_checkpoint takes, told its
    arguments."""
    net, path = trained
    plain, prefixed = tmp_path / "net.safetensors", tmp_path / "prefixed.pth"
    ours, version = tmp_path / "ours.ckpt", 'pytorch-lightning_version="2.0.0"'
    ckptkit("run", "lightning", path, plain)
    ckptkit("convert", plain, prefixed, "--add", "model.")
    ckptkit("wrap", prefixed, ours, "--key", "state_dict", "--set", version)
    found = module.load_from_checkpoint(ours, width=5)
    assert_same(found.state_dict(), net.state_dict())


def test_training_goes_on(
    pl: Any, module: Any, trained: tuple[Any, Path], ckptkit: Ckptkit, tmp_path: Path
) -> None:
    """From what we wrote as from the original: optimizer, schedule, loops and callbacks are all
    there."""
    _, path = trained
    ckptkit("remap", path, tmp_path / "ours.ckpt", "--to", "cpu")
    expected, _ = fit(pl, module, tmp_path / "theirs", 3, ckpt_path=path)
    found, _ = fit(pl, module, tmp_path / "ours", 3, ckpt_path=tmp_path / "ours.ckpt")
    assert_same(found.state_dict(), expected.state_dict())


def test_inspect_finds_the_weights(trained: tuple[Any, Path], ckptkit: Ckptkit) -> None:
    said = ckptkit("inspect", trained[1])
    assert "weights: state_dict" in said and "hyper_parameters.width: 5" in said
    ckptkit("verify", trained[1])
    ckptkit("scan", trained[1])
