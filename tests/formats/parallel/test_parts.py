"""One file of many: known as a part by every command, and never taken for the whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import ckptkit
from ckptkit.api import convert
from ckptkit.core.bytesource import Memory
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CorruptError, UnsupportedError
from ckptkit.core.options import Options
from ckptkit.core.tree import Node
from ckptkit.edits.combine import average, join
from ckptkit.formats.distributed import parts
from tests.conftest import Run
from tests.formats.parallel import making
from tests.formats.parallel.trees import assert_same
from tests.formats.parallel.unfit import piece, saved
from tests.torch_equality import tensors

WHOLE = torch.arange(14.0).reshape(7, 2)


def ranks(
    folder: Path, *, names: str = "rank{}.pt", buffers: tuple[float, float] = (1.0, 1.0)
) -> Path:
    """Two rank files of a tensor of 7 rows, and a buffer of each."""
    folder.mkdir(exist_ok=True)

    def root(rank: int) -> dict[str, Any]:
        return {"w": piece(rank, WHOLE), "b": torch.tensor([buffers[rank]])}

    saved(root, names)(folder)
    return folder


def fsdp(folder: Path) -> Path:
    return ranks(folder) / "rank0.pt"


def megatron(folder: Path) -> Path:
    making.megatron(folder, making.mcore(1), [[[0]]], tp=2)
    return folder / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt"


def llama(folder: Path) -> Path:
    return making.release(folder, making.llama(1, version=3), 2, version=3) / "consolidated.01.pth"


def neox(folder: Path) -> Path:
    made, _ = making.neox(folder, 2, residual=True)
    return made / "global_step5" / "layer_02-model_01-model_states.pt"


def fairscale(folder: Path) -> Path:
    return making.fairscale(folder, 2, 2)[0] / "checkpoint_last-model_part-1-shard0.pt"


def deepspeed(folder: Path) -> Path:
    made, _ = making.universal(folder, {"a": (torch.ones(4), 0)})
    return made / "global_step1" / "mp_rank_00_model_states.pt"


PARTS = {
    fsdp: "rank 0 of 2 of an FSDP checkpoint: rows 0 to 3 of 7 of each tensor",
    megatron: "TP rank 0 of 2, of a Megatron-LM checkpoint",
    llama: "shard 1 of 2 of a Llama release",
    neox: "layer 2, tensor rank 1, of a DeepSpeed pipeline",
    fairscale: "shard 0 of a fairscale checkpoint",
    deepspeed: "tensor rank 0 of 2 of a DeepSpeed checkpoint",
}


@pytest.mark.parametrize("make", PARTS, ids=lambda make: make.__name__)
def test_a_part_is_known_and_not_converted(make: Any, tmp_path: Path) -> None:
    path, out = make(tmp_path / "x"), tmp_path / "out"
    checkpoint = ckptkit.open(path)
    part = checkpoint.part
    assert part is not None and str(part) == PARTS[make]
    for attempt in (
        lambda: convert(path, f"{out}.safetensors", keep_format=False),
        lambda: convert(path, f"{out}.pth", keep_format=False),
        lambda: average([checkpoint, checkpoint]),
        lambda: join([checkpoint, checkpoint], last_wins=True),
        lambda: ckptkit.save(checkpoint, f"{out}.safetensors"),
        lambda: ckptkit.save(checkpoint, f"{out}.pth", options=Options(objects="drop")),
    ):
        with pytest.raises(UnsupportedError, match="requires the complete checkpoint") as caught:
            attempt()
        assert str(part.folder) in str(caught.value.hint)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("make", PARTS, ids=lambda make: make.__name__)
def test_a_folder_without_another_rank_is_not_the_answer(make: Any, tmp_path: Path) -> None:
    path = make(tmp_path / "x")
    names = ["one", path.parent.name, path.name] if make is megatron else ["one", path.name]
    moved = tmp_path.joinpath(*names)
    moved.parent.mkdir(parents=True)
    path.rename(moved)
    part = ckptkit.open(moved).part
    assert part is not None and part.folder is None
    assert part.hint.startswith("put the files of all ranks into one folder")


@pytest.mark.parametrize("make", PARTS, ids=lambda make: make.__name__)
def test_the_part_alone_is_for_those_who_mean_it(make: Any, tmp_path: Path) -> None:
    done = convert(make(tmp_path / "x"), tmp_path / "out.pth", keep_format=False, part_only=True)
    assert any("not a complete checkpoint" in each for each in done.warnings)
    assert dict(tensors(torch.load(tmp_path / "out.pth", weights_only=make not in (megatron,))))


def test_the_part_alone_has_its_own_rows(tmp_path: Path) -> None:
    convert(fsdp(tmp_path / "x"), tmp_path / "out.safetensors", part_only=True)
    assert_same(ckptkit.load(tmp_path / "out.safetensors"), {"w": WHOLE[:4], "b": torch.ones(1)})


def test_edits_that_lose_nothing_are_allowed(tmp_path: Path) -> None:
    """strip-module of a rank file keeps its pieces: the folder still makes the whole."""
    folder = ranks(tmp_path / "x")
    (tmp_path / "y").mkdir()
    for name in ("rank0.pt", "rank1.pt"):
        convert(folder / name, tmp_path / "y" / name, lambda ck: ckptkit.add_prefix(ck, "m."))
    assert_same(ckptkit.load(tmp_path / "y"), {"m.w": WHOLE, "m.b": torch.ones(1)})


def test_the_commands_name_the_folder(run: Run, tmp_path: Path) -> None:
    path = fsdp(tmp_path / "x")
    shown = run("inspect", path)
    assert f"this is {PARTS[fsdp]}" in shown.stdout
    assert "[7, 2]" in shown.stdout and "this rank has [4, 2]: rows 0 to 3 of 7" in shown.stdout
    found = run("doctor", path)
    assert f"ckptkit convert {tmp_path / 'x'} whole.safetensors" in found.stdout and found.code == 1
    drop = ("strip-module", "--objects", "drop", path)
    for words in (("convert", path), drop, ("average", path, path)):
        done = run(*words, tmp_path / "out.pth")
        assert done.code == 3 and f"ckptkit convert {tmp_path / 'x'}" in done.stderr
    fixed = run("doctor", path, "--fix", tmp_path / "out.pth")
    assert fixed.code == 3 and not (tmp_path / "out.pth").exists()
    assert run("convert", tmp_path / "x", tmp_path / "out.safetensors").code == 0
    assert "2 of 2 ranks" in run("inspect", tmp_path / "x").stdout


def test_what_was_written_is_what_is_counted(run: Run, tmp_path: Path) -> None:
    one, two, *more = (torch.ones(n) for n in (1, 2, 3, 4))
    state = {"model": {"a": one, "b": two}, "more": more}
    torch.save(state, tmp_path / "a.pth")
    done = run("remap", tmp_path / "a.pth", tmp_path / "b.pth", "--to", "cuda:0")
    count = len(
        list(tensors(torch.load(tmp_path / "b.pth", map_location="cpu", weights_only=True)))
    )
    assert f": {count} tensors" in done.stdout
    done = run("convert", tmp_path / "a.pth", tmp_path / "c.safetensors")
    assert f": {len(ckptkit.load(tmp_path / 'c.safetensors'))} tensors" in done.stdout


# Folders of ranks that do not go together


def test_of_unequal_copies_the_first_can_be_taken(run: Run, tmp_path: Path) -> None:
    folder = ranks(tmp_path / "x", buffers=(1.0, 2.0))
    done = run("convert", "--copies", "first", folder, tmp_path / "out.pth")
    assert done.code == 0 and "replicas differ" in done.stderr
    assert_same(ckptkit.load(tmp_path / "out.pth"), {"w": WHOLE, "b": torch.ones(1)})


def test_copies_without_checksums_are_read_where_they_are_asked_for(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Large ones are passed over by default, and said; --check-copies reads them."""
    from ckptkit.formats.distributed import joining

    torch.serialization.set_crc32_options(False)
    try:
        folder = ranks(tmp_path / "x", buffers=(1.0, 2.0))
    finally:
        torch.serialization.set_crc32_options(True)
    monkeypatch.setattr(joining, "READ", 0)
    assert any("1 replicas" in each for each in ckptkit.open(folder).warnings)
    with pytest.raises(CorruptError, match="'b'"):
        ckptkit.open(folder, copies="check")


def test_names_of_accelerate(tmp_path: Path) -> None:
    """SHARDED_STATE_DICT without DCP: the optimizer by name, in files of its own."""
    folder = ranks(tmp_path / "x", names="pytorch_model_fsdp_0_rank{}.bin")

    def optimizer(rank: int) -> dict[str, Any]:
        state = {"w": {"exp_avg": piece(rank, WHOLE + 1), "step": torch.tensor(3.0)}}
        return {"state": state, "param_groups": [{"lr": 0.1, "params": ["w"]}]}

    saved(optimizer, "optimizer_0_rank{}.bin")(folder)
    checkpoint = ckptkit.open(folder)
    assert_same(ckptkit.load(folder), {"w": WHOLE, "b": torch.ones(1)})
    ckptkit.save(checkpoint, tmp_path / "out.pth")
    made = torch.load(tmp_path / "out.pth", weights_only=True)["optimizer"]
    assert_same(made["state"], {"w": {"exp_avg": WHOLE + 1, "step": torch.tensor(3.0)}})


@pytest.mark.parametrize(
    ("path", "more", "is_part"),
    [
        ("run/last.pth", {}, False),
        ("run/mp_rank_00/last.pth", {}, True),
        ("run/last.pth", {"checkpoint_version": 3.0}, True),
    ],
)
def test_parallel_ranks_in_the_arguments(path: str, more: dict[str, Node], is_part: bool) -> None:
    """Megatron-LM cuts its files; a complete file of another trainer may have such arguments."""
    root: Node = {"model": {}, "args": {"model_parallel_size": 8}, **more}
    found = parts.with_part(Checkpoint(root, source=Memory(b"", path)))
    assert (found.part is not None) == is_part
