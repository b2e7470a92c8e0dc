"""Carries out a plan: all of it under the destination's name, or none of it.

The order is what makes it safe. Check everything that can be known before (destination, space,
size); write a temporary beside the destination, under a name that nobody can guess; check its
length, that the input is still what was opened and, if asked to, every byte; give it its mode;
bring it to the disk; rename it. Whatever fails on the way, the temporary is removed and the
destination is as it was.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptkit.core.bytesource import ByteSource, Folder, LocalFile
from ckptkit.core.errors import (
    CkptkitError,
    OutputError,
    OutputExistsError,
    UsageError,
    VerifyError,
)
from ckptkit.core.plan import OutputFile, Plan
from ckptkit.publish.copying import execute, in_order
from ckptkit.publish.journal import journal_path
from ckptkit.publish.preflight import (
    check_destination,
    check_size,
    check_sources,
    check_space,
    check_still_there,
    files_of,
    free,
)
from ckptkit.publish.temporaries import new_file, sweep, temporary_name
from ckptkit.remote import urls

if TYPE_CHECKING:
    from concurrent.futures import Executor

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


@dataclass(frozen=True, slots=True)
class Published:
    """What is now at `path`: bytes and number of files; and temporaries beside it that nobody seems
    to work on."""

    path: str
    nbytes: int
    files: int
    left: tuple[str, ...] = ()


def publish(
    plan: Plan,
    destination: str | os.PathLike[str],
    *,
    force: bool = False,
    replace_source: bool = False,
    durable: bool = False,
    verify: bool = False,
    allow_expand: bool = False,
    origin: ByteSource | Folder | None = None,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Published:
    """Write `plan` to `destination`: a file, or a folder of files.

    ``force`` allows to replace a file, ``replace_source`` to replace one that the plan reads; a
    symbolic link is replaced, never followed. ``durable`` means that the output survives a power
    cut (always so where it replaces a file); ``verify`` that it is read back and compared;
    ``allow_expand`` that it may be any size. ``origin`` is what the plan was made of, which is not
    to be replaced either where the plan reads nothing of it. ``executor`` spreads the work over
    workers that see the same files. A `destination` that is a URL is one ordered stream, which
    appears when it is complete; see :mod:`upload`. ``progress`` is told, here, the bytes written
    since the last time, and all.

    Raises OutputExistsError, UsageError, LimitError before anything is written; OutputError,
    InputChangedError, VerifyError and what reading the input raises with the destination as it was.
    """
    typed = os.fspath(destination)
    if urls.is_url(typed):
        return _upload(plan, typed, force, verify, allow_expand, progress)
    path = os.path.join(os.getcwd(), typed.rstrip(os.sep))
    size, sources = plan.size, plan.sources()
    read = [*sources, *files_of(origin)]
    with reported(path, typed, size):
        if not replace_source:
            check_sources(path, read)
        kept = _kept_mode(old := check_destination(plan, path, force or replace_source))
        check_size(plan, size, allow_expand)
        left, edit = sweep(path), _unfinished_edit(path)
        check_space(path, size)
        temporary = temporary_name(path)
        try:
            mode = _narrowed(_create(plan, temporary), read)
            tell = progress or (lambda count, total: None)
            _write(plan, temporary, executor, lambda count: tell(count, size), verify)
            for source in sources:
                source.check_unchanged()
            _keep_owner(temporary, old)
            os.chmod(temporary, mode if kept is None else kept)
            if durable or kept is not None:
                _to_disk(plan, temporary)
            if replace_source:
                check_still_there(path, read)
            _rename(temporary, path, plan.is_folder, force or replace_source)
        except BaseException:
            _remove(temporary, plan)
            raise
        if kept is not None:
            _forget_edit(path, edit)
        if durable or kept is not None:
            _name_to_disk(path)
    return Published(path, size, len(plan.files), tuple(left))


def _upload(
    plan: Plan,
    url: str,
    force: bool,
    verify: bool,
    allow_expand: bool,
    progress: Callable[[int, int], None] | None,
) -> Published:
    """The same for a destination on another machine."""
    from ckptkit.publish.upload import upload

    size = plan.size
    check_size(plan, size, allow_expand)
    if verify:
        raise UsageError(
            "what is written to a URL cannot be read back before it appears",
            where=urls.shown(url),
            hint="leave out --verify; `ckptkit diff --values SRC DST` compares them afterwards",
        )
    tell = progress or (lambda count, total: None)
    upload(plan, url, force=force, progress=lambda count: tell(count, size))
    return Published(urls.shown(url), size, len(plan.files))


@contextmanager
def reported(path: str, typed: str, size: int) -> Iterator[None]:
    """What the operating system refuses, in our words, and the destination as it was typed."""
    try:
        yield
    except CkptkitError as error:
        error.where = typed if error.where == path else error.where
        raise
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno in _FULL:
            with suppress(OSError):
                why += f": needs {size:,} bytes, {free(path):,} are free"
        raise OutputError(f"cannot be written: {why}", where=typed) from error


def _kept_mode(old: os.stat_result | None) -> int | None:
    """The mode of the file that is replaced, None where there is none."""
    return (
        stat.S_IMODE(old.st_mode) & 0o777 if old is not None and stat.S_ISREG(old.st_mode) else None
    )


def _keep_owner(temporary: str, old: os.stat_result | None) -> None:
    """Give a file to the owner and the group of the one that it replaces, as far as that is
    allowed."""
    if old is None or not hasattr(os, "chown") or not stat.S_ISREG(old.st_mode):
        return
    now = os.lstat(temporary)
    for owner, group in ((old.st_uid, old.st_gid), (-1, old.st_gid)):
        if owner in (-1, now.st_uid) and group == now.st_gid:
            return
        with suppress(OSError):
            os.chown(temporary, owner, group)
            return


def _narrowed(mode: int, sources: Iterable[ByteSource]) -> int:
    """`mode` without anything for the group or for others, where an input on this machine is not
    theirs to read."""
    for source in sources:
        if isinstance(source, LocalFile) and source.fd >= 0:
            allowed = os.fstat(source.fd).st_mode
            for shift in (3, 0):
                if not allowed >> shift & 4:
                    mode &= ~(7 << shift)
    return mode


def _create(plan: Plan, temporary: str) -> int:
    """Make the temporary file or folder, for our eyes only; the mode that it would have had."""
    if plan.is_folder:
        os.mkdir(temporary)
    else:
        os.close(new_file(temporary))
    mode = stat.S_IMODE(os.lstat(temporary).st_mode)
    os.chmod(temporary, 0o700 if plan.is_folder else 0o600)
    return mode


def _places(plan: Plan, temporary: str) -> list[str]:
    return [os.path.join(temporary, file.name) if file.name else temporary for file in plan.files]


def _folders(plan: Plan, temporary: str) -> list[str]:
    """The folders inside the output, outer ones first."""
    inner = {folder for file in plan.files for folder in _above(file.name)}
    return [os.path.join(temporary, *folder.split("/")) for folder in sorted(inner)]


def _above(name: str) -> Iterator[str]:
    parts = name.split("/")[:-1]
    return ("/".join(parts[:end]) for end in range(1, len(parts) + 1))


def _write(
    plan: Plan,
    temporary: str,
    executor: Executor | None,
    progress: Callable[[int], None],
    verify: bool,
) -> None:
    places = _places(plan, temporary)
    for folder in _folders(plan, temporary):
        os.mkdir(folder)
    for place in places if plan.is_folder else ():
        os.close(new_file(place))
    found = execute(
        [(p, file.segments) for p, file in zip(places, plan.files, strict=True)], executor, progress
    )
    for place, file, sums in zip(places, plan.files, found, strict=True):
        written = os.lstat(place).st_size
        if written != file.size:
            raise OutputError(
                f"{written:,} bytes were written instead of {file.size:,}", where=file.name or None
            )
        if verify:
            _compare(place, file, sums)


def _compare(place: str, file: OutputFile, sums: dict[int, int]) -> None:
    """Read the output and the input again. Raises VerifyError where they differ."""
    at = 0
    found = bytearray()
    with open(place, "rb") as output:
        for piece in in_order(file.segments, sums):
            if len(found) != len(piece):
                found = bytearray(len(piece))
            # startswith compares a buffer of any kind at the speed of memory; == of a memoryview
            # goes byte by byte
            if output.readinto(found) != len(piece) or not found.startswith(piece):
                raise VerifyError(
                    f"{file.name or 'the output'} was not written as planned, at byte {at:,} or after"
                )
            at += len(piece)


def _to_disk(plan: Plan, temporary: str) -> None:
    for place in _places(plan, temporary):
        sync(place)
    for folder in _folders(plan, temporary):
        sync_folder(folder)
    if plan.is_folder:
        sync_folder(temporary)


def _name_to_disk(path: str) -> None:
    """Bring the name of an output to the disk, which it has by now."""
    try:
        sync_folder(os.path.dirname(path))
    except OSError as error:
        raise OutputError(
            f"is written, but might not outlive a power cut: {error.strerror}", where=path
        ) from error


def sync(path: str) -> None:
    """fsync a file or a folder; never tried twice, since a system forgets what it failed to
    write."""
    if (
        os.name == "nt"
    ):  # where folders cannot be opened, nor files be synced that were opened for reading
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: str) -> None:
    """fsync a folder, where that is possible: not all can be opened for reading, nor do all file
    systems know how."""
    try:
        sync(path)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EINVAL, errno.EBADF):
            raise


def _unfinished_edit(path: str) -> os.stat_result | None:
    """The journal of an edit in place of the file that is there now, if there is one."""
    with suppress(OSError):
        return os.lstat(journal_path(path))
    return None


def _forget_edit(path: str, journal: os.stat_result | None) -> None:
    """Remove the journal of a file that has been replaced: nothing could be undone in the new
    one."""
    with suppress(OSError):
        if journal is not None and os.path.samestat(journal, os.lstat(journal_path(path))):
            os.unlink(journal_path(path))


def _rename(temporary: str, path: str, folder: bool, force: bool) -> None:
    """Give the output its name. Without `force`, whoever made a file of that name meanwhile has
    won."""
    try:
        if folder:
            os.rename(temporary, path)
        elif force:
            os.replace(temporary, path)
        else:
            _link(temporary, path)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise OutputExistsError("was made by somebody else meanwhile", where=path) from error
        raise


def _link(temporary: str, path: str) -> None:
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(path):  # the best that can be had where there are no links
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
        os.rename(temporary, path)
    else:
        os.unlink(temporary)


def _remove(temporary: str, plan: Plan) -> None:
    with suppress(OSError):  # what went wrong before is what counts
        for place in _places(plan, temporary):
            if os.path.lexists(place):
                os.unlink(place)
        for folder in reversed(_folders(plan, temporary)):
            if os.path.lexists(folder):
                os.rmdir(folder)
        if plan.is_folder:
            os.rmdir(temporary)
