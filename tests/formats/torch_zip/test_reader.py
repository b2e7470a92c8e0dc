"""torch.save's zip archives: what is accepted, what is refused, by row of the threat table, and
what is written.

Pickles of hostile files are put together opcode by opcode. What torch reads from the same file is
asserted beside it where that is the point.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.serialization import set_crc32_options, skip_data

import ckptkit
from ckptkit.core.bytesource import Memory
from ckptkit.core.errors import (
    NO_CHECKSUM,
    AmbiguousError,
    CorruptError,
    FormatError,
    InputError,
    LimitError,
    TensorError,
    UnsupportedError,
    coded,
)
from ckptkit.formats import torch_zip
from ckptkit.formats.format import Probe
from ckptkit.formats.table import TORCH_ZIP as FORMAT
from ckptkit.formats.whats_inside import pickles
from ckptkit.formats.zip_reader import MAGIC, read_directory
from tests.formats.catalogue import Row, refuses_all
from tests.formats.conformance import check_equal
from tests.formats.containers.zips import Member, build
from tests.formats.torch_zip.archives import (
    FLOATS,
    archive,
    by_torch,
    number,
    pickle_of,
    read,
    saved,
    storage,
    tensor,
    text,
    untyped,
    write,
)
from tests.formats.torchscript.scripts import script


def test_the_hand_writes_what_torch_reads(tmp_path: Path) -> None:
    made = archive(pickle_of(tensor(storage()), tensor(storage(), (2, 2), (1, 2)), b"N"))
    state = by_torch(made, tmp_path)
    assert state.pop("c") is None
    checkpoint = read(made)
    assert checkpoint.root.pop("c") is None and checkpoint.warnings == ()
    check_equal(checkpoint.root, state)
    assert checkpoint.format == "torch-zip"


# What is read


def test_D_45_without_checksums(tmp_path: Path) -> None:
    set_crc32_options(False)
    try:
        path = saved({"a": torch.arange(5.0), "b": torch.zeros(0)}, tmp_path / "a.pth")
    finally:
        set_crc32_options(True)
    checkpoint = read(path)
    check_equal(checkpoint.root, torch.load(path))
    assert checkpoint.root["a"].storage.crc32 is None
    assert checkpoint.warnings == (
        "1 of its storages have no checksum: ckptkit cannot detect damage in them",
    )
    assert [each.facts for each in coded(checkpoint.warnings, NO_CHECKSUM)] == [{"storages": 1}]
    copy = write(checkpoint, tmp_path / "b.pth")
    check_equal(checkpoint.root, torch.load(copy, mmap=True))
    with zipfile.ZipFile(copy) as made:
        assert made.testzip() is None


def test_ZP_24_beyond_4_GiB(tmp_path: Path) -> None:
    """A sparse file of torch's own, with zip64 fields in local headers and descriptors of 64
    bits."""
    with skip_data():
        path = saved(
            {"a": torch.empty(5 << 30, dtype=torch.uint8), "b": torch.ones(3)}, tmp_path / "a.pth"
        )
    checkpoint = read(path)
    assert checkpoint.root["a"].storage.record.length == 5 << 30
    assert checkpoint.root["b"].storage.record.locate().offset > 5 << 30
    assert torch.load(path, mmap=True)["b"].storage_offset() == 0


# Storages


def test_D_02_mapped_torch_reads_beyond_the_record(tmp_path: Path) -> None:
    made = archive(pickle_of(tensor(storage(numel=8), (8,))))
    assert len(by_torch(made, tmp_path, mmap=True)["a"]) == 8
    with pytest.raises(CorruptError):
        read(made)


INTS = storage("torch\nIntStorage")


@pytest.mark.parametrize(
    ("values", "torch_sees"),
    [
        ((tensor(storage()), tensor(INTS)), "float32"),
        ((untyped(), tensor(storage())), "uint8"),
        ((tensor(storage()), untyped()), "uint16"),
    ],
)
def test_D_05_one_storage_of_two_types(
    values: tuple[bytes, ...], torch_sees: str, tmp_path: Path
) -> None:
    made = archive(pickle_of(*values))
    assert str(by_torch(made, tmp_path)["b"].dtype) == f"torch.{torch_sees}"
    with pytest.raises(AmbiguousError, match="element types"):
        read(made)


def test_D_05_bytes_and_untyped_agree(tmp_path: Path) -> None:
    byte = tensor(storage("torch\nByteStorage", numel=16), (16,))
    for values in (
        (byte, untyped(), untyped((4,), "uint32")),
        (untyped(), byte, untyped((16,), "float8_e5m2")),
    ):
        made = archive(pickle_of(*values))
        checkpoint = read(made)
        check_equal(checkpoint.root, by_torch(made, tmp_path))
        check_equal(checkpoint.root, torch.load(write(checkpoint, tmp_path / "copy.pth")))


@pytest.mark.parametrize(
    ("shape", "stride", "offset"),
    [((1 << 40,), (0,), 3), ((0,), (1,), 1 << 40), ((0, 3), (9, 7), 0), ((), (), 3)],
)
def test_D_09_D_10_geometry_that_is_fine(
    shape: tuple[int, ...], stride: tuple[int, ...], offset: int
) -> None:
    found = read(archive(pickle_of(tensor(storage(), shape, stride, offset)))).root["a"]
    assert (found.shape, found.stride, found.offset) == (shape, stride, offset)


def test_ZP_19_any_key(tmp_path: Path) -> None:
    made = archive(
        pickle_of(tensor(storage(key=text("x/\u00e9 1")))), records={"data/x/\u00e9 1": FLOATS}
    )
    check_equal(read(made).root, by_torch(made, tmp_path))


def test_D_31_locations_are_text() -> None:
    root = read(archive(pickle_of(tensor(storage(location="\x1b[2J cuda:99"))))).root
    assert root["a"].device == "\x1b[2J cuda:99"


# The pickle and the other records


def test_D_12_bytes_after_the_pickle(tmp_path: Path) -> None:
    made = archive(pickle_of(b"N") + b"N.")
    assert by_torch(made, tmp_path) == {"a": None}
    with pytest.raises(AmbiguousError, match="2 bytes after"):
        read(made)


def of_records(**records: bytes) -> bytes:
    """An archive with more records; an underscore begins a name as a dot does."""
    more = (Member(f"a/{name.replace('_', '.', 1)}", data) for name, data in records.items())
    return archive(pickle_of(b"N"), *more)


def refused() -> Iterator[Row]:
    """Yield the row of threats.md, a file, the error when it is read, and what it says."""
    good = pickle_of(tensor(storage()))
    for numel, shape in ((8, 8), (2, 2), (0, 0), (1 << 40, 4)):
        data = archive(pickle_of(tensor(storage(numel=numel), (shape,))))
        yield "D_01_D_04", data, CorruptError, "has 16 bytes"
    for second in (storage(numel=2), storage(numel=8), storage(location="cuda:0")):
        data = archive(pickle_of(tensor(storage()), tensor(second, (1,))))
        yield "D_06", data, AmbiguousError, "two different descriptions"
    geometry: tuple[tuple[Any, Any, int], ...] = (
        ((5,), (1,), 0), ((4,), (1,), 1), ((2, 2), (3, 1), 0), ((1,), (1,), 4), ((-1,), (1,), 0),
        ((4,), (-1,), 0), ((4,), (1,), -1), ((1 << 62, 4), (0, 1), 1), ((4,), (1, 1), 0),
        ((1 << 63,), (1,), 0),
    )  # fmt: skip
    for shape, stride, offset in geometry:
        data = archive(pickle_of(tensor(storage(), shape, stride, offset)))
        yield "D_07_D_08", data, TensorError, ""
    for key in ("../byteorder", "1", "00", "", "0/", "./0", "DATA/0"):
        odd = pickle_of(tensor(storage(key=text(key))))
        yield (
            "D_32_ZP_19",
            archive(odd, Member("a/byteorder", b"little")),
            CorruptError,
            "no record",
        )
    for pid in (
        storage(key=number(0)), storage(key=b"N"), storage(key=b"]"), storage("torch\nNoStorage"),
        storage("os\nsystem"), storage(numel=-1), b"NQ", number(7) + b"Q", text("0") + b"Q",
        storage().replace(text("storage"), text("module")), b"(" + text("storage") + b"tQ",
        storage().replace(number(4), b"G" + bytes(8)),
    ):  # fmt: skip
        yield "PK_10", archive(pickle_of(tensor(pid))), FormatError, ""
    odd = pickle_of(tensor(storage().replace(text("cpu"), b"K\1")))
    yield "a device that is none", archive(odd), FormatError, "has an invalid device"
    odd = pickle_of(tensor(storage(location="c" * 70_000)))
    yield "a device without end", archive(odd), LimitError, "name_bytes"
    yield "D_13", archive(b"\x80\x02NN."), FormatError, ""
    for name in ("a/data.pkl", "a/data/0"):
        yield "D_14_D_15", archive(good, Member(name, FLOATS)), AmbiguousError, "same name"
    damaged = archive(pickle_of(text("spam"))).replace(b"spam", b"spaM")
    yield "D_16", damaged, CorruptError, r"data\.pkl.*damaged"
    for name in ("b/data.pkl", "b/", "data.pkl", "ab/x", "A/x"):
        data = archive(pickle_of(b"N"), Member(name, b""))
        yield "D_22_ZP_17", data, AmbiguousError, "outside the folder"
    reads_on = Member("a/data/0", FLOATS, central={"stored": 24, "size": 24})
    long = Member("a/data.pkl", pickle_of(tensor(storage(numel=6), (6,))))
    data = build(long, reads_on, Member("a/version", b"3"))
    yield "D_24", data, (CorruptError, AmbiguousError), ""
    for said in (
        b"0", b"11", b"99", b"", b"\n", b"x", b"-1", b"3.0", b"3\n\n", b"9" * 30, b" " * 99,
    ):  # fmt: skip
        data = archive(pickle_of(b"N"), version=said)
        yield "D_26_ZP_20", data, (UnsupportedError, FormatError), "version"
    yield (
        "D_26",
        archive(pickle_of(b"N"), Member("a/.data/version", b"4\n")),
        AmbiguousError,
        "version",
    )
    for said in (b"pdp", b"", b"Little", b"little\n", b"b" * 99):
        yield "D_28_ZP_20", of_records(byteorder=said), FormatError, "byteorder"
    for said in (b"-1", b"1" + b"0" * 30, b"abc", b"", b"6\x004", "٦٤".encode()):
        yield "ZP_20", of_records(_storage_alignment=said), FormatError, "storage_alignment"
        yield "ZP_20", of_records(_format_version=said), FormatError, "format_version"
    for said in (b"0", b"65537"):
        yield "ZP_20", of_records(_storage_alignment=said), FormatError, "storage_alignment is"


def test_D_01_D_04_D_06_D_07_D_08_D_13_D_14_D_15_D_16_D_22_D_24_D_26_D_28_D_32() -> None:
    """And PK_10, ZP_17, ZP_19, ZP_20."""
    refuses_all(read, refused())


@pytest.mark.parametrize(
    "names",
    [["a/data"], ["a/b/data.pkl"], ["data.pkl"], ["x", "a/data.pkl"], ["b/x", "a/data.pkl"]],
)
def test_ZP_17_no_pickle_where_torch_looks(names: list[str]) -> None:
    assert not FORMAT.matches(Probe(Memory(build(*(Member(name, b"") for name in names)))))


@pytest.mark.parametrize("version", [b"1", b"2\n", b"3", b"3\n", b"10\n"])
def test_D_26_versions(version: bytes, tmp_path: Path) -> None:
    made = archive(pickle_of(b"N"), version=version)
    assert by_torch(made, tmp_path) == read(made).root


def test_D_26_where_the_version_is() -> None:
    elsewhere = Member("a/.data/version", b"6\n")
    assert read(archive(pickle_of(b"N"), elsewhere, records={}, version=None)).warnings == ()
    twice = Member("a/.data/version", b"3")
    assert read(archive(pickle_of(b"N"), twice, records={})).warnings == ()
    assert "torch refuses" in read(archive(pickle_of(b"N"), version=None)).warnings[0]


def test_ZP_18_records_that_nothing_refers_to() -> None:
    more = [
        Member(f"a/{name}", b"?")
        for name in ("data/99", "code/x.py", "extra", "data.pkl.bak", "x\u202e", ".data/y")
    ]
    (said,) = read(archive(pickle_of(tensor(storage())), *more)).warnings
    assert "6 of its records" in said and "'a/data/99'" in said and said.isprintable()


def test_an_archive_of_nothing() -> None:
    """Its end record alone has no member to begin with: it is no zip file to torch, and none to
    us."""
    with pytest.raises(FormatError):
        read_directory(Memory(build()))


@pytest.mark.parametrize(
    "said", [b"[]", b'{"version":1,"metadata":{"a":1}}', b'{"version":99,"metadata":{}}', b"{"]
)
def test_a_record_of_ours_that_is_none(said: bytes) -> None:
    with pytest.raises(FormatError):
        torch_zip.parse_metadata(said)


def test_an_archive_that_lists_nothing() -> None:
    """It is one of no members where there are none; one that is there all the same is not
    overlooked."""
    empty = read_directory(Memory(MAGIC + build()[:16] + struct.pack("<LH", len(MAGIC), 0)))
    assert (empty.entries, empty.top, empty.start) == ({}, "", 4)
    member = Member("a/data.pkl", b"N.")
    data = member.head() + member.stored
    with pytest.raises(AmbiguousError, match=r"'a/data\.pkl' at byte 0 is not in the directory"):
        read_directory(Memory(data + build()[:16] + struct.pack("<LH", len(data), 0)))


@pytest.mark.parametrize("names", ["aa", "bab", "aA"])
def test_ZP_01_duplicate_names_of_one_letter(names: str) -> None:
    """Python keeps one object for each byte: names that are the same may be identical."""
    with pytest.raises(
        AmbiguousError, match=f"two records have the same name: '{names[0]}', '{names[-1]}'"
    ):
        read_directory(Memory(build(*(Member(name, b"x") for name in names))))


class Remote(Memory):
    remote = True


def test_storages_of_a_remote_archive_are_not_looked_into() -> None:
    data = archive(pickle_of(tensor(storage())))
    names = {
        source.remote: [each.where for each in pickles(Probe(source)) or ()]
        for source in (Memory(data), Remote(data))
    }
    assert names == {
        False: ["a/data.pkl", "a/data/0", "a/version"],
        True: ["a/data.pkl", "a/version"],
    }


# Archives that were unpacked: folders with data.pkl


STATE = {
    "w": torch.arange(6.0).view(2, 3),
    "b": torch.ones(2, dtype=torch.float16),
    "t": torch.arange(6.0).view(2, 3).t(),
}


def unpacked(path: Path) -> Path:
    """The folder of an archive, as unzip leaves it."""
    with zipfile.ZipFile(path) as archive:
        archive.extractall(path.parent / "out")
    (folder,) = (path.parent / "out").iterdir()
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.save(STATE, tmp_path / "a.pth")
    return unpacked(tmp_path / "a.pth")


@pytest.mark.parametrize("name", ["", "data.pkl"])
def test_the_folder_and_its_pickle_are_the_checkpoint(
    folder: Path, name: str, tmp_path: Path
) -> None:
    checkpoint = ckptkit.open(folder / name)
    assert checkpoint.format == "torch-unpacked" and checkpoint.warnings == ()
    ckptkit.save(checkpoint, tmp_path / "b.pth")
    for made in (ckptkit.load(folder / name), torch.load(tmp_path / "b.pth")):
        assert list(made) == list(STATE)
        assert all(
            torch.equal(made[key], STATE[key]) and made[key].stride() == STATE[key].stride()
            for key in STATE
        )


def test_a_file_that_is_missing_or_cut(folder: Path) -> None:
    os.truncate(folder / "data" / "0", 20)
    with pytest.raises(CorruptError, match="20 bytes"):
        ckptkit.open(folder)
    (folder / "data" / "0").unlink()
    with pytest.raises(CorruptError, match="has no record"):
        ckptkit.open(folder)


def test_links_that_lead_out_are_not_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "data" / "0").replace(tmp_path / "elsewhere")
    (folder / "data" / "0").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError):
        ckptkit.open(folder)


@pytest.mark.filterwarnings("ignore")
def test_other_folders_are_not_its_business(tmp_path: Path) -> None:
    script(torch.nn.Linear(2, 2), tmp_path / "a.pt")
    with pytest.raises(InputError):
        ckptkit.open(unpacked(tmp_path / "a.pt"))
