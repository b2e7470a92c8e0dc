"""Scan a damaged zip file for local headers and directory entries, each by itself.

The strict reader (:mod:`zip_reader`) refuses a file whose headers and directory disagree. Here
nothing has to agree: headers are searched for, and entries of the directory are read wherever the
end of the file still has some. Their fields are claims, which the caller compares with the bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ckptkit.core.bytesource import ByteSource
from ckptkit.core.limits import LIMITS
from ckptkit.formats.containers.zip_entries import DEFLATED, MAGIC

_LOCAL = struct.Struct("<4s2xHH4xLLLHH")
_CENTRAL = struct.Struct("<4s4xHH4xLLLHHHH2xB3xL")
_ENTRY, _DESCRIPTOR = b"PK\x01\x02", b"PK\x07\x08"
_DESCRIPTORS = (struct.Struct("<4sLLL"), struct.Struct("<4sLQQ"))
_DESCRIBED, _ENCRYPTED = 0x0008, 0x2041
_ZIP64 = 0x0001
_U32 = 0xFFFFFFFF
_SMALLEST, _STEP = 1 << 12, 1 << 20  # bytes of a read, while searching
_TAIL = 16 << 20  # bytes at the end of the file among which the directory is searched for
_REACH = 2 * LIMITS.name_bytes  # bytes of a header, its name and its extra fields


class Header(NamedTuple):
    """A local header. ``stored`` and ``crc`` are None where they are in a descriptor."""

    name: str
    offset: int
    start: int  # of the bytes
    method: int
    stored: int | None
    crc: int | None


class DirectoryEntry(NamedTuple):
    """A directory entry of a member."""

    name: str
    offset: int  # of the local header
    method: int
    stored: int
    size: int
    crc: int


class Window:
    """Forward reads of a source, in steps that grow from one to the next."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.base = 0
        self.data = b""
        self._step = _SMALLEST

    def seek(self, at: int) -> None:
        """Load the bytes from `at` on: a small piece after a jump, more when the search goes on."""
        stop = self.base + len(self.data)
        if self.base <= at and at + _LOCAL.size <= stop:
            return
        near = self.base <= at <= stop
        self._step = min(4 * self._step, _STEP) if near else _SMALLEST
        self.base = at
        self.data = self.source.read(at, min(self._step + _LOCAL.size, self.source.size - at))

    def read(self, at: int, length: int) -> bytes:
        """Return up to `length` bytes from `at`, fewer at the end of the file."""
        length = min(length, self.source.size - at)
        if length <= 0:
            return b""
        start = at - self.base
        if start >= 0 and start + length <= len(self.data):
            return self.data[start : start + length]
        return self.source.read(at, length)


def entries(source: ByteSource) -> dict[str, list[DirectoryEntry]]:
    """Return the directory entries that can be read at the end of the file, by name."""
    found: dict[str, list[DirectoryEntry]] = {}
    stop, count, step = source.size, 0, _SMALLEST
    while stop > 0 and (count or source.size - stop < _TAIL) and count < LIMITS.zip_entries:
        start = max(0, stop - step)
        step = min(2 * step, _STEP)
        piece = source.read(start, min(source.size, stop + min(step, _REACH)) - start)
        here = list(_entries(piece, stop - start))
        if count and not here:
            break
        for each in here:
            found.setdefault(each.name, []).append(each)
        count += len(here)
        stop = start
    return found


def _entries(piece: bytes, stop: int) -> Iterator[DirectoryEntry]:
    at = piece.find(_ENTRY)
    while 0 <= at < stop:
        if (entry := _entry(piece, at)) is not None:
            yield entry
        at = piece.find(_ENTRY, at + 1)


def _entry(data: bytes, at: int) -> DirectoryEntry | None:
    """Return the directory entry at `at`, None if there is no valid one."""
    if at + _CENTRAL.size > len(data):
        return None
    _, flags, method, crc, stored, size, n, x, _, disk, _, offset = _CENTRAL.unpack_from(data, at)
    name = _name(data[at + 46 : at + 46 + n], n)
    if name is None or method not in (0, DEFLATED) or flags & _ENCRYPTED or disk:
        return None
    extra = data[at + 46 + n : at + 46 + n + x]
    size, stored, offset = _widened(extra, size, stored, offset)
    return DirectoryEntry(name, offset, method, stored, size, crc)


def _name(raw: bytes, length: int) -> str | None:
    try:
        return raw.decode() if len(raw) == length and raw else None
    except UnicodeDecodeError:
        return None


def _widened(extra: bytes, *values: int) -> list[int]:
    """Replace those of `values` that do not fit 32 bits by the zip64 field's, where it has them."""
    wide: list[int] = []
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == _ZIP64:
            body = extra[at + 4 : at + 4 + length]
            wide = list(struct.unpack(f"<{len(body) // 8}Q", body[: len(body) // 8 * 8]))
        at += 4 + length
    return [wide.pop(0) if value == _U32 and wide else value for value in values]


def header_at(window: Window, at: int) -> Header | None:
    """Return the local header at `at`, None if there is no valid one."""
    fixed = window.read(at, _LOCAL.size)
    if len(fixed) < _LOCAL.size:
        return None
    magic, flags, method, crc, stored, size, n, x = _LOCAL.unpack(fixed)
    if magic != MAGIC or method not in (0, DEFLATED) or flags & _ENCRYPTED or n > LIMITS.name_bytes:
        return None
    name = _name(window.read(at + _LOCAL.size, n), n)
    if name is None:
        return None
    start = at + _LOCAL.size + n + x
    if flags & _DESCRIBED:
        return Header(name, at, start, method, None, None)
    if _U32 in (stored, size):
        size, stored = _widened(window.read(start - x, x), size, stored)
    return Header(name, at, start, method, stored, crc)


def headers(source: ByteSource, sizes: Mapping[str, int]) -> Iterator[Header]:
    """Yield local headers.

    Skip members' bytes where another header or the directory follows.

    `sizes` are the bytes of stored members that do not say so themselves.
    """
    window = Window(source)
    at = count = 0
    while at + _LOCAL.size <= source.size and count < LIMITS.zip_entries:
        window.seek(at)
        found = window.data.find(MAGIC, at - window.base)
        if found < 0:
            at = window.base + len(window.data) - len(MAGIC) + 1
            continue
        at = window.base + found
        header = header_at(window, at)
        if header is None:
            at += 1
            continue
        yield header
        count += 1
        at = _after(window, header, sizes)


def _after(window: Window, header: Header, sizes: Mapping[str, int]) -> int:
    """Return where to look for the next header."""
    size = sizes.get(header.name) if header.stored is None and header.method == 0 else header.stored
    if size is None:
        return header.start
    end = header.start + size
    return end if window.read(end, 2) == b"PK" else header.start


class Described(NamedTuple):
    """A data descriptor: the checksum, and whether its sizes are the expected ones."""

    crc: int
    fits: bool


def descriptor(window: Window, end: int, stored: int, size: int) -> Described | None:
    """Return the data descriptor at `end`, None if there is none.

    One cut after its checksum counts.
    """
    data = window.read(end, 24)
    if not data.startswith(_DESCRIPTOR) or len(data) < 8:
        return None
    sizes = (layout.unpack_from(data)[2:] for layout in _DESCRIPTORS if len(data) >= layout.size)
    return Described(int.from_bytes(data[4:8], "little"), (stored, size) in sizes)


def is_followed(window: Window, end: int) -> bool:
    """Return whether another member or the directory begins at `end`."""
    return window.read(end, 4) in (MAGIC, _ENTRY)
