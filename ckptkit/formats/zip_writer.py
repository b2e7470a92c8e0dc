"""Lay out zip files: stored members, no data descriptors, data aligned to 64 bytes.

Every torch since 1.6 loads and memory-maps these files. :mod:`zip_reader` describes the structures.
A member consists of:

    local header     flags 0x0800 (UTF-8), version 20 (45 with zip64), date 1980-01-01, the true
                     CRC-32 and sizes
    name
    zip64 field      field 0x0001 with size and stored size, for a member of 4 GiB or more
    ``FB`` field     padding (bytes Z) that aligns the data to 64 bytes
    data

After the members follow:

    directory        an entry for each member, with a zip64 field for each size or offset of more
                     than 32 bits
    zip64 end        a zip64 end record and its locator, always written, as in torch's files
    end record       contains the maximum instead of a value that is too large
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import NamedTuple

from ckptkit.core.bytesource import Extent
from ckptkit.core.plan import Checksummed, ChecksumPlaceholder, Segment
from ckptkit.formats.zip_reader import END, END64, LOCATOR, U16, U32

ALIGNMENT = 64  # bytes

_LOCAL = struct.Struct("<4s5H3L2H").pack
_CENTRAL = struct.Struct("<4s6H3L5H2L").pack
_LOCAL_CRC, _CENTRAL_CRC = 14, 16  # offsets of the CRC in a local header and a directory entry
_UTF8_FLAG = 0x0800
_DATE = 0x0021
_JOINED = 1 << 16  # maximum size of literal content that shares a segment with its header


# Extra fields ``FB``, by the number of bytes of padding.
_PADDING = tuple(b"FB" + struct.pack("<H", size) + b"Z" * size for size in range(ALIGNMENT))


class ZipMember(NamedTuple):
    """A member to write.

    `crc` is the CRC-32 of the content, or None to compute the CRC-32 while the file is written.
    """

    name: str
    content: bytes | Extent
    crc: int | None = None


def lay_out(members: Iterable[ZipMember]) -> list[Segment]:
    """Return the segments of a zip file that contains `members`, in order.

    If `crc` of a member is None, the content becomes a `Checksummed` segment. The number of this
    segment is the position of the member in `members`.
    """
    segments: list[Segment] = []
    text, directory = bytearray(), bytearray()  # literal bytes
    # Positions in `text` and `directory` of CRCs that are computed later, and segment numbers.
    holes: list[tuple[int, int]] = []
    more_holes: list[tuple[int, int]] = []
    offset = count = 0
    for name, content, crc in members:
        size = len(content) if isinstance(content, bytes) else content.length
        if isinstance(content, bytes):
            crc = zlib.crc32(content)
        elif size == 0:
            crc = 0
        if crc is None:
            holes.append((len(text) + _LOCAL_CRC, count))
            more_holes.append((len(directory) + _CENTRAL_CRC, count))
        raw = name.encode()
        header = _local_header(raw, offset, size, crc or 0)
        directory += _central_entry(raw, offset, size, crc or 0)
        text += header
        if isinstance(content, bytes) and size <= _JOINED:
            text += content
        elif size:
            segments.append(_segment(text, holes))
            if isinstance(content, bytes) or crc is not None:
                segments.append(content)
            else:
                segments.append(Checksummed(content, count))
            text.clear()
            holes = []
        offset += len(header) + size
        count += 1
    holes += [(len(text) + position, number) for position, number in more_holes]
    text += directory + ends(offset, len(directory), count)
    return [*segments, _segment(text, holes)]


def _segment(text: bytearray, holes: list[tuple[int, int]]) -> Segment:
    return ChecksumPlaceholder(bytes(text), tuple(holes)) if holes else bytes(text)


def record(name: str, content: bytes, offset: int) -> tuple[bytes, bytes]:
    """Return a member at `offset` (local header and content), and the member's directory entry."""
    raw, crc = name.encode(), zlib.crc32(content)
    header = _local_header(raw, offset, len(content), crc)
    return header + content, _central_entry(raw, offset, len(content), crc)


def _local_header(name: bytes, offset: int, size: int, crc: int) -> bytes:
    """Return the local header of a member at `offset`, with padding that aligns the data."""
    version, wide, short = 20, b"", size
    if size >= U32:
        version, wide, short = 45, struct.pack("<2H2Q", 1, 16, size, size), U32
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
    if size >= U32 or offset >= U32:
        wide = [size, size] if size >= U32 else []
        wide += [offset] if offset >= U32 else []
        version, extra = 45, struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide)
        size, offset = min(size, U32), min(offset, U32)
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
    """Return the zip64 end record, its locator and the end record.

    The directory has `size` bytes at `offset`, and `count` entries.
    """
    short = min(count, U16)
    return (
        END64.pack(b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, size, offset)
        + LOCATOR.pack(b"PK\x06\x07", 0, offset + size, 1)
        + END.pack(b"PK\x05\x06", 0, 0, short, short, min(size, U32), min(offset, U32), 0)
    )
