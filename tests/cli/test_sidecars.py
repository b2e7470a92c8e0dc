"""From folder to folder: the small files of a model come along, and nothing else does."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
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


def folder(weights: dict[str, torch.Tensor], **texts: str) -> Path:
    """Make the folder of a model; `texts` are JSON files."""
    Path("model").mkdir()
    save_file(weights, "model/model.safetensors")
    for name, text in texts.items():
        Path(f"model/{name}.json").write_text(text, encoding="utf-8")
    return Path("model")


@pytest.fixture(params=[False, True], ids=["one file", "shards"])
def model(ckptkit: Ckptkit, request: pytest.FixtureRequest) -> None:
    """The folder of a model, with files beside the weights that are copied, and others."""
    folder(STATE)
    if request.param:
        os.rename("model/model.safetensors", "x.safetensors")
        ckptkit("convert x.safetensors model --shard-size 400", code=0)
    for name, text in TEXTS.items():
        Path("model", name).write_text(text, encoding="utf-8")
    for name in LEFT:
        Path("model", name).write_bytes(b"x")


def weights(place: str) -> dict[str, torch.Tensor]:
    """Return the weights in a folder as safetensors reads them."""
    found: dict[str, torch.Tensor] = {}
    for path in Path(place).glob("*.safetensors"):
        found.update(load_file(path))
    return found


def beside(place: str) -> dict[str, str]:
    """Return the files of a folder that hold no weights."""
    names = [each for each in os.listdir(place) if not each.startswith("model")]
    return {name: Path(place, name).read_text(encoding="utf-8") for name in names}


def config_of(place: str) -> Any:
    return json.loads(Path(place, "config.json").read_text(encoding="utf-8"))


def test_the_state_of_a_training_is_named_or_taken(ckptkit: Ckptkit) -> None:
    """The files of accelerate's save_state and of the Trainer, into a folder and into one file."""
    net = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(11)))
    folder(net.state_dict(), trainer_state="{}")
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    states = {"optimizer.bin": optimizer.state_dict(), "scheduler_1.bin": {"last_epoch": 3}}
    for name, state in states.items():
        torch.save(state, f"model/{name}")
    said = ckptkit("convert model out").stderr
    assert "optimizer.bin, scheduler_1.bin, trainer_state.json" in said
    assert "--all adds the training state" in said
    taken = ckptkit("convert model all --all --verify", code=0)
    assert "with optimizer.bin, scheduler_1.bin" in taken.stdout
    assert "trainer_state.json" in taken.stderr
    assert {name: torch.load(f"all/{name}") for name in states} == states
    ckptkit("convert model run.pth --all")
    one = torch.load("run.pth")
    assert (one["optimizer"], one["scheduler_1"]) == tuple(states.values())
    assert one["model"].keys() == net.state_dict().keys()
    # safetensors sorts the names: 10 before 2
    cut = ckptkit("convert model cut.pth --all --drop 10.*")
    assert "dropped optimizer" in cut.stderr and "optimizer" not in torch.load("cut.pth")


@pytest.mark.usefixtures("model")
def test_they_are_copied_and_named(ckptkit: Ckptkit) -> None:
    said = ckptkit("convert model new --cast bfloat16", code=0).stdout
    assert said.endswith(f"with {', '.join(sorted(TEXTS))}\n")
    assert beside("new") == TEXTS
    found = weights("new")
    assert found.keys() == STATE.keys()
    assert all(torch.equal(each, STATE[name].bfloat16()) for name, each in found.items())
    done = ckptkit("rename model again --sub a=c --json")
    assert json.loads(done.stdout)["copied"] == sorted(TEXTS)
    assert beside("again") == TEXTS


@pytest.mark.usefixtures("model")
def test_they_are_not_copied(ckptkit: Ckptkit) -> None:
    """If it is turned off; beside a file; from a file; from a folder without a configuration."""
    Path("out").mkdir()
    for words in ("model new --no-sidecars", "model out/new.safetensors"):
        assert "config.json" not in ckptkit(f"convert {words}", code=0).stdout
    assert beside("new") == {} and os.listdir("out") == ["new.safetensors"]
    Path("out/config.json").write_text("{}")
    ckptkit("convert out/new.safetensors shards --shard-size 1GB", code=0)
    Path("model/config.json").unlink()
    ckptkit("convert model bare", code=0)
    assert beside("shards") == beside("bare") == {}


@pytest.mark.usefixtures("model")
def test_large_ones_and_links_are_left_out(ckptkit: Ckptkit) -> None:
    Path("secret").write_text("secret")
    Path("model/vocab.json").symlink_to(Path("secret").absolute())
    with open("model/tokenizer.model", "wb") as file:
        file.truncate(LARGEST + 1)
    said = ckptkit("convert model new", code=0).stderr
    assert beside("new") == TEXTS
    assert "tokenizer.model is larger than" in said and "vocab.json is not copied" in said


def test_links_of_the_hub_cache_are_followed(ckptkit: Ckptkit) -> None:
    blobs, snapshot = Path("hub/blobs"), Path("hub/snapshots/abc")
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file(STATE, blobs / "1")
    (blobs / "2").write_text("{}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1")
    (snapshot / "config.json").symlink_to("../../blobs/2")
    for source, out in ((snapshot, "new"), ("hub", "other")):
        ckptkit(f"convert {source} {out}", code=0)
        assert beside(out) == {"config.json": "{}"} and not Path(out, "config.json").is_symlink()
        assert weights(out).keys() == STATE.keys()


def test_what_a_step_makes_wins(ckptkit: Ckptkit) -> None:
    wide = {"layers.0.mlp.weight": torch.randn(256, 256)}
    folder(wide, config='{"model_type": "llama"}', tokenizer="{}")
    done = ckptkit("convert model new --quantize fp8-block", code=0)
    made = config_of("new")
    assert made["model_type"] == "llama" and "quantization_config" in made
    assert done.stdout.endswith("with tokenizer.json\n")


def cast(ckptkit: Ckptkit, config: str, words: str) -> Result:
    """Convert the model with another configuration."""
    Path("model/config.json").write_text(config, encoding="utf-8")
    return ckptkit(f"convert model new --force {words}", code=0)


@pytest.mark.parametrize("field", ["torch_dtype", "dtype"])
@pytest.mark.usefixtures("model")
def test_the_configuration_says_the_new_dtype(ckptkit: Ckptkit, field: str) -> None:
    parts = {"text_config": {field: "float32", "n": 1}, "vision_config": {field: "float16"}}
    config = {"model_type": "é", field: "float32", **parts, "list": [1]}
    done = cast(ckptkit, json.dumps(config), "--cast bfloat16")
    assert f"config.json: {field} float32 -> bfloat16" in done.stdout
    expected = {**config, field: "bfloat16", "text_config": {field: "bfloat16", "n": 1}}
    assert config_of("new") == expected and list(expected) == list(config_of("new"))
    found = json.loads(ckptkit("convert model b --cast bfloat16 --json").stdout)
    assert f"config.json: {field} float32 -> bfloat16" in found["done"]


OTHERS = (
    '{"torch_dtype": "auto"}', '{"torch_dtype": 3}', "{", "[]", "{}", '{"dtype": null}',
    '{"dtype": "float32", "quantization_config": {"quant_method": "x"}}',
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"torch_dtype": "float32"}', "--cast a.weight=float32 --drop b.weight"),
        *((text, "--cast float16") for text in OTHERS),
    ],
)
@pytest.mark.usefixtures("model")
def test_other_configurations_are_copied_as_they_are(
    ckptkit: Ckptkit, text: str, words: str
) -> None:
    """Also if most weights have the dtype that it says."""
    cast(ckptkit, text, words)
    assert Path("new/config.json").read_text() == text


def test_a_dequantized_model_says_its_dtype(ckptkit: Ckptkit) -> None:
    state = {"model.layers.0.mlp.weight": torch.randn(64, 64), "n": torch.ones(9)}
    halves = {name: value.bfloat16() for name, value in state.items()}
    folder(halves, config='{"model_type": "x", "dtype": "bfloat16"}')
    ckptkit("convert model q --quantize mxfp4")
    done = ckptkit("convert q out --dequantize float16", code=0)
    assert config_of("out") == {"model_type": "x", "dtype": "float16"}
    assert "config.json: dtype bfloat16 -> float16" in done.stdout
