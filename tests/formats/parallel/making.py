"""Whole models of random numbers, and their parts, cut by torch as each layout's own code cuts
them."""

from __future__ import annotations

import io
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

State = dict[str, torch.Tensor]


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


# Megatron-LM, mcore names


def mcore(
    layers: int, *, experts: int = 0, gated: bool = True, tied: bool = False, bias: bool = False
) -> State:
    """Hidden 8, heads 4 of 2 rows, 2 query groups, feed-forward 12, vocabulary 16."""
    state = {"embedding.word_embeddings.weight": rows(16, 8)}
    for n in range(layers):
        at = f"decoder.layers.{n}."
        state[at + "self_attention.linear_qkv.layer_norm_weight"] = rows(8)
        state[at + "self_attention.linear_qkv.weight"] = rows(16, 8)
        state[at + "self_attention.linear_proj.weight"] = rows(8, 8)
        if bias:
            state[at + "self_attention.linear_proj.bias"] = rows(8)
        wide = 24 if gated else 12
        if experts:
            state[at + "pre_mlp_layernorm.weight"] = rows(8)
            state[at + "mlp.router.weight"] = rows(experts, 8)
            for e in range(experts):
                state[at + f"mlp.experts.linear_fc1.weight{e}"] = rows(wide, 8)
                state[at + f"mlp.experts.linear_fc2.weight{e}"] = rows(8, 12)
        else:
            state[at + "mlp.linear_fc1.layer_norm_weight"] = rows(8)
            state[at + "mlp.linear_fc1.weight"] = rows(wide, 8)
            state[at + "mlp.linear_fc2.weight"] = rows(8, 12)
    state["decoder.final_layernorm.weight"] = rows(8)
    if not tied:
        state["output_layer.weight"] = rows(16, 8)
    return state


def mcore_cut(
    name: str, whole: torch.Tensor, rank: int, count: int, *, gated: bool = True
) -> torch.Tensor:
    """Return the part of one tensor rank, after the column and row parallel layers of Megatron
    core.
    """
    if "linear_fc1.weight" in name and gated:
        return torch.cat([half.chunk(count)[rank] for half in whole.chunk(2)]).clone()
    if (
        "linear_fc1.weight" in name
        or "linear_qkv.weight" in name
        or "eh_proj.weight" in name
        or "embeddings" in name
        or "output_layer" in name
    ):
        return whole.chunk(count)[rank].clone()
    if "linear_proj.weight" in name or "linear_fc2.weight" in name:
        return whole.chunk(count, 1)[rank].clone()
    return whole.clone()


def arguments(**said: Any) -> Namespace:
    common = {
        "hidden_size": 8, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 2, "padded_vocab_size": 16,
        "swiglu": True, "untie_embeddings_and_output_weights": True, "params_dtype": torch.float32,
        "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "expert_model_parallel_size": 1,
    }  # fmt: skip
    return Namespace(**{**common, **said})


def megatron(
    folder: Path,
    state: State,
    stages: list[list[list[int]]],
    *,
    tp: int = 1,
    ep: int = 1,
    iteration: int = 3,
    **said: Any,
) -> Path:
    """Parts of `state`; `stages` are the layers of each pipeline rank and virtual stage."""
    virtual = len(stages[0])
    layers = sum(len(part) for stage in stages for part in stage)
    gated = said.get("swiglu", True)
    args = arguments(
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=len(stages), expert_model_parallel_size=ep,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None, num_layers=layers, **said,
    )  # fmt: skip
    experts = said.get("num_experts")
    top = folder / f"iter_{iteration:07d}"
    for p, stage in enumerate(stages):
        for t in range(tp):
            for e in range(ep):
                name = (
                    f"mp_rank_{t:02d}"
                    + (f"_{p:03d}" if len(stages) > 1 else "")
                    + (f"_{e:03d}" if ep > 1 else "")
                )
                (top / name).mkdir(parents=True, exist_ok=True)
                saved: dict[str, Any] = {
                    "args": args,
                    "checkpoint_version": 3.0,
                    "iteration": iteration,
                }
                for v, own in enumerate(stage):
                    part = {}
                    first, last = (p, v) == (0, 0), (p, v) == (len(stages) - 1, virtual - 1)
                    for name_of, whole in state.items():
                        place = _local(name_of, own, first, last, e, (experts or 0) // ep)
                        if place is not None:
                            part[place] = mcore_cut(name_of, whole, t, tp, gated=gated)
                    if last and not first and "output_layer.weight" not in state:
                        shared = state["embedding.word_embeddings.weight"]
                        part["output_layer.weight"] = mcore_cut("output_layer", shared, t, tp)
                    part_extra = {**part, "decoder.layers.0.mlp.linear_fc1._extra_state": None}
                    saved["model" + (str(v) if virtual > 1 else "")] = part_extra
                torch.save(saved, top / name / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text(f"{iteration}\n")
    return folder


def _local(
    name: str, own: list[int], first: bool, last: bool, ep: int, per_rank: int
) -> str | None:
    """Return the name of a tensor in a part, None if it is not there."""
    if not name.startswith("decoder.layers."):
        return name if (first if name.startswith("embedding") else last) else None
    number, rest = name.removeprefix("decoder.layers.").split(".", 1)
    if int(number) not in own:
        return None
    if per_rank and ".experts." in name:
        stem, _, expert = rest.rpartition("weight")
        if int(expert) // per_rank != ep:
            return None
        rest = f"{stem}weight{int(expert) % per_rank}"
    return f"decoder.layers.{own.index(int(number))}.{rest}"


def predictor() -> State:
    """The layers of multi-token prediction, on the last stage."""
    inner = "mtp.layers.0.transformer_layer."
    return {
        "mtp.layers.0.enorm.weight": rows(8),
        "mtp.layers.0.hnorm.weight": rows(8),
        "mtp.layers.0.eh_proj.weight": rows(8, 16),
        f"{inner}self_attention.linear_qkv.weight": rows(16, 8),
        f"{inner}self_attention.linear_proj.weight": rows(8, 8),
        f"{inner}mlp.linear_fc1.weight": rows(24, 8),
        f"{inner}mlp.linear_fc2.weight": rows(8, 12),
        "mtp.layers.0.final_layernorm.weight": rows(8),
    }


# Meta


def llama(layers: int, *, version: int) -> State:
    """Width 16, heads 8, key heads 4, feed-forward 24, vocabulary 40."""
    state = {
        "tok_embeddings.weight": rows(40, 16),
        "norm.weight": rows(16),
        "output.weight": rows(40, 16),
    }
    for n in range(layers):
        at = f"layers.{n}."
        for name, height in (
            ("wq", 16),
            ("wk", 8 if version > 2 else 16),
            ("wv", 8 if version > 2 else 16),
        ):
            state[f"{at}attention.{name}.weight"] = rows(height, 16)
        state[f"{at}attention.wo.weight"] = rows(16, 16)
        state[f"{at}feed_forward.w1.weight"] = rows(24, 16)
        state[f"{at}feed_forward.w2.weight"] = rows(16, 24)
        state[f"{at}feed_forward.w3.weight"] = rows(24, 16)
        state[f"{at}attention_norm.weight"] = rows(16)
    return state


def release(folder: Path, state: State, count: int, *, version: int) -> Path:
    """The parts of a Llama release, as fairscale's parallel layers hold them."""
    folder.mkdir()
    columns = ("wo.weight", "w2.weight", *(["tok_embeddings.weight"] if version < 3 else []))
    for rank in range(count):
        part = {}
        for name, whole in state.items():
            if name.endswith("norm.weight"):
                part[name] = whole.clone()
            else:
                part[name] = whole.chunk(count, int(name.endswith(columns)))[rank].clone()
        torch.save(part, folder / f"consolidated.{rank:02d}.pth")
    layers = len({name.split(".")[1] for name in state if name.startswith("layers.")})
    params = {"dim": 16, "n_heads": 8, "n_layers": layers, "vocab_size": -1 if version < 3 else 40}
    (folder / "params.json").write_text(
        json.dumps({**params, **({"n_kv_heads": 4} if version > 2 else {})})
    )
    return folder


def llama4() -> dict[str, tuple[torch.Tensor, Any]]:
    """Each tensor of a layer of version 4 and how it is cut: the dimension, None where it is not,
    or the sizes of blocks. Heads 4 of 4 rows, 2 key heads, 2 experts, feed-forward 12."""
    layer, image = "layers.0.", "vision_embeddings.vision_encoder."
    block = f"{image}transformer.resblocks.0."
    return {
        "tok_embeddings.weight": (rows(40, 16), 0),
        "norm.weight": (rows(16), None),
        "output.weight": (rows(40, 16), 0),
        f"{layer}attention.wqkv.layer_norm_weight": (rows(16), None),
        f"{layer}attention.wqkv.weight": (rows(32, 16), [16, 8, 8]),
        f"{layer}attention.wo.weight": (rows(16, 16), 1),
        f"{layer}feed_forward.mlp.fc1_weight": (rows(24, 16), [12, 12]),
        f"{layer}feed_forward.mlp.fc2_weight": (rows(16, 12), 1),
        f"{layer}feed_forward.norm.weight": (rows(16), None),
        f"{layer}feed_forward.router_DE": (rows(16, 2), None),
        f"{layer}feed_forward.global_gate_stats_3E": (rows(3, 2), None),
        f"{layer}feed_forward.experts.moe_w_in_eD_F": (rows(32, 12), 1),
        f"{layer}feed_forward.experts.moe_w_swiglu_eD_F": (rows(32, 12), 1),
        f"{layer}feed_forward.experts.moe_w_out_eF_D": (rows(24, 16), [12, 12]),
        f"{layer}feed_forward.w_in_shared_FD.weight": (rows(12, 16), 0),
        f"{layer}feed_forward.w_swiglu_FD.weight": (rows(12, 16), 0),
        f"{layer}feed_forward.w_out_shared_DF.weight": (rows(16, 12), 1),
        f"{image}class_embedding": (rows(8), None),
        f"{image}positional_embedding_vlm": (rows(5, 8), None),
        f"{image}conv1._linear.weight": (rows(8, 12), 0),
        f"{image}ln_pre.weight": (rows(8), None),
        f"{block}ln_1.bias": (rows(8), None),
        f"{block}attn.wq.weight": (rows(8, 8), 0),
        f"{block}attn.wq.bias": (rows(8), 0),
        f"{block}attn.wo.weight": (rows(8, 8), 1),
        f"{block}attn.wo.bias": (rows(8), None),
        f"{block}mlp.c_fc.bias": (rows(12), 0),
        f"{block}mlp.c_proj.weight": (rows(8, 12), 1),
        f"{block}mlp.c_proj.bias": (rows(8), None),
        "vision_embeddings.vision_adapter.mlp.c_fc.weight": (rows(12, 8), 0),
        "vision_projection.weight": (rows(16, 12), 0),
    }


def release4(folder: Path, count: int) -> tuple[Path, State]:
    """The parts of version 4, by torch.chunk; each with what only its process counted."""
    folder.mkdir()
    described = llama4()
    for rank in range(count):
        part: dict[str, Any] = {"layers.0.attention.wo._extra_state": io.BytesIO(b"x")}
        part["layers.0.feed_forward.running_gate_stats_3E"] = torch.full((3, 2), float(rank))
        for name, (whole, how) in described.items():
            if isinstance(how, list):
                part[name] = torch.cat([each.chunk(count)[rank] for each in whole.split(how)])
            else:
                part[name] = (whole if how is None else whole.chunk(count, how)[rank]).clone()
        torch.save(part, folder / f"consolidated.{rank:02d}.pth")
    params = {
        "dim": 16,
        "n_heads": 4,
        "n_kv_heads": 2,
        "n_layers": 1,
        "moe_args": {"num_experts": 2},
    }
    (folder / "params.json").write_text(json.dumps({"model": params}))
    return folder, {name: whole for name, (whole, _) in described.items()}


# gpt-neox


def neox(
    folder: Path, count: int, *, residual: bool | None, drift: bool = False
) -> tuple[Path, State]:
    """One layer between embedding and head; the biases after row-parallel products as the setting
    has them."""
    tag = folder / "global_step5"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step5")
    whole: State = {"0.word_embeddings.weight": rows(12, 8), "3.norm.weight": rows(8)}
    whole |= {"2.attention.dense.weight": rows(8, 8), "2.mlp.dense_h_to_4h.weight": rows(16, 8)}
    whole |= {"2.mlp.dense_h_to_4h.bias": rows(16), "2.attention.dense.bias": rows(8)}
    files: dict[tuple[int, int], State] = {}
    biases = [rows(8) for _ in range(count)]
    norms = [whole["3.norm.weight"] + (0.01 * rank if drift else 0) for rank in range(count)]
    if residual:
        whole["2.attention.dense.bias"] = torch.stack(biases).double().sum(0).float()
    if drift:
        whole["3.norm.weight"] = torch.stack(norms).double().mean(0).float()
    for name, tensor in whole.items():
        layer, short = name.split(".", 1)
        for rank in range(count):
            part = tensor.chunk(count, int(short == "attention.dense.weight"))[rank].clone()
            if short == "norm.weight":
                part = norms[rank].clone()
            elif short == "attention.dense.bias":
                part = biases[rank] if residual else tensor.clone()
            files.setdefault((int(layer), rank), {})[short] = part
    for (layer, rank), state in files.items():
        torch.save(state, tag / f"layer_{layer:02d}-model_{rank:02d}-model_states.pt")
    for rank in range(count):
        torch.save(
            {"module": None, "mp_world_size": count, "iteration": 5},
            tag / f"mp_rank_{rank:02d}_model_states.pt",
        )
    if residual is not None:
        (tag / "configs").mkdir()
        (tag / "configs" / "a.yml").write_text(
            f'{{"model-parallel-size": {count}, "gpt-j-residual": {str(residual).lower()}}}'
        )
    return folder, whole


# fairscale


def fairscale(folder: Path, parts: int, shards: int) -> tuple[Path, State]:
    """A block whose parameters are one flat one, in shards whose last is filled up; two model parts
    of it."""
    folder.mkdir()
    whole: State = {
        "decoder.fc1.weight": rows(6, 5),
        "decoder.fc2.weight": rows(5, 6),
        "decoder.layer_norm.weight": rows(5),
    }
    for m in range(parts):
        own = {
            "fc1.weight": whole["decoder.fc1.weight"].chunk(parts)[m],
            "fc2.weight": whole["decoder.fc2.weight"].chunk(parts, 1)[m].contiguous(),
            "layer_norm.weight": whole["decoder.layer_norm.weight"],
        }
        flat = torch.cat([each.reshape(-1) for each in own.values()])
        size = -(-len(flat) // shards)
        for s in range(shards):
            piece = flat[s * size : (s + 1) * size]
            padding = size - len(piece)
            held = torch.cat([piece, torch.zeros(padding)])
            described = {
                "names": list(own), "shapes": [each.shape for each in own.values()],
                "numels": [each.numel() for each in own.values()], "padding": padding,
            }  # fmt: skip
            metadata = {
                "param_metadata": [
                    {"fsdp_path": "decoder", "num_padded": [padding], "no_broadcast_optim_state": False,
                     "params": {"flat_param_0": described}, "buffer_names": ["decoder.version"],
                     "shared_param_info": [("fc1.weight", "tied.fc1.weight")]}
                ],
            }  # fmt: skip
            state = {"decoder.flat_param_0": held, "decoder.version": torch.tensor([3.0])}
            name = f"checkpoint_last-model_part-{m}-shard{s}.pt"
            torch.save(
                {"model": state, "shard_metadata": metadata, "last_optimizer_state": {}},
                folder / name,
            )
    whole |= {
        "decoder.version": torch.tensor([3.0]),
        "decoder.tied.fc1.weight": whole["decoder.fc1.weight"],
    }
    return folder, whole


def fairscale_by_name(folder: Path, *, flat: bool) -> tuple[Path, State]:
    """Metadata of fairscale until 0.4.0: lists of the parameters of a module, flattened or each by
    itself, in three shards."""
    folder.mkdir()
    whole: State = {"layers.0.a": rows(3, 5), "layers.0.b": rows(4)}
    own = {name.removeprefix("layers.0."): tensor for name, tensor in whole.items()}
    joined = {"flat_param_0": torch.cat([t.reshape(-1) for t in own.values()])} if flat else own
    for s in range(3):
        state, padded = {"layers.0.version": torch.tensor([3.0])}, []
        for name, tensor in joined.items():
            size = -(-tensor.numel() // 3)
            piece = tensor.reshape(-1)[s * size : (s + 1) * size]
            padded.append(size - len(piece))
            state[f"layers.0.{name}"] = torch.cat([piece, torch.zeros(padded[-1])])
        described = {
            "fsdp_path": "layers.0", "is_flat": flat, "num_padded": padded, "param_names": list(own),
            "param_shapes": [t.shape for t in own.values()], "param_numels": [t.numel() for t in own.values()],
            "no_broadcast_optim_state": False,
        }  # fmt: skip
        metadata = {"param_metadata": [described], "buffer_names": ["layers.0.version"]}
        torch.save({"model": state, "shard_metadata": metadata}, folder / f"last-shard{s}.pt")
    return folder, whole | {"layers.0.version": torch.tensor([3.0])}
