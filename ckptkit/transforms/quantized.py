"""Quantized weights as floating-point ones."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptkit import quantized
from ckptkit.core import dtypes
from ckptkit.core.checkpoint import Checkpoint, edit
from ckptkit.core.dtypes import DType, DTypeLike
from ckptkit.core.errors import CollisionError, FormatError, UnsupportedError, UsageError
from ckptkit.core.text import plural, quoted, typed, without
from ckptkit.quantized import Quantization
from ckptkit.quantized.group import quantization_of, read_json_of
from ckptkit.quantized.logical import TARGETS, default_dtype, exchanged
from ckptkit.transforms import torch_quantized

_HEADERS = ("tensor_names", "_quantization_metadata")
_CONFIG = ("quantization_config", "quantization", "compression_config")


@edit
def dequantize(ck: Checkpoint, dtype: DTypeLike | None = None) -> Checkpoint:
    """Every quantized weight as `dtype`, byte for byte as its own library computes it.

    Without a dtype: that of the model's configuration, else the one that the file names, else
    float16 (GPTQ, AWQ) or bfloat16; torch's own quantized tensors become float32. What a weight was
    made of goes, and what serves quantized inference alone. Raises UsageError if nothing is
    quantized, UnsupportedError for a weight that is not read.
    """
    wanted = None if dtype is None else target(dtype)
    own = torch_quantized.dequantized(ck, wanted or dtypes.BY_NAME["float32"])
    found = quantized.find(ck)
    if own is None and not found:
        raise UsageError(
            "nothing in it is quantized in a way that is known",
            where=ck.name,
            hint=f"`ckptkit inspect {{where}}` shows it; {typed('--cast float16', 'cast')} casts "
            "floats",
        )
    ck = ck if own is None else own
    return _without_groups(ck, quantized.find(ck) if own is not None else found, wanted)


def target(name: DTypeLike) -> DType:
    """The dtype to make. Raises UsageError for one that weights are not dequantized to."""
    try:
        dtype = dtypes.parse(name)
    except FormatError as error:
        raise UsageError(error.message, hint=error.hint) from error
    if dtype.name not in TARGETS:
        raise UsageError(
            f"weights are not dequantized to {name!r}",
            hint=f"choose one of {', '.join(TARGETS)}; {typed('--cast', 'cast')} casts the result "
            "to another",
        )
    return dtype


def _without_groups(ck: Checkpoint, found: Quantization, wanted: DType | None) -> Checkpoint:
    if not found:
        return ck
    refuse_unread(ck, found)
    weights, view = ck.required, found.view
    assert view is not None
    types = {id(group): wanted or default_dtype(view, group) for group in found.groups}
    names = [
        name for name in weights.nodes if name not in found.by_member and name not in found.serving
    ]
    twice = [group.name for group in found.groups if group.name in names]
    if twice:
        raise CollisionError(
            f"a dequantized weight and another would both be called {twice[0]!r}", where=ck.name
        )
    root, _ = exchanged(ck, found, types)
    notes = [*_notes(found, types), *_dropped(found)]
    companions, warnings = _configuration(ck)
    ck = ck.with_root(root, notes=notes, warnings=warnings)
    return replace(ck, extras=_header(ck.extras, found), companions=(*ck.companions, *companions))


def refuse_unread(ck: Checkpoint, found: Quantization) -> None:
    """Raise UnsupportedError if a weight is not read, naming the first."""
    if not found.unread:
        return
    first = found.unread[0]
    more = f" ({len(found.unread):,} weights in all)" if len(found.unread) > 1 else ""
    raise UnsupportedError(
        f"{first.name!r} is quantized as {first.family} and cannot be dequantized: "
        f"{first.reason}{more}",
        where=ck.name, hint=first.hint,
    )  # fmt: skip


def _notes(found: Quantization, types: Mapping[int, DType]) -> Iterator[str]:
    kinds = Counter((group.label, types[id(group)].name) for group in found.groups)
    for (label, dtype), number in kinds.items():
        yield f"dequantized {plural(number, 'weight')}: {label} -> {dtype}"


def _dropped(found: Quantization) -> Iterator[str]:
    names = [name for name, group in found.by_member.items() if name != group.name]
    if names:
        yield f"left out {plural(len(names), 'tensor')} that they were made of: {quoted(names)}"
    if found.serving:
        yield f"left out what only quantized inference uses: {quoted(found.serving)}"


def _header(metadata: Mapping[str, str], found: Quantization) -> dict[str, str]:
    """The strings of the container without those that describe quantized tensors."""
    gone = {*_HEADERS, *(group.name for group in found.groups)} if found else set()
    kept = without(metadata, gone)
    if "tensor_names" in metadata:
        kept = {key: text for key, text in kept.items() if '"_type"' not in text}
    if kept.get("format") == "mlx":
        kept["format"] = "pt"
    return kept


def _configuration(ck: Checkpoint) -> tuple[list[tuple[str, bytes]], list[str]]:
    """``config.json`` without its quantization, and what to say about it."""
    config: dict[str, Any] = read_json_of(ck.source, "config.json")
    if not quantization_of(config) and not any(key in config for key in _CONFIG):
        return [], []
    inner = config.get("text_config")
    if isinstance(inner, dict):
        config["text_config"] = without(inner, _CONFIG)
    kept = without(config, _CONFIG)
    warning = (
        "config.json says how the weights were quantized: its quantization_config is left out of a "
        "folder that is written, and must go from a copy beside a single file"
    )
    text = json.dumps(kept, indent=2, ensure_ascii=False) + "\n"
    return [("config.json", text.encode())], [warning]
