"""Select the recipe for a GGUF architecture, and make config.json from GGUF metadata.

The facts about each architecture are in ``gguf_models.yaml``.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import cache
from math import pi
from pathlib import Path
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
from ckptkit.run.recipes import plain_yaml

RECIPES = "gguf-"  # prefix of the recipe names
# Weights that only GGUF files have: scaling factors of rotary embeddings.
SCALING = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
# Matrices with one row, from which converters of 2024 dropped the first dimension.
ONE_ROW = "blk.*.ffn_gate_inp_shexp.weight"


class GgufModel(NamedTuple):
    """Facts about an architecture. ``gguf_models.yaml`` explains the fields."""

    model_type: str
    name: str
    fields: Mapping[str, str | None]
    fixed: Mapping[str, Any] = {}
    rotary: str | None = None
    layers_27b: int | None = None
    unknown: str | None = None
    recipe: str | None = None
    variant: tuple[str, str] | None = None


@cache
def models() -> dict[str, GgufModel]:
    """Return the facts about each architecture."""
    facts = plain_yaml.loaded(Path(__file__).parents[1].joinpath("gguf_models.yaml").read_bytes())
    found = {}
    for architecture, row in facts["models"].items():
        fields: dict[str, str | None] = {}
        for word in ("all", *row.pop("sets", ())):
            fields |= facts["sets"][word]
        fields |= row.pop("fields", {})
        found[architecture] = GgufModel(fields=fields, **row)
    return found


def architecture(checkpoint: Checkpoint) -> str | None:
    """Return ``general.architecture`` of a GGUF file, or None if the key is missing."""
    root = checkpoint.root
    found = root.get(ARCHITECTURE) if isinstance(root, dict) else None
    return found if isinstance(found, str) else None


def recipe_name(checkpoint: Checkpoint, names: Sequence[str]) -> str:
    """Return the name of the recipe for a GGUF file. The name is one of `names`. Raises
    UnsupportedError if no recipe fits."""
    found = architecture(checkpoint)
    root = checkpoint.root if isinstance(checkpoint.root, dict) else {}
    kind = root.get("general.type", "model")
    if found is None or kind not in ("model", "mmproj"):
        what = f"is not a model: its general.type is {shown(kind)}"
        what = "has no general.architecture" if found is None else what
        hint = "the recipes gguf-* convert only models with a general.architecture"
        raise UnsupportedError(what, where=checkpoint.name, hint=hint)
    model, name = models().get(found), found
    if model is not None:
        telling, without = model.variant or ("", "")
        is_first = not checkpoint.selection or telling in checkpoint.selection.nodes
        name = model.recipe or found if is_first or not telling else without
    if RECIPES + name not in names:
        known = [each.removeprefix(RECIPES) for each in names if each.startswith(RECIPES)]
        raise UnsupportedError(
            f"there is no recipe for the architecture {shown(found)}",
            where=checkpoint.name,
            hint=f"recipes exist for {some(known, 30)}; "
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


HEADS = ("attention.head_count", "attention.head_count_kv")
_LARGEST = 2.0**127  # a number from the metadata must be smaller; float32 ends below 2**128
_SIGMOID = 2  # LLAMA_EXPERT_GATING_FUNC_TYPE_SIGMOID


def config_of(checkpoint: Checkpoint) -> tuple[dict[str, Any] | None, list[str]]:
    """Return a dict with the fields of config.json for transformers, and a list of notes.

    For an unknown architecture, and for a metadata value that is not a number, return None instead
    of the dict. Raises UnsupportedError if the value of a key in `HEADS` is not a number, but for
    example a list with one number for each layer.
    """
    found = architecture(checkpoint)
    if found is None:
        return None, []
    if found not in models():
        return None, [f"ckptkit makes no config.json for architecture {found}"]
    file = _Metadata(checkpoint, found, metadata(checkpoint))
    for key in HEADS:
        file.number(key)
    try:
        return _config_of(file)
    except UnsupportedError as error:
        return None, [f"{error.message}; {error.hint}"]


class _Metadata(NamedTuple):
    """The metadata of a GGUF file, without the prefix of the architecture."""

    checkpoint: Checkpoint
    architecture: str
    values: Mapping[str, Any]

    def number(self, key: str) -> Any:
        """Return a number from the metadata, or None if the key is missing.

        Raises UnsupportedError for a value that is not a finite number.
        """
        value = self.values.get(key)
        if value is None or isinstance(value, (bool, int)):
            return value
        if isinstance(value, float) and abs(value) < _LARGEST:
            return _shortest(value)
        is_list = isinstance(value, Sized) and not isinstance(value, str)
        raise UnsupportedError(
            f"cannot make config.json: {self.architecture}.{key} must be a finite number, but is "
            f"{'a list' if is_list else shown(value)}",
            where=self.checkpoint.name,
            hint="give a config.json with --config",
        )


def _config_of(file: _Metadata) -> tuple[dict[str, Any], list[str]]:
    found, weights, model = file.architecture, file.checkpoint.weights, models()[file.architecture]
    config: dict[str, Any] = {"architectures": [model.name], "model_type": model.model_type}
    for key, field in model.fields.items():
        value = file.number(key)
        if value is not None and field is not None:
            # A sliding window of 0 means that there is no sliding window.
            config[field] = None if field == "sliding_window" and not value else value
    config |= model.fixed
    config |= _derived(file, weights, config)
    heads, rotary = config.get("num_attention_heads"), file.number("rope.dimension_count")
    average = config.get("hidden_size", 0) // heads if heads else None
    width = config.get("head_dim") or average
    if model.rotary is not None and isinstance(rotary, int) and width:
        config[model.rotary] = rotary / width
    if model.layers_27b is not None and file.number("block_count") == model.layers_27b and average:
        config["query_pre_attn_scalar"] = average
    rows = next((each.shape[0] for name, each in weights.items() if name.startswith("token_embd")
                 and len(each.shape) == 2), None)  # fmt: skip
    if rows is not None:
        config["vocab_size"] = rows
    root = file.checkpoint.root if isinstance(file.checkpoint.root, dict) else {}
    for word, field in (("bos", "bos"), ("eos", "eos"), ("padding", "pad")):
        token = root.get(f"tokenizer.ggml.{word}_token_id")
        if isinstance(token, int):
            config[f"{field}_token_id"] = token
    config["tie_word_embeddings"] = "output.weight" not in weights
    notes = ["an output folder gets a config.json made from the metadata, but no tokenizer"]
    scaling, unread = _rope_scaling(file, weights)
    if scaling is not None:
        # The released gpt-oss models do not round the limits of YaRN; transformers does by default.
        config["rope_scaling"] = scaling | ({"truncate": False} if found == "gpt-oss" else {})
    if unread:
        notes.append(f"config.json does not contain the rotary scaling in {quoted(unread)}")
    if model.unknown is not None and "n_group" not in config:
        notes.append(model.unknown)
    return config, notes


def _derived(
    file: _Metadata, weights: Mapping[str, Tensor], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields that depend on the names of weights or on several metadata values."""
    found, number = file.architecture, file.number
    has_bias, has_second_norm = (
        f"blk.0.{each}" in weights for each in ("attn_q.bias", "attn_norm_2.weight")
    )
    if found == "llama" and number("expert_count"):
        used = number("expert_used_count")
        return {"model_type": "mixtral", "architectures": ["MixtralForCausalLM"],
                "num_local_experts": number("expert_count"),
                "num_experts_per_tok": 2 if used is None else used}  # fmt: skip
    if found == "llama":
        return {"attention_bias": has_bias}
    if found == "stablelm":
        return {"use_qkv_bias": has_bias, "qk_layernorm": "blk.0.attn_q_norm.weight" in weights}
    if found == "falcon":
        heads = config.get("num_kv_heads", 1)
        made: dict[str, Any] = {"multi_query": heads == 1}
        made["new_decoder_architecture"] = has_second_norm or heads > 1
        if made["new_decoder_architecture"]:
            made["num_ln_in_parallel_attn"] = 2 if has_second_norm else 1
        return made
    if found == "deepseek2":
        return _latent_attention(file, weights, config)
    if found == "bert":
        fields = {"position_embd": "max_position_embeddings", "token_types": "type_vocab_size"}
        tables = {field: weights.get(f"{name}.weight") for name, field in fields.items()}
        return {
            field: table.shape[0]
            for field, table in tables.items()
            if table is not None and len(table.shape) == 2
        }
    if found in ("t5", "t5encoder"):
        # T5 1.1 has a gate, and does not scale the outputs, even if the head is tied.
        if "enc.blk.0.ffn_gate.weight" in weights:
            return {"feed_forward_proj": "gated-gelu", "scale_decoder_outputs": False}
        return {"feed_forward_proj": "relu"}
    if "linear_num_value_heads" in config:  # Qwen3-Next and Qwen3.5
        size, heads = number("ssm.inner_size"), config["linear_num_value_heads"]
        layers = number("block_count")
        count = min(layers, len(weights)) if isinstance(layers, int) else 0
        kinds = [
            "full_attention" if f"blk.{layer}.attn_q.weight" in weights else "linear_attention"
            for layer in range(count)
        ]
        is_whole = isinstance(size, int) and isinstance(heads, int) and heads
        return {
            **({"linear_value_head_dim": size // heads} if is_whole else {}),
            "layer_types": kinds,
        }
    return {}


def _latent_attention(
    file: _Metadata, weights: Mapping[str, Tensor], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the fields of DeepSeek V2 or V3.

    A model is V3 if the router of its experts has a bias or a sigmoid. Files from before April 2025
    contain the sizes of a head under keys without ``_mla``.
    """
    made: dict[str, Any] = {"q_lora_rank": config.get("q_lora_rank")}
    if "num_attention_heads" in config:
        made["num_key_value_heads"] = config["num_attention_heads"]
    key, value = (
        file.number(f"attention.{each}_length_mla") or file.number(f"attention.{each}_length")
        for each in ("key", "value")
    )
    rotary = file.number("rope.dimension_count")
    if isinstance(key, int) and isinstance(rotary, int):
        made["qk_nope_head_dim"] = key - rotary
    if value is not None:
        made["v_head_dim"] = value
    has_bias = any(name.endswith(".exp_probs_b.bias") for name in weights)
    if has_bias or file.number("expert_gating_func") == _SIGMOID:
        made |= {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    elif config.get("n_group", 1) > 1:
        made["topk_method"] = "group_limited_greedy"
    return made


def _rope_scaling(
    file: _Metadata, weights: Mapping[str, Tensor]
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
    start = "rope.scaling."
    scaling = {key.removeprefix(start): key for key in file.values if key.startswith(start)}
    kind = file.values.get(f"{start}type", "none")
    used = {"type", "finetuned", "original_context_length"}
    made: dict[str, Any] | None = None
    if all(both):
        # transformers computes the attention factor from the context lengths, as the converter did.
        used |= {"attn_factor"}
        made = {"type": "longrope", "long_factor": both[0], "short_factor": both[1]}
    elif freqs is not None:
        base = file.number("rope.freq_base")
        made = _llama3(freqs, 10_000.0 if base is None else base)
        if made is None and set(freqs) != {1.0}:
            unread.append(SCALING[0])
    elif kind in ("linear", "yarn") and "factor" in scaling:
        used |= {"factor"}
        made = {"rope_type": kind, "factor": file.number(scaling["factor"])}
        if kind == "yarn":
            used |= {"yarn_log_multiplier", "yarn_beta_fast", "yarn_beta_slow"}
            for word, field in (
                ("original_context_length", "original_max_position_embeddings"),
                ("yarn_beta_fast", "beta_fast"),
                ("yarn_beta_slow", "beta_slow"),
            ):
                if word in scaling:
                    made[field] = file.number(scaling[word])
            multiplier = file.number(f"{start}yarn_log_multiplier") or 0
            if 0 < multiplier < 1:
                scale = _shortest(multiplier * 10)
                made |= {"mscale": scale, "mscale_all_dim": scale}
    elif kind != "none":
        used -= {"type"}
    return made, [*unread, *(key for word, key in scaling.items() if word not in used)]


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
