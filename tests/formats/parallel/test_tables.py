"""Layouts as tables: parts cut by torch make the whole again; what does not go together is refused,
and named."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.core.errors import CorruptError, LimitError, UnsupportedError, UsageError
from ckptkit.core.options import Options
from ckptkit.formats.distributed import llama
from tests.formats.folders import change
from tests.formats.parallel import making
from tests.formats.parallel.trees import assert_same
from tests.formats.parallel.unfit import QKV, TABLE, edited, own


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(3)


# Megatron-LM


def test_everything_at_once_in_megatron(tmp_path: Path) -> None:
    """TP 2, PP 2, VPP 2, EP 2; gated, fewer key heads, tied, and layers that predict more tokens."""
    state = {**making.mcore(4, experts=4, tied=True), **making.predictor()}
    said = {"tp": 2, "ep": 2, "num_experts": 4, "untie_embeddings_and_output_weights": False}
    folder = making.megatron(tmp_path / "x", state, [[[0], [2]], [[1], [3]]], **said)
    assert len(list(folder.rglob("*.pt"))) == 8
    assert_same(ckptkit.load(folder), state)


@pytest.mark.parametrize(
    ("version", "order"), [(0, (1, 0, 2)), (1.0, (0, 2, 1)), (2.0, (0, 1, 2)), (3.0, (0, 1, 2))]
)
@pytest.mark.parametrize("count", [1, 2])
def test_rows_of_heads_by_version(
    version: float, order: tuple[int, ...], count: int, tmp_path: Path
) -> None:
    """Legacy names: (3, heads, rows), (heads, rows, 3) and (heads, 3, rows) of each rank."""
    heads, height = 4, 2
    whole = making.rows(heads * 3 * height, 8)
    for rank, part in enumerate(whole.view(heads, 3, height, 8).chunk(count)):
        kept = part.permute(*order, 3).reshape(-1, 8).clone()
        model = {
            "language_model": {"encoder": {"layers.0.self_attention.query_key_value.weight": kept}}
        }
        place = tmp_path / "iter_0000001" / f"mp_rank_{rank:02d}"
        place.mkdir(parents=True)
        args = making.arguments(tensor_model_parallel_size=count, num_layers=1)
        torch.save(
            {"args": args, "checkpoint_version": version, "model": model},
            place / "model_optim_rng.pt",
        )
    found = ckptkit.load(tmp_path / "iter_0000001")
    assert_same(
        found, {"language_model.encoder.layers.0.self_attention.query_key_value.weight": whole}
    )


def test_what_is_made_of_megatron_is_whole(tmp_path: Path) -> None:
    """Its arguments are those of one rank: it is not taken for a part, and torch loads it as it
    is."""
    folder = making.megatron(tmp_path / "x", making.mcore(1), [[[0]]], tp=2)
    ckptkit.save(ckptkit.open(folder), tmp_path / "out.pth")
    assert ckptkit.open(tmp_path / "out.pth").part is None
    assert (
        torch.load(tmp_path / "out.pth", weights_only=True)["args"]["tensor_model_parallel_size"]
        == 1
    )


def test_the_optimizer_beside_the_model_is_named(tmp_path: Path) -> None:
    folder = making.megatron(tmp_path / "x", making.mcore(1), [[[0]]], tp=2)
    torch.save({"a": torch.ones(1)}, folder / "iter_0000003/mp_rank_00/distrib_optim.pt")
    assert any("distrib_optim.pt" in each for each in ckptkit.open(folder).warnings)


def test_parts_that_are_all_equal_are_not_cut(tmp_path: Path) -> None:
    """The guard against a wrong table; zeros may be equal."""
    folder = making.megatron(tmp_path / "x", making.mcore(1), [[[0]]], tp=2)
    for rank in range(2):
        path = folder / f"iter_0000003/mp_rank_{rank:02d}/model_optim_rng.pt"
        change(path, edited(QKV, lambda t: torch.zeros_like(t)))
    assert any("cannot verify the split" in each for each in ckptkit.open(folder).warnings)


def test_the_tracker_is_followed(tmp_path: Path) -> None:
    folder = making.megatron(tmp_path / "x", making.mcore(1), [[[0]]], iteration=3)
    new = making.mcore(1)
    making.megatron(folder, new, [[[0]]], iteration=7)
    assert_same(ckptkit.load(folder), new)
    (folder / "latest_checkpointed_iteration.txt").write_text("9")
    with pytest.raises(CorruptError, match="contains the iteration '9'"):
        ckptkit.open(folder)


# Meta


@pytest.mark.parametrize(("version", "count"), [(2, 2), (2, 4), (2, 8), (3, 2), (3, 4), (3, 8)])
def test_parts_of_llama_make_the_whole_and_back(version: int, count: int, tmp_path: Path) -> None:
    state = making.llama(2, version=version)
    folder = making.release(tmp_path / "x", state, count, version=version)
    assert_same(ckptkit.load(folder), state)
    out = tmp_path / "again"
    ckptkit.save(ckptkit.open(folder), out, format="llama-parts", options=Options(ranks=count))
    for path in sorted(folder.iterdir()):
        if path.suffix == ".pth":
            assert_same(
                torch.load(out / path.name, weights_only=True), torch.load(path, weights_only=True)
            )
        else:
            assert (out / path.name).read_bytes() == path.read_bytes()


def test_fused_tensors_of_llama_4(tmp_path: Path) -> None:
    """Heads 4 of 4 rows, 2 key heads, 2 experts: every part has [q; k; v], [w1; w3], and rows of
    each expert."""
    q, k, v, w1, w3 = (making.rows(n, 16) for n in (16, 8, 8, 12, 12))
    out = making.rows(2, 12, 16)  # experts, feed-forward, width
    state = {
        "norm.weight": making.rows(16),
        "layers.0.attention.wqkv.weight": torch.cat([q, k, v]),
        "layers.0.attention.wo.weight": making.rows(16, 16),
        "layers.0.feed_forward.mlp.fc1_weight": torch.cat([w1, w3]),
        "layers.0.feed_forward.mlp.fc2_weight": making.rows(16, 12),
        "layers.0.feed_forward.experts.moe_w_out_eF_D": out.reshape(24, 16),
    }
    (tmp_path / "x").mkdir()
    for rank in range(2):
        part = dict(state)
        part["layers.0.attention.wqkv.weight"] = torch.cat(
            [each.chunk(2)[rank] for each in (q, k, v)]
        )
        part["layers.0.attention.wo.weight"] = (
            state["layers.0.attention.wo.weight"].chunk(2, 1)[rank].clone()
        )
        part["layers.0.feed_forward.mlp.fc1_weight"] = torch.cat(
            [each.chunk(2)[rank] for each in (w1, w3)]
        )
        part["layers.0.feed_forward.mlp.fc2_weight"] = (
            part["layers.0.feed_forward.mlp.fc2_weight"].chunk(2, 1)[rank].clone()
        )
        part["layers.0.feed_forward.experts.moe_w_out_eF_D"] = out.chunk(2, 1)[rank].reshape(12, 16)
        torch.save(part, tmp_path / "x" / f"consolidated.{rank:02d}.pth")
    params = (
        '{"dim": 16, "n_heads": 4, "n_kv_heads": 2, "n_layers": 1, "moe_args": {"num_experts": 2}}'
    )
    (tmp_path / "x" / "params.json").write_text(params)
    assert_same(ckptkit.load(tmp_path / "x"), state)


def test_blocks_in_a_ratio_need_no_more_rows_than_it_takes() -> None:
    one, other = ({"n_heads": n, "n_kv_heads": m} for n, m in ((8, 2), (4, 1)))
    assert llama.layout_of(one, by_rows=True) == llama.layout_of(other, by_rows=True)


def test_parts_of_llama_4(tmp_path: Path) -> None:
    """Every kind of tensor in its releases; the parameters are those of "model"."""
    folder, whole = making.release4(tmp_path / "x", 2)
    checkpoint = ckptkit.open(folder)
    assert_same(ckptkit.load(folder), whole)
    assert any("running_gate_stats_3E: counts of one process" in w for w in checkpoint.warnings)
    (folder / "consolidated.01.pth").unlink()
    part = ckptkit.open(folder / "consolidated.00.pth").part
    assert part is not None and part.name == "shard 0 of 2 of a Llama release"


def test_the_last_part_of_llama_alone_is_no_checkpoint(tmp_path: Path) -> None:
    torch.save({"layers.0.attention.wo.weight": torch.ones(4, 2)}, tmp_path / "consolidated.01.pth")
    with pytest.raises(CorruptError, match="1 of 2 rank files are missing: consolidated 0"):
        ckptkit.open(tmp_path)


# DeepSpeed


@pytest.mark.parametrize(("residual", "drift"), [(True, False), (False, False), (True, True)])
def test_layers_of_gpt_neox_make_the_whole(residual: bool, drift: bool, tmp_path: Path) -> None:
    folder, whole = making.neox(tmp_path / "x", 2, residual=residual, drift=drift)
    assert_same(ckptkit.load(folder), whole)


def test_pipeline_and_tensor_ranks_of_gpt_neox(tmp_path: Path) -> None:
    """DeepSpeed numbers the files of ranks through stages and tensor ranks; layers have both."""
    folder, whole = making.neox(tmp_path / "x", 2, residual=True)
    for rank in range(4):
        said = {
            "module": None,
            "mp_world_size": 4,
            "args": {"pipe_parallel_size": 2, "model_parallel_size": 2},
        }
        torch.save(said, folder / f"global_step5/mp_rank_{rank:02d}_model_states.pt")
    assert_same(ckptkit.load(folder), whole)


def universal(folder: Path, **info: Any) -> tuple[Path, making.State]:
    """Two tensor ranks whose files say how they were cut."""
    tag = folder / "global_step1"
    tag.mkdir(parents=True)
    (folder / "latest").write_text("global_step1")
    q, k = making.rows(8, 4), making.rows(4, 4)
    whole = {
        "a.qk.weight": torch.cat([q, k]),
        "b.weight": making.rows(4, 6),
        "c.weight": making.rows(6, 4),
    }
    whole |= {"d.norm": making.rows(4), "e.norm": torch.tensor([1.0, 3.0])}
    for rank in range(2):
        part = {
            "a.qk.weight": torch.cat([q.chunk(2)[rank], k.chunk(2)[rank]]),
            "b.weight": whole["b.weight"].chunk(2, 1)[rank],
            "c.weight": whole["c.weight"].chunk(2)[rank], "d.norm": whole["d.norm"],
            "e.norm": whole["e.norm"] + (0.5 - rank),
        }  # fmt: skip
        said = {
            "universal_checkpoint_version": 0.2, "tp_replicated_parameter_patterns": [r"d\..*"],
            "parameter_to_average_patterns": [r"e\.norm"], "parameter_with_row_parallelism_patterns": [r"b\.weight"],
            "parameter_with_sub_params": [
                {"patterns": [r".*qk\.weight"], "shape": ((8, 4), 4), "partition_dim": 0},
            ], **info,
        }  # fmt: skip
        state = {"module": part, "mp_world_size": 2, "universal_checkpoint_info": said}
        torch.save(state, tag / f"mp_rank_{rank:02d}_model_states.pt")
    return folder, whole


def test_patterns_of_deepspeed_are_followed(tmp_path: Path) -> None:
    folder, whole = universal(tmp_path / "x")
    assert_same(ckptkit.load(folder), whole)


def autotp(folder: Path, **info: Any) -> tuple[Path, making.State]:
    """[q; k; v] of 8, 4 and 4 rows, cut by DeepSpeed's AutoTP into two ranks, unevenly if widths
    say so; a norm."""
    widths = info.get("sub_param_shard_widths", {}).get(AUTOTP, [[4, 4], [2, 2], [2, 2]])
    blocks = [making.rows(sum(each), 3) for each in widths]
    whole = {"model.qkv.weight": torch.cat(blocks), "model.norm.weight": making.rows(3)}
    for rank in range(2):
        cut = [block.split(own)[rank] for block, own in zip(blocks, widths, strict=True)]
        said = {"tp_replicated_parameter_patterns": [r"^model\.norm\.weight$"], **info}
        held = {"module": {**whole, "model.qkv.weight": torch.cat(cut)}, "mp_world_size": 2}
        path = folder / f"mp_rank_{rank:02d}_model_states.pt"
        folder.mkdir(exist_ok=True)
        torch.save({**held, "universal_checkpoint_info": said}, path)
    return folder, whole


AUTOTP = r"^model\.qkv\.weight$"


@pytest.mark.parametrize(
    ("shape", "widths"),
    [
        ([(8, 4, 4), -1], [[4, 4], [2, 2], [2, 2]]),
        ([(8, 4, 4), -1], None),
        ([(9, 4, 2), -1], [[6, 3], [4, 0], [1, 1]]),  # uneven
        ((3, -1), [[2, 2], [2, 2], [2, 2]]),  # how many there are, as version 0.3 says it
    ],
)
def test_fused_parameters_of_autotp(shape: Any, widths: Any, tmp_path: Path) -> None:
    """The number of equal parameters was taken for the rows of one: they were not taken apart."""
    named = {"sub_param_shard_widths": {AUTOTP: widths}} if widths else {}
    said = {"patterns": [AUTOTP], "shape": shape, "partition_dim": 0}
    folder, whole = autotp(tmp_path / "x", parameter_with_sub_params=[said], **named)
    if shape == (3, -1):
        for path in folder.iterdir():
            change(
                path, lambda held: held["universal_checkpoint_info"].pop("sub_param_shard_widths")
            )
    assert_same(ckptkit.load(folder), whole)


def test_zero_beside_tensor_ranks(tmp_path: Path) -> None:
    """The weights of the run are there; its optimizer is in files of its own, and said to be."""
    folder, whole = universal(tmp_path / "x")
    for data, rank in ((d, m) for d in range(2) for m in range(2)):
        name = f"bf16_zero_pp_rank_{data}_mp_rank_{rank:02d}_optim_states.pt"
        torch.save({"optimizer_state_dict": {"zero_stage": 1}}, folder / "global_step1" / name)
    assert_same(ckptkit.load(folder), whole)
    assert any("the optimizer" in each for each in ckptkit.open(folder).warnings)


def test_zero_3_with_tensor_ranks_is_refused(tmp_path: Path) -> None:
    """Its weights are in flat pieces of each tensor rank."""
    tag = tmp_path / "global_step1"
    tag.mkdir()
    (tmp_path / "latest").write_text("global_step1")
    for data, rank in ((d, m) for d in range(2) for m in range(2)):
        name = f"zero_pp_rank_{data}_mp_rank_{rank:02d}_model_states.pt"
        held = {"module": {"a": torch.empty(0)}, "param_shapes": [{"a": torch.Size([4])}]}
        torch.save({**held, "dp_world_size": 2, "mp_world_size": 2}, tag / name)
    with pytest.raises(UnsupportedError, match="several model-parallel ranks"):
        ckptkit.open(tmp_path)


def test_a_list_that_is_out_of_date_is_found_out(tmp_path: Path) -> None:
    """A norm that no pattern names falls to `cut 0`, and is equal in all parts."""
    folder, _ = universal(tmp_path / "x", tp_replicated_parameter_patterns=[])
    with pytest.raises(CorruptError, match=r"shards of 'd\.norm' are equal"):
        ckptkit.open(folder)


@pytest.mark.parametrize("pattern", ["(a+)+$", "(.*a){20}", "x" * 500, ".*.*.*.*.*.*", 3])
def test_patterns_that_could_run_for_long_are_refused(pattern: Any, tmp_path: Path) -> None:
    folder, _ = universal(tmp_path / "x", tp_replicated_parameter_patterns=[pattern])
    with pytest.raises(UnsupportedError, match="pattern"):
        ckptkit.open(folder)


# fairscale


@pytest.mark.parametrize(("parts", "shards"), [(1, 2), (2, 3), (3, 1)])
def test_shards_of_fairscale_make_the_whole(parts: int, shards: int, tmp_path: Path) -> None:
    folder, whole = making.fairscale(tmp_path / "x", parts, shards)
    assert_same(ckptkit.load(folder), whole)


@pytest.mark.parametrize("flat", [True, False])
def test_shards_of_fairscale_before_0_4_1(flat: bool, tmp_path: Path) -> None:
    """They were read as the first shard's alone."""
    folder, whole = making.fairscale_by_name(tmp_path / "x", flat=flat)
    assert_same(ckptkit.load(folder), whole)


def test_names_that_are_shared_count_from_the_root_too(tmp_path: Path) -> None:
    folder, whole = making.fairscale(tmp_path / "x", 1, 2)
    for path in folder.iterdir():
        change(path, lambda saved: saved["shard_metadata"]["param_metadata"][0].update(
            shared_param_info=[("decoder.fc1.weight", "head.weight")]))  # fmt: skip
    whole["head.weight"] = whole.pop("decoder.tied.fc1.weight")
    assert_same(ckptkit.load(folder), whole)


# A table of one's own


def asked(path: Path, text: str) -> Options:
    path.write_text(text)
    return Options(parts=str(path))


@pytest.mark.parametrize("how", ["cut 1", "'[o i] -> [o (tp i)]'"])
def test_a_table_of_ones_own(how: str, tmp_path: Path) -> None:
    folder, whole = own(tmp_path / "x")
    text = TABLE.replace("cut 1", how)
    checkpoint = ckptkit.open(folder, options=asked(tmp_path / "t.yaml", text))
    ckptkit.save(checkpoint, tmp_path / "out.pth")
    assert_same(torch.load(tmp_path / "out.pth", weights_only=True), whole)
    assert any("not a weight" in each for each in checkpoint.warnings)


def test_a_table_is_for_folders(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match="is a file"):
        ckptkit.open(tmp_path / "a.pt", options=asked(tmp_path / "t.yaml", TABLE))


def test_megatron_back_to_parts(tmp_path: Path) -> None:
    """The parts that Megatron's layers hold, of another number of ranks."""
    state = making.mcore(2)
    folder = making.megatron(tmp_path / "x", state, [[[0]], [[1]]], tp=1)
    ckptkit.save(
        ckptkit.open(folder), tmp_path / "y", format="megatron-parts", options=Options(ranks=2)
    )
    expected = making.megatron(tmp_path / "z", state, [[[0, 1]]], tp=2)
    for rank in range(2):
        place = f"iter_0000003/mp_rank_{rank:02d}/model_optim_rng.pt"
        found = torch.load(tmp_path / "y" / place, weights_only=False)
        made = torch.load(expected / place, weights_only=False)
        made["model"] = {name: each for name, each in made["model"].items() if each is not None}
        assert (
            isinstance(found["args"], Namespace) and found["args"].tensor_model_parallel_size == 2
        )
        assert_same(found["model"], made["model"])
    assert_same(ckptkit.load(tmp_path / "y"), state)


def test_grids_of_billions_are_not_counted(tmp_path: Path) -> None:
    folder = making.megatron(tmp_path / "x", making.mcore(1), [[[0]]], tp=2)
    for path in folder.rglob("*.pt"):
        change(path, lambda saved: setattr(saved["args"], "tensor_model_parallel_size", 1 << 30))
    with pytest.raises(LimitError):
        ckptkit.open(folder)
