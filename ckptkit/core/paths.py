"""Local files: opened if they are regular files, confined to their folder; their file systems.

The journal of a file is beside it as long as an edit in place is not complete.
"""

from __future__ import annotations

import errno
import os
import stat
from functools import lru_cache

from ckptkit.core.errors import MissingFileError, PathError, UsageError
from ckptkit.core.text import nearest

JOURNAL = ".ckptkit-journal"  # the suffix of its name
STREAM = "-"  # standard input or output, for other programs
_NO_STREAM = "parts of a file are read in any order, and a pipe has only one: save it as a file"


def open_regular(path: str, name: str, follow: bool) -> int:
    """Open `path` without waiting for a FIFO's writer, and refuse all but a regular file."""
    flags = (
        os.O_RDONLY
        | getattr(os, "O_CLOEXEC", 0)
        | getattr(os, "O_NONBLOCK", 0)
        | getattr(os, "O_BINARY", 0)
    )
    if not follow:
        flags |= getattr(os, "O_NOFOLLOW", 0)
    try:
        fd = os.open(path, flags)
    except FileNotFoundError as error:
        raise MissingFileError("does not exist", where=name, hint=_instead(path, name)) from error
    except OSError as error:
        why = error.strerror or str(error)
        if error.errno == errno.ELOOP and not follow:
            why = "is a symbolic link"
        hint = "`ulimit -n 65536` allows more" if error.errno == errno.EMFILE else None
        raise PathError(f"cannot be opened: {why}", where=name, hint=hint) from error
    except ValueError as error:  # an embedded null byte
        raise PathError(f"cannot be opened: {error}", where=name) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise PathError("is not a regular file", where=name, hint=_NO_STREAM)
    return fd


def check_is_name(path: str) -> None:
    """Refuse "-" as the name of an output, since it means standard output elsewhere."""
    if path == STREAM:
        raise UsageError(
            "ckptkit writes no file to standard output",
            where=path,
            hint="name a file; ./- is the file of that name",
        )


def _instead(path: str, name: str) -> str | None:
    """Return a hint for a path that does not exist: close names, a broken link, no folder."""
    folder, wanted = os.path.split(path)
    if name == STREAM:
        return f"standard input cannot be read: {_NO_STREAM}"
    if os.path.islink(path):
        return f"it is a link to {os.readlink(path)}, which does not exist"
    if not os.path.isdir(folder):
        return f"there is no folder {folder}"
    try:
        close = nearest(wanted, os.listdir(folder), cutoff=0.8)
    except OSError:
        close = []
    names = [os.path.join(os.path.dirname(name), each) for each in close]
    return f"did you mean {', '.join(names)}?" if names else None


def blobs_of(path: str) -> str | None:
    """Find the files of a Hugging Face cache folder at or below ``snapshots/<revision>``.

    Links are resolved.
    """
    while (parent := os.path.dirname(path)) != path:
        if os.path.basename(parent) == "snapshots":
            blobs = os.path.join(os.path.dirname(parent), "blobs")
            return None if os.path.islink(blobs) else os.path.realpath(blobs)
        path = parent
    return None


def plain_name(name: str, folder: str) -> str:
    """Return `name` if it names a file in the folder itself. Raises PathError."""
    odd = any(c in name for c in "/\\:\0") or "%2e" in name.lower() or "%2f" in name.lower()
    if odd or name in ("", ".", ".."):
        raise PathError(f"{name!r} is not a plain file name inside the folder", where=folder)
    return name


def file_system(fd: int) -> str:
    """Return the kind of file system that an open file is on (Linux), "" where it is not known.

    The file's mount tells it: files on btrfs have devices (``st_dev``) that no mount has. Source:
    proc_pid_fdinfo(5).
    """
    try:
        with open(f"/proc/self/fdinfo/{fd}", encoding="ascii", errors="replace") as file:
            fields = dict(line.split(":", 1) for line in file)
    except (OSError, ValueError):
        return ""
    return _kind_of_mount(fields.get("mnt_id", "").strip())


@lru_cache
def _kind_of_mount(number: str) -> str:
    """Return the kind of file system of a mount. Source: proc_pid_mountinfo(5)."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            mounts = [line.split() for line in file]
    except OSError:
        return ""
    kinds = (mount[mount.index("-") + 1] for mount in mounts if mount[0] == number)
    return next(kinds, "")


def journal_path(path: str | os.PathLike[str]) -> str:
    """Return the path of the journal of the file `path`, if any; links are followed."""
    folder, name = os.path.split(os.path.realpath(path))
    return os.path.join(folder, f".{name}{JOURNAL}")


def file_of(journal: str) -> str:
    """Return the file that a journal belongs to."""
    folder, name = os.path.split(journal)
    return os.path.join(folder, name[1 : -len(JOURNAL)])


def has_journal(path: str | os.PathLike[str]) -> bool:
    """Return whether an edit in place of `path`, or of a file in it, was interrupted."""
    try:
        return any(name.endswith(JOURNAL) for name in os.listdir(path))
    except OSError:  # not a folder
        return os.path.lexists(journal_path(path))
