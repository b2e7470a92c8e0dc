"""What is kept beside a file while it is changed where it lies, to make it whole again after
whatever happens.

``.<name>.ckptkit-journal`` is complete and on the disk before the first byte of the file changes,
and goes when the last one has:

    ckptkit journal 1\\n
    {"inode", "before", "after": sizes, "breaks": [offset, length], "spans": [[offset, length before, after], ...]}\\n
    the bytes of `breaks`, then of each span those before and those after
    SHA-256 of all that

It says nothing of other files than the one beside it, and is used only on that one: the same inode,
in which every byte of a span is the one before, the one after, or one of a write that was cut
short.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ckptkit.core.errors import FormatError
from ckptkit.core.plan import Edit, Patch

SUFFIX = ".ckptkit-journal"
_MAGIC = b"ckptkit journal 1\n"
_BLOCK = 4096  # bytes compared at once
_LINE = 1 << 20  # bytes that the line of numbers may have
_DIGEST = 32
LARGEST = 512 << 20  # bytes of a journal: what needs more is written anew
HEAD = len(_MAGIC) + _LINE  # bytes in which that line ends
_NOT_WHOLE = "is no journal of an edit, or not whole"


def journal_path(path: str | os.PathLike[str]) -> str:
    """Where the journal of the file `path` is, if there is one; links are followed as for the
    file."""
    folder, name = os.path.split(os.path.realpath(path))
    return os.path.join(folder, f".{name}{SUFFIX}")


def file_of(journal: str) -> str:
    """The file that a journal is of."""
    folder, name = os.path.split(journal)
    return os.path.join(folder, name[1 : -len(SUFFIX)])


class Span(NamedTuple):
    """The bytes at `offset` before and after; fewer where the file ended, or will."""

    offset: int
    old: bytes
    new: bytes


class Journal(NamedTuple):
    """A change of one file: enough to undo it, and to know it when it is there."""

    inode: int
    before: int  # bytes of the file
    after: int
    breaks: Edit
    spans: tuple[Span, ...]

    def dump(self) -> bytes:
        """The bytes of a journal file."""
        import hashlib  # every command asks whether there is a journal, and few write or read one
        import json

        numbers = {
            "inode": self.inode,
            "before": self.before,
            "after": self.after,
            "breaks": [self.breaks.offset, len(self.breaks.data)],
            "spans": [[span.offset, len(span.old), len(span.new)] for span in self.spans],
        }
        texts = (data for span in self.spans for data in (span.old, span.new))
        data = b"".join((_MAGIC, json.dumps(numbers).encode(), b"\n", self.breaks.data, *texts))
        return data + hashlib.sha256(data).digest()

    def undo(self) -> tuple[list[Edit], list[Edit]]:
        """The edits that bring everything back but for what `breaks` had broken, and those that
        bring that back."""
        body, seal = [], []
        start, stop = self.breaks.offset, self.breaks.stop
        for offset, old, _ in self.spans:
            inside = max(start - offset, 0), max(stop - offset, 0)
            body += [Edit(offset, old[: inside[0]]), Edit(offset + inside[1], old[inside[1] :])]
            seal.append(Edit(offset + inside[0], old[inside[0] : inside[1]]))
        return [edit for edit in body if edit.data], [edit for edit in seal if edit.data]

    def state(self, size: int, found: Iterable[bytes]) -> str:
        """What the file holds, whose size is `size` and whose bytes at each span are `found`:
        ``before``, ``after``, ``between``, or ``else``: somebody else has written to it."""
        states = set()
        for span, now in zip(self.spans, found, strict=True):
            if now == span.new and now != span.old:
                states.add("after")
            elif now == span.old and now != span.new:
                states.add("before")
            elif now != span.new:
                states.add("between" if self._is_between(span, now) else "else")
        if "else" in states or not min(self.before, self.after) <= size <= max(
            self.before, self.after
        ):
            return "else"
        for state, expected in (("before", self.before), ("after", self.after)):
            if states <= {state} and size == expected:
                return state
        return "between"

    def _is_between(self, span: Span, now: bytes) -> bool:
        """Whether each byte is an old one, a new one, a broken one, or one that never reached the
        disk."""
        broken = bytearray(len(now))
        for place, byte in enumerate(self.breaks.data, self.breaks.offset - span.offset):
            if 0 <= place < len(broken):
                broken[place] = byte
        for at in range(0, len(now), _BLOCK):
            seen, *known = (
                data[at : at + _BLOCK] for data in (now, span.old, span.new, bytes(broken))
            )
            if seen not in known and any(
                byte and byte not in might for byte, might in _columns(seen, known)
            ):
                return False
        return True


def _columns(seen: bytes, known: list[bytes]) -> Iterator[tuple[int, list[int]]]:
    for place, byte in enumerate(seen):
        yield byte, [data[place] for data in known if place < len(data)]


def journal_of(patch: Patch, inode: int) -> Journal:
    """The journal of a patch that is about to be applied to the file with this inode."""
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

    What it says of itself must come to exactly that size: so much is known before all of it is
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
    """The journal in the bytes of a file. Raises FormatError for what is none, or not whole."""
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
    if (
        pieces.left or old > before or new > after or before > max(after, old)
    ):  # else bytes that nobody knows
        raise FormatError(_NOT_WHOLE)
    return Journal(inode, before, after, breaks, spans)


def _counts(values: list[object]) -> list[int]:
    """Numbers that places and lengths in a file can have. Raises ValueError."""
    found = [value for value in values if type(value) is int and 0 <= value < 1 << 63]
    if len(found) != len(values):
        raise ValueError("no place in a file")
    return found


class _Pieces:
    """Bytes taken from the front."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        """Bytes that nobody took; below zero where too many were asked for."""
        return len(self._data) - self._at

    def take(self, length: int) -> bytes:
        self._at += length
        return self._data[self._at - length : self._at]
