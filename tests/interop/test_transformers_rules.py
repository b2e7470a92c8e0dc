"""transformers in both of its layouts: each is made from the other by rules of its registry.

Tiny models with random weights; `save_pretrained` writes the layout of the files and that of the
model. Names, dtypes, shapes and bytes are compared, both ways, and the outputs of what was made.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import ckptkit
from tests.interop.conftest import Ckptkit, assert_same

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (extra: interop)"
)
pytest.importorskip("transformers.conversion_mapping", reason="transformers 5 has both layouts")
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

TINY: dict[str, Any] = {
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "num_hidden_layers": 2, "n_layer": 2, "num_attention_heads": 4,
    "n_head": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "vocab_size": 48, "max_position_embeddings": 64, "num_local_experts": 3,
    "num_experts": 3, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "first_k_dense_replace": 1, "ffn_dim": 24,
}  # fmt: skip

# Types with converters or renamings in the registry, and some without: those must stay as they are.
TYPES = (
    "mixtral", "minimax", "minimax_m2", "qwen2_moe", "qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3",
    "deepseek_v32", "dots1", "ernie4_5_moe", "glm4_moe", "glm4_moe_lite", "afmoe", "olmoe", "flex_olmo",
    "hunyuan_v1_moe", "phimoe", "jamba", "granitemoe", "granitemoeshared", "granitemoehybrid", "lfm2_moe",
    "longcat_flash", "solar_open", "cohere2_moe", "exaone_moe", "mellum", "glm_moe_dsa", "jetmoe", "gpt_oss",
    "dbrx", "nemotron_h", "bert", "roberta", "electra", "distilbert", "gpt2", "llama", "mistral", "qwen2", "qwen3",
    "gemma", "gemma2", "phi", "phi3", "gpt_neox", "falcon", "opt", "t5", "bart", "olmo2", "stablelm", "cohere",
    "starcoder2", "bloom", "mpt", "codegen", "gptj", "albert", "deberta", "xlm_roberta",
)  # fmt: skip
LEAST = 40


def tiny(model_type: str) -> Any:
    """A small model of the type, on the CPU."""
    config = transformers.AutoConfig.for_model(model_type)
    for name, value in TINY.items():
        if isinstance(getattr(config, name, None), int) and not isinstance(
            getattr(config, name), bool
        ):
            setattr(config, name, value)
    config = type(config)(
        **{
            k: v
            for k, v in config.to_dict().items()
            if not k.startswith(("layer_types", "mlp_layer", "rope"))
        }
    )
    torch.manual_seed(0)
    for name in (
        "AutoModelForCausalLM",
        "AutoModelForSeq2SeqLM",
        "AutoModelForMaskedLM",
        "AutoModel",
    ):
        try:
            return getattr(transformers, name).from_config(config)
        except ValueError:
            continue
    raise ValueError(f"no model class for {model_type}")


def both(model: Any, folder: Path) -> tuple[Path, Path]:
    paths = folder / "files", folder / "model"
    for path, original in zip(paths, (True, False), strict=True):
        model.save_pretrained(path, save_original_format=original)
    return paths


DONE: list[str] = []


@pytest.mark.parametrize("model_type", TYPES)
def test_each_layout_gives_the_other(model_type: str, tmp_path: Path) -> None:
    from ckptkit.compute.conversions import layouts_of_model
    from ckptkit.rules.generating import generated

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    try:
        model = tiny(model_type)
        files, new = both(model, tmp_path)
        a, b = (load_file(path / "model.safetensors") for path in (files, new))
    except Exception as error:  # a type that does not shrink in this way, in this version
        pytest.skip(f"no tiny {model_type}: {type(error).__name__} {str(error)[:80]}")
    layouts = layouts_of_model(model, model_type)
    found = generated(layouts)
    assert found.left == []
    if not found.lines:
        assert_same(a, b)
        DONE.append(model_type)
        return
    lines = [
        f"{left} ->? {right}" for left, _, right in (line.partition(" -> ") for line in found.lines)
    ]
    for source, expected, reverse in ((files, b, False), (new, a, True)):
        made = ckptkit.apply_rules(
            ckptkit.open(source / "model.safetensors"),
            lines,
            keep="rest",
            reverse=reverse,
            config=source_config(files),
        )
        ckptkit.save(made, tmp_path / "out.safetensors", force=True)
        assert_same(load_file(tmp_path / "out.safetensors"), expected)
    if model_type in OUTPUTS:
        assert_same_outputs(model, tmp_path)
    DONE.append(model_type)


def source_config(folder: Path) -> Any:
    from ckptkit.rules.config import read

    return read(str(folder / "config.json"))


OUTPUTS = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")


def assert_same_outputs(model: Any, folder: Path) -> None:
    """Assert that the folder loads as the model, with the same outputs."""
    (folder / "out.safetensors").replace(folder / "files" / "model.safetensors")
    again = type(model).from_pretrained(folder / "files")
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        ours, theirs = (each.eval()(tokens).logits for each in (again, model))
    assert torch.equal(ours, theirs)


def test_at_least_so_many_types() -> None:
    assert len(DONE) >= LEAST, f"{len(DONE)}: {DONE}"


def test_the_recipe_of_a_type(ckptkit: Ckptkit, tmp_path: Path) -> None:
    text = ckptkit("rules", "from-transformers", "mixtral")
    assert "experts.{e}.w{m:1|3}.weight [a b] -> " in text
    (tmp_path / "mixtral.yaml").write_text(text)
    from ckptkit.run.recipes import load

    assert load(str(tmp_path / "mixtral.yaml")).written
    ckptkit("rules", "from-transformers", "no_such_type", code=2)
