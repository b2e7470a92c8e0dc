"""Rare files that are searched for pickles, pruned or recovered, and refused."""

from __future__ import annotations

import io
import os
import pickle
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptkit import formats
from ckptkit.api import open_checkpoint, recover
from ckptkit.core.bytesource import ByteSource, LocalFile, Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import (
    AmbiguousError,
    CorruptError,
    FormatError,
    InputError,
    UnsafeGlobalError,
)
from ckptkit.core.limits import LIMITS
from ckptkit.core.tensor import Storage, Tensor
from ckptkit.formats import torch_legacy
from ckptkit.formats.format import Loss, Probe
from ckptkit.formats.record import refuse_objects
from ckptkit.formats.recovering import recovered
from ckptkit.pickles.streams import Inner, PickleStream, Remark, Traced
from ckptkit.scanning import find as hidden
from tests.formats.containers import tars
from tests.formats.containers.zips import Member, build
from tests.formats.torch_zip.archives import pickle_of
from tests.pickles.making import saved

U32 = 0xFFFFFFFF
F32 = BY_NAME["float32"]


class Several(list[Any]):
    """A class of somebody's, whose items are added one by one."""


# Searched for pickles


def test_places_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Memory(build(*(Member(f"a/{number}.pkl", pickle_of(b"N")) for number in range(9))))
    assert sum(isinstance(each, Traced) for each in hidden.pickles(made)) == 9
    monkeypatch.setattr("ckptkit.core.limits.LIMITS", replace(LIMITS, scan_parts=4))
    *found, last = hidden.pickles(made)
    assert isinstance(last, Remark) and last.where == ""
    assert "parts of a file: 5 exceeds the limit of 4 (scan_parts)" in last.reason
    assert len(found) < 4 and all(isinstance(each, Traced) for each in found)


class Worn(Memory):
    """A file on a disk with a place that cannot be read."""

    def __init__(self, data: bytes, bad: int) -> None:
        super().__init__(data, "made.zip")
        self.bad = bad

    def read(self, offset: int, length: int) -> bytes:
        if offset <= self.bad < offset + length and offset > 0:
            raise InputError(f"cannot be read at byte {self.bad:,}")
        return super().read(offset, length)


def test_a_place_that_cannot_be_read() -> None:
    """Pickles found before are still reported, and so is the place that was not read."""
    data = build(
        Member("a/0.pkl", pickle_of(b"N")), Member("a/1", b"something"), gap=bytes(1 << 17)
    )
    found = list(hidden.pickles(Worn(data, data.index(b"something"))))
    assert [each.where for each in found] == ["a/0.pkl", ""]
    assert (
        isinstance(found[1], Remark)
        and found[1].reason == f"cannot be read at byte {data.index(b'something'):,}"
    )


def test_members_of_a_tar_file_that_are_empty() -> None:
    data = tars.archive(tars.member("a"), tars.member("b.pkl", pickle_of(b"N")), tars.member("c"))
    found = list(hidden.tar_members(Memory(data)))
    assert [(each.where, each.likely) for each in found if isinstance(each, Inner)] == [
        ("b.pkl", True)
    ]
    assert len(found) == 1


@pytest.mark.parametrize("left", [0, 7])
def test_a_tar_file_that_ends_inside_a_member(left: int) -> None:
    data = tars.header("a.pkl", 100) + bytes(left)
    remark, *rest = hidden.tar_members(Memory(data))
    assert isinstance(remark, Remark) and (remark.where, len(rest)) == ("a.pkl", left > 0)
    assert remark.reason == "the tar file is truncated in this member"
    assert all(
        isinstance(each, Inner) and (each.source.size, each.open_end) == (left, True)
        for each in rest
    )


def test_an_archive_that_says_its_sizes_in_64_bits() -> None:
    """Its offsets are too short by what is before it, and only the second of its end records has
    them."""
    wide = build(
        Member("a/data.pkl", pickle_of(b"N")),
        end={"start": U32, "size": U32, "count": 0xFFFF},
        zip64={},
    )
    found = list(hidden.pickles(Memory(b"#!/bin/sh\n" + wide)))
    assert [each.where for each in found if isinstance(each, Traced)] == ["a/data.pkl at byte 50"]
    narrow = build(Member("a/data.pkl", pickle_of(b"N")), end={"start": U32, "size": U32})
    assert not any(
        isinstance(each, Traced)
        for each in hidden.pickles(Memory(b"#!/bin/sh\n" + bytes(99) + narrow))
    )


# Pruned and recovered


def damage(path: Path, told: bytes) -> None:
    data = path.read_bytes()
    at = data.index(told)
    path.write_bytes(data[: at + 5] + bytes([data[at + 5] ^ 1]) + data[at + 6 :])


TOLD = bytes(range(3, 60, 2))


def told() -> torch.Tensor:
    return torch.frombuffer(bytearray(TOLD), dtype=torch.uint8)


def test_an_object_with_items_that_are_lost(tmp_path: Path) -> None:
    state = {"model": {"w": torch.ones(2)}, "all": Several([1, told()]), "some": Several([2])}
    torch.save(state, tmp_path / "a.pth")
    damage(tmp_path / "a.pth", TOLD)
    found = recover(tmp_path / "a.pth")
    (loss,) = found.lost
    assert (loss.path, loss.what) == ("all", f"{Several.__module__}.Several")
    assert list(found.checkpoint.root) == ["model", "some"]


def test_two_models_of_which_a_part_is_lost(tmp_path: Path) -> None:
    """It does not matter which of the two the weights are."""
    model = {"w": torch.ones(3, 4), "v": torch.ones(3)}
    torch.save(
        {"generator": {**model, "t": told()}, "discriminator": dict(model)}, tmp_path / "a.pth"
    )
    damage(tmp_path / "a.pth", TOLD)
    with pytest.raises(AmbiguousError):
        _ = open_checkpoint(tmp_path / "a.pth").selection
    found = recover(tmp_path / "a.pth")
    assert [loss.path for loss in found.lost] == ["generator.t"]
    assert {name: list(each) for name, each in found.checkpoint.root.items()} == {
        "generator": ["w", "v"], "discriminator": ["w", "v"],
    }  # fmt: skip


def test_a_tensor_without_memory_is_not_lost(tmp_path: Path) -> None:
    torch.save(
        {"meta": torch.empty(2, device="meta"), "w": torch.ones(2), "t": told()}, tmp_path / "a.pth"
    )
    damage(tmp_path / "a.pth", TOLD)
    found = recover(tmp_path / "a.pth")
    assert [loss.path for loss in found.lost] == ["t"] and list(found.checkpoint.root) == [
        "meta",
        "w",
    ]


def test_a_tensor_of_no_storage_is_not_lost() -> None:
    """As others than readers put into a tree."""
    here, gone = (Storage(Range(Memory(bytes(8)), 0, 8)) for _ in range(2))
    root = {
        "none": Tensor(None, F32, (2,), (1,)),
        "w": Tensor(here, F32, (2,), (1,)),
        "t": Tensor(gone, F32, (2,), (1,)),
    }
    found = recovered(Checkpoint(root, "made", Memory(b"")), {here: None, gone: "cut"}.get)
    assert found.lost == (Loss("t", "float32 [2]", "cut"),) and list(found.checkpoint.root) == [
        "none",
        "w",
    ]


def test_nothing_is_left(tmp_path: Path) -> None:
    torch.save({"epoch": 3, "w": torch.ones(2)}, tmp_path / "a.pth")
    with pytest.raises(CorruptError, match="no tensor in it is intact"):
        recovered(open_checkpoint(tmp_path / "a.pth"), lambda storage: "gone")


# Left out


def test_objects_that_anybody_can_make_are_left_out(tmp_path: Path) -> None:
    """torch.load makes them itself: nothing is lost that only somebody's code could bring back."""
    plain = {"w": torch.ones(2), "size": torch.Size([1]), "device": torch.device("cpu")}
    torch.save(plain, tmp_path / "a.pth")
    refuse_objects(open_checkpoint(tmp_path / "a.pth"))
    torch.save({**plain, "all": Several([1])}, tmp_path / "a.pth")
    with pytest.raises(
        UnsafeGlobalError, match=r"all is an object \(.*Several\), which the output cannot store"
    ):
        refuse_objects(open_checkpoint(tmp_path / "a.pth"))


# Refused


def test_a_model_of_keras(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.keras", "w") as made:
        for name in ("config.json", "model.weights.h5", "metadata.json"):
            made.writestr(name, b"{}")
    with pytest.raises(FormatError, match="is a Keras model") as caught:
        formats.read(LocalFile(tmp_path / "a.keras"))
    assert "load it with Keras" in str(caught.value.hint)


@pytest.mark.parametrize("name", ["best.ckpt", "folder/model.safetensors"])
def test_a_zip_file_that_a_checkpoint_was_packed_into(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as made:
        made.writestr("notes", b"x")
        made.writestr(name, b"x")
    with pytest.raises(FormatError, match="contains checkpoint files") as caught:
        formats.read(LocalFile(tmp_path / "a.zip"))
    assert repr(name.rpartition("/")[2]) in caught.value.message
    assert caught.value.hint == f"unpack it first: `unzip {tmp_path}/a.zip`"


def tarred(folder: Path, *names: str, data: bytes) -> ByteSource:
    """A tar file as tar makes it, with `data` in each of the members."""
    with tarfile.open(folder / "x.tar", "w") as archive:
        for name in names:
            info = tarfile.TarInfo(name)
            info.type = tarfile.DIRTYPE if name in (".", "./") else tarfile.REGTYPE
            info.size = 0 if info.isdir() else len(data)
            archive.addfile(info, None if info.isdir() else io.BytesIO(data))
    return LocalFile(folder / "x.tar")


class Evil:
    def __reduce__(self) -> object:
        return os.system, ("true",)


@pytest.mark.parametrize("names", [("./", "./model.pt"), (".", "./a/model.pt"), ("model.pt",)])
@pytest.mark.parametrize("value", [{"a": torch.ones(2)}, {"a": Evil()}])
def test_ordinary_tar_files_are_looked_into(
    tmp_path: Path, names: tuple[str, ...], value: object
) -> None:
    """`tar -C FOLDER .`, and a last member that ends as a zip archive does."""
    seen = list(hidden.pickles(tarred(tmp_path, *names, data=saved(value))))
    assert not [each for each in seen if isinstance(each, Remark)]
    found = {str(name) for each in seen if isinstance(each, Traced) for name in each.trace.globals}
    assert ("posix.system" in found) == (
        not isinstance(value, dict) or isinstance(value["a"], Evil)
    )


def test_an_archive_over_the_end_of_a_tar_file_is_a_second_reading(tmp_path: Path) -> None:
    tarred(tmp_path, "a.txt", data=b"text")
    with zipfile.ZipFile(tmp_path / "x.tar", "a") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Evil()))
    said = [
        each for each in hidden.pickles(LocalFile(tmp_path / "x.tar")) if isinstance(each, Remark)
    ]
    assert any("zip" in each.reason for each in said)


def test_two_spellings_of_one_member(tmp_path: Path) -> None:
    source = tarred(tmp_path, "./a", "a", data=b"text")
    said = [each for each in hidden.pickles(source) if isinstance(each, Remark)]
    assert any("two members" in each.reason for each in said)


def test_folders_in_an_archive_hold_no_pickles() -> None:
    made = build(
        Member("a/data.pkl", pickle_of(b"N")), Member("a/data/", b""), Member("a/version", b"3\n")
    )
    assert [each.where for each in hidden.pickles(Memory(made, "made.pth"))] == ["a/data.pkl"]  # type: ignore[union-attr]


def test_an_empty_member_of_a_tar_file_is_no_pickle() -> None:
    root = tars.torch_tar(tars.ids(), [], [], empty=b"", more=b"something")
    found = torch_legacy.pickles_of_tar(Probe(Memory(root)))
    assert found is not None
    kinds = {each.where: type(each) for each in found if isinstance(each, (PickleStream, Inner))}
    assert "empty" not in kinds and kinds["more"] is Inner and kinds["pickle"] is PickleStream
