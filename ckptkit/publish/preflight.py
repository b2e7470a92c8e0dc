"""Checks before anything is written, and before an existing file is replaced."""

from __future__ import annotations

import errno
import os
import stat
from itertools import chain

from ckptkit.core.bytesource import ByteSource, Derived, Extent, Folder, LocalFile, Range
from ckptkit.core.errors import (
    InputChangedError,
    LimitError,
    OutputError,
    OutputExistsError,
    UsageError,
)
from ckptkit.core.limits import LIMITS
from ckptkit.core.paths import check_is_name
from ckptkit.core.plan import Plan, Segment, Summed, extents
from ckptkit.core.text import shell_word, typed

NO_ROOM = "make room, or write to another disk: `df -h` lists them"


def check_typed(name: str, is_folder: bool) -> None:
    """Refuse the name of an output, as typed, that is that of a stream, or of a folder for a file.

    Whether the folder exists makes no difference.
    """
    check_is_name(name)
    if name.endswith(os.sep) and not is_folder:
        raise UsageError(
            "is the name of a folder, and the output is a file",
            where=name,
            hint="name the file in it",
        )


def check_destination(plan: Plan, path: str, force: bool) -> os.stat_result | None:
    """Return what is at the destination now, if the output may replace it; None if nothing."""
    check_names([file.name for file in plan.files])
    folder, name = os.path.split(path)
    if name in ("", ".", ".."):
        raise UsageError("cannot be the name of an output", where=path)
    if not os.path.isdir(folder):
        raise OutputError(
            f"the folder {folder} does not exist", where=path, hint=f"mkdir -p {shell_word(folder)}"
        )
    try:
        old = os.lstat(path)
    except FileNotFoundError:
        _check_writable(folder)
        return None
    if stat.S_ISDIR(old.st_mode):
        _check_old_folder(path, plan.is_folder)
    else:
        _check_old_file(path, old.st_mode, plan.is_folder, force)
    _check_writable(folder)
    return old


def check_folder(path: str) -> None:
    """Raise the OSError that making the folder `path` and a file in it would raise."""
    try:
        os.stat(path)
    except FileNotFoundError:
        check_folder(os.path.dirname(path) or os.curdir)
        return
    if not os.path.isdir(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    _check_writable(path)


def _check_writable(folder: str) -> None:
    """Raise the OSError that making a file in the folder would raise."""
    if os.access(folder, os.W_OK | os.X_OK):
        return
    read_only = hasattr(os, "statvfs") and os.statvfs(folder).f_flag & os.ST_RDONLY
    code = errno.EROFS if read_only else errno.EACCES
    raise OSError(code, os.strerror(code), folder)


def _is_inside(name: str) -> bool:
    """Return whether a file's name is plain, or a path through folders of plain names."""
    return name == "" or all(
        part not in ("", ".", "..") and part == os.path.basename(part) for part in name.split("/")
    )


def check_names(names: list[str]) -> None:
    """Refuse a plan whose files share a name, or are outside their folder."""
    if len(set(names)) < len(names) or not all(map(_is_inside, names)):
        raise UsageError(
            f"the output would have files of one name, or outside their folder: {names[:8]}"
        )


def _check_old_folder(path: str, wanted: bool) -> None:
    """Refuse to replace a folder, unless it is empty and a folder is `wanted`."""
    if not wanted:
        raise UsageError(
            "is a folder, and the output is a file", where=path, hint="name the file in it"
        )
    if os.listdir(path):
        raise OutputExistsError(
            "is a folder that is not empty", where=path, hint="name a folder that does not exist"
        )


def _check_old_file(path: str, mode: int, folder_wanted: bool, force: bool) -> None:
    """Refuse to replace a file, unless it is a regular one or a link, and `force` is given."""
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise UsageError("is neither a file nor a folder", where=path)
    if stat.S_ISLNK(mode) and _is_special(path):
        raise UsageError(
            f"is a link to {os.readlink(path)}, which is neither a file nor a folder",
            where=path,
            hint="name a file that does not exist",
        )
    if folder_wanted:
        raise UsageError(
            "is a file, and the output is a folder",
            where=path,
            hint="name a folder",
        )
    if not force:
        raise OutputExistsError(
            "exists already", where=path, hint=f"{typed('--force', 'force=True')} replaces it"
        )


def _is_special(link: str) -> bool:
    """Return whether a link leads to a device, a pipe or a socket, or to a descriptor in ``/proc``.

    A descriptor may be one of a regular file, as ``/dev/stdout`` is where output goes to a file.
    """
    target = os.path.join(os.path.dirname(link), os.readlink(link))
    if os.path.realpath(os.path.dirname(target)).startswith("/proc/"):
        return True
    try:
        mode = os.stat(link).st_mode
    except OSError:  # it leads nowhere
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def files_of(origin: ByteSource | Folder | None) -> list[ByteSource]:
    """Return the sources that were opened at a place."""
    if isinstance(origin, Folder):
        return list(origin.opened())
    return [] if origin is None else [origin]


def check_sources(path: str, sources: list[ByteSource]) -> None:
    """Refuse a destination that is one of the files read, by any name or link."""
    there = set()
    for look in (os.lstat, os.stat):
        try:
            info = look(path)
        except OSError:
            continue
        there.add((info.st_dev, info.st_ino))
    for source in (each.whole or each for each in sources):
        if isinstance(source, LocalFile) and source.identity[:2] in there:
            raise UsageError(
                "is the file that is read",
                where=path,
                hint=f"{typed('--in-place', 'in_place=True')} replaces it",
            )


def check_still_there(path: str, sources: list[ByteSource]) -> None:
    """Raise InputChangedError if the file to be replaced is no longer the one that was read."""
    info = os.stat(path)
    known = {source.identity[:2] for source in sources if isinstance(source, LocalFile)}
    if known and (info.st_dev, info.st_ino) not in known:
        raise InputChangedError(
            "was replaced while it was read", where=path, hint="run the command again"
        )


def check_size(plan: Plan, size: int, allow_expand: bool) -> None:
    """Refuse a plan that writes much more than it reads: a few bytes may describe terabytes.

    Headers and pickles do not count: they are as long as what was read of them, and in memory.
    """
    if allow_expand or size <= LIMITS.expansion_free:
        return
    read = referenced(plan)
    size = sum(each.length for file in plan.files for each in extents(file.segments))
    if size > LIMITS.expansion * read + LIMITS.expansion_free:
        raise LimitError(
            f"{read:,} bytes of input would become {size:,} of output, more than "
            f"{LIMITS.expansion} times as much (expansion, expansion_free)",
            hint=f"{typed('--allow-expand', 'allow_expand=True')} writes it all the same",
        )


_UNPACKED = ("inflate", "blocks")


def referenced(plan: Plan) -> int:
    """Bytes of the storages that the plan reads, each counted once.

    What is inflated counts as inflated, and codes of quantized weights count as the weights: of
    these, there are never more than the bits of the codes.
    """
    runs: list[tuple[int, int, int]] = []
    inflated: dict[tuple[int, int], int] = {}
    waiting: list[Segment | Extent] = [
        *chain.from_iterable(file.segments for file in plan.files),
    ]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Summed):
            waiting.append(each.extent)
        elif isinstance(each, Range):
            runs.append((id(each.source), each.offset, each.offset + each.length))
        elif (
            isinstance(each, Derived)
            and each.operation in _UNPACKED
            and isinstance(each.inputs[0], Range)
        ):
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


def check_space(path: str, size: int) -> None:
    """Refuse an output that does not fit on the file system of `path`."""
    left = free(path)
    if size > left:
        raise OutputError(f"needs {size:,} bytes, {left:,} are free", where=path, hint=NO_ROOM)


def free(path: str) -> int:
    """Return the bytes that may still be written to the file system of `path`."""
    folder = os.path.dirname(path)
    if hasattr(os, "statvfs"):
        there = os.statvfs(folder)
        return there.f_bavail * there.f_frsize
    import shutil  # Windows

    return shutil.disk_usage(folder).free
