"""accelerate: what save_model and save_state leave, and its loaders of large models on what we
wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.interop.conftest import Ckptkit, assert_same

accelerate = pytest.importorskip(
    "accelerate", reason="accelerate is not installed (extra: interop)"
)
import torch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


def made(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2)
    )


@pytest.fixture(scope="module")
def accelerator() -> Any:
    return accelerate.Accelerator(cpu=True)


@pytest.fixture(scope="module")
def model() -> Any:
    return made()


# What we write: options of convert, and where it goes.
FORMS = [
    ("model.safetensors", ()),
    ("pytorch_model.bin", ()),
    ("shards", ("--format", "sharded", "--shard-size", "1kB")),
    ("bins", ("--format", "sharded-bin", "--shard-size", "1kB")),
]


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize(("name", "options"), FORMS)
def test_load_checkpoint_and_dispatch(
    name: str, options: tuple[str, ...], safe: bool, accelerator: Any, model: Any,
    ckptkit: Ckptkit, tmp_path: Path,
) -> None:  # fmt: skip
    """Of what save_model left as shards of either kind, into a model without memory."""
    how = {"max_shard_size": "1kB", "safe_serialization": safe}
    accelerator.save_model(model, tmp_path / "theirs", **how)
    assert len(list((tmp_path / "theirs").glob("*-of-*"))) > 1
    ckptkit("convert", tmp_path / "theirs", tmp_path / name, *options)
    with accelerate.init_empty_weights():
        empty = made(1)
    found = accelerate.load_checkpoint_and_dispatch(
        empty, str(tmp_path / name), device_map={"": "cpu"}
    )
    assert_same(found.state_dict(), model.state_dict())


def test_load_checkpoint_in_model_casts_as_we_do(
    accelerator: Any, model: Any, ckptkit: Ckptkit, tmp_path: Path
) -> None:
    accelerator.save_model(model, tmp_path / "theirs")
    ours = tmp_path / "ours.safetensors"
    ckptkit("convert", tmp_path / "theirs/model.safetensors", ours, "--cast", "float16")
    first, second = made(1).half(), made(2)
    accelerate.load_checkpoint_in_model(first, str(ours))
    accelerate.load_checkpoint_in_model(
        second, str(tmp_path / "theirs"), device_map={"": "cpu"}, dtype=torch.float16
    )
    assert_same(first.state_dict(), second.state_dict())


def test_state_of_a_training(accelerator: Any, ckptkit: Ckptkit, tmp_path: Path) -> None:
    """save_state; the folder through ckptkit; load_state of that gives the same next step."""
    model = made()
    optimizer = torch.optim.AdamW(model.parameters())
    prepared, optimizer = accelerator.prepare(model, optimizer)
    step(accelerator, prepared, optimizer)
    accelerator.save_state(tmp_path / "theirs")
    ours = tmp_path / "ours"
    ckptkit("convert", tmp_path / "theirs", ours, "--all", "--to", "cpu")
    names = [{each.name for each in path.iterdir()} for path in (ours, tmp_path / "theirs")]
    assert names[0] == names[1]
    after = []
    for folder in (tmp_path / "theirs", ours):
        accelerator.load_state(folder)
        step(accelerator, prepared, optimizer)
        after.append({name: tensor.clone() for name, tensor in prepared.state_dict().items()})
    assert_same(after[1], after[0])


def step(accelerator: Any, model: Any, optimizer: Any) -> None:
    optimizer.zero_grad()
    accelerator.backward(model(torch.arange(64.0).reshape(4, 16)).square().mean())
    optimizer.step()


def test_merge_fsdp_weights(model: Any, ckptkit: Ckptkit, tmp_path: Path) -> None:
    """The folder that FSDP would have written, from us: accelerate's command makes one file of
    it."""
    torch.save({"model": model.state_dict()}, tmp_path / "run.pth")
    ckptkit("convert", tmp_path / "run.pth", tmp_path / "pytorch_model_fsdp_0", "--format", "dcp")
    accelerate.utils.merge_fsdp_weights(
        str(tmp_path / "pytorch_model_fsdp_0"), str(tmp_path / "merged")
    )
    said = ckptkit("diff", tmp_path / "merged/model.safetensors", tmp_path / "run.pth", "--values")
    assert "equal" in said
