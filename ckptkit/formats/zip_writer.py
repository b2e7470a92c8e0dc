"""Lay out zip files: stored members, no data descriptors, data aligned to 64 bytes.

Layout (see zip_reader; every torch since 1.6 loads and memory-maps it):

    local header     flags 0x0800 (UTF-8), version 20 (45 with zip64), date 1980-01-01, the true
                     CRC-32 and sizes
    name
    zip64 field      0x0001: size, stored size, for members of 4 GiB and more
    ``FB`` field     padding (bytes Z) that aligns the data to 64 bytes
    data
    directory        zip64 fields for values that do not fit 32 bits: size, stored size, offset
    ends             always a zip64 end record and locator, as in torch's files; end record with
                     capped values
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import NamedTuple

from ckptkit.core.bytesource import Extent
from ckptkit.core.plan import Checksummed, ChecksumPlaceholder, Segment

ALIGNMENT = 64  # bytes

_U16, _U32 = 0xFFFF, 0xFFFFFFFF
_LOCAL = struct.Struct("<4s5H3L2H").pack
_CENTRAL = struct.Struct("<4s6H3L5H2L").pack
_END64 = struct.Struct("<4sQ2H2L4Q").pack
_LOCATOR = struct.Struct("<4sLQL").pack
_END = struct.Struct("<4s4H2LH").pack
END_BYTES = 22  # size of the end record, by which readers find the directory
_LOCAL_CRC, _CENTRAL_CRC = 14, 16  # offset of the CRC in a header
_UTF8_FLAG = 0x0800
_DATE = 0x0021
_JOINED = 1 << 16  # maximum size of literal content to put in one segment with its header


# Extra fields ``FB``, by the size of their padding.
_PADDING = tuple(b"FB" + struct.pack("<H", size) + b"Z" * size for size in range(ALIGNMENT))


class ZipMember(NamedTuple):
    """A record to write.

    `crc` is the CRC-32 of an extent, None if it is computed during writing.
    """

    name: str
    content: bytes | Extent
    crc: int | None = None


class _Text:
    """A buffer of literal bytes, with holes for CRCs that are computed later."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.holes: list[tuple[int, int]] = []

    def take(self, last: bytes = b"") -> Segment:
        """Return the buffer with `last` appended, and clear it."""
        data, holes = bytes(self.data) + last if self.data else last, self.holes
        self.data.clear()
        if not holes:
            return data
        self.holes = []
        return ChecksumPlaceholder(data, tuple(holes))


def lay_out(members: Iterable[ZipMember]) -> list[Segment]:
    """Return the segments of a zip file that contains `members`, in order.

    The checksum of a member without a CRC has the member's position as its number.
    """
    segments: list[Segment] = []
    text, directory = _Text(), _Text()
    offset = count = 0
    for name, content, crc in members:
        if isinstance(content, bytes):
            size, crc = len(content), zlib.crc32(content)
        else:
            size = content.length
        if size == 0:
            crc = 0
        if crc is None:
            text.holes.append((len(text.data) + _LOCAL_CRC, count))
            directory.holes.append((len(directory.data) + _CENTRAL_CRC, count))
        raw = name.encode()
        header = _local_header(raw, offset, size, crc or 0)
        directory.data += _central_entry(raw, offset, size, crc or 0)
        if isinstance(content, bytes) and size <= _JOINED:
            text.data += header + content
        elif size == 0:
            text.data += header
        elif isinstance(content, bytes) or crc is not None:
            segments += (text.take(header), content)
        else:
            segments += (text.take(header), Checksummed(content, count))
        offset += len(header) + size
        count += 1
    text.holes += [(len(text.data) + position, number) for position, number in directory.holes]
    text.data += directory.data + ends(offset, len(directory.data), count)
    segments.append(text.take())
    return segments


def record(name: str, content: bytes, offset: int) -> tuple[bytes, bytes]:
    """Return a member at `offset` with its local header, and its directory entry."""
    raw, crc = name.encode(), zlib.crc32(content)
    header = _local_header(raw, offset, len(content), crc)
    return header + content, _central_entry(raw, offset, len(content), crc)


def _local_header(name: bytes, offset: int, size: int, crc: int) -> bytes:
    """Return a local header at `offset`, padded so that the data is aligned."""
    version, wide, short = 20, b"", size
    if size >= _U32:
        version, wide, short = 45, struct.pack("<2H2Q", 1, 16, size, size), _U32
    start = offset + 34 + len(name) + len(wide)
    extra = wide + _PADDING[-start % ALIGNMENT]
    n, x = len(name), len(extra)
    return (
        _LOCAL(b"PK\x03\x04", version, _UTF8_FLAG, 0, 0, _DATE, crc, short, short, n, x)
        + name
        + extra
    )


def _central_entry(name: bytes, offset: int, size: int, crc: int) -> bytes:
    version, extra = 20, b""
    if size >= _U32 or offset >= _U32:
        wide = [size, size] if size >= _U32 else []
        wide += [offset] if offset >= _U32 else []
        version, extra = 45, struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide)
        size, offset = min(size, _U32), min(offset, _U32)
    n, x = len(name), len(extra)
    return (
        _CENTRAL(
            b"PK\x01\x02", version, version, _UTF8_FLAG, 0, 0, _DATE,
            crc, size, size, n, x, 0, 0, 0, 0, offset,
        )
        + name
        + extra
    )  # fmt: skip


def ends(offset: int, size: int, count: int) -> bytes:
    """Return the three end records of a directory of `size` bytes at `offset`."""
    short = min(count, _U16)
    return (
        _END64(b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, offset)
        + _LOCATOR(b"PK\x06\x07", 0, offset + size, 1)
        + _END(b"PK\x05\x06", 0, 0, short, short, min(size, _U32), min(offset, _U32), 0)
    )
