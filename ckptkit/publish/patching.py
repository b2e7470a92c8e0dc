"""Edit a file in place, crash-safely: valid before and after, detectably invalid in between.

    lock; journal beside the file, on the disk; invalidate it; write the edits; set the size;
    seal it; remove the journal

with an fsync after each step. Whatever interrupts this, the journal exists as long as the file is
not whole, and the next command that opens the file restores it. See :mod:`journal`.

Processes that have the file open or mapped see the change. So a file with several hard links is
never edited in place.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial

from ckptkit.core.bytesource import LocalFile, identity_of
from ckptkit.core.errors import (
    CkptkitError,
    InputChangedError,
    InputError,
    OutputError,
    VerifyError,
)
from ckptkit.core.paths import JOURNAL, file_of, journal_path
from ckptkit.core.plan import Edit, Patch
from ckptkit.core.text import shell_word
from ckptkit.publish.copying import write_all
from ckptkit.publish.journal import (
    HEAD,
    LARGEST,
    Journal,
    Span,
    check_head,
    journal_of,
    parse,
)
from ckptkit.publish.preflight import check_space
from ckptkit.publish.temporaries import NAME_MAX, new_file, sweep, temporary_name
from ckptkit.publish.write import Published, reported, sync_folder

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


def apply(
    patch: Patch,
    *,
    verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
    dry_run: bool = False,
) -> Published:
    """Apply `patch` to its file.

    ``verify`` reads back the written bytes. ``progress`` is called at the end. ``dry_run`` makes
    the checks that come before writing, and writes nothing. Raises
    InputChangedError if it is no longer the file that was read, OutputError, VerifyError with the
    file as it was.
    """
    base = patch.base
    if patch.seal is not None:
        with reported(base.path, base.name, patch.written):
            _apply(patch, verify, dry_run)
    if progress is not None and not dry_run:
        progress(patch.written, patch.written)
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
    return b"".join(iter(partial(_read_some, fd, offset + length), b""))


def _read_some(fd: int, stop: int) -> bytes:
    return os.read(fd, stop - os.lseek(fd, 0, os.SEEK_CUR))


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
        os.fstat(fd).st_size, (_read(fd, s.offset, _longest(s)) for s in known.spans)
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


def _longest(span: Span) -> int:
    return max(len(span.old), len(span.new))


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
