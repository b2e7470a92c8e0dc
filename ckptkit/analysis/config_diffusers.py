"""Compare the config.json of a model of diffusers with its tensors: channels, blocks, heads.

By the class that `_class_name` names; other classes, and fields that are null, are not compared.
Source: diffusers 0.42.1, the modules of ``models/unets``, ``models/autoencoders`` and
``models/transformers``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ckptkit.analysis.config_field import Compared
from ckptkit.core.tensor import Tensor


class _Size(NamedTuple):
    """A dimension of the tensors whose names end so, which is `factor` times a field."""

    field: str
    tensor: str
    dim: int
    factor: int = 1


class _Count(NamedTuple):
    """A prefix of numbered modules, as many as a field says or lists."""

    field: str
    prefix: str


_Row = _Size | _Count
_UNET: tuple[_Row, ...] = (
    _Size("in_channels", "conv_in.weight", 1),
    _Size("out_channels", "conv_out.weight", 0),
    _Count("block_out_channels", "down_blocks."),
    _Count("block_out_channels", "up_blocks."),
    _Count("layers_per_block", "down_blocks.0.resnets."),
)
_CROSS = _Size("cross_attention_dim", ".attn2.to_k.weight", 1)
_LAYERS = _Count("num_layers", "transformer_blocks.")
_PATCHES = _Size("in_channels", "pos_embed.proj.weight", 1)
_JOINT: tuple[_Row, ...] = (
    _LAYERS,
    _Size("joint_attention_dim", "context_embedder.weight", 1),
    _Size("pooled_projection_dim", "time_text_embed.text_embedder.linear_1.weight", 1),
)
_CLASSES: dict[str, tuple[_Row, ...]] = {
    "UNet2DModel": _UNET,
    "UNet2DConditionModel": (*_UNET, _CROSS),
    "AutoencoderKL": (
        _Size("in_channels", "encoder.conv_in.weight", 1),
        _Size("latent_channels", "encoder.conv_out.weight", 0, factor=2),
        _Size("latent_channels", "decoder.conv_in.weight", 1),
        _Size("out_channels", "decoder.conv_out.weight", 0),
        _Count("block_out_channels", "encoder.down_blocks."),
        _Count("block_out_channels", "decoder.up_blocks."),
        _Count("layers_per_block", "encoder.down_blocks.0.resnets."),
    ),
    "FluxTransformer2DModel": (
        *_JOINT,
        _Size("in_channels", "x_embedder.weight", 1),
        _Count("num_single_layers", "single_transformer_blocks."),
    ),
    "SD3Transformer2DModel": (
        *_JOINT,
        _PATCHES,
        _Size("caption_projection_dim", "context_embedder.weight", 0),
    ),
    "PixArtTransformer2DModel": (
        _LAYERS,
        _PATCHES,
        _CROSS,
        _Size("caption_channels", "caption_projection.linear_1.weight", 1),
    ),
    "DiTTransformer2DModel": (_LAYERS, _PATCHES),
}
_QUERY = re.compile(r"transformer_blocks\.0\.attn1?\.to_q\.weight")
_BLOCK = re.compile(
    r"(?:encoder\.|decoder\.)?(down|up)_blocks\.(\d{1,4})\.resnets\.0\.conv1\.weight"
)


def compare(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Compared]:
    """Yield the fields of the configuration that the tensors agree with or contradict."""
    kind = config.get("_class_name")
    rows = _CLASSES.get(kind, ()) if isinstance(kind, str) else ()
    for row in rows:
        value = config.get(row.field)
        if isinstance(row, _Size):
            yield from _size(value, tensors, row)
        else:
            yield from _count(value, tensors, row)
    if _LAYERS in rows:
        yield from _heads(config, tensors)
    elif rows:
        yield from _channels(config.get("block_out_channels"), tensors)


def _size(value: object, tensors: Mapping[str, Tensor], row: _Size) -> Iterator[Compared]:
    """Compare a dimension of a tensor, or of the first of several that differs."""
    found = [
        (tensor.shape[row.dim], name)
        for name, tensor in tensors.items()
        if _is_meant(name, row.tensor) and len(tensor.shape) > row.dim
    ]
    if type(value) is int and found:
        times = f" ({row.factor} x {row.field})" if row.factor > 1 else ""
        wrong = [f"{n}{times} in {name}" for n, name in found if n != row.factor * value]
        yield Compared(row.field, row.field, value, wrong[0] if wrong else None)


def _is_meant(name: str, tensor: str) -> bool:
    return name.endswith(tensor) if tensor.startswith(".") else name == tensor


def _count(value: object, tensors: Mapping[str, Tensor], row: _Count) -> Iterator[Compared]:
    """Compare the number of modules. A list of layers_per_block has one number for each block."""
    expected = len(value) if isinstance(value, list) else value
    inside = [name.removeprefix(row.prefix) for name in tensors if name.startswith(row.prefix)]
    count = len({name.partition(".")[0] for name in inside})
    is_known = not isinstance(value, list) or row.field == "block_out_channels"
    if type(expected) is int and count and is_known:
        found = None if count == expected else f"{count} {row.prefix[:-1]}"
        yield Compared(row.field, row.field, value, found)


def _channels(value: object, tensors: Mapping[str, Tensor]) -> Iterator[Compared]:
    """Compare the channels of each block; those on the way up are in reverse order."""
    if not isinstance(value, list):
        return
    for name, tensor in tensors.items():
        match = _BLOCK.fullmatch(name)
        number = len(value) if match is None else int(match[2])
        if match is None or number >= len(value) or not tensor.shape:
            continue
        expected = value[number] if match[1] == "down" else value[-1 - number]
        if tensor.shape[0] != expected:
            yield Compared(
                "block_out_channels", "block_out_channels", value, f"{tensor.shape[0]} in {name}"
            )
            return


def _heads(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[Compared]:
    """Compare the rows of the first query with the heads and their size."""
    heads, size = config.get("num_attention_heads"), config.get("attention_head_dim")
    rows = [tensor.shape[0] for name, tensor in tensors.items() if _QUERY.fullmatch(name)]
    if type(heads) is int and type(size) is int and rows:
        found = None if rows[0] == heads * size else f"{rows[0]} rows of {size} in the queries"
        yield Compared("heads", "num_attention_heads", heads, found)
