"""Edits of torch zip files in place, and edits that need a new file."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ckptkit import formats
from ckptkit.compute.operation import Swap
from ckptkit.core.bytesource import Derived, LocalFile, Memory, Range
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.dtypes import BY_NAME
from ckptkit.core.errors import FormatError
from ckptkit.core.options import Options
from ckptkit.core.plan import Patch
from ckptkit.core.tensor import Storage, Tensor
from ckptkit.formats import torch_zip as zip_patch
from ckptkit.formats.table import TORCH_LEGACY as LEGACY
from ckptkit.formats.table import TORCH_ZIP as ZIP
from ckptkit.formats.zip_reader import REPLACED
from tests.formats.catalogue import read_as
from tests.formats.containers.zips import Member
from tests.formats.torch_zip.archives import archive, pickle_of, read, saved, storage, tensor

U8 = BY_NAME["uint8"]


def held(path: Path) -> Checkpoint:
    return read(saved(OrderedDict(a=torch.ones(4), z=torch.ones(2)), path))


def patch(before: Checkpoint, after: Checkpoint) -> Patch | None:
    return zip_patch.patch(before, after, Options())


def test_only_a_file_is_edited_in_place(tmp_path: Path) -> None:
    before = held(tmp_path / "x.pt")
    assert patch(before, replace(before, root={"b": before.root["a"]})) is not None
    copy = read((tmp_path / "x.pt").read_bytes())
    assert patch(copy, replace(copy, root={"b": copy.root["a"]})) is None


def test_an_archive_without_a_version_is_not_edited(tmp_path: Path) -> None:
    """torch would refuse the result."""
    for version in (b"3\n", None):
        (tmp_path / "x.pt").write_bytes(archive(pickle_of(tensor(storage())), version=version))
        before = read(tmp_path / "x.pt")
        assert (patch(before, before) is None) == (version is None)


def test_metadata_get_a_record(tmp_path: Path) -> None:
    before = held(tmp_path / "x.pt")
    made = patch(before, replace(before, extras={"said": "something new"}))
    assert made is not None and any(b"something new" in edit.data for edit in made.edits)
    plain = patch(before, before)
    assert plain is not None and made.size > plain.size


def replaced(count: int) -> bytes:
    """An archive in which this many of the names for replaced records are taken."""
    taken = [Member(f"a/data{ending}", b"old") for ending in REPLACED[:count]]
    return archive(pickle_of(tensor(storage())), *taken)


def test_an_archive_that_was_edited_too_often(tmp_path: Path) -> None:
    """The record that is replaced keeps its place under another name of the same length, while
    there is one."""
    path = tmp_path / "x.pt"
    for count in (0, len(REPLACED) - 1):
        path.write_bytes(replaced(count))
        before = read(path)
        made = patch(before, before)
        assert made is not None
        assert any(edit.data == f"a/data{REPLACED[count]}".encode() for edit in made.edits)
    path.write_bytes(replaced(len(REPLACED)))
    before = read(path)
    assert patch(before, before) is None


def computed(data: bytes) -> Storage:
    return Storage(Derived(Swap(4), (Range(Memory(data), 0, len(data)),), len(data)))


def test_storages_that_are_no_records_of_the_archive(tmp_path: Path) -> None:
    """Computed, of another file, a piece of a record, and bytes between the records."""
    before = held(tmp_path / "x.pt")
    kept: Tensor = before.root["a"]
    assert kept.storage is not None
    record = kept.storage.record.locate()
    assert isinstance(record, Range)
    assert patch(before, replace(before, root={"b": kept})) is not None
    others = [
        computed(b"0123456789abcdef"),
        Storage(Range(Memory(b"0123"), 0, 4)),
        Storage(record._replace(length=8)),
        Storage(record._replace(offset=record.offset + 4, length=4)),
    ]
    for other in others:
        view = Tensor(other, U8, (other.nbytes,), (1,))
        assert patch(before, replace(before, root={"b": view})) is None


def test_a_format_without_edits(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"a": torch.ones(4)}, path, _use_new_zipfile_serialization=False)
    before = read_as(LEGACY, path)
    assert formats.patch(before, before, LEGACY, Options()) is None


def test_an_edit_that_changes_nothing(tmp_path: Path) -> None:
    """Nothing is written; what is not a file is not edited, changed or not."""
    before = held(tmp_path / "x.pt")
    made = formats.patch(before, before, ZIP, Options())
    assert isinstance(before.source, LocalFile)
    assert made == Patch(before.source, None, (), None, before.source.size) and made.written == 0
    copy = read((tmp_path / "x.pt").read_bytes())
    assert formats.patch(copy, copy, ZIP, Options()) is None


def test_an_edit_that_cannot_be_written_names_the_file(tmp_path: Path) -> None:
    before = held(tmp_path / "x.pt")
    with pytest.raises(FormatError, match="cannot store a value") as found:
        formats.patch(before, replace(before, root={"a": object()}), ZIP, Options())
    assert found.value.where == str(tmp_path / "x.pt")
