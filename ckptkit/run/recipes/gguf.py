"""Select the recipe for a GGUF architecture, and make config.json from GGUF metadata.

The metadata keys are from llama.cpp (``gguf-py/gguf/constants.py``). The mapping from keys to
fields is from transformers (``integrations/ggml.py``). For models that transformers does not read
from GGUF files, the mapping is the inverse of ``convert_hf_to_gguf.py`` of llama.cpp. These models
are BERT, DeepSeek, and models with scaled rotary embeddings.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from fnmatch import fnmatchcase
from math import pi
from typing import Any, NamedTuple

from ckptkit import quantized
from ckptkit.compute.arranged import contiguous
from ckptkit.compute.operation import stream
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import UnsupportedError
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import quoted, shown, some
from ckptkit.core.tree import Node, rebuild
from ckptkit.edits.quantized import refuse_unread as refuse
from ckptkit.edits.quantized_names import dequantize_hint
from ckptkit.edits.rules import ARCHITECTURE, metadata

RECIPES = "gguf-"  # prefix of the recipe names
# Architectures with two layouts. Each value contains the name of a weight that only the first
# layout has, and the name of the recipe for the second layout.
VARIANTS = {
    "falcon": ("blk.0.attn_norm_2.weight", "falcon-7b"),
    "t5": ("enc.blk.0.ffn_gate.weight", "t5-relu"),
    "t5encoder": ("enc.blk.0.ffn_gate.weight", "t5-relu"),
}
ALIASES = {"t5encoder": "t5"}
# Weights that only GGUF files have: scaling factors of rotary embeddings.
SCALING = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Matrices with one row, from which converters of 2024 dropped the first dimension.
ONE_ROW = "blk.*.ffn_gate_inp_shexp.weight"


def architecture(checkpoint: Checkpoint) -> str | None:
    """Return ``general.architecture`` of a GGUF file, or None if the key is missing."""
    root = checkpoint.root
    found = root.get(ARCHITECTURE) if isinstance(root, dict) else None
    return found if isinstance(found, str) else None


def recipe_name(checkpoint: Checkpoint, known: Sequence[str]) -> str:
    """Return the name of the recipe for a GGUF file. The name is one of `known`. Raises
    UnsupportedError if no recipe fits."""
    found = architecture(checkpoint)
    root = checkpoint.root if isinstance(checkpoint.root, dict) else {}
    kind = root.get("general.type", "model")
    if found is None or kind not in ("model", "mmproj"):
        what = f"is not a model: its general.type is {shown(kind)}"
        what = "has no general.architecture" if found is None else what
        hint = "the recipes gguf-* convert only models with a general.architecture"
        raise UnsupportedError(what, where=checkpoint.name, hint=hint)
    telling, without = VARIANTS.get(found, ("", ""))
    name = ALIASES.get(found, found)
    if telling and checkpoint.selection and telling not in checkpoint.selection.nodes:
        name = without
    if RECIPES + name not in known:
        raise UnsupportedError(
            f"there is no recipe for the architecture {shown(found)}",
            where=checkpoint.name,
            hint=f"recipes exist for {some([each.removeprefix(RECIPES) for each in known], 30)}; "
            f"{_plain_line(checkpoint)} keeps the names of the file",
        )
    return RECIPES + name


def check_architecture(checkpoint: Checkpoint, expected: Sequence[str]) -> None:
    """Raise UnsupportedError if the architecture of a GGUF file is not one of `expected`."""
    found = architecture(checkpoint)
    if found is not None and found not in expected:
        meant = " and ".join(expected)
        raise UnsupportedError(
            f"general.architecture is {shown(found)}, but this recipe is for {meant}",
            where=checkpoint.name,
            hint="the recipe `gguf` selects the recipe by architecture",
        )


def refuse_unread(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedError if a weight cannot be dequantized, or has a separate scale (NVFP4).

    Call this function before weights are renamed, so that the error contains the name in the file.
    """
    try:
        refuse(checkpoint, quantized.find(checkpoint))
    except UnsupportedError as error:
        error.hint = f"{dequantize_hint(checkpoint)}; {_OLD_NAMES}"
        raise
    for name in checkpoint.weights:
        scale = f"{name.removesuffix('.weight')}.scale"
        if scale not in checkpoint.weights:
            continue
        raise UnsupportedError(
            f"{shown(name)} must be multiplied by {shown(scale)}; no recipe does this",
            where=checkpoint.name,
            hint=f"{_plain_line(checkpoint)} keeps both; {_OLD_NAMES}",
        )


def _plain_line(checkpoint: Checkpoint) -> str:
    """Return the command that converts a GGUF file without a recipe."""
    has_blocks = any(each.dtype.block > 1 for each in checkpoint.required.tensors.values())
    return f"`ckptkit convert {{where}} {{new}}{' --dequantize bfloat16' if has_blocks else ''}`"


_OLD_NAMES = "without a recipe, tensors keep their GGUF names"


def with_matrices(checkpoint: Checkpoint) -> Checkpoint:
    """Reshape the gates of shared experts in a GGUF checkpoint to [1, n], as in new files."""
    swap: dict[int, Node] = {
        id(tensor): replace(tensor, shape=(1, *tensor.shape), stride=(tensor.shape[0], 1))
        for name, tensor in checkpoint.weights.items()
        if fnmatchcase(name, ONE_ROW) and len(tensor.shape) == 1 and tensor.layout == "strided"
    }
    return checkpoint.with_root(rebuild(checkpoint.root, swap=swap)) if swap else checkpoint


# config.json


class GgufModel(NamedTuple):
    """The name of an architecture in transformers, and the fields of its configuration.

    ``fields`` maps metadata keys to fields, in addition to `_FIELDS`. If ``fields`` maps a key to
    "", ckptkit ignores the key, even if `_FIELDS` contains the key. ``fixed`` contains fields with
    the same value in all models of the architecture.
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
_LINEAR = {
    **_EXPERTS, "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "ssm.conv_kernel": "linear_conv_kernel_dim", "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads", "ssm.time_step_rank": "linear_num_value_heads",
}  # fmt: skip
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
    # For this architecture, llama.cpp always normalizes the weights that the router assigns to
    # experts.
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
    "bert": GgufModel("bert", "BertModel", {
        **_EPSILON, "attention.layer_norm_epsilon": "layer_norm_eps",
        "attention.head_count_kv": "", "rope.freq_base": "",
    }),
    "deepseek2": GgufModel("deepseek_v2", "DeepseekV2ForCausalLM", {
        **_EXPERTS, "expert_count": "n_routed_experts", "expert_shared_count": "n_shared_experts",
        "expert_weights_scale": "routed_scaling_factor", "expert_weights_norm": "norm_topk_prob",
        "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
        "leading_dense_block_count": "first_k_dense_replace", "attention.key_length": "",
        "attention.head_count_kv": "", "attention.q_lora_rank": "q_lora_rank",
        "attention.kv_lora_rank": "kv_lora_rank", "rope.dimension_count": "qk_rope_head_dim",
    }),
    "deepseek": GgufModel("deepseek", "DeepseekForCausalLM", {
        **_EXPERTS, "expert_count": "n_routed_experts", "expert_shared_count": "n_shared_experts",
        "leading_dense_block_count": "first_k_dense_replace", "attention.key_length": "",
    }),
    "internlm2": GgufModel("internlm2", "InternLM2ForCausalLM",
                           {"attention.key_length": ""}, {"bias": False}),
    "bloom": GgufModel("bloom", "BloomForCausalLM", {
        **dict.fromkeys(_FIELDS, ""), "block_count": "n_layer", "embedding_length": "hidden_size",
        "attention.head_count": "n_head", "attention.layer_norm_epsilon": "layer_norm_epsilon",
    }),
    "gptneox": GgufModel("gpt_neox", "GPTNeoXForCausalLM", {
        **_EPSILON, "attention.layer_norm_epsilon": "layer_norm_eps",
        "attention.head_count_kv": "", "rope.freq_base": "rotary_emb_base",
        "use_parallel_residual": "use_parallel_residual",
    }),
    "gpt-oss": GgufModel("gpt_oss", "GptOssForCausalLM", {
        "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
        "expert_feed_forward_length": "intermediate_size", "feed_forward_length": "",
        "attention.sliding_window": "sliding_window",
    }),
    "qwen3next": GgufModel("qwen3_next", "Qwen3NextForCausalLM", _LINEAR, {"norm_topk_prob": True}),
    "qwen35": GgufModel("qwen3_5_text", "Qwen3_5ForCausalLM", _LINEAR),
    "qwen35moe": GgufModel("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM",
                           {**_LINEAR, "feed_forward_length": ""}),
}  # fmt: skip
# Notes on values that the metadata of an architecture does not contain.
UNKNOWN = {
    "bert": "a GGUF file has no pooler: transformers initializes the pooler at random",
    "deepseek2": "the metadata has no number of expert groups: n_group and topk_group have "
    "the defaults of transformers (DeepSeek-V2 has 8 and 3)",
}


def config_of(checkpoint: Checkpoint) -> tuple[dict[str, Any] | None, list[str]]:
    """Return a dict with the fields of config.json for transformers, and a list of notes.

    For an architecture that is not in MODELS, and for a metadata value that is not a number, return
    None instead of the dict. Raises UnsupportedError if the value of a key in `HEADS` is not a
    number, but for example a list with one number for each layer.
    """
    for key, value in metadata(checkpoint).items():
        if key in HEADS:
            _number(value, f"{architecture(checkpoint)}.{key}", checkpoint)
    try:
        return _config_of(checkpoint)
    except UnsupportedError as error:
        return None, [f"{error.message}; {error.hint}"]


HEADS = ("attention.head_count", "attention.head_count_kv")


def _config_of(checkpoint: Checkpoint) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the results of `config_of`. Raises UnsupportedError for a value that is not a
    number."""
    found, weights = architecture(checkpoint), checkpoint.weights
    model = MODELS.get(found or "")
    if found is None or model is None:
        return None, [] if found is None else [
            f"ckptkit makes no config.json for architecture {found}"
        ]
    values = metadata(checkpoint)
    for key in DECIDING & values.keys():
        _number(values[key], f"{found}.{key}", checkpoint)
    config: dict[str, Any] = {"architectures": [model.name], "model_type": model.model_type}
    for key, field in {**_FIELDS, **model.fields}.items():
        value = values.get(key)
        if value is None or not field:
            continue
        config[field] = _number(value, f"{found}.{key}", checkpoint)
        if field == "sliding_window" and not value:  # 0: no sliding window
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
    notes = ["an output folder gets a config.json made from the metadata, but no tokenizer"]
    scaling, unread = _rope_scaling(values, weights)
    if scaling is not None:
        # The released gpt-oss models do not round the limits of YaRN; transformers does by default.
        config["rope_scaling"] = scaling | ({"truncate": False} if found == "gpt-oss" else {})
    if unread:
        notes.append(f"config.json does not contain the rotary scaling in {quoted(unread)}")
    if found in UNKNOWN and "n_group" not in config:
        notes.append(UNKNOWN[found])
    return config, notes


def _number(value: Any, key: str, checkpoint: Checkpoint) -> bool | int | float:
    """Return a number from the metadata. Raises UnsupportedError for other values."""
    if isinstance(value, (bool, int)):
        return value
    if isinstance(value, float) and abs(value) < _LARGEST:
        return _shortest(value)
    what = "a list" if isinstance(value, Sized) and not isinstance(value, str) else shown(value)
    raise UnsupportedError(
        f"cannot make config.json: {key} must be a finite number, but is {what}",
        where=checkpoint.name,
        hint="give a config.json with --config",
    )  # fmt: skip


# Maps each architecture to the name of a field. The field contains the fraction of a head's
# dimensions that have rotary embeddings.
PARTIAL = {
    **dict.fromkeys(("stablelm", "phi3", "qwen3next", "qwen35", "qwen35moe"),
                    "partial_rotary_factor"),
    "gptneox": "rotary_pct",
}  # fmt: skip
# Architecture and number of layers of the 27B models of Gemma. These models scale q by the average
# width of a head, as llama.cpp does.
AVERAGE = {("gemma2", 46), ("gemma3", 62)}
# Metadata keys from which other fields are derived.
DECIDING = {
    "expert_count", "expert_used_count", "attention.head_count_kv", "rope.dimension_count",
    "attention.key_length", "attention.value_length", "attention.key_length_mla",
    "attention.value_length_mla", "expert_gating_func", "ssm.inner_size", "ssm.time_step_rank",
    "block_count", "rope.freq_base", "rope.scaling.factor",
    "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow", "rope.scaling.original_context_length",
}  # fmt: skip
_LARGEST = 2.0**127  # a number from the metadata must be smaller; float32 ends below 2**128
_SIGMOID = 2  # LLAMA_EXPERT_GATING_FUNC_TYPE_SIGMOID


def _derived(
    found: str, values: Mapping[str, Any], weights: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields that depend on the names of weights or on several metadata values."""
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
    elif found == "deepseek2":
        made = _latent_attention(values, weights, config)
    elif found == "bert":
        made = _table_sizes(weights)
    elif found in ("t5", "t5encoder"):
        gated = "enc.blk.0.ffn_gate.weight" in weights
        made["feed_forward_proj"] = "gated-gelu" if gated else "relu"
        if gated:  # T5 1.1 does not scale the outputs, even if the head is tied
            made["scale_decoder_outputs"] = False
    elif "linear_num_value_heads" in config:
        made = _linear_attention(values, weights)
    rotary, heads = values.get("rope.dimension_count"), config.get("num_attention_heads")
    average = config.get("hidden_size", 0) // heads if heads else None
    width = config.get("head_dim") or average
    if found in PARTIAL and isinstance(rotary, int) and width:
        made[PARTIAL[found]] = rotary / width
    if (found, values.get("block_count")) in AVERAGE and average:
        made["query_pre_attn_scalar"] = average
    return made


def _latent_attention(
    values: Mapping[str, Any], weights: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of DeepSeek V2 or V3.

    A model is V3 if the router of its experts has a bias or a sigmoid. Files from before April 2025
    contain the sizes of a head under keys without ``_mla``.
    """
    made: dict[str, Any] = {"q_lora_rank": config.get("q_lora_rank")}
    if "num_attention_heads" in config:
        made["num_key_value_heads"] = config["num_attention_heads"]
    key, value = (
        values.get(f"attention.{each}_length_mla", values.get(f"attention.{each}_length"))
        for each in ("key", "value")
    )
    rotary = values.get("rope.dimension_count")
    if isinstance(key, int) and isinstance(rotary, int):
        made["qk_nope_head_dim"] = key - rotary
    if value is not None:
        made["v_head_dim"] = value
    has_bias = any(name.endswith(".exp_probs_b.bias") for name in weights)
    if has_bias or values.get("expert_gating_func") == _SIGMOID:
        made |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    elif config.get("n_group", 1) > 1:
        made["topk_method"] = "group_limited_greedy"
    return made


def _table_sizes(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of positions and token types of BERT."""
    fields = {"position_embd": "max_position_embeddings", "token_types": "type_vocab_size"}
    tables = {field: weights.get(f"{name}.weight") for name, field in fields.items()}
    return {
        field: table.shape[0]
        for field, table in tables.items()
        if table is not None and len(table.shape) == 2
    }


def _linear_attention(values: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Qwen3-Next and Qwen3.5."""
    size, heads, layers = (
        each if isinstance(each := values.get(key), int) else 0
        for key in ("ssm.inner_size", "ssm.time_step_rank", "block_count")
    )
    made: dict[str, Any] = {"linear_value_head_dim": size // heads} if heads else {}
    made["layer_types"] = [
        "full_attention" if f"blk.{layer}.attn_q.weight" in weights else "linear_attention"
        for layer in range(min(layers, len(weights)))
    ]
    return made


def _rope_scaling(
    values: Mapping[str, Any], weights: Mapping[str, Tensor]
) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the dict ``rope_scaling`` for config.json, and a list of names.

    The dict is None if there is no scaling, or if the scaling is unknown. The list contains the
    names of tensors and metadata keys whose scaling the dict does not contain. Some models need
    special rules:

    - Phi-3 with a long context: the file contains two lists of factors.
    - Llama 3.1: the file contains factors that were computed from four numbers. If the four numbers
      of the released models produce the same factors, the result contains these numbers.
    - DeepSeek with ``yarn``: the file contains only ``mscale_all_dim``. ``mscale`` gets the value
      of ``mscale_all_dim``, as in the released models.
    """
    factors = {name: numbers for name in SCALING if (numbers := _factors(weights.get(name)))}
    unread = [name for name in SCALING if name in weights and name not in factors]
    freqs, *both = (factors.get(name) for name in SCALING)
    kind = values.get("rope.scaling.type", "none")
    scaling = {
        key.removeprefix("rope.scaling."): value
        for key, value in values.items()
        if key.startswith("rope.scaling.")
    }
    used = {"type", "finetuned", "original_context_length"}
    original = scaling.get("original_context_length")
    made: dict[str, Any] | None = None
    if all(both):
        # transformers computes the attention factor from the context lengths, as the converter did.
        used |= {"attn_factor"}
        made = {"type": "longrope", "long_factor": both[0], "short_factor": both[1]}
    elif freqs is not None:
        made = _llama3(freqs, values.get("rope.freq_base", 10_000.0))
        if made is None and set(freqs) != {1.0}:
            unread.append(SCALING[0])
    elif kind in ("linear", "yarn") and "factor" in scaling:
        used |= {"factor"}
        made = {"rope_type": kind, "factor": _shortest(scaling["factor"])}
        if kind == "yarn":
            used |= {"yarn_log_multiplier", "yarn_beta_fast", "yarn_beta_slow"}
            if original is not None:
                made["original_max_position_embeddings"] = original
            for word in ("beta_fast", "beta_slow"):
                if f"yarn_{word}" in scaling:
                    made[word] = _shortest(scaling[f"yarn_{word}"])
            if 0 < scaling.get("yarn_log_multiplier", 0) < 1:
                scale = _shortest(_shortest(scaling["yarn_log_multiplier"]) * 10)
                made |= {"mscale": scale, "mscale_all_dim": scale}
    elif kind != "none":
        used -= {"type"}
    return made, [*unread, *(f"rope.scaling.{each}" for each in scaling if each not in used)]


def _factors(tensor: Tensor | None) -> list[float]:
    """Return the numbers of a short float32 tensor. Return [] for any other tensor."""
    if tensor is None or tensor.dtype.name != "float32" or not 0 < tensor.numel <= 1 << 12:
        return []
    data = b"".join(map(bytes, stream(contiguous(tensor).locate())))
    found = struct.unpack(f"<{tensor.numel}f", data)
    return [_shortest(each) for each in found] if all(0 < each < _LARGEST for each in found) else []


def _llama3(factors: Sequence[float], base: float) -> dict[str, Any] | None:
    """Return the scaling of Llama 3.1 to 3.3 if this scaling produces `factors`. Otherwise return
    None."""
    factor, low, high, original = max(factors), 1.0, 4.0, 8192
    if factor <= 1 or base <= 0:
        return None
    for number, found in enumerate(factors):
        turns = original / (2 * pi * base ** (number / len(factors)))
        smooth = min(max((turns - low) / (high - low), 0), 1)
        if abs(1 / ((1 - smooth) / factor + smooth) / found - 1) > _EQUAL:
            return None
    return {
        "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }  # fmt: skip


_EQUAL = 1e-4  # maximum relative difference of factors that were computed in float32


def _shortest(value: float) -> float:
    """Return the shortest decimal with the same float32 value, such as 1e-06."""
    packed = struct.pack("<f", value)
    texts = (f"{value:.{digits}g}" for digits in range(1, 18))
    return next(float(text) for text in texts if struct.pack("<f", float(text)) == packed)
