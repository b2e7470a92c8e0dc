"""Expectations, config.json against tensors, and --like: nothing is written where one fails."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.edits.expect import ExpectationError, Expectations
from ckptkit.rules.notation import RuleError
from tests.conftest import Ok, Run
from tests.hints import commands_in

Sizes = dict[str, tuple[int, ...]]


@pytest.fixture
def net(tmp_path: Path) -> Path:
    weight = torch.ones(6, 4)
    state = {"embed.weight": weight, "head.weight": weight.clone(), "n": torch.tensor(1)}
    state["bad"] = torch.tensor([1.0, float("nan"), float("inf")])
    torch.save(state, tmp_path / "net.pth")
    return tmp_path / "net.pth"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("embed.weight", None),
        ("embed.weight exists", None),
        ("none exists", "no such tensor"),
        ("head.wieght", "did you mean head.weight?"),
        ("none missing", None),
        ("*.weight missing", "embed.weight exists"),
        ("*.weight count=2", None),
        ("*.weight count=1+2", "2 tensors instead of 3"),
        ("none count=0 + 0", "is not a condition"),
        ("*.weight shape=[6 4] dtype=float32", None),
        ("*.weight shape=[config.rows _]", None),
        ("*.weight shape=[_ 5]", "has shape [6, 4] instead of [_, 5]"),
        ("*.weight shape=[6]", "instead of [6]"),
        ("* dtype=float32|int64", None),
        ("* dtype=float32", "n is int64 instead of float32"),
        ("head.weight equal=embed.weight", None),
        ("bad equal=embed.weight", "differs from embed.weight, which is"),
        ("head.weight equal=none", "which is missing"),
        ("*.weight finite", None),
        ("* finite", "bad has 1 NaN and 1 infinite elements"),
        ("* finite=1", "takes no value"),
    ],
)
def test_expectations(line: str, said: str | None, net: Path) -> None:
    checkpoint = ckptkit.open(net)
    try:
        found = list(Expectations([line], {"rows": 6}).failures(checkpoint))
    except RuleError as error:
        found = [error.message]
    assert found == [] if said is None else said in found[0]


def test_values_that_differ_are_counted(tmp_path: Path) -> None:
    torch.save({"a": torch.zeros(4), "b": torch.tensor([0.0, 1, 0, 2])}, tmp_path / "x.pth")
    (found,) = Expectations(["a equal=b"]).failures(ckptkit.open(tmp_path / "x.pth"))
    assert "differs from b in 2 elements" in found
    with pytest.raises(ExpectationError, match="not as expected"):
        Expectations(["a equal=b"]).check(ckptkit.open(tmp_path / "x.pth"))


def test_recipes_expect_before_they_write(net: Path, tmp_path: Path, run: Run) -> None:
    steps = [
        {"expect": ["*.weight count=2"]},
        {"rename": {"map": {"bad": "worse"}}},
        {"expect": "worse finite"},
    ]
    (tmp_path / "r.yaml").write_text(json.dumps({"steps": steps}))
    done = run("run", tmp_path / "r.yaml", net, tmp_path / "out.pth")
    assert done.code == 3
    assert "worse has 1 NaN" in done.stderr
    assert not (tmp_path / "out.pth").exists()


def test_check_says_what_is_wrong(net: Path, run: Run, ok: Ok) -> None:
    ok("check", net, "--expect", "*.weight count=2")
    done = run("check", net, "--expect", "* finite", "--expect", "x", "--json")
    assert done.code == 1
    assert [each["code"] for each in json.loads(done.stdout)["findings"]] == ["expectation"] * 2


MODEL: Sizes = {
    "model.embed_tokens.weight": (50, 8),
    "lm_head.weight": (50, 8),
    **{f"model.layers.{n}.self_attn.q_proj.weight": (8, 8) for n in range(3)},
    **{f"model.layers.{n}.self_attn.k_proj.weight": (4, 8) for n in range(3)},
    **{f"model.layers.{n}.mlp.experts.{e}.w.weight": (2, 8) for n in range(3) for e in range(4)},
    **{f"model.vision.layers.{n}.q_proj.weight": (2, 8) for n in range(7)},
}
CONFIG = {
    "num_hidden_layers": 3, "hidden_size": 8, "vocab_size": 50, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_local_experts": 4, "tie_word_embeddings": False, "dtype": "float32",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "without", "code"),
    [
        ({}, None, None),
        ({"torch_dtype": "torch.float32", "dtype": None}, None, None),
        ({"num_hidden_layers": 4}, None, "layers"),
        ({"num_hidden_layers": 2, "num_nextn_predict_layers": 1}, None, None),
        ({"num_local_experts": 8}, None, "experts"),
        ({"vocab_size": 64}, None, "vocabulary"),
        ({"hidden_size": 16, "head_dim": 2}, None, "hidden"),
        ({"num_attention_heads": 3, "head_dim": 2}, None, "heads"),
        ({"num_key_value_heads": 1}, None, None),  # with a gate it could be so
        ({"num_key_value_heads": 3}, None, "heads"),
        ({}, "lm_head.weight", "head"),
        ({"tie_word_embeddings": True}, "lm_head.weight", None),
        ({"dtype": "bfloat16"}, None, "dtype"),
        ({"text_config": {"vocab_size": 7}}, None, "vocabulary"),
        ({"num_hidden_layers": "3", "vocab_size": None, "dtype": 3}, None, None),
    ],
)
def test_config_against_tensors(
    config: dict[str, Any], without: str | None, code: str | None, tmp_path: Path, run: Run
) -> None:
    state = {name: torch.zeros(shape) for name, shape in MODEL.items() if name != without}
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    done = run("check", tmp_path / "model.safetensors", "--json")
    codes = {each["code"] for each in json.loads(done.stdout)["findings"]}
    assert codes == (set() if code is None else {code})
    assert done.code == (code is not None)


# Shapes of diffusers 0.42.1: UNet2DConditionModel and AutoencoderKL of two levels.
UNET = {
    "conv_in.weight": (32, 4, 3, 3), "conv_out.weight": (5, 32, 3, 3),
    "down_blocks.0.resnets.0.conv1.weight": (32, 32, 3, 3),
    "down_blocks.0.resnets.1.conv1.weight": (32, 32, 3, 3),
    "down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k.weight": (32, 24),
    "down_blocks.1.resnets.0.conv1.weight": (64, 32, 3, 3),
    "up_blocks.0.resnets.0.conv1.weight": (64, 128, 3, 3),
    "up_blocks.1.resnets.0.conv1.weight": (32, 96, 3, 3),
}  # fmt: skip
UNET_CONFIG = {
    "_class_name": "UNet2DConditionModel", "in_channels": 4, "out_channels": 5,
    "block_out_channels": [32, 64], "layers_per_block": 2, "cross_attention_dim": 24,
}  # fmt: skip
VAE = {
    "encoder.conv_in.weight": (32, 3, 3, 3), "encoder.conv_out.weight": (10, 64, 3, 3),
    "decoder.conv_in.weight": (64, 5, 3, 3), "decoder.conv_out.weight": (4, 32, 3, 3),
    "encoder.down_blocks.0.resnets.0.conv1.weight": (32, 32, 3, 3),
    "encoder.down_blocks.1.resnets.0.conv1.weight": (64, 32, 3, 3),
    "decoder.up_blocks.0.resnets.0.conv1.weight": (64, 64, 3, 3),
    "decoder.up_blocks.1.resnets.0.conv1.weight": (32, 64, 3, 3),
}  # fmt: skip
VAE_CONFIG = {
    "_class_name": "AutoencoderKL", "in_channels": 3, "out_channels": 4, "latent_channels": 5,
    "block_out_channels": [32, 64], "layers_per_block": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("shapes", "config", "changes"),
    [
        (UNET, UNET_CONFIG, {"in_channels": 9, "out_channels": 4, "block_out_channels": [32, 96],
                             "layers_per_block": 1, "cross_attention_dim": 768}),
        (VAE, VAE_CONFIG, {"in_channels": 4, "out_channels": 3, "latent_channels": 4,
                           "block_out_channels": [32, 64, 64], "layers_per_block": 2}),
    ],
    ids=["unet", "vae"],
)  # fmt: skip
def test_config_of_diffusers(
    shapes: Sizes, config: dict[str, Any], changes: dict[str, Any], tmp_path: Path, run: Run
) -> None:
    state = {name: torch.zeros(shape) for name, shape in shapes.items()}
    save_file(state, tmp_path / "diffusion_pytorch_model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = run("check", tmp_path)
    assert done.code == 0 and set(changes) <= set(re.findall(r"\w+", done.stdout))
    assert done.stdout.rstrip().endswith("; no expectations given")
    for field, value in changes.items():
        (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
        done = run("check", tmp_path, "--json")
        assert done.code == 1
        assert {each["code"] for each in json.loads(done.stdout)["findings"]} == {field}


@pytest.mark.parametrize("config", [None, {"model_type": "x"}, {"_class_name": "Of no model"}])
def test_nothing_to_check(config: dict[str, Any] | None, tmp_path: Path, run: Run) -> None:
    net = tmp_path / "net.pth"
    torch.save({"fc.weight": torch.ones(2)}, net)
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    done = run("check", net)
    assert done.code == 2 and "nothing to check" in done.stderr and not done.stdout
    (hint,) = commands_in(done.stderr)
    done = run(*hint[1:])
    assert (done.code, done.stdout) == (0, f"{net}: passes 1 expectation\n")


def test_stacked_experts_are_counted(tmp_path: Path, run: Run) -> None:
    stacked = {"model.layers.0.mlp.experts.down_proj": torch.zeros(4, 2, 2)}
    save_file(stacked, tmp_path / "m.safetensors")
    (tmp_path / "config.json").write_text('{"num_experts": 8}')
    done = run("check", tmp_path / "m.safetensors")
    assert "num_experts is 8, but the tensors have 4 experts" in done.stdout


MODEL_CODE = """
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 2)
"""


@pytest.mark.parametrize("kind", ["file", "index", "class"])
def test_like(kind: str, tmp_path: Path, run: Run, ok: Ok) -> None:
    good = {"fc.weight": torch.ones(2, 4), "fc.bias": torch.ones(2)}
    torch.save(good, tmp_path / "like.pth")
    index = {"weight_map": dict.fromkeys(good, "model-00001-of-00001.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "net.py").write_text(MODEL_CODE)
    others = {"file": "like.pth", "index": "model.safetensors.index.json", "class": "net.py:Net"}
    other = tmp_path / others[kind]
    torch.save({f"module.{name}": tensor for name, tensor in good.items()}, tmp_path / "a.pth")
    ok("strip-module", tmp_path / "a.pth", tmp_path / "b.pth", "--like", other)
    done = run("convert", tmp_path / "a.pth", tmp_path / "c.pth", "--like", other)
    assert done.code == 3
    assert "2 keys missing: 'fc.weight', 'fc.bias'; 2 keys unexpected" in done.stderr
    assert not (tmp_path / "c.pth").exists()
    torch.save({"fc.weight": torch.ones(2, 5), "fc.bias": torch.ones(2)}, tmp_path / "d.pth")
    done = run("convert", tmp_path / "d.pth", tmp_path / "e.safetensors", "--like", other)
    assert done.code == (0 if kind == "index" else 3)
    assert kind == "index" or "fc.weight [2, 5] instead of [2, 4]" in done.stderr
    assert run("check", tmp_path / "d.pth", "--like", other).code == (kind != "index")


@pytest.mark.parametrize("text", ["[]", "{", '{"weight_map": 3}'])
def test_what_is_no_index(text: str, tmp_path: Path, net: Path, run: Run) -> None:
    (tmp_path / "x.index.json").write_text(text)
    done = run("convert", net, tmp_path / "o.pth", "--like", tmp_path / "x.index.json")
    assert done.code == 2
