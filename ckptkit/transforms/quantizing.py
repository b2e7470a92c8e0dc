"""Quantize weights without data, by rounding to nearest: FP8 in blocks, and MXFP4."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ckptkit.compute.arranged import contiguous
from ckptkit.compute.quantize import BLOCK, GROUP, quantized_records
from ckptkit.core import dtypes
from ckptkit.core.checkpoint import Checkpoint, edit
from ckptkit.core.errors import UsageError
from ckptkit.core.tensor import Shape, Storage, Tensor, contiguous_stride
from ckptkit.core.text import plural, quoted
from ckptkit.core.tree import Node, rebuild
from ckptkit.core.weights import as_tensor
from ckptkit.quantized.group import read_json_of
from ckptkit.quantized.logical import mapping_of
from ckptkit.transforms import groups, module_versions

KINDS = ("fp8-block", "mxfp4")
SOURCES = ("float32", "bfloat16", "float16", "float64")
# Modules that the libraries leave as they are: their matrices are looked up, or decide.
KEPT = frozenset({
    "embed", "embed_tokens", "embeddings", "word_embeddings", "tok_embeddings", "wte", "wpe",
    "shared", "lm_head", "head", "output", "gate", "router", "classifier", "score",
})  # fmt: skip


@edit
def quantize(ck: Checkpoint, kind: str) -> Checkpoint:
    """The weights with each matrix of a layer as codes and scales: ``fp8-block`` or ``mxfp4``.

    ``X.weight`` becomes ``X.weight`` and ``X.weight_scale_inv`` (DeepSeek, transformers), or
    ``X.weight_packed`` and ``X.weight_scale`` (compressed-tensors). Embeddings, the head, routers
    and what does not divide into blocks stay. Raises UsageError for codes, and if nothing is left.
    """
    if kind not in KINDS:
        raise UsageError(f"{kind!r} is not a way to quantize", hint=f"one of {', '.join(KINDS)}")
    groups.refuse(ck, None, "codes are not quantized again")
    weights = ck.required
    done: list[str] = []
    left: list[str] = []
    new = dict(_entries(mapping_of(weights), kind, done, left))
    if not done:
        raise UsageError(f"no weight is a matrix of blocks that {kind} has", where=ck.name)
    node = module_versions.like(mapping_of(weights), new, lambda paths: paths)
    notes = [f"quantized {plural(len(done), 'weight')}: {kind}"]
    if left:
        notes.append(f"left as they are: {quoted(left)}")
    config = read_json_of(ck.source, "config.json")
    companion = _configuration(config, kind, left) if config else []
    ck = ck.with_root(rebuild(ck.root, swap={id(weights.node): node}), notes=notes)
    return replace(ck, companions=(*ck.companions, *companion))


def _entries(
    entries: Mapping[Node, Node], kind: str, done: list[str], left: list[str]
) -> Iterator[tuple[Node, Node]]:
    for key, node in entries.items():
        tensor = as_tensor(node)
        is_matrix = isinstance(key, str) and key.endswith(".weight") and tensor is not None
        if not is_matrix or tensor is None or len(tensor.shape) != 2:
            yield key, node
        elif not _is_layer(key, tensor, kind):
            left.append(key)
            yield key, node
        else:
            done.append(key)
            yield from _quantized(key, tensor, kind)


def _is_layer(name: str, tensor: Tensor, kind: str) -> bool:
    rows, columns = tensor.shape
    fits = rows % BLOCK == columns % BLOCK == 0 if kind == "fp8-block" else columns % GROUP == 0
    kept = KEPT.intersection(name.split(".")) or "norm" in name
    is_float = tensor.dtype.name in SOURCES and tensor.storage is not None
    return bool(fits and tensor.numel and is_float and not kept)


def _quantized(name: str, tensor: Tensor, kind: str) -> Iterator[tuple[str, Tensor]]:
    rows, columns = tensor.shape
    made = quantized_records(contiguous(tensor), kind, tensor.dtype, rows, columns, name)
    names, types, shapes = _PARTS[kind](name, rows, columns)
    for part, record, dtype, shape in zip(names, made, types, shapes, strict=True):
        storage = Storage(record, tensor.device)
        yield part, Tensor(storage, dtypes.BY_NAME[dtype], shape, contiguous_stride(shape))


Parts = tuple[tuple[str, str], tuple[str, str], tuple[Shape, Shape]]


def _fp8_parts(name: str, rows: int, columns: int) -> Parts:
    shapes = (rows, columns), (rows // BLOCK, columns // BLOCK)
    return (name, f"{name}_scale_inv"), ("float8_e4m3fn", "float32"), shapes


def _mx_parts(name: str, rows: int, columns: int) -> Parts:
    shapes = (rows, columns // 2), (rows, columns // GROUP)
    return (f"{name}_packed", f"{name}_scale"), ("uint8", "uint8"), shapes


_PARTS = {"fp8-block": _fp8_parts, "mxfp4": _mx_parts}


def _configuration(config: dict[str, Any], kind: str, left: list[str]) -> list[tuple[str, bytes]]:
    """``config.json`` that says how the weights are quantized, and which are not."""
    modules = [name.removesuffix(".weight") for name in left]
    if kind == "fp8-block":
        settings: dict[str, Any] = {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK], "modules_to_not_convert": modules,
        }  # fmt: skip
    else:
        scheme = {
            "num_bits": 4, "type": "float", "symmetric": True, "strategy": "group",
            "group_size": GROUP, "dynamic": False, "scale_dtype": "torch.uint8",
        }  # fmt: skip
        settings = {
            "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed", "ignore": modules,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme}},
        }  # fmt: skip
    text = (
        json.dumps({**config, "quantization_config": settings}, indent=2, ensure_ascii=False) + "\n"
    )
    return [("config.json", text.encode())]
