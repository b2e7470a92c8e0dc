"""torchtitan: its adapters and the recipes make the same of each other's tensors, byte for byte."""

from __future__ import annotations

import re
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from tests.interop.conftest import Ckptkit, assert_same

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (extra: interop)"
)
pytest.importorskip("torchtitan", reason="torchtitan is not installed")
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

SIZES: dict[str, Any] = {
    "num_hidden_layers": 2, "vocab_size": 48, "intermediate_size": 24, "moe_intermediate_size": 24,
    "tie_word_embeddings": False,
}  # fmt: skip
GROUPED = {"hidden_size": 256, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 16}
LATENT = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "n_routed_experts": 8, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip

# By recipe: their module, their configuration, the model in transformers with its sizes.
CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    "torchtitan-llama3": ("llama3", "llama3_configs", "llama", GROUPED),
    "torchtitan-qwen3": ("qwen3", "qwen3_configs", "qwen3", GROUPED),
    "torchtitan-deepseek-v3": ("deepseek_v3", "deepseekv3_configs", "deepseek_v3", LATENT),
}  # fmt: skip


def adapter(module: str, configs: str) -> Any:
    package = import_module(f"torchtitan.models.{module}")
    wanted = {"attn_backend": "flex", "moe_comm_backend": "standard"}
    make = getattr(package, configs)["debugmodel"]
    config = make(**{word: wanted[word] for word in wanted if word in signature(make).parameters})
    adapters = import_module(f"torchtitan.models.{module}.state_dict_adapter")
    (made,) = (
        each
        for name, each in vars(adapters).items()
        if name.endswith("StateDictAdapter") and each.__module__ == adapters.__name__
    )
    return made(config, None)


def written_by(folder: Path, model_type: str, sizes: dict[str, Any]) -> Path:
    """What transformers saves: one matrix for each expert."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **SIZES, **sizes)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder / "model.safetensors"


@pytest.mark.parametrize("recipe", CASES)
def test_recipes_do_what_the_adapters_do(recipe: str, ckptkit: Ckptkit, tmp_path: Path) -> None:
    module, configs, model_type, sizes = CASES[recipe]
    source = written_by(tmp_path, model_type, sizes)
    ours = tmp_path / "ours.safetensors"
    theirs = adapter(module, configs).from_hf(load_file(source))
    ckptkit("run", recipe, source, ours, "--reverse")
    assert_same(load_file(ours), theirs)
    torch.save(theirs, tmp_path / "theirs.pth")
    ckptkit("run", recipe, tmp_path / "theirs.pth", tmp_path / "back.safetensors")
    assert_same(load_file(tmp_path / "back.safetensors"), load_file(source))


def test_names_of_gpt_oss_are_those_of_the_adapter(ckptkit: Ckptkit, tmp_path: Path) -> None:
    """It knows the files in MXFP4 alone, whose experts torchtitan puts together itself."""
    source = written_by(tmp_path, "gpt_oss", {**GROUPED, "num_local_experts": 2})
    ckptkit("run", "torchtitan-gpt-oss", source, tmp_path / "ours.safetensors", "--reverse")
    made = {
        re.sub("[0-9]+", "{}", name, count=1)
        for name in load_file(tmp_path / "ours.safetensors")
        if "layers" in name
    }
    known = adapter("gpt_oss", "gptoss_configs").from_hf_map.values()
    assert made == {name for name in known if "layers" in name}
