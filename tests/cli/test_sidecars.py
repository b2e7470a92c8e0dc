"""From folder to folder: the small files of a model come along, and nothing else does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from ckptkit.formats.sidecars import LARGEST
from tests.cli.conftest import Ckptkit

STATE = {"a.weight": torch.ones(100), "b.weight": torch.zeros(100)}
TEXTS = {
    "config.json": '{"model_type": "llama"}',
    "generation_config.json": "{}",
    "tokenizer.json": '{"é": 1}',
    "merges.txt": "a b\n",
    "chat_template.jinja": "{{ messages }}",
}
LEFT = ("modeling_x.py", "training_args.bin", "notes.md", "chat_template.py", "optimizer.pt")


@pytest.fixture(params=[False, True], ids=["one file", "shards"])
def model(ckptkit: Ckptkit, request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of a model, with files beside the weights that are copied, and others."""
    folder = tmp_path / "model"
    if request.param:
        save_file(STATE, tmp_path / "x.safetensors")
        done = ckptkit("convert", tmp_path / "x.safetensors", folder, "--shard-size", "400")
        assert done.exit_code == 0, done.stderr
    else:
        folder.mkdir()
        save_file(STATE, folder / "model.safetensors")
    for name, text in TEXTS.items():
        (folder / name).write_text(text, encoding="utf-8")
    for name in LEFT:
        (folder / name).write_bytes(b"x")
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights in a folder as safetensors reads them."""
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found.update(load_file(path))
    return found


def beside(folder: Path) -> dict[str, str]:
    """Return the files of a folder that hold no weights."""
    names = [each for each in os.listdir(folder) if not each.startswith("model")]
    return {name: (folder / name).read_text(encoding="utf-8") for name in names}


def test_the_state_of_a_training_is_named_or_taken(ckptkit: Ckptkit, tmp_path: Path) -> None:
    """The files of accelerate's save_state and of the Trainer, into a folder and into one file."""
    folder = tmp_path / "model"
    folder.mkdir()
    net = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(11)))
    save_file(net.state_dict(), folder / "model.safetensors")
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    states = {"optimizer.bin": optimizer.state_dict(), "scheduler_1.bin": {"last_epoch": 3}}
    for name, state in states.items():
        torch.save(state, folder / name)
    (folder / "trainer_state.json").write_text("{}")
    done = ckptkit("convert", folder, tmp_path / "out")
    assert "optimizer.bin, scheduler_1.bin, trainer_state.json" in done.stderr
    assert "--all adds the training state" in done.stderr
    taken = ckptkit("convert", folder, tmp_path / "all", "--all", "--verify")
    assert taken.exit_code == 0 and "with optimizer.bin, scheduler_1.bin" in taken.stdout
    assert "trainer_state.json" in taken.stderr
    assert {name: torch.load(tmp_path / "all" / name) for name in states} == states
    ckptkit("convert", folder, tmp_path / "run.pth", "--all")
    one = torch.load(tmp_path / "run.pth")
    assert (one["optimizer"], one["scheduler_1"]) == tuple(states.values())
    assert one["model"].keys() == net.state_dict().keys()
    # safetensors sorts the names: 10 before 2
    cut = ckptkit("convert", folder, tmp_path / "cut.pth", "--all", "--drop", "10.*")
    assert "dropped optimizer" in cut.stderr and "optimizer" not in torch.load(tmp_path / "cut.pth")


def test_they_are_copied_and_named(ckptkit: Ckptkit, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "new"
    done = ckptkit("convert", model, out, "--cast", "bfloat16")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.endswith(f"with {', '.join(sorted(TEXTS))}\n")
    assert beside(out) == TEXTS
    found = weights(out)
    assert found.keys() == STATE.keys()
    assert all(torch.equal(each, STATE[name].bfloat16()) for name, each in found.items())


def test_they_are_in_the_json(ckptkit: Ckptkit, model: Path, tmp_path: Path) -> None:
    done = ckptkit("rename", model, tmp_path / "new", "--sub", "a=c", "--json")
    assert json.loads(done.stdout)["copied"] == sorted(TEXTS)
    assert beside(tmp_path / "new") == TEXTS


def test_turned_off(ckptkit: Ckptkit, model: Path, tmp_path: Path) -> None:
    done = ckptkit("convert", model, tmp_path / "new", "--no-sidecars")
    assert done.exit_code == 0 and "config.json" not in done.stdout
    assert beside(tmp_path / "new") == {}


def test_not_beside_a_file(ckptkit: Ckptkit, model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    done = ckptkit("convert", model, tmp_path / "out" / "new.safetensors")
    assert done.exit_code == 0 and "config.json" not in done.stdout
    assert os.listdir(tmp_path / "out") == ["new.safetensors"]


def test_not_from_a_file(ckptkit: Ckptkit, tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "x.safetensors")
    (tmp_path / "config.json").write_text("{}")
    done = ckptkit("convert", tmp_path / "x.safetensors", tmp_path / "new", "--shard-size", "1GB")
    assert done.exit_code == 0 and beside(tmp_path / "new") == {}


def test_not_from_a_folder_without_a_configuration(
    ckptkit: Ckptkit, model: Path, tmp_path: Path
) -> None:
    (model / "config.json").unlink()
    assert ckptkit("convert", model, tmp_path / "new").exit_code == 0
    assert beside(tmp_path / "new") == {}


def test_large_ones_and_links_are_left_out(ckptkit: Ckptkit, model: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (model / "vocab.json").symlink_to(tmp_path / "secret")
    with open(model / "tokenizer.model", "wb") as file:
        file.truncate(LARGEST + 1)
    done = ckptkit("convert", model, tmp_path / "new")
    assert done.exit_code == 0 and beside(tmp_path / "new") == TEXTS
    assert "tokenizer.model is larger than" in done.stderr
    assert "vocab.json is not copied" in done.stderr


def test_links_of_the_hub_cache_are_followed(ckptkit: Ckptkit, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file(STATE, blobs / "1")
    (blobs / "2").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1")
    (snapshot / "config.json").symlink_to("../../blobs/2")
    for number, source in enumerate((snapshot, tmp_path / "hub")):
        out = tmp_path / f"new{number}"
        done = ckptkit("convert", source, out)
        assert done.exit_code == 0, done.stderr
        assert beside(out) == {"config.json": "{}"} and not (out / "config.json").is_symlink()
        assert weights(out).keys() == STATE.keys()


def test_what_a_step_makes_wins(ckptkit: Ckptkit, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"layers.0.mlp.weight": torch.randn(256, 256)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    done = ckptkit("convert", folder, tmp_path / "new", "--quantize", "fp8-block")
    assert done.exit_code == 0, done.stderr
    made = json.loads((tmp_path / "new" / "config.json").read_text())
    assert made["model_type"] == "llama" and "quantization_config" in made
    assert done.stdout.endswith("with tokenizer.json\n")


def config_of(folder: Path) -> object:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("field", ["torch_dtype", "dtype"])
def test_the_configuration_says_the_new_dtype(
    ckptkit: Ckptkit, model: Path, tmp_path: Path, field: str
) -> None:
    parts = {"text_config": {field: "float32", "n": 1}, "vision_config": {field: "float16"}}
    config = {"model_type": "é", field: "float32", **parts, "list": [1]}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    done = ckptkit("convert", model, tmp_path / "new", "--cast", "bfloat16")
    assert f"config.json: {field} float32 -> bfloat16" in done.stdout
    expected = {**config, field: "bfloat16", "text_config": {field: "bfloat16", "n": 1}}
    assert config_of(tmp_path / "new") == expected
    assert list(expected) == list(json.loads((tmp_path / "new/config.json").read_text()))
    found = json.loads(
        ckptkit("convert", model, tmp_path / "b", "--cast", "bfloat16", "--json").stdout
    )
    assert f"config.json: {field} float32 -> bfloat16" in found["done"]


def test_the_configuration_says_what_most_weights_have(
    ckptkit: Ckptkit, model: Path, tmp_path: Path
) -> None:
    (model / "config.json").write_text('{"torch_dtype": "float32"}')
    words = ("--cast", "a.weight=float32", "--drop", "b.weight")
    ckptkit("convert", model, tmp_path / "same", *words)
    assert (tmp_path / "same/config.json").read_text() == '{"torch_dtype": "float32"}'
    ckptkit("convert", model, tmp_path / "new", "--no-sidecars", "--cast", "float16")
    assert not (tmp_path / "new/config.json").exists()


@pytest.mark.parametrize(
    "text", ['{"torch_dtype": "auto"}', '{"torch_dtype": 3}', "{", "[]", "{}", '{"dtype": null}',
             '{"dtype": "float32", "quantization_config": {"quant_method": "x"}}'],
)  # fmt: skip
def test_other_configurations_are_copied_as_they_are(
    ckptkit: Ckptkit, model: Path, tmp_path: Path, text: str
) -> None:
    (model / "config.json").write_text(text)
    done = ckptkit("convert", model, tmp_path / "new", "--cast", "float16")
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "new/config.json").read_text() == text


def test_a_dequantized_model_says_its_dtype(ckptkit: Ckptkit, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    state = {
        "model.layers.0.mlp.weight": torch.randn(64, 64).bfloat16(),
        "n": torch.ones(9).bfloat16(),
    }
    save_file(state, tmp_path / "model/model.safetensors")
    (tmp_path / "model/config.json").write_text('{"model_type": "x", "dtype": "bfloat16"}')
    ckptkit("convert", tmp_path / "model", tmp_path / "q", "--quantize", "mxfp4")
    done = ckptkit("convert", tmp_path / "q", tmp_path / "out", "--dequantize", "float16")
    assert done.exit_code == 0, done.stderr
    assert config_of(tmp_path / "out") == {"model_type": "x", "dtype": "float16"}
    assert "config.json: dtype bfloat16 -> float16" in done.stdout
