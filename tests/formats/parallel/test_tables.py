"""Layouts as tables: parts cut by torch make the whole again, and back."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.core.options import Options
from ckptkit.formats.distributed import llama
from tests.formats.folders import change
from tests.formats.parallel import making
from tests.formats.parallel.making import rows
from tests.formats.parallel.trees import assert_same
from tests.formats.parallel.unfit import QKV, TABLE, edited, own

Made = Callable[[Path], tuple[Path, making.State]]  # makes a folder, and returns the whole


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


# Megatron-LM

TP_2 = {"tp": 2, "ep": 2, "num_experts": 4, "untie_embeddings_and_output_weights": False}


def megatron(folder: Path, *stages: list[list[int]], extra: str = "", **said: Any) -> Any:
    layers = sum(len(own) for stage in stages for own in stage)
    state = making.mcore(layers, experts=said.get("num_experts", 0), tied="num_experts" in said)
    if "num_experts" in said:
        state |= making.predictor()
    made = making.megatron(folder, state, list(stages), **said)
    if extra:
        torch.save({"a": torch.ones(1)}, made / "iter_0000003/mp_rank_00" / extra)
    return made, state


def heads(version: float, order: tuple[int, ...], count: int) -> Made:
    """Legacy names: (3, heads, rows), (heads, rows, 3) and (heads, 3, rows) of each rank."""

    def make(folder: Path) -> tuple[Path, making.State]:
        whole = rows(4 * 3 * 2, 8)
        for rank, held in enumerate(whole.view(4, 3, 2, 8).chunk(count)):
            kept = held.permute(*order, 3).reshape(-1, 8).clone()
            inner = {"layers.0.self_attention.query_key_value.weight": kept}
            args = making.arguments(tensor_model_parallel_size=count, num_layers=1)
            said = {"args": args, "checkpoint_version": version}
            place = folder / f"mp_rank_{rank:02d}"
            place.mkdir(parents=True)
            model = {"language_model": {"encoder": inner}}
            torch.save({**said, "model": model}, place / "model_optim_rng.pt")
        name = "language_model.encoder.layers.0.self_attention.query_key_value.weight"
        return folder, {name: whole}

    return make


def constant(folder: Path) -> tuple[Path, making.State]:
    """The guard against a wrong table: parts that are all equal; but zeros may be."""
    made, state = megatron(folder, [[0]], tp=2)
    for path in made.rglob("model_optim_rng.pt"):
        change(path, edited(QKV, lambda t: torch.zeros_like(t)))
    return made, {**state, QKV: torch.zeros_like(state[QKV])}


def newer(folder: Path) -> tuple[Path, making.State]:
    """The tracker is followed."""
    megatron(folder, [[0]])
    return megatron(folder, [[0]], iteration=7)  # type: ignore[no-any-return]


# Meta


def release(version: int, count: int) -> Made:
    def make(folder: Path) -> tuple[Path, making.State]:
        state = making.llama(2, version=version)
        return making.release(folder, state, count, version=version), state

    return make


# DeepSpeed


def ranks_of_stages(folder: Path) -> tuple[Path, making.State]:
    """DeepSpeed numbers the files of ranks through stages and tensor ranks; layers have both."""
    made, whole = making.neox(folder, 2, residual=True)
    sizes = {"pipe_parallel_size": 2, "model_parallel_size": 2}
    for rank in range(4):
        said = {"module": None, "mp_world_size": 4, "args": sizes}
        torch.save(said, made / f"global_step5/mp_rank_{rank:02d}_model_states.pt")
    return made, whole


def universal(folder: Path, zero: bool = False) -> tuple[Path, making.State]:
    """Two tensor ranks whose files say how they were cut, with files of the optimizer or without."""
    norm = torch.tensor([1.0, 3.0])
    whole: dict[str, Any] = {
        "a.qk.weight": (rows(12, 4), [8, 4]), "b.weight": (rows(4, 6), 1), "c.weight": (rows(6, 4), 0),
        "d.norm": (rows(4), None), "e.norm": (torch.cat([norm + 0.5, norm - 0.5]), 0),
    }  # fmt: skip
    sub = {"patterns": [r".*qk\.weight"], "shape": ((8, 4), 4), "partition_dim": 0}
    made, state = making.universal(
        folder,
        whole,
        tp_replicated_parameter_patterns=[r"d\..*"],
        parameter_with_sub_params=[sub],
        parameter_to_average_patterns=[r"e\.norm"],
        parameter_with_row_parallelism_patterns=[r"b\.weight"],
    )
    for data, rank in product(range(2 * zero), range(2)):
        name = f"bf16_zero_pp_rank_{data}_mp_rank_{rank:02d}_optim_states.pt"
        torch.save({"optimizer_state_dict": {"zero_stage": 1}}, made / "global_step1" / name)
    return made, {**state, "e.norm": norm}


def autotp(shape: Any, widths: list[list[int]], *, listed: bool = True) -> Made:
    """[q; k; v] as DeepSpeed's AutoTP cuts them, unevenly if widths say so; a norm."""
    name = r"^model\.qkv\.weight$"

    def make(folder: Path) -> tuple[Path, making.State]:
        qkv = rows(sum(map(sum, widths)), 3)
        whole: Any = {"model.qkv.weight": (qkv, widths), "model.norm.weight": (rows(3), None)}
        sub = {"patterns": [name], "shape": shape, "partition_dim": 0}
        info = {"sub_param_shard_widths": {name: widths}} if listed else {}
        made, state = making.universal(
            folder,
            whole,
            parameter_with_sub_params=[sub],
            **info,
            tp_replicated_parameter_patterns=[r"^model\.norm\.weight$"],
        )
        return made / "global_step1", state

    return make


EVEN = [[4, 4], [2, 2], [2, 2]]


def from_the_root(folder: Path) -> tuple[Path, making.State]:
    """fairscale's names that are shared count from the root, too."""
    made, whole = making.fairscale(folder, 1, 2)
    shared = {"shared_param_info": [("decoder.fc1.weight", "head.weight")]}
    for path in made.iterdir():
        change(path, lambda held: held["shard_metadata"]["param_metadata"][0].update(shared))
    whole["head.weight"] = whole.pop("decoder.tied.fc1.weight")
    return made, whole


# What is made, and words of a warning.
MADE: dict[str, tuple[Any, str]] = {
    "all of Megatron-LM": (lambda folder: megatron(folder, [[0], [2]], [[1], [3]], **TP_2), ""),
    "an optimizer beside": (lambda folder: megatron(folder, [[0]], tp=2, extra="distrib_optim.pt"), "distrib_optim.pt"),
    "parts of zeros": (constant, "cannot verify the split"),
    "a newer iteration": (newer, ""),
    **{f"heads of version {version} in {count}": (heads(version, order, count), "")
       for version, order in ((0, (1, 0, 2)), (1.0, (0, 2, 1)), (2.0, (0, 1, 2)), (3.0, (0, 1, 2))) for count in (1, 2)},
    **{f"Llama {version} in {count}": (release(version, count), "") for version, count in product((2, 3), (2, 4, 8))},
    "Llama 4": (lambda folder: making.release4(folder, 2), "running_gate_stats_3E: counts of one process"),
    **{f"gpt-neox, {residual}, {drift}": (
        lambda folder, said={"residual": residual, "drift": drift}: making.neox(folder, 2, **said), "")
       for residual, drift in ((True, False), (False, False), (True, True))},
    "ranks of stages": (ranks_of_stages, ""),
    "patterns of DeepSpeed": (universal, ""),
    "ZeRO beside tensor ranks": (lambda folder: universal(folder, zero=True), "the optimizer"),
    "AutoTP": (autotp([(8, 4, 4), -1], EVEN), ""),
    "AutoTP without widths": (autotp([(8, 4, 4), -1], EVEN, listed=False), ""),
    "AutoTP, uneven": (autotp([(9, 4, 2), -1], [[6, 3], [4, 0], [1, 1]]), ""),
    "AutoTP of so many parameters, as version 0.3 says it": (autotp((3, -1), [[2, 2]] * 3, listed=False), ""),
    **{f"fairscale, {parts} x {shards}": (lambda folder, grid=(parts, shards): making.fairscale(folder, *grid), "")
       for parts, shards in ((1, 2), (2, 3), (3, 1))},
    **{f"fairscale before 0.4.1, {flat}": (lambda folder, flat=flat: making.fairscale_by_name(folder, flat=flat), "")
       for flat in (True, False)},
    "names that are shared from the root": (from_the_root, ""),
}  # fmt: skip


@pytest.mark.parametrize("what", MADE)
def test_parts_make_the_whole(what: str, tmp_path: Path) -> None:
    make, words = MADE[what]
    folder, whole = make(tmp_path / "x")
    assert_same(ckptkit.load(folder), whole)
    assert not words or any(words in each for each in ckptkit.open(folder).warnings)


def test_what_is_made_of_megatron_is_whole(tmp_path: Path) -> None:
    """Its arguments are those of one rank: it is not taken for a part, and torch loads it."""
    folder, _ = megatron(tmp_path / "x", [[0]], tp=2)
    ckptkit.save(ckptkit.open(folder), tmp_path / "out.pth")
    assert ckptkit.open(tmp_path / "out.pth").part is None
    args = torch.load(tmp_path / "out.pth", weights_only=True)["args"]
    assert args["tensor_model_parallel_size"] == 1


def test_blocks_in_a_ratio_need_no_more_rows_than_it_takes() -> None:
    one, other = ({"n_heads": n, "n_kv_heads": m} for n, m in ((8, 2), (4, 1)))
    assert llama.layout_of(one, by_rows=True) == llama.layout_of(other, by_rows=True)


def test_a_part_of_llama_4(tmp_path: Path) -> None:
    folder, _ = making.release4(tmp_path / "x", 2)
    (folder / "consolidated.01.pth").unlink()
    part = ckptkit.open(folder / "consolidated.00.pth").part
    assert part is not None and part.name == "shard 0 of 2 of a Llama release"


# Back to parts


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_llama_back_to_parts(version: int, count: int, tmp_path: Path) -> None:
    folder, _ = release(version, count)(tmp_path / "x")
    out = tmp_path / "again"
    ckptkit.save(ckptkit.open(folder), out, format="llama-parts", options=Options(ranks=count))
    for path in folder.iterdir():
        if path.suffix == ".pth":
            made, held = (torch.load(each, weights_only=True) for each in (out / path.name, path))
            assert_same(made, held)
        else:
            assert (out / path.name).read_bytes() == path.read_bytes()


def test_megatron_back_to_parts(tmp_path: Path) -> None:
    """The parts that Megatron's layers hold, of another number of ranks."""
    folder, state = megatron(tmp_path / "x", [[0]], [[1]])
    options = Options(ranks=2)
    ckptkit.save(ckptkit.open(folder), tmp_path / "y", format="megatron-parts", options=options)
    expected = making.megatron(tmp_path / "z", state, [[[0, 1]]], tp=2)
    for rank in range(2):
        place = f"iter_0000003/mp_rank_{rank:02d}/model_optim_rng.pt"
        found, made = (
            torch.load(top / place, weights_only=False) for top in (tmp_path / "y", expected)
        )
        made["model"] = {name: each for name, each in made["model"].items() if each is not None}
        assert isinstance(found["args"], Namespace)
        assert found["args"].tensor_model_parallel_size == 2
        assert_same(found["model"], made["model"])
    assert_same(ckptkit.load(tmp_path / "y"), state)


# A table of one's own


@pytest.mark.parametrize("how", ["cut 1", "'[o i] -> [o (tp i)]'"])
def test_a_table_of_ones_own(how: str, tmp_path: Path) -> None:
    folder, whole = own(tmp_path / "x")
    (tmp_path / "t.yaml").write_text(TABLE.replace("cut 1", how))
    checkpoint = ckptkit.open(folder, options=Options(parts=str(tmp_path / "t.yaml")))
    ckptkit.save(checkpoint, tmp_path / "out.pth")
    assert_same(torch.load(tmp_path / "out.pth", weights_only=True), whole)
    assert any("not a weight" in each for each in checkpoint.warnings)
