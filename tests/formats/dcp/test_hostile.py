"""Folders that lie, are damaged or unfinished. The metadata are pickled by torch's own classes."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)

import ckptkit
from ckptkit import formats
from ckptkit.compute.arranged import contiguous
from ckptkit.core.bytesource import Folder
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    LimitError,
    PathError,
    TensorError,
    TruncatedError,
    UnsafeGlobalError,
    UnsupportedError,
)
from tests.formats.conformance import elements_of
from tests.formats.dcp.making import DATA, Box, Crafted, archive, save

HALVES: list[Box] = [((0, 0), (2, 3)), ((2, 0), (2, 3))]


def read(folder: Path) -> Checkpoint:
    return formats.read(Folder(folder))


def two(folder: Path, boxes: list[Box] = HALVES, size: tuple[int, ...] = (4, 3)) -> Crafted:
    """A tensor of ones, box by box."""
    made = Crafted(folder)
    made.tensor("w", size, [(box, archive(torch.ones(box[1]))) for box in boxes])
    return made


def bytes_of(folder: Path, name: str = "w") -> bytes:
    return elements_of(read(folder).weights[name])


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


@dataclass
class Stranger:
    """A class of somebody else's planner."""

    what: int


def test_what_is_crafted_is_read(tmp_path: Path) -> None:
    assert bytes_of(two(tmp_path / "x").write()) == torch.ones(4, 3).numpy().tobytes()


# Metadata that are refused


Change = Callable[[Crafted], object]
Refused = tuple[str, Change, Any, str]  # the threat, a change of `two`, the error, what it says


def everywhere(**fields: Any) -> Change:
    """Set fields of the place of every item."""

    def change(made: Crafted) -> None:
        for info in made.metadata.storage_data.values():
            vars(info).update(fields)

    return change


def second(**fields: Any) -> Change:
    """Set fields of the place of the second item."""
    return lambda made: vars(list(made.metadata.storage_data.values())[1]).update(fields)


def tensor(**fields: Any) -> Change:
    """Set fields of what is said of the tensor."""
    return lambda made: vars(made.metadata.state_dict_metadata["w"]).update(fields)


def fields(**fields: Any) -> Change:
    return lambda made: vars(made.metadata).update(fields)


def values(paths: dict[Any, Any]) -> Change:
    """Values `a` and `b` with such paths."""

    def change(made: Crafted) -> None:
        for name in ("a", "b"):
            made.value(name, archive(name))
        made.metadata.planner_data = paths

    return change


def chunks(boxes: list[Box], size: tuple[int, ...] = (4, 3), dtype: Any = None) -> Change:
    def change(made: Crafted) -> None:
        made.metadata.storage_data.clear()
        items = [(box, archive(torch.ones(box[1]))) for box in boxes]
        made.tensor("w", size, items, dtype)

    return change


def refused() -> Iterator[Refused]:
    for value in (None, [], 1, {"w": 1}, {1: None}, {10**2000: None}, {"w": None}):
        yield "DC_01", fields(state_dict_metadata=value), FormatError, ""
        yield "DC_01", fields(storage_data=value), FormatError, ""
    bare = [object.__new__(ChunkStorageMetadata)]
    what = "'w': contains ChunkStorageMetadata without its fields"
    yield "DC_01", tensor(chunks=bare), FormatError, what
    yield "DC_01", tensor(chunks=()), FormatError, "'w': its chunks are not a list"
    yield "DC_01", tensor(size="2"), FormatError, "'w': the size of a tensor is not a torch.Size"
    for path in ("/etc/passwd", "../x.distcp", "a/b.distcp", "..", ".", "", "a\\b", "C:x", "a\0b"):
        yield "DC_02", everywhere(relative_path=path), PathError, ""
    for number in (-1, 1 << 63, 1 << 40, 1.0, None, True, "1"):
        yield "DC_03", second(offset=number), (CorruptError, TruncatedError), ""
        yield "DC_03", second(length=number), (CorruptError, TruncatedError), ""
    size = len(archive(torch.ones(2, 3)))
    for place in ({"offset": size - 1, "length": size + 1}, {"offset": 0, "length": size + 1}):
        yield "DC_03", second(**place), CorruptError, "overlap at byte"
    boxes: list[Box]
    for boxes, what in (
        ([], "[0:4, 0:3]"),
        ([((0, 0), (2, 3))], "[2:4, 0:3]"),
        ([((2, 0), (2, 3))], "[0:2, 0:3]"),
        ([((0, 0), (1, 3)), ((2, 0), (2, 3))], "[1:2, 0:3]"),
        ([((0, 0), (4, 1)), ((0, 2), (4, 1))], "[0:4, 1:2]"),
        ([((0, 0), (2, 2)), ((0, 2), (2, 1)), ((2, 0), (2, 2))], "[2:4, 2:3]"),
        ([((0, 0), (3, 3)), ((2, 0), (2, 3))], "overlap in [2:3, 0:3]"),
        ([((0, 0), (4, 3)), ((0, 0), (1, 1))], "overlap in [0:1, 0:1]"),
        ([((0, 0), (5, 3))], "exceeds shape (4, 3)"),
        ([((1, 0), (4, 3))], "exceeds shape (4, 3)"),
        ([((0,), (12,))], "1 dimensions, but the tensor has 2"),
        ([((0, 0, 0), (4, 3, 1))], "3 dimensions, but the tensor has 2"),
        ([((0, 0), (4,))], "dimensions"),
    ):
        yield "DC_04", chunks(boxes), CorruptError, f"'w'.*{re.escape(what)}"
    missing = MetadataIndex("w", (2, 0))
    what = r"'w': the chunk at \(2, 0\) has no entry"
    yield "DC_04", lambda made: made.metadata.storage_data.pop(missing), CorruptError, what
    lost = {"epoch": BytesStorageMetadata()}
    yield "DC_04", fields(state_dict_metadata=lost), CorruptError, "'epoch'"
    yield "DC_05", chunks([((0,), (4,))], (1 << 40,)), CorruptError, "do not cover"
    yield "DC_06", chunks([((0, 0), (2, 3))], (2, 3), "float32"), TensorError, ""
    compressed = everywhere(transform_descriptors=["stream.zstd/1"])
    yield "DC_09", compressed, UnsupportedError, "extension"
    for paths, error in (
        ({"a": ("x",), "b": ("x",)}, AmbiguousError),
        ({"a": ("x",), "b": ("x", "y")}, AmbiguousError),
        ({"a": ("x", "y"), "b": ("x",)}, AmbiguousError),
        ({"a": ("x", 0), "b": ("x", "y")}, FormatError),
        ({"a": ("x", "y"), "b": ("x", 0)}, FormatError),
        ({"a": (0,), "b": ("x",)}, FormatError),
        ({"a": ("x", -1), "b": ("y",)}, FormatError),
        ({"a": ("x", True), "b": ("y",)}, FormatError),
        ({"a": (), "b": ("y",)}, FormatError),
        ({"a": "x", "b": ("y",)}, FormatError),
        ({10**2000: "x"}, FormatError),
        ({"a": ("b",)}, AmbiguousError),
        ({"a": ("x", 1 << 62), "b": ("y",)}, LimitError),
        ({"a": ("x",) * 2_000, "b": ("y",)}, LimitError),
    ):
        yield "DC_10", values(paths), error, ""


def test_DC_01_DC_02_DC_03_DC_04_DC_05_DC_06_DC_09_DC_10_metadata(tmp_path: Path) -> None:
    (tmp_path / "x.distcp").touch()
    wrong = []
    for number, (threat, change, error, what) in enumerate(refused()):
        made = two(tmp_path / f"folder-{number}")
        change(made)
        try:
            with pytest.raises(error, match=what or None) as caught:
                read(made.write())
            assert str(caught.value.where).startswith(str(made.folder))
        except (Exception, pytest.fail.Exception) as failure:
            wrong.append(f"{threat}-{number}: {failure!r}")
    assert not wrong, "\n".join(wrong)
    assert number > 60


# DC-01: the metadata


def test_DC_01_metadata_that_would_run_code(tmp_path: Path) -> None:
    made = two(tmp_path / "x")
    made.metadata.planner_data = {"w": Evil(tmp_path / "canary")}
    with pytest.raises(UnsafeGlobalError, match="posix"):
        read(made.write())
    assert not (tmp_path / "canary").exists()


def test_DC_01_metadata_of_another_planner(tmp_path: Path) -> None:
    made = two(tmp_path / "x")
    made.metadata.planner_data = [Stranger(1)]
    checkpoint = read(made.write())
    assert list(checkpoint.weights) == ["w"]
    assert any("Stranger" in each for each in checkpoint.warnings) and len(checkpoint.warnings) == 2


@pytest.mark.parametrize(
    "root",
    [
        {"state_dict_metadata": {}},
        [],
        None,
        MetadataIndex("w"),
        Stranger(1),
    ],
)
def test_DC_01_metadata_of_another_kind(tmp_path: Path, root: object) -> None:
    made = two(tmp_path / "x")
    folder = made.write()
    (folder / ".metadata").write_bytes(pickle.dumps(root))
    with pytest.raises(FormatError, match=r"\.metadata: "):
        read(folder)


def test_DC_01_bytes_after_the_metadata(tmp_path: Path) -> None:
    folder = two(tmp_path / "x").write()
    with open(folder / ".metadata", "ab") as file:
        file.write(b".")
    with pytest.raises(AmbiguousError):
        read(folder)


# DC-02: files


def test_DC_02_links_and_other_files(tmp_path: Path) -> None:
    folder = two(tmp_path / "x").write()
    shutil.move(folder / DATA, tmp_path / "elsewhere")
    (folder / DATA).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PathError):
        read(folder)
    (folder / DATA).unlink()
    os.mkfifo(folder / DATA)
    with pytest.raises(PathError):
        read(folder)
    (folder / DATA).unlink()
    (folder / DATA).mkdir()
    with pytest.raises(PathError):
        read(folder)


# DC-03: places


def test_DC_03_one_item_twice_is_a_tie(tmp_path: Path) -> None:
    made = two(tmp_path / "x", [((0, 0), (4, 3))])
    (place,) = made.metadata.storage_data.values()
    made.metadata.state_dict_metadata["again"] = made.metadata.state_dict_metadata["w"]
    made.metadata.storage_data[MetadataIndex("again", (0, 0))] = place
    weights = read(made.write()).weights
    assert weights["w"].storage is weights["again"].storage


# DC-04: chunks


def test_DC_04_chunks_without_elements(tmp_path: Path) -> None:
    """As uneven shards leave them: several at the end of the tensor, not all of them stored."""
    made = two(tmp_path / "x")
    empty = ChunkStorageMetadata(torch.Size((4, 0)), torch.Size((0, 3)))
    made.metadata.state_dict_metadata["w"].chunks += [empty, empty]
    assert bytes_of(made.write()) == torch.ones(4, 3).numpy().tobytes()


# DC-05, DC-06: what the items are


def test_DC_05_an_item_that_is_smaller_than_its_chunk(tmp_path: Path) -> None:
    made = Crafted(tmp_path / "x")
    made.tensor("w", (1 << 40,), [(((0,), (1 << 40,)), archive(torch.ones(4)))])
    with pytest.raises(CorruptError, match=r"'w', at byte 0: the chunk is float32 \(4,\)"):
        bytes_of(made.write())


@pytest.mark.parametrize(
    ("item", "error"),
    [
        (archive(torch.ones(2, 3, dtype=torch.float64)), CorruptError),
        (archive(torch.ones(3, 2)), CorruptError),
        (archive([torch.ones(2, 3)]), CorruptError),
        (archive(1), CorruptError),
        (archive(torch.ones(2, 3, device="meta")), UnsupportedError),
        (archive(torch.ones(2, 3).to_sparse()), UnsupportedError),
        (archive(torch.ones(2, 3))[:-1], CkptkitError),
        (b"", CkptkitError),
        (b"PK", CkptkitError),
        (b"not a file of torch" * 10, CkptkitError),
    ],
)
def test_DC_06_items_that_are_something_else(
    tmp_path: Path, item: bytes, error: type[CkptkitError]
) -> None:
    made = Crafted(tmp_path / "x")
    made.tensor("w", (4, 3), [(HALVES[0], archive(torch.ones(2, 3))), (HALVES[1], item)])
    folder = made.write()
    with pytest.raises(error) as caught:
        bytes_of(folder)
    assert caught.value.where == str(folder / DATA) and "'w', at byte" in caught.value.message


def test_DC_06_an_item_that_would_run_code(tmp_path: Path) -> None:
    """It is not a tensor then; nothing runs."""
    made = Crafted(tmp_path / "x")
    made.tensor("w", (2, 3), [(((0, 0), (2, 3)), archive(Evil(tmp_path / "canary")))])
    with pytest.raises(CorruptError):
        bytes_of(made.write())
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("state", [(1, 2), [1] * 5, [1] * 6, None])
def test_DC_06_properties_of_another_kind(
    tmp_path: Path, state: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = two(tmp_path / "x")
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: state)
    with pytest.raises((FormatError, UnsupportedError)):
        read(made.write())


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ((torch.quint8, torch.strided, False, None, False), "in chunks"),
        ((torch.float32, torch.sparse_coo, False, None, False), "not strided"),
    ],
)
def test_DC_06_a_tensor_that_cannot_be_put_together(
    tmp_path: Path, state: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is an entry with a reason, and the others are read."""
    made = Crafted(tmp_path / "x")
    made.tensor("w", (2, 3), [(((0, 0), (2, 3)), archive(torch.ones(2, 3)))])
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: state)
    found = read(made.write()).weights["w"]
    assert (found.shape, found.layout) == ((2, 3), said)
    with pytest.raises(TensorError, match=said):
        contiguous(found)


# DC-07: values


def test_DC_07_values_that_would_run_code(tmp_path: Path) -> None:
    made = two(tmp_path / "x")
    made.value("evil", archive(Evil(tmp_path / "canary")))
    checkpoint = read(made.write())
    assert str(checkpoint.root["evil"].callable) == "posix.mkdir"
    assert [str(name) for name in checkpoint.globals] == ["posix.mkdir"]
    with pytest.raises(UnsafeGlobalError):
        ckptkit.save(checkpoint, tmp_path / "out.pth")
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("item", [b"", b"not a file of torch", archive(1)[:-1]])
def test_DC_07_values_that_are_no_values(tmp_path: Path, item: bytes) -> None:
    made = two(tmp_path / "x")
    made.value("epoch", item)
    with pytest.raises(CkptkitError) as caught:
        read(made.write())
    assert (
        caught.value.where == str(tmp_path / "x" / DATA)
        and "'epoch', at byte" in caught.value.message
    )


# DC-08: unfinished saves


@pytest.mark.parametrize("name", [".metadata.tmp", "__0.metadata.tmp", None])
def test_DC_08_a_save_that_was_interrupted(tmp_path: Path, name: str | None) -> None:
    folder = save(tmp_path / "x", {"a": torch.ones(2)})
    if name is None:
        (folder / ".metadata").unlink()
    else:
        os.rename(folder / ".metadata", folder / name)
    with pytest.raises(FormatError, match="did not finish"):
        read(folder)


def test_DC_08_missing_files(tmp_path: Path) -> None:
    folder = save(
        tmp_path / "x", {"a": torch.ones(2), "b": torch.ones(1)}, single_file_per_rank=False
    )
    (folder / "__0_1.distcp").unlink()
    with pytest.raises(CorruptError, match=r"1 of 2 files are missing: __0_1\.distcp"):
        read(folder)


# DC-09: what is told apart


def test_DC_09_two_saves_in_one_folder(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", {"a": torch.ones(2)})
    shutil.copy(folder / ".metadata", folder / "__0.metadata")
    with pytest.raises(AmbiguousError, match="two saves"):
        read(folder)


def test_DC_09_ranks_that_contradict_each_other(tmp_path: Path) -> None:
    folder = two(tmp_path / "x").write()
    os.rename(folder / ".metadata", folder / "__0.metadata")
    for size in ((4, 4), (5, 3)):
        other = two(tmp_path / f"y{size[0]}", [((0, 0), size)], size).write()
        shutil.copy(other / ".metadata", folder / "__1.metadata")
        with pytest.raises(AmbiguousError, match="several ranks describe 'w' differently"):
            read(folder)


def test_DC_09_values_of_each_rank(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    for rank in range(2):
        made = Crafted(tmp_path / str(rank))
        made.value("seed", archive(rank))
        for info in made.metadata.storage_data.values():
            info.relative_path = f"__{rank}_0.distcp"
        shutil.move(made.write() / DATA, folder / f"__{rank}_0.distcp")
        shutil.move(made.folder / ".metadata", folder / f"__{rank}.metadata")
    checkpoint = read(folder)
    assert checkpoint.root == {"seed": 0}
    assert "ckptkit reads only the values of the first rank" in checkpoint.warnings[0]


# DC-10: names and paths


def test_DC_10_one_chunk_in_two_places(tmp_path: Path) -> None:
    made = two(tmp_path / "x")
    made.metadata.storage_data[MetadataIndex("v", (2, 0))] = _StorageInfo(DATA, 0, 9)
    folder = made.write()
    data = (folder / ".metadata").read_bytes()
    assert data.count(b"\x8c\x01v") == 1
    (folder / ".metadata").write_bytes(data.replace(b"\x8c\x01v", b"\x8c\x01w"))
    with pytest.raises(AmbiguousError, match="'w' is stored twice"):
        read(folder)


def test_DC_10_one_name_twice(tmp_path: Path) -> None:
    made = two(tmp_path / "x")
    made.value("v", archive(1))
    folder = made.write()
    data = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(data.replace(b"\x8c\x01v", b"\x8c\x01w"))
    with pytest.raises(AmbiguousError, match="repeated keys"):
        read(folder)


def test_DC_10_what_lightning_keeps_beside_twice(tmp_path: Path) -> None:
    folder = save(tmp_path / "x", {"epoch": 1})
    torch.save({"epoch": 2}, folder / "meta.pt")
    with pytest.raises(AmbiguousError, match="'epoch' is in two files"):
        read(folder)
    torch.save([1], folder / "meta.pt")
    with pytest.raises(FormatError, match="does not contain a dict"):
        read(folder)
    (folder / "meta.pt").write_bytes(b"x")
    with pytest.raises(FormatError) as caught:
        read(folder)
    assert caught.value.where == str(folder / "meta.pt")


def one(folder: Path) -> Crafted:
    made = Crafted(folder)
    made.tensor("w", (2,), [(((0,), (2,)), archive(torch.ones(2)))])
    return made


@pytest.mark.parametrize("first", [0, 1])
def test_DC_09_a_value_to_one_rank_and_a_tensor_to_another(tmp_path: Path, first: int) -> None:
    folder, value = one(tmp_path / "x").write(), Crafted(tmp_path / "y")
    value.value("w", archive(1))
    os.rename(folder / ".metadata", folder / f"__{first}.metadata")
    shutil.copy(value.write() / ".metadata", folder / f"__{1 - first}.metadata")
    with pytest.raises(AmbiguousError, match="several ranks describe 'w' differently"):
        read(folder)
