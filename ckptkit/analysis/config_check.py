"""Compare the sizes in config.json with the tensors: layers, experts, vocabulary, heads, dtype.

The functions read only the headers of tensors. They ignore missing fields, and tensors with unknown
names. The names of the fields come from the configuration classes of transformers. For diffusers,
the names of the fields come from the constructor of the class ``_class_name``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ckptkit.core.tensor import Tensor
from ckptkit.core.text import flatten

Config = Mapping[str, Any]
Tensors = Mapping[str, Tensor]

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_LAYER = re.compile(r"^(?:.*\.)?(?:layers|h|blocks|block|layer)\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_STACKED = (".experts.gate_up_proj", ".experts.down_proj")
_EMBEDDINGS = (
    "embed_tokens.weight", "wte.weight", "word_embeddings.weight", "tok_embeddings.weight",
)  # fmt: skip
_HEAD = ("lm_head.weight", "output.weight")
_TEXT = ("text_config", "llm_config", "language_config")
# Parts of tensor names that show that a tensor does not belong to the text model.
_NOT_TEXT = ("vision", "visual", "audio", "image", "mtp", "encoder")


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of the comparison of one configuration field with the tensors.

    If the tensors imply another value, ``found`` describes that value. Otherwise, ``found`` is
    None.
    """

    code: str
    field: str
    expected: object
    found: object | None = None

    def __str__(self) -> str:
        return f"{self.field} is {self.expected}, but the tensors have {self.found}"


def compare(config: Config, tensors: Tensors) -> list[Compared]:
    """Compare the configuration with the tensors. Return a result for each comparable field."""
    checks = (_layers, _experts, _vocabulary, _heads, _head, _dtype, _diffusers)
    text: Config = next((config[key] for key in _TEXT if isinstance(config.get(key), dict)), {})
    values = {**config, **text}
    return list(flatten(check(values, tensors) for check in checks))


def _field(config: Config, names: tuple[str, ...]) -> tuple[str, int] | None:
    found = ((name, config.get(name)) for name in names)
    return next(((name, value) for name, value in found if type(value) is int), None)


def _is_text(name: str) -> bool:
    return not any(word in name for word in _NOT_TEXT)


def _counts(pattern: re.Pattern[str], tensors: Tensors) -> list[int]:
    """For each prefix before an index that `pattern` matches, count the different indices."""
    found: dict[str, set[int]] = {}
    for name in tensors:
        match = pattern.search(name)
        if match is not None and len(match[1]) < 10 and _is_text(name[: match.start(1)]):
            found.setdefault(name[: match.start(1)], set()).add(int(match[1]))
    return [len(numbers) for numbers in found.values()]


def _named(tensors: Tensors, endings: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors.items():
        fits = f".{name}".endswith(tuple(f".{each}" for each in endings))
        if fits and _is_text(name) and len(tensor.shape) == 2:
            yield name, tensor


def vocabulary(tensors: Tensors) -> list[str]:
    """Return the name of the embedding, and the name of a head with the same number of rows."""
    found = dict(_named(tensors, (*_EMBEDDINGS, *_HEAD)))
    rows = next((each.shape[0] for each in found.values()), 0)
    return [name for name, each in found.items() if each.shape[0] == rows]


def _layers(config: Config, tensors: Tensors) -> Iterator[Compared]:
    expected, counts = _field(config, LAYERS), _counts(_LAYER, tensors)
    if expected is None or not counts:
        return
    extra = config.get("num_nextn_predict_layers")
    allowed = {expected[1], expected[1] + extra} if type(extra) is int else {expected[1]}
    most = max(counts)
    yield Compared("layers", *expected, None if most in allowed else f"{most} layers")


def _experts(config: Config, tensors: Tensors) -> Iterator[Compared]:
    expected = _field(config, EXPERTS)
    if expected is None:
        return
    stacked = (t.shape for name, t in tensors.items() if name.endswith(_STACKED))
    sizes = {shape[0] for shape in stacked if len(shape) == 3}
    for count in sorted({*_counts(_EXPERT, tensors), *sizes}):
        yield Compared("experts", *expected, None if count == expected[1] else f"{count} experts")


def _vocabulary(config: Config, tensors: Tensors) -> Iterator[Compared]:
    vocabulary, hidden = _field(config, ("vocab_size",)), _field(config, HIDDEN)
    for name, tensor in _named(tensors, (*_EMBEDDINGS, *_HEAD)):
        rows, columns = tensor.shape
        if vocabulary is not None:
            found = None if rows == vocabulary[1] else f"{rows} rows in {name}"
            yield Compared("vocabulary", *vocabulary, found)
        if hidden is not None and name.endswith(_EMBEDDINGS[0]):
            found = None if columns == hidden[1] else f"{columns} columns in {name}"
            yield Compared("hidden", *hidden, found)


def _heads(config: Config, tensors: Tensors) -> Iterator[Compared]:
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
        allowed = (count * size, 2 * count * size)  # an output gate doubles the number of rows
        rows = [(tensor.shape[0], name) for name, tensor in _named(tensors, (ending,))]
        wrong = [f"{n} rows (head size {size}) in {name}" for n, name in rows if n not in allowed]
        if rows:
            yield Compared("heads", field, count, wrong[0] if wrong else None)


def _head(config: Config, tensors: Tensors) -> Iterator[Compared]:
    tied = config.get("tie_word_embeddings")
    if tied is False and any(_named(tensors, _EMBEDDINGS)):
        found = None if any(_named(tensors, _HEAD)) else "no lm_head.weight"
        yield Compared("head", "tie_word_embeddings", tied, found)


def _dtype(config: Config, tensors: Tensors) -> Iterator[Compared]:
    names = ("dtype", "torch_dtype")
    field = next((name for name in names if isinstance(config.get(name), str)), None)
    counts: Counter[str] = Counter()
    for tensor in tensors.values():
        if tensor.dtype.kind == "float":
            counts[tensor.dtype.name] += tensor.nbytes
    if field is None or not counts or "quantization_config" in config:
        return
    ((most, _),) = counts.most_common(1)
    same = config[field].removeprefix("torch.") == most
    yield Compared("dtype", field, config[field], None if same else most)


# Comparisons for models of diffusers


_QUERY = re.compile(r"transformer_blocks\.0\.attn1?\.to_q\.weight")
_BLOCK = re.compile(
    r"(?:encoder\.|decoder\.)?(down|up)_blocks\.(\d{1,4})\.resnets\.0\.conv1\.weight"
)


def _diffusers(config: Config, tensors: Tensors) -> Iterator[Compared]:
    import tomllib

    classes = tomllib.loads(Path(__file__).with_name("diffusers.toml").read_text("utf-8"))
    rows: list[str] = classes.get(str(config.get("_class_name")), [])
    for row in rows:
        field, names, *numbers = row.split()
        value = config.get(field)
        if numbers:
            yield from _sizes(field, value, names, tensors, *map(int, numbers))
            continue
        inside = (name.removeprefix(names) for name in tensors if name.startswith(names))
        count = len({name.partition(".")[0] for name in inside})
        # Other fields may be lists with one number for each block.
        expected = value
        if isinstance(value, list) and field == "block_out_channels":
            expected = len(value)
        if type(expected) is int and count:
            yield Compared(
                field, field, value, None if count == expected else f"{count} {names[:-1]}"
            )
    if any(row.startswith("num_layers ") for row in rows):
        # A query projection has (heads * head size) rows.
        heads, size = config.get("num_attention_heads"), config.get("attention_head_dim")
        counts = [tensor.shape[0] for name, tensor in tensors.items() if _QUERY.fullmatch(name)]
        if type(heads) is int and type(size) is int and counts:
            found = f"{counts[0]} rows in the query projections (attention_head_dim is {size})"
            is_same = counts[0] == heads * size
            yield Compared("heads", "num_attention_heads", heads, None if is_same else found)
    elif rows:
        yield from _channels(config.get("block_out_channels"), tensors)


def _sizes(
    field: str, value: object, names: str, tensors: Tensors, dim: int, factor: int = 1
) -> Iterator[Compared]:
    """Compare the size of dimension `dim` of the tensors `names` with the field times `factor`."""
    sizes = [
        (tensor.shape[dim], name)
        for name, tensor in tensors.items()
        if (name.endswith(names) if names.startswith(".") else name == names)
        and len(tensor.shape) > dim
    ]
    if type(value) is int and sizes:
        times = f" ({factor} x {field})" if factor > 1 else ""
        wrong = [f"{n}{times} in {name}" for n, name in sizes if n != factor * value]
        yield Compared(field, field, value, wrong[0] if wrong else None)


def _channels(value: object, tensors: Tensors) -> Iterator[Compared]:
    """Compare block_out_channels with the tensors. Up blocks have the channels in reverse order."""
    if not isinstance(value, list):
        return
    for name, tensor in tensors.items():
        match = _BLOCK.fullmatch(name)
        number = len(value) if match is None else int(match[2])
        if match is None or number >= len(value) or not tensor.shape:
            continue
        expected = value[number] if match[1] == "down" else value[-1 - number]
        if tensor.shape[0] != expected:
            found, field = f"{tensor.shape[0]} in {name}", "block_out_channels"
            yield Compared(field, field, value, found)
            return
