"""The container layer, by row of the threat table; zips are made by hand, by zipfile, or come from
the corpus."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from ckptkit.compute.operation import Inflate, stream
from ckptkit.core import limits
from ckptkit.core.bytesource import ByteSource, Derived, LocalFile, Memory, Range
from ckptkit.core.errors import (
    AmbiguousError,
    CorruptError,
    FormatError,
    LimitError,
    PathError,
    UnsupportedError,
)
from ckptkit.formats.zip_reader import ZipDirectory, read_directory
from tests.conftest import Corpus
from tests.formats.catalogue import Row, outcomes, refuses_all
from tests.formats.containers.zips import Member, build, deflate

DATA = b"0123456789abcdef"
DESCRIPTOR = 0x0008


def directory(data: bytes) -> ZipDirectory:
    return read_directory(Memory(data, "made.zip"))


def descriptor(
    crc: int, stored: int, size: int, *, signed: bool = True, wide: bool = False
) -> bytes:
    numbers = struct.pack("<LQQ" if wide else "<LLL", crc, stored, size)
    return (b"PK\7\x08" if signed else b"") + numbers


def described(
    name: str = "a/0", data: bytes = DATA, after: bytes | None = None, **more: Any
) -> Member:
    """A member as torch writes it: nothing in the local header, a descriptor behind the data."""
    local = {"crc": 0, "stored": 0, "size": 0, **more.pop("local", {})}
    member = Member(name, data, local=local, **more)
    member.facts["flags"] = 0x0800 | DESCRIPTOR
    member.after = descriptor(zlib.crc32(data), len(data), len(data)) if after is None else after
    return member


def field(kind: int, data: bytes) -> bytes:
    return struct.pack("<HH", kind, len(data)) + data


def odd(**facts: int) -> Member:
    """A member with other facts in both of its headers."""
    member = Member("a/0", DATA)
    member.facts |= facts
    return member


GOOD = build(Member("a/0", DATA))
END_RECORD = GOOD[-22:]
WIDE = {"count": 0xFFFF, "here": 0xFFFF, "size": 0xFFFFFFFF, "start": 0xFFFFFFFF}
CRC = zlib.crc32(DATA)


# What is refused


def refused() -> Iterator[Row]:
    """Yield the row of threats.md, a file, the error when it is read, and what it says."""
    one, other = Member("a/0", DATA), Member("a/1", DATA)
    for second in ("a/data.pkl", "a/DATA.PKL", "A/data.pkl"):
        made = build(Member("a/data.pkl", DATA), Member("a/0", b""), Member(second, DATA))
        yield "ZP_01", made, AmbiguousError, "same name"
    for members in ([Member("a/x", DATA), Member("a/x/", b"")], [Member("a/x/", DATA)]):
        yield "ZP_01", build(*members), AmbiguousError, "folder"
    unclear = (
        b"", b"a/\0", b"a/x\0.pkl", b"a/\x1b[2J", b"a/\n", b"a/\x7f", b"a/\xff", b"a/\xc0\xaf",
    )  # fmt: skip
    leading_out = (b"/a", b"../a", b"a/../b", b"a/..", b"..", b"a\\b")
    for name, place in product((*unclear, *leading_out), range(3)):
        members = [one, other]
        members.insert(place, Member(name, DATA))
        yield "ZP_14", build(*members), PathError if name in leading_out else FormatError, ""
    for local in (
        {"name": b"a/1"}, {"n": 2}, {"flags": 1}, {"flags": 0x40}, {"flags": 0x0800}, {"method": 8},
        {"crc": 1}, {"crc": 0}, {"stored": 15}, {"size": 17}, {"stored": 0, "size": 0},
        {"stored": 0, "size": 0, "crc": 0}, {"stored": 0xFFFFFFFF},
    ):  # fmt: skip
        made = build(Member("a/0", DATA, local=local), other)
        yield "ZP_02", made, AmbiguousError, "differ|overlap"
    made = build(one, Member("a/1", DATA, local={"magic": b"PK\3\5"}))
    yield "ZP_02", made, CorruptError, "does not begin at byte"
    for flag in (0, 6, 13):
        yield "ZP_03", build(odd(flags=1 << flag)), UnsupportedError, "encrypted"
    for flag in (4, 5, 7, 8, 9, 10, 12, 14, 15):
        made = build(Member("a/0", DATA, central={"flags": 1 << flag}))
        yield "ZP_03", made, UnsupportedError, "flags"
    twice = bytearray(build(one, other))
    struct.pack_into("<L", twice, twice.rindex(b"PK\1\2") + 42, 0)
    yield "ZP_06", bytes(twice), AmbiguousError, "begin at the same byte"
    yield "ZP_06", quoted_overlap(), AmbiguousError, "overlap"
    for stored, size in ((24, 24), (16, 24), (24, 16), (15, 15), (0, 0), (1 << 31, 1 << 31)):
        made = build(described(central={"stored": stored, "size": size}), described("a/1"))
        yield "ZP_07", made, (CorruptError, AmbiguousError), ""
    for size in (0, 143, 145, 1 << 14):
        member = Member("a/0", DATA * 9, deflated=True)
        member.facts["size"] = size
        yield "ZP_07", build(member), CorruptError, "inflate"
    for junk in (b"", b"\xff" * 9, deflate(DATA)[:-1], deflate(DATA) + b"more"):
        member = Member("a/0", DATA, deflated=True)
        member.stored, member.facts["stored"] = junk, len(junk)
        yield "ZP_07", build(member), CorruptError, "compressed data"
    for method in (1, 9, 12, 14, 93, 99):
        yield "ZP_09", build(odd(method=method)), UnsupportedError, f"method {method}"
    for made in (
        GOOD + END_RECORD, GOOD[:-22] + END_RECORD[:-2] + b"\x16\0" + END_RECORD,
        build(one, comment=b"x" + END_RECORD), build(one, comment=b"PK\5\6"), GOOD + b"\0",
        GOOD + bytes(256), GOOD + GOOD, build(one, end={"comment": 3}),
        build(one, comment=b"hello")[:-1],
    ):  # fmt: skip
        yield "ZP_10_ZP_23", made, AmbiguousError, "end record"
    for prefix in (b"\0", bytes(256), b"PK\7\x08", b"PK00"):
        yield "ZP_10", prefix + GOOD, FormatError, "begin"
    truth = {"start": len(GOOD) - 22 - 49, "size": 49}
    for fact, shift in product(truth, (-1, 1, 100_000)):
        made = build(one, end={fact: truth[fact] + shift})
        yield "ZP_10", made, AmbiguousError, "directory ends"
    for count in (0, 2, 0xFFFF):
        yield "ZP_10", build(one, end={"count": count, "here": count}), CorruptError, "entries"
    lies: list[tuple[Any, Any]] = [
        ({"locator_offset": 0}, WIDE), ({"locator_offset": 1 << 63}, WIDE), ({"magic": b"PK\6\5"}, WIDE),
        ({"length": 45}, WIDE), ({"more": b"12345678"}, WIDE), ({"length": 52, "more": b"12345678"}, WIDE),
        ({"count": 2, "here": 2}, {}), ({"size": 48}, {}), ({"start": 1}, {}), (None, WIDE),
        (None, {"start": 0xFFFFFFFF}),
    ]  # fmt: skip
    for zip64, end in lies:
        yield "ZP_11", build(one, zip64=zip64, end=end), FormatError, "zip64"
    for start in (0, 1 << 63, (1 << 64) - 1):
        made = build(one, zip64={"start": start}, end=WIDE)
        yield "ZP_11", made, AmbiguousError, "directory ends"
    extras = (
        b"   ", b"\0", field(0x7075, b"\1abcdname"), field(1, bytes(8)) * 2, field(1, bytes(7)),
        field(1, struct.pack("<Q", 17)), struct.pack("<HH", 0x9999, 5) + b"1234", b"FB\x05\0ZZZZ",
    )  # fmt: skip
    for where, extra in product(("local_extra", "central_extra"), extras):
        made = build(Member("a/0", DATA, **{where: extra}))
        yield "ZP_12", made, (FormatError, AmbiguousError), "a/0"
    for after in (
        b"", bytes(16), descriptor(CRC ^ 1, 16, 16), descriptor(0, 16, 16), descriptor(CRC, 15, 16),
        descriptor(CRC, 16, 17), descriptor(CRC, 16, 16)[:-1], b"\1" + descriptor(CRC, 16, 16),
        descriptor(CRC, 16, 1 << 40, wide=True), descriptor(CRC, 17, 16, signed=False),
    ):  # fmt: skip
        made = build(described(after=after), described("a/1"))
        yield "ZP_13", made, (CorruptError, AmbiguousError), ""
    yield "ZP_13", build(described(local={"flags": 0x0800})), AmbiguousError, "flags"
    huge = {"count": 1 << 60, "here": 1 << 60}
    yield "ZP_16", build(one, zip64=huge, end=WIDE), LimitError, "zip_entries"
    both = {"disk": 0xFFFF, "first_disk": 0xFFFF}
    for parts in ({"disk": 1}, {"first_disk": 1}, {"here": 0}, {"here": 2}, both):
        yield "ZP_22", build(one, end=parts), UnsupportedError, "parts"
        yield "ZP_22", build(one, zip64=parts), UnsupportedError, "parts"
    elsewhere = build(Member("a/0", DATA, central={"disk": 1}))
    for made in (elsewhere, build(one, zip64={"locator_disks": 2})):
        yield "ZP_22", made, UnsupportedError, "parts"
    hidden = Member("a/hidden", b"hidden!!").head() + b"hidden!!"
    behind, before = Member("a/1", DATA, before=hidden), Member("a/0", DATA, before=hidden)
    for made in (build(one, gap=hidden), build(one, behind), build(before)):
        yield "a record that is not listed", made, AmbiguousError, "not in the directory"


def quoted_overlap() -> bytes:
    """Each member's data begins with the next member's local header, and all end with the same
    kernel."""
    kernel, members = b"kernel", [Member("a/9", b"kernel")]
    for number in range(8, -1, -1):
        kernel = members[0].head() + kernel
        members.insert(0, Member(f"a/{number}", kernel))
    body = members[0].head() + kernel
    entries = b"".join(member.entry(body.index(member.head())) for member in members)
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 10, 10, len(entries), len(body), 0)
    return body + entries + end


def read_all(source: ByteSource) -> None:
    found = read_directory(source)
    for name in found.entries:
        found.read(name)


def test_ZP_01_ZP_02_ZP_03_ZP_06_ZP_07_ZP_09_ZP_10_ZP_11_ZP_12_ZP_13_ZP_14_ZP_16_ZP_22_ZP_23() -> (
    None
):
    refuses_all(lambda data: read_all(Memory(data, "made.zip")), refused())


def test_a_plain_zip() -> None:
    """zipfile reads it too: the hand that makes these files agrees with it."""
    members = [Member("a/0", DATA), Member("a/1", b""), Member("a/2", DATA * 9, deflated=True)]
    data = build(*members, described("a/x/y"), Member("a/x/", b""), zip64={})
    with zipfile.ZipFile(io.BytesIO(data)) as made:
        assert made.testzip() is None
        names = made.namelist()
    found = directory(data)
    assert [*found.entries] == names == ["a/0", "a/1", "a/2", "a/x/y", "a/x/"]
    assert found.top == "a" and "A/1" not in found.entries
    contents = [DATA, b"", DATA * 9, DATA, b""]
    assert [found.read(name) for name in names] == contents
    assert [found.crc(name) for name in names] == [*map(zlib.crc32, contents)]
    assert [found.entries[name].length for name in names] == [*map(len, contents)]
    assert [found.entries[name].method for name in names] == [0, 0, 8, 0, 0]
    record, _ = found.record("a/0")
    extent = record.locate()
    assert isinstance(extent, Range) and extent.offset == 33 and extent.read() == DATA
    assert record.length == extent.length
    assert extent == found.locate("a/0")
    assert found.entries["a/0"].stored == 16
    assert found.entries["a/2"].stored < 144
    inflated = found.record("a/2")[0].locate()
    assert isinstance(inflated, Derived) and isinstance(inflated.operation, Inflate)
    assert b"".join(stream(inflated)) == DATA * 9


def test_the_directory_may_list_members_in_another_order() -> None:
    data = bytearray(build(Member("a/0", DATA), Member("a/1", b"other")))
    start = data.index(b"PK\1\2")
    first, second = data[start : start + 49], data[start + 49 : start + 98]
    data[start : start + 98] = second + first
    found = directory(bytes(data))
    assert [*found.entries] == ["a/1", "a/0"]
    assert found.read("a/0") == DATA and found.read("a/1") == b"other"


# The corpus of zip cases


def found_in(folder: Path) -> dict[str, str]:
    return outcomes(folder.glob("*.zip"), read_all)


def test_corpus_accept(corpus: Corpus) -> None:
    assert set(found_in(corpus / "containers/zip/accept").values()) == {"read"}


@pytest.mark.parametrize("group", ["malicious", "reject"])
def test_corpus_refused(corpus: Corpus, group: str) -> None:
    assert "read" not in found_in(corpus / "containers/zip" / group).values()


# How each name of the corpus' undecided group ends, and why. The first prefix that fits counts.
IFFY = (
    ("crc_collision", "read", "members with equal checksums are no contradiction"),
    ("crc_zero_nonempty", "read", "torch can be told to write no checksums"),
    ("nosubdir", "read", "torch writes no entries for folders"),
    ("prefix", "FormatError", "torch takes a file for a zip by its first four bytes"),
    ("non_ascii_original_name", "FormatError", "a second name in an extra field"),
    ("extra3byte", "FormatError", "extra fields that do not parse"),
    ("zip64_extra", "FormatError", "a zip64 field has exactly what does not fit 32 bits"),
    ("zip64_eocd_extensible_data", "FormatError", "the zip64 end record is before its locator"),
    ("8bitcomment", "AmbiguousError", "a second end record inside the comment"),
    ("suffix_not_comment", "AmbiguousError", "bytes after the end record"),
    ("comment_cdsize", "AmbiguousError", "local header and directory have other sizes"),
    ("store_cdsize", "AmbiguousError", "local header and directory have other sizes"),
    ("trailing_slash_attr_mismatch", "AmbiguousError", "a folder with bytes"),
    ("data_descriptor_flag_off_cd_zero", "CorruptError", "deflated to nothing at all"),
    ("data_descriptor_flag_off", "AmbiguousError", "no sizes in the header, and no flag for them"),
    ("data_descriptor", "CorruptError", "no descriptor where the directory's sizes put it"),
)


def test_corpus_iffy(corpus: Corpus) -> None:
    for name, found in found_in(corpus / "containers/zip/iffy").items():
        assert found == next(end for start, end, _ in IFFY if name.startswith(start)), name


# Names


def test_ZP_01_names_are_bytes() -> None:
    """Two forms of one letter are two names: torch compares bytes and knows ASCII case only."""
    names = ("a/\u00e9", "a/e\u0301", "a/\u00c9")
    found = directory(build(*(Member(name, name.encode()) for name in names)))
    assert [found.read(name) for name in names] == [name.encode() for name in names]


@pytest.mark.parametrize(
    "name", ["a/..b", "a/b..", "a/...", "ü b/ö", "lstm.save/x", "a/" + "n" * 60_000]
)
def test_ZP_14_names_that_are_fine(name: str) -> None:
    assert directory(build(Member("a/0", DATA), Member(name, b"other"))).read(name) == b"other"


@pytest.mark.parametrize("deflated", [True, False])
def test_ZP_04_crc(deflated: bool) -> None:
    member = Member("a/0", DATA, deflated=deflated)
    member.facts["crc"] ^= 1
    found = directory(build(member))
    with pytest.raises(CorruptError, match="damaged") as refused:
        found.read("a/0")
    assert refused.value.where == "made.zip"


def test_ZP_04_verify_reads_everything_and_keeps_nothing() -> None:
    data = random.Random(4).randbytes(3 << 20)
    good = build(Member("a/0", b"12"), Member("a/1", data))
    directory(good).verify("a/1")
    flipped = bytearray(good)
    flipped[good.index(data) + len(data) - 1] ^= 1
    with pytest.raises(CorruptError, match="damaged"):
        directory(bytes(flipped)).verify("a/1")


def test_ZP_05_crc_zero_means_unknown() -> None:
    member = Member("a/0", DATA)
    member.facts["crc"] = 0
    found = directory(build(member, Member("a/1", b"")))
    assert found.crc("a/0") is None and found.crc("a/1") == 0
    assert found.read("a/0") == DATA
    found.verify("a/0")


def test_ZP_07_a_member_that_reaches_beyond_the_last() -> None:
    """By the directory's sizes alone; or only once its local header is known."""
    for over, extra in ((1, b""), (1 << 40, b""), (1, b"FB\5\0ZZZZZ")):
        member = Member("a/0", DATA, local_extra=extra)
        if over == 1 << 40:
            member.central_extra = field(1, struct.pack("<2Q", over, over))
        short = min(16 + over, 0xFFFFFFFF)
        member.facts |= {"stored": short, "size": short}
        with pytest.raises(CorruptError, match="reaches"):
            directory(build(member))
        if not extra:
            with pytest.raises(CorruptError, match="reaches"):
                read_directory(Remote(build(member)))


def test_ZP_08_bombs(monkeypatch: pytest.MonkeyPatch) -> None:
    member = Member("a/0", bytes(1 << 20), deflated=True)
    found = directory(build(member))
    assert found.read("a/0") == bytes(1 << 20)
    monkeypatch.setattr(limits, "LIMITS", replace(limits.LIMITS, record_bytes=(1 << 20) - 1))
    with pytest.raises(LimitError, match="record_bytes"):
        found.read("a/0")
    member.facts["size"] = 1 << 31
    with pytest.raises(LimitError, match="inflate_ratio"):
        directory(build(member)).locate("a/0")


@pytest.mark.parametrize("comment", [b"", b"hello", b"x" * 0xFFFF])
def test_ZP_10_comments(comment: bytes) -> None:
    assert directory(build(Member("a/0", DATA), comment=comment)).read("a/0") == DATA


@pytest.mark.parametrize("end", [{}, WIDE, {"start": 0xFFFFFFFF}])
def test_ZP_11_zip64_end(end: dict[str, int]) -> None:
    assert directory(build(Member("a/0", DATA), zip64={}, end=end)).read("a/0") == DATA


@pytest.mark.parametrize(
    "extra", [field(0x5455, b"\1abcd"), b"FB\0\0", b"FB\4\0ZZZZ", b"FB\2\0ZZ" + field(9, b"")]
)
def test_ZP_12_extra_fields_that_are_fine(extra: bytes) -> None:
    made = build(
        Member("a/0", DATA, local_extra=extra),
        Member("a/1", DATA, local_extra=extra, central_extra=extra),
    )
    assert [directory(made).read(name) for name in ("a/0", "a/1")] == [DATA, DATA]


def test_ZP_12_zip64_fields() -> None:
    short = {"stored": 0xFFFFFFFF, "size": 0xFFFFFFFF}
    wide = field(1, struct.pack("<2Q", 16, 16))
    one = Member("a/0", DATA, local=short, local_extra=wide)
    two = Member("a/1", DATA, central={**short, "offset": 0xFFFFFFFF})
    two.central_extra = field(1, struct.pack("<3Q", 16, 16, len(one.head()) + len(DATA)))
    found = directory(build(one, two))
    assert found.read("a/0") == found.read("a/1") == DATA
    two.central_extra = field(1, struct.pack("<2Q", 16, 16))
    with pytest.raises(FormatError, match="zip64"):
        directory(build(one, two))
    one.local_extra = field(1, struct.pack("<2Q", 16, 17))
    with pytest.raises(AmbiguousError, match="differ"):
        directory(build(one))


@pytest.mark.parametrize("numbers", [(16, 0), (16, 0, 1 << 33), (16, 16), ()])
def test_ZP_12_torch_zip64_fields(numbers: tuple[int, ...]) -> None:
    """In a local header: the size, a zero for the stored size, perhaps the offset, while the short
    fields are zero."""
    extra = field(1, struct.pack(f"<{len(numbers)}Q", *numbers)) + b"FB\1\0Z"
    after = descriptor(CRC, 16, 16, wide=True)
    if (1 << 33) in numbers:
        with pytest.raises(AmbiguousError, match="differ"):
            directory(build(described(local_extra=extra, after=after)))
    else:
        assert directory(build(described(local_extra=extra, after=after))).read("a/0") == DATA


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("wide", [True, False])
def test_ZP_13_descriptors(signed: bool, wide: bool) -> None:
    after = descriptor(CRC, 16, 16, signed=signed, wide=wide)
    alone = described("a/1", DATA[:9], central={"flags": 0x0800})  # only the local header has it
    found = directory(build(described(after=after), alone))
    assert found.read("a/0") == DATA and found.read("a/1") == DATA[:9]


@pytest.mark.parametrize("external", [0o120777 << 16, 0o40755 << 16, 0x21, 0xFFFFFFEF])
def test_ZP_15_attributes_are_nothing_to_us(external: int) -> None:
    made = build(Member("a/0", b"/etc/passwd", central={"made": 0x0314, "external": external}))
    assert directory(made).read("a/0") == b"/etc/passwd"


@pytest.mark.parametrize("deflated", [False, True])
def test_ZP_15_a_folder_by_its_attributes(deflated: bool) -> None:
    """torch takes such a member for empty, and gives what was in memory for its bytes."""
    made = Member("a/0", b"/etc/passwd", deflated=deflated, central={"external": 0x10})
    with pytest.raises(AmbiguousError, match="'a/0' has the attribute of a folder"):
        directory(build(made))
    folder = Member("a/", b"", central={"external": 0x10})
    assert [*directory(build(folder, Member("a/0", b"x"))).entries] == ["a/", "a/0"]


def test_ZP_16_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    made = build(Member("a/0", DATA), Member("a/1", DATA))
    for name, least in (("zip_entries", 2), ("zip_directory_bytes", 98)):
        with monkeypatch.context() as patch:
            patch.setattr(limits, "LIMITS", replace(limits.LIMITS, **{name: least}))
            assert len(directory(made).entries) == 2
            patch.setattr(limits, "LIMITS", replace(limits.LIMITS, **{name: least - 1}))
            with pytest.raises(LimitError, match=name):
                directory(made)


def test_what_an_edit_in_place_leaves_is_no_member() -> None:
    """An older version of a listed record, an older directory: dead bytes."""
    old = build(Member("a/data.pkl", b"old"), Member("a/0", DATA))
    size = Member("a/data.pkl", b"old").head() + b"old"
    before = old[len(size) + len(Member("a/0", DATA).head()) + len(DATA) :]
    new = Member("a/data.pkl", b"new one", before=before)
    found = directory(build(Member("a/0", DATA, before=size), new))
    assert found.read("a/data.pkl") == b"new one" and found.read("a/0") == DATA
    assert found.start > found.entries["a/data.pkl"].data


# Where bytes are read, and when


class Remote(ByteSource):
    """Bytes far away: each read is counted."""

    remote = True

    def __init__(self, data: bytes) -> None:
        self.name, self.size, self.identity = "remote.zip", len(data), ("remote", 1)
        self.reads: list[tuple[int, int]] = []
        self._data = data

    def _read(self, offset: int, length: int) -> bytes:
        self.reads.append((offset, length))
        return self._data[offset : offset + length]


def test_remote_local_headers_are_read_when_needed() -> None:
    extra = b"FB\3\0ZZZ"
    members = (described(f"a/{n}", bytes([n]) * 9, local_extra=extra) for n in range(200))
    made = build(*members, zip64={})
    remote = Remote(made)
    found, near = read_directory(remote), directory(made)
    assert len(remote.reads) <= 4
    record, _ = found.record("a/7")
    assert record.length == 9 and len(remote.reads) <= 4
    assert record.locate().offset == near.record("a/7")[0].locate().offset  # type: ignore[union-attr]
    assert found.read("a/199") == bytes([199]) * 9


def test_remote_local_headers_are_checked_when_read() -> None:
    remote = read_directory(Remote(build(Member("a/0", DATA, local={"name": b"a/1"}))))
    with pytest.raises(AmbiguousError, match="differ"):
        remote.record("a/0")[0].locate()


@pytest.mark.parametrize(
    ("members", "size", "reads", "read"), [(20, 1 << 20, 30, 90_000), (3000, 100, 30, 1_500_000)]
)
def test_few_reads_of_local_headers(
    tmp_path: Path, lengths: list[int], members: int, size: int, reads: int, read: int
) -> None:
    """Far apart: one small read each. Close together: many in one read."""
    path = tmp_path / "a.zip"
    path.write_bytes(build(*(described(f"a/{n}", bytes(size)) for n in range(members))))
    assert len(read_directory(LocalFile(path)).entries) == members
    assert len(lengths) <= reads and sum(lengths) <= read
