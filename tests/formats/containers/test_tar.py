"""The container layer of tar files, by row of the threat table; tars by hand, by tarfile, or from
the corpus."""

from __future__ import annotations

import io
import os
import tarfile
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
from ckptkit.formats.tar import first_name, is_tar, read_members
from tests.conftest import Corpus
from tests.formats.containers.tars import BLOCK, archive, header, member, padded, record, records

DATA = b"hello"


def contents(data: bytes) -> dict[str, bytes]:
    return {name: each.data.read() for name, each in read_members(Memory(data)).items()}


def refused(
    error: type[CkptkitError] | tuple[type[CkptkitError], ...],
    data: bytes,
    match: str | None = None,
) -> None:
    with pytest.raises(error, match=match) as caught:
        read_members(Memory(data))
    assert str(caught.value).isprintable()


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
    refused(AmbiguousError, data.replace(b"e" * 60 + b"\0", b"f" * 60 + b"\0"), "two names")
    refused(AmbiguousError, data[:1024] + data, "two long names")
    refused(FormatError, data[:1024] + bytes(1024), "missing")
    refused(FormatError, data.replace(b"e\0", b"ee", 1), "malformed")


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


def outcomes(folder: Path) -> dict[str, str]:
    found = {path.stem: outcome(path) for path in sorted(folder.glob("*.tar"))}
    assert found
    return found


def outcome(path: Path) -> str:
    try:
        read_members(LocalFile(path))
    except CkptkitError as error:
        return type(error).__name__
    return "read"


def test_corpus_accept(corpus: Corpus) -> None:
    import hashlib
    import json

    folder = corpus / "containers/tar/accept"
    assert set(outcomes(folder).values()) == {"read"}
    for path in folder.glob("*.json"):
        members = read_members(LocalFile(path.with_suffix(".tar")))
        for said in json.loads(path.read_text())["expected"]:
            found = members[said["member"]]
            assert found.kind == {"directory": "folder", "symlink": "link"}.get(
                said["type"], said["type"]
            )
            if found.kind == "file":
                assert hashlib.sha256(found.data.read()).hexdigest() == said["sha256"]


@pytest.mark.parametrize("group", ["malicious", "reject"])
def test_TR_04_corpus_refused(corpus: Corpus, group: str) -> None:
    assert {
        name for name, what in outcomes(corpus / "containers/tar" / group).items() if what == "read"
    } == set()


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
    assert outcomes(corpus / "containers/tar/iffy") == IFFY


# Members


@pytest.mark.parametrize(
    "type", [b"1", b"3", b"4", b"6", b"7", b"D", b"K", b"L", b"M", b"N", b"S", b"V", b"X", b"A"]
)
def test_TR_01_member_types(type: bytes) -> None:
    refused(UnsupportedError, archive(member("storages", b"", type, link=b"x")), "its type is")


@pytest.mark.parametrize("type", [b"2", b"5"])
def test_TR_01_links_and_folders_have_no_data(type: bytes) -> None:
    refused(AmbiguousError, archive(member("x", DATA, type)), "with data")


def test_TR_01_a_link_to_a_member() -> None:
    refused(
        AmbiguousError, archive(member("a", DATA), member("b", b"", b"2", link=b"a")), "second name"
    )
    refused(
        AmbiguousError, archive(member("b", b"", b"2", link=b"a"), member("a", DATA)), "second name"
    )


@pytest.mark.parametrize(
    "field",
    [
        b"-0000000005\0", b"0000000000x\0", b"fghijk00005\0", b"00000000008\0", b"0x000000005\0", b"0o000000005\0",
        b"+0000000005\0", b"0_000000005\0", b"\0" * 12, b" " * 12, b"5\0000000000000"[:12], b"0000005\0\0\0\x005",
    ],
)  # fmt: skip
def test_TR_02_sizes_that_are_no_octal_numbers(field: bytes) -> None:
    refused(FormatError, archive(header("a", size_field=field), padded(DATA)), "octal")


def test_TR_02_negative_in_base_256() -> None:
    refused(FormatError, archive(header("a", size_field=b"\xff" * 12), padded(DATA)), "octal")


@pytest.mark.parametrize(
    "field",
    [
        b"00000000005\0",
        b"          5\0",
        b"5\0\0\0\0\0\0\0\0\0\0\0",
        b"000000000005",
        b"5          \0",
    ],
)
def test_TR_02_spellings_of_a_size(field: bytes) -> None:
    assert contents(archive(header("a", size_field=field), padded(DATA))) == {"a": DATA}


def test_TR_02_sizes_beyond_the_end() -> None:
    for size in (2 * BLOCK + 1, 1 << 20, 8**11 - 1):
        refused(TruncatedError, archive(header("a", size)), "ends inside the member 'a'")
    wide = b"\x80" + (1 << 60).to_bytes(11, "big")
    refused(TruncatedError, archive(header("a", size_field=wide)), "ends inside")
    refused(TruncatedError, archive(header("a", size_field=b"\x80" + b"\xff" * 11)), "ends inside")


def test_TR_02_size_in_base_256() -> None:
    field = b"\x80" + (5).to_bytes(11, "big")
    assert contents(archive(header("a", size_field=field), padded(DATA))) == {"a": DATA}


def test_TR_02_size_in_a_record(tmp_path: Path) -> None:
    """Only as tarfile writes it: where 11 octal digits are too few."""
    for size in (b"3", b"5", b"-1", b"0", b"05", b"x", b"1e3", str(8**11 - 1).encode()):
        refused(AmbiguousError, archive(records((b"size", size)), member("a", DATA)), "two sizes")
        refused(AmbiguousError, archive(records((b"size", size)), header("a", 0)), "two sizes")
    refused(
        TruncatedError,
        archive(records((b"size", str(2**60).encode())), header("a", 0)),
        "ends inside",
    )
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


def test_TR_03_records_about_records() -> None:
    mtime = (b"mtime", b"1.5")
    refused(
        AmbiguousError,
        archive(*[records(mtime)] * 2_000, member("a", DATA)),
        "records about records",
    )
    refused(
        AmbiguousError,
        archive(records(mtime), records(mtime, type=b"g"), member("a", DATA)),
        "records about",
    )
    refused(FormatError, archive(records(mtime)), "missing")
    assert contents(
        archive(*[records(mtime, type=b"g")] * 3, records(mtime), member("a", DATA))
    ) == {"a": DATA}


def test_TR_03_records_of_any_length() -> None:
    fits = LIMITS.tar_records_bytes - len(record(b"comment", b"1" * 100)) + 100
    for length, fine in ((fits, True), (fits + 1, False)):
        data = archive(records((b"comment", b"1" * length)), member("a", DATA))
        if fine:
            assert contents(data) == {"a": DATA}
        else:
            refused(LimitError, data, "tar_records_bytes")
    refused(
        LimitError,
        archive(member("x", bytes(1 << 20), b"x"), member("a", DATA)),
        "tar_records_bytes",
    )
    for field in (b"\x80" + (1 << 40).to_bytes(11, "big"), b"77777777777\0"):
        refused(CkptkitError, archive(header("x", type=b"x", size_field=field)))
    long_link = header(
        "././@LongLink", type=b"L", size_field=b"\x80" + (1 << 33).to_bytes(11, "big")
    )
    refused(CkptkitError, archive(long_link, member("a", DATA)))


def test_TR_03_many_members() -> None:
    names = [f"{number}" for number in range(LIMITS.tar_members + 1)]
    assert len(read_members(Memory(archive(*map(header, names[:-1]))))) == LIMITS.tar_members
    refused(LimitError, archive(*map(header, names)), "tar_members")


@pytest.mark.parametrize(
    "text",
    [
        b"7 path\n", b"22 path=nonewline.txt", b"011 path=h\n", b"0 \n", b"9 size=3", b"99 path=x\n", b"9 mtime=\n\n",
        b"8 path=x\n", b"\xff", b"-9 path=x\n", b"9 pa\0h=x\n", b"9 =path x\n", b"9  path=x\n", b"12345 a=b\n",
    ],
)  # fmt: skip
def test_TR_03_records_that_do_not_parse(text: bytes) -> None:
    refused(FormatError, archive(member("x", text, b"x"), member("a", DATA)), "malformed")


@pytest.mark.parametrize(
    "key", [b"linkpath", b"hdrcharset", b"charset", b"GNU.sparse.major", b"SCHILY.xattr.x", b"Path"]
)
def test_TR_04_records_that_ckptkit_does_not_know(key: bytes) -> None:
    refused(UnsupportedError, archive(records((key, b"1")), member("a", DATA)), "does not know")


@pytest.mark.parametrize("key", [b"path", b"size"])
def test_TR_04_records_about_all_members_change_none(key: bytes) -> None:
    refused(
        UnsupportedError,
        archive(records((key, b"9"), type=b"g"), member("a", DATA)),
        "does not know",
    )


def test_TR_04_a_record_twice() -> None:
    refused(
        AmbiguousError,
        archive(records((b"path", b"a"), (b"path", b"b")), member("c", DATA)),
        "two ways",
    )


@pytest.mark.parametrize("second", ["a", "A"])
def test_TR_04_duplicate_names(second: str) -> None:
    refused(
        AmbiguousError,
        archive(member("a", DATA), member("b", b""), member(second, DATA)),
        "two members",
    )
    renamed = records((b"path", second.encode())), member("c", DATA)
    refused(AmbiguousError, archive(member("a", DATA), *renamed), "two members")


@pytest.mark.parametrize(
    "name",
    [b"", b"\x1b[2J", b"\n", b"\x7f", b"\xff", "é".encode(), b"/a", b"../a", b"a/../b", b"..", b".", b"./a", b"a//b",
     b"a\\b", b"a/"],
)  # fmt: skip
def test_TR_04_names(name: bytes) -> None:
    refused((PathError, FormatError), archive(member(name, DATA)))
    refused((PathError, FormatError), archive(records((b"path", name)), member("a", DATA)))
    if name:
        refused((PathError, FormatError), archive(records((b"path", b"a")), member(name, DATA)))


@pytest.mark.parametrize("prefix", [b"..", b".", b"/", b"a/../b", b"\xc3"])
def test_TR_04_prefixes(prefix: bytes) -> None:
    refused((PathError, FormatError), archive(member("a", DATA, prefix=prefix)))
    assert contents(archive(member("a", DATA, prefix=b"x/y"))) == {"x/y/a": DATA}
    refused(FormatError, archive(member("", DATA, prefix=b"x")))


def test_TR_04_more_after_the_name() -> None:
    refused(AmbiguousError, archive(member(b"a\0b", DATA)), "has bytes after")
    refused(
        AmbiguousError,
        archive(member("a", DATA, magic=b"ustar  \0", prefix=b"12345670123\0")),
        "GNU",
    )


def test_TR_04_after_the_end() -> None:
    refused(
        AmbiguousError, archive(archive(member("a", DATA)), member("b", DATA)), "follow the end"
    )
    refused(AmbiguousError, archive(member("a", DATA), end=4 << 20), "follow the end")
    refused(AmbiguousError, archive(member("a", DATA)) + padded(b"1"), "follow the end")


@pytest.mark.parametrize("shift", [1, -1, 256])
def test_TR_06_checksum(shift: int) -> None:
    refused(CorruptError, archive(header("a", shift=shift)), "checksum")
    refused(CorruptError, archive(member("a", DATA), header("b", shift=shift)), "byte 1,024")
    assert not is_tar(header("a", shift=shift))


def test_TR_06_every_byte_of_a_header() -> None:
    """A header that is damaged anywhere is none; what ends the checksum does not count."""
    block = bytearray(header("storages", 5))
    for at in range(BLOCK):
        if 154 <= at < 156:
            continue
        block[at] ^= 1
        refused(CkptkitError, archive(bytes(block), padded(DATA)))
        block[at] ^= 1


@pytest.mark.parametrize(
    "start", [b"", b"PK\x03\x04", b"\x80\x02", bytes(BLOCK), b"ustar" * 200, b"{" * BLOCK]
)
def test_other_files_are_no_tars(start: bytes) -> None:
    assert not is_tar(start)


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
