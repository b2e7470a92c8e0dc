"""Rare cases of folders: files beside the data, and fields that few of them have."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata

from ckptkit import formats
from ckptkit.analysis.verify import verify
from ckptkit.api import convert
from ckptkit.core.bytesource import Folder, LocalFile
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import AmbiguousError, CorruptError, FormatError
from ckptkit.core.notices import NO_CHECKSUM, coded
from ckptkit.formats.dcp import hidden_items
from ckptkit.formats.dcp.nesting import Flat
from ckptkit.formats.format import Probe, WriteOptions
from ckptkit.pickles.streams import Traced
from ckptkit.scan import find as hidden
from tests.formats.conformance import elements_of
from tests.formats.dcp.making import DATA, Crafted, archive, save
from tests.formats.deepspeed.making import Run, State
from tests.formats.deepspeed.test_hostile import MODEL, OPTIM, edit, edit_optims


def read(folder: Path) -> Checkpoint:
    return formats.read(Folder(folder))


# torch.distributed.checkpoint


def test_what_lightning_keeps_beside_is_checked(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", {"w": torch.ones(2)})
    before = verify(folder).records
    torch.save({"note": "told here"}, folder / "meta.pt")
    assert (verify(folder).findings, verify(folder).records > before) == ((), True)
    whole = (folder / "meta.pt").read_bytes()
    (folder / "meta.pt").write_bytes(whole.replace(b"told here", b"told hers"))
    assert "meta.pt" in {finding.file for finding in verify(folder).findings}
    torch.save({"note": "told here"}, folder / "meta.pt", _use_new_zipfile_serialization=False)
    assert (verify(folder).findings, verify(folder).records) == ((), before)


def test_a_data_file_beside_damaged_metadata_is_searched_all_the_same(tmp_path: Path) -> None:
    """Only the metadata say where its items are: without them it is what any archive is."""
    folder = save(tmp_path / "x", {"a": torch.ones(2), "b": 1})
    listed = [
        each.where for each in hidden.pickles(LocalFile(folder / DATA)) if isinstance(each, Traced)
    ]
    assert len(listed) == 2 and all(where.startswith("item at byte") for where in listed)
    (folder / ".metadata").write_bytes(b"\x80\x02")
    found = [
        each.where for each in hidden.pickles(LocalFile(folder / DATA)) if isinstance(each, Traced)
    ]
    assert found and not any(where.startswith("item at byte") for where in found)
    assert hidden_items.pickles(Probe(Folder(folder))) is None


def test_a_shard_that_holds_more_than_tensors(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "epoch": 3}, tmp_path / "a.pth")
    (tmp_path / "x").mkdir()
    name = "shard-00001-model-00001-of-00001.safetensors"
    convert(tmp_path / "a.pth", tmp_path / "x" / name, options=WriteOptions(everything=True))
    with pytest.raises(FormatError, match="holds 'epoch', which is not a tensor") as caught:
        formats.by_name("dcp").read(Probe(Folder(tmp_path / "x")))  # type: ignore[union-attr]
    assert caught.value.where == str(tmp_path / "x" / name)


def test_columns_that_are_conjugated(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3) + 1j
    made = Crafted(tmp_path / "x")
    columns = [((0, 0), (4, 2)), ((0, 2), (4, 1))]
    held = [whole[:, :2].conj().resolve_conj().conj(), whole[:, 2:].clone()]
    made.tensor(
        "w",
        (4, 3),
        [(box, archive(each)) for box, each in zip(columns, held, strict=True)],
        torch.complex64,
    )
    assert held[0].is_conj()
    assert elements_of(read(made.write()).weights["w"]) == whole.numpy().tobytes()


def one(folder: Path) -> Crafted:
    made = Crafted(folder)
    made.tensor("w", (2,), [(((0,), (2,)), archive(torch.ones(2)))])
    return made


def test_DC_01_a_chunk_without_its_fields(tmp_path: Path) -> None:
    made = one(tmp_path / "x")
    described = made.metadata.state_dict_metadata["w"]
    assert isinstance(described, TensorStorageMetadata)
    described.chunks = [object.__new__(ChunkStorageMetadata)]
    with pytest.raises(FormatError, match="'w': holds ChunkStorageMetadata without its fields"):
        read(made.write())


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        ("size", "2", "the size of a tensor is not a torch.Size"),
        ("chunks", (), "its chunks are not a list"),
    ],
)
def test_DC_01_a_tensor_described_in_other_types(
    tmp_path: Path, field: str, value: Any, why: str
) -> None:
    made = one(tmp_path / "x")
    setattr(made.metadata.state_dict_metadata["w"], field, value)
    with pytest.raises(FormatError, match=f"'w': {why}"):
        read(made.write())


@pytest.mark.parametrize("first", [0, 1])
def test_DC_09_a_value_to_one_rank_and_a_tensor_to_another(tmp_path: Path, first: int) -> None:
    folder, value = one(tmp_path / "x").write(), Crafted(tmp_path / "y")
    value.value("w", archive(1))
    os.rename(folder / ".metadata", folder / f"__{first}.metadata")
    shutil.copy(value.write() / ".metadata", folder / f"__{1 - first}.metadata")
    with pytest.raises(AmbiguousError, match="'w' is described differently"):
        read(folder)


def test_a_list_that_holds_another_twice() -> None:
    inner: list[Any] = [1]
    assert list(Flat({"a": [inner, inner]}).entries) == ["a"]
    assert list(Flat({"a": [inner, inner, {}]}).entries) == ["a.0", "a.1"]


# DeepSpeed


def small() -> State:
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}


def test_a_buffer_that_is_no_tensor_has_another_name(tmp_path: Path) -> None:
    tag = Run(small()).save(tmp_path / "x")

    def change(content: dict[str, Any]) -> None:
        content["module"]["note"] = "x"
        content |= {"buffer_names": ["note"], "shared_params": {"other": "note"}}

    edit(tag / MODEL, change)
    module = read(tmp_path / "x").root["module"]
    assert (module["note"], module["other"]) == ("x", "x")


def test_ranks_without_groups(tmp_path: Path) -> None:
    tag = Run(small(), stage=3).save(tmp_path / "x")
    for path in tag.glob("*_model_states.pt"):
        edit(path, lambda content: content.update(param_shapes=[]))
    with pytest.raises(CorruptError, match="take 2 flat tensors, there are 0"):
        read(tmp_path / "x")


def test_a_model_file_without_a_module(tmp_path: Path) -> None:
    tag = Run(small()).save(tmp_path / "x")
    edit(tag / MODEL, lambda content: content.pop("module"))
    with pytest.raises(FormatError, match=f"{MODEL} has no module"):
        read(tmp_path / "x")


@pytest.mark.parametrize(
    "group", [{"lr": 0.5, "params": ["a"]}, {"lr": 0.5, "params": [1]}, {"lr": 0.5}, "odd"]
)
def test_groups_that_do_not_number_flat_tensors(tmp_path: Path, group: Any) -> None:
    """They are kept as they are."""
    tag = Run(small()).save(tmp_path / "x")
    edit_optims(tag, lambda content: content["base_optimizer_state"].update(param_groups=[group]))
    assert read(tmp_path / "x").root["optimizer"]["param_groups"] == [group]


@pytest.mark.parametrize("content", [b"nothing of torch", b""])
def test_a_file_of_a_rank_that_is_none(tmp_path: Path, content: bytes) -> None:
    tag = Run(small()).save(tmp_path / "x")
    (tag / OPTIM.format(1)).write_bytes(content)
    with pytest.raises(FormatError, match=r"is not a file of torch\.save") as caught:
        read(tmp_path / "x")
    assert caught.value.where == str(tag / OPTIM.format(1))


def test_what_files_of_ranks_warn_of_is_said_once(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        Run(small()).save(tmp_path / "x")
    finally:
        torch.serialization.set_crc32_options(before)
    said = "of its storages have no checksum: damage to them cannot be seen"
    warnings = read(tmp_path / "x").warnings
    assert warnings == (f"{MODEL}: 2 {said}", f"{OPTIM.format(0)} and 1 more: 4 {said}")
    assert coded(warnings, NO_CHECKSUM) == [*warnings]


def test_a_step_without_memory(tmp_path: Path) -> None:
    tag = Run(small()).save(tmp_path / "x")
    step = torch.empty((), device="meta")
    edit_optims(tag, lambda content: content["base_optimizer_state"]["state"][0].update(step=step))
    state = read(tmp_path / "x").root["optimizer"]["state"]
    assert [(each["step"].storage, each["step"].shape) for each in state.values()] == [
        (None, ())
    ] * 2
    assert list(state["a"]) == ["step", "exp_avg", "exp_avg_sq"]


# Others


def test_a_cache_with_other_refs_than_main(tmp_path: Path) -> None:
    folder = tmp_path / "models--me--net"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "v1.0").write_text("aaa")
    for revision in ("aaa", "bbb"):
        (folder / "snapshots" / revision).mkdir(parents=True)
        torch.save({revision: torch.ones(1)}, folder / "snapshots" / revision / "model.pt")
    with pytest.raises(AmbiguousError, match="2 revisions and none called main: aaa, bbb"):
        read(folder)
    shutil.rmtree(folder / "snapshots" / "bbb")
    assert list(read(folder).weights) == ["aaa"]
