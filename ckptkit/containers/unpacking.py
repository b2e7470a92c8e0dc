"""Decompression up to a limit, with the methods of Python's standard library."""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable
from typing import NamedTuple, Protocol

from ckptkit.core.bytesource import ByteSource

_PIECE = 1 << 18

# The first bytes of compressed files that Python can read.
HEADS = {b"\x1f\x8b\x08": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz"}
# Weaker signs: many other files begin like this, such as a tensor of one small integer.
WEAK_HEADS = {
    b"\x5d\0\0": "xz",
    b"\x78\x01": "zlib",
    b"\x78\x5e": "zlib",
    b"\x78\x9c": "zlib",
    b"\x78\xda": "zlib",
}
# The first bytes of compressed files that Python cannot read.
CLOSED = {
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"Rar!\x1a\x07": "rar",
}


class _Machine(Protocol):
    """The common interface of the decompressors of zlib, bz2 and lzma."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = ..., /) -> bytes: ...


_MACHINES: dict[str, Callable[[], _Machine]] = {
    "deflate": lambda: zlib.decompressobj(-zlib.MAX_WBITS),
    "zlib": zlib.decompressobj,
    "gzip": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    "bzip2": bz2.BZ2Decompressor,
    "xz": lzma.LZMADecompressor,
}


class Unpacked(NamedTuple):
    """Decompressed bytes. ``failure`` says why more are missing; ``data`` is then the beginning."""

    data: bytes
    failure: str | None


def unpack(source: ByteSource, method: str, most: int) -> Unpacked:
    """Decompress up to `most` bytes of a source, all its streams if there are several."""
    pieces: list[bytes] = []
    left = most
    at = 0
    machine = _MACHINES[method]()
    try:
        while at < source.size:
            data = source.read(at, min(_PIECE, source.size - at))
            at += len(data)
            while data:
                piece = machine.decompress(data, left + 1)
                pieces.append(piece)
                left -= len(piece)
                if left < 0:
                    return Unpacked(
                        b"".join(pieces)[:most], f"inflates to more than {most:,} bytes"
                    )
                data = machine.unused_data if machine.eof else b""
                if machine.eof:
                    if method in ("deflate", "zlib") or not data.strip(b"\0"):
                        return Unpacked(b"".join(pieces), None)
                    machine = _MACHINES[method]()
    except (zlib.error, OSError, lzma.LZMAError, EOFError) as error:
        return Unpacked(b"".join(pieces), f"cannot be inflated ({method}): {error}")
    return Unpacked(b"".join(pieces), None if machine.eof else f"ends inside its {method} stream")
