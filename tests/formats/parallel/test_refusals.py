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
from ckptkit.core.errors import (
    CkptkitError,
    CorruptError,
    FormatError,
    UnsupportedError,
    UsageError,
)
from ckptkit.formats.format import Asked
from ckptkit.formats.parallel.refused import KNOWN
from tests.conftest import Run
from tests.formats.parallel import making
from tests.formats.parallel.test_tables import TABLE, change, own

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
    "vllm": (vllm, "vLLM", "model that it was made of"),
    "zarr": (zarr, "zarr", "torch_dist"),
    "olmo": (olmo, "OLMo", "unshard.py"),
    "colossalai": (colossalai, "ColossalAI", "gather_dtensor=True"),
    "nemo": (nemo, "NeMo 1", "megatron_change_num_partitions.py"),
}


def test_each_kind_has_a_folder_and_a_line_in_the_manual() -> None:
    assert FOLDERS.keys() == KNOWN.keys()
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


def test_other_layouts_of_nemo(tmp_path: Path) -> None:
    for rank in range(2):
        saved(tmp_path / f"mp_rank_{rank:02d}/model_weights.ckpt", {"w": torch.ones(2)})
    with pytest.raises(UnsupportedError, match="NeMo 1"):
        ckptkit.open(tmp_path)


def test_a_part_of_vllm_is_known(tmp_path: Path) -> None:
    vllm(tmp_path)
    assert ckptkit.open(tmp_path / "model-rank-1-part-0.safetensors").part is not None


def llama(folder: Path) -> Path:
    return making.release(folder, making.llama(1, version=3), 2, version=3)


def fairscale(folder: Path) -> Path:
    return making.fairscale(folder, 1, 2)[0]


def megatron(folder: Path) -> Path:
    return making.megatron(folder, making.mcore(2), [[[0]], [[1]]], tp=1)


def _params(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "params.json").write_text(text) and None


def _described(edit: Callable[[Any], None]) -> Callable[[Path], None]:
    def edited(folder: Path) -> None:
        for path in folder.glob("*shard*.pt"):
            change(path, lambda saved: edit(saved["shard_metadata"]["param_metadata"][0]["params"]))

    return edited


def _first(params: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = next(iter(params.values()))
    return found


PARTS = "iter_0000003/mp_rank_00_001"
WRONG: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any], type[CkptkitError], str]] = {
    "params.json of llama is a list": (llama, _params("[]"), FormatError, "JSON object"),
    "params.json of llama is large": (llama, _params(" " * (1 << 20) + "{}"), FormatError, "bytes"),
    "a part of llama is a list": (
        llama, lambda folder: torch.save([], folder / "consolidated.01.pth"), FormatError, "no dict"
    ),
    "two saves of fairscale": (
        fairscale, lambda folder: (folder / "checkpoint_last-model_part-0-shard1.pt").rename(
            folder / "checkpoint_best-model_part-0-shard1.pt"), CorruptError, "2 saves",
    ),
    "numbers of fairscale": (
        fairscale, _described(lambda params: _first(params).update(numels=[1])), CorruptError, "elements",
    ),
    "shapes of fairscale": (
        fairscale, _described(lambda params: _first(params).update(
            shapes=[(1, 1)] * len(_first(params)["shapes"]))), CorruptError, "is said to be",
    ),
    "no flat parameter of fairscale": (
        fairscale, lambda folder: change(
            folder / "checkpoint_last-model_part-0-shard0.pt", lambda saved: saved["model"].clear()),
        FormatError, "no flat parameter",
    ),
    "a folder of Megatron-LM without its file": (
        megatron, lambda folder: (folder / PARTS / "model_optim_rng.pt").unlink(), CorruptError, "has no model_optim",
    ),
    "no model of Megatron-LM": (
        megatron, lambda folder: torch.save([], folder / PARTS / "model_optim_rng.pt"), CkptkitError, "Megatron|dict",
    ),
    "a folder of Megatron-LM with another number": (
        megatron, lambda folder: (folder / PARTS).rename(folder / "iter_0000003/mp_rank_00_002"),
        CorruptError, "1 of 3 parts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_folders_that_contradict_themselves_are_refused(what: str, tmp_path: Path) -> None:
    make, edit, kind, word = WRONG[what]
    folder = make(tmp_path / "x")
    edit(folder)
    with pytest.raises(kind, match=word):
        ckptkit.open(folder)


TABLES = {
    "rules are no list": (lambda table: {**table, "rules": {"a": "same"}}, "no list"),
    "a rule of two": (lambda table: {**table, "rules": [{"a": "same", "b": "same"}]}, "not a rule"),
    "layers are a word": (lambda table: {**table, "layers": "blocks"}, "layers are not"),
    "a rank of letters": (
        lambda table: {**table, "files": r"stage(?P<pp>[0-9])/(?P<tp>part_[0-9]+)\.pt"}, "than numbers",
    ),
    "more blocks than rows": (
        lambda table: {**table, "rules": [{".*up": "cut 0 blocks 5"}, *table["rules"]]}, "no 5 blocks",
    ),
    "sizes of another tensor": (
        lambda table: {**table, "rules": [{".*up": "cut 0 sizes 7 4"}, *table["rules"]]}, "not cut like",
    ),
    "a dimension that is not there": (
        lambda table: {**table, "rules": [{".*scale": "cut 1"}, *table["rules"]]}, "no dimension 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", TABLES)
def test_tables_that_do_not_fit_are_refused(what: str, tmp_path: Path) -> None:
    import yaml

    folder, _ = own(tmp_path / "x")
    edit, word = TABLES[what]
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(edit(yaml.safe_load(TABLE))))
    with pytest.raises(CkptkitError, match=word):
        ckptkit.open(folder, asked=Asked(table=str(tmp_path / "t.yaml")))


def test_a_table_that_cannot_be_read(tmp_path: Path) -> None:
    folder, _ = own(tmp_path / "x")
    with pytest.raises(CkptkitError, match="cannot be read"):
        ckptkit.open(folder, asked=Asked(table=str(tmp_path / "none.yaml")))
    (tmp_path / "large.yaml").write_text("#" * (1 << 20) + "#")
    with pytest.raises(UsageError, match="larger than"):
        ckptkit.open(folder, asked=Asked(table=str(tmp_path / "large.yaml")))


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
    folder = llama(tmp_path / "x")
    assert "Llama release of Meta: 2 of 2 parts" in run("doctor", folder).stdout
