"""Folders of parts that are not put together: what is known by name, and what does not go together.

Each kind has a row, and the manual names it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

import ckptkit
from ckptkit.core.errors import CkptkitError, UnsupportedError
from ckptkit.formats import distributed
from ckptkit.formats.distributed.fsdp_flat import UnknownError
from ckptkit.formats.distributed.parts import REFUSED
from tests.conftest import Run
from tests.formats.folders import Row, differing, files, opened
from tests.formats.parallel import making
from tests.formats.parallel.unfit import UNFIT
from tests.reached import is_raised, modules, unreached, watch

HELP = Path(ckptkit.__file__).parent / "help" / "parallel.md"


def of_two(name: str, **content: Any) -> dict[str, Any]:
    """A file of each of two ranks."""
    return {name.format(rank): content for rank in range(2)}


OLMO = {
    "modules": [
        {
            "handles": [{"flat_param.data": torch.zeros(8), "flat_param._fqns": ["wte.weight"]}],
            "name": "",
        }
    ]
}
NEMO = {"w": torch.ones(2, 4)}
SHAPE = {"w": {"offsets": [0, 0], "lengths": [2, 4], "global_shape": [4, 4]}}
# Files of each layout, its name, and words of the hint; the first of a layout has its key.
FOLDERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "vllm": (
        {f"model-rank-{rank}-part-0.safetensors": save({"model.layers.0.qkv_proj.weight": torch.ones(2, 2)}) for rank in (0, 1)},
        "vLLM", "original model"),
    "zarr": (
        {"metadata.json": '{"sharded_backend": "zarr"}', "decoder.weight/.zarray": "{}"}, "zarr", "torch_dist"),
    "olmo": (  # as LocalShardedCheckpointer of OLMo saves it
        {"metadata.yaml": "world_size: 2\n", "config.yaml": "sharded_checkpointer: local\n", **of_two("model/rank{}.pt", **OLMO),
         **of_two("optim/rank{}.pt", state={}, param_groups=[]), **of_two("train/rank{}.pt", epoch=0)}, "OLMo", "unshard.py"),
    "colossalai": (
        {**of_two("pytorch_model-dist-0000{}-shard.bin", w=torch.ones(2, 4)), **{
            f"pytorch_model-meta-dist-0000{rank}.json": json.dumps({"checkpoint_version": "1.0", "metadata": SHAPE})
            for rank in (0, 1)}}, "ColossalAI", "gather_dtensor=True"),
    # Names of safetensors have no pytorch_ in front, and their metadata end in .index.json.
    "colossalai, one process": (
        {"model-dist-00000-shard.safetensors": save({"w": torch.ones(2)}), "pytorch_model-meta-dist-00000.index.json": "{}"},
        "ColossalAI", "gather_dtensor=True"),
    "nemo": (
        {"model_config.yaml": "tensor_model_parallel_size: 2\n", **of_two("tp_rank_0{}_pp_rank_000/model_weights.ckpt", **NEMO)},
        "NeMo 1", "megatron_change_num_partitions.py"),
    **{f"nemo, {name}": (of_two(f"{name}/model_weights.ckpt", **NEMO), "NeMo 1", "megatron_change_num_partitions.py")
       for name in ("mp_rank_0{}", "mp_rank_00_fsdp_shard_0000{}", "fsdp_shard_0000{}")},
}  # fmt: skip
KNOWN = {
    what: Row(opened(lambda folder, made=made: files(folder, made)), UnsupportedError, f"{name} ... {hint}")
    for what, (made, name, hint) in FOLDERS.items()
}  # fmt: skip


def test_each_kind_has_a_folder_and_a_line_in_the_manual() -> None:
    assert REFUSED.groupindex.keys() <= FOLDERS.keys()
    manual = HELP.read_text()
    assert all(name in manual for _, name, _ in FOLDERS.values())


@pytest.mark.parametrize("kind", REFUSED.groupindex)
def test_the_doctor_names_what_is_known(kind: str, tmp_path: Path, run: Run) -> None:
    made, name, hint = FOLDERS[kind]
    done = run("doctor", files(tmp_path, made))
    assert name in done.stdout and hint.split()[0] in done.stdout


def test_a_part_of_vllm_is_known(tmp_path: Path) -> None:
    files(tmp_path, FOLDERS["vllm"][0])
    assert ckptkit.open(tmp_path / "model-rank-1-part-0.safetensors").part is not None


def test_DC_03_DC_04_DC_05_DC_06_DC_08_DC_09_DC_10_SH_01_SH_02_SH_03_SH_07_SH_09_TM_01_TM_04_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row ends as it says, and each refusal of the package has one."""
    found = watch(monkeypatch, (CkptkitError, "__init__"), (UnknownError, "__init__"))
    assert differing(UNFIT | KNOWN, tmp_path) == {}
    assert unreached(modules(distributed), found, is_raised) == []


def test_the_doctor_names_what_was_put_together(tmp_path: Path, run: Run) -> None:
    folder = making.release(tmp_path / "x", making.llama(1, version=3), 2, version=3)
    assert "Llama release of Meta: 2 of 2 shards" in run("doctor", folder).stdout
