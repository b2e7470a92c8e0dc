"""transformers in both of its layouts: each is made from the other by rules of its registry.

Tiny models with random weights. `save_pretrained` writes the layout of the files and that of the
model; `ckptkit rules from-transformers` writes the recipe, and `ckptkit run` makes each from the
other. Names, dtypes and bytes are compared, and `from_pretrained` of what was made must give the
outputs of the model.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ckptkit.cli import main
from tests.interop.conftest import Ckptkit, assert_same

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (extra: interop)"
)
pytest.importorskip("transformers.conversion_mapping", reason="transformers 5 has both layouts")
import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

TINY: dict[str, int] = {
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "embed_dim": 32, "hidden_dim": 32, "vision_hidden_size": 32,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "depth": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 24, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "ffn_dim": 24,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "mlp_dim": 24, "vocab_size": 48, "max_position_embeddings": 64,
    "num_local_experts": 3, "num_experts": 3, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "index_head_dim": 8, "index_n_heads": 2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "image_token_id": 40, "image_token_index": 40,
    "video_token_id": 41, "audio_token_id": 42, "image_size": 32, "patch_size": 8, "projection_dim": 16,
    "image_seq_length": 16, "out_hidden_size": 32, "max_source_positions": 16, "max_target_positions": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "ffn_hidden_size": 24, "expert_ffn_hidden_size": 24, "zero_expert_num": 2, "moe_topk": 2, "n_groups": 2,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_num_heads": 4, "mamba_head_dim": 8,
}  # fmt: skip
# Given for each layer, or for the width of a head: of the large model.
OF_LAYERS = (
    "layer_types", "mlp_layer", "rope", "out_features", "out_indices", "stage_names", "per_layer_config", "_out",
    "num_attention_heads_per_layer", "kv_source_layers", "activation_sparsity_pattern",
)  # fmt: skip

# Sizes of some types that have to fit each other, also where the default is null or a list.
SMALL_DETECTOR = {
    "depths": [1, 1, 1, 1], "embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "encoder_in_channels": [32, 48, 64],
    "encoder_hidden_dim": 32, "decoder_in_channels": [32, 32, 32], "feat_strides": [8, 16, 32],
    "stage_in_channels": [16, 16, 32, 48], "stage_mid_channels": [8, 8, 8, 8], "stage_out_channels": [16, 32, 48, 64],
    "stage_num_blocks": [1, 1, 1, 1], "stem_channels": [3, 8, 16], "out_indices": [2, 3, 4], "num_queries": 10,
}  # fmt: skip
FITTING: dict[str, dict[str, Any]] = {
    "cosmos3_edge": {"head_dim": 128},
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse"]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "esm": {"vocab_size": 48},
    "kimi_linear": {"num_experts_per_token": 2, "num_expert_group": 1},
    "paddleocr_vl": {"head_dim": 128},
    "hunyuan_vl": {"head_dim": 8},
    "d_fine": SMALL_DETECTOR,
    "gemma3n_text": {
        "intermediate_size": 24,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 48,
    },
    "glm5_next": {"num_key_value_heads": 4, "qk_rope_head_dim": 0},
    "glm5_next_text": {"num_key_value_heads": 4, "qk_rope_head_dim": 0},
    "gradium_phonon_tts": {"condition_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 8},
    "inkling2": {"text_hidden_size": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "molmo2": {"vision_feature_layer": [1, 0]},
    "nemo_speechlm": {"audio_hidden_size": 32, "blank_token_id": 47},
    "pp_doclayout_v2": SMALL_DETECTOR,
    "pp_doclayout_v3": SMALL_DETECTOR,
    "pp_doclayout_v4": SMALL_DETECTOR,
    "rt_detr": SMALL_DETECTOR,
    "rt_detr_v2": SMALL_DETECTOR,
    "step3p7": {"sliding_window": 8},
    "tipsv2_dpt": {"neck_hidden_sizes": [16, 16, 32, 32], "fusion_hidden_size": 16},
    "lw_detr": {"image_size": 64, "num_windows": 4},
}

# Types with converters or renamings in the registry.
TYPES = (
    "afmoe", "altclip", "aria", "aria_text", "audioflamingo3", "axk1", "axk2", "aya_vision", "bailing_hybrid",
    "cohere2_moe", "cohere_asr", "cosmos3_edge", "cosmos3_omni", "d_fine", "deepseek_ocr2", "deepseek_v2",
    "deepseek_v3", "deepseek_v32", "deepseek_v4", "dinov3_convnext", "dinov3_vit", "dots1", "ernie4_5_moe", "esm",
    "exaone_moe", "flex_olmo", "flint", "fuyu", "gemma3", "glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm5_next",
    "glm5_next_text", "glm_moe_dsa", "glmasr", "got_ocr2", "gpt_neox", "gradium_phonon_tts", "granite_speech",
    "granite_speech_plus", "granitemoe", "granitemoehybrid", "granitemoeshared", "gte", "hrm_text",
    "hunyuan_v1_moe", "hunyuan_vl", "hy_v3", "hy_v4", "hyperclovax_vision_v2", "inkling2", "inkling2_text",
    "internvl", "jamba", "jina_embeddings_v3", "kimi_k25", "kimi_linear", "kolibri1", "laguna", "lfm3_vl_vision",
    "llava", "llava_next", "llava_next_video", "llava_onevision", "longcat_flash", "lw_detr", "maskformer",
    "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl", "mistral3", "mistral_large4",
    "mistral_large4_text", "mixtral", "molmo2", "musicflamingo", "nemo_speechlm", "nemotron_h", "nomic_bert",
    "olmo_hybrid", "olmoe", "paddleocr_vl", "paligemma", "phimoe", "pi0", "pixio", "pp_chart2table",
    "pp_doclayout_v2", "pp_doclayout_v3", "pp_doclayout_v4", "qianfan_ocr", "qwen2_5_omni_thinker", "qwen2_audio",
    "qwen2_moe", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next", "qwen3_omni_moe_thinker", "qwen4_exp_text", "radio",
    "rt_detr", "rt_detr_v2", "sam3_tracker", "sam3_tracker_video", "sapiens2", "shieldgemma2", "solar_open",
    "step3p7", "swin", "timesfm2_5", "tipsv2", "tipsv2_dpt", "unlimited_ocr", "video_llava", "videomae", "vipllava",
    "voxtral", "voxtral_realtime", "yolos",
)  # fmt: skip
# Heads are not shared: multi-head latent attention; some types cut q k v in thirds.
LATENT = (
    "axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa",
    "gradium_phonon_tts", "kimi_k25", "longcat_flash", "nemo_speechlm", "mistral_large4", "mistral_large4_text",
)  # fmt: skip
# Types that do not run in these sizes: their bytes are compared, not their outputs.
STILL = (
    "altclip", "bailing_hybrid", "cohere_asr", "esm", "glm4v_moe", "hunyuan_vl", "lfm3_vl_vision", "longcat_flash",
    "lw_detr", "pi0", "pp_doclayout_v2", "pp_doclayout_v3", "qwen2_5_omni_thinker", "sam3_tracker",
    "sam3_tracker_video", "sapiens2", "swin", "timesfm2_5", "tipsv2_dpt", "voxtral_realtime",
)  # fmt: skip
# Types whose files transformers itself does not load again as it saved them: bytes are compared.
UNLOADED = ("shieldgemma2",)
# Types whose layouts are the same.
PLAIN = (
    "jetmoe", "gpt_oss", "bert", "roberta", "electra", "distilbert", "gpt2", "llama", "mistral", "qwen2", "qwen3",
    "gemma", "gemma2", "phi", "phi3", "opt", "t5", "bart", "olmo2", "stablelm", "cohere", "starcoder2",
    "bloom", "mpt", "codegen", "gptj", "albert", "deberta", "xlm-roberta", "beam", "colqwen2", "emu3", "gemma3n_text",
    "gemma4_unified", "lfm2_moe", "lfm3", "mlcd", "mllama", "qwen3_5_text"
)  # fmt: skip
CLASSES = (
    "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModel",
    "AutoModelForMultimodalLM", "AutoModelForObjectDetection", "AutoModelForDepthEstimation", "AutoModelForPreTraining",
)  # fmt: skip


def shrunk(
    config: Mapping[Any, Any], sizes: Mapping[str, int], fitting: Mapping[str, Any]
) -> dict[Any, Any]:
    """The configuration with small sizes, and those of its parts."""
    small: dict[Any, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            value = shrunk(value, sizes, fitting)
        elif type(value) is int or name in fitting or name == "num_experts_per_tok":
            value = fitting.get(name, sizes.get(name, value))
        if name in fitting or not str(name).startswith(OF_LAYERS):
            small[name] = value
    return small


def tiny(model_type: str) -> Any:
    """A small model of the type, on the CPU."""
    try:
        config = transformers.AutoConfig.for_model(model_type)
    except ValueError:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    sizes = {**TINY, "num_key_value_heads": 4} if model_type in LATENT else TINY
    config = type(config)(**shrunk(config.to_dict(), sizes, FITTING.get(model_type, {})))
    torch.manual_seed(0)
    for name in CLASSES:
        try:
            return getattr(transformers, name).from_config(config).eval()
        except ValueError:
            continue
    raise ValueError(f"no model class for {model_type}")


def both(model: Any, folder: Path) -> tuple[Path, Path]:
    """The folders that `save_pretrained` writes: the layout of the files, that of the model."""
    paths = folder / "files", folder / "model"
    for path, original in zip(paths, (True, False), strict=True):
        model.save_pretrained(path, save_original_format=original)
    return paths


def given_to(model: Any) -> dict[str, torch.Tensor]:
    """An input: a few words, or a picture."""
    if model.config.model_type == "videomae":
        return {"pixel_values": torch.linspace(0, 1, 16 * 3 * 32 * 32).reshape(1, 16, 3, 32, 32)}
    if model.main_input_name == "pixel_values":
        picture = getattr(model.config, "image_size", TINY["image_size"])
        side = picture if isinstance(picture, int) else TINY["image_size"]
        return {"pixel_values": torch.linspace(0, 1, 3 * side * side).reshape(1, 3, side, side)}
    words = torch.arange(3, 11)[None]
    more = {"decoder_input_ids": words} if model.config.is_encoder_decoder else {}
    return {"input_ids": words, **more}


def outputs(model: Any) -> dict[str, torch.Tensor]:
    given = given_to(model)
    more = {"use_cache": False} if "input_ids" in given else {}
    with torch.no_grad():
        return dict(tensors(model(**given, **more)))


def aligned(model: Any) -> Any:
    """The model with weights in memory of its own: sums depend on where in memory numbers are."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of an output, each with its path."""
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    parts: list[tuple[Any, Any]] = []
    if isinstance(value, Mapping):
        parts = list(value.items())
    elif isinstance(value, (tuple, list)):
        parts = list(enumerate(value))
    for name, part in parts:
        yield from tensors(part, f"{path}.{name}")


def command(*args: object) -> str:
    """Run ckptkit in this process, which has imported what takes long; return its output."""
    result = CliRunner().invoke(main, [*map(str, args)])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("model_type", TYPES)
def test_each_layout_gives_the_other(model_type: str, tmp_path: Path) -> None:
    transformers.logging.set_verbosity_error()
    model = tiny(model_type)
    files, stacked = both(model, tmp_path)
    expected = {} if model_type in STILL else outputs(model)
    assert expected or model_type in STILL
    assert all(each.isfinite().all() for each in expected.values())
    recipe = tmp_path / "recipe.yaml"
    config = files / "config.json"
    recipe.write_text(command("rules", "from-transformers", model_type, "--config", config))
    for source, target, way in ((files, stacked, []), (stacked, files, ["--reverse"])):
        made = tmp_path / f"from-{source.name}"
        made.mkdir()
        shutil.copy(target / "config.json", made)
        weights = "model.safetensors"
        command("run", recipe, source / weights, made / weights, "--config", config, *way)
        assert_same(load_file(made / weights), load_file(target / weights))
        if model_type in UNLOADED:
            continue
        again, info = type(model).from_pretrained(made, output_loading_info=True)
        assert not any(info.values()), info
        if expected:
            assert_same(outputs(aligned(again.eval())), expected)


def test_at_least_so_many_types() -> None:
    assert len({*TYPES} - {*STILL} - {*UNLOADED}) >= 101
    assert len(TYPES) >= 122


@pytest.mark.parametrize("model_type", PLAIN)
def test_one_layout_needs_no_rules(model_type: str, tmp_path: Path) -> None:
    from ckptkit.rules.from_transformers import generated, layouts_of_model

    model = tiny(model_type)
    assert_same(*(load_file(path / "model.safetensors") for path in both(model, tmp_path)))
    found = generated(layouts_of_model(model, model_type))
    assert found.steps == [] and found.left == []


def test_the_recipe_of_a_type(ckptkit: Ckptkit, tmp_path: Path) -> None:
    text = ckptkit("rules", "from-transformers", "mixtral")
    assert "experts.{e}.w{m:1|3}.weight [a b] -> " in text
    (tmp_path / "mixtral.yaml").write_text(text)
    from ckptkit.run.recipes import load

    assert load(str(tmp_path / "mixtral.yaml")).written
    ckptkit("rules", "from-transformers", "no_such_type", code=2)
