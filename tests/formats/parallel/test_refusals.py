"""Folders of parts that are not put together: what is known by name, and what does not go together.

Each kind has a row, and the manual names it; other refusals are in the tests of their layouts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import ckptkit
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.formats import distributed
from ckptkit.formats.distributed.fsdp_flat import UnknownError
from ckptkit.formats.distributed.parts import REFUSED
from tests.conftest import Run
from tests.formats.folders import differing
from tests.formats.parallel import making
from tests.formats.parallel.unfit import TABLE, UNFIT, own
from tests.reached import is_raised, modules, unreached, watch

HELP = Path(ckptkit.__file__).parent / "help" / "parallel.md"


def saved(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(content, path)


def vllm(folder: Path) -> None:
    for rank in range(2):
        state = {"model.layers.0.qkv_proj.weight": torch.ones(2, 2)}
        save_file(state, folder / f"model-rank-{rank}-part-0.safetensors")


def zarr(folder: Path) -> None:
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    (folder / "decoder.weight").mkdir()
    (folder / "decoder.weight" / ".zarray").write_text("{}")


def olmo(folder: Path) -> None:
    """As LocalShardedCheckpointer of OLMo saves it."""
    (folder / "metadata.yaml").write_text("world_size: 2\n")
    (folder / "config.yaml").write_text("sharded_checkpointer: local\n")
    for rank in range(2):
        handle = {"flat_param.data": torch.zeros(8), "flat_param._fqns": ["wte.weight"]}
        saved(folder / f"model/rank{rank}.pt", {"modules": [{"handles": [handle], "name": ""}]})
        saved(folder / f"optim/rank{rank}.pt", {"state": {}, "param_groups": []})
        saved(folder / f"train/rank{rank}.pt", {"epoch": 0})


def colossalai(folder: Path) -> None:
    for rank in range(2):
        described = {"w": {"offsets": [2 * rank, 0], "lengths": [2, 4], "global_shape": [4, 4]}}
        text = json.dumps({"checkpoint_version": "1.0", "metadata": described})
        (folder / f"pytorch_model-meta-dist-{rank:05d}.json").write_text(text)
        saved(folder / f"pytorch_model-dist-{rank:05d}-shard.bin", {"w": torch.ones(2, 4)})


def nemo(folder: Path) -> None:
    (folder / "model_config.yaml").write_text("tensor_model_parallel_size: 2\n")
    for rank in range(2):
        part = {"model.language_model.embedding.word_embeddings.weight": torch.ones(2, 4)}
        saved(folder / f"tp_rank_{rank:02d}_pp_rank_000/model_weights.ckpt", part)


FOLDERS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "vllm": (vllm, "vLLM", "original model"),
    "zarr": (zarr, "zarr", "torch_dist"),
    "olmo": (olmo, "OLMo", "unshard.py"),
    "colossalai": (colossalai, "ColossalAI", "gather_dtensor=True"),
    "nemo": (nemo, "NeMo 1", "megatron_change_num_partitions.py"),
}


def test_each_kind_has_a_folder_and_a_line_in_the_manual() -> None:
    assert FOLDERS.keys() == REFUSED.groupindex.keys()
    manual = HELP.read_text()
    for _, name, _ in FOLDERS.values():
        assert name in manual


@pytest.mark.parametrize("kind", FOLDERS)
def test_what_is_known_is_named_with_what_to_do(kind: str, tmp_path: Path, run: Run) -> None:
    make, name, hint = FOLDERS[kind]
    make(tmp_path)
    with pytest.raises(UnsupportedError, match=name) as caught:
        ckptkit.open(tmp_path)
    assert hint in (caught.value.hint or "")
    done = run("doctor", tmp_path)
    assert name in done.stdout and hint.split()[0] in done.stdout


@pytest.mark.parametrize(
    "name", ["mp_rank_{:02}", "mp_rank_00_fsdp_shard_{:05}", "fsdp_shard_{:05}"]
)
def test_other_layouts_of_nemo(name: str, tmp_path: Path) -> None:
    for rank in range(2):
        saved(tmp_path / name.format(rank) / "model_weights.ckpt", {"w": torch.ones(2)})
    with pytest.raises(UnsupportedError, match="NeMo 1"):
        ckptkit.open(tmp_path)


def test_one_process_of_colossalai(tmp_path: Path) -> None:
    """Names of safetensors have no pytorch_ in front, and their metadata end in .index.json."""
    save_file({"w": torch.ones(2)}, tmp_path / "model-dist-00000-shard.safetensors")
    (tmp_path / "pytorch_model-meta-dist-00000.index.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="ColossalAI"):
        ckptkit.open(tmp_path)


def test_a_part_of_vllm_is_known(tmp_path: Path) -> None:
    vllm(tmp_path)
    assert ckptkit.open(tmp_path / "model-rank-1-part-0.safetensors").part is not None


def test_DC_03_DC_04_DC_05_DC_06_DC_08_DC_09_DC_10_SH_01_SH_02_SH_03_SH_07_SH_09_TM_01_TM_04_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row ends as it says, and each refusal of the package has one."""
    found = watch(monkeypatch, (CkptkitError, "__init__"), (UnknownError, "__init__"))
    assert differing(UNFIT, tmp_path) == {}
    for kind, (make, _, _) in FOLDERS.items():
        (tmp_path / kind).mkdir()
        make(tmp_path / kind)
        with pytest.raises(UnsupportedError):
            ckptkit.open(tmp_path / kind)
    assert unreached(modules(distributed), found, is_raised) == []


READING = ("inspect", "doctor", "verify", "digest", "stats", "diff")


@pytest.mark.parametrize("command", READING)
def test_a_table_is_taken_by_commands_that_read(command: str, tmp_path: Path, run: Run) -> None:
    folder, whole = own(tmp_path / "x")
    (tmp_path / "t.yaml").write_text(TABLE)
    torch.save(whole, tmp_path / "whole.pth")
    other = [tmp_path / "whole.pth", "--values"] if command == "diff" else []
    done = run(command, folder, *other, "--parts", tmp_path / "t.yaml")
    assert done.code == (1 if command == "doctor" else 0), done.stderr
    if command == "digest":
        digest = run("digest", tmp_path / "whole.pth").stdout.splitlines()
        assert sorted(done.stdout.splitlines()[1:]) == sorted(digest[1:])
    if command == "doctor":
        assert "--parts" in done.stdout
    wrong = run(command, tmp_path / "whole.pth", "--parts", tmp_path / "t.yaml")
    if command != "diff":  # whose other side may be a file
        assert wrong.code == 2, wrong.stdout + wrong.stderr


def test_the_doctor_names_what_was_put_together(tmp_path: Path, run: Run) -> None:
    folder = making.release(tmp_path / "x", making.llama(1, version=3), 2, version=3)
    assert "Llama release of Meta: 2 of 2 shards" in run("doctor", folder).stdout
