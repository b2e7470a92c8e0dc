"""GGUF files written by hand in the layouts of llama.cpp's script: each recipe, both ways."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conftest import Ok, Run
from tests.run.test_gguf import floats, model

State = dict[str, torch.Tensor]
rand = torch.randn


class Case(NamedTuple):
    """A model of two layers: metadata, tensors of the file, weights and config of Hugging Face."""

    values: dict[str, Any]
    file: State
    hf: State
    config: dict[str, Any]


def outer(case: Case, *names: str) -> None:
    """The embedding, the last norm and the head: the same in both layouts."""
    for old, new in zip(("token_embd", "output_norm", "output"), names, strict=True):
        case.hf[f"{new}.weight"] = case.file[f"{old}.weight"] = rand(
            *((8,) if "norm" in old else (6, 8))
        )


def alike(case: Case, old: str, new: str, *shape: int) -> None:
    case.hf[new] = case.file[old] = rand(*shape)


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """From the two halves of a head to pairs of neighbors."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


SIZES = {"block_count": 2, "embedding_length": 8, "attention__head_count": 4}
HF_SIZES = {"num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4}


def fused(names: tuple[str, ...], layers: str, config: dict[str, Any]) -> Case:
    """q, k and v of each head after one another, in the file all q first (BLOOM, GPT-NeoX)."""
    case = Case({**SIZES, "attention__layer_norm_epsilon": 0.5}, {}, {}, config)
    outer(case, *names)
    alike(case, "output_norm.bias", f"{names[1]}.bias", 8)
    attention = "self_attention" if layers == "transformer.h" else "attention"
    for n in "01":
        for old, new, *shape in (
            ("attn_norm", "input_layernorm", 8), ("ffn_norm", "post_attention_layernorm", 8),
            ("attn_output", f"{attention}.dense", 8, 8), ("ffn_up", "mlp.dense_h_to_4h", 12, 8),
            ("ffn_down", "mlp.dense_4h_to_h", 8, 12),
        ):  # fmt: skip
            alike(case, f"blk.{n}.{old}.weight", f"{layers}.{n}.{new}.weight", *shape)
            alike(case, f"blk.{n}.{old}.bias", f"{layers}.{n}.{new}.bias", shape[0])
        for word, weight in (("weight", rand(24, 8)), ("bias", rand(24))):
            rows = [weight[6 * h + 2 * p : 6 * h + 2 * p + 2] for p in range(3) for h in range(4)]
            case.file[f"blk.{n}.attn_qkv.{word}"] = torch.cat(rows)
            case.hf[f"{layers}.{n}.{attention}.query_key_value.{word}"] = weight
    return case


def bloom() -> Case:
    names = ("transformer.word_embeddings", "transformer.ln_f", "lm_head")
    config = {"n_layer": 2, "n_head": 4, "hidden_size": 8, "layer_norm_epsilon": 0.5}
    case = fused(names, "transformer.h", config)
    for word in ("weight", "bias"):
        new = f"transformer.word_embeddings_layernorm.{word}"
        alike(case, f"token_embd_norm.{word}", new, 8)
    return case


def gptneox() -> Case:
    names = ("gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out")
    case = fused(names, "gpt_neox.layers", {**HF_SIZES, "layer_norm_eps": 0.5, "rotary_pct": 0.5})
    case.values["rope__dimension_count"] = 1
    return case


GROUPS = {**SIZES, "attention__head_count_kv": 2}
HF_GROUPS = {**HF_SIZES, "num_key_value_heads": 2}


def internlm2() -> Case:
    """Per group two heads of q, then k, then v; in the file q and k have pairs of neighbors."""
    case = Case(GROUPS, {}, {}, {**HF_GROUPS, "bias": False})
    outer(case, "model.tok_embeddings", "model.norm", "output")
    for n in "01":
        for old, new, *shape in (
            ("attn_norm", "attention_norm", 8), ("ffn_norm", "ffn_norm", 8),
            ("attn_output", "attention.wo", 8, 16), ("ffn_gate", "feed_forward.w1", 12, 8),
            ("ffn_up", "feed_forward.w3", 12, 8), ("ffn_down", "feed_forward.w2", 8, 12),
        ):  # fmt: skip
            new = f"model.layers.{n}.{new}.weight"
            alike(case, f"blk.{n}.{old}.weight", new, *shape)
        q, k, v = rand(16, 8), rand(8, 8), rand(8, 8)
        case.file[f"blk.{n}.attn_q.weight"] = permuted(q, 4)
        case.file[f"blk.{n}.attn_k.weight"] = permuted(k, 2)
        case.file[f"blk.{n}.attn_v.weight"] = v
        wqkv = torch.cat([q[:8], k[:4], v[:4], q[8:], k[4:], v[4:]])
        case.hf[f"model.layers.{n}.attention.wqkv.weight"] = wqkv
    return case


def llama_like(case: Case, n: int, *, head_bias: bool = False, permute: bool = False) -> None:
    for p, hf, heads, rows in (("q", "q", 4, 16), ("k", "k", 2, 8), ("v", "v", 0, 8)):
        for word in ("weight", *["bias"] * head_bias):
            weight = rand(rows, 8) if word == "weight" else rand(rows)
            case.hf[f"model.layers.{n}.self_attn.{hf}_proj.{word}"] = weight
            turned = permuted(weight, heads) if permute and heads else weight
            case.file[f"blk.{n}.attn_{p}.{word}"] = turned
    alike(case, f"blk.{n}.attn_output.weight", f"model.layers.{n}.self_attn.o_proj.weight", 8, 16)


def mlp(case: Case, n: int, old: str, new: str, experts: int = 0) -> None:
    for p, *shape in (("gate", 12, 8), ("up", 12, 8), ("down", 8, 12)):
        each = [rand(*shape) for _ in range(experts or 1)]
        case.file[f"blk.{n}.ffn_{p}{old}.weight"] = torch.stack(each) if experts else each[0]
        for e, weight in enumerate(each):
            name = f"mlp.experts.{e}" if experts else new
            case.hf[f"model.layers.{n}.{name}.{p}_proj.weight"] = weight


def norms(case: Case, second: str, shift: int = 0) -> None:
    for n in (0, 1):
        for old, new in (("attn_norm", "input"), (second, "post_attention")):
            weight = case.hf[f"model.layers.{n}.{new}_layernorm.weight"] = rand(8)
            case.file[f"blk.{n}.{old}.weight"] = weight + shift


def deepseek() -> Case:
    values = {**GROUPS, "expert_count": 3, "expert_shared_count": 2, "expert_used_count": 1,
              "leading_dense_block_count": 1}  # fmt: skip
    config = {**HF_GROUPS, "n_routed_experts": 3, "n_shared_experts": 2, "num_experts_per_tok": 1,
              "first_k_dense_replace": 1}  # fmt: skip
    case = Case(values, {}, {}, config)
    outer(case, "model.embed_tokens", "model.norm", "lm_head")
    norms(case, "ffn_norm")
    for n in (0, 1):
        llama_like(case, n, permute=True)
    mlp(case, 0, "", "mlp")
    mlp(case, 1, "_exps", "", experts=3)
    mlp(case, 1, "_shexp", "mlp.shared_experts")
    alike(case, "blk.1.ffn_gate_inp.weight", "model.layers.1.mlp.gate.weight", 3, 8)
    return case


def gpt_oss() -> Case:
    values = {**GROUPS, "expert_count": 3, "rope__scaling__type": "yarn", "context_length": 64,
              "rope__scaling__factor": 32.0, "rope__scaling__original_context_length": 4096,
              "feed_forward_length": 99, "expert_feed_forward_length": 12}  # fmt: skip
    scaling = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
               "truncate": False}  # fmt: skip
    config = {**HF_GROUPS, "num_local_experts": 3, "intermediate_size": 12, "rope_scaling": scaling}
    case = Case(values, {}, {}, config)
    outer(case, "model.embed_tokens", "model.norm", "lm_head")
    norms(case, "post_attention_norm")
    for n in (0, 1):
        old, new = f"blk.{n}", f"model.layers.{n}"
        llama_like(case, n, head_bias=True)
        alike(case, f"{old}.attn_output.bias", f"{new}.self_attn.o_proj.bias", 8)
        alike(case, f"{old}.attn_sinks.weight", f"{new}.self_attn.sinks", 4)
        alike(case, f"{old}.ffn_gate_inp.weight", f"{new}.mlp.router.weight", 3, 8)
        alike(case, f"{old}.ffn_gate_inp.bias", f"{new}.mlp.router.bias", 3)
        alike(case, f"{old}.ffn_down_exps.bias", f"{new}.mlp.experts.down_proj_bias", 3, 8)
        both, bias, down = rand(3, 8, 24), rand(3, 24), rand(3, 12, 8)
        case.hf[f"{new}.mlp.experts.gate_up_proj"] = both
        case.hf[f"{new}.mlp.experts.gate_up_proj_bias"] = bias
        case.hf[f"{new}.mlp.experts.down_proj"] = down
        for start, p in enumerate(("gate", "up")):
            weight = both[:, :, start::2].transpose(1, 2).contiguous()
            case.file[f"{old}.ffn_{p}_exps.weight"] = weight
            case.file[f"{old}.ffn_{p}_exps.bias"] = bias[:, start::2].contiguous()
        case.file[f"{old}.ffn_down_exps.weight"] = down.transpose(1, 2).contiguous()
    return case


# Linear attention: 2 heads of q and k with 4 elements, 6 heads of v with 3.
LINEAR = {**GROUPS, "attention__key_length": 4, "rope__dimension_count": 1, "ssm__conv_kernel": 4,
          "ssm__state_size": 4, "ssm__group_count": 2, "ssm__time_step_rank": 6,
          "ssm__inner_size": 18}  # fmt: skip
HF_LINEAR = {
    **HF_GROUPS, "head_dim": 4, "partial_rotary_factor": 0.25, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 4, "linear_value_head_dim": 3, "linear_num_key_heads": 2,
    "linear_num_value_heads": 6, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip


def linear(experts: bool) -> Case:
    case = Case({**LINEAR, **({"expert_count": 3} if experts else {})}, {}, {}, {**HF_LINEAR})
    outer(case, "model.embed_tokens", "model.norm", "lm_head")
    case.file["output_norm.weight"] = case.hf["model.norm.weight"] + 1
    norms(case, "post_attention_norm", shift=1)
    llama_like(case, 1)
    for p in "qk":
        weight = case.hf[f"model.layers.1.self_attn.{p}_norm.weight"] = rand(4)
        case.file[f"blk.1.attn_{p}_norm.weight"] = weight + 1
    alike(case, "blk.0.ssm_norm.weight", "model.layers.0.linear_attn.norm.weight", 3)
    for n in (0, 1):
        mlp(case, n, "_exps" if experts else "", "mlp", experts=3 if experts else 0)
        if experts:
            case.config["num_experts"] = 3
            mlp(case, n, "_shexp", "mlp.shared_expert")
            old, new = f"blk.{n}.ffn_gate_inp", f"model.layers.{n}.mlp"
            alike(case, f"{old}.weight", f"{new}.gate.weight", 3, 8)
            alike(case, f"{old}_shexp.weight", f"{new}.shared_expert_gate.weight", 1, 8)
    return case


def qwen3next() -> Case:
    """Per head of k: q, k, three heads of v, three of z."""
    case = linear(experts=True)
    case.config["norm_topk_prob"] = True
    old, new = "blk.0", "model.layers.0.linear_attn"
    one, two = (rand(26, 8) for _ in range(2))
    case.hf[f"{new}.in_proj_qkvz.weight"] = torch.cat([one, two])
    rows = [each[a:b] for a, b in ((0, 4), (4, 8), (8, 17)) for each in (one, two)]
    case.file[f"{old}.attn_qkv.weight"] = torch.cat(rows)
    case.file[f"{old}.attn_gate.weight"] = torch.cat([one[17:], two[17:]])
    alike(case, f"{old}.ssm_ba.weight", f"{new}.in_proj_ba.weight", 12, 8)
    alike(case, f"{old}.ssm_out.weight", f"{new}.out_proj.weight", 8, 18)
    alike(case, f"{old}.ssm_dt.bias", f"{new}.dt_bias", 6)
    logarithm = case.hf[f"{new}.A_log"] = rand(6)
    case.file[f"{old}.ssm_a"] = -logarithm.exp()
    convolution = case.hf[f"{new}.conv1d.weight"] = rand(34, 1, 4)
    case.file[f"{old}.ssm_conv1d.weight"] = convolution[:, 0]
    return case


def qwen35(experts: bool = False) -> Case:
    """The heads of v: first all of the first head of k; in the file each head of k in turn."""
    case = linear(experts)
    old, new = "blk.0", "model.layers.0.linear_attn"
    order = torch.tensor([0, 3, 1, 4, 2, 5])
    rows = (3 * order[:, None] + torch.arange(3)).flatten()
    behind = torch.cat([torch.arange(16), 16 + rows])
    for name, theirs, where, *shape in (
        ("attn_qkv.weight", "in_proj_qkv.weight", behind, 34, 8),
        ("attn_gate.weight", "in_proj_z.weight", rows, 18, 8),
        ("ssm_alpha.weight", "in_proj_a.weight", order, 6, 8),
        ("ssm_beta.weight", "in_proj_b.weight", order, 6, 8),
        ("ssm_dt.bias", "dt_bias", order, 6),
    ):
        weight = case.hf[f"{new}.{theirs}"] = rand(*shape)
        case.file[f"{old}.{name}"] = weight[where]
    convolution = case.hf[f"{new}.conv1d.weight"] = rand(34, 1, 4)
    case.file[f"{old}.ssm_conv1d.weight"] = convolution[behind, 0]
    out = case.hf[f"{new}.out_proj.weight"] = rand(8, 18)
    case.file[f"{old}.ssm_out.weight"] = out[:, rows]
    logarithm = case.hf[f"{new}.A_log"] = rand(6)
    case.file[f"{old}.ssm_a"] = -logarithm[order].exp()
    return case


CASES: dict[str, Callable[[], Case]] = {
    "bloom": bloom, "gptneox": gptneox, "internlm2": internlm2, "deepseek": deepseek,
    "gpt-oss": gpt_oss, "qwen3next": qwen3next, "qwen35": qwen35,
    "qwen35moe": lambda: qwen35(experts=True),
}  # fmt: skip


def assert_close(found: State, expected: State, computed: tuple[str, ...]) -> None:
    """Equal; what is computed, to the rounding of float32."""
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        near = 1e-6 if name.endswith(computed) else 0.0
        torch.testing.assert_close(found[name], tensor, rtol=near, atol=near, msg=name)


@pytest.mark.parametrize("name", CASES)
def test_layout(name: str, tmp_path: Path, ok: Ok) -> None:
    torch.manual_seed(5)
    case = CASES[name]()
    tensors = [floats(each, tensor) for each, tensor in case.file.items()]
    source = model(tmp_path, name, tensors, **case.values)
    ok("run", "gguf", source, tmp_path / "hf")
    computed = ("norm.weight", "A_log", "ssm_a") if "qwen" in name else ("nothing",)
    assert_close(load_file(tmp_path / "hf" / "model.safetensors"), case.hf, computed)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert {key: config.get(key) for key in case.config} == case.config
    (tmp_path / "config.json").write_text(json.dumps(case.config))
    save_file(case.hf, tmp_path / "original.safetensors")
    back = tmp_path / "back.safetensors"
    words = ("--reverse", "--config", tmp_path / "config.json")
    ok("run", f"gguf-{name}", tmp_path / "original.safetensors", back, *words)
    assert_close(load_file(back), case.file, computed)
    ok("diff", source, tmp_path / "original.safetensors")
    ok("convert", tmp_path / "original.safetensors", tmp_path / "new.gguf", "--like", source)
    ok("convert", tmp_path / "new.gguf", tmp_path / "new.safetensors")
    assert_close(load_file(tmp_path / "new.safetensors"), case.file, computed)


@pytest.mark.parametrize("name", ["qwen3next", "qwen35", "qwen35moe"])
@pytest.mark.parametrize("key", ["ssm__group_count", "ssm__state_size", "ssm__inner_size"])
def test_sizes_that_do_not_fit(name: str, key: str, tmp_path: Path, run: Run) -> None:
    """Sizes that would cut q, k and v at other rows are refused."""
    case = CASES[name]()
    tensors = [floats(each, tensor) for each, tensor in case.file.items()]
    source = model(tmp_path, name, tensors, **{**case.values, key: 1})
    done = run("run", "gguf", source, tmp_path / "hf")
    assert (done.code, (tmp_path / "hf").exists()) == (3, False)
    assert "attn_qkv" in done.stderr
