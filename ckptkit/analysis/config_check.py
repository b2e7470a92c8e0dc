"""Compare config.json with the tensors beside it: layers, experts, vocabulary, heads, head, dtype.

Headers only. A field that is missing, or a tensor whose name is not one of those known here, is not
judged. Source of the fields: PreTrainedConfig of transformers and the configurations of its models.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.core.grouping import flatten
from ckptkit.core.tensor import Tensor

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


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A field of the configuration that the tensors contradict."""

    code: str
    field: str
    expected: object
    found: object

    def __str__(self) -> str:
        return f"{self.field} is {self.expected}, and the tensors have {self.found}"


def mismatches(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> list[Mismatch]:
    """Return the values of the configuration that the tensors contradict."""
    checks = (_layers, _experts, _vocabulary, _heads, _head, _dtype)
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


def _layers(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Mismatch]:
    expected = _field(config, LAYERS)
    counts = {
        prefix: n for prefix, n in _numbers(_LAYER, tensors).items() if not _is_vision(prefix)
    }
    if expected is None or not counts:
        return
    extra = config.get("num_nextn_predict_layers")
    allowed = {expected[1], expected[1] + extra} if type(extra) is int else {expected[1]}
    most = max(counts.values())
    if most not in allowed:
        yield Mismatch("layers", *expected, f"{most} layers")


def _experts(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Mismatch]:
    expected = _field(config, EXPERTS)
    if expected is None:
        return
    counts = Counter(
        n for prefix, n in _numbers(_EXPERT, tensors).items() if not _is_vision(prefix)
    )
    stacked = [t.shape[0] for name, t in tensors.items() if _is_stacked(name) and len(t.shape) == 3]
    for count in sorted({*counts, *stacked} - {expected[1]}):
        yield Mismatch("experts", *expected, f"{count} experts")


def _is_stacked(name: str) -> bool:
    return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def _named(tensors: Mapping[str, Tensor], endings: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        fits = f".{name}".endswith(tuple(f".{each}" for each in endings))
        if fits and not _is_vision(name) and len(tensor.shape) == 2:
            yield name, tensor


def _vocabulary(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Mismatch]:
    vocabulary, hidden = _field(config, ("vocab_size",)), _field(config, HIDDEN)
    for name, tensor in _named(tensors, (*_EMBEDDINGS, *_HEAD)):
        rows, columns = tensor.shape
        if vocabulary is not None and rows != vocabulary[1]:
            yield Mismatch("vocabulary", *vocabulary, f"{rows} rows in {name}")
        if hidden is not None and columns != hidden[1] and name.endswith(_EMBEDDINGS[0]):
            yield Mismatch("hidden", *hidden, f"{columns} columns in {name}")


def _heads(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Mismatch]:
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
        for name, tensor in _named(tensors, (ending,)):
            allowed = (count * size, 2 * count * size)  # twice: with a gate
            if tensor.shape[0] not in allowed:
                yield Mismatch("heads", field, count, f"{tensor.shape[0]} rows of {size} in {name}")
                break


def _head(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Mismatch]:
    tied = config.get("tie_word_embeddings")
    head = next((name for name, _ in _named(tensors, _HEAD)), None)
    embedding = next((name for name, _ in _named(tensors, _EMBEDDINGS)), None)
    if embedding is None or tied is not False or head is not None:
        return
    yield Mismatch("head", "tie_word_embeddings", tied, "no lm_head.weight")


def _dtype(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Mismatch]:
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
    if config[field].removeprefix("torch.") != most:
        yield Mismatch("dtype", field, config[field], most)
