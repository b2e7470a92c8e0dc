"""Refuses to write byte strings and texts that are files of their own, with calls in them.

Whoever gets them may load them, and `scan` reports them. The tracer is imported where there are
any.
"""

from __future__ import annotations

from ckptkit.core.bytesource import ByteSource, Memory, Range, Section
from ckptkit.core.errors import UnsafeGlobalError
from ckptkit.core.tree import Blob


def check_text(text: str) -> None:
    """Refuse a text that is a pickle, which Python 2 had as a byte string. Raises
    UnsafeGlobalError."""
    if text[-1:] == "." or text[:1] == "\x80":
        try:
            check_bytes(text.encode("latin-1"))
        except UnicodeEncodeError:
            pass


def check_blob(blob: Blob) -> None:
    """Refuse a long byte string that is a file with calls in it. Raises UnsafeGlobalError."""
    if isinstance(blob.extent, Range):  # else its bytes were computed here
        check_bytes(Section(*blob.extent))


def check_bytes(data: bytes | bytearray | ByteSource) -> None:
    """Refuse bytes that are a file with calls in it. Raises UnsafeGlobalError."""
    from ckptkit.scan.trace_symbols import looks_like_a_file

    source = data if isinstance(data, ByteSource) else Memory(bytes(data))
    if not looks_like_a_file(source.read(0, min(8, source.size))):
        return
    from ckptkit.pickles.streams import Program, Traced
    from ckptkit.scan.find import inside

    for seen in inside(source):
        unproved = isinstance(seen, Traced) and not seen.trace.is_proved
        if unproved or (isinstance(seen, Program) and seen.files):
            raise UnsafeGlobalError(
                "the file holds a byte string that is a file of its own, with calls that are not in the allowlist",
                hint="`ckptkit scan` says what is in it; `ckptkit extract` takes another part of the file",
            )
