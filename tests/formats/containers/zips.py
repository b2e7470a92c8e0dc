"""Zip files written by hand, byte for byte and as wrong as wanted; and plans carried out in the
simplest way."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from ckptkit.compute.operation import stream
from ckptkit.core.bytesource import Range
from ckptkit.core.plan import Checksummed, ChecksumPlaceholder, Segment

LOCAL = ("magic", "version", "flags", "method", "time", "date", "crc", "stored", "size", "n", "x")
CENTRAL = (
    "magic", "made", "version", "flags", "method", "time", "date", "crc", "stored", "size", "n", "x", "comment",
    "disk", "internal", "external", "offset",
)  # fmt: skip
END = ("magic", "disk", "first_disk", "here", "count", "size", "start", "comment")
END64 = ("magic", "length", "made", "version", *END[1:-1])
LOCATOR = ("magic", "disk", "offset", "disks")
HOLE = 1 << 30  # ranges from this length on are written as holes


class Member:
    """A member with its true headers; `local` and `central` say what is written into them
    instead."""

    def __init__(
        self, name: str | bytes, data: bytes, *, deflated: bool = False, **more: Any
    ) -> None:
        self.name = name.encode() if isinstance(name, str) else name
        self.stored = deflate(data) if deflated else data
        self.facts = {
            "flags": 0, "method": 8 if deflated else 0, "crc": zlib.crc32(data), "stored": len(self.stored),
            "size": len(data), "time": 0, "date": 0x21, "version": 20, "made": 20, "internal": 0, "external": 0,
            "disk": 0, "comment": 0,
        }  # fmt: skip
        self.local: dict[str, Any] = more.pop("local", {})
        self.central: dict[str, Any] = more.pop("central", {})
        self.local_extra: bytes = more.pop("local_extra", b"")
        self.central_extra: bytes = more.pop("central_extra", b"")
        self.before: bytes = more.pop("before", b"")  # the local header
        self.after: bytes = more.pop("after", b"")  # the data
        assert not more

    def head(self) -> bytes:
        facts = self.facts | {"magic": b"PK\3\4", "n": len(self.name), "x": len(self.local_extra)}
        facts |= self.local
        return pack("<4s5H3L2H", LOCAL, facts) + facts.get("name", self.name) + self.local_extra

    def entry(self, offset: int) -> bytes:
        facts = self.facts | {"magic": b"PK\1\2", "n": len(self.name), "offset": offset}
        facts |= {"x": len(self.central_extra), **self.central}
        head = pack("<4s6H3L5H2L", CENTRAL, facts)
        return head + facts.get("name", self.name) + self.central_extra


def deflate(data: bytes) -> bytes:
    machine = zlib.compressobj(wbits=-15)
    return machine.compress(data) + machine.flush()


def pack(form: str, names: tuple[str, ...], facts: dict[str, Any]) -> bytes:
    return struct.pack(form, *(facts[name] for name in names))


def build(
    *members: Member, gap: bytes = b"", comment: bytes = b"", end: Any = None, zip64: Any = None
) -> bytes:
    """The whole file. `gap` goes before the directory; `end` and `zip64` replace facts of the end
    records."""
    data = b""
    entries = []
    for member in members:
        data += member.before
        entries.append(member.entry(len(data)))
        data += member.head() + member.stored + member.after
    data += gap
    size = sum(map(len, entries))
    facts = {"disk": 0, "first_disk": 0, "here": len(members), "count": len(members)}
    facts |= {"size": size, "start": len(data)}
    middle = b""
    if zip64 is not None:
        wide = facts | {"magic": b"PK\6\6", "length": 44, "made": 45, "version": 45} | zip64
        locator = {"magic": b"PK\6\7", "disk": 0, "offset": len(data) + size, "disks": 1}
        locator |= {name[8:]: value for name, value in zip64.items() if name.startswith("locator_")}
        middle = pack("<4sQ2H2L4Q", END64, wide) + wide.get("more", b"")
        middle += pack("<4sLQL", LOCATOR, locator)
    facts |= {"magic": b"PK\5\6", "comment": len(comment)} | (end or {})
    return data + b"".join(entries) + middle + pack("<4s4H2LH", END, facts) + comment


def execute(segments: Iterable[Segment], path: Path) -> Path:
    """Write the segments of one output file."""
    sums: dict[int, int] = {}
    segments = list(segments)
    for segment in segments:
        if isinstance(segment, Checksummed):
            for piece in stream(segment.extent):
                sums[segment.number] = zlib.crc32(piece, sums.get(segment.number, 0))
    with open(path, "wb") as file:
        for segment in segments:
            _write(file, segment, sums)
    return path


def _write(file: BinaryIO, segment: Segment, sums: dict[int, int]) -> None:
    if isinstance(segment, bytes):
        file.write(segment)
    elif isinstance(segment, ChecksumPlaceholder):
        file.write(segment.render(sums))
    elif isinstance(segment, Checksummed):
        _write(file, segment.extent, sums)
    elif isinstance(segment, Range) and segment.length >= HOLE:
        file.seek(segment.length, 1)
    else:
        file.writelines(stream(segment))
