"""Refuses to write byte strings and texts that are files of their own, with calls in them.

A program may load them, and `scan` reports them. The search for their content needs every format:
it is in the room scanning, above this one.
"""

from __future__ import annotations

from collections.abc import Iterable

from ckptkit.core import above
from ckptkit.core.bytesource import ByteSource, Memory, Range, Section
from ckptkit.core.errors import UnsafeGlobalError
from ckptkit.core.text import typed_value
from ckptkit.core.tree import ByteString, Node, StoredBytes
from ckptkit.pickles.streams import Program, Remark, Traced

# How files begin that may have pickles inside: pickles since protocol 2, zip, gzip, bzip2, xz,
# numpy.
_HEADS = (
    *(bytes((0x80, protocol)) for protocol in range(2, 6)),
    *(b"PK\3\4", b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x93NUMPY"),
)
# All opcodes: a pickle without a protocol may begin with any of them.
OPCODES = frozenset((*b"().012BCFGIJKLMNPQRSTUVX]abcdeghijlopqrstu}", *range(0x80, 0x99)))


def looks_like_a_file(head: bytes) -> bool:
    """Return whether bytes that begin so may be a pickle, or a file that has pickles inside."""
    return head.startswith(_HEADS) or looks_like_a_pickle(head)


def looks_like_a_pickle(head: bytes) -> bool:
    """Return whether bytes that begin so may be a pickle: of protocol 0 and 1 it has no
    signature."""
    return len(head) > 2 and head[0] in OPCODES


def holds_calls(value: Node) -> bool:
    """Return whether a byte string or a text is a file of its own with calls in it.

    A text may be a byte string of Python 2.
    """
    if isinstance(value, str):
        return (value[-1:] == "." or value[:1] == "\x80") and _text_holds_calls(value)
    if isinstance(value, (bytes, bytearray)):
        return _source_holds_calls(Memory(bytes(value)))
    if isinstance(value, ByteString):
        return _source_holds_calls(Memory(value.data))
    if isinstance(value, StoredBytes) and isinstance(value.extent, Range):  # else made here
        return _source_holds_calls(Section(*value.extent))
    return False


def check_no_calls(value: Node) -> None:
    """Refuse a byte string or text that is a file with calls in it. Raises UnsafeGlobalError."""
    if holds_calls(value):
        raise UnsafeGlobalError(
            "the file holds a byte string that is a file of its own, with calls that are not "
            "in the allowlist",
            hint="`ckptkit scan {where}` says what is in it; "
            f"{typed_value('objects', 'drop')} leaves it out",
        )


def _text_holds_calls(text: str) -> bool:
    try:
        return _source_holds_calls(Memory(text.encode("latin-1")))
    except UnicodeEncodeError:
        return False


def _source_holds_calls(source: ByteSource) -> bool:
    return looks_like_a_file(source.read(0, min(8, source.size))) and not _is_proved(source)


def _is_proved(source: ByteSource) -> bool:
    found: Iterable[Traced | Remark | Program] = above.call("inside", source)
    for seen in found:
        unproved = isinstance(seen, Traced) and not seen.trace.is_proved
        if unproved or (isinstance(seen, Program) and seen.files):
            return False
    return True
