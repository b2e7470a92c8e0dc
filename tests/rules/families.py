"""Recipes for the pairs in the vectors, and the pairs themselves."""

from __future__ import annotations

import os
from pathlib import Path

VECTORS = Path(os.environ.get("CKPTKIT_VECTORS", "/nowhere")) / "rules"

RULES: dict[str, list[str]] = {
    "mixtral-experts": [
        "model.layers.{l}.block_sparse_moe.experts.{e}.w{m:1|3}.weight [o i] -> model.layers.{l}.mlp.experts.gate_up_proj [e (m o) i]",
        "model.layers.{l}.block_sparse_moe.experts.{e}.w2.weight [o i] -> model.layers.{l}.mlp.experts.down_proj [e o i]",
        "model.layers.{l}.block_sparse_moe.gate.weight -> model.layers.{l}.mlp.gate.weight",
    ],
    "llama-meta": [
        "layers.{l}.attention.wq.weight [(h r two) i] -> model.layers.{l}.self_attn.q_proj.weight [(h two r) i] with h=config.num_attention_heads or config.n_heads two=2",
        "layers.{l}.attention.wk.weight [(h r two) i] -> model.layers.{l}.self_attn.k_proj.weight [(h two r) i] with h=config.num_key_value_heads or config.num_attention_heads two=2",
        "layers.{l}.attention.w{p:v|o}.weight -> model.layers.{l}.self_attn.{p}_proj.weight",
        "layers.{l}.feed_forward.w{p:1|2|3}.weight -> model.layers.{l}.mlp.{p:gate|down|up}_proj.weight",
        "layers.{l}.{n:attention|ffn}_norm.weight -> model.layers.{l}.{n:input|post_attention}_layernorm.weight",
        "{n:tok_embeddings|norm|output}.weight -> {n:model.embed_tokens|model.norm|lm_head}.weight",
    ],
    "gpt2-conv1d": [
        "h.{l}.attn.c_attn.weight [i (p o)] -> h.{l}.attn.{p:q|k|v}.weight [o i]",
        "h.{l}.attn.c_attn.bias [(p o)] -> h.{l}.attn.{p:q|k|v}.bias [o]",
        "h.{l}.{m:attn.c_proj|mlp.c_fc|mlp.c_proj}.weight [i o] -> h.{l}.{m}.weight [o i]",
    ],
    "phi3-fused-gqa": [
        "model.layers.{l}.self_attn.qkv_proj.weight [(p n d) i] -> model.layers.{l}.self_attn.{p:q|k|v}_proj.weight [(n d) i] with n=config.num_attention_heads|kv|kv kv=config.num_key_value_heads",
        "model.layers.{l}.mlp.gate_up_proj.weight [(m o) i] -> model.layers.{l}.mlp.{m:gate|up}_proj.weight [o i]",
    ],
}  # fmt: skip
