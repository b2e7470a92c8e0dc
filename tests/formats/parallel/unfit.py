"""Folders that are not put together, tables that do not fit, weights that are not cut: a row for
each place in the package that says so.

A row makes what is refused in a folder and tries it; its word is in the message or the hint, or in
the warning where only the optimizer is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

import ckptkit
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import (
    AmbiguousError,
    CorruptError,
    FormatError,
    PathError,
    UnsupportedError,
    UsageError,
)
from ckptkit.core.options import Options
from ckptkit.core.tensor import Tensor
from ckptkit.formats.distributed.llama import EMBEDDING
from ckptkit.formats.distributed.meshes import SHARD, Mesh, MeshPiece, Placement
from ckptkit.formats.distributed.table import ParallelLayout, cut_all, parse_rows
from tests.formats.deepspeed.hostile import ZERO
from tests.formats.folders import Edit, Row, change, files
from tests.formats.parallel import making
from tests.formats.parallel.old_forms import (
    Plain,
    dtensor,
    mesh_of_tensor,
    save,
    shard,
    sharded_tensor,
)

State = dict[str, Any]


# Rank files

WHOLE = torch.arange(12.0).reshape(6, 2)


def piece(rank: int, whole: torch.Tensor = WHOLE, world: int = 2, **said: Any) -> Any:
    """A DTensor of rows, on a mesh of one dimension."""
    mesh = mesh_of_tensor(torch.arange(world), _coordinate_on_dim=[said.get("at", rank)])
    return dtensor(whole, whole.chunk(world)[rank], mesh, (shard(0),))


def ranks(
    edit: Callable[[State], Any] = lambda held: None,
    *,
    name: str = "model_world_size_2_rank_{}.pt",
    optimizer: Callable[[int], Any] | None = None,
) -> Callable[[Path], Checkpoint]:
    """Two rank files, the second of which is edited, and those of an optimizer."""

    def attempt(folder: Path) -> Checkpoint:
        for rank in range(2):
            held = {"w": piece(rank), "b": torch.ones(3), "steps": 7, "names": ["a", "b"]}
            if rank:
                edit(held)
            save(held, folder / name.format(rank))
            if optimizer is not None:
                file = folder / f"optim_world_size_2_rank_{rank}.pt"
                save({"state": {}, "param_groups": [], **optimizer(rank)}, file)
        return ckptkit.open(folder)

    return attempt


def updated(**values: Any) -> Callable[[State], Any]:
    return lambda held: held.update(values)


def without(key: str) -> Callable[[State], Any]:
    return lambda held: held.pop(key)


def two_worlds(folder: Path) -> Checkpoint:
    ranks()(folder)
    for rank in range(3):
        save({"w": piece(rank, world=3)}, folder / f"model_world_size_3_rank_{rank}.pt")
    return ckptkit.open(folder)


def a_missing_rank(folder: Path) -> Checkpoint:
    ranks()(folder)
    (folder / "model_world_size_2_rank_1.pt").unlink()
    return ckptkit.open(folder)


def a_rank_too_many_without_ranks(folder: Path) -> Checkpoint:
    """DTensors of torch 2.9 may not say which rank wrote them: the name is all there is."""
    mesh = mesh_of_tensor(torch.arange(2))
    for rank in range(3):
        held = dtensor(WHOLE, WHOLE.chunk(2)[min(rank, 1)], mesh, (shard(0),))
        save({"w": held}, folder / f"rank{rank}.pt")
    return ckptkit.open(folder)


def another_world_in_the_name(folder: Path) -> Checkpoint:
    return ranks(name="model_world_size_4_rank_{}.pt")(folder)


def renamed(folder: Path) -> Checkpoint:
    ranks()(folder)
    first, second = (folder / f"model_world_size_2_rank_{rank}.pt" for rank in range(2))
    first.rename(folder / "spare")
    second.rename(first)
    (folder / "spare").rename(second)
    return ckptkit.open(folder)


def optimizer_of_others(folder: Path) -> Checkpoint:
    ranks(optimizer=lambda rank: {"state": {0: {"exp_avg": torch.ones(6)}}})(folder)
    (folder / "optim_world_size_2_rank_1.pt").unlink()
    return ckptkit.open(folder)


def flat_optimizer(state: Any, **groups: Any) -> Callable[[Path], Checkpoint]:
    """The optimizer as FSDP1 saves it without its own function; the model has 12 elements."""
    return ranks(optimizer=lambda rank: {"state": state, **groups})


def several_dimensions(folder: Path) -> Checkpoint:
    """A model on a mesh that cuts twice, an optimizer of flat pieces."""
    mesh = [mesh_of_tensor(torch.arange(4).reshape(2, 2), _coordinate_on_dim=[a, b])
            for a in range(2) for b in range(2)]  # fmt: skip
    whole = torch.arange(16.0).reshape(4, 4)
    for rank, each in enumerate(mesh):
        local = whole.chunk(2)[rank // 2].chunk(2, 1)[rank % 2].contiguous()
        held = dtensor(whole, local, each, (shard(0), shard(1)))
        save({"w": held}, folder / f"model_world_size_4_rank_{rank}.pt")
        state = {"state": {0: {"exp_avg": torch.ones(4)}}, "param_groups": []}
        torch.save(state, folder / f"optim_world_size_4_rank_{rank}.pt")
    return ckptkit.open(folder)


def half_of_each_replica(folder: Path) -> Checkpoint:
    """Ranks 0 and 3 of two replicas: the model is whole, but no replica of the optimizer is."""
    replicate = Plain("torch.distributed.tensor.placement_types", "Replicate", {})
    for rank in (0, 3):
        ranks = torch.arange(4).reshape(2, 2)
        mesh = mesh_of_tensor(ranks, _coordinate_on_dim=[rank // 2, rank % 2])
        held = dtensor(WHOLE, WHOLE.chunk(2)[rank % 2], mesh, (replicate, shard(0)))
        save({"w": held}, folder / f"model_world_size_4_rank_{rank}.pt")
        state = {"state": {0: {"exp_avg": torch.ones(6)}}, "param_groups": []}
        torch.save(state, folder / f"optim_world_size_4_rank_{rank}.pt")
    return ckptkit.open(folder)


def no_weights(folder: Path) -> Checkpoint:
    """Pieces that are in no mapping of weights: nothing gives them names."""
    for rank in range(2):
        save({"a": [piece(rank)], "b": 3}, folder / f"model_world_size_2_rank_{rank}.pt")
        state = {"state": {0: {"exp_avg": torch.ones(6)}}, "param_groups": []}
        torch.save(state, folder / f"optim_world_size_2_rank_{rank}.pt")
    return ckptkit.open(folder)


def local_state(folder: Path) -> Checkpoint:
    """FSDP's LOCAL_STATE_DICT."""
    whole = torch.arange(8.0)
    for rank in range(2):
        held = sharded_tensor(whole, rank, {0: (0, 4), 1: (4, 8)}, 2, strides=False)
        save({"_flat_param": held}, folder / f"rank{rank}.pt")
    return ckptkit.open(folder)


def quantized(folder: Path) -> Checkpoint:
    parts = [torch.quantize_per_tensor(torch.ones(2, 4), 0.5, rank, torch.qint8) for rank in (0, 1)]
    named = {
        f"consolidated.{rank:02d}.pth": {"output.weight": each} for rank, each in enumerate(parts)
    }
    return ckptkit.open(files(folder, named))


FLAT = {"exp_avg": torch.ones(6)}
RANKS = {
    "two worlds": Row(two_worlds, AmbiguousError, "different numbers of ranks"),
    "a missing rank": Row(a_missing_rank, CorruptError, "rank 1 of 2 is missing"),
    "a rank too many, by its name": Row(a_rank_too_many_without_ranks, CorruptError, "files of other ranks: rank2"),
    "another world in the name": Row(another_world_in_the_name, CorruptError, "gives 4 ranks"),
    "renamed ranks": Row(renamed, CorruptError, "was written by rank 1"),
    "pieces of two ranks": Row(ranks(lambda held: held.update(v=piece(0))), CorruptError, "shards of several ranks"),
    "an optimizer of other ranks": Row(optimizer_of_others, CorruptError, "differ from the ranks of the model files"),
    "no piece": Row(ranks(updated(w=torch.ones(6, 2))), CorruptError, "'w' is one rank's shard of a tensor"),
    "another shape": Row(ranks(updated(w=piece(1, torch.ones(8, 2)))), CorruptError, r"float32 (8, 2)"),
    "a copy that differs": Row(ranks(updated(b=torch.zeros(3))), CorruptError, "3 of 3 elements differ"),
    "a copy of another shape": Row(ranks(updated(b=torch.ones(4))), CorruptError, "(3,) in model_world"),
    "a copy that is no tensor": Row(ranks(updated(b=3.0)), CorruptError, "'b' is a tensor in"),
    "another value": Row(ranks(updated(steps=8)), CorruptError, "'steps' is 7 in"),
    "a value for a dict": Row(
        ranks(lambda held: held.update(names={})), CorruptError, "'names' is a list in"
    ),
    "fewer values": Row(ranks(updated(names=["a"])), CorruptError, "'names.1' is in"),
    "a name that is missing": Row(ranks(without("b")), CorruptError, "'b' is in"),
    "flat parameters": Row(local_state, UnsupportedError, "LOCAL_STATE_DICT"),
    "quantized parts": Row(quantized, UnsupportedError, "cannot join shards"),
    "a flat optimizer by name": Row(flat_optimizer({"w": FLAT}), None, "are not numbers"),
    "a flat optimizer of more": Row(flat_optimizer(dict.fromkeys(range(3), FLAT)), None, "3 entries, but the model has 1"),
    "a flat optimizer of other sizes": Row(
        flat_optimizer({0: {"exp_avg": torch.ones(5)}}), None, "no division of the model's 1 parameters"
    ),
    "a flat optimizer of which a rank has none": Row(
        ranks(optimizer=lambda rank: {"state": {0: {"step": torch.tensor(1.0), "a": torch.ones(6),
                                                    **({} if rank else {"b": torch.ones(6)})}}}),
        None, "some ranks have no flat shard",
    ),
    "a flat optimizer of other groups": Row(
        flat_optimizer({0: FLAT}, param_groups=[{"params": [7]}]), None, "param_groups contain numbers of missing parameters",
    ),
    "a flat optimizer of another step": Row(
        ranks(optimizer=lambda rank: {"state": {0: {**FLAT, "step": torch.tensor(float(rank))}}}),
        CorruptError, "'optimizer.state.0.step' should be equal",
    ),
    "a flat optimizer of another rate": Row(
        ranks(optimizer=lambda rank: {"state": {0: FLAT}, "param_groups": [{"params": [0], "lr": 0.5 + rank}]}),
        CorruptError, "'optimizer.param_groups.0.lr' is 0.5 in",
    ),
    "a flat optimizer on a mesh that cuts twice": Row(several_dimensions, None, "several mesh dimensions"),
    "a flat optimizer of two halves": Row(half_of_each_replica, None, "no replica of the model"),
    "a flat optimizer of a model without names": Row(no_weights, None, "contain no DTensors"),
}  # fmt: skip


# The pickled forms of pieces


def pieces(make: Callable[[int], Any], edit: Edit = lambda held: None) -> Callable[[Path], Any]:
    """Two rank files of one tensor, edited before they are pickled."""

    def attempt(folder: Path) -> Checkpoint:
        for rank in range(2):
            held = make(rank)
            edit(held)
            save({"w": held}, folder / f"rank{rank}.pt")
        return ckptkit.open(folder)

    return attempt


def on_mesh(*placements: Plain, **mesh: Any) -> Callable[[int], Any]:
    """A DTensor on a mesh of these attributes."""

    def make(rank: int) -> Any:
        known = {"device_type": "cpu", "mesh": torch.arange(2), "_coordinate_on_dim": [rank]}
        made = Plain("torch.distributed.device_mesh", "DeviceMesh", {**known, **mesh})
        return dtensor(WHOLE, WHOLE.chunk(2)[rank], made, placements or (shard(0),))

    return make


def by_rows(rank: int) -> Any:
    """A ShardedTensor of three rows on each rank."""
    return sharded_tensor(WHOLE, rank, {0: (0, 3), 1: (3, 6)}, 2, strides=False)


def described_shard(held: Any) -> State:
    """What the shard of a ShardedTensor says of itself."""
    found: State = held.state[0][0].state[1]["metadata"].state[1]
    return found


def set_local(value: Any) -> Edit:
    return lambda held: held.state[0][0].state[1].update(tensor=value)


def named(name: str, **state: Any) -> Plain:
    return Plain("torch.distributed.tensor.placement_types", name, state)


def twice(folder: Path) -> Checkpoint:
    """Two cuts of one dimension, of a torch that says no order."""
    whole = torch.arange(8.0)
    for rank in range(4):
        mesh = mesh_of_tensor(torch.arange(4).reshape(2, 2))
        held = dtensor(whole, whole[2 * rank : 2 * rank + 2], mesh, (shard(0), shard(0)))
        save({"w": held}, folder / f"rank{rank}.pt")
    return ckptkit.open(folder)


def on_one_rank(folder: Path) -> Checkpoint:
    """A second tensor on a mesh of the first rank alone, which the other saved, too."""
    mesh = mesh_of_tensor(torch.arange(1))
    for rank in range(2):
        held = {"w": piece(rank), "v": dtensor(WHOLE, WHOLE, mesh, (shard(0),))}
        save(held, folder / f"rank{rank}.pt")
    return ckptkit.open(folder)


def of_no_rank(folder: Path) -> Any:
    tensor = Tensor(None, BY_NAME["float32"], (2,), (1,))
    mesh = Mesh((2,), (0, 1))
    cut = (Placement(SHARD, 0),)
    return MeshPiece(tensor.dtype, (4,), None, (0, 1), 2, tensor, mesh, cut, None).boxes()


def two_shards_alone(folder: Path) -> Any:
    held = by_rows(0)
    held.state[0].append(held.state[0][0])
    save({"w": held}, folder / "a.pt")
    return ckptkit.convert(
        folder / "a.pt", folder / "b.pth", part_only=True, keep_format=False
    ).checkpoint


FORM = "in a form that ckptkit does not know"
PIECES = {
    "two boxes of one tensor alone": Row(two_shards_alone, UnsupportedError, "several shards on one rank"),
    "a form of in a form that ckptkit does not know": Row(pieces(on_mesh(), lambda held: held.state[1].pop("_spec")), FormatError, FORM),
    "a local tensor of another dtype": Row(
        pieces(on_mesh(), lambda held: held.state[1].update(_local_tensor=torch.ones(3, 2, dtype=torch.int64))),
        FormatError, FORM),
    "more placements than dimensions": Row(pieces(on_mesh(shard(0), shard(0))), FormatError, FORM),
    "a placement of another kind": Row(pieces(on_mesh(named("Ragged", dim=0))), UnsupportedError, "Ragged"),
    "a dimension that is not there": Row(pieces(on_mesh(shard(2))), FormatError, FORM),
    "a sum over ranks": Row(pieces(on_mesh(named("Partial", reduce_op="sum"))), UnsupportedError, "Partial"),
    "two cuts without an order": Row(twice, UnsupportedError, "in an order that the file does not record"),
    "another shape than the placements say": Row(
        pieces(on_mesh(), lambda held: held.state[1].update(_local_tensor=torch.ones(2, 2))), CorruptError, "placements give (3, 2)"),
    "a mesh of one of the ranks": Row(on_one_rank, CorruptError, "rank 1 is not on its mesh"),
    "coordinates off the mesh": Row(pieces(on_mesh(_coordinate_on_dim=[5])), FormatError, FORM),
    "ranks that are no integers": Row(pieces(on_mesh(mesh=torch.tensor([0.5, 1]))), FormatError, FORM),
    "a mesh of many ranks": Row(
        pieces(on_mesh(mesh=torch.zeros(1 << 19, dtype=torch.int64))), FormatError, FORM),
    "a piece of no rank": Row(of_no_rank, CorruptError, "its rank is unknown"),
    "a shard of another shape": Row(pieces(by_rows, set_local(torch.ones(2, 2))), FormatError, FORM),
    "a shard that is not listed": Row(
        pieces(by_rows, lambda held: described_shard(held).update(shard_offsets=[1, 0])), FormatError, FORM),
    "a shard that is no tensor": Row(pieces(by_rows, set_local(3)), FormatError, FORM),
    "another size in the metadata": Row(
        pieces(by_rows, lambda held: held.state[1].state.update(size=torch.Size([9, 2]))), FormatError, FORM),
    "offsets below 0": Row(
        pieces(by_rows, lambda held: described_shard(held).update(shard_offsets=[-1, 0])), FormatError, FORM),
}  # fmt: skip


# Megatron-LM

QKV = "decoder.layers.0.self_attention.linear_qkv.weight"
NORM = "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
FILE = "model_optim_rng.pt"


def megatron(
    edit: Edit = lambda held: None,
    *,
    layers: int = 1,
    stages: int = 1,
    tp: int = 2,
    every: bool = False,
    made: State | None = None,
    **arguments: Any,
) -> Callable[[Path], Checkpoint]:
    """A checkpoint, of which the last part, or every part, is edited."""

    def attempt(folder: Path) -> Checkpoint:
        state = making.mcore(layers, **(made or {}))
        grid = [[[n]] for n in range(layers)] if stages > 1 else [[list(range(layers))]]
        making.megatron(folder, state, grid, tp=tp, **arguments)
        paths = sorted(folder.rglob(FILE))
        for path in paths if every else paths[-1:]:
            change(path, edit)
        return ckptkit.open(folder)

    return attempt


def put(**tensors: Any) -> Edit:
    return lambda held: held["model"].update({k.replace("__", "."): v for k, v in tensors.items()})


def edited(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    return lambda held: held["model"].update({name: function(held["model"][name])})


def argument(**values: Any) -> Edit:
    return lambda held: vars(held["args"]).update(values)


def moved(make: Callable[[Path], Checkpoint], edit: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """Make a folder, change its files, and open it."""

    def attempt(folder: Path) -> Checkpoint:
        make(folder)
        edit(folder)
        return ckptkit.open(folder)

    return attempt


PART = "iter_0000003/mp_rank_01"


def legacy(
    version: float, weight: torch.Tensor = WHOLE, **said: Any
) -> Callable[[Path], Checkpoint]:
    """Names of the model classes before mcore, TP 2."""

    def attempt(folder: Path) -> Checkpoint:
        inner = {"layers.0.self_attention.query_key_value.weight": weight}
        args = making.arguments(tensor_model_parallel_size=2, num_layers=1, **said)
        held = {
            "args": args,
            "checkpoint_version": version,
            "model": {"language_model": {"encoder": inner}},
        }
        return ckptkit.open(
            files(folder, {f"mp_rank_{rank:02d}/{FILE}": held for rank in range(2)})
        )

    return attempt


def megatron_parts(folder: Path) -> Any:
    torch.save({"model": making.mcore(1)}, folder / "plain.pth")
    checkpoint = ckptkit.open(folder / "plain.pth")
    return ckptkit.save(checkpoint, folder / "y", format="megatron-parts", options=Options(ranks=2))


MIXER = "decoder.layers.0.mixer.A_log"


def mamba_parts(folder: Path) -> Any:
    """A Mamba layer of one rank is whole, and is not cut."""
    add = {MIXER: torch.ones(2)}
    checkpoint = megatron(lambda held: held["model"].update(add), tp=1)(folder)
    assert MIXER in checkpoint.weights
    options = Options(ranks=2)
    return ckptkit.save(checkpoint, folder / "y", format="megatron-parts", options=options)


MEGATRON = {
    "a name is missing": Row(megatron(lambda held: held["model"].pop(QKV)), CorruptError, "has no shard of this tensor"),
    "another dtype": Row(megatron(edited(QKV, lambda t: t.half())), CorruptError, "float16"),
    "another width": Row(megatron(edited(QKV, lambda t: t[:, :4].clone())), CorruptError, "(8, 4)"),
    "a name without a rule": Row(
        megatron(lambda held: held["model"].update({"decoder.odd": torch.ones(2)}), every=True),
        UnsupportedError, "how 'decoder.odd' was split is unknown write a table for --parts"),
    "another iteration": Row(megatron(lambda held: held.update(iteration=4)), CorruptError, "iteration is 4"),
    "another grid": Row(megatron(argument(tensor_model_parallel_size=4)), CorruptError, "from two runs"),
    "layers that do not begin at 0": Row(
        megatron(lambda held: held["model"].update({"decoder.layers.2.a": torch.ones(2)})),
        CorruptError, "not numbered 0, 1, 2 and so on: [0, 2]"),
    "more layers on a rank": Row(
        megatron(lambda held: held["model"].update({"decoder.layers.1.mlp.linear_fc2.weight": torch.ones(8, 6)})),
        CorruptError, "has 2 layers, but another file of the same stage has 1"),
    "fewer layers than said": Row(megatron(argument(num_layers=3), every=True), CorruptError, "its arguments give 3"),
    "no tensor": Row(megatron(lambda held: held["model"].update({NORM: [1.0]})), UnsupportedError, "not a strided tensor"),
    "parts that are all equal": Row(
        megatron(edited(QKV, lambda t: torch.arange(float(t.numel())).view(t.shape)), every=True),
        CorruptError, "all 2 shards of"),
    "experts cut in another way": Row(
        megatron(made={"experts": 2}, num_experts=2, expert_tensor_parallel_size=1),
        UnsupportedError, "experts are split over 1 ranks"),
    "another vocabulary": Row(megatron(padded_vocab_size=20), CorruptError, "padded_vocab_size is 20"),
    "a part without its file": Row(
        moved(megatron(), lambda folder: (folder / PART / FILE).unlink()), PathError, "model_optim_rng.pt"),
    "a part without a model": Row(
        moved(megatron(), lambda folder: torch.save({"a": 1}, folder / PART / FILE)), FormatError, "no Megatron-LM model"),
    "a part of more axes": Row(
        moved(megatron(), lambda folder: (folder / PART).rename(folder / "iter_0000003/mp_rank_01_000")),
        CorruptError, "is not the name of a rank of"),
    "a missing part": Row(
        moved(megatron(layers=2, stages=2), lambda folder: (folder / f"{PART}_001/{FILE}").rename(folder / "x")
              and (folder / f"{PART}_001").rmdir()), CorruptError, "TP 1 PP 1"),
    "a part of a larger grid": Row(
        moved(megatron(), lambda folder: files(folder / "iter_0000003/mp_rank_02", {
            FILE: torch.load(folder / PART / FILE, weights_only=False)})), CorruptError, "files of other"),
    "two names of one rank": Row(
        moved(megatron(), lambda folder: files(folder / "iter_0000003/mp_rank_001", {
            FILE: torch.load(folder / PART / FILE, weights_only=False)})), CorruptError, "same rank as another"),
    "heads of unknown width": Row(
        legacy(0, kv_channels=None, hidden_size=None), UnsupportedError, "the width of a head"),
    "what cannot be cut": Row(mamba_parts, UsageError, "cannot be split: ckptkit cannot merge Mamba layers"),
    "no arguments to cut by": Row(megatron_parts, UsageError, "no Megatron-LM arguments"),
}  # fmt: skip


# Meta


def llama(
    edit: Callable[[Path], Any] = lambda folder: None, *, count: int = 2
) -> Callable[[Path], Checkpoint]:
    def attempt(folder: Path) -> Checkpoint:
        making.release(folder / "x", making.llama(1, version=3), count, version=3)
        edit(folder / "x")
        return ckptkit.open(folder / "x")

    return attempt


def params(text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / "params.json").write_text(text)


def llama_parts(
    ranks: int | None, edit: Callable[[State], Any] = lambda state: None, *, text: bool = True
) -> Callable[[Path], Any]:
    """Weights under Meta's names, written as parts."""

    def attempt(folder: Path) -> Any:
        making.release(folder / "x", making.llama(1, version=3), 1, version=3)
        change(folder / "x" / "consolidated.00.pth", edit)
        checkpoint = ckptkit.open(folder / "x" / "consolidated.00.pth")
        if text:
            kept = {"params.json": (folder / "x/params.json").read_text(), EMBEDDING: "0"}
            checkpoint = replace(checkpoint, extras=kept)
        options = Options(ranks=ranks)
        return ckptkit.save(checkpoint, folder / "y", format="llama-parts", options=options)

    return attempt


def sparse(state: State) -> None:
    state["output.weight"] = state["output.weight"].to_sparse()


def averaged(folder: Path) -> Any:
    torch.save({"a": torch.ones(2)}, folder / "a.pth")
    table = ParallelLayout(parse_rows([{".*": "mean"}]))
    return cut_all(dict(ckptkit.open(folder / "a.pth").weights), table, 2)


LLAMA = {
    "params.json is a list": Row(llama(params("[]")), FormatError, "JSON object"),
    "another width": Row(llama(params('{"dim": 32}')), CorruptError, "has dim 32"),
    "other layers": Row(llama(params('{"dim": 16, "n_layers": 2}')), CorruptError, "has 1 layers"),
    "key heads that stand twice": Row(
        llama(params('{"dim": 16, "n_heads": 8, "n_kv_heads": 2, "n_layers": 1}')), UnsupportedError, "MP16"),
    "fewer rows of keys": Row(
        llama(params('{"dim": 16, "n_heads": 8, "n_kv_heads": 8, "n_layers": 1}')), CorruptError, "a shard is missing"),
    "parts of an unknown number": Row(llama_parts(None), UsageError, "ranks=2"),
    "parts that are not even": Row(llama_parts(3), UsageError, "is not divisible by 3 ranks"),
    "an embedding of an unknown version": Row(llama_parts(2, text=False), UsageError, "the dimension along"),
    "a sparse weight": Row(llama_parts(2, sparse), UnsupportedError, "not a strided tensor"),
    "what was averaged": Row(averaged, UsageError, "cannot be split"),
}  # fmt: skip


# DeepSpeed and gpt-neox


def layered(edit: Callable[[Path], Any], residual: bool | None = True) -> Callable[[Path], Any]:
    """Layers of a gpt-neox pipeline; `edit` takes the folder of the step."""

    def attempt(folder: Path) -> Checkpoint:
        top, _ = making.neox(folder / "x", 2, residual=residual)
        edit(top / "global_step5")
        return ckptkit.open(top)

    return attempt


def universal(edit: Edit = lambda held: None, **info: Any) -> Callable[[Path], Checkpoint]:
    """Two tensor ranks, each file edited, whose patterns are in the files."""

    def attempt(folder: Path) -> Checkpoint:
        for rank in range(2):
            held = {"module": {"a.weight": torch.full((2, 2), rank)}, "mp_world_size": 2}
            held["universal_checkpoint_info"] = {"universal_checkpoint_version": 0.2, **info}
            edit(held)
            files(folder, {f"global_step1/mp_rank_{rank:02d}_model_states.pt": held})
        (folder / "latest").write_text("global_step1")
        return ckptkit.open(folder)

    return attempt


def sub(**described: Any) -> dict[str, Any]:
    known = {"patterns": ["a.weight"], "shape": ((2, 2), 2), "partition_dim": 0}
    return {"parameter_with_sub_params": [{**known, **described}]}


FIRST_LAYER = "layer_00-model_00-model_states.pt"
DEEPSPEED = {
    "a layer of one rank": Row(
        layered(lambda step: (step / "layer_02-model_01-model_states.pt").unlink()), CorruptError, "tensor rank 1"),
    "biases without a configuration": Row(
        layered(lambda step: None, None), UnsupportedError, "gpt_j_residual"),
    "biases of different shapes": Row(
        layered(lambda step: change(step / "layer_02-model_01-model_states.pt", lambda held: held.update(
            {"attention.dense.bias": torch.ones(4)}))), CorruptError, "cannot be added"),
    "pipeline stages in ranks": Row(
        universal(lambda held: held.update(args={"pipeline_model_parallel_size": 2})), UnsupportedError, "2 pipeline"),
    "more ranks than files": Row(universal(lambda held: held.update(mp_world_size=4)), CorruptError, "4 ranks wrote the checkpoint"),
    "a parameter that AutoTP cannot describe": Row(
        universal(autotp_unsupported_parameter_patterns={r"^a\.weight$": "fused by hand"}),
        UnsupportedError, "fused by hand"),
    "widths that are no lists": Row(
        universal(**sub(), sub_param_shard_widths={"a.weight": 3}), FormatError, "not lists of counts"),
    "widths that are no counts": Row(
        universal(**sub(), sub_param_shard_widths={"a.weight": [["a"]]}), FormatError, "not lists of counts"),
    "widths of another tensor": Row(
        universal(**sub(), sub_param_shard_widths={"a.weight": [[1, 1], [2, 2]]}), CorruptError, "the widths of its blocks are [1, 2]"),
    "a shape that is none": Row(universal(**sub(shape=3)), FormatError, "of unknown form"),
    "a pattern that takes long": Row(
        universal(tp_replicated_parameter_patterns=["(a+)+$"]), UnsupportedError, "the unsupported pattern"),
}  # fmt: skip


# fairscale


def fairscale(edit: Callable[[Path], Any]) -> Callable[[Path], Checkpoint]:
    def attempt(folder: Path) -> Checkpoint:
        top, _ = making.fairscale(folder / "x", 1, 2)
        edit(top)
        return ckptkit.open(top)

    return attempt


def every_shard(edit: Callable[[list[State]], Any]) -> Callable[[Path], Any]:
    """Edit what each shard says of the wrapped modules."""

    def edited(folder: Path) -> None:
        for path in folder.glob("*shard*.pt"):
            change(path, lambda held: edit(held["shard_metadata"]["param_metadata"]))

    return edited


def described(edit: Callable[[State], Any]) -> Callable[[Path], Any]:
    """Edit what each shard says of its flat parameter."""

    def edited(folder: Path) -> None:
        for path in folder.glob("*shard*.pt"):
            change(path, lambda held: edit(
                next(iter(held["shard_metadata"]["param_metadata"][0]["params"].values()))))  # fmt: skip

    return edited


OF_SHARD = "checkpoint_last-model_part-0-shard{}.pt"
FAIRSCALE = {
    "two saves": Row(
        fairscale(lambda folder: (folder / OF_SHARD.format(1)).rename(folder / "checkpoint_best-model_part-0-shard1.pt")),
        CorruptError, "2 saves"),
    "a missing shard": Row(
        fairscale(lambda folder: (folder / OF_SHARD.format(0)).unlink()), CorruptError, "1 of 2 rank files"),
    "other numbers": Row(fairscale(described(lambda held: held.update(numels=[1]))), CorruptError, "elements, but its metadata"),
    "a name that is shared and not there": Row(
        fairscale(every_shard(lambda modules: modules[0].update(shared_param_info=[("a", "b")]))),
        CorruptError, "('a', 'b') are not the names of a shared parameter"),
    "names that are shared and no pairs": Row(
        fairscale(every_shard(lambda modules: modules[0].update(shared_param_info=["a"]))), CorruptError, "'a' are not the names"),
    "a flat parameter that nothing describes": Row(
        fairscale(every_shard(lambda modules: modules[0].update(params={}, shared_param_info=[]))),
        FormatError, "does not list the parameters inside"),
    "fewer modules in a shard": Row(
        fairscale(lambda folder: change(folder / OF_SHARD.format(1), lambda held: held["shard_metadata"].update(
            param_metadata=[]))), FormatError, "no flat parameter"),
    "no flat parameter": Row(
        fairscale(lambda folder: change(folder / OF_SHARD.format(0), lambda held: held["model"].clear())),
        FormatError, "no flat parameter"),
}  # fmt: skip


# A table of one's own

TABLE = r"""
files: 'stage(?P<pp>[0-9])/part_(?P<tp>[0-9]+)\.pt'
root: net
layers: {pattern: 'blocks\.([0-9]+)\.', by: [pp]}
rules:
  - '.*norm': same
  - '.*\.up': cut 0 blocks 2
  - '.*\.down': cut 1
  - '.*\.qk': cut 0 sizes 8 4
  - '.*\.bias': sum
  - '.*\.scale': mean
  - '.*\.junk': drop not a weight
"""


def own(folder: Path) -> tuple[Path, making.State]:
    """Two stages of two parts each, as TABLE describes them; and the whole."""
    whole: making.State = {}
    for n in range(2):
        q, k, a, b = making.rows(8, 4), making.rows(4, 4), making.rows(6, 4), making.rows(6, 4)
        down, norm = making.rows(4, 6), making.rows(4)
        whole |= {
            f"blocks.{n}.up": torch.cat([a, b]),
            f"blocks.{n}.qk": torch.cat([q, k]),
            f"blocks.{n}.down": down,
        }
        whole |= {
            f"blocks.{n}.norm": norm,
            f"blocks.{n}.bias": torch.tensor([3.0]),
            f"blocks.{n}.scale": torch.tensor([1.5]),
        }
        for t in range(2):
            part = {
                "blocks.0.up": torch.cat([a.chunk(2)[t], b.chunk(2)[t]]), "blocks.0.down": down.chunk(2, 1)[t],
                "blocks.0.qk": torch.cat([q.chunk(2)[t], k.chunk(2)[t]]), "blocks.0.norm": norm,
                "blocks.0.bias": torch.tensor([1.0 + t]), "blocks.0.scale": torch.tensor([1.0 + t]),
                "blocks.0.junk": torch.tensor([t]),
            }  # fmt: skip
            files(folder, {f"stage{n}/part_{t}.pt": {"net": part}})
    return folder, whole


def by_table(
    text: str, edit: Callable[[Path], Any] = lambda folder: None
) -> Callable[[Path], Checkpoint]:
    """Open such a folder with a table of this text."""

    def attempt(folder: Path) -> Checkpoint:
        own(folder / "x")
        edit(folder / "x")
        (folder / "t.yaml").write_text(text)
        return ckptkit.open(folder / "x", options=Options(parts=str(folder / "t.yaml")))

    return attempt


def replaced(old: str, new: str) -> Callable[[Path], Checkpoint]:
    assert old in TABLE
    return by_table(TABLE.replace(old, new, 1))


def instead(**entries: Any) -> Callable[[Path], Checkpoint]:
    return by_table(yaml.safe_dump({**yaml.safe_load(TABLE), **entries}))


def first_rule(pattern: str, verb: str) -> Callable[[Path], Checkpoint]:
    return instead(rules=[{pattern: verb}, *yaml.safe_load(TABLE)["rules"]])


def no_table(folder: Path) -> Checkpoint:
    return ckptkit.open(own(folder / "x")[0], options=Options(parts=str(folder / "none.yaml")))


OWN = {
    "another key": Row(replaced("files: '", "file: '"), UsageError, "`files` or `rules` is missing"),
    "another verb": Row(replaced("cut 1", "slice 1"), UsageError, "not a verb"),
    "a line without the parts": Row(
        first_rule("x", "[i] -> [i]"), UsageError, "index tp occurs on one side only"),
    "no rank in the names": Row(replaced("(?P<tp>[0-9]+)", "[0-9]+"), UsageError, "no group `tp` for the rank"),
    "a broken expression": Row(replaced("'.*norm': same", "'.*(norm': same"), UsageError, "regular expression"),
    "no file": Row(replaced("part_", "other_"), UsageError, "no file"),
    "an axis that is not there": Row(replaced("by: [pp]", "by: [vp]"), UsageError, "axes"),
    "anchors": Row(replaced("'.*norm': same", "'.*norm': &a same\n  - 'x': *a"), UsageError, "anchors"),
    "no YAML": Row(replaced("layers: {", "layers: ["), UsageError, "not YAML"),
    "a table that is not there": Row(no_table, PathError, "cannot be read"),
    "a large table": Row(by_table("#" * (1 << 20) + "#"), UsageError, "larger than"),
    "rules are no list": Row(instead(rules={"a": "same"}), UsageError, "not a list"),
    "a rule of two": Row(instead(rules=[{"a": "same", "b": "same"}]), UsageError, "not a rule"),
    "layers are a word": Row(instead(layers="blocks"), UsageError, "`layers` is not"),
    "a rank of letters": Row(
        instead(files=r"stage(?P<pp>[0-9])/(?P<tp>part_[0-9]+)\.pt"), UsageError, "than digits"),
    "more blocks than rows": Row(first_rule(".*up", "cut 0 blocks 5"), CorruptError, "6 rows are not divisible by g*o with g=5"),
    "sizes of another tensor": Row(first_rule(".*up", "cut 0 sizes 7 4"), CorruptError, "7 is not divisible by 2"),
    "a file without a dict": Row(
        by_table(TABLE, lambda folder: torch.save({"net": [1]}, folder / "stage0/part_0.pt")),
        FormatError, "no state_dict"),
}  # fmt: skip

UNFIT = {
    f"{layout}: {what}": row
    for layout, rows in {
        "ranks": RANKS, "pieces": PIECES, "megatron": MEGATRON, "llama": LLAMA, "deepspeed": DEEPSPEED, "zero": ZERO,
        "fairscale": FAIRSCALE, "own": OWN,
    }.items()
    for what, row in rows.items()
}  # fmt: skip
