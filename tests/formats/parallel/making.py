"""Whole models of random numbers, and their parts, cut by torch as each layout's own code cuts
them."""

from __future__ import annotations

import io
import json
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch

State = dict[str, torch.Tensor]
# How a tensor is cut: the dimension; None if it is not; the sizes of blocks of rows, each of which
# is cut; or the sizes of the parts of each block.
How = int | Sequence[int] | Sequence[Sequence[int]] | None


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def part(whole: torch.Tensor, how: How, rank: int, count: int) -> torch.Tensor:
    """The part of one of `count` ranks."""
    if how is None:
        return whole.clone()
    if isinstance(how, int):
        return whole.chunk(count, how)[rank].clone()
    sizes = [[n // count] * count if isinstance(n, int) else list(n) for n in how]
    blocks = whole.split([sum(each) for each in sizes])
    return torch.cat([b.split(each)[rank] for b, each in zip(blocks, sizes, strict=True)])


def parts(whole: Mapping[str, tuple[torch.Tensor, How]], rank: int, count: int) -> State:
    return {name: part(tensor, how, rank, count) for name, (tensor, how) in whole.items()}


def shaped(text: str, at: str = "") -> State:
    """Tensors of the names and shapes of a text, with `at` before the names.

    A line can begin with what comes before the names in it: ``attention.: wq 16 16; wk 8 16``.
    """
    made = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        module, _, named = line.rpartition(": ")
        for name, *shape in map(str.split, named.split(";")):
            made[at + module + name] = rows(*map(int, shape))
    return made


# Megatron-LM, mcore names: hidden 8, heads 4 of 2 rows, 2 query groups, feed-forward 12,
# vocabulary 16

ATTENTION = """
self_attention.: linear_qkv.layer_norm_weight 8; linear_qkv.weight 16 8; linear_proj.weight 8 8
"""
PREDICTOR = """
enorm.weight 8; hnorm.weight 8; eh_proj.weight 8 16; final_layernorm.weight 8
transformer_layer.self_attention.: linear_qkv.weight 16 8; linear_proj.weight 8 8
transformer_layer.mlp.: linear_fc1.weight 24 8; linear_fc2.weight 8 12
"""
BY_ROWS = re.compile(
    r".*(linear_fc1\.weight|linear_qkv\.weight|eh_proj\.weight|embeddings|output_layer).*"
)
BY_COLUMNS = re.compile(r".*(linear_proj|linear_fc2)\.weight.*")


def mcore(
    layers: int, *, experts: int = 0, gated: bool = True, tied: bool = False, bias: bool = False
) -> State:
    state = {"embedding.word_embeddings.weight": rows(16, 8)}
    wide = 24 if gated else 12
    for n in range(layers):
        text = ATTENTION + "self_attention.linear_proj.bias 8" * bias
        if experts:
            text += f"\npre_mlp_layernorm.weight 8\nmlp.router.weight {experts} 8"
        else:
            text += "\nmlp.linear_fc1.layer_norm_weight 8"
        for each in map(str, range(experts)) if experts else ("",):
            at = "mlp.experts" if experts else "mlp"
            text += f"\n{at}.linear_fc1.weight{each} {wide} 8\n{at}.linear_fc2.weight{each} 8 12"
        state |= shaped(text, f"decoder.layers.{n}.")
    state["decoder.final_layernorm.weight"] = rows(8)
    if not tied:
        state["output_layer.weight"] = rows(16, 8)
    return state


def predictor() -> State:
    """The layers of multi-token prediction, on the last stage."""
    return shaped(PREDICTOR, "mtp.layers.0.")


def mcore_how(name: str, whole: torch.Tensor, *, gated: bool) -> How:
    """After the column and row parallel layers of Megatron core."""
    if gated and "linear_fc1.weight" in name:
        return [len(whole) // 2] * 2
    if BY_ROWS.fullmatch(name):
        return 0
    return 1 if BY_COLUMNS.fullmatch(name) else None


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
    gated, experts = said.get("swiglu", True), said.get("num_experts", 0) // ep
    args = arguments(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=len(stages),
        expert_model_parallel_size=ep,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        num_layers=sum(len(own) for stage in stages for own in stage),
        **said,
    )
    top = folder / f"iter_{iteration:07d}"
    whole = {name: (each, mcore_how(name, each, gated=gated)) for name, each in state.items()}
    shared = {"output_layer.weight": whole["embedding.word_embeddings.weight"], **whole}
    for (p, stage), t, e in product(enumerate(stages), range(tp), range(ep)):
        place = top / (
            f"mp_rank_{t:02d}" + f"_{p:03d}" * (len(stages) > 1) + f"_{e:03d}" * (ep > 1)
        )
        place.mkdir(parents=True)
        saved: dict[str, Any] = {"args": args, "checkpoint_version": 3.0, "iteration": iteration}
        for v, own in enumerate(stage):
            first, last = (p, v) == (0, 0), (p, v) == (len(stages) - 1, virtual - 1)
            named = {name: _local(name, own, first, last, e, experts) for name in whole}
            if last and not first:
                named["output_layer.weight"] = "output_layer.weight"
            held = {kept: part(*shared[name], t, tp) for name, kept in named.items() if kept}
            extra = {"decoder.layers.0.mlp.linear_fc1._extra_state": None}
            saved[f"model{v}" if virtual > 1 else "model"] = {**held, **extra}
        torch.save(saved, place / "model_optim_rng.pt")
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


# Meta: width 16, heads 8, key heads 4, feed-forward 24, vocabulary 40


def llama(layers: int, *, version: int) -> State:
    keys = 8 if version > 2 else 16
    state = shaped("tok_embeddings.weight 40 16; norm.weight 16; output.weight 40 16")
    layer = f"""
        attention.: wq.weight 16 16; wk.weight {keys} 16; wv.weight {keys} 16; wo.weight 16 16
        feed_forward.: w1.weight 24 16; w2.weight 16 24; w3.weight 24 16
        attention_norm.weight 16"""
    for n in range(layers):
        state |= shaped(layer, f"layers.{n}.")
    return state


def release(folder: Path, state: State, count: int, *, version: int) -> Path:
    """The parts of a Llama release, as fairscale's parallel layers hold them."""
    columns = ("wo.weight", "w2.weight", *(["tok_embeddings.weight"] if version < 3 else []))
    whole = {
        name: (each, None if name.endswith("norm.weight") else int(name.endswith(columns)))
        for name, each in state.items()
    }
    layers = len({name.split(".")[1] for name in state if name.startswith("layers.")})
    params = {"dim": 16, "n_heads": 8, "n_layers": layers, "vocab_size": -1 if version < 3 else 40}
    return _release(folder, whole, count, {**params, **({"n_kv_heads": 4} if version > 2 else {})})


def _release(
    folder: Path,
    whole: Mapping[str, tuple[torch.Tensor, How]],
    count: int,
    params: Any,
    **more: Any,
) -> Path:
    folder.mkdir(exist_ok=True)
    for rank in range(count):
        torch.save({**more, **parts(whole, rank, count)}, folder / f"consolidated.{rank:02d}.pth")
    (folder / "params.json").write_text(json.dumps(params))
    return folder


# Each tensor of version 4 with its shape, and how it is cut: the dimension, - where it is not, or
# the sizes of blocks. Heads 4 of 4 rows, 2 key heads, 2 experts, feed-forward 12.
LLAMA_4 = """
: tok_embeddings.weight 40,16 0; norm.weight 16 -; output.weight 40,16 0
layers.0.attention.: wqkv.layer_norm_weight 16 -; wqkv.weight 32,16 16,8,8; wo.weight 16,16 1
layers.0.feed_forward.: mlp.fc1_weight 24,16 12,12; mlp.fc2_weight 16,12 1; norm.weight 16 -
layers.0.feed_forward.: router_DE 16,2 -; global_gate_stats_3E 3,2 -; w_in_shared_FD.weight 12,16 0
layers.0.feed_forward.: w_swiglu_FD.weight 12,16 0; w_out_shared_DF.weight 16,12 1
layers.0.feed_forward.experts.: moe_w_in_eD_F 32,12 1; moe_w_swiglu_eD_F 32,12 1
layers.0.feed_forward.experts.: moe_w_out_eF_D 24,16 12,12
vision_embeddings.vision_encoder.: class_embedding 8 -; positional_embedding_vlm 5,8 -
vision_embeddings.vision_encoder.: conv1._linear.weight 8,12 0; ln_pre.weight 8 -
vision_embeddings.vision_encoder.transformer.resblocks.0.: ln_1.bias 8 -; mlp.c_fc.bias 12 0
vision_embeddings.vision_encoder.transformer.resblocks.0.attn.: wq.weight 8,8 0; wq.bias 8 0
vision_embeddings.vision_encoder.transformer.resblocks.0.attn.: wo.weight 8,8 1; wo.bias 8 -
vision_embeddings.vision_encoder.transformer.resblocks.0.mlp.: c_proj.weight 8,12 1; c_proj.bias 8 -
vision_embeddings.vision_adapter.mlp.: c_fc.weight 12,8 0
vision_projection.: weight 16,12 0
"""


def release4(folder: Path, count: int) -> tuple[Path, State]:
    """The parts of version 4; each with what only its process counted."""
    whole: dict[str, tuple[torch.Tensor, How]] = {}
    for line in LLAMA_4.split("\n")[1:-1]:
        module, _, named = line.partition(": ")
        for name, shape, how in map(str.split, named.split(";")):
            blocks = [int(n) for n in how.split(",") if n != "-"]
            tensor = rows(*map(int, shape.split(",")))
            whole[module + name] = tensor, (blocks if blocks[1:] else next(iter(blocks), None))
    own: dict[str, Any] = {"layers.0.attention.wo._extra_state": io.BytesIO(b"x")}
    own["layers.0.feed_forward.running_gate_stats_3E"] = torch.ones(3, 2)
    params = {
        "dim": 16, "n_heads": 4, "n_kv_heads": 2, "n_layers": 1, "moe_args": {"num_experts": 2},
    }  # fmt: skip
    _release(folder, whole, count, {"model": params}, **own)
    return folder, {name: tensor for name, (tensor, _) in whole.items()}


# DeepSpeed


def tag(folder: Path, number: int) -> Path:
    """The folder of a step, which `latest` names."""
    made = folder / f"global_step{number}"
    made.mkdir(parents=True)
    (folder / "latest").write_text(made.name)
    return made


def neox(
    folder: Path, count: int, *, residual: bool | None, drift: bool = False
) -> tuple[Path, State]:
    """One layer of gpt-neox between embedding and head; the biases after row-parallel products as
    the setting has them."""
    step = tag(folder, 5)
    whole = shaped("""
        0.word_embeddings.weight 12 8
        2.: attention.dense.weight 8 8; mlp.dense_h_to_4h.weight 16 8; mlp.dense_h_to_4h.bias 16""")
    held = [
        {n: part(t, int(n == "2.attention.dense.weight"), r, count) for n, t in whole.items()}
        for r in range(count)
    ]
    biases = [rows(8)] * count if not residual else [rows(8) for _ in range(count)]
    norm = rows(8)
    norms = [norm + 0.01 * rank * drift for rank in range(count)]
    whole["2.attention.dense.bias"] = (
        torch.stack(biases).double().sum(0).float() if residual else biases[0]
    )
    whole["3.norm.weight"] = torch.stack(norms).double().mean(0).float() if drift else norm
    for rank, state in enumerate(held):
        state |= {"2.attention.dense.bias": biases[rank], "3.norm.weight": norms[rank]}
        for layer in ("0", "2", "3"):
            own = {name[2:]: each for name, each in state.items() if name[0] == layer}
            torch.save(own, step / f"layer_0{layer}-model_{rank:02d}-model_states.pt")
        said = {"module": None, "mp_world_size": count, "iteration": 5}
        torch.save(said, step / f"mp_rank_{rank:02d}_model_states.pt")
    if residual is not None:
        (step / "configs").mkdir()
        config = {"model-parallel-size": count, "gpt-j-residual": residual}
        (step / "configs" / "a.yml").write_text(json.dumps(config))
    return folder, whole


def universal(
    folder: Path, whole: Mapping[str, tuple[torch.Tensor, How]], **info: Any
) -> tuple[Path, State]:
    """Two tensor ranks whose files say how they were cut."""
    step = tag(folder, 1)
    for rank in range(2):
        state = {"module": parts(whole, rank, 2), "mp_world_size": 2}
        said = {"universal_checkpoint_version": 0.2, **info}
        torch.save(
            {**state, "universal_checkpoint_info": said},
            step / f"mp_rank_{rank:02d}_model_states.pt",
        )
    return folder, {name: tensor for name, (tensor, _) in whole.items()}


# fairscale


def padded(tensor: torch.Tensor, count: int) -> Iterator[tuple[torch.Tensor, int]]:
    """The shards of a tensor, the last of which are filled up, and how many elements fill each."""
    size = -(-tensor.numel() // count)
    for at in range(0, size * count, size):
        piece = tensor.reshape(-1)[at : at + size]
        padding = size - len(piece)
        yield torch.cat([piece, torch.zeros(padding)]), padding


def fairscale(folder: Path, parts: int, shards: int) -> tuple[Path, State]:
    """A block whose parameters are one flat one, in model parts and shards."""
    folder.mkdir(exist_ok=True)
    whole = shaped("fc1.weight 6 5; fc2.weight 5 6; layer_norm.weight 5")
    for m in range(parts):
        cuts = zip(whole.items(), (0, 1, None), strict=True)
        own = {name: part(each, how, m, parts) for (name, each), how in cuts}
        flat = torch.cat([each.reshape(-1) for each in own.values()])
        for s, (held, padding) in enumerate(padded(flat, shards)):
            described = {
                "names": list(own), "shapes": [each.shape for each in own.values()],
                "numels": [each.numel() for each in own.values()], "padding": padding,
            }  # fmt: skip
            module = {
                "fsdp_path": "decoder", "num_padded": [padding], "no_broadcast_optim_state": False,
                "params": {"flat_param_0": described}, "buffer_names": ["decoder.version"],
                "shared_param_info": [("fc1.weight", "tied.fc1.weight")],
            }  # fmt: skip
            saved = {
                "model": {"decoder.flat_param_0": held, "decoder.version": torch.tensor([3.0])},
                "shard_metadata": {"param_metadata": [module]}, "last_optimizer_state": {},
            }  # fmt: skip
            torch.save(saved, folder / f"checkpoint_last-model_part-{m}-shard{s}.pt")
    whole |= {"version": torch.tensor([3.0]), "tied.fc1.weight": whole["fc1.weight"]}
    return folder, {f"decoder.{name}": tensor for name, tensor in whole.items()}


def fairscale_by_name(folder: Path, *, flat: bool) -> tuple[Path, State]:
    """Metadata of fairscale until 0.4.0: lists of the parameters of a module, flattened or each by
    itself, in three shards."""
    folder.mkdir(exist_ok=True)
    own = shaped("a 3 5; b 4")
    joined = {"flat_param_0": torch.cat([t.reshape(-1) for t in own.values()])} if flat else own
    cut = {name: list(padded(tensor, 3)) for name, tensor in joined.items()}
    for s in range(3):
        state = {f"layers.0.{name}": each[s][0] for name, each in cut.items()}
        state["layers.0.version"] = torch.tensor([3.0])
        described = {
            "fsdp_path": "layers.0", "is_flat": flat, "num_padded": [each[s][1] for each in cut.values()],
            "param_names": list(own), "param_shapes": [t.shape for t in own.values()],
            "param_numels": [t.numel() for t in own.values()], "no_broadcast_optim_state": False,
        }  # fmt: skip
        metadata = {"param_metadata": [described], "buffer_names": ["layers.0.version"]}
        torch.save({"model": state, "shard_metadata": metadata}, folder / f"last-shard{s}.pt")
    whole = {**own, "version": torch.tensor([3.0])}
    return folder, {f"layers.0.{name}": tensor for name, tensor in whole.items()}
