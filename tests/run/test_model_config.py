"""config.json from the arguments of a training, and the recipe that makes a Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import Run
from tests.formats.parallel.making import arguments, mcore, megatron

VECTORS = Path(os.environ.get("CKPTKIT_VECTORS", "/nowhere")) / "parallel"

LLAMA = {
    "normalization": "RMSNorm", "position_embedding_type": "rope", "ffn_hidden_size": 12, "max_position_embeddings": 32,
    "group_query_attention": True, "norm_epsilon": 1e-6, "rotary_base": 5e5, "add_bias_linear": False,
}  # fmt: skip
EXPECTED = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "hidden_size": 8,
    "intermediate_size": 12, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 2,
    "max_position_embeddings": 32, "rms_norm_eps": 1e-6, "rope_theta": 5e5, "num_key_value_heads": 2, "vocab_size": 16,
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip


def saved(folder: Path, **said: Any) -> Path:
    return megatron(folder, mcore(4), [[[0, 1]], [[2, 3]]], tp=2, **{**LLAMA, **said})


class TestMegatronLlama:
    def test_a_folder_with_its_config(self, run: Run, tmp_path: Path) -> None:
        saved(tmp_path / "in")
        run("run", "megatron-llama", tmp_path / "in", tmp_path / "out")
        assert json.loads((tmp_path / "out" / "config.json").read_text()) == EXPECTED
        state = load_file(tmp_path / "out" / "model.safetensors")
        assert state["model.embed_tokens.weight"].shape == (16, 8)
        assert state["model.layers.3.self_attn.k_proj.weight"].shape == (4, 8)

    def test_rows_of_padding_are_cut_where_the_vocabulary_is_said(
        self, run: Run, tmp_path: Path
    ) -> None:
        saved(tmp_path / "in")
        run("run", "megatron-llama", tmp_path / "in", tmp_path / "out", "--arg", "vocab=13")
        assert json.loads((tmp_path / "out" / "config.json").read_text())["vocab_size"] == 13
        state = load_file(tmp_path / "out" / "model.safetensors")
        assert state["lm_head.weight"].shape == state["model.embed_tokens.weight"].shape == (13, 8)

    @pytest.mark.parametrize(
        ("said", "message"),
        [
            ({"swiglu": False}, "args.swiglu is False"),
            ({"num_experts": 4}, "args.num_experts is 4"),
            ({"normalization": "x" * 1000}, "args.normalization is 'xx"),
            ({"hidden_size": [1, 2]}, "hidden_size must be a short scalar or string, but is "),
            ({"max_position_embeddings": 10**60},
             "max_position_embeddings must be a short scalar or string, but is 1000"),
            ({"params_dtype": None}, "args has no params_dtype"),
        ],
    )  # fmt: skip
    def test_arguments_that_do_not_fit(
        self, run: Run, tmp_path: Path, said: dict[str, Any], message: str
    ) -> None:
        state, args = mcore(2), {**LLAMA, **said}
        folder = tmp_path / "in" / "iter_0000001" / "mp_rank_00"
        folder.mkdir(parents=True)
        torch.save(
            {"model": state, "args": arguments(num_layers=2, **args), "checkpoint_version": 3.0},
            folder / "model_optim_rng.pt",
        )
        result = run("run", "megatron-llama", folder / "model_optim_rng.pt", tmp_path / "out")
        assert result.code == 3 and f"cannot make config.json: {message}" in result.stderr
        assert "--config" in result.stderr and not (tmp_path / "out").exists()

    def test_a_default_of_the_framework_is_said(self, run: Run, tmp_path: Path) -> None:
        saved(tmp_path / "in", norm_epsilon=None)
        result = run("run", "megatron-llama", tmp_path / "in", tmp_path / "out")
        assert "args has no norm_epsilon; config.json has 1e-05" in result.stdout

    def test_the_config_that_is_named_is_taken(self, run: Run, tmp_path: Path) -> None:
        saved(tmp_path / "in", swiglu=True, use_rope_scaling=True)
        named = {**EXPECTED, "rope_scaling": {"rope_type": "llama3"}}
        (tmp_path / "named.json").write_text(json.dumps(named))
        run(
            "run", "megatron-llama", tmp_path / "in", tmp_path / "out",
            "--config", tmp_path / "named.json",
        )  # fmt: skip
        assert json.loads((tmp_path / "out" / "config.json").read_text()) == named

    def test_and_back(self, run: Run, tmp_path: Path) -> None:
        saved(tmp_path / "in")
        run("extract", tmp_path / "in", tmp_path / "merged.pth", "--key", "model")
        run("run", "megatron-llama", tmp_path / "in", tmp_path / "out", "--arg", "vocab=13")
        back = ("run", "megatron-llama", tmp_path / "out", tmp_path / "back.pth", "--reverse")
        run(*back, "--arg", "pad=3")
        found, before = torch.load(tmp_path / "back.pth"), torch.load(tmp_path / "merged.pth")
        for key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            before[key][13:] = 0  # the padding was cut off
        assert sorted(found) == sorted(before)
        assert all(torch.equal(found[key], tensor) for key, tensor in before.items())

    @pytest.mark.parametrize("layout", ["tp1_pp1", "tp1_pp2", "tp2_pp1", "tp2_pp2"])
    def test_the_vectors(self, run: Run, tmp_path: Path, layout: str) -> None:
        source = VECTORS / f"mega_llama_{layout}"
        if not source.is_dir():
            pytest.skip("CKPTKIT_VECTORS names no folder with vectors of parallel layouts")
        shutil.copytree(source, tmp_path / "in", ignore=shutil.ignore_patterns("full*.pt"))
        run("run", "megatron-llama", tmp_path / "in", tmp_path / "out", "--arg", "vocab=53")
        state = load_file(tmp_path / "out" / "model.safetensors")
        full = torch.load(source / "full_hf.pt")
        assert sorted(state) == sorted(full)
        assert all(torch.equal(state[key], tensor) for key, tensor in full.items())


def test_a_suffix_says_more_than_the_recipe(run: Run, tmp_path: Path) -> None:
    saved(tmp_path / "in")
    result = run("run", "megatron-llama", tmp_path / "in", tmp_path / "out.safetensors")
    assert result.code == 0 and (tmp_path / "out.safetensors").is_file()
    assert len(load_file(tmp_path / "out.safetensors")) == 39
