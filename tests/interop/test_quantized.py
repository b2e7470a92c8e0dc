"""Tiny models, quantized by libraries or by ckptkit, dequantized by both: the same bytes, the same
logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import ckptkit
from tests.conftest import Run

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")


def tiny(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).bfloat16().eval()


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(12)[None]).logits
    return found


def dequantized(run: Run, source: Path, tmp_path: Path) -> dict[str, torch.Tensor]:
    done = run(
        "convert", source, tmp_path / "plain", "--dequantize", "bfloat16", "--format", "sharded"
    )
    assert done.code == 0, done.stderr
    return load_file(tmp_path / "plain" / "model.safetensors")


def assert_same_model(state: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    ours, other = tiny(1), tiny(2)
    ours.load_state_dict(state)
    other.load_state_dict({name: theirs[name].bfloat16() for name in state})
    assert torch.equal(logits(ours), logits(other))


@pytest.mark.parametrize("kind", ["fp8-block", "mxfp4"])
def test_what_ckptkit_quantizes_transformers_reads(kind: str, tmp_path: Path, run: Run) -> None:
    if kind == "mxfp4":
        pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    tiny().save_pretrained(tmp_path / "model")
    done = run(
        "convert", tmp_path / "model", tmp_path / "codes", "--format", "sharded", "--quantize", kind
    )
    assert done.code == 0, done.stderr
    state = dequantized(run, tmp_path / "codes", tmp_path)
    said: dict[str, Any] = {}
    if kind == "fp8-block":
        said["quantization_config"] = transformers.FineGrainedFP8Config(dequantize=True)
    else:
        said["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "codes", dtype=torch.bfloat16, **said
    )
    theirs = model.state_dict()
    for name, tensor in state.items():
        assert torch.equal(tensor, theirs[name]), name
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.bfloat16
    )
    assert torch.equal(logits(plain.eval()), logits(model.eval()))


def linears(model: Any) -> list[str]:
    names = model.named_modules()
    return [
        name for name, module in names if isinstance(module, torch.nn.Linear) and "head" not in name
    ]


def quantized_file(
    folder: Path, change: Callable[[str, torch.Tensor], dict[str, torch.Tensor]], config: Any
) -> Path:
    """The tiny model with each linear weight as `change` makes it."""
    model = tiny()
    state = model.state_dict()
    for name in linears(model):
        state |= change(name, state.pop(f"{name}.weight"))
    folder.mkdir()
    save_file(
        {name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(
        json.dumps({**model.config.to_dict(), "quantization_config": config})
    )
    return folder


@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 64), (3, 32)])
def test_compressed_tensors(bits: int, group: int, tmp_path: Path, run: Run) -> None:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors is not installed")
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    theirs: dict[str, torch.Tensor] = tiny().state_dict()
    half = 1 << (bits - 1)

    def change(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        blocks = weight.float().reshape(len(weight), -1, group)
        scale = (blocks.abs().amax(-1) / half).bfloat16()
        codes = (blocks / scale.float()[..., None]).round().clamp(-half, half - 1).to(torch.int8)
        product = codes.bfloat16() * scale[..., None]
        theirs[f"{name}.weight"] = product.reshape(weight.shape)
        packed = pack_to_int32(codes.reshape(weight.shape), bits)
        parts = {"packed": packed, "scale": scale, "shape": torch.tensor(weight.shape)}
        return {f"{name}.weight_{key}": each for key, each in parts.items()}

    scheme = {
        "num_bits": bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group,
    }
    config = {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
    }  # fmt: skip
    folder = quantized_file(tmp_path / "codes", change, config)
    state = dequantized(run, folder, tmp_path)
    for name, tensor in state.items():
        assert torch.equal(tensor, theirs[name]), name
    said = transformers.CompressedTensorsConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, quantization_config=said
    )
    plain = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "plain", dtype=torch.bfloat16
    )
    assert torch.equal(logits(plain.eval()), logits(model.eval()))


@pytest.mark.parametrize("kind", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_torchao(kind: str, tmp_path: Path, run: Run) -> None:
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = tiny()
    torchao.quantize_(model, getattr(torchao, kind)())
    torch.save(model.state_dict(), tmp_path / "codes.pth")
    theirs = {
        name: each.dequantize() if hasattr(each, "qdata") else each
        for name, each in model.state_dict().items()
    }
    assert any(hasattr(each, "qdata") for each in model.state_dict().values())
    done = run(
        "convert",
        tmp_path / "codes.pth",
        tmp_path / "plain.safetensors",
        "--dequantize",
        "bfloat16",
    )
    assert done.code == 0, done.stderr
    state = load_file(tmp_path / "plain.safetensors")
    for name, tensor in state.items():
        assert torch.equal(tensor, theirs[name].bfloat16()), name
    assert_same_model(state, theirs)
    if kind.startswith("Float8"):  # int8 applies its scales behind the product of matrices
        plain = tiny(1)
        plain.load_state_dict(state)
        assert torch.equal(logits(plain), logits(model))


def test_quanto(tmp_path: Path) -> None:
    quanto = pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed")
    model = tiny().float()
    quanto.quantize(model, weights=quanto.qint8)
    quanto.freeze(model)
    state = model.state_dict()
    save_file(
        {name: each.contiguous() for name, each in state.items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "quanto_qmap.json").write_text(json.dumps(quanto.quantization_map(model)))
    weights = ckptkit.load(
        ckptkit.dequantize(ckptkit.open(tmp_path / "model.safetensors"), "float32")
    )
    modules = dict(model.named_modules())
    for name, tensor in weights.items():
        theirs = getattr(modules[name.rpartition(".")[0]], name.rpartition(".")[2])
        theirs = theirs.dequantize() if hasattr(theirs, "dequantize") else theirs
        assert torch.equal(tensor, theirs.detach()), name
    plain = tiny(1).float()
    plain.load_state_dict(weights)
    assert torch.equal(logits(plain), logits(model))


def bits_and_bytes(**words: Any) -> Any:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    return transformers.BitsAndBytesConfig(**words)


def four_bits(kind: str, **words: Any) -> Any:
    return bits_and_bytes(load_in_4bit=True, bnb_4bit_quant_type=kind, **words)


def of_torchao(kind: str, **words: Any) -> Any:
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    return transformers.TorchAoConfig(getattr(torchao, kind)(**words))


QUANTIZERS = {
    "nf4": lambda: four_bits("nf4"),
    "nf4 nested, stored as bfloat16": lambda: four_bits(
        "nf4", bnb_4bit_use_double_quant=True, bnb_4bit_quant_storage=torch.bfloat16
    ),
    "fp4": lambda: four_bits("fp4"),
    "int8": lambda: bits_and_bytes(load_in_8bit=True),
    "torchao fp8": lambda: of_torchao("Float8WeightOnlyConfig"),
    "torchao int4": lambda: of_torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
}


@pytest.mark.parametrize("kind", QUANTIZERS)
def test_models_that_transformers_quantized_and_saved(kind: str, tmp_path: Path, run: Run) -> None:
    tiny().save_pretrained(tmp_path / "model")
    said = {"dtype": torch.bfloat16, "device_map": "cpu"}
    load = transformers.AutoModelForCausalLM.from_pretrained
    model = load(tmp_path / "model", quantization_config=QUANTIZERS[kind](), **said)
    model.save_pretrained(tmp_path / "codes")
    state = dequantized(run, tmp_path / "codes", tmp_path)
    plain = load(tmp_path / "plain", **said).eval()
    theirs = load(tmp_path / "codes", **said)
    if "torchao" not in kind:  # dequantized before its first use, which packs codes for the CPU
        theirs = theirs.dequantize()
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(state[name], tensor.to(state[name].dtype)), name
    assert torch.equal(logits(plain), logits(theirs.eval()))
