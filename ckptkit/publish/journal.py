"""The journal of an edit in place, stored beside the file to restore it after an interruption.

``.<name>.ckptkit-journal`` is complete and on the disk before the first byte of the file changes,
and is removed after the last one has:

    ckptkit journal 1\\n
    {"inode", "before", "after": sizes, "breaks": [offset, length],
     "spans": [[offset, length before, after], ...]}\\n  (one line)
    the bytes of `breaks`, then of each span those before and those after
    SHA-256 of all that

It concerns only the file beside it, and is used only on that one: the same inode, in which every
byte of a span is the one before, the one after, or one of an interrupted write.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from ckptkit.core.errors import FormatError
from ckptkit.core.plan import Edit, Patch

_MAGIC = b"ckptkit journal 1\n"
_BLOCK = 4096  # bytes compared at once
_LINE = 1 << 20  # bytes of the line of numbers, at most
_DIGEST = 32
LARGEST = 512 << 20  # bytes of a journal; a file whose edit needs more is written anew
HEAD = len(_MAGIC) + _LINE  # bytes in which that line ends
_NOT_WHOLE = "is not a journal of an edit, or not whole"


class Span(NamedTuple):
    """The bytes at `offset` before and after; fewer where the file ended, or will end."""

    offset: int
    old: bytes
    new: bytes


class Journal(NamedTuple):
    """A change of one file: enough to undo it, and to recognize it in the file."""

    inode: int
    before: int  # bytes of the file
    after: int
    breaks: Edit
    spans: tuple[Span, ...]

    def dump(self) -> bytes:
        """Return the bytes of a journal file."""
        import hashlib  # every command looks for a journal, and few write or read one
        import json

        numbers = {
            "inode": self.inode,
            "before": self.before,
            "after": self.after,
            "breaks": [self.breaks.offset, len(self.breaks.data)],
            "spans": [[span.offset, len(span.old), len(span.new)] for span in self.spans],
        }
        bodies = chain.from_iterable((span.old, span.new) for span in self.spans)
        data = b"".join((_MAGIC, json.dumps(numbers).encode(), b"\n", self.breaks.data, *bodies))
        return data + hashlib.sha256(data).digest()

    def undo(self) -> tuple[list[Edit], list[Edit]]:
        """Return the edits that restore all but the part under `breaks`, and those for the rest."""
        body, seal = [], []
        start, stop = self.breaks.offset, self.breaks.stop
        for offset, old, _ in self.spans:
            inside = max(start - offset, 0), max(stop - offset, 0)
            body += [Edit(offset, old[: inside[0]]), Edit(offset + inside[1], old[inside[1] :])]
            seal.append(Edit(offset + inside[0], old[inside[0] : inside[1]]))
        return [edit for edit in body if edit.data], [edit for edit in seal if edit.data]

    def state(self, size: int, found: Iterable[bytes]) -> str:
        """Classify a file of `size` bytes whose bytes at each span are `found`.

        Returns ``before``, ``after``, ``between``, or ``else``: another program has written to it.
        """
        states = set()
        for span, now in zip(self.spans, found, strict=True):
            if now == span.new and now != span.old:
                states.add("after")
            elif now == span.old and now != span.new:
                states.add("before")
            elif now != span.new:
                states.add("between" if self._is_between(span, now) else "else")
        smallest, largest = sorted((self.before, self.after))
        if "else" in states or not smallest <= size <= largest:
            return "else"
        for state, expected in (("before", self.before), ("after", self.after)):
            if states <= {state} and size == expected:
                return state
        return "between"

    def _is_between(self, span: Span, now: bytes) -> bool:
        """Return whether each byte is an old, a new, a broken or an unwritten one."""
        broken = bytearray(len(now))
        for place, byte in enumerate(self.breaks.data, self.breaks.offset - span.offset):
            if 0 <= place < len(broken):
                broken[place] = byte
        for at in range(0, len(now), _BLOCK):
            block, *known = (
                data[at : at + _BLOCK] for data in (now, span.old, span.new, bytes(broken))
            )
            if block not in known and any(
                byte and byte not in possible for byte, possible in _columns(block, known)
            ):
                return False
        return True


def _columns(block: bytes, known: list[bytes]) -> Iterator[tuple[int, list[int]]]:
    for place, byte in enumerate(block):
        yield byte, [data[place] for data in known if place < len(data)]


def journal_of(patch: Patch, inode: int) -> Journal:
    """Return the journal of a patch that is about to be applied to the file with this inode."""
    assert patch.breaks is not None and patch.seal is not None
    base, edits = patch.base, sorted((*patch.edits, patch.seal))
    spans = [Span(edit.offset, _old(patch, edit.offset, edit.stop), edit.data) for edit in edits]
    if patch.size < base.size:
        spans.append(Span(patch.size, _old(patch, patch.size, base.size), b""))
    return Journal(inode, base.size, patch.size, patch.breaks, tuple(spans))


def _old(patch: Patch, start: int, stop: int) -> bytes:
    start, stop = min(start, patch.base.size), min(stop, patch.base.size)
    return patch.base.read(start, stop - start)


def check_head(data: bytes, size: int) -> None:
    """Raise FormatError unless a file of `size` bytes that begins with `data` can be a journal.

    The sizes in its header must add up to exactly that size: this is checked before all of it is
    read.
    """
    import json

    end = data.find(b"\n", len(_MAGIC), len(_MAGIC) + _LINE)
    if not data.startswith(_MAGIC) or end < 0:
        raise FormatError(_NOT_WHOLE)
    try:
        numbers = json.loads(data[len(_MAGIC) : end])
        lengths = [_counts(numbers["breaks"])[1]]
        for row in numbers["spans"]:
            _, old, new = _counts(row)
            lengths += [old, new]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FormatError(_NOT_WHOLE) from error
    if end + 1 + sum(lengths) + _DIGEST != size or size > LARGEST:
        raise FormatError(_NOT_WHOLE)


def parse(data: bytes) -> Journal:
    """Parse the bytes of a journal file. Raises FormatError if it is not one, or incomplete."""
    import hashlib
    import json

    end = data.find(b"\n", len(_MAGIC), len(_MAGIC) + _LINE)
    if not data.startswith(_MAGIC) or end < 0 or hashlib.sha256(data[:-32]).digest() != data[-32:]:
        raise FormatError(_NOT_WHOLE)
    pieces = _Pieces(data[end + 1 : -32])
    try:
        numbers = json.loads(data[len(_MAGIC) : end])
        place, length = _counts(numbers["breaks"])
        breaks = Edit(place, pieces.take(length))
        rows = map(_counts, numbers["spans"])
        spans = tuple(Span(offset, pieces.take(old), pieces.take(new)) for offset, old, new in rows)
        before, after = _counts([numbers["before"], numbers["after"]])
        inode = numbers["inode"]
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise FormatError(_NOT_WHOLE) from error
    old = max((span.offset + len(span.old) for span in spans if span.old), default=0)
    new = max((span.offset + len(span.new) for span in spans if span.new), default=0)
    # Otherwise some of the old bytes would be unknown.
    if pieces.left or old > before or new > after or before > max(after, old):
        raise FormatError(_NOT_WHOLE)
    return Journal(inode, before, after, breaks, spans)


def _counts(values: list[object]) -> list[int]:
    """Return numbers that can be offsets and lengths in a file. Raises ValueError for others."""
    found = [value for value in values if type(value) is int and 0 <= value < 1 << 63]
    if len(found) != len(values):
        raise ValueError("not an offset or length in a file")
    return found


class _Pieces:
    """Bytes consumed from the front."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes not consumed; negative where too many were."""
        return len(self._data) - self._at

    def take(self, length: int) -> bytes:
        self._at += length
        return self._data[self._at - length : self._at]
