"""Laid-out zips, read by zipfile and by our own reader."""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path

import pytest

from ckptkit.compute.operation import Slice
from ckptkit.core.bytesource import Derived, LocalFile, Memory, Range
from ckptkit.core.plan import Checksummed, ChecksumPlaceholder, Segment, length
from ckptkit.formats.zip_reader import read_directory
from ckptkit.formats.zip_writer import ALIGNMENT, ZipMember, lay_out
from tests.formats.containers.zips import execute

SOURCE = Memory(bytes(range(256)) * 300)


def of(start: int, size: int) -> Range:
    return Range(SOURCE, start, size)


def crc(extent: Range) -> int:
    return zlib.crc32(extent.read())


MEMBERS = [
    ZipMember("a/data.pkl", b"pickle"), ZipMember("a/0", of(3, 100), crc(of(3, 100))), ZipMember("a/1", of(5, 0)),
    ZipMember("a/2", of(7, 77)), ZipMember("a/\u00e9", b""), ZipMember("a/3", Derived(Slice(9), (of(0, 500),), 300)),
    ZipMember("a/long", b"x" * 70_000), ZipMember("a/4", of(0, 70_000), crc(of(0, 70_000))), ZipMember("a/version", b"3\n"),
]  # fmt: skip
CONTENTS = {
    "a/data.pkl": b"pickle", "a/0": of(3, 100).read(), "a/1": b"", "a/2": of(7, 77).read(), "a/\u00e9": b"",
    "a/3": of(9, 300).read(), "a/long": b"x" * 70_000, "a/4": of(0, 70_000).read(), "a/version": b"3\n",
}  # fmt: skip


def test_we_read_it_and_all_data_is_aligned(tmp_path: Path) -> None:
    segments, path = lay_out(MEMBERS), tmp_path / "a.zip"
    found = read_directory(LocalFile(execute(segments, path)))
    assert path.stat().st_size == sum(map(length, segments))
    assert {name: found.read(name) for name in found.entries} == CONTENTS
    assert all(entry.data % ALIGNMENT == 0 for entry in found.entries.values())
    assert all(found.crc(name) == zlib.crc32(data) for name, data in CONTENTS.items())


def kind(segment: Segment) -> str:
    return type(segment).__name__


def test_segments_are_few() -> None:
    """Literals are joined; what has no checksum yet is summed, and put into its header and the
    directory later."""
    segments = lay_out(MEMBERS)
    assert [kind(each) for each in segments] == [
        "bytes", "Range", "ChecksumPlaceholder", "Checksummed", "ChecksumPlaceholder", "Checksummed", "bytes", "bytes", "bytes", "Range", "ChecksumPlaceholder",
    ]  # fmt: skip
    assert [each.number for each in segments if isinstance(each, Checksummed)] == [3, 5]
    placeholders = [each for each in segments if isinstance(each, ChecksumPlaceholder)]
    holes = [[number for _, number in each.holes] for each in placeholders]
    assert holes == [[3], [5], [3, 5]]
    # An empty extent needs no checksum.
    empty = lay_out([ZipMember("a", of(0, 0)), ZipMember("b", of(0, 0), 0)])
    assert [*map(kind, empty)] == ["bytes"]


def test_ZP_16_many_members(tmp_path: Path) -> None:
    count = 0xFFFF  # the smallest number that the end record cannot express
    segments = lay_out(ZipMember(f"a/{n}", b"%d" % n) for n in range(count))
    path = execute(segments, tmp_path / "a.zip")
    with zipfile.ZipFile(path) as made:
        assert len(made.namelist()) == count and made.read(f"a/{count - 1}") == b"%d" % (count - 1)
    assert len(read_directory(LocalFile(path)).entries) == count
    assert struct.unpack("<2H", path.read_bytes()[-14:-10]) == (count,) * 2


@pytest.mark.parametrize("size", [(1 << 32) - 2, (1 << 32) - 1, 1 << 32, 5 << 30])
def test_ZP_24_large_members(tmp_path: Path, size: int) -> None:
    """A sparse source, a sparse output: nothing of the large member is read."""
    with open(tmp_path / "source", "wb") as file:
        file.truncate(size)
    source = LocalFile(tmp_path / "source")
    members = [
        ZipMember("a/0", Range(source, 0, size), 0),
        ZipMember("a/1", b"after"),
        ZipMember("a/2", of(0, 9), crc(of(0, 9))),
    ]
    path = execute(lay_out(members), tmp_path / "a.zip")
    found = read_directory(LocalFile(path))
    wide = size >= 0xFFFFFFFF
    head = LocalFile(path).read(0, 38)
    assert struct.unpack("<4xH", head[:6]) == (45 if wide else 20,)
    assert struct.unpack("<2L", head[18:26]) == (min(size, 0xFFFFFFFF),) * 2
    assert head[33:37] == (b"\1\0\x10\0" if wide else b"FB\x1b\0")
    assert [entry.length for entry in found.entries.values()] == [size, 5, 9]
    assert all(entry.data % ALIGNMENT == 0 for entry in found.entries.values())
    assert found.read("a/1") == b"after" and found.read("a/2") == of(0, 9).read()
    with zipfile.ZipFile(path) as made:
        infos = made.infolist()
        assert [info.file_size for info in infos] == [size, 5, 9]
        assert [info.extract_version for info in infos] == [
            45 if size >= (1 << 32) - 1 else 20,
            *[infos[1].extract_version] * 2,
        ]
        assert made.read("a/1") == b"after" and made.read("a/2") == of(0, 9).read()
        made.open("a/0").close()  # its local header agrees
