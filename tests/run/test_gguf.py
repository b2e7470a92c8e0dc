"""Recipes of GGUF models, on models that llama.cpp's script converted, and on files by hand."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ckptkit.run import recipes
from ckptkit.run.recipes.gguf import models
from tests.conftest import Ok, Run
from tests.formats.gguf_files import Entry, made

VECTORS = Path(os.environ.get("CKPTKIT_VECTORS", "/nowhere"), "gguf")
CASES = sorted(VECTORS.glob("model-*/case.json")) + sorted(VECTORS.glob("quantized-*/case.json"))
NAMES = [name for name in recipes.names() if name.startswith("gguf-")]
needs_vectors = pytest.mark.skipif(not CASES, reason="CKPTKIT_VECTORS is not set")


def runs(case: Path) -> list[dict[str, Any]]:
    return [each for each in json.loads(case.read_text())["checks"] if each["do"] == "run"]


def assert_equal(found: Any, expected: Any, ulps: dict[str, int]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        ours = found[name]
        assert ours.shape == tensor.shape, name
        if name in ulps:
            apart = (ours.view(torch.int32) - tensor.view(torch.int32)).abs().max()
            assert apart <= ulps[name], name
        else:
            assert torch.equal(ours, tensor.to(ours.dtype)), name


@needs_vectors
@pytest.mark.parametrize("case", CASES, ids=lambda path: path.parent.name)
def test_vectors(case: Path, tmp_path: Path, ok: Ok) -> None:
    """By the recipe and by `gguf`; and back, with the sizes of config.json."""
    for check in runs(case):
        source, out = case.parent / check["source"], tmp_path / "out.safetensors"
        expected = load_file(case.parent / check["expect"])
        dtype = ["--dequantize", check["dequantize"]] if check["dequantize"] else []
        for recipe in (check["recipe"], "gguf"):
            ok("run", recipe, source, out, *dtype, "--force")
            found = load_file(out)
            assert_equal(found, expected, check.get("ulps", {}))
        if check["dequantize"]:
            assert torch.bfloat16 in {each.dtype for each in found.values()}
            continue
        assert {name: each.dtype for name, each in found.items()} == {
            name: each.dtype for name, each in expected.items()
        }
        config, back = case.parent / "config.hf.json", tmp_path / "back.safetensors"
        ok("run", check["recipe"], out, back, "--reverse", "--config", config)
        ok("convert", source, tmp_path / "plain.safetensors")
        plain, again = load_file(tmp_path / "plain.safetensors"), load_file(back)
        assert sorted(plain) == sorted(again)
        for name, tensor in plain.items():
            torch.testing.assert_close(again[name], tensor, rtol=2**-22, atol=0)


# Fields that transformers fills with its defaults, or that belong to the tokenizer of the vectors.
OTHER = {"bos_token_id", "eos_token_id", "n_inner", "partial_rotary_factor", "multi_query",
         "pad_token_id", "norm_topk_prob"}  # fmt: skip


@needs_vectors
@pytest.mark.parametrize("case", CASES, ids=lambda path: path.parent.name)
def test_config_of_the_vectors(case: Path, tmp_path: Path, ok: Ok) -> None:
    """config.json has the values of the model that was converted."""
    original = case.parent / "config.hf.json"
    if not original.exists():
        original = case.parent / "hf" / "config.json"
    expected = json.loads(original.read_text())
    expected["rope_theta"] = (expected.get("rope_parameters") or {}).get("rope_theta")
    expected["num_experts"] = expected.get("num_local_experts")
    said = ok("run", "gguf", case.parent / "model.gguf", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    for field, value in config.items():
        assert field in OTHER or value == expected[field], field
    assert {"model_type", "vocab_size", "architectures"} <= {*config}
    assert ("a GGUF file has no pooler" in said) == (config["model_type"] == "bert")
    assert ("n_group" in said) == (config["model_type"] == "deepseek_v2")


# By hand


def entry(name: str, *shape: int) -> Entry:
    data = np.arange(np.prod(shape), dtype="<f4") + 1
    return Entry(name, shape, 0, data.tobytes())


BLOCK = ("attn_norm.weight", "ffn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight",
         "attn_output.weight", "ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")  # fmt: skip
LLAMA = [
    entry("token_embd.weight", 5, 8),
    entry("output_norm.weight", 8),
    entry("rope_freqs.weight", 2),
    *(entry(f"blk.0.{name}", *((8,) if "norm" in name else (8, 8))) for name in BLOCK),
]


def model(folder: Path, architecture: str, tensors: list[Entry], **values: Any) -> Path:
    """A file with this architecture; a value is named with _ instead of dots."""
    keys = {f"{architecture}.{key.replace('__', '.')}": value for key, value in values.items()}
    path = folder / "model.gguf"
    path.write_bytes(made({"general.architecture": architecture, **keys}.items(), tensors))
    return path


def test_llama_by_hand(tmp_path: Path, ok: Ok) -> None:
    """Heads of q turned, k by its own heads; the head is tied, the rotary factors a note."""
    source = model(
        tmp_path, "llama", LLAMA, attention__head_count=4, attention__head_count_kv=2,
        embedding_length=8, attention__layer_norm_rms_epsilon=1e-5,
    )  # fmt: skip
    said = ok("run", "gguf", source, tmp_path / "hf")
    assert "does not contain the rotary scaling in 'rope_freqs.weight'" in said
    assert "used the recipe gguf-llama" in said
    found = load_file(tmp_path / "hf" / "model.safetensors")
    weight = torch.arange(64.0).view(8, 8) + 1
    assert "lm_head.weight" not in found
    for p, heads in (("q", 4), ("k", 2)):
        turned = weight.view(heads, -1, 2, 8).transpose(1, 2).reshape(8, 8)
        assert torch.equal(found[f"model.layers.0.self_attn.{p}_proj.weight"], turned)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["vocab_size"] == 5
    assert config["rms_norm_eps"] == 1e-5
    untied = model(tmp_path, "llama", [*LLAMA, entry("output.weight", 5, 8)],
                   attention__head_count=4)  # fmt: skip
    ok("run", "gguf", untied, tmp_path / "untied")
    assert "lm_head.weight" in load_file(tmp_path / "untied" / "model.safetensors")
    config = json.loads((tmp_path / "untied" / "config.json").read_text())
    assert config["tie_word_embeddings"] is False


def test_variants() -> None:
    """Each architecture has its recipes, and each recipe an architecture."""
    chosen = {row.recipe or name for name, row in models().items()}
    variants = {row.variant[1] for row in models().values() if row.variant}
    assert {f"gguf-{name}" for name in {*chosen, *variants}} == {*NAMES}


def config_for(
    folder: Path, ok: Ok, architecture: str, tensors: list[Entry], **values: Any
) -> tuple[dict[str, Any], str]:
    """The config.json of a file, and what the command printed."""
    shutil.rmtree(folder / "hf", ignore_errors=True)
    said = ok("run", "gguf", model(folder, architecture, tensors, **values), folder / "hf")
    found: dict[str, Any] = json.loads((folder / "hf" / "config.json").read_text())
    return found, said


def floats(name: str, values: torch.Tensor) -> Entry:
    return Entry(name, tuple(values.shape), 0, values.float().numpy().astype("<f4").tobytes())


HEADS = {"attention__head_count": 4, "attention__head_count_kv": 2}


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_scaling_of_llama_3(factor: float, tmp_path: Path, ok: Ok) -> None:
    """Factors by the formula of transformers; others stay a note."""
    wavelengths = 2 * torch.pi * 500_000.0 ** (torch.arange(0, 128, 2).float() / 128)
    smooth = ((8192 / wavelengths - 1) / 3).clamp(0, 1)
    factors = 1 / ((1 - smooth) / factor + smooth)
    values = {**HEADS, "rope__freq_base": 500_000.0}
    tensors = [*LLAMA[:2], *LLAMA[3:]]
    scaled = [*tensors, floats("rope_freqs.weight", factors)]
    config, said = config_for(tmp_path, ok, "llama", scaled, **values)
    assert config["rope_scaling"] == {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    assert "rotary" not in said
    other = [*tensors, floats("rope_freqs.weight", factors * 1.01)]
    config, said = config_for(tmp_path, ok, "llama", other, **values)
    assert "rope_scaling" not in config
    assert "does not contain the rotary scaling in 'rope_freqs.weight'" in said
    ones = [*tensors, floats("rope_freqs.weight", torch.ones(64))]
    config, said = config_for(tmp_path, ok, "llama", ones, **values)
    assert "rope_scaling" not in config and "rotary" not in said


def test_scaling_by_the_metadata(tmp_path: Path, ok: Ok) -> None:
    tensors = [*LLAMA[:2], *LLAMA[3:]]

    def scaling(**values: Any) -> tuple[Any, bool]:
        given = {f"rope__scaling__{key}": value for key, value in values.items()}
        found, said = config_for(tmp_path, ok, "llama", tensors, **HEADS, **given)
        return found.get("rope_scaling"), "does not contain the rotary scaling" in said

    assert scaling(type="linear", factor=4.0) == ({"rope_type": "linear", "factor": 4.0}, False)
    yarn = {"type": "yarn", "factor": 40.0, "original_context_length": 4096}
    made = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}
    assert scaling(**yarn) == (made, False)
    both = {"mscale": 0.707, "mscale_all_dim": 0.707}
    assert scaling(**yarn, yarn_log_multiplier=0.0707) == (made | both, False)
    fast = scaling(**yarn, yarn_beta_fast=32.0, yarn_beta_slow=1.0)
    assert fast == (made | {"beta_fast": 32.0, "beta_slow": 1.0}, False)
    assert scaling(**yarn, yarn_log_multiplier=1e38) == (made, False)
    assert scaling(type="none") == (None, False)
    assert scaling(type=7) == (None, True)
    assert scaling(type="other", factor=2.0) == (None, True)
    assert scaling(**yarn, attn_factor=1.5) == (made, True)


@pytest.mark.parametrize("factors", [[0.0, 8.0], [-1.0, 8.0], [float("nan")] * 2, [], [8.0] * 5000])
def test_factors_that_are_none(factors: list[float], tmp_path: Path, ok: Ok) -> None:
    """Numbers that no converter writes: a note, without a value made up."""
    tensors = [*LLAMA[:2], *LLAMA[3:], floats("rope_freqs.weight", torch.tensor(factors))]
    for base in (10_000.0, 0.0, -1.0):
        config, said = config_for(tmp_path, ok, "llama", tensors, **HEADS, rope__freq_base=base)
        assert "rope_scaling" not in config
        assert "does not contain the rotary scaling in 'rope_freqs.weight'" in said
    source = model(tmp_path, "llama", tensors, **HEADS, rope__freq_base="many")
    printed = ok("run", "gguf", source, tmp_path / "other")
    assert "llama.rope.freq_base must be a finite number, but is 'many'" in printed


def test_scaling_of_long_phi_3(tmp_path: Path, ok: Ok) -> None:
    names = ("attn_norm", "ffn_norm", "attn_qkv", "attn_output", "ffn_up", "ffn_down")
    tensors = [
        *LLAMA[:2],
        *(entry(f"blk.0.{name}.weight", *((8,) if "norm" in name else (8, 8))) for name in names),
        floats("rope_factors_long.weight", torch.tensor([1.08, 4.5])),
        floats("rope_factors_short.weight", torch.tensor([1.0, 1.05])),
    ]
    config, said = config_for(
        tmp_path,
        ok,
        "phi3",
        tensors,
        **HEADS,
        rope__scaling__original_context_length=4096,
        rope__scaling__attn_factor=1.19,
        context_length=131072,
    )
    scaling = {"type": "longrope", "long_factor": [1.08, 4.5], "short_factor": [1.0, 1.05]}
    assert config["rope_scaling"] == scaling
    assert config["original_max_position_embeddings"] == 4096
    assert "rotary" not in said


@pytest.mark.parametrize(
    "architecture, layers, found",
    [("gemma2", 46, 144), ("gemma2", 42, None), ("gemma3", 62, 144), ("gemma3", 46, None)],
)
def test_scale_of_gemma_27b(
    architecture: str, layers: int, found: int | None, tmp_path: Path, ok: Ok
) -> None:
    norms = [entry(f"blk.0.{each}_norm.weight", 8) for each in ("post_attention", "post_ffw")]
    tensors = [*LLAMA[:2], *LLAMA[3:], *norms]
    sizes = {"block_count": layers, "embedding_length": 4608, "attention__head_count": 32}
    config, _ = config_for(tmp_path, ok, architecture, tensors, **sizes)
    assert config.get("query_pre_attn_scalar") == found


def test_config_of_deepseek(tmp_path: Path, ok: Ok) -> None:
    """V3 by the bias of its experts; sizes of old files, with kv_b whole; groups of V2."""
    names = ["attn_q", "attn_kv_a_mqa", "attn_kv_b", "attn_output"]
    tensors = [
        *LLAMA[:2], *(entry(f"blk.0.{each}.weight", 4, 8) for each in names),
        *(entry(f"blk.0.{each}.weight", 8) for each in ("attn_norm", "ffn_norm", "attn_kv_a_norm")),
    ]  # fmt: skip
    old = {"attention__head_count": 2, "attention__head_count_kv": 2, "attention__key_length": 6,
           "attention__value_length": 4, "rope__dimension_count": 2}  # fmt: skip
    groups = {"expert_group_count": 8, "expert_group_used_count": 3}
    config, said = config_for(tmp_path, ok, "deepseek2", tensors, **old, **groups)
    assert config["model_type"] == "deepseek_v2" and "n_group" not in said
    assert (config["qk_nope_head_dim"], config["qk_rope_head_dim"]) == (4, 2)
    assert (config["v_head_dim"], config["num_key_value_heads"]) == (4, 2)
    assert (config["topk_method"], config["n_group"]) == ("group_limited_greedy", 8)
    bias = [*tensors, entry("blk.0.exp_probs_b.bias", 4)]
    for more, values in ((bias, {}), (tensors, {"expert_gating_func": 2})):
        config, said = config_for(tmp_path, ok, "deepseek2", more, **old, **values)
        assert config["architectures"] == ["DeepseekV3ForCausalLM"]
        assert "n_group and topk_group have the defaults" in said


@pytest.mark.parametrize("shape", [(8,), (1, 8)])
def test_gates_of_old_files(shape: tuple[int, ...], tmp_path: Path, ok: Ok) -> None:
    tensors = [*LLAMA[:2], *LLAMA[3:], entry("blk.0.ffn_gate_inp_shexp.weight", *shape)]
    config_for(tmp_path, ok, "qwen2moe", tensors, **HEADS)
    found = load_file(tmp_path / "hf" / "model.safetensors")
    gate = found["model.layers.0.mlp.shared_expert_gate.weight"]
    assert torch.equal(gate, torch.arange(8.0)[None] + 1)
    ok("diff", tmp_path / "model.gguf", tmp_path / "hf")
    ok("convert", tmp_path / "hf", tmp_path / "back.gguf", "--like", tmp_path / "model.gguf")
    assert (tmp_path / "back.gguf").read_bytes() == (tmp_path / "model.gguf").read_bytes()


@pytest.mark.parametrize("with_gate", [True, False])
def test_t5_with_a_gate_and_without(with_gate: bool, tmp_path: Path, ok: Ok) -> None:
    names = ["attn_q", "attn_k", "attn_v", "attn_o", "attn_rel_b", "attn_norm", "ffn_up",
             "ffn_down", "ffn_norm", *(["ffn_gate"] * with_gate)]  # fmt: skip
    tensors = [entry(f"enc.blk.0.{name}.weight", 4, 4) for name in names]
    tensors += [entry("token_embd.weight", 5, 4), entry("enc.output_norm.weight", 4)]
    ok("run", "gguf", model(tmp_path, "t5encoder", tensors), tmp_path / "hf")
    found = load_file(tmp_path / "hf" / "model.safetensors")
    dense = "encoder.block.0.layer.1.DenseReluDense"
    wi = {f"{dense}.wi_0.weight", f"{dense}.wi_1.weight"} if with_gate else {f"{dense}.wi.weight"}
    assert {name for name in found if ".wi" in name} == wi
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["feed_forward_proj"] == ("gated-gelu" if with_gate else "relu")
    assert config.get("scale_decoder_outputs", True) is not with_gate


def test_other_files_are_refused(tmp_path: Path, run: Run) -> None:
    out = tmp_path / "out.safetensors"

    def refused(recipe: str, source: Path, said: str, *words: str) -> None:
        done = run("run", recipe, source, out, *words)
        assert done.code in (2, 3), done.stdout
        assert said in done.stderr
        assert not out.exists()

    other = model(tmp_path, "qwen99", LLAMA, attention__head_count=4)
    refused("gguf", other, "there is no recipe for the architecture 'qwen99'")
    refused("gguf-llama", other, "general.architecture is 'qwen99', but this recipe is for llama")
    keys = [("general.architecture", "llama"), ("general.type", "adapter")]
    (tmp_path / "lora.gguf").write_bytes(made(keys, LLAMA[:1]))
    refused("gguf", tmp_path / "lora.gguf", "is not a model: its general.type is 'adapter'")
    (tmp_path / "plain.gguf").write_bytes(made([("general.name", "x")], LLAMA))
    refused("gguf", tmp_path / "plain.gguf", "has no general.architecture")
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pth")
    refused("gguf", tmp_path / "a.pth", "has no general.architecture")
    refused("gguf", tmp_path / "a.pth", "not reversible: step 1 (recipe)", "--reverse")
    refused("mixtral", tmp_path / "a.pth", "has no step dequantize", "--dequantize", "float16")
    lists = model(tmp_path, "llama", LLAMA, attention__head_count=[4, 4])
    said = "llama.attention.head_count must be a finite number, but is a list"
    refused("gguf-llama", lists, said)
    refused("gguf-llama", model(tmp_path, "llama", LLAMA), "meta.attention.head_count")
    for heads, said in ((3, "divisible"), (0, "the size h is 0")):
        source = model(tmp_path, "llama", LLAMA, attention__head_count=heads)
        refused("gguf-llama", source, said)
    odd = [*LLAMA, entry("blk.0.attn_q.scale")]
    scaled = model(tmp_path, "llama", odd, attention__head_count=4)
    refused("gguf", scaled, "'blk.0.attn_q.weight' must be multiplied by 'blk.0.attn_q.scale'")
    refused("gguf-llama", scaled, "model-new.pth` keeps both")  # no weight to dequantize
    odd = [*LLAMA, entry("blk.0.odd.weight")]
    other = model(tmp_path, "llama", odd, attention__head_count=4)
    refused("gguf-llama", other, "matched by no rule")


@pytest.mark.parametrize("value", [{"feed_forward_length": [8, 8]}, {"rope__freq_base": math.inf}])
def test_values_that_only_the_configuration_needs(
    value: dict[str, Any], tmp_path: Path, ok: Ok
) -> None:
    """The rules need neither; the note names the key."""
    source = model(tmp_path, "llama", LLAMA, attention__head_count=4, **value)
    for out in ("out.safetensors", "hf"):
        printed = ok("run", "gguf", source, tmp_path / out)
        (key,) = value
        said = " ".join(printed.split())
        assert f"cannot make config.json: llama.{key.replace('__', '.')} must be a finite" in said
        assert not (tmp_path / "hf" / "config.json").exists()


def test_an_unknown_type_is_named(tmp_path: Path, run: Run, ok: Ok) -> None:
    """By the name in the file, with the command that writes all other tensors."""
    tensors = [Entry(each.name, each.shape, 155, bytes(64)) if "ffn_up" in str(each.name) else each
               for each in LLAMA]  # fmt: skip
    source = model(tmp_path, "llama", tensors, **HEADS)
    done = run("run", "gguf", source, tmp_path / "hf")
    assert done.code == 3
    assert "cannot dequantize 'blk.0.ffn_up.weight' (gguf)" in done.stderr
    assert "its type 155 is unknown" in done.stderr
    assert "--dequantize bfloat16 --drop blk.0.ffn_up.weight` writes the other" in done.stderr
    words = ("convert", source, tmp_path / "out.safetensors", "--dequantize", "bfloat16")
    done = run(*words)
    assert done.code == 3
    assert "--drop blk.0.ffn_up.weight` drops such tensors" in done.stderr
    ok(*words, "--drop", "blk.0.ffn_up.weight")
    assert len(load_file(tmp_path / "out.safetensors")) == len(LLAMA) - 1
    done = run(*words, "--keys", "output_norm.*")
    assert done.code == 2
    assert "--dequantize bfloat16 --keep 'output_norm.*'`?" in done.stderr
    done = run("average", source, source, tmp_path / "mean.pth")
    assert "--drop blk.0.ffn_up.weight` writes the other tensors" in done.stderr
    done = run("lora", "check", source)  # `check` is no source whose suffix a DST could have
    assert done.code != 0 and "did you mean" not in done.stderr
    done = run("show", source, "blk.0.ffn_up.weight")
    assert "its elements have the unknown dtype ggml type 155" in done.stderr


# Rules on blocks


def blocks(rows: int, order: str = "<") -> tuple[bytes, torch.Tensor]:
    """Q8_0 of so many rows of 64 elements, and its numbers; the scales are powers of two."""
    codes = torch.arange(rows * 64, dtype=torch.int64).reshape(-1, 32) % 251 - 125
    scales = 2.0 ** -(torch.arange(len(codes)) % 7).double()
    data = b"".join(
        np.array(float(scale), dtype=f"{order}f2").tobytes() + bytes(n % 256 for n in row.tolist())
        for scale, row in zip(scales, codes, strict=True)
    )
    return data, (codes * scales[:, None]).float().reshape(rows, 64)


@pytest.mark.parametrize("order", ["<", ">"])
def test_rows_of_blocks_are_moved(order: str, tmp_path: Path, ok: Ok) -> None:
    """Permuted, split and stacked in blocks, and dequantized then; in both byte orders."""
    data, numbers = blocks(8, order)
    tensors = [Entry(f"{name}.weight", (8, 64), 8, data) for name in ("q", "a.0", "a.1")]
    (tmp_path / "m.gguf").write_bytes(made([("general.name", "x")], tensors, order=order))
    lines = [
        "q.weight [(h r two) i] -> q.weight [(h two r) i] with h=2 two=2",
        "a.{e}.weight [(p o) i] -> {p:x|y}.weight [e o i]",
    ]
    steps = [{"rules": lines}, {"dequantize": "float32"}]
    (tmp_path / "r.yaml").write_text(json.dumps({"steps": steps}))
    ok("run", tmp_path / "r.yaml", tmp_path / "m.gguf", tmp_path / "out.safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert torch.equal(found["q.weight"], numbers.view(2, 2, 2, 64).transpose(1, 2).reshape(8, 64))
    for name, part in zip("xy", numbers.view(2, 4, 64), strict=True):
        assert torch.equal(found[f"{name}.weight"], torch.stack([part, part]))


def test_blocks_are_not_cut(tmp_path: Path, run: Run, ok: Ok) -> None:
    data, _ = blocks(8)
    tensors = [Entry("q.weight", (8, 64), 8, data), Entry("k.weight", (8, 64), 2, bytes(16 * 18))]
    (tmp_path / "m.gguf").write_bytes(made([("general.name", "x")], tensors))
    for rule, said in (
        ("q.weight [o i] -> q.weight [i o]", "the rule cuts blocks of q.weight (Q8_0)"),
        ("q.weight [o (two d)] -> q.weight [(two o) d] with two=4", "the rule cuts blocks"),
        ("{p:q|k}.weight [o i] -> qk.weight [(p o) i]", "q.weight is Q8_0, but k.weight is Q4_0"),
    ):
        out = tmp_path / "out.safetensors"
        done = run("convert", tmp_path / "m.gguf", out, "--rule", rule)
        assert done.code == 3
        assert said in done.stderr
        assert "dequantize first: --dequantize bfloat16" in done.stderr
        words = ("--dequantize", "float32", "--force")
        ok("convert", tmp_path / "m.gguf", out, "--rule", rule, *words)
