"""Compare config.json with the tensors beside it: layers, experts, vocabulary, heads, head, dtype.

Headers only. A field that is missing, or a tensor whose name is not one of those known here, is not
compared. Source of the fields: PreTrainedConfig of transformers and the configurations of its
models. For the models of diffusers see :mod:`ckptkit.analysis.config_diffusers`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ckptkit.analysis import config_diffusers
from ckptkit.analysis.config_field import Compared
from ckptkit.core.tensor import Tensor
from ckptkit.core.text import flatten

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_LAYER = re.compile(r"^(?:.*\.)?(?:layers|h|blocks|block|layer)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)
_HEAD = ("lm_head.weight", "output.weight")
_TEXT = ("text_config", "llm_config", "language_config")


def compare(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[Compared]:
    """Return the fields of the configuration that the tensors agree with or contradict."""
    checks = (_layers, _experts, _vocabulary, _heads, _head, _dtype, config_diffusers.compare)
    text: Mapping[str, Any] = next(
        (config[key] for key in _TEXT if isinstance(config.get(key), dict)), {}
    )
    values = {**config, **text}
    return list(flatten(check(values, tensors) for check in checks))


def _field(config: Mapping[str, Any], names: tuple[str, ...]) -> tuple[str, int] | None:
    for name in names:
        value = config.get(name)
        if type(value) is int:
            return name, value
    return None


def _numbers(pattern: re.Pattern[str], tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Count the different numbers that follow each beginning of a name."""
    found: dict[str, set[int]] = {}
    for name in tensors:
        match = pattern.search(name)
        if match is not None and len(match[1]) < 10:
            found.setdefault(name[: match.start(1)], set()).add(int(match[1]))
    return {prefix: len(numbers) for prefix, numbers in found.items()}


def _is_vision(name: str) -> bool:
    return any(word in name for word in ("vision", "visual", "audio", "image", "mtp", "encoder"))


def _layers(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Compared]:
    expected = _field(config, LAYERS)
    counts = {
        prefix: n for prefix, n in _numbers(_LAYER, tensors).items() if not _is_vision(prefix)
    }
    if expected is None or not counts:
        return
    extra = config.get("num_nextn_predict_layers")
    allowed = {expected[1], expected[1] + extra} if type(extra) is int else {expected[1]}
    most = max(counts.values())
    yield Compared("layers", *expected, None if most in allowed else f"{most} layers")


def _experts(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Compared]:
    expected = _field(config, EXPERTS)
    if expected is None:
        return
    counts = Counter(
        n for prefix, n in _numbers(_EXPERT, tensors).items() if not _is_vision(prefix)
    )
    stacked = [t.shape[0] for name, t in tensors.items() if _is_stacked(name) and len(t.shape) == 3]
    for count in sorted({*counts, *stacked}):
        yield Compared("experts", *expected, None if count == expected[1] else f"{count} experts")


def _is_stacked(name: str) -> bool:
    return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def _named(tensors: Mapping[str, Tensor], endings: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        fits = f".{name}".endswith(tuple(f".{each}" for each in endings))
        if fits and not _is_vision(name) and len(tensor.shape) == 2:
            yield name, tensor


def _vocabulary(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Compared]:
    vocabulary, hidden = _field(config, ("vocab_size",)), _field(config, HIDDEN)
    for name, tensor in _named(tensors, (*_EMBEDDINGS, *_HEAD)):
        rows, columns = tensor.shape
        if vocabulary is not None:
            found = None if rows == vocabulary[1] else f"{rows} rows in {name}"
            yield Compared("vocabulary", *vocabulary, found)
        if hidden is not None and name.endswith(_EMBEDDINGS[0]):
            found = None if columns == hidden[1] else f"{columns} columns in {name}"
            yield Compared("hidden", *hidden, found)


def _heads(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Compared]:
    heads, hidden = _field(config, HEADS), _field(config, HIDDEN)
    if heads is None or hidden is None or "kv_lora_rank" in config:
        return
    expected = config.get("head_dim")
    size = expected if type(expected) is int else hidden[1] // max(1, heads[1])
    keys = _field(config, ("num_key_value_heads",)) or heads
    for ending, (field, count) in (
        ("self_attn.q_proj.weight", heads),
        ("self_attn.k_proj.weight", keys),
    ):
        allowed = (count * size, 2 * count * size)  # twice: with a gate
        rows = [(tensor.shape[0], name) for name, tensor in _named(tensors, (ending,))]
        wrong = [f"{n} rows of {size} in {name}" for n, name in rows if n not in allowed]
        if rows:
            yield Compared("heads", field, count, wrong[0] if wrong else None)


def _head(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Compared]:
    tied = config.get("tie_word_embeddings")
    head = next((name for name, _ in _named(tensors, _HEAD)), None)
    embedding = next((name for name, _ in _named(tensors, _EMBEDDINGS)), None)
    if embedding is not None and tied is False:
        found = None if head is not None else "no lm_head.weight"
        yield Compared("head", "tie_word_embeddings", tied, found)


def _dtype(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Compared]:
    field = next(
        (name for name in ("dtype", "torch_dtype") if isinstance(config.get(name), str)), None
    )
    counts: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.dtype.kind == "float":
            counts[tensor.dtype.name] += tensor.nbytes
    if field is None or not counts or "quantization_config" in config:
        return
    ((most, _),) = counts.most_common(1)
    same = config[field].removeprefix("torch.") == most
    yield Compared("dtype", field, config[field], None if same else most)
