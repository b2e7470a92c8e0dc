"""GGUF models: the recipe of an architecture, and config.json made of the metadata.

Names and fields are those of llama.cpp (``gguf-py/gguf/constants.py``) and of transformers, which
makes the same fields of the same keys (``integrations/ggml.py``).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence, Sized
from typing import Any, NamedTuple

from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import UnsupportedError
from ckptkit.core.text import quoted, shown, some
from ckptkit.edits.rules import ARCHITECTURE, metadata

RECIPES = "gguf-"  # what the names of the recipes begin with
# Architectures with two layouts: the weight that tells them apart, and the recipe without it.
VARIANTS = {
    "falcon": ("blk.0.attn_norm_2.weight", "falcon-7b"),
    "t5": ("enc.blk.0.ffn_gate.weight", "t5-relu"),
    "t5encoder": ("enc.blk.0.ffn_gate.weight", "t5-relu"),
}
ALIASES = {"t5encoder": "t5"}
# Weights that a GGUF file has and Hugging Face has not: factors of rotary embeddings.
SCALING = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def architecture(checkpoint: Checkpoint) -> str | None:
    """Return ``general.architecture``, None for what is no GGUF file or has none."""
    root = checkpoint.root
    found = root.get(ARCHITECTURE) if isinstance(root, dict) else None
    return found if isinstance(found, str) else None


def recipe_name(checkpoint: Checkpoint, known: Sequence[str]) -> str:
    """Return the recipe of a GGUF file, one of `known`. Raises UnsupportedError without one."""
    found = architecture(checkpoint)
    root = checkpoint.root if isinstance(checkpoint.root, dict) else {}
    kind = root.get("general.type", "model")
    if found is None or kind not in ("model", "mmproj"):
        what = f"is of general.type {shown(kind)}"
        what = "has no general.architecture" if found is None else what
        hint = "recipes gguf-* are for the weights of language models in GGUF files"
        raise UnsupportedError(what, where=checkpoint.name, hint=hint)
    telling, without = VARIANTS.get(found, ("", ""))
    name = ALIASES.get(found, found)
    if telling and checkpoint.selection and telling not in checkpoint.selection.nodes:
        name = without
    if RECIPES + name not in known:
        has_blocks = any(each.dtype.block > 1 for each in checkpoint.required.tensors.values())
        dequantized = " --dequantize bfloat16" if has_blocks else ""
        raise UnsupportedError(
            f"there is no recipe for the architecture {shown(found)}",
            where=checkpoint.name,
            hint=f"there are {some([each.removeprefix(RECIPES) for each in known], 30)}; "
            f"`ckptkit convert {{where}} {{new}}{dequantized}` keeps the names of the file",
        )
    return RECIPES + name


def check_architecture(checkpoint: Checkpoint, expected: Sequence[str]) -> None:
    """Raise UnsupportedError for a GGUF file of another architecture than those `expected`."""
    found = architecture(checkpoint)
    if found is not None and found not in expected:
        meant = " and ".join(expected)
        raise UnsupportedError(
            f"general.architecture is {shown(found)}, and this recipe is for {meant}",
            where=checkpoint.name,
            hint="the recipe called gguf takes the one of the architecture",
        )


# config.json


class GgufModel(NamedTuple):
    """The name of an architecture in transformers, and the fields of its configuration.

    ``fields`` are key of the metadata -> field, beside or instead of those in `_FIELDS`; "" takes a
    common one away. ``fixed`` are values that all such models have.
    """

    model_type: str
    name: str
    fields: Mapping[str, str] = {}
    fixed: Mapping[str, Any] = {}


_FIELDS = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size", "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}  # fmt: skip
_EXPERTS = {"expert_used_count": "num_experts_per_tok", "expert_count": "num_experts",
            "expert_feed_forward_length": "moe_intermediate_size"}  # fmt: skip
_GEMMA = {"attn_logit_softcapping": "attn_logit_softcapping",
          "final_logit_softcapping": "final_logit_softcapping",
          "attention.sliding_window": "sliding_window"}  # fmt: skip
_EPSILON = {"attention.layer_norm_rms_epsilon": "", "attention.key_length": ""}
_T5 = {
    "block_count": "num_layers", "embedding_length": "d_model", "feed_forward_length": "d_ff",
    "attention.head_count": "num_heads", "attention.key_length": "d_kv",
    "attention.head_count_kv": "", "context_length": "n_positions", "rope.freq_base": "",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "decoder_block_count": "num_decoder_layers",
    "attention.relative_buckets_count": "relative_attention_num_buckets",
    "decoder_start_token_id": "decoder_start_token_id",
}  # fmt: skip

MODELS = {
    "llama": GgufModel("llama", "LlamaForCausalLM"),
    "qwen2": GgufModel("qwen2", "Qwen2ForCausalLM", {"attention.key_length": ""}),
    "qwen3": GgufModel("qwen3", "Qwen3ForCausalLM"),
    "qwen2moe": GgufModel(
        "qwen2_moe", "Qwen2MoeForCausalLM",
        {**_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    ),
    # llama.cpp normalizes the weights of experts of this architecture, whatever the file says.
    "qwen3moe": GgufModel("qwen3_moe", "Qwen3MoeForCausalLM", _EXPERTS, {"norm_topk_prob": True}),
    "gemma": GgufModel("gemma", "GemmaForCausalLM"),
    "gemma2": GgufModel("gemma2", "Gemma2ForCausalLM", _GEMMA),
    "gemma3": GgufModel("gemma3_text", "Gemma3ForCausalLM", _GEMMA),
    "phi3": GgufModel(
        "phi3", "Phi3ForCausalLM", {**_GEMMA, "attention.key_length": "",
        "rope.scaling.original_context_length": "original_max_position_embeddings"},
        {"pad_token_id": None},
    ),
    "starcoder2": GgufModel("starcoder2", "Starcoder2ForCausalLM",
        {**_EPSILON, "attention.layer_norm_epsilon": "norm_epsilon"}),
    "stablelm": GgufModel("stablelm", "StableLmForCausalLM",
        {**_EPSILON, "attention.layer_norm_epsilon": "layer_norm_eps",
         "use_parallel_residual": "use_parallel_residual"}),
    "gpt2": GgufModel("gpt2", "GPT2LMHeadModel", {
        **_EPSILON, "block_count": "n_layer", "embedding_length": "n_embd",
        "feed_forward_length": "n_inner", "attention.head_count": "n_head",
        "attention.head_count_kv": "", "context_length": "n_positions",
        "attention.layer_norm_epsilon": "layer_norm_epsilon", "rope.freq_base": "",
    }),
    "falcon": GgufModel("falcon", "FalconForCausalLM", {
        **_EPSILON, "attention.head_count_kv": "num_kv_heads",
        "feed_forward_length": "ffn_hidden_size",
        "attention.layer_norm_epsilon": "layer_norm_epsilon",
    }, {"alibi": False, "bias": False, "parallel_attn": True}),
    "mamba": GgufModel("mamba", "MambaForCausalLM", {
        **dict.fromkeys(_FIELDS, ""), "block_count": "num_hidden_layers",
        "embedding_length": "hidden_size", "ssm.conv_kernel": "conv_kernel",
        "ssm.inner_size": "intermediate_size", "ssm.state_size": "state_size",
        "ssm.time_step_rank": "time_step_rank",
        "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    }),
    "t5": GgufModel("t5", "T5ForConditionalGeneration", _T5, {"is_encoder_decoder": True}),
    "t5encoder": GgufModel("t5", "T5EncoderModel", _T5),
}  # fmt: skip


def config_of(checkpoint: Checkpoint) -> tuple[dict[str, Any] | None, list[str]]:
    """Return config.json for transformers, None for an architecture that it makes none of.

    With notes on what the metadata does not say. Raises UnsupportedError for a list (layers that
    differ), for which a configuration has another field in each model.
    """
    found, weights = architecture(checkpoint), checkpoint.weights
    model = MODELS.get(found or "")
    if found is None or model is None:
        return None, [] if found is None else [f"no config.json is made for {found}"]
    values = metadata(checkpoint)
    for key in DECIDING & values.keys():
        _number(values[key], f"{found}.{key}", checkpoint)
    config: dict[str, Any] = {"architectures": [model.name], "model_type": model.model_type}
    for key, field in {**_FIELDS, **model.fields}.items():
        value = values.get(key)
        if value is None or not field:
            continue
        config[field] = _number(value, f"{found}.{key}", checkpoint)
        if field == "sliding_window" and not value:  # none
            config[field] = None
    config |= model.fixed
    config |= _derived(found, values, weights, config)
    rows = next((each.shape[0] for name, each in weights.items() if name.startswith("token_embd")
                 and len(each.shape) == 2), None)  # fmt: skip
    if rows is not None:
        config["vocab_size"] = rows
    root = checkpoint.root if isinstance(checkpoint.root, dict) else {}
    for word, field in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        token = root.get(f"tokenizer.ggml.{word}_token_id")
        if isinstance(token, int):
            config[f"{field}_token_id"] = token
    config["tie_word_embeddings"] = "output.weight" not in weights
    notes = ["a folder gets a config.json made of the metadata, and no tokenizer"]
    scaled = [name for name in SCALING if name in weights]
    scaled += [key for key in values if key.startswith("rope.scaling.") and key != _ORIGINAL]
    if scaled:
        notes.append(f"config.json lacks the scaling of rotary embeddings: {quoted(scaled)}")
    return config, notes


def _number(value: Any, key: str, checkpoint: Checkpoint) -> bool | int | float:
    """Return a value of the metadata that is one number. Raises UnsupportedError."""
    if isinstance(value, (bool, int)):
        return value
    if isinstance(value, float) and abs(value) < _LARGEST:
        return _shortest(value)
    what = "a list" if isinstance(value, Sized) and not isinstance(value, str) else shown(value)
    raise UnsupportedError(
        f"config.json cannot be made: {key} is {what}", where=checkpoint.name,
        hint="name one with --config",
    )  # fmt: skip


# Values of the metadata that decide about other fields.
DECIDING = {"expert_count", "expert_used_count", "attention.head_count_kv", "rope.dimension_count"}
_LARGEST = 2.0**127  # of float32, nearly
_ORIGINAL = "rope.scaling.original_context_length"


def _derived(
    found: str, values: Mapping[str, Any], weights: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields that follow from the names of weights, or from several values."""
    has = {each for each in ("attn_q.bias", "attn_q_norm.weight", "attn_norm_2.weight")
           if f"blk.0.{each}" in weights}  # fmt: skip
    made: dict[str, Any] = {}
    if found == "llama":
        made["attention_bias"] = "attn_q.bias" in has
        if values.get("expert_count"):
            made |= {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"],
                     "num_local_experts": values["expert_count"],
                     "num_experts_per_tok": values.get("expert_used_count", 2)}  # fmt: skip
            del made["attention_bias"]
    elif found == "stablelm":
        made = {"use_qkv_bias": "attn_q.bias" in has, "qk_layernorm": "attn_q_norm.weight" in has}
    elif found == "falcon":
        heads = values.get("attention.head_count_kv", 1)
        grouped = "attn_norm_2.weight" in has or heads > 1
        made = {"multi_query": heads == 1, "new_decoder_architecture": grouped}
        if grouped:
            made["num_ln_in_parallel_attn"] = 2 if "attn_norm_2.weight" in has else 1
    elif found in ("t5", "t5encoder"):
        gated = "enc.blk.0.ffn_gate.weight" in weights
        made["feed_forward_proj"] = "gated-gelu" if gated else "relu"
    rotary, width = values.get("rope.dimension_count"), config.get("head_dim")
    if width is None and config.get("num_attention_heads"):
        width = config.get("hidden_size", 0) // config["num_attention_heads"]
    if found in ("stablelm", "phi3") and isinstance(rotary, int) and width:
        made["partial_rotary_factor"] = rotary / width
    return made


def _shortest(value: float) -> float:
    """Return the shortest number that is the same in float32, as people wrote it: 1e-06."""
    packed = struct.pack("<f", value)
    texts = (f"{value:.{digits}g}" for digits in range(1, 18))
    return next(float(text) for text in texts if struct.pack("<f", float(text)) == packed)
