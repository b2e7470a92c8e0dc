"""Folders that lie, are damaged or unfinished. The metadata are pickled by torch's own classes."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save as safe
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
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
from tests.formats.dcp.making import DATA, FIVE, Box, Crafted, archive, properties, save
from tests.formats.folders import Attempt, Edit, Row, differing

HALVES: list[Box] = [((0, 0), (2, 3)), ((2, 0), (2, 3))]
ONES = archive(torch.ones(2, 3))
Change = Callable[[Crafted], object]


def read(folder: Path) -> Checkpoint:
    return formats.read(Folder(folder))


def bytes_of(folder: Path, name: str = "w") -> bytes:
    return elements_of(read(folder).weights[name])


def two(folder: Path, boxes: list[Box] = HALVES, size: tuple[int, ...] = (4, 3)) -> Crafted:
    """A tensor of ones, box by box."""
    made = Crafted(folder)
    made.tensor("w", size, [(box, archive(torch.ones(box[1]))) for box in boxes])
    return made


class Evil:
    """Makes a file when it is unpickled."""

    def __init__(self, made: Crafted) -> None:
        self.canary = made.folder.parent / "canary"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


@dataclass
class Stranger:
    """A class of somebody else's planner."""

    what: int


# What is refused


def crafted(edit: Change, use: Callable[[Path], Any] = read, state: Any = ...) -> Attempt:
    """The two halves, changed; `state` is that of the properties."""

    def attempt(folder: Path) -> Any:
        made = two(folder / "x")
        edit(made)
        try:
            with properties(state):
                return use(made.write())
        except CkptkitError as error:
            assert str(error.where).startswith(str(made.folder))
            raise
        finally:
            assert not (folder / "canary").exists()

    return attempt


def written(edit: Edit, use: Callable[[Path], Any] = read) -> Attempt:
    """The two halves as a folder of files, changed."""

    def change(folder: Path) -> Any:
        edit(folder)
        return use(folder)

    return crafted(lambda made: None, change)


def saved(edit: Edit, state: dict[str, Any], **options: Any) -> Attempt:
    """A folder of torch, changed."""

    def attempt(folder: Path) -> Any:
        edit(save(folder / "x", state, **options))
        return read(folder / "x")

    return attempt


def everywhere(**fields: Any) -> Change:
    """Set fields of the place of every item."""
    return lambda made: [vars(info).update(fields) for info in made.metadata.storage_data.values()]


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


def chunks(
    boxes: list[Box], size: tuple[int, ...] = (4, 3), dtype: Any = None, last: bytes | None = None
) -> Change:
    """Other boxes of the tensor; `last` is the item of the last."""

    def change(made: Crafted) -> None:
        made.metadata.storage_data.clear()
        items = [(box, archive(torch.ones(box[1]))) for box in boxes]
        if last is not None:
            items[-1] = items[-1][0], last
        made.tensor("w", size, items, dtype)

    return change


def replaced(make: Edit) -> Edit:
    """Something else in place of the data, which is elsewhere."""

    def edited(folder: Path) -> None:
        shutil.move(folder / DATA, folder.parent / "elsewhere")
        make(folder / DATA)

    return edited


def renamed(old: str, new: str) -> Edit:
    """Another name of one letter in the pickle of the metadata."""

    def edited(folder: Path) -> None:
        data = (folder / ".metadata").read_bytes()
        name = b"\x8c\x01" + old.encode()
        assert data.count(name) == 1
        (folder / ".metadata").write_bytes(data.replace(name, b"\x8c\x01" + new.encode()))

    return edited


def beside(content: Any) -> Edit:
    """What Lightning keeps beside."""
    return lambda folder: torch.save(content, folder / "meta.pt")


def of_ranks(*makes: Callable[[Path], Crafted], use: Callable[[Path], Any] = read) -> Attempt:
    """The metadata of each rank, and the data of the first."""

    def attempt(folder: Path) -> Any:
        made = [make(folder / f"{rank}").write() for rank, make in enumerate(makes)]
        for rank, each in enumerate(made):
            os.rename(each / ".metadata", made[0] / f"__{rank}.metadata")
        return use(made[0])

    return attempt


def huge(folder: Path) -> Crafted:
    made = Crafted(folder)
    made.tensor("w", (1 << 40,), [(((0,), (1 << 40,)), archive(torch.ones(4)))])
    return made


def one(folder: Path, *, is_value: bool = False) -> Crafted:
    made = Crafted(folder)
    if is_value:
        made.value("w", archive(1))
    else:
        made.tensor("w", (2,), [(((0,), (2,)), archive(torch.ones(2)))])
    return made


def offset(info: Any) -> dict[str, str]:
    """The metadata of a safetensors file, from the offsets of its tensors, or from a text."""
    text = info
    if isinstance(info, dict):
        text = json.dumps({name: {"saved_offsets": each} for name, each in info.items()})
    return {"format": "pt", "DCP_VERSION": "1.0", "DCP_SHARDING_INFO": text}


def hub(*shards: tuple[torch.Tensor, Any], **more: torch.Tensor) -> Attempt:
    """Shards of HuggingFaceStorageWriter: `w` of each rank, and what is said of its offsets."""

    def attempt(folder: Path) -> Checkpoint:
        for rank, (held, said) in enumerate(shards, 1):
            info = offset(said if isinstance(said, str) else {"w": said})
            path = folder / f"shard-{rank:05}-model-00001-of-00001.safetensors"
            path.write_bytes(safe({"w": held, **(more if rank == 2 else {})}, info))
        try:
            return read(folder)
        except CkptkitError as error:
            assert str(error.where).startswith(str(folder))
            raise

    return attempt


def inside(held: dict[str, torch.Tensor], said: Any) -> Attempt:
    """The tensor `w` of (2, 3), in a data file that is a safetensors file."""

    def attempt(folder: Path) -> bytes:
        made = two(folder / "x", [HALVES[0]], (2, 3))
        (key,) = made.metadata.storage_data
        made.metadata.storage_data[key] = _StorageInfo(DATA, 0, 24)
        made.data = bytearray(safe(held, offset({"w": said})))
        return bytes_of(made.write())

    return attempt


NUMBERS = (-1, 1 << 63, 1 << 40, 1.0, None, True, "1")
NONE = (None, [], 1, {"w": 1}, {1: None}, {10**2000: None}, {"w": None})
COVERS: list[tuple[list[Box], str]] = [
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
]
PATHS: list[tuple[dict[Any, Any], type[CkptkitError]]] = [
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
]
ITEMS: list[tuple[Any, type[CkptkitError]]] = [
    (torch.ones(2, 3, dtype=torch.float64), CorruptError), (torch.ones(3, 2), CorruptError),
    ([torch.ones(2, 3)], CorruptError), (1, CorruptError),
    (torch.ones(2, 3, device="meta"), UnsupportedError), (torch.ones(2, 3).to_sparse(), UnsupportedError),
    (ONES[:-1], CkptkitError), (b"", CkptkitError), (b"PK", CkptkitError), (b"not a file of torch" * 10, CkptkitError),
]  # fmt: skip
A, B, C = torch.ones(2), torch.ones(2).double(), torch.ones(2, 1)
SIX = torch.ones(2, 3)
A_HALF = MetadataIndex("w", (2, 0))
IN_DATA = f"/{DATA}: 'w', at byte "
PIPES: dict[str, Edit] = {
    "a link": lambda path: path.symlink_to("../elsewhere"),
    "a pipe": os.mkfifo,
    "a folder": os.mkdir,
}

REFUSED: dict[str, Row] = {
    **{f"DC_01 {name} {number}": Row(crafted(fields(**{name: value})), FormatError, "")
       for name in ("state_dict_metadata", "storage_data") for number, value in enumerate(NONE)},
    "DC_01 fields that are missing": Row(
        crafted(tensor(chunks=[object.__new__(ChunkStorageMetadata)])), FormatError, "'w': contains ChunkStorageMetadata without its fields"),
    "DC_01 chunks": Row(crafted(tensor(chunks=())), FormatError, "'w': its chunks are not a list"),
    "DC_01 a size": Row(crafted(tensor(size="2")), FormatError, "'w': the size of a tensor is not a torch.Size"),
    "DC_01 code": Row(crafted(lambda made: fields(planner_data={"w": Evil(made)})(made)), UnsafeGlobalError, "posix"),
    **{f"DC_01 {root!r}": Row(written(lambda folder, root=root: (folder / ".metadata").write_bytes(pickle.dumps(root))),
                              FormatError, ".metadata: ")
       for root in ({"state_dict_metadata": {}}, [], None, MetadataIndex("w"), Stranger(1))},
    "DC_01 bytes after it": Row(
        written(lambda folder: (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes() + b".")), AmbiguousError, ""),
    **{f"DC_02 {path!r}": Row(crafted(everywhere(relative_path=path)), PathError, "")
       for path in ("/etc/passwd", "../x.distcp", "a/b.distcp", "..", ".", "", "a\\b", "C:x", "a\0b")},
    **{f"DC_02 {what}": Row(written(replaced(make)), PathError, "") for what, make in PIPES.items()},
    **{f"DC_03 {name} {number!r}": Row(crafted(second(**{name: number})), (CorruptError, TruncatedError), "")
       for name in ("offset", "length") for number in NUMBERS},
    **{f"DC_03 overlap {start}": Row(crafted(second(offset=start, length=len(ONES) + 1)), CorruptError, "overlap at byte")
       for start in (len(ONES) - 1, 0)},
    **{f"DC_04 {boxes}": Row(crafted(chunks(boxes)), CorruptError, f"'w' ... {words}") for boxes, words in COVERS},
    "DC_04 no place": Row(
        crafted(lambda made: made.metadata.storage_data.pop(A_HALF)), CorruptError, "'w': the chunk at (2, 0) has no entry"),
    "DC_04 no value": Row(crafted(fields(state_dict_metadata={"epoch": BytesStorageMetadata()})), CorruptError, "'epoch'"),
    "DC_05 a huge tensor": Row(crafted(chunks([((0,), (4,))], (1 << 40,))), CorruptError, "do not cover"),
    "DC_05 a huge chunk": Row(of_ranks(huge, use=bytes_of), CorruptError, f"{IN_DATA}0: the chunk is float32 (4,)"),
    "DC_06 a dtype": Row(crafted(chunks([HALVES[0]], (2, 3), "float32")), TensorError, ""),
    **{f"DC_06 item {number}": Row(
        crafted(chunks(HALVES, last=item if isinstance(item, bytes) else archive(item)), bytes_of), error, f"/x{IN_DATA}")
       for number, (item, error) in enumerate(ITEMS)},
    "DC_06 an item of code": Row(
        crafted(lambda made: chunks(HALVES, last=archive(Evil(made)))(made), bytes_of), CorruptError, IN_DATA),
    **{f"DC_06 properties {number}": Row(crafted(lambda made: None, state=state), (FormatError, UnsupportedError), "")
       for number, state in enumerate(((1, 2), [1] * 5, [1] * 6, None))},
    **{f"DC_06 strides {stride!r}": Row(
        crafted(lambda made: None, state=(*FIVE, stride)), (CorruptError, FormatError), "'w' ... stride")
       for stride in ((1,), (1, -5), (1, True), "12")},
    **{f"DC_07 value {number}": Row(
        crafted(lambda made, item=item: made.value("epoch", item)), CkptkitError, f"/{DATA}: 'epoch', at byte")
       for number, item in enumerate((b"", b"not a file of torch", archive(1)[:-1]))},
    "DC_08 no metadata": Row(saved(lambda folder: (folder / ".metadata").unlink(), {"a": A}), FormatError, "did not finish"),
    **{f"DC_08 {name}": Row(
        saved(lambda folder, name=name: os.rename(folder / ".metadata", folder / name), {"a": A}), FormatError, "did not finish")
       for name in (".metadata.tmp", "__0.metadata.tmp")},
    "DC_08 a missing file": Row(
        saved(lambda folder: (folder / "__0_1.distcp").unlink(), {"a": A, "b": A}, single_file_per_rank=False),
        CorruptError, "1 of 2 files are missing: __0_1.distcp"),
    "DC_09 compression": Row(crafted(everywhere(transform_descriptors=["stream.zstd/1"])), UnsupportedError, "extension"),
    "DC_09 two saves": Row(
        written(lambda folder: shutil.copy(folder / ".metadata", folder / "__0.metadata")), AmbiguousError, "two saves"),
    **{f"DC_09 ranks that contradict each other: {size}": Row(
        of_ranks(two, lambda folder, size=size: two(folder, [((0, 0), size)], size)),
        AmbiguousError, "several ranks describe 'w' differently") for size in ((4, 4), (5, 3))},
    **{f"DC_09 a value, and a tensor in {first}": Row(
        of_ranks(*(lambda folder, other=n != first: one(folder, is_value=other) for n in (0, 1))),
        AmbiguousError, "several ranks describe 'w' differently") for first in (0, 1)},
    **{f"DC_10 paths {number}": Row(crafted(values(paths)), error, "") for number, (paths, error) in enumerate(PATHS)},
    "DC_10 one chunk in two places": Row(
        crafted(lambda made: made.metadata.storage_data.update({MetadataIndex("v", (2, 0)): _StorageInfo(DATA, 0, 9)}),
                lambda folder: (renamed("v", "w")(folder), read(folder))), AmbiguousError, "'w' is stored twice"),
    "DC_10 one name twice": Row(
        crafted(lambda made: made.value("v", archive(1)), lambda folder: (renamed("v", "w")(folder), read(folder))),
        AmbiguousError, "repeated keys"),
    "DC_10 an entry twice": Row(saved(beside({"epoch": 2}), {"epoch": 1}), AmbiguousError, "'epoch' is in two files"),
    "DC_10 a list beside": Row(saved(beside([1]), {"epoch": 1}), FormatError, "/meta.pt: does not contain a dict"),
    "DC_10 another file beside": Row(
        saved(lambda folder: (folder / "meta.pt").write_bytes(b"x"), {"epoch": 1}), FormatError, "/x/meta.pt: "),
    # Shards of safetensors that are no whole
    "DC_04 a missing shard in the middle": Row(hub((A, [0]), (A, [4])), CorruptError, ""),
    "DC_04 shards that overlap": Row(hub((A, [0]), (A, [1])), CorruptError, ""),
    "DC_04 shards of one place": Row(hub((A, [0]), (A, [0])), CorruptError, ""),
    "DC_04 shards of two dtypes": Row(hub((A, [0]), (B, [2])), CorruptError, ""),
    "DC_04 shards of two ranks": Row(hub((A, [0]), (C, [2, 0])), CorruptError, ""),
    **{f"DC_04 a shard at {said}": Row(hub((A, said)), CorruptError, "") for said in ([0, 0], [1 << 62])},
    **{f"DC_04 a shard at {said!r}": Row(hub((A, said)), FormatError, "")
       for said in ([-1], [1 << 63], None, "[]", '{"w": 1}', "{")},
    **{f"DC_06 safetensors inside, {number}": Row(inside(held, said), FormatError, f"{IN_DATA}0")
       for number, (held, said) in enumerate((
           ({"w": SIX}, [2, 0]), ({"w": SIX}, [0]), ({"w": SIX.T.contiguous()}, [0, 0]), ({"w": SIX.double()}, [0, 0]),
           ({"v": SIX}, [0, 0]), ({"w": SIX}, "x")))},
}  # fmt: skip


def test_DC_01_DC_02_DC_03_DC_04_DC_05_DC_06_DC_07_DC_08_DC_09_DC_10_refusals(
    tmp_path: Path,
) -> None:
    assert differing(REFUSED, tmp_path) == {}


# What is read


def test_what_is_crafted_is_read(tmp_path: Path) -> None:
    assert bytes_of(two(tmp_path / "x").write()) == torch.ones(4, 3).numpy().tobytes()


def test_DC_01_metadata_of_another_planner(tmp_path: Path) -> None:
    made = two(tmp_path / "x")
    made.metadata.planner_data = [Stranger(1)]
    checkpoint = read(made.write())
    assert list(checkpoint.weights) == ["w"]
    assert any("Stranger" in each for each in checkpoint.warnings) and len(checkpoint.warnings) == 2


def test_DC_03_one_item_twice_is_a_tie(tmp_path: Path) -> None:
    made = two(tmp_path / "x", [((0, 0), (4, 3))])
    (place,) = made.metadata.storage_data.values()
    made.metadata.state_dict_metadata["again"] = made.metadata.state_dict_metadata["w"]
    made.metadata.storage_data[MetadataIndex("again", (0, 0))] = place
    weights = read(made.write()).weights
    assert weights["w"].storage is weights["again"].storage


def test_DC_04_chunks_without_elements(tmp_path: Path) -> None:
    """As uneven shards leave them: several at the end of the tensor, not all of them stored."""
    made = two(tmp_path / "x")
    empty = ChunkStorageMetadata(torch.Size((4, 0)), torch.Size((0, 3)))
    made.metadata.state_dict_metadata["w"].chunks += [empty, empty]
    assert bytes_of(made.write()) == torch.ones(4, 3).numpy().tobytes()


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ((torch.quint8, *FIVE[1:]), "in chunks"),
        ((torch.float32, torch.sparse_coo, *FIVE[2:]), "not strided"),
    ],
)
def test_DC_06_a_tensor_that_cannot_be_put_together(
    tmp_path: Path, state: object, said: str
) -> None:
    """It is an entry with a reason, and the others are read."""
    with properties(state):
        folder = two(tmp_path / "x", [HALVES[0]], (2, 3)).write()
    found = read(folder).weights["w"]
    assert (found.shape, found.layout) == ((2, 3), said)
    with pytest.raises(TensorError, match=said):
        contiguous(found)


def test_DC_07_values_that_would_run_code(tmp_path: Path) -> None:
    made = two(tmp_path / "x")
    made.value("evil", archive(Evil(made)))
    checkpoint = read(made.write())
    assert str(checkpoint.root["evil"].callable) == "posix.mkdir"
    assert [str(name) for name in checkpoint.globals] == ["posix.mkdir"]
    with pytest.raises(UnsafeGlobalError):
        ckptkit.save(checkpoint, tmp_path / "out.pth")
    assert not (tmp_path / "canary").exists()


def test_DC_09_values_of_each_rank(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    for rank in range(2):
        made = Crafted(tmp_path / str(rank))
        made.value("seed", archive(rank))
        everywhere(relative_path=f"__{rank}_0.distcp")(made)
        shutil.move(made.write() / DATA, folder / f"__{rank}_0.distcp")
        shutil.move(made.folder / ".metadata", folder / f"__{rank}.metadata")
    checkpoint = read(folder)
    assert checkpoint.root == {"seed": 0}
    assert "ckptkit reads only the values of the first rank" in checkpoint.warnings[0]


# Safetensors


def test_shards_in_any_order(tmp_path: Path) -> None:
    whole = torch.arange(12.0).reshape(4, 3)
    shards = (whole[2:].clone(), [2, 0]), (whole[:2].clone(), [0, 0])
    checkpoint = hub(*shards, b=torch.ones(3))(tmp_path)
    assert checkpoint.format == "dcp"
    assert elements_of(checkpoint.weights["w"]) == whole.numpy().tobytes()
    assert elements_of(checkpoint.weights["b"]) == torch.ones(3).numpy().tobytes()
    (warning,) = checkpoint.warnings
    assert "missing last shard" in warning


def test_DC_06_a_shard_of_another_kind(tmp_path: Path) -> None:
    torch.save({"w": A}, tmp_path / "shard-00001-model-00001-of-00001.safetensors")
    with pytest.raises(CkptkitError):
        read(tmp_path)


def test_safetensors_inside(tmp_path: Path) -> None:
    found = inside({"v": torch.zeros(1), "w": SIX}, [0, 0])(tmp_path)
    assert found == SIX.numpy().tobytes()
