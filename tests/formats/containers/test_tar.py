"""The container layer of tar files, by row of the threat table; tars by hand, by tarfile, or from
the corpus."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptkit.core.bytesource import LocalFile, Memory
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    FormatError,
    LimitError,
    PathError,
    TruncatedError,
    UnsupportedError,
)
from ckptkit.core.limits import LIMITS
from ckptkit.formats.tar import TarMember, first_name, is_tar, read_members
from tests.conftest import Corpus
from tests.formats.catalogue import Row, outcomes, refuses_all
from tests.formats.containers.tars import BLOCK, archive, header, member, padded, record, records

DATA = b"hello"


def read_members_of(data: bytes) -> dict[str, TarMember]:
    return read_members(Memory(data))


def contents(data: bytes) -> dict[str, bytes]:
    return {name: each.data.read() for name, each in read_members_of(data).items()}


def by_tarfile(format: int, mtime: float = 0) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=format) as file:
        for name, data in (("a", DATA), ("b/c", bytes(1000)), ("empty", b"")):
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), mtime
            file.addfile(info, io.BytesIO(data))
    return stream.getvalue()


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
@pytest.mark.parametrize("mtime", [0, 1484000000.25])
def test_what_tarfile_writes(format: int, mtime: float) -> None:
    data = by_tarfile(format, mtime)
    assert is_tar(data)
    assert first_name(Memory(data)) == b"a"
    assert contents(data) == {"a": DATA, "b/c": bytes(1000), "empty": b""}


def test_long_names_of_gnu() -> None:
    """Of more than 100 bytes: the name of a file, and a link with a long target."""
    stream, name, target = io.BytesIO(), "d" * 60 + "/" + "e" * 60, "t" * 150
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.GNU_FORMAT) as file:
        info = tarfile.TarInfo(name)
        info.size = len(DATA)
        file.addfile(info, io.BytesIO(DATA))
        info = tarfile.TarInfo("l" * 101)
        info.type, info.linkname = tarfile.SYMTYPE, target
        file.addfile(info)
    data = stream.getvalue()
    members = read_members(Memory(data))
    assert {each.name: each.kind for each in members.values()} == {name: "file", "l" * 101: "link"}
    assert members[name].data.read() == DATA and first_name(Memory(data)) == name[:100].encode()
    refuses_all(read_members_of, [
        ("", data.replace(b"e" * 60 + b"\0", b"f" * 60 + b"\0"), AmbiguousError, "two names"),
        ("", data[:1024] + data, AmbiguousError, "two long names"),
        ("", data[:1024] + bytes(1024), FormatError, "missing"),
        ("", data.replace(b"e\0", b"ee", 1), FormatError, "malformed"),
    ])  # fmt: skip


def test_by_hand() -> None:
    data = archive(
        member("a", DATA), member("folder/", b"", b"5"), member("l", b"", b"2", link=b"elsewhere")
    )
    assert {name: each.kind for name, each in read_members(Memory(data)).items()} == {
        "a": "file", "folder/": "folder", "l": "link",
    }  # fmt: skip
    assert contents(archive()) == {}
    assert contents(archive(member("a", DATA, b"\0"), end=20 * BLOCK)) == {"a": DATA}


# The corpus of tar cases


def found_in(folder: Path) -> dict[str, str]:
    return outcomes(folder.glob("*.tar"), read_members)


def test_corpus_accept(corpus: Corpus) -> None:
    folder = corpus / "containers/tar/accept"
    assert set(found_in(folder).values()) == {"read"}
    for path in folder.glob("*.json"):
        members = read_members(LocalFile(path.with_suffix(".tar")))
        for said in json.loads(path.read_text())["expected"]:
            found = members[said["member"]]
            kinds = {"directory": "folder", "symlink": "link"}
            assert found.kind == kinds.get(said["type"], said["type"])
            if found.kind == "file":
                assert hashlib.sha256(found.data.read()).hexdigest() == said["sha256"]


@pytest.mark.parametrize("group", ["malicious", "reject"])
def test_TR_04_corpus_refused(corpus: Corpus, group: str) -> None:
    assert "read" not in found_in(corpus / "containers/tar" / group).values()


# How each case of the corpus' undecided group ends, and why.
IFFY = {
    "backslash_name": "PathError",  # a folder to some
    "empty_name": "FormatError",
    "gnu_magic": "read",  # GNU tar writes it
    "name_no_nul": "read",  # a name of exactly 100 bytes
    "no_magic": "UnsupportedError",  # older than POSIX: nobody writes it any more
    "pax_empty_path": "FormatError",  # takes the name away
    "pax_path_nonzero_fixed": "read",  # what records are for
    "pax_path_second_block": "LimitError",
    "pax_record_leading_zero_length": "FormatError",
    "pax_sparse_basic": "UnsupportedError",
    "pax_utf16_hdrcharset_UTF16": "UnsupportedError",
    "pax_utf16_hdrcharset_utf16": "UnsupportedError",
    "pax_utf16_name": "AmbiguousError",  # zeros inside a name
    "regular_nul": "read",  # how a file was marked before POSIX; tarfile reads it
    "sparse_no_chunks_nonzero": "AmbiguousError",
    "sparse_no_chunks_zero": "AmbiguousError",
    "sparse_zero_chunk": "AmbiguousError",
    "unknown_A_data": "UnsupportedError",
    "unknown_A_zero": "UnsupportedError",
}


def test_corpus_iffy(corpus: Corpus) -> None:
    assert found_in(corpus / "containers/tar/iffy") == IFFY


# Members


def about(text: bytes, type: bytes = b"x") -> bytes:
    """An archive of a member `a`, and a member of text about it before it."""
    return archive(member("x", text, type), member("a", DATA))


def refused() -> Iterator[Row]:
    """Yield the row of threats.md, a file, the error when it is read, and what it says."""
    a, link = member("a", DATA), member("b", b"", b"2", link=b"a")
    for type in (
        b"1", b"3", b"4", b"6", b"7", b"D", b"K", b"L", b"M", b"N", b"S", b"V", b"X", b"A",
    ):  # fmt: skip
        odd = archive(member("storages", b"", type, link=b"x"))
        yield "TR_01", odd, UnsupportedError, "its type is"
    for type in (b"2", b"5"):
        yield "TR_01", archive(member("x", DATA, type)), AmbiguousError, "with data"
    for data in (archive(a, link), archive(link, a)):
        yield "TR_01", data, AmbiguousError, "second name"
    for field in (
        b"-0000000005\0", b"0000000000x\0", b"fghijk00005\0", b"00000000008\0", b"0x000000005\0",
        b"0o000000005\0", b"+0000000005\0", b"0_000000005\0", b"\0" * 12, b" " * 12,
        b"5\0000000000000"[:12], b"0000005\0\0\0\x005", b"\xff" * 12,
    ):  # fmt: skip
        odd = archive(header("a", size_field=field), padded(DATA))
        yield "TR_02", odd, FormatError, "octal"
    for size in (2 * BLOCK + 1, 1 << 20, 8**11 - 1):
        yield "TR_02", archive(header("a", size)), TruncatedError, "ends inside the member 'a'"
    for wide in (1 << 60, (1 << 88) - 1):
        odd = archive(header("a", size_field=b"\x80" + wide.to_bytes(11, "big")))
        yield "TR_02", odd, TruncatedError, "ends inside"
    for size in (b"3", b"5", b"-1", b"0", b"05", b"x", b"1e3", str(8**11 - 1).encode()):
        for each in (a, header("a", 0)):
            odd = archive(records((b"size", size)), each)
            yield "TR_02", odd, AmbiguousError, "two sizes"
    odd = archive(records((b"size", str(2**60).encode())), header("a", 0))
    yield "TR_02", odd, TruncatedError, "ends inside"
    mtime = (b"mtime", b"1.5")
    for more in ([records(mtime)] * 2_000, [records(mtime), records(mtime, type=b"g")]):
        yield "TR_03", archive(*more, a), AmbiguousError, "has two groups of records"
    yield "TR_03", archive(records(mtime)), FormatError, "missing"
    yield "TR_03", about(bytes(1 << 20)), LimitError, "tar_records_bytes"
    longer = b"1" * (FITS + 1)
    yield "TR_03", archive(records((b"comment", longer)), a), LimitError, "tar_records_bytes"
    for field in (b"\x80" + (1 << 40).to_bytes(11, "big"), b"77777777777\0"):
        yield "TR_03", archive(header("x", type=b"x", size_field=field)), CkptkitError, ""
    field = b"\x80" + (1 << 33).to_bytes(11, "big")
    odd = archive(header("././@LongLink", type=b"L", size_field=field), a)
    yield "TR_03", odd, CkptkitError, ""
    many = archive(*map(header, MANY), header("one more"))
    yield "TR_03", many, LimitError, "tar_members"
    for text in (
        b"7 path\n", b"22 path=nonewline.txt", b"011 path=h\n", b"0 \n", b"9 size=3", b"99 path=x\n",
        b"9 mtime=\n\n", b"8 path=x\n", b"\xff", b"-9 path=x\n", b"9 pa\0h=x\n", b"9 =path x\n",
        b"9  path=x\n", b"12345 a=b\n",
    ):  # fmt: skip
        yield "TR_03", about(text), FormatError, "malformed"
    unknown = (
        b"linkpath", b"hdrcharset", b"charset", b"GNU.sparse.major", b"SCHILY.xattr.x", b"Path",
    )  # fmt: skip
    for key in unknown:
        yield "TR_04", archive(records((key, b"1")), a), UnsupportedError, "does not support"
    for key in (b"path", b"size"):
        odd = archive(records((key, b"9"), type=b"g"), a)
        yield "TR_04", odd, UnsupportedError, "does not support"
    odd = archive(records((b"path", b"a"), (b"path", b"b")), member("c", DATA))
    yield "TR_04", odd, AmbiguousError, "twice, or to a value"
    for second in ("a", "A"):
        renamed = records((b"path", second.encode())), member("c", DATA)
        for last in ([member("b", b""), member(second, DATA)], renamed):
            yield "TR_04", archive(a, *last), AmbiguousError, "two members"
    for name in (
        b"", b"\x1b[2J", b"\n", b"\x7f", b"\xff", "é".encode(), b"/a", b"../a", b"a/../b", b"..", b".",
        b"./a", b"a//b", b"a\\b", b"a/",
    ):  # fmt: skip
        yield "TR_04", archive(member(name, DATA)), (PathError, FormatError), ""
        yield "TR_04", archive(records((b"path", name)), a), (PathError, FormatError), ""
        if name:
            odd = archive(records((b"path", b"a")), member(name, DATA))
            yield "TR_04", odd, (PathError, FormatError), ""
    for prefix in (b"..", b".", b"/", b"a/../b", b"\xc3"):
        yield "TR_04", archive(member("a", DATA, prefix=prefix)), (PathError, FormatError), ""
    yield "TR_04", archive(member("", DATA, prefix=b"x")), FormatError, ""
    yield "TR_04", archive(member(b"a\0b", DATA)), AmbiguousError, "has bytes after"
    odd = archive(member("a", DATA, magic=b"ustar  \0", prefix=b"12345670123\0"))
    yield "TR_04", odd, AmbiguousError, "GNU"
    for data in (archive(archive(a), link), archive(a, end=4 << 20), archive(a) + padded(b"1")):
        yield "TR_04", data, AmbiguousError, "follow the end"
    for shift in (1, -1, 256):
        yield "TR_06", archive(header("a", shift=shift)), CorruptError, "checksum"
        yield "TR_06", archive(a, header("b", shift=shift)), CorruptError, "byte 1,024"


FITS = LIMITS.tar_records_bytes - len(record(b"comment", b"1" * 100)) + 100
MANY = [f"{number}" for number in range(LIMITS.tar_members)]


def test_TR_01_TR_02_TR_03_TR_04_TR_06() -> None:
    refuses_all(read_members_of, refused())


def test_TR_03_TR_04_what_is_just_within() -> None:
    mtime = (b"mtime", b"1.5")
    a = member("a", DATA)
    for data in (
        archive(*[records(mtime, type=b"g")] * 3, records(mtime), a),
        archive(records((b"comment", b"1" * FITS)), a),
    ):
        assert contents(data) == {"a": DATA}
    assert contents(archive(member("a", DATA, prefix=b"x/y"))) == {"x/y/a": DATA}
    assert len(read_members(Memory(archive(*map(header, MANY))))) == LIMITS.tar_members


@pytest.mark.parametrize(
    "field",
    [
        *(b"00000000005\0", b"          5\0", b"5\0\0\0\0\0\0\0\0\0\0\0", b"000000000005"),
        *(b"5          \0", b"\x80" + (5).to_bytes(11, "big")),
    ],
)
def test_TR_02_spellings_of_a_size(field: bytes) -> None:
    assert contents(archive(header("a", size_field=field), padded(DATA))) == {"a": DATA}


def test_TR_02_size_in_a_record(tmp_path: Path) -> None:
    """Only as tarfile writes it: where 11 octal digits are too few."""
    large = 8**11 + 5
    path = tmp_path / "large.tar"
    with path.open("wb") as file:  # sparse
        file.write(records((b"size", str(large).encode())) + header("a", 0))
        file.seek(-(-large // BLOCK) * BLOCK, os.SEEK_CUR)
        file.write(member("b", DATA) + bytes(2 * BLOCK))
    members = read_members(LocalFile(path))
    assert (members["a"].data.length, members["b"].data.read()) == (large, DATA)
    with tarfile.open(path) as other:
        assert [each.size for each in other] == [large, len(DATA)]


def test_TR_06_every_byte_of_a_header() -> None:
    """A header that is damaged anywhere is none; what ends the checksum does not count."""
    block = bytearray(header("storages", 5))
    for at in range(BLOCK):
        if 154 <= at < 156:
            continue
        block[at] ^= 1
        with pytest.raises(CkptkitError):
            read_members_of(archive(bytes(block), padded(DATA)))
        block[at] ^= 1


@pytest.mark.parametrize("field", [b"0o%o", b" %o ", b"+%o", b"%o\x00xx", b"%o"])
def test_a_tar_is_what_tarfile_takes_for_one(field: bytes) -> None:
    """torch asks it, and its spelling of numbers is generous."""
    block = header("storages", 5)
    total = sum(block[:148]) + sum(block[156:]) + 8 * 32
    text = (field % total).ljust(8, b"\0")[:8]
    odd = block[:148] + text + block[156:]
    with tarfile.open(fileobj=io.BytesIO(archive(odd, padded(DATA)))) as file:
        assert file.getnames() == ["storages"]
    assert is_tar(odd)
