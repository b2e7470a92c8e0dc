"""Carries out a plan: all of it under the destination's name, or none of it.

The order is what makes it safe. Check everything that can be known before (destination, space, size); write a
temporary beside the destination, under a name that nobody can guess; check its length, that the input is still what
was opened and, if asked to, every byte; give it its mode; bring it to the disk; rename it. Whatever fails on the way,
the temporary is removed and the destination is as it was.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptkit.bytesource import ByteSource, Derived, Extent, LocalFile, Range
from ckptkit.copying import execute, in_order
from ckptkit.errors import CkptkitError, LimitError, OutputError, OutputExistsError, UsageError, VerifyError
from ckptkit.limits import LIMITS
from ckptkit.plan import OutputFile, Plan, Segment, Summed
from ckptkit.remote import urls

if TYPE_CHECKING:
    from concurrent.futures import Executor

NAME_MAX = 255  # bytes of a file name
_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


@dataclass(frozen=True, slots=True)
class Published:
    """What is now at `path`: bytes and number of files."""

    path: str
    nbytes: int
    files: int


def publish(
    plan: Plan,
    destination: str | os.PathLike[str],
    *,
    force: bool = False,
    replace_source: bool = False,
    durable: bool = False,
    verify: bool = False,
    allow_expand: bool = False,
    executor: Executor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Published:
    """Write `plan` to `destination`: a file, or a folder of files.

    ``force`` allows to replace a file, ``replace_source`` to replace one that the plan reads; a symbolic link is
    replaced, never followed. ``durable`` means that the output survives a power cut (always so where it replaces a
    file); ``verify`` that it is read back and compared; ``allow_expand`` that it may be any size. ``executor``
    spreads the work over workers that see the same files. A `destination` that is a URL is one ordered stream, which
    appears when it is complete; see :mod:`upload`. ``progress`` is told, here, the bytes that were
    written since the last time, and those of the whole plan.

    Raises OutputExistsError, UsageError, LimitError before anything is written; OutputError, InputChangedError,
    VerifyError and what reading the input raises with the destination as it was.
    """
    typed = os.fspath(destination)
    if urls.is_url(typed):
        return _upload(plan, typed, force, verify, allow_expand, progress)
    path = os.path.join(os.getcwd(), typed.rstrip(os.sep))
    size, sources = plan.size, plan.sources()
    with _reported(path, typed, size):
        _check_sources(path, sources, replace_source)
        old = _check_destination(plan, path, force or replace_source)
        _check_size(plan, size, allow_expand)
        _check_space(path, size)
        temporary = temporary_name(path)
        try:
            mode = _create(plan, temporary)
            tell = progress or (lambda count, total: None)
            _write(plan, temporary, executor, lambda count: tell(count, size), verify)
            for source in sources:
                source.check_unchanged()
            replaces = old is not None and stat.S_ISREG(old.st_mode)
            os.chmod(temporary, stat.S_IMODE(old.st_mode) & 0o777 if old is not None and replaces else mode)
            if durable or replaces:
                _to_disk(plan, temporary)
            _rename(temporary, path, plan.is_folder, force or replace_source)
        except BaseException:
            _remove(temporary, plan)
            raise
        if durable or replaces:
            _sync(os.path.dirname(path))
    return Published(path, size, len(plan.files))


def _upload(
    plan: Plan,
    url: str,
    force: bool,
    verify: bool,
    allow_expand: bool,
    progress: Callable[[int, int], None] | None,
) -> Published:
    """The same for a destination on another machine."""
    from ckptkit.upload import upload

    size = plan.size
    _check_size(plan, size, allow_expand)
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
def _reported(path: str, typed: str, size: int) -> Iterator[None]:
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
                why += f": needs {size:,} bytes, {_free(path):,} are free"
        raise OutputError(f"cannot be written: {why}", where=typed) from error


def _check_destination(plan: Plan, path: str, force: bool) -> os.stat_result | None:
    """What is there now, if it may be replaced by the output."""
    names = [file.name for file in plan.files]
    if len(set(names)) < len(names) or any(name != os.path.basename(name) or name in (".", "..") for name in names):
        raise UsageError(f"the output would have files of one name, or outside their folder: {names[:8]}")
    folder, name = os.path.split(path)
    if name in ("", ".", ".."):
        raise UsageError("is no name for an output", where=path)
    if not os.path.isdir(folder):
        raise OutputError(f"the folder {folder} does not exist", where=path, hint=f"mkdir -p {folder}")
    try:
        old = os.lstat(path)
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(old.st_mode):
        if not plan.is_folder:
            raise UsageError("is a folder, and the output is a file", where=path, hint="name the file in it")
        if os.listdir(path):
            raise OutputExistsError("is a folder that is not empty", where=path, hint="name a folder that is not there")
    elif not (stat.S_ISREG(old.st_mode) or stat.S_ISLNK(old.st_mode)):
        raise UsageError("is neither a file nor a folder", where=path)
    elif plan.is_folder:
        raise UsageError("is a file, and the output is a folder", where=path, hint="name a folder as DST")
    elif not force:
        raise OutputExistsError("exists already", where=path, hint="--force replaces it")
    return old


def _check_sources(path: str, sources: list[ByteSource], replace_source: bool) -> None:
    """Refuse a destination that is one of the files read, under whatever name or link."""
    there = set()
    for look in (os.lstat, os.stat):
        try:
            info = look(path)
        except OSError:
            continue
        there.add((info.st_dev, info.st_ino))
    for source in sources:
        if not replace_source and isinstance(source, LocalFile) and source.identity[:2] in there:
            raise UsageError("is the file that is read", where=path, hint="--in-place replaces it")


def _check_size(plan: Plan, size: int, allow_expand: bool) -> None:
    """Refuse a plan that writes much more than it reads: a few bytes of a file may describe terabytes."""
    if allow_expand or size <= LIMITS.expansion_free:
        return
    read = _referenced(plan)
    if size > LIMITS.expansion * read + LIMITS.expansion_free:
        raise LimitError(
            f"{read:,} bytes of input would become {size:,} of output, more than {LIMITS.expansion} times as much",
            hint="--allow-expand writes it all the same",
        )


def _referenced(plan: Plan) -> int:
    """Bytes of the storages that the plan reads, each counted once: what is inflated counts as inflated."""
    runs: list[tuple[int, int, int]] = []
    inflated: dict[tuple[int, int], int] = {}
    waiting: list[Segment | Extent] = [segment for file in plan.files for segment in file.segments]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Summed):
            waiting.append(each.extent)
        elif isinstance(each, Range):
            runs.append((id(each.source), each.offset, each.offset + each.length))
        elif isinstance(each, Derived) and each.operation == "inflate" and isinstance(each.inputs[0], Range):
            inflated[id(each.inputs[0].source), each.inputs[0].offset] = each.length
        elif isinstance(each, Derived):
            waiting.extend(each.inputs)
    total, last, end = sum(inflated.values()), 0, 0
    for source, start, stop in sorted(runs):
        if source != last:
            last, end = source, 0
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def _check_space(path: str, size: int) -> None:
    free = _free(path)
    if size > free:
        raise OutputError(f"needs {size:,} bytes, {free:,} are free", where=path)


def _free(path: str) -> int:
    """Bytes that may still be written to the file system of `path`."""
    folder = os.path.dirname(path)
    if hasattr(os, "statvfs"):
        there = os.statvfs(folder)
        return there.f_bavail * there.f_frsize
    import shutil  # Windows

    return shutil.disk_usage(folder).free


def _create(plan: Plan, temporary: str) -> int:
    """Make the temporary file or folder, for our eyes only; the mode that it would have had."""
    if plan.is_folder:
        os.mkdir(temporary)
    else:
        os.close(_new_file(temporary))
    mode = stat.S_IMODE(os.lstat(temporary).st_mode)
    os.chmod(temporary, 0o700 if plan.is_folder else 0o600)
    return mode


def temporary_name(path: str) -> str:
    """``.<name>.ckptkit-<process>-<random>.tmp`` beside `path`, the name cut where it would get too long."""
    folder, name = os.path.split(path)
    ending = f".ckptkit-{os.getpid()}-{os.urandom(8).hex()}.tmp"
    while len(os.fsencode(f".{name}{ending}")) > NAME_MAX:
        name = name[:-1]
    return os.path.join(folder, f".{name}{ending}")


def _new_file(path: str) -> int:
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
    return os.open(path, flags, 0o666)


def _places(plan: Plan, temporary: str) -> list[str]:
    return [os.path.join(temporary, file.name) if file.name else temporary for file in plan.files]


def _write(
    plan: Plan, temporary: str, executor: Executor | None, progress: Callable[[int], None], verify: bool
) -> None:
    places = _places(plan, temporary)
    for place in places if plan.is_folder else ():
        os.close(_new_file(place))
    found = execute([(p, file.segments) for p, file in zip(places, plan.files, strict=True)], executor, progress)
    for place, file, sums in zip(places, plan.files, found, strict=True):
        written = os.lstat(place).st_size
        if written != file.size:
            raise OutputError(f"{written:,} bytes were written instead of {file.size:,}", where=file.name or None)
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
            # startswith compares a buffer of any kind at the speed of memory; == of a memoryview goes byte by byte
            if output.readinto(found) != len(piece) or not found.startswith(piece):
                raise VerifyError(f"{file.name or 'the output'} was not written as planned, at byte {at:,} or after")
            at += len(piece)


def _to_disk(plan: Plan, temporary: str) -> None:
    for place in _places(plan, temporary):
        _sync(place)
    if plan.is_folder:
        _sync(temporary)


def _sync(path: str) -> None:
    """fsync a file or a folder; never tried twice, since a system forgets what it failed to write."""
    if os.name == "nt":  # where folders cannot be opened, nor files be synced that were opened for reading
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _rename(temporary: str, path: str, folder: bool, force: bool) -> None:
    """Give the output its name. Without `force`, whoever made a file of that name meanwhile has won."""
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
        if plan.is_folder:
            os.rmdir(temporary)
