"""Folders that are not put together, tables that do not fit, weights that are not cut: a row for
each place in the package that says so.

A row makes what is refused in a folder and tries it; its word is in the message or the hint, or in
the warning where only the optimizer is left out.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import product
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
    LimitError,
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
from tests.formats.folders import Attempt, Edit, Row, change, files, opened
from tests.formats.parallel import making
from tests.formats.parallel.old_forms import (
    NEW,
    Plain,
    dtensor,
    mesh_of_layout,
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


def saved(
    make: Callable[[int], Any], name: str = "rank{}.pt", ranks: Iterable[int] = (0, 1)
) -> Edit:
    """The file of each rank."""
    return lambda folder: [save(make(rank), folder / name.format(rank)) for rank in ranks]


MODEL, OPTIM = "model_world_size_{}_rank_{{}}.pt", "optim_world_size_{}_rank_{{}}.pt"


def model(edit: Edit = lambda held: None, world: int = 2) -> Edit:
    """Two rank files, the second of which is edited."""

    def make(rank: int) -> State:
        held: State = {"w": piece(rank), "b": torch.ones(3), "steps": 7, "names": ["a", "b"]}
        if rank:
            edit(held)
        return held

    return saved(make, MODEL.format(world))


def optim(state: Any, ranks: Iterable[int] = (0, 1), world: int = 2, **groups: Any) -> Edit:
    """The optimizer as FSDP1 saves it without its own function; `state` may depend on the rank."""

    def make(rank: int) -> State:
        held = state(rank) if callable(state) else state
        return {"state": held, "param_groups": [], **groups}

    return saved(make, OPTIM.format(world), ranks)


def ranks(edit: Edit) -> Attempt:
    return opened(model(edit))


def flat(state: Any, **groups: Any) -> Attempt:
    """A model of 12 elements, and a flat optimizer."""
    return opened(model(), optim(state, **groups))


def updated(**values: Any) -> Edit:
    return lambda held: held.update(values)


def renamed(folder: Path) -> None:
    first, second = (folder / MODEL.format(2).format(rank) for rank in range(2))
    first.rename(folder / "spare")
    second.rename(first)
    (folder / "spare").rename(second)


def nameless(rank: int) -> Any:
    """DTensors of torch 2.9 may not say which rank wrote them: the name is all there is."""
    mesh = mesh_of_tensor(torch.arange(2))
    return {"w": dtensor(WHOLE, WHOLE.chunk(2)[min(rank, 1)], mesh, (shard(0),))}


def on_grid(rank: int, *placements: Plain) -> State:
    """A tensor on a mesh of two dimensions."""
    at = divmod(rank, 2)
    local = WHOLE
    for index, each in zip(at, placements, strict=True):
        local = local.chunk(2, each.state["dim"])[index] if each.state else local
    mesh = mesh_of_tensor(torch.arange(4).reshape(2, 2), _coordinate_on_dim=list(at))
    return {"w": dtensor(WHOLE, local.contiguous(), mesh, placements)}


def flat_parameters(rank: int) -> State:
    """FSDP's LOCAL_STATE_DICT."""
    whole = torch.arange(8.0)
    return {"_flat_param": sharded_tensor(whole, rank, {0: (0, 4), 1: (4, 8)}, 2, strides=False)}


def quantized(rank: int) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2, 4), 0.5, rank, torch.qint8)


FLAT = {"exp_avg": torch.ones(6)}
FOUR = MODEL.format(4)
REPLICATE = Plain(f"{NEW}.placement_types", "Replicate", {})
RANKS = {
    "two worlds": Row(
        opened(model(), saved(lambda rank: {"w": piece(rank, world=3)}, MODEL.format(3), range(3))),
        AmbiguousError, "different numbers of ranks"),
    "a missing rank": Row(
        opened(model(), lambda folder: (folder / MODEL.format(2).format(1)).unlink()), CorruptError, "1 of 2 rank files are missing: model_world_size_2_rank_1.pt"),
    "a missing rank is named like the others": Row(
        opened(saved(lambda rank: {"w": piece(rank)}, "part_a_rank00{}.pt", [0])), CorruptError,
        "1 of 2 rank files are missing: part_a_rank001.pt"),
    "a rank too many, by its name": Row(opened(saved(nameless, ranks=range(3))), CorruptError, "files of other ranks: rank2"),
    "another world in the name": Row(opened(model(world=4)), CorruptError, "gives 4 ranks"),
    "renamed ranks": Row(opened(model(), renamed), CorruptError, "was written by rank 1"),
    "pieces of two ranks": Row(ranks(lambda held: held.update(v=piece(0))), CorruptError, "shards of several ranks"),
    "an optimizer of other ranks": Row(
        opened(model(), optim({0: FLAT}, ranks=[0])), CorruptError, "differ from the ranks of the model files"),
    "no piece": Row(ranks(updated(w=torch.ones(6, 2))), CorruptError, "'w' is one rank's shard of a tensor"),
    "another shape": Row(ranks(updated(w=piece(1, torch.ones(8, 2)))), CorruptError, r"float32 (8, 2)"),
    "a copy that differs": Row(
        ranks(updated(b=torch.zeros(3))), CorruptError, "_rank_0.pt and model_world_size_2_rank_1.pt, but 3 of 3 elements differ"),
    "a copy of another shape": Row(ranks(updated(b=torch.ones(4))), CorruptError, "(3,) in model_world"),
    "a copy that is no tensor": Row(ranks(updated(b=3.0)), CorruptError, "'b' is a tensor in"),
    "another value": Row(ranks(updated(steps=8)), CorruptError, "'steps' is 7 in"),
    "a value for a dict": Row(ranks(updated(names={})), CorruptError, "'names' is a list in"),
    "fewer values": Row(ranks(updated(names=["a"])), CorruptError, "'names.1' is in"),
    "a name that is missing": Row(ranks(lambda held: held.pop("b")), CorruptError, "'b' is in"),
    "flat parameters": Row(opened(saved(flat_parameters)), UnsupportedError, "LOCAL_STATE_DICT"),
    "quantized parts": Row(
        opened(lambda folder: files(folder, {f"consolidated.0{n}.pth": {"output.weight": quantized(n)} for n in (0, 1)})),
        UnsupportedError, "cannot join shards"),
    "a flat optimizer by name": Row(flat({"w": FLAT}), None, "are not numbers"),
    "a flat optimizer of more": Row(flat(dict.fromkeys(range(3), FLAT)), None, "3 entries, but the model has 1"),
    "a flat optimizer of other sizes": Row(
        flat({0: {"exp_avg": torch.ones(5)}}), None, "no division of the model's 1 parameters"),
    "a flat optimizer of which a rank has none": Row(
        flat(lambda rank: {0: {"step": torch.tensor(1.0), "a": torch.ones(6), **({} if rank else {"b": torch.ones(6)})}}),
        None, "some ranks have no flat shard"),
    "a flat optimizer of other groups": Row(
        flat({0: FLAT}, param_groups=[{"params": [7]}]), None, "param_groups contain numbers of missing parameters"),
    "a flat optimizer of another step": Row(
        flat(lambda rank: {0: {**FLAT, "step": torch.tensor(float(rank))}}), CorruptError, "'optimizer.state.0.step' should be equal"),
    "a flat optimizer of another rate": Row(
        opened(model(), saved(lambda rank: {"state": {0: FLAT}, "param_groups": [{"params": [0], "lr": 0.5 + rank}]}, OPTIM.format(2))),
        CorruptError, "'optimizer.param_groups.0.lr' is 0.5 in"),
    "a flat optimizer on a mesh that cuts twice": Row(
        opened(saved(lambda rank: on_grid(rank, shard(0), shard(1)), FOUR, range(4)),
               optim({0: {"exp_avg": torch.ones(3)}}, range(4), 4)), None, "several mesh dimensions"),
    # Ranks 0 and 3 of two replicas: the model is whole, but no replica of the optimizer is.
    "a flat optimizer of two halves": Row(
        opened(saved(lambda rank: on_grid(rank, REPLICATE, shard(0)), FOUR, (0, 3)), optim({0: FLAT}, (0, 3), 4)),
        None, "no replica of the model"),
    # Pieces that are in no mapping of weights: nothing gives them names.
    "a flat optimizer of a model without names": Row(
        opened(saved(lambda rank: {"a": [piece(rank)], "b": 3}, MODEL.format(2)), optim({0: FLAT})), None, "contain no DTensors"),
}  # fmt: skip


# The pickled forms of pieces


def pieces(make: Callable[[int], Any], edit: Edit = lambda held: None) -> Attempt:
    """Two rank files of one tensor, edited before they are pickled."""

    def edited(rank: int) -> State:
        held = make(rank)
        edit(held)
        return {"w": held}

    return opened(saved(edited))


def device_mesh(state: State) -> Plain:
    return Plain("torch.distributed.device_mesh", "DeviceMesh", state)


def on_mesh(*placements: Plain, **mesh: Any) -> Callable[[int], Any]:
    """A DTensor on a mesh of these attributes."""

    def make(rank: int) -> Any:
        known = {"device_type": "cpu", "mesh": torch.arange(2), "_coordinate_on_dim": [rank]}
        made = device_mesh({**known, **mesh})
        return dtensor(WHOLE, WHOLE.chunk(2)[rank], made, placements or (shard(0),))

    return make


HALVES = {0: (0, 3), 1: (3, 6)}


def by_rows(rank: int) -> Any:
    """A ShardedTensor of three rows on each rank."""
    return sharded_tensor(WHOLE, rank, HALVES, 2, strides=False)


def described_shard(held: Any) -> State:
    """What the shard of a ShardedTensor says of itself."""
    found: State = held.state[0][0].state[1]["metadata"].state[1]
    return found


def set_local(value: Any) -> Edit:
    return lambda held: held.state[0][0].state[1].update(tensor=value)


def named(name: str, **state: Any) -> Plain:
    return Plain(f"{NEW}.placement_types", name, state)


def twice(rank: int) -> State:
    """Two cuts of one dimension, of a torch that says no order."""
    whole = torch.arange(8.0)
    mesh = mesh_of_tensor(torch.arange(4).reshape(2, 2))
    return {"w": dtensor(whole, whole[2 * rank : 2 * rank + 2], mesh, (shard(0), shard(0)))}


def on_one_rank(rank: int) -> State:
    """A second tensor on a mesh of the first rank alone, which the other saved, too."""
    alone = dtensor(WHOLE, WHOLE, mesh_of_tensor(torch.arange(1)), (shard(0),))
    return {"w": piece(rank), "v": alone}


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
    "two cuts without an order": Row(opened(saved(twice, ranks=range(4))), UnsupportedError, "in an order that the file does not record"),
    "another shape than the placements say": Row(
        pieces(on_mesh(), lambda held: held.state[1].update(_local_tensor=torch.ones(2, 2))), CorruptError, "placements give (3, 2)"),
    "a mesh of one of the ranks": Row(opened(saved(on_one_rank)), CorruptError, "rank 1 is not on its mesh"),
    "coordinates off the mesh": Row(pieces(on_mesh(_coordinate_on_dim=[5])), FormatError, FORM),
    "ranks that are no integers": Row(pieces(on_mesh(mesh=torch.tensor([0.5, 1]))), FormatError, FORM),
    "a mesh of many ranks": Row(
        pieces(on_mesh(mesh=torch.zeros(1 << 19, dtype=torch.int64))), FormatError, FORM),
    **{f"a mesh of {sorted(state)}": Row(
        pieces(lambda rank, state=state: dtensor(WHOLE, WHOLE.chunk(2)[rank], device_mesh(state), (shard(0),))), FormatError, FORM)
       for state in ({"mesh": "x"}, {"_layout": None, "_rank_map": torch.arange(2)}, {"_rank_map": torch.arange(2)}, {})},
    # Billions: nothing counts up to them.
    "a split factor without end": Row(
        pieces(on_mesh(named("_StridedShard", dim=0, split_factor=1 << 40))), LimitError, "shards of a strided shard"),
    "a world without end": Row(
        pieces(lambda rank: sharded_tensor(WHOLE, rank, HALVES, 1 << 40, strides=False)), LimitError, "ranks"),
    "a mesh without end": Row(
        pieces(lambda rank: dtensor(WHOLE, WHOLE.chunk(2)[rank], mesh_of_layout(
            (1 << 40,), (1,), torch.arange(2), _rank=rank), (shard(0),))), LimitError, "ranks of a mesh"),
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
    edit: Edit | None = None,
    *steps: Edit,
    stages: Sequence[Any] = ([[0]],),
    tp: int = 2,
    every: bool = False,
    made: State | None = None,
    **arguments: Any,
) -> Attempt:
    """A checkpoint, of which the last part, or every part, is edited; and what `steps` do to it."""

    def make(folder: Path) -> None:
        state = making.mcore(len(stages), **(made or {}))
        making.megatron(folder, state, list(stages), tp=tp, **arguments)
        paths = sorted(folder.rglob(FILE))
        for path in (paths if every else paths[-1:]) if edit else ():
            change(path, edit)

    return opened(make, *steps)


def edited(name: str, function: Callable[[torch.Tensor], torch.Tensor]) -> Edit:
    return lambda held: held["model"].update({name: function(held["model"][name])})


def argument(**values: Any) -> Edit:
    return lambda held: vars(held["args"]).update(values)


PART = "iter_0000003/mp_rank_01"


def legacy(folder: Path) -> None:
    """Names of the model classes before mcore, TP 2, without the width of a head."""
    inner = {"layers.0.self_attention.query_key_value.weight": WHOLE}
    args = making.arguments(tensor_model_parallel_size=2, kv_channels=None, hidden_size=None)
    model = {"language_model": {"encoder": inner}}
    held = {"args": args, "checkpoint_version": 0, "model": model}
    files(folder, {f"mp_rank_{rank:02d}/{FILE}": held for rank in range(2)})


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
        megatron(None, lambda folder: (folder / PART / FILE).unlink()), PathError, "model_optim_rng.pt"),
    "a part without a model": Row(
        megatron(None, lambda folder: torch.save({"a": 1}, folder / PART / FILE)), FormatError, "no Megatron-LM model"),
    "a part of more axes": Row(
        megatron(None, lambda folder: (folder / PART).rename(folder / "iter_0000003/mp_rank_01_000")),
        CorruptError, "is not the name of a rank of"),
    "a missing part": Row(
        megatron(None, lambda folder: shutil.rmtree(folder / f"{PART}_001"), stages=([[0]], [[1]])), CorruptError, "TP 1 PP 1"),
    **{f"a part called {name}": Row(
        megatron(None, lambda folder, name=name: shutil.copytree(folder / PART, folder / f"iter_0000003/{name}")), CorruptError, words)
       for name, words in (("mp_rank_02", "files of other"), ("mp_rank_001", "same rank as another"))},
    "a grid of billions": Row(
        megatron(argument(tensor_model_parallel_size=1 << 30), every=True), LimitError, "parts (TP 1073741824"),
    "an iteration that is not there": Row(
        megatron(None, lambda folder: (folder / "latest_checkpointed_iteration.txt").write_text("9")),
        CorruptError, "contains the iteration '9'"),
    "heads of unknown width": Row(
        opened(legacy), UnsupportedError, "the width of a head"),
    "what cannot be cut": Row(mamba_parts, UsageError, "cannot be split: ckptkit cannot merge Mamba layers"),
    "no arguments to cut by": Row(megatron_parts, UsageError, "no Megatron-LM arguments"),
}  # fmt: skip


# Meta


def llama(text: str) -> Attempt:
    """Two parts, and other parameters."""
    return opened(
        lambda folder: making.release(folder, making.llama(1, version=3), 2, version=3),
        lambda folder: (folder / "params.json").write_text(text),
    )


def llama_parts(
    ranks: int | None, edit: Callable[[State], Any] = lambda state: None, *, text: bool = True
) -> Attempt:
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
    "params.json is a list": Row(llama("[]"), FormatError, "JSON object"),
    "another width": Row(llama('{"dim": 32}'), CorruptError, "has dim 32"),
    "other layers": Row(llama('{"dim": 16, "n_layers": 2}'), CorruptError, "has 1 layers"),
    "key heads that stand twice": Row(
        llama('{"dim": 16, "n_heads": 8, "n_kv_heads": 2, "n_layers": 1}'), UnsupportedError, "MP16"),
    "fewer rows of keys": Row(
        llama('{"dim": 16, "n_heads": 8, "n_kv_heads": 8, "n_layers": 1}'), CorruptError, "a shard is missing"),
    "the last part alone": Row(
        opened(lambda folder: files(folder, {"consolidated.01.pth": {"layers.0.attention.wo.weight": torch.ones(4, 2)}})),
        CorruptError, "1 of 2 rank files are missing: consolidated 0"),
    "parts of an unknown number": Row(llama_parts(None), UsageError, "ranks=2"),
    "parts that are not even": Row(llama_parts(3), UsageError, "is not divisible by 3 ranks"),
    "an embedding of an unknown version": Row(llama_parts(2, text=False), UsageError, "the dimension along"),
    "a sparse weight": Row(llama_parts(2, sparse), UnsupportedError, "not a strided tensor"),
    "what was averaged": Row(averaged, UsageError, "cannot be split"),
}  # fmt: skip


# DeepSpeed and gpt-neox


def layered(edit: Edit, residual: bool | None = True) -> Attempt:
    """Layers of a gpt-neox pipeline; `edit` takes the folder of the step."""
    return opened(lambda top: edit(making.neox(top, 2, residual=residual)[0] / "global_step5"))


def universal(edit: Edit | None = None, *, equal: bool = False, **info: Any) -> Attempt:
    """Two tensor ranks, each file edited, whose patterns are in the files."""

    def make(folder: Path) -> None:
        whole: Any = {"a.weight": (torch.arange(8.0).view(4, 2), None if equal else 0)}
        making.universal(folder, whole, **info)
        for path in folder.glob("*/mp_rank_*.pt") if edit else ():
            change(path, edit)

    return opened(make)


def zero_3(folder: Path) -> None:
    """Weights that are in flat pieces of each tensor rank."""
    shapes = {"param_shapes": [{"a": torch.Size([4])}], "dp_world_size": 2, "mp_world_size": 2}
    for data, rank in product(range(2), range(2)):
        name = f"zero_pp_rank_{data}_mp_rank_{rank:02d}_model_states.pt"
        files(folder, {name: {"module": {"a": torch.empty(0)}, **shapes}})


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
        universal(**sub(), sub_param_shard_widths={"a.weight": 3}), FormatError, "sub_param_shard_widths: a.weight"),
    "widths that are no counts": Row(
        universal(**sub(), sub_param_shard_widths={"a.weight": [["a"]]}), FormatError, "sub_param_shard_widths: a.weight"),
    "widths of another tensor": Row(
        universal(**sub(), sub_param_shard_widths={"a.weight": [[1, 1], [2, 2]]}), CorruptError, "the widths of its blocks are [1, 2]"),
    "a shape that is none": Row(universal(**sub(shape=3)), FormatError, "of unknown form"),
    # A norm that no pattern names falls to `cut 0`, and is equal in all parts.
    "a list that is out of date": Row(universal(equal=True), CorruptError, "shards of 'a.weight' are equal"),
    "ZeRO 3 with tensor ranks": Row(opened(zero_3), UnsupportedError, "several model-parallel ranks"),
    **{f"a pattern that takes long: {str(pattern)[:20]}": Row(
        universal(tp_replicated_parameter_patterns=[pattern]), UnsupportedError, "the unsupported pattern")
       for pattern in ("(a+)+$", "(.*a){20}", "x" * 500, ".*.*.*.*.*.*", 3)},
}  # fmt: skip


# fairscale


def fairscale(edit: Edit) -> Attempt:
    return opened(lambda folder: edit(making.fairscale(folder, 1, 2)[0]))


def every_shard(edit: Edit) -> Edit:
    """Edit what each shard says of the wrapped module."""

    def edited(folder: Path) -> None:
        for path in folder.glob("*shard*.pt"):
            change(path, lambda held: edit(held["shard_metadata"]["param_metadata"][0]))

    return edited


OF_SHARD = "checkpoint_last-model_part-0-shard{}.pt"
FAIRSCALE = {
    "two saves": Row(
        fairscale(lambda folder: (folder / OF_SHARD.format(1)).rename(folder / "checkpoint_best-model_part-0-shard1.pt")),
        CorruptError, "2 saves"),
    "a missing shard": Row(
        fairscale(lambda folder: (folder / OF_SHARD.format(0)).unlink()), CorruptError, "1 of 2 rank files"),
    "other numbers": Row(fairscale(every_shard(lambda module: module["params"]["flat_param_0"].update(numels=[1]))), CorruptError, "elements, but its metadata"),
    "a name that is shared and not there": Row(
        fairscale(every_shard(lambda module: module.update(shared_param_info=[("a", "b")]))),
        CorruptError, "('a', 'b') are not the names of a shared parameter"),
    "names that are shared and no pairs": Row(
        fairscale(every_shard(lambda module: module.update(shared_param_info=["a"]))), CorruptError, "'a' are not the names"),
    "a flat parameter that nothing describes": Row(
        fairscale(every_shard(lambda module: module.update(params={}, shared_param_info=[]))),
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
    made: making.State = {}
    for n in range(2):
        whole: dict[str, tuple[torch.Tensor, making.How]] = {
            "up": (making.rows(12, 4), [6, 6]), "qk": (making.rows(12, 4), [8, 4]),
            "down": (making.rows(4, 6), 1), "norm": (making.rows(4), None),
        }  # fmt: skip
        for t in range(2):
            alone = {
                "bias": torch.tensor([1.0 + t]),
                "scale": torch.tensor([1.0 + t]),
                "junk": torch.tensor([t]),
            }
            held = {f"blocks.0.{k}": v for k, v in {**making.parts(whole, t, 2), **alone}.items()}
            files(folder, {f"stage{n}/part_{t}.pt": {"net": held}})
        joined = {name: tensor for name, (tensor, _) in whole.items()}
        joined |= {"bias": torch.tensor([3.0]), "scale": torch.tensor([1.5])}
        made |= {f"blocks.{n}.{name}": tensor for name, tensor in joined.items()}
    return folder, made


def by_table(text: str | None, edit: Edit = lambda folder: None) -> Attempt:
    """Open such a folder with a table of this text."""

    def attempt(folder: Path) -> Checkpoint:
        own(folder / "x")
        edit(folder / "x")
        files(folder, {"t.yaml": text} if text is not None else {})
        return ckptkit.open(folder / "x", options=Options(parts=str(folder / "t.yaml")))

    return attempt


def replaced(old: str, new: str) -> Attempt:
    assert old in TABLE
    return by_table(TABLE.replace(old, new, 1))


def instead(**entries: Any) -> Attempt:
    return by_table(yaml.safe_dump({**yaml.safe_load(TABLE), **entries}))


def first_rule(pattern: str, verb: str) -> Attempt:
    return instead(rules=[{pattern: verb}, *yaml.safe_load(TABLE)["rules"]])


def of_a_file(folder: Path) -> Checkpoint:
    files(folder, {"a.pt": {"a": torch.ones(1)}, "t.yaml": TABLE})
    return ckptkit.open(folder / "a.pt", options=Options(parts=str(folder / "t.yaml")))


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
    "a table that is not there": Row(by_table(None), PathError, "cannot be read"),
    "a table for a file": Row(of_a_file, UsageError, "is a file"),
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
