"""Edit a file in place, crash-safely: valid before and after, detectably invalid in between.

    lock; journal beside the file, on the disk; invalidate it; write the edits; set the size;
    seal it; remove the journal

with an fsync after each step. Whatever interrupts this, the journal exists as long as the file is
not whole, and the next command that opens the file restores it.

Processes that have the file open or mapped see the change. So a file with several hard links is
never edited in place.

The journal, ``.<name>.ckptkit-journal`` beside the file, is complete and on the disk before the
first byte of the file changes, and is removed after the last one has:

    ckptkit journal 1\n
    {"inode", "before", "after": sizes, "breaks": [offset, length],
     "spans": [[offset, length before, after], ...]}\n  (one line)
    the bytes of `breaks`, then of each span those before and those after
    SHA-256 of all that

It concerns only the file beside it, and is used only on that one: the same inode, in which every
byte of a span is the one before, the one after, or one of an interrupted write.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import chain
from typing import Any, NamedTuple

from ckptkit.core.bytesource import JOURNAL, LocalFile, file_of, identity_of, journal_path
from ckptkit.core.errors import (
    CkptkitError,
    FormatError,
    InputChangedError,
    InputError,
    OutputError,
    VerifyError,
)
from ckptkit.core.options import DEFAULT, Options
from ckptkit.core.plan import Edit, Patch
from ckptkit.core.text import shell_word
from ckptkit.publish.copying import write_all
from ckptkit.publish.preflight import check_space
from ckptkit.publish.publish import (
    NAME_MAX,
    Published,
    new_file,
    reported,
    sweep,
    sync_folder,
    temporary_name,
)

try:
    import fcntl
except ImportError:  # Windows, where files are written anew instead
    fcntl = None  # type: ignore[assignment]

_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_BUSY = "is being changed in place by another process"
_AGAIN = "run the command again when it is done"
_INTERRUPTED = "an edit in place was interrupted"


def fits(patch: Patch) -> bool:
    """Return whether the journal of a patch is not too large to be read back."""
    return 2 * patch.written + (1 << 20) <= LARGEST


def can_patch(path: str) -> bool:
    """Return whether the file can be edited in place.

    It must be a writable regular file, not a symbolic link, with one hard link.
    """
    info = os.lstat(path)
    journal = journal_path(path)
    own = (
        stat.S_ISREG(info.st_mode)
        and info.st_nlink == 1
        and len(os.fsencode(os.path.basename(journal))) <= NAME_MAX
    )
    return (
        fcntl is not None
        and own
        and os.access(path, os.W_OK)
        and os.access(os.path.dirname(journal), os.W_OK)
    )


def apply(patch: Patch, options: Options = DEFAULT, **changes: Any) -> Published:
    """Apply `patch` to its file, with `options` or others named in `changes`.

    ``verify`` reads back the written bytes. ``progress`` is called at the end. ``dry_run`` makes
    the checks that come before writing. Raises InputChangedError if it is no longer the file that
    was read, OutputError, VerifyError with the file as it was.
    """
    base, options = patch.base, options.changed(changes)
    if patch.seal is not None:
        with reported(base.path, base.name, patch.written):
            _apply(patch, options.verify, options.dry_run)
    if options.progress is not None and not options.dry_run:
        options.progress(patch.written, patch.written)
    return Published(base.path, patch.size, 1)


def _apply(patch: Patch, verify: bool, dry_run: bool) -> None:
    path = patch.base.path
    with _locked(path, patch.base.name) as fd:
        if identity_of(os.fstat(fd)) != patch.base.identity or os.path.lexists(journal_path(path)):
            raise InputChangedError(
                "changed since it was read", where=patch.base.name, hint="run the command again"
            )
        journal = journal_of(patch, os.fstat(fd).st_ino)
        data = journal.dump()
        check_space(path, len(data) + max(0, patch.size - patch.base.size))
        if dry_run:
            return
        sweep(path)
        _keep(data, journal_path(path))
        try:
            assert patch.breaks is not None and patch.seal is not None
            _rewrite(fd, patch.breaks, patch.edits, patch.size, (patch.seal,))
            if verify:
                _compare(fd, patch)
        except BaseException:
            _undo(fd, journal)
            _remove(journal_path(path))
            raise
        _remove(journal_path(path))


@contextmanager
def _locked(path: str, name: str, access: int = os.O_RDWR) -> Iterator[int]:
    """Open the file under an advisory lock: exclusive for writing, shared for reading."""
    fd = os.open(path, access | _FLAGS)
    try:
        try:
            if fcntl is not None:
                how = fcntl.LOCK_EX if access == os.O_RDWR else fcntl.LOCK_SH
                fcntl.flock(fd, how | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(_BUSY, where=name, hint=_AGAIN) from error
        yield fd
    finally:
        os.close(fd)


def _keep(data: bytes, path: str) -> None:
    """Write the journal beside the file: complete, and on the disk with its name."""
    temporary = temporary_name(path)
    try:
        fd = new_file(temporary)
        try:
            os.fchmod(fd, 0o600)
            write_all(fd, data)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
        sync_folder(os.path.dirname(path))
    except BaseException:
        for each in (temporary, path):  # under the lock the journal can only be this one
            with suppress(OSError):
                os.unlink(each)
        raise


def _remove(journal: str) -> None:
    os.unlink(journal)
    sync_folder(os.path.dirname(journal))


def _rewrite(fd: int, breaks: Edit, edits: Iterable[Edit], size: int, seal: Iterable[Edit]) -> None:
    """Invalidate the file, change it, and make it whole."""
    _write(fd, (breaks,))
    _write(fd, edits, size)
    _write(fd, seal)


def _write(fd: int, edits: Iterable[Edit], size: int | None = None) -> None:
    for edit in edits:
        os.lseek(fd, edit.offset, os.SEEK_SET)
        write_all(fd, edit.data)
    if size is not None:
        os.ftruncate(fd, size)
    os.fsync(fd)


def _compare(fd: int, patch: Patch) -> None:
    assert patch.seal is not None
    for edit in (*patch.edits, patch.seal):
        if _read(fd, edit.offset, len(edit.data)) != edit.data:
            raise VerifyError(
                f"was not written as planned, at byte {edit.offset:,} or after",
                where=patch.base.name,
            )


def _read(fd: int, offset: int, length: int) -> bytes:
    """Return the bytes at `offset`, as many as the file has."""
    os.lseek(fd, offset, os.SEEK_SET)
    found = b""
    while more := os.read(fd, length - len(found)):
        found += more
    return found


def _undo(fd: int, journal: Journal) -> None:
    edits, seal = journal.undo()
    _rewrite(fd, journal.breaks, edits, journal.before, seal)


def journals_of(path: str) -> Iterator[tuple[str, str]]:
    """Yield the journals at `path`, a file or a folder of files, each with its file."""
    if os.path.isdir(path):
        journals = [os.path.join(path, name) for name in os.listdir(path) if name.endswith(JOURNAL)]
    else:
        journals = [journal_path(path)]
    for journal in journals:
        file = file_of(journal)
        if os.path.lexists(journal) and os.path.isfile(file):
            yield journal, file


def look(path: str) -> None:
    """Raise InputError if a file at `path`, a file or a folder of files, is left half-edited.

    Changes nothing, so that commands that only read do not write.
    """
    for journal, file in journals_of(path):
        try:
            _look(journal, file)
        except CkptkitError:
            raise
        except OSError as error:
            raise InputError(f"{_INTERRUPTED}: {error.strerror}", where=file) from error


def _look(journal: str, file: str) -> None:
    with _locked(file, file, os.O_RDONLY) as fd:
        if not os.path.lexists(journal):
            return
        if _state(_trusted(journal, file, fd), journal, file, fd) == "between":
            hint = f"`ckptkit recover --in-place {shell_word(file)}` puts it back as it was"
            raise InputError(_INTERRUPTED, where=file, hint=hint)


def _state(known: Journal, journal: str, file: str, fd: int) -> str:
    """Return the state of the file by its journal.

    Raises InputError if another program has written to the file.
    """
    state = known.state(
        os.fstat(fd).st_size,
        (_read(fd, s.offset, max(len(s.old), len(s.new))) for s in known.spans),
    )
    if state == "else":
        raise _foreign(journal, file, "another program has written to it since")
    return state


def undo_interrupted(path: str) -> None:
    """Recover the files of interrupted edits in place at `path`, a file or a folder of files.

    Each file is restored to what it was, unless only the removal of the journal was missing. Raises
    InputError if the edit is still under way, or if the journal does not match the file;
    OutputError where the file cannot be written.
    """
    for journal, file in journals_of(path):
        try:
            _undo_interrupted(journal, file)
        except CkptkitError:
            raise
        except OSError as error:
            raise OutputError(
                f"{_INTERRUPTED}, and cannot be undone: {error.strerror}", where=file
            ) from error


def _undo_interrupted(journal: str, file: str) -> None:
    with _locked(file, file) as fd:
        if not os.path.lexists(journal):
            return  # the edit was finished in the meantime
        known = _trusted(journal, file, fd)
        if _state(known, journal, file, fd) == "between":
            _undo(fd, known)
        _remove(journal)


def _trusted(journal: str, file: str, fd: int) -> Journal:
    """Return the journal, if it is of this very file."""
    info = os.fstat(fd)
    with closing(LocalFile(journal, follow=False)) as source:
        if hasattr(os, "geteuid") and os.fstat(source.fd).st_uid not in (os.geteuid(), info.st_uid):
            raise _foreign(journal, file, "it is neither yours nor of the file's owner")
        try:
            check_head(source.read(0, min(HEAD, source.size)), source.size)
            known = parse(source.read(0, source.size))
        except CkptkitError as error:
            raise _foreign(journal, file, error.message) from error
    if known.inode != info.st_ino:
        raise _foreign(journal, file, "it is of another file of that name")
    return known


def _foreign(journal: str, file: str, why: str) -> InputError:
    return InputError(
        f"an edit in place was interrupted, and {os.path.basename(journal)} cannot undo it: {why}",
        where=file,
        hint=f"if the file is as it should be: rm {shell_word(journal)}",
    )


# The journal


_MAGIC = b"ckptkit journal 1\n"
_BLOCK = 4096  # bytes compared at once
_LINE = 1 << 20  # bytes of the line of numbers, at most
_DIGEST = 32
LARGEST = 512 << 20  # bytes of a journal; a file whose edit needs more is written anew
HEAD = len(_MAGIC) + _LINE  # bytes in which that line ends
_NOT_WHOLE = "is not a journal of an edit, or not whole"


class JournalSpan(NamedTuple):
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
    spans: tuple[JournalSpan, ...]

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

    def _is_between(self, span: JournalSpan, now: bytes) -> bool:
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
                byte and byte not in [data[place] for data in known if place < len(data)]
                for place, byte in enumerate(block)
            ):
                return False
        return True


def journal_of(patch: Patch, inode: int) -> Journal:
    """Return the journal of a patch that is about to be applied to the file with this inode."""
    assert patch.breaks is not None and patch.seal is not None
    base, edits = patch.base, sorted((*patch.edits, patch.seal))
    spans = [
        JournalSpan(edit.offset, _old(patch, edit.offset, edit.stop), edit.data) for edit in edits
    ]
    if patch.size < base.size:
        spans.append(JournalSpan(patch.size, _old(patch, patch.size, base.size), b""))
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
        spans = tuple(
            JournalSpan(offset, pieces.take(old), pieces.take(new)) for offset, old, new in rows
        )
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
