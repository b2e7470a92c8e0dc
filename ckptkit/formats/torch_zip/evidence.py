"""Collect evidence for members of a damaged zip file: possible places of their bytes, checksums."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ckptkit import compute
from ckptkit.core.bytesource import ByteSource, Derived, Extent, Range
from ckptkit.core.checksum import crc32
from ckptkit.core.errors import CkptkitError
from ckptkit.core.limits import LIMITS
from ckptkit.formats.containers.zip_entries import DEFLATED
from ckptkit.formats.torch_zip.remains import (
    DirectoryEntry,
    Header,
    Window,
    descriptor,
    entries,
    header_at,
    headers,
    is_followed,
)

_TRIES = 4  # headers of one name that are looked at
_READS = 4  # times the bytes of the file that are read for checksums
_SMALL = 1 << 20  # bytes of a record that is read at once


class Place(NamedTuple):
    """Bytes that a member may have, and the CRCs expected for them."""

    extent: Extent
    end: int  # offset of what follows in the file
    promised: tuple[int, ...]
    framed: bool  # whether the file says that they begin and end exactly here


class Evidence:
    """The headers and directory entries of a damaged file, by name."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.window = Window(source)
        self.entries = entries(source)
        self.headers: dict[str, list[Header]] = {}
        self._budget = _READS * source.size

    def find_headers(self, sizes: dict[str, int]) -> None:
        """Search for every local header.

        `sizes` are the bytes of members that do not store them.
        """
        for header in headers(self.source, sizes):
            same = self.headers.setdefault(header.name, [])
            if len(same) < _TRIES:
                same.append(header)

    def first(self) -> Header | None:
        """Return the header with which the file begins."""
        return header_at(self.window, 0)

    @property
    def is_spent(self) -> bool:
        """True once so much was read for checksums that headers must overlap each other."""
        return self._budget < 0

    def places(self, name: str, size: int) -> Iterator[Place]:
        known = [entry for entry in self.entries.get(name, ()) if entry.size == size][:_TRIES]
        seen: set[int] = set()
        for header in (*map(self.header_of, known), *self.headers.get(name, ())):
            if header is not None and header.start not in seen:
                seen.add(header.start)
                for entry in known or (None,):
                    yield from self.place(header, entry, size)

    def header_of(self, entry: DirectoryEntry) -> Header | None:
        """Return the local header at the directory's offset.

        It is reconstructed if only its place and name are intact.
        """
        length = len(entry.name.encode())
        header = header_at(self.window, entry.offset)
        if header is not None:
            return header if header.name == entry.name else None
        fixed = self.window.read(entry.offset, 30)
        if len(fixed) < 30 or entry.method != 0:
            return None
        start = entry.offset + 30 + length + int.from_bytes(fixed[28:30], "little")
        return Header(entry.name, entry.offset, start, 0, None, None)

    def place(self, header: Header, entry: DirectoryEntry | None, size: int) -> Iterator[Place]:
        """Yield the bytes after a header, if the file has them."""
        stored = _stored(header, entry, size)
        if stored is None or header.start + stored > self.source.size:
            return
        extent: Extent = Range(self.source, header.start, stored)
        end = header.start + stored
        if header.method == DEFLATED:
            if size // max(1, stored) > LIMITS.inflate_ratio:
                return
            extent = Derived("inflate", (extent,), (), size)
        described = descriptor(self.window, end, stored, size) if header.crc is None else None
        framed = described.fits if described is not None else is_followed(self.window, end)
        yield Place(extent, end, _promised(header, entry, described and described.crc), framed)

    def crc32(self, extent: Extent) -> int | None:
        """Return the CRC-32 of bytes, None where they cannot be computed."""
        self._budget -= extent.length
        total = 0
        try:
            for piece in compute.stream(extent):
                total = crc32(piece, total)
        except CkptkitError:
            return None
        return total

    def small(self, name: str) -> bytes | None:
        """Return a small record that matches its checksum, None if there is none."""
        known = self.entries.get(name, ())
        for header in (*map(self.header_of, known), *self.headers.get(name, ())):
            for entry in known or (None,) if header is not None else ():
                assert header is not None
                size = header.stored if entry is None else entry.size
                if size is None or size > _SMALL or header.method != 0:
                    continue
                for place in self.place(header, entry, size):
                    if (
                        isinstance(place.extent, Range)
                        and self.crc32(place.extent) in place.promised
                    ):
                        return place.extent.read()
        return None


def _stored(header: Header, entry: DirectoryEntry | None, size: int) -> int | None:
    """Return the bytes that a member takes in the file, None if nothing says it."""
    if header.method == DEFLATED:
        return header.stored if entry is None else entry.stored
    return size if entry is not None or header.stored in (None, size) else None


def _promised(
    header: Header, entry: DirectoryEntry | None, described: int | None
) -> tuple[int, ...]:
    """Return the CRC of the directory, else that of the header or of the descriptor."""
    if entry is not None:
        return (entry.crc,)
    crc = header.crc if header.crc is not None else described
    return () if crc is None else (crc,)
