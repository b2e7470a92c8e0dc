"""Families that no recipe of ckptkit knows: rules written from the notation alone, and tensors that
torch puts in order by its own functions. From each container into each, and back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import ckptkit
from tests.conftest import Ok
from tests.rules.test_applying import CONTAINERS, assert_same, stored

State = dict[str, torch.Tensor]
LAYERS, WIDTH = 2, 8


class Family(NamedTuple):
    """A recipe, the sizes in config.json, and tensors in both layouts."""

    lines: list[str]
    config: dict[str, Any]
    make: Callable[[], tuple[State, State]]


def gemma() -> tuple[State, State]:
    """Queries, keys and values as einsums of JAX have them: heads first, the input in the middle."""
    here, there = {}, {}
    for n in range(LAYERS):
        q, k, v = (torch.randn(heads * 6, WIDTH) for heads in (4, 2, 2))
        gate, up, down = torch.randn(10, WIDTH), torch.randn(10, WIDTH), torch.randn(WIDTH, 10)
        o = torch.randn(WIDTH, 24)
        old = f"model.layers.{n}"
        here |= {
            f"{old}.self_attn.{p}_proj.weight": w for p, w in zip("qkvo", (q, k, v, o), strict=True)
        }
        here |= {f"{old}.mlp.gate_proj.weight": gate, f"{old}.mlp.up_proj.weight": up}
        here |= {f"{old}.mlp.down_proj.weight": down}
        here |= {f"{old}.input_layernorm.weight": torch.randn(WIDTH)}
        new = f"transformer.layer_{n}"
        there |= {
            f"{new}.attn.q_einsum.w": q.unflatten(0, (4, 6)).mT,
            f"{new}.attn.kv_einsum.w": torch.stack([k, v]).unflatten(1, (2, 6)).mT,
            f"{new}.attn.attn_vec_einsum.w": o.T.unflatten(0, (4, 6)),
            f"{new}.mlp.gating_einsum": torch.stack([gate, up]),
            f"{new}.mlp.linear": down.T,
            f"{new}.pre_attention_norm.scale": here[f"{old}.input_layernorm.weight"],
        }
    here["model.embed_tokens.weight"] = torch.randn(12, WIDTH)
    there["transformer.embedder.input_embedding"] = here["model.embed_tokens.weight"]
    return here, there


def mamba() -> tuple[State, State]:
    """The two halves of the projection apart; the kernel without the dimension of one channel."""
    here, there = {}, {}
    for n in range(LAYERS):
        x, z, kernel = torch.randn(16, WIDTH), torch.randn(16, WIDTH), torch.randn(16, 1, 4)
        old, new = f"backbone.layers.{n}.mixer", f"blocks.{n + 1}.ssm"
        here |= {f"{old}.in_proj.weight": torch.cat([x, z]), f"{old}.conv1d.weight": kernel}
        there |= {f"{new}.to_x": x.T, f"{new}.to_z": z.T, f"{new}.conv": kernel.squeeze(1)}
        for name in ("A_log", "D"):
            here[f"{old}.{name}"] = there[f"{new}.{name}"] = torch.randn(16)
    return here, there


def opt() -> tuple[State, State]:
    """Called qkv, and in the order k, v, q."""
    here, there = {}, {}
    for n in range(LAYERS):
        for w, shape in (("weight", (WIDTH, WIDTH)), ("bias", (WIDTH,))):
            k, v, q = (torch.randn(shape) for _ in range(3))
            here[f"decoder.layers.{n}.self_attn.qkv_proj.{w}"] = torch.cat([k, v, q])
            for p, part in (("k", k), ("v", v), ("q", q)):
                there[f"model.decoder.layers.{n}.self_attn.{p}_proj.{w}"] = part
    return here, there


def bloom() -> tuple[State, State]:
    """Each head has its query, key and value together."""
    here, there = {}, {}
    for n in range(LAYERS):
        for w, shape in (("weight", (12, WIDTH)), ("bias", (12,))):
            parts = [torch.randn(shape) for _ in range(3)]
            heads = torch.stack([each.unflatten(0, (4, 3)) for each in parts], 1)
            here[f"h.{n}.self_attention.query_key_value.{w}"] = heads.flatten(0, 2)
            there |= {f"h.{n}.attn.{p}.{w}": each for p, each in zip("qkv", parts, strict=True)}
    return here, there


def llama4() -> tuple[State, State]:
    """Experts in one tensor, transposed, gate before up; one matrix for each there."""
    here, there = {}, {}
    for n in range(LAYERS):
        gate, up, down = (
            torch.randn(3, 6, WIDTH),
            torch.randn(3, 6, WIDTH),
            torch.randn(3, WIDTH, 6),
        )
        old, new = f"layers.{n}.feed_forward.experts", f"layers.{n}.mlp.experts"
        here |= {f"{old}.gate_up_proj": torch.cat([gate, up], 1).mT, f"{old}.down_proj": down.mT}
        for e in range(3):
            for part, whole in (("gate", gate), ("up", up), ("down", down)):
                there[f"{new}.{e}.{part}_proj.weight"] = whole[e].clone()
    return here, there


FAMILIES = {
    "gemma to einsums": Family(
        [
            "model.layers.{l}.self_attn.q_proj.weight [(n h) d] -> transformer.layer_{l}.attn.q_einsum.w [n d h] with n=config.num_attention_heads",
            "model.layers.{l}.self_attn.{p:k|v}_proj.weight [(n h) d] -> transformer.layer_{l}.attn.kv_einsum.w [p n d h] with n=config.num_key_value_heads",
            "model.layers.{l}.self_attn.o_proj.weight [d (n h)] -> transformer.layer_{l}.attn.attn_vec_einsum.w [n h d] with n=config.num_attention_heads",
            "model.layers.{l}.mlp.{m:gate|up}_proj.weight [f d] -> transformer.layer_{l}.mlp.gating_einsum [m f d]",
            "model.layers.{l}.mlp.down_proj.weight [d f] -> transformer.layer_{l}.mlp.linear [f d]",
            "model.layers.{l}.input_layernorm.weight -> transformer.layer_{l}.pre_attention_norm.scale",
            "model.embed_tokens.weight -> transformer.embedder.input_embedding",
        ],
        {"num_attention_heads": 4, "num_key_value_heads": 2},
        gemma,
    ),
    "mamba": Family(
        [
            "backbone.layers.{l}.mixer.in_proj.weight [(m o) i] -> blocks.{l+1}.ssm.to_{m:x|z} [i o]",
            "backbone.layers.{l}.mixer.conv1d.weight [c 1 k] -> blocks.{l+1}.ssm.conv [c k]",
            "backbone.layers.{l}.mixer.{w:A_log|D} -> blocks.{l+1}.ssm.{w}",
        ],
        {},
        mamba,
    ),
    "opt": Family(
        [
            "decoder.layers.{l}.self_attn.qkv_proj.{w:*} [(p o) ...] -> model.decoder.layers.{l}.self_attn.{p:k|v|q}_proj.{w} [o ...]"
        ],
        {},
        opt,
    ),
    "bloom": Family(
        [
            "h.{l}.self_attention.query_key_value.{w:*} [(n p d) ...] -> h.{l}.attn.{p:q|k|v}.{w} [(n d) ...] with n=config.n_head"
        ],
        {"n_head": 4},
        bloom,
    ),
    "llama 4": Family(
        [
            "layers.{l}.feed_forward.experts.gate_up_proj [e i (m o)] -> layers.{l}.mlp.experts.{e}.{m:gate|up}_proj.weight [o i]",
            "layers.{l}.feed_forward.experts.down_proj [e i o] -> layers.{l}.mlp.experts.{e}.down_proj.weight [o i]",
        ],
        {},
        llama4,
    ),
}  # fmt: skip
FORMS = {
    "model.safetensors": (),
    "model.pth": (),
    "shards": ("--shard-size", "1kB"),
    "dcp": ("--format", "dcp"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(family: str, container: str, tmp_path: Path, ok: Ok) -> None:
    torch.manual_seed(0)
    lines, sizes, make = FAMILIES[family]
    here, there = ({k: v.contiguous() for k, v in state.items()} for state in make())
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    (tmp_path / "recipe.yaml").write_text(json.dumps({"steps": [{"rules": lines}]}))
    source = stored(here, tmp_path / "in", container)
    given = ("--config", tmp_path / "config.json", *FORMS[container])
    for expected, name, way in ((there, "there", ()), (here, "back", ("--reverse",))):
        (tmp_path / name).mkdir()
        made = tmp_path / name / container
        ok("run", tmp_path / "recipe.yaml", source, made, *given, *way)
        assert_same(ckptkit.load(made), expected)
        source = made
