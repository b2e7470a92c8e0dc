"""Execute a plan. The destination appears only if the output is complete.

The steps are:

1. Check the destination, the free space and the size of the output.
2. Write a temporary file with an unguessable name beside the destination.
3. Check the length of the temporary file. Check that the input has not changed. With ``verify``,
  also compare every byte.
4. Set the mode of the temporary file, flush the file to disk, and rename it.

If a step fails, `publish` removes the temporary file and does not change the destination.

The name of the temporary file is ``.<output>.ckptkit-<process id>-<context><random>.tmp``. The
context and the random number have 8 hex digits each. The context is a checksum of the boot id and
the PID namespace, because a process id is unique only within one boot and one PID namespace. A
later run with the same output removes a temporary file if the context is the same and the process
no longer exists. For temporary files of other machines, other containers or earlier boots, the
later run only reports the names.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ckptkit.core.bytesource import (
    JOURNAL,
    ByteSource,
    Folder,
    LocalFile,
    Range,
    ReadSums,
    journal_path,
    reading,
)
from ckptkit.core.errors import CkptkitError, OutputError, OutputExistsError, VerifyError
from ckptkit.core.options import DEFAULT, Options, made
from ckptkit.core.plan import OutputFile, Plan
from ckptkit.core.text import is_url, shown_url
from ckptkit.publish.copying import WriteTask, execute, in_order
from ckptkit.publish.preflight import (
    NO_ROOM,
    check_destination,
    check_size,
    check_space,
    check_still_there,
    checks,
    compare,
    free,
    identities,
    raise_damage,
)

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


@dataclass(frozen=True, slots=True)
class Published:
    """The written output. `left` contains the names of stale temporary files beside the output.

    Without ``verify``, `damaged` is empty.
    """

    path: str
    nbytes: int
    files: int
    left: tuple[str, ...] = ()
    # Damaged ranges that were copied together with their old checksums.
    damaged: tuple[Range, ...] = ()


def publish(
    plan: Plan,
    destination: str | os.PathLike[str],
    options: Options = DEFAULT,
    *,
    replace_source: bool = False,
    origin: ByteSource | Folder | None = None,
    **changes: Any,
) -> Published:
    """Execute `plan`: write an output file or folder to `destination`.

    `changes` override `options`. With ``force``, the output can replace a file. With
    `replace_source`, the output can even replace a file that the plan reads. If the destination is
    a symbolic link, the output replaces the link, not its target. An output that replaces a file is
    flushed to disk even without ``durable``. `origin` is the file or folder from which the plan was
    made. Without `replace_source`, the output cannot replace `origin`, even if the plan reads no
    bytes of `origin`. If the destination is a URL, see :mod:`upload`. ``progress`` is always called
    in this process, not in worker processes. With ``dry_run``, `publish` only makes the checks and
    writes nothing.

    Before the first byte is written, raises UsageError for an invalid destination,
    OutputExistsError for an existing destination, and LimitError for an output that is many times
    larger than its source. Also raises OutputError if the output cannot be written,
    OutputExistsError if another process creates the destination, InputChangedError if the input
    changes, VerifyError if ``verify`` finds a wrong byte, and DamageError if the input does not
    match its CRC-32s. If the input cannot be read, raises a CkptkitError. After an error, the
    destination is unchanged.
    """
    given, options = os.fspath(destination), made(options, changes)
    size, sources = plan.size, plan.sources()
    if is_url(given):
        from ckptkit.publish.upload import upload

        check_size(plan, size, options.allow_expand)
        upload(plan, given, options)
        return Published(shown_url(given), size, len(plan.files))
    path = given.rstrip(os.sep)
    path = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    force = options.force or replace_source
    read = sources
    if origin is not None:
        read = [*sources, *(origin.opened() if isinstance(origin, Folder) else (origin,))]
    with reported(path, given, size):
        old = check_destination(plan, given, path, force, () if replace_source else read)
        check_size(plan, size, options.allow_expand)
        left = [] if options.dry_run else sweep(path)
        journal = None  # stat of the journal of an interrupted edit in place
        with suppress(OSError):
            journal = os.lstat(journal_path(path))
        check_space(path, size)
        if options.dry_run:
            return Published(path, size, len(plan.files))
        replaced = old if old is not None and stat.S_ISREG(old.st_mode) else None
        is_durable = options.durable or replaced is not None
        new = _Temporary(plan, path)
        try:
            mode = new.make(read)
            damaged = _write(plan, new.places, size, options)
            for source in sources:
                source.check_unchanged()
            if replaced is not None:
                mode = _inherit(new.path, replaced, path if replace_source else None)
            os.chmod(new.path, mode)
            if is_durable:
                new.sync()
            with _locked(path) if replace_source else nullcontext():
                if replace_source:
                    check_still_there(path, read)
                left += _rename(new.path, path, plan.is_folder, force)
        except BaseException:
            new.discard()
            raise
        with suppress(OSError):  # the new file needs no journal
            if replaced and journal and os.path.samestat(journal, os.lstat(journal_path(path))):
                os.unlink(journal_path(path))
        if is_durable:
            try:
                sync_folder(os.path.dirname(path))  # makes the rename durable
            except OSError as error:
                why = f"is written, but may not survive a power failure: {error.strerror}"
                raise OutputError(why, where=path) from error
    return Published(path, size, len(plan.files), tuple(left), damaged)


class _Temporary:
    """The temporary output beside the destination.

    `places` contains the paths of the files in the temporary output.
    """

    def __init__(self, plan: Plan, path: str) -> None:
        self.path = temporary_name(path)
        self.is_folder = plan.is_folder
        self.folders = [os.path.join(self.path, *name.split("/")) for name in plan.folders]
        names = [file.name for file in plan.files]
        self.places = [os.path.join(self.path, name) if name else self.path for name in names]

    def make(self, sources: Iterable[ByteSource]) -> int:
        """Create empty files that only the current user can access. Return the mode for the final
        output.

        If the group cannot read a local input, the mode denies access to the group. If other users
        cannot read a local input, the mode denies access to other users.
        """
        if self.is_folder:
            os.mkdir(self.path)
        else:
            os.close(new_file(self.path))
        mode = stat.S_IMODE(os.lstat(self.path).st_mode)
        for source in sources:
            if isinstance(source, LocalFile) and source.fd >= 0:
                allowed = os.fstat(source.fd).st_mode
                for shift in (3, 0):
                    if not allowed >> shift & 4:
                        mode &= ~(7 << shift)
        os.chmod(self.path, 0o700 if self.is_folder else 0o600)
        for folder in self.folders:
            os.mkdir(folder)
        for place in self.places if self.is_folder else ():
            os.close(new_file(place))
        return mode

    def sync(self) -> None:
        """Flush the temporary output to disk."""
        for place in self.places:
            sync(place)
        for folder in [*self.folders, self.path] if self.is_folder else ():
            sync_folder(folder)

    def discard(self) -> None:
        """Remove the temporary output."""
        with suppress(OSError):  # the user needs the original error
            for place in filter(os.path.lexists, self.places):
                os.unlink(place)
            for folder in filter(os.path.lexists, reversed(self.folders)):
                os.rmdir(folder)
            if self.is_folder:
                os.rmdir(self.path)


@contextmanager
def reported(path: str, typed: str, size: int) -> Iterator[None]:
    """Convert OSError to OutputError. The message contains the destination `typed` by the user."""
    try:
        yield
    except CkptkitError as error:
        error.where = typed if error.where == path else error.where
        raise
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno in _FULL:
            with suppress(OSError):
                why += f": needs {size:,} bytes, but {free(path):,} are free"
        hint = NO_ROOM if error.errno in _FULL else None
        raise OutputError(f"cannot be written: {why}", where=typed, hint=hint) from error


def _inherit(temporary: str, old: os.stat_result, path: str | None) -> int:
    """Copy the owner and group of the replaced file to the temporary file, as far as permitted.

    If `path` is given, also copy the extended attributes ("user.*") of the file `path`. Return the
    mode of the replaced file.
    """
    now = os.lstat(temporary)
    owner = -1 if old.st_uid == now.st_uid else old.st_uid
    if hasattr(os, "chown") and (owner, old.st_gid) != (-1, now.st_gid):
        try:
            os.chown(temporary, owner, old.st_gid)
        except OSError:  # only root can change the owner
            with suppress(OSError):
                os.chown(temporary, -1, old.st_gid)
    if path is not None and hasattr(os, "listxattr"):
        with suppress(OSError):
            for name in os.listxattr(path, follow_symlinks=False):
                if name.startswith("user."):
                    with suppress(OSError):
                        value = os.getxattr(path, name, follow_symlinks=False)
                        os.setxattr(temporary, name, value)
    return stat.S_IMODE(old.st_mode) & 0o777


def _write(plan: Plan, places: Sequence[str], size: int, options: Options) -> tuple[Range, ...]:
    """Write the files of a plan. `size` is the total number of bytes.

    With ``verify``, return the damaged ranges that are copied together with their old checksum.
    """
    report = options.progress or (lambda count, total: None)
    checked = checks(plan.files) if options.check else []
    summed = identities(checked) if options.check else None
    found, runs = execute(
        [
            WriteTask(place, 0, file.segments, summed=summed, keeps_sums=file.keeps_sums)
            for place, file in zip(places, plan.files, strict=True)
        ],
        options.executor,
        lambda count: report(count, size),
        fork=options.fork,
    )
    if checked:
        raise_damage(compare(checked, runs))
    kept = checks(plan.files, kept=True) if options.check and options.verify else []
    sums = ReadSums(identities(kept)) if kept else None
    for place, file, known in zip(places, plan.files, found, strict=True):
        written = os.lstat(place).st_size
        if written != file.size:
            raise OutputError(
                f"{written:,} bytes were written instead of {file.size:,}", where=file.name or None
            )
        if options.verify:
            with reading(sums):
                _compare(place, file, known)
    return tuple(each.range for each, _ in compare(kept, sums.runs)) if sums else ()


def _compare(place: str, file: OutputFile, sums: dict[int, int]) -> None:
    """Read the output and the input again. Raises VerifyError if a byte of the output is wrong."""
    at = 0
    found = bytearray()
    with open(place, "rb") as output:
        for piece in in_order(file.segments, sums):
            if len(found) != len(piece):
                found = bytearray(len(piece))
            # startswith is much faster than == on a memoryview, which compares byte by byte.
            if output.readinto(found) != len(piece) or not found.startswith(piece):
                name = file.name or "the output"
                raise VerifyError(f"{name} differs from the plan at byte {at:,} or a later byte")
            at += len(piece)


def sync(path: str) -> None:
    """Call fsync for a file or folder. Do not retry, because a failed fsync drops the data."""
    if os.name == "nt":  # Windows cannot fsync folders, or files opened for reading
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: str) -> None:
    """Call fsync for a folder if possible.

    Some folders cannot be opened for reading, and some file systems do not support fsync for
    folders.
    """
    try:
        sync(path)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EINVAL, errno.EBADF):
            raise


def _rename(temporary: str, path: str, folder: bool, force: bool) -> list[str]:
    """Rename the temporary file to `path`. Return the names of temporary files that remain.

    Without `force`, raises OutputExistsError if another process has created the destination.
    """
    try:
        if not folder and not force:
            try:
                os.link(temporary, path)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                if os.path.lexists(path):  # not atomic, because the file system has no hard links
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST)) from error
            else:
                with suppress(OSError):  # if this fails, the output is complete nevertheless
                    os.unlink(temporary)
                return [os.path.basename(temporary)] if os.path.lexists(temporary) else []
        (os.replace if force else os.rename)(temporary, path)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise OutputExistsError("appeared in the meantime", where=path) from error
        raise
    return []


@contextmanager
def _locked(path: str) -> Iterator[None]:
    """Lock the file to replace. If the file system does not support locks, do nothing.

    If two processes edit one file, the second process waits for the lock. After the wait,
    `check_still_there` detects that another file has replaced the source.
    """
    with ExitStack() as held:
        with suppress(ImportError, OSError):
            from fcntl import LOCK_EX, flock

            handle = os.open(path, os.O_RDONLY)
            held.callback(os.close, handle)
            flock(handle, LOCK_EX)
        yield


# Temporary files


NAME_MAX = 255  # maximum number of bytes of a file name
# ckptkit reports a temporary file of another context if the last write was more than this number of
# seconds ago.
SETTLED = 3600

_NAME = re.compile(r"\..*(\.ckptkit-([0-9]{1,7})-([0-9a-f]{8})[0-9a-f]{8}\.tmp)", re.DOTALL)


def temporary_name(path: str) -> str:
    """Return a unique path beside `path`. The name contains the name of the file, shortened if
    necessary."""
    folder, name = os.path.split(path)
    where = _where() or os.urandom(4).hex()
    return os.path.join(
        folder, _joined(name, f".ckptkit-{os.getpid()}-{where}{os.urandom(4).hex()}.tmp")
    )


def _joined(name: str, ending: str) -> str:
    while len(os.fsencode(f".{name}{ending}")) > NAME_MAX:
        name = name[:-1]
    return f".{name}{ending}"


@lru_cache
def _where() -> str | None:
    """Return a checksum of the boot id and the PID namespace, or None if the system has no boot
    id."""
    try:
        with open("/proc/sys/kernel/random/boot_id", "rb") as file:
            boot = file.read()
        return f"{zlib.crc32(boot + os.readlink(b'/proc/self/ns/pid')):08x}"
    except OSError:
        return None


def new_file(path: str) -> int:
    """Create a file and open it for writing. Raises FileExistsError for existing files and
    links."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
    return os.open(path, flags | getattr(os, "O_BINARY", 0), 0o666)


def sweep(path: str) -> list[str]:
    """Remove stale temporary files of the output `path`, and of journals of `path`.

    Return the names of old temporary files from other machines, containers or boots.
    """
    folder, name = os.path.split(path)
    names = (name, f".{name}{JOURNAL}")
    unknown = []
    for entry in _temporaries(folder):
        found = _NAME.fullmatch(entry)
        if found is None or entry not in [_joined(each, found[1]) for each in names]:
            continue
        with suppress(OSError):
            info = os.lstat(os.path.join(folder, entry))
            if found[3] == _where():
                if _is_alive(int(found[2])) or info.st_uid != os.geteuid():
                    continue
                if stat.S_ISDIR(info.st_mode):
                    from shutil import rmtree

                    rmtree(os.path.join(folder, entry))  # follows no links
                else:
                    os.unlink(os.path.join(folder, entry))
            elif info.st_mtime < time.time() - SETTLED:
                unknown.append(entry)
    return unknown


@lru_cache(maxsize=64)
def _temporaries(folder: str) -> tuple[str, ...]:
    """Return the names of the temporary files in `folder`. The cache avoids repeated listings."""
    try:
        names = os.listdir(folder)
    except OSError:
        return ()
    return tuple(sorted(each for each in names if each.endswith(".tmp") and _NAME.fullmatch(each)))


def _is_alive(process: int) -> bool:
    with suppress(PermissionError):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return False
    return True
