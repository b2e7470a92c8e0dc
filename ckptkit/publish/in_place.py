"""Edit a file in place, crash-safely. ckptkit detects and restores half-edited files.

The steps of an edit are:

1. Lock the file.
2. Write the journal beside the file.
3. Write `breaks`, which makes the file invalid.
4. Write the edits, and set the size of the file.
5. Write the seal, which makes the file valid again.
6. Remove the journal.

After each step, the changes are flushed to disk. As long as the file is invalid, the journal
exists. If the edit is interrupted, the next command that opens the file detects the journal. After
an interrupted edit, the command `recover` restores the file.

A process that has opened or mapped the file sees the changed bytes. ckptkit does not edit a file in
place if the file has several hard links.

The journal, ``.<name>.ckptkit-journal`` beside the file, is complete and on disk before the first
byte of the file changes. The journal is removed after the last byte has changed. A journal contains
these parts, in this order:

* The line ``ckptkit journal 1``.
* A line with a JSON dict, whose entries are listed below.
* The bytes that `breaks` writes.
* The old bytes and the new bytes of each span.
* The SHA-256 (32 bytes) of all preceding bytes.

A span is a range of the file that the edit changes. The entries of the JSON dict are:

* ``inode`` is the inode of the file.
* ``before`` and ``after`` are the sizes of the file before and after the edit.
* ``breaks`` is [offset, length].
* ``spans`` is a list of [offset, length of the old bytes, length of the new bytes].
* ``group`` is a list of file names, which is empty if only one file is edited.
* ``then`` is [path, text], or null.

If the bytes of a span are scattered, its entry in `spans` has four numbers. The second number is
the size in bytes of a list with the positions of the scattered bytes. In the journal, this list of
positions precedes the old and new bytes of the span.

If several files of a folder are edited together, `group` lists all these files in each journal. All
journals exist before the first file changes. No journal is removed before all files have changed.
The small file `then` is written after all files have changed. If an edit was interrupted before the
file `then` was written, `recover` writes the file `then`.

A journal belongs to a file if the name of the journal contains the name of the file, and the JSON
dict contains the inode of the file. `recover` restores a file only if each byte in a span is the
old byte, the new byte, or a byte of an interrupted write.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from io import BytesIO
from itertools import chain
from typing import NamedTuple

from ckptkit.compute.lazy import np
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
except ImportError:  # on Windows, ckptkit rewrites files instead
    fcntl = None  # type: ignore[assignment]

_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0)
_BUSY = "is being edited in place by another process"
_AGAIN = "run the command again when the other process has finished"
_INTERRUPTED = "an edit in place was interrupted"


def fits(patch: Patch) -> bool:
    """Return True if the journal of a patch is below the size limit."""
    return 2 * patch.written + (1 << 20) <= LARGEST


def can_patch(path: str) -> bool:
    """Return True if the file can be edited in place.

    The file must be a writable regular file with one hard link. Symbolic links are not edited.
    """
    info = os.lstat(path)
    folder, journal = os.path.split(journal_path(path))
    is_own = stat.S_ISREG(info.st_mode) and info.st_nlink == 1 and fcntl is not None
    can_write = os.access(path, os.W_OK) and os.access(folder, os.W_OK)
    return is_own and can_write and len(os.fsencode(journal)) <= NAME_MAX


def apply_all(
    patches: Sequence[Patch], options: Options = DEFAULT, then: tuple[str, str] | None = None
) -> Published:
    """Apply patches to one file, or to several files of a folder.

    If the edit is interrupted, `recover` undoes all patches. `then` is the path and content of a
    small file in the folder. The file `then` is written after all patches are applied.

    With ``verify``, the written bytes are read again and compared. ``progress`` is called once at
    the end. With ``dry_run``, `apply_all` only makes the checks and writes nothing. Raises
    InputChangedError if a file changed after it was read. `apply_all` raises OutputError if a write
    fails, and VerifyError if ``verify`` finds a wrong byte. After such an error, the files have
    their old bytes.
    """
    bases = [patch.base for patch in patches]
    group = tuple(os.path.basename(base.path) for base in bases) if len(bases) > 1 else ()
    written = sum(patch.written for patch in patches)
    with ExitStack() as stack:
        ready: list[_Ready] = []
        for patch in patches:
            if patch.breaks is None or patch.seal is None:
                continue
            base, journal = patch.base, journal_path(patch.base.path)
            stack.enter_context(reported(base.path, base.name, patch.written))
            fd = stack.enter_context(_locked(base.path, base.name))
            if identity_of(os.fstat(fd)) != base.identity or os.path.lexists(journal):
                hint = "run the command again"
                raise InputChangedError("changed since it was read", where=base.name, hint=hint)
            known = journal_of(patch, os.fstat(fd).st_ino, group, then)
            held = sum(sum(span.row()[1:]) for span in known.spans)
            check_space(base.path, held + max(0, patch.size - base.size))
            ready.append(_Ready(patch, fd, known, journal))
        if not options.dry_run:
            _change(ready, options.verify)
    if options.progress is not None and not options.dry_run:
        options.progress(written, written)
    place = os.path.dirname(bases[0].path) if group else bases[0].path
    return Published(place, sum(patch.size for patch in patches), len(patches))


class _Ready(NamedTuple):
    """A patch with its journal. The file of the patch is locked and unchanged since it was read."""

    patch: Patch
    fd: int
    known: Journal
    journal: str  # path of the journal


def _change(ready: Sequence[_Ready], verify: bool) -> None:
    """Write all journals, change all files, write the file `then`, and remove the journals."""
    kept: list[_Ready] = []
    try:
        for each in ready:
            sweep(each.patch.base.path)
            _keep(each.known.pieces(), each.journal)
            kept.append(each)
        for patch, fd, known, _ in ready:
            assert patch.seal is not None
            _rewrite(fd, known.breaks, patch.edits, patch.size, (patch.seal,))
            for edit in (*patch.edits, patch.seal) if verify else ():
                if _at(fd, edit.offset, len(edit.data), edit.places) != edit.data:
                    why = f"differs from the plan at byte {edit.offset:,} or a later byte"
                    raise VerifyError(why, where=patch.base.name)
        if ready:
            _write_beside(ready[0].patch.base.path, ready[0].known.then)
    except BaseException:
        # A file can have changed only if all journals were written.
        for each in kept if len(kept) == len(ready) else ():
            _undo(each.fd, each.known)
        for each in kept:
            _remove(each.journal)
        raise
    for each in ready:
        _remove(each.journal)


def _write_beside(file: str, then: tuple[str, str] | None) -> None:
    """Write the small file `then` in the folder of `file`, atomically."""
    if then is not None:
        path = os.path.join(os.path.dirname(file), then[0])
        os.makedirs(os.path.dirname(path), exist_ok=True)
        _keep([then[1].encode()], path)


@contextmanager
def _locked(path: str, name: str, access: int = os.O_RDWR) -> Iterator[int]:
    """Open a file with an advisory lock. The lock is exclusive for writing, and shared for
    reading."""
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


def _keep(pieces: Iterable[bytes], path: str) -> None:
    """Write a file atomically. Flush the file and the folder entry of the file to disk."""
    temporary = temporary_name(path)
    try:
        fd = new_file(temporary)
        try:
            os.fchmod(fd, 0o600)
            for piece in filter(None, pieces):
                write_all(fd, piece)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
        sync_folder(os.path.dirname(path))
    except BaseException:
        for each in (temporary, path):  # no other process wrote these files, because of the lock
            with suppress(OSError):
                os.unlink(each)
        raise


def _remove(journal: str) -> None:
    os.unlink(journal)
    sync_folder(os.path.dirname(journal))


def _rewrite(fd: int, breaks: Edit, edits: Iterable[Edit], size: int, seal: Iterable[Edit]) -> None:
    """Invalidate the file, change the file, and make it valid again."""
    _write(fd, (breaks,))
    _write(fd, edits, size)
    _write(fd, seal)


def _write(fd: int, edits: Iterable[Edit], size: int | None = None) -> None:
    for edit in edits:
        data = edit.data
        if edit.places:
            data = _scattered(_read(fd, edit.offset, edit.stop - edit.offset), edit)
        os.lseek(fd, edit.offset, os.SEEK_SET)
        write_all(fd, data)
    if size is not None:
        os.ftruncate(fd, size)
    os.fsync(fd)


def _read(fd: int, offset: int, length: int) -> bytes:
    """Return `length` bytes at `offset`. At the end of the file, return fewer bytes."""
    os.lseek(fd, offset, os.SEEK_SET)
    found = b""
    while more := os.read(fd, length - len(found)):
        found += more
    return found


def _scattered(old: bytes, edit: Edit) -> bytes:
    """Return a copy of `old` that has the bytes of a scattered edit at the edit's positions."""
    made = np.frombuffer(old, np.uint8).copy()
    made[np.frombuffer(edit.places, "<u4")] = np.frombuffer(edit.data, np.uint8)
    return made.tobytes()


def _at(fd: int, offset: int, length: int, places: bytes = b"") -> bytes:
    """Return `length` bytes at `offset`. With `places`, return the byte at each of these positions,
    which are relative to `offset`. At the end of the file, return fewer bytes."""
    if not places:
        return _read(fd, offset, length)
    found = np.frombuffer(_read(fd, offset, int.from_bytes(places[-4:], "little") + 1), np.uint8)
    wanted = np.frombuffer(places, "<u4")
    held: bytes = found[wanted[wanted < len(found)]].tobytes()
    return held


def _undo(fd: int, journal: Journal) -> None:
    edits, seal = journal.undo()
    _rewrite(fd, journal.breaks, edits, journal.before, seal)


def journals_of(path: str) -> Iterator[tuple[str, str]]:
    """Yield (journal, file) for each journal of the file `path`, or in the folder `path`."""
    journals = [journal_path(path)]
    if os.path.isdir(path):
        journals = [os.path.join(path, name) for name in os.listdir(path) if name.endswith(JOURNAL)]
    for journal in journals:
        file = file_of(journal)
        if os.path.lexists(journal) and os.path.isfile(file):
            yield journal, file


def check_journals(path: str, undo: bool = False) -> None:
    """Check the file `path`, or the files in the folder `path`, for interrupted edits in place.

    If `undo` is false, raises InputError for half-edited files and changes nothing. If `undo` is
    true, restores half-edited files. If `undo` is true and an edit is complete, only removes the
    journal of the edit.

    Raises OutputError if a file cannot be restored. Raises InputError if an edit is in progress, or
    if a journal does not match its file.
    """
    for journal, file in journals_of(path):
        try:
            with ExitStack() as stack:
                _check_group(journal, file, undo, stack)
        except CkptkitError:
            raise
        except OSError as error:
            if undo:
                why = f"{_INTERRUPTED}, and cannot be undone: {error.strerror}"
                raise OutputError(why, where=file) from error
            raise InputError(f"{_INTERRUPTED}: {error.strerror}", where=file) from error


def _check_group(journal: str, file: str, undo: bool, stack: ExitStack) -> None:
    """Check a journal and the journals of all files in its group."""
    members: list[tuple[str, int, Journal]] = []
    states = set()
    waiting = [file]
    while waiting:
        each = waiting.pop(0)
        place = journal_path(each)
        if not os.path.lexists(place) or not os.path.isfile(each):
            continue  # the edit has just finished, or never started
        fd = stack.enter_context(_locked(each, each, os.O_RDWR if undo else os.O_RDONLY))
        if not os.path.lexists(place):
            continue
        known = _trusted(place, each, fd)
        if not members:
            others = (os.path.join(os.path.dirname(file), name) for name in known.group)
            waiting += [other for other in others if other != file]
        found = (_at(fd, s.offset, max(len(s.old), len(s.new)), s.places) for s in known.spans)
        state = known.state(os.fstat(fd).st_size, found)
        if state == "else":
            raise _foreign(place, each, "another program has written to the file after the edit")
        states.add(state)
        members.append((place, fd, known))
    is_half = len(states) > 1 or "between" in states
    if is_half and not undo:
        hint = f"`ckptkit recover --in-place {shell_word(file)}` restores the file"
        raise InputError(_INTERRUPTED, where=file, hint=hint)
    for _, fd, known in members if is_half else ():
        _undo(fd, known)
    if undo and states == {"after"}:
        _write_beside(file, members[0][2].then)
    for place, _, _ in members if undo else ():
        _remove(place)


def _trusted(journal: str, file: str, fd: int) -> Journal:
    """Read a journal. Raises InputError if the journal does not belong to the file."""
    info = os.fstat(fd)
    with closing(LocalFile(journal, follow=False)) as source:
        if hasattr(os, "geteuid") and os.fstat(source.fd).st_uid not in (os.geteuid(), info.st_uid):
            raise _foreign(journal, file, "another user owns the journal")
        try:
            _header(source.read(0, min(HEAD, source.size)), source.size)
            known = parse(source.read(0, source.size))
        except CkptkitError as error:
            raise _foreign(journal, file, error.message) from error
    if known.inode != info.st_ino:
        raise _foreign(journal, file, "the journal belongs to another file of the same name")
    return known


def _foreign(journal: str, file: str, why: str) -> InputError:
    return InputError(
        f"an edit in place was interrupted, and {os.path.basename(journal)} cannot undo it: {why}",
        where=file,
        hint=f"if the file is correct, remove the journal: rm {shell_word(journal)}",
    )


# The journal


_MAGIC = b"ckptkit journal 1\n"
_BLOCK = 4096  # number of bytes to compare at once
_LINE = 1 << 20  # maximum bytes of the JSON line
_DIGEST = 32
HEAD = len(_MAGIC) + _LINE  # maximum number of bytes of the journal's first two lines
LARGEST = 512 << 20  # maximum bytes of a journal
_NOT_WHOLE = "the journal is invalid or incomplete"


class JournalSpan(NamedTuple):
    """The bytes at `offset` before and after the edit.

    If the file grows or shrinks, ``old`` and ``new`` can have different lengths. If the bytes are
    scattered, ``places`` contains the position of each byte, relative to `offset`, as in `Edit`.
    Otherwise, ``places`` is empty.
    """

    offset: int
    old: bytes
    new: bytes
    places: bytes = b""

    def row(self) -> list[int]:
        """Return the numbers that represent the span in the JSON line of the journal."""
        places = [len(self.places)] if self.places else []
        return [self.offset, *places, len(self.old), len(self.new)]

    def stop(self, data: bytes) -> int:
        """Return the offset after the last byte of `data` in the file. `data` is ``old`` or
        ``new``."""
        return Edit(self.offset, data, self.places).stop


class Journal(NamedTuple):
    """The content of a journal: the bytes of a file before and after an edit."""

    inode: int
    before: int  # size in bytes before the edit
    after: int
    breaks: Edit
    spans: tuple[JournalSpan, ...]
    group: tuple[str, ...] = ()  # names of files that are edited together
    then: tuple[str, str] | None = None

    def dump(self) -> bytes:
        """Return the bytes of a journal file."""
        return b"".join(self.pieces())

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes of a journal file in several buffers. The bytes of the spans are not
        copied."""
        import hashlib  # imported late, because few commands write journals
        import json

        numbers = {
            "inode": self.inode,
            "before": self.before,
            "after": self.after,
            "breaks": [self.breaks.offset, len(self.breaks.data)],
            "spans": [span.row() for span in self.spans],
            "group": self.group,
            "then": self.then,
        }
        bodies = chain.from_iterable((span.places, span.old, span.new) for span in self.spans)
        total = hashlib.sha256()
        for piece in (_MAGIC, json.dumps(numbers).encode() + b"\n", self.breaks.data, *bodies):
            total.update(piece)
            yield piece
        yield total.digest()

    def undo(self) -> tuple[list[Edit], list[Edit]]:
        """Return two lists of edits. The first list restores all bytes outside `breaks`. The second
        list restores the bytes of `breaks`."""
        body, seal = [], []
        start, stop = self.breaks.offset, self.breaks.stop
        for offset, old, _, places in self.spans:
            if places:
                body.append(Edit(offset, old, places))
                continue
            inside = max(start - offset, 0), max(stop - offset, 0)
            body += [Edit(offset, old[: inside[0]]), Edit(offset + inside[1], old[inside[1] :])]
            seal.append(Edit(offset + inside[0], old[inside[0] : inside[1]]))
        return [edit for edit in body if edit.data], [edit for edit in seal if edit.data]

    def state(self, size: int, found: Iterable[bytes]) -> str:
        """Return the state of a file of `size` bytes. `found` yields the bytes of the file at each
        span.

        * ``before``: the edit has changed no bytes.
        * ``after``: the edit is complete.
        * ``between``: the edit was interrupted.
        * ``else``: another program wrote to the file.
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
        """Return True if each byte is an old byte, a new byte, a byte of `breaks`, or 0 (not
        written)."""
        broken = bytearray(len(now))
        broken_at = self.breaks.offset - span.offset
        for place, byte in enumerate(() if span.places else self.breaks.data, broken_at):
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


def journal_of(
    patch: Patch, inode: int, group: tuple[str, ...] = (), then: tuple[str, str] | None = None
) -> Journal:
    """Return the journal for a patch. `inode` is the inode of the file."""
    assert patch.breaks is not None and patch.seal is not None
    base, edits = patch.base, sorted((*patch.edits, patch.seal))
    spans = [JournalSpan(edit.offset, _old(patch, edit), edit.data, edit.places) for edit in edits]
    if patch.size < base.size:
        cut = Edit(patch.size, bytes(base.size - patch.size))
        spans.append(JournalSpan(patch.size, _old(patch, cut), b""))
    return Journal(inode, base.size, patch.size, patch.breaks, tuple(spans), group, then)


def _old(patch: Patch, edit: Edit) -> bytes:
    if edit.places:
        return _at(patch.base.fd, edit.offset, len(edit.data), edit.places)
    start, stop = min(edit.offset, patch.base.size), min(edit.stop, patch.base.size)
    return patch.base.read(start, stop - start)


def parse(data: bytes) -> Journal:
    """Parse the bytes of a journal file. Raises FormatError for an invalid or incomplete
    journal."""
    import hashlib

    known, rows, start = _header(data, len(data))
    if hashlib.sha256(data[:-_DIGEST]).digest() != data[-_DIGEST:]:
        raise FormatError(_NOT_WHOLE)
    body = BytesIO(data[start:-_DIGEST])
    (place, length), *others = rows
    breaks, spans = Edit(place, body.read(length)), []
    for offset, *lengths in others:
        *positions, before_edit, after_edit = map(body.read, lengths)
        spans.append(JournalSpan(offset, before_edit, after_edit, *positions))
    ends_old = max((span.stop(span.old) for span in spans if span.old), default=0)
    ends_new = max((span.stop(span.new) for span in spans if span.new), default=0)
    before, after = known.before, known.after
    # If the file shrinks, the journal must contain the bytes that are cut off.
    if ends_old > before or ends_new > after or before > max(after, ends_old):
        raise FormatError(_NOT_WHOLE)
    return known._replace(breaks=breaks, spans=tuple(spans))


def _header(data: bytes, size: int) -> tuple[Journal, list[list[int]], int]:
    """Parse the JSON line of a journal of `size` bytes. `data` may end after the line.

    Return the journal without its spans, the offset and the lengths of `breaks` and of each span,
    and the offset after the line.

    Raises FormatError for a number that is not a valid offset or length, for lengths that do not
    add up to `size`, and for a name outside the folder. `_trusted` calls this function before it
    reads the rest of the journal.
    """
    import json

    end = data.find(b"\n", len(_MAGIC), HEAD)
    if not data.startswith(_MAGIC) or end < 0:
        raise FormatError(_NOT_WHOLE)
    try:
        said = json.loads(data[len(_MAGIC) : end])
        inode, before, after = _counts([said["inode"], said["before"], said["after"]], 3)
        breaks = _counts(said["breaks"], 2)
        rows = [_counts(row, 3 if len(row) == 3 else 4) for row in said["spans"]]
        group, then = tuple(said.get("group", ())), said.get("then")
        names = [*group, *(then or ())[:1]]
        is_odd = any(os.path.isabs(name) or ".." in name.split("/") for name in names)
        then = None if then is None else (str(then[0]), str(then[1]))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise FormatError(_NOT_WHOLE) from error
    for _, *lengths in rows:
        if len(lengths) == 3:  # scattered bytes
            places, old, new = lengths
            is_odd = is_odd or not new or new != old or places != 4 * old
    held = breaks[1] + sum(sum(row[1:]) for row in rows)
    if is_odd or end + 1 + held + _DIGEST != size or size > LARGEST:
        raise FormatError(_NOT_WHOLE)
    known = Journal(inode, before, after, Edit(breaks[0], b""), (), group, then)
    return known, [breaks, *rows], end + 1


def _counts(values: list[object], count: int) -> list[int]:
    """Return `values` if all are valid offsets or lengths in a file. Otherwise, raise
    ValueError."""
    found = [value for value in values if type(value) is int and 0 <= value < 1 << 63]
    if not len(found) == len(values) == count:
        raise ValueError("not an offset or length in a file")
    return found
