"""transformers: folders of save_pretrained, the checkpoints of its Trainer, and from_pretrained of
what we wrote."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import ckptkit as library
from tests.interop.conftest import Ckptkit, assert_same

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (extra: interop)"
)
import torch  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

WEIGHTS, STATES = "model.safetensors", ("optimizer.pt", "scheduler.pt", "rng_state.pth")
# As a folder has it beside the weights.
CONFIGS = ("config.json", "generation_config.json")


@pytest.fixture(scope="module")
def model() -> Any:
    """Two layers of Llama whose embeddings are tied."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture
def saved(model: Any, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def beside_configs(saved: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for name in CONFIGS:
        shutil.copy(saved / name, folder)
    return folder


def loaded(folder: Path, **options: Any) -> Any:
    """The model that from_pretrained makes of a folder, which must have every weight."""
    found, report = transformers.LlamaForCausalLM.from_pretrained(
        folder, output_loading_info=True, **options
    )
    assert not any(
        report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
    ), report
    return found.eval()


def assert_same_model(found: Any, model: Any) -> None:
    assert_same(found.state_dict(), model.state_dict())
    assert found.lm_head.weight is found.model.embed_tokens.weight
    tokens = torch.arange(8)[None]
    assert torch.equal(found(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_one_file(name: str, model: Any, saved: Path, ckptkit: Ckptkit, tmp_path: Path) -> None:
    ours = beside_configs(saved, tmp_path / "ours")
    ckptkit("convert", saved / "model.safetensors", ours / name)
    assert_same_model(loaded(ours), model)


@pytest.mark.parametrize("format", ["sharded", "sharded-bin"])
def test_shards(format: str, model: Any, saved: Path, ckptkit: Ckptkit, tmp_path: Path) -> None:
    ours = tmp_path / "ours"
    ckptkit("convert", saved / "model.safetensors", ours, "--format", format, "--shard-size", "8kB")
    assert len(list(ours.glob("*-of-*"))) > 1
    assert_same_model(loaded(beside_configs(saved, ours)), model)


def test_shards_of_save_pretrained_become_one_file(
    model: Any, ckptkit: Ckptkit, tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    model.save_pretrained(theirs, max_shard_size="8kB")
    assert len(list(theirs.glob("*-of-*"))) > 1
    ours = beside_configs(theirs, tmp_path / "ours")
    ckptkit("convert", theirs, ours / "model.safetensors")
    assert_same_model(loaded(ours), model)


def test_cast(model: Any, saved: Path, ckptkit: Ckptkit, tmp_path: Path) -> None:
    """With dtype="auto", from_pretrained takes the file's, where the configuration names none."""
    ours = beside_configs(saved, tmp_path / "ours")
    config = json.loads((saved / "config.json").read_text())
    plain = {key: value for key, value in config.items() if "dtype" not in key}
    (ours / "config.json").write_text(json.dumps(plain))
    ckptkit("convert", saved / WEIGHTS, ours / WEIGHTS, "--cast", "bfloat16")
    expected = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    assert_same(loaded(ours, dtype="auto").state_dict(), expected)


def test_load_into(model: Any, saved: Path) -> None:
    """The tied half, which the file does not have, comes with the other."""
    torch.manual_seed(1)
    other = transformers.LlamaForCausalLM(model.config)
    library.load_into(other, saved / "model.safetensors")
    assert_same_model(other.eval(), model)


@pytest.fixture(scope="module")
def trained(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that the Trainer leaves after two of four steps."""
    pytest.importorskip("accelerate", reason="the Trainer needs accelerate (extra: interop)")
    folder = tmp_path_factory.mktemp("trained")
    shutil.copytree(train(model, folder, until=2), folder / "kept")
    return folder / "kept"


def train(model: Any, folder: Path, until: int = 4, **options: Any) -> Path:
    """Train up to step `until` of four on four sequences; the last checkpoint."""
    from copy import deepcopy

    class Stop(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step >= until

    rows = [{"input_ids": torch.arange(8) + i, "labels": torch.arange(8) + i} for i in range(4)]
    given = transformers.TrainingArguments(
        str(folder), max_steps=4, save_steps=1, per_device_train_batch_size=1, use_cpu=True, report_to=[],
        disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(
        deepcopy(model).train(), given, train_dataset=rows, callbacks=[Stop()]
    )
    trainer.train(**options)
    return folder / f"checkpoint-{trainer.state.global_step}"


def test_trainer_resumes_from_what_we_wrote(
    model: Any, trained: Path, ckptkit: Ckptkit, tmp_path: Path
) -> None:
    """Weights in shards, optimizer and generators written again: the same end of the training."""
    ours = tmp_path / "checkpoint-2"
    shutil.copytree(trained, ours)
    for name in (WEIGHTS, *STATES):
        (ours / name).unlink()
    for name in STATES:
        ckptkit("remap", trained / name, ours / name, "--to", "cpu")
    ckptkit("convert", trained / WEIGHTS, ours / WEIGHTS)
    expected = train(model, tmp_path / "theirs", resume_from_checkpoint=str(trained))
    found = train(model, tmp_path / "ours", resume_from_checkpoint=str(ours))
    assert found.name == expected.name == "checkpoint-4"
    assert (found / WEIGHTS).read_bytes() == (expected / WEIGHTS).read_bytes()


def test_files_of_the_trainer(trained: Path, ckptkit: Ckptkit) -> None:
    """Each is shown; what is not a checkpoint of weights says what it is, and runs nothing."""
    for name in (WEIGHTS, *STATES, "training_args.bin"):
        (file,) = json.loads(ckptkit("inspect", "--json", trained / name))["files"]
        assert file["tensors"] or file["values"] or file["objects"], name
    assert "transformers" in ckptkit("inspect", trained / "training_args.bin")
    ckptkit("verify", trained)
    ckptkit("scan", "--trust", "transformers.*", "--trust", "accelerate.*", trained)
