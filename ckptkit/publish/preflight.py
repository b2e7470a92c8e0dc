"""Check the destination before the first write, and check the CRC-32 of bytes that were read.

A damaged tensor must not get a new, valid checksum in the output. Therefore, if a plan reads a
complete member of a zip file, the CRC-32 of the member is computed during the read (`ReadSums`).
Bytes that were read out of order, as in transposes, are read again. If a member is copied together
with its old checksum, the member is not checked.
"""

from __future__ import annotations

import errno
import os
import stat
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from ckptkit.core.bytesource import (
    ByteSource,
    Derived,
    Extent,
    Identity,
    LocalFile,
    Range,
    check_is_name,
    identity_of,
    in_file,
)
from ckptkit.core.errors import (
    CorruptError,
    InputChangedError,
    InputError,
    LimitError,
    OutputError,
    OutputExistsError,
    UsageError,
)
from ckptkit.core.limits import LIMITS
from ckptkit.core.plan import Checksummed, OutputFile, Plan, extents
from ckptkit.core.text import mismatch, shell_word, shown, typed
from ckptkit.publish.copying import combined, crc32_of

NO_ROOM = "free some space, or write to another disk (`df -h` lists the disks)"


def check_destination(
    plan: Plan, given: str, path: str, force: bool, read: Iterable[ByteSource]
) -> os.stat_result | None:
    """Check the destination `path`. Return the stat of an existing file, or None.

    Raises UsageError or OutputError if the output cannot be written to `path`. `given` is the path
    as typed by the user. If `given` ends in a slash, the output must be a folder. The destination
    must not be a source in `read`, not even by another name or link.
    """
    check_is_name(given)
    if given.endswith(os.sep) and not plan.is_folder:
        hint = "give the name of a file in this folder"
        raise UsageError("ends in a slash, but the output is a file", where=given, hint=hint)
    there = set()
    for look in (os.lstat, os.stat):
        with suppress(OSError):
            there.add(identity_of(look(path))[:2])
    for source in (each.whole or each for each in read):
        if isinstance(source, LocalFile) and source.identity[:2] in there:
            hint = f"{typed('--in-place', 'in_place=True')} overwrites it"
            raise UsageError("is the input file", where=path, hint=hint)
    if plan.is_folder:
        check_names([file.name for file in plan.files])
    folder, name = os.path.split(path)
    if name in ("", ".", ".."):
        raise UsageError("is not a valid file name", where=path)
    if not os.path.isdir(folder):
        hint = f"mkdir -p {shell_word(folder)}"
        raise OutputError(f"the folder {folder} does not exist", where=path, hint=hint)
    old = None
    with suppress(FileNotFoundError):
        old = os.lstat(path)
    if old is not None:
        _check_old(path, old.st_mode, plan.is_folder, force)
    _check_writable(folder)
    return old


def _check_old(path: str, mode: int, folder_wanted: bool, force: bool) -> None:
    """Raise UsageError or OutputExistsError if ckptkit must not replace the existing `path`.

    An output folder can replace an empty folder. With `force`, an output file can replace a regular
    file or a link.
    """
    if stat.S_ISDIR(mode):
        if not folder_wanted:
            hint = "give the name of a file in this folder"
            raise UsageError("is a folder, but the output is a file", where=path, hint=hint)
        if os.listdir(path):
            hint = "give the name of a new folder"
            raise OutputExistsError("is a folder and not empty", where=path, hint=hint)
        return
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise UsageError("is neither a file nor a folder", where=path)
    if stat.S_ISLNK(mode) and _is_special(path):
        why = f"is a link to {os.readlink(path)}, which is neither a file nor a folder"
        raise UsageError(why, where=path, hint="give the name of a new file")
    if folder_wanted:
        raise UsageError("is a file, but the output is a folder", where=path, hint="name a folder")
    if not force:
        hint = f"{typed('--force', 'force=True')} replaces it"
        raise OutputExistsError("exists", where=path, hint=hint)


def _is_special(link: str) -> bool:
    """Return True if a link leads to a device, pipe, socket, or file descriptor in ``/proc``.

    A file descriptor can belong to a regular file. For example, redirection connects
    ``/dev/stdout`` with a file.
    """
    target = os.path.join(os.path.dirname(link), os.readlink(link))
    if os.path.realpath(os.path.dirname(target)).startswith("/proc/"):
        return True
    try:
        mode = os.stat(link).st_mode
    except OSError:  # a broken link
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def check_names(names: list[str]) -> None:
    """Raise UsageError if two files of a plan have the same name, or if a name leads outside the
    folder."""
    parts = {part for name in names if name for part in name.split("/")}
    is_outside = any(part in ("", ".", "..") or part != os.path.basename(part) for part in parts)
    if len(set(names)) < len(names) or is_outside:
        raise UsageError(
            "files of the output would have the same name or be outside the output folder: "
            f"{names[:8]}"
        )


def check_folder(path: str) -> None:
    """Raise an OSError if the folder `path`, or a file in this folder, cannot be created."""
    try:
        os.stat(path)
    except FileNotFoundError:
        check_folder(os.path.dirname(path) or os.curdir)
        return
    if not os.path.isdir(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
    _check_writable(path)


def _check_writable(folder: str) -> None:
    """Raise an OSError if no file can be created in the folder."""
    if os.access(folder, os.W_OK | os.X_OK):
        return
    read_only = hasattr(os, "statvfs") and os.statvfs(folder).f_flag & os.ST_RDONLY
    code = errno.EROFS if read_only else errno.EACCES
    raise OSError(code, os.strerror(code), folder)


def check_still_there(path: str, sources: Iterable[ByteSource]) -> None:
    """Raise InputChangedError if another file has replaced the source at `path`."""
    known = {source.identity[:2] for source in sources if isinstance(source, LocalFile)}
    if known and identity_of(os.stat(path))[:2] not in known:
        hint = "run the command again"
        raise InputChangedError("was replaced while it was read", where=path, hint=hint)


def check_size(plan: Plan, size: int, allow_expand: bool) -> None:
    """Raise LimitError if a plan writes many more bytes than it reads.

    A small hostile file can describe terabytes of output.

    Headers and pickles are not counted, because these bytes are in memory.
    """
    if allow_expand or size <= LIMITS.expansion_free:
        return
    read = referenced(plan)
    size = sum(each.length for file in plan.files for each in extents(file.segments))
    if size > LIMITS.expansion * read + LIMITS.expansion_free:
        raise LimitError(
            f"{read:,} bytes of input would become {size:,} bytes of output, more than "
            f"{LIMITS.expansion} times as many (limits expansion and expansion_free)",
            hint=f"{typed('--allow-expand', 'allow_expand=True')} allows this",
        )


def referenced(plan: Plan) -> int:
    """Return the number of different bytes that the plan reads.

    For compressed data, count the inflated bytes. For quantized weights, count the dequantized
    bytes. Every dequantized element needs bits in the file, so a small file cannot contain many of
    these elements.
    """
    ranges: list[tuple[int, int, int]] = []
    inflated: dict[tuple[int, int], int] = {}
    waiting = [each for file in plan.files for each in extents(file.segments)]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Range):
            ranges.append((id(each.source), each.offset, each.offset + each.length))
        elif each.operation.expands and isinstance(each.inputs[0], Range):
            inflated[id(each.inputs[0].source), each.inputs[0].offset] = each.length
        else:
            waiting.extend(each.inputs)
    total, last, end = sum(inflated.values()), 0, 0
    for source, start, stop in sorted(ranges):
        if source != last:
            last, end = source, 0
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def check_space(path: str, size: int) -> None:
    """Raise OutputError if `size` bytes do not fit on the file system of `path`."""
    left = free(path)
    if size > left:
        raise OutputError(f"needs {size:,} bytes, but {left:,} are free", where=path, hint=NO_ROOM)


def free(path: str) -> int:
    """Return the free bytes of the file system of `path`."""
    folder = os.path.dirname(path)
    if hasattr(os, "statvfs"):
        there = os.statvfs(folder)
        return there.f_bavail * there.f_frsize
    import shutil  # Windows

    return shutil.disk_usage(folder).free


# Checksums of bytes that were read.


# The CRC-32 of a range that was read: (index of the source, offset, length, CRC-32).
Run = Sequence[int]

_PIECE = 64 << 20  # maximum number of bytes that one task reads again
_ROUNDING = 1e-9  # relative tolerance for rounding errors in a number of bytes
_HEADER = 4 << 10  # maximum bytes of the header of an array in an .npy member


class Check(NamedTuple):
    """A zip member that is read completely, with the CRC-32 that the zip file contains for it."""

    source: ByteSource
    offset: int
    length: int
    crc32: int
    name: str

    @property
    def range(self) -> Range:
        return Range(self.source, self.offset, self.length)


class DamageError(CorruptError):
    """The error for bytes that do not match their checksum in the file."""

    def __init__(self, message: str, damaged: Sequence[Range]) -> None:
        super().__init__(message, where=damaged[0].source.name)
        self.damaged = damaged


def checks(files: Iterable[OutputFile], *, kept: bool = False) -> list[Check]:
    """Return the zip members to check.

    If `kept` is false, return the members that get new checksums in the output. If `kept` is true,
    return the members that are copied together with their old checksums.
    """
    read: dict[int, tuple[ByteSource, list[tuple[int, int, float]]]] = {}
    for file in files:
        for segment in file.segments:
            if kept is not (file.keeps_sums and not isinstance(segment, Checksummed)):
                continue
            for source, offset, length, share in _ranges_read(next(extents([segment]), None), 1):
                if source.members is not None:
                    row = read.setdefault(id(source), (source, []))
                    row[1].append((offset, length, length * share))
    try:
        return [check for row in read.values() for check in _members_read(*row)]
    except InputError:
        for source, _ in read.values():
            source.check_unchanged()
        raise


def identities(found: Iterable[Check]) -> tuple[Identity, ...]:
    """Return the identity of each source that contains a member to check.

    A `Run` contains the index of its source in the returned tuple.
    """
    return tuple(dict.fromkeys(check.source.identity for check in found))


def _ranges_read(
    extent: Extent | None, share: float
) -> Iterator[tuple[ByteSource, int, int, float]]:
    """Yield (source, offset, length, fraction) for each range that an extent reads.

    The fraction is the part of the range's bytes that the extent needs. Ranges of compressed data
    are not included, because Inflate verifies the checksum.
    """
    if isinstance(extent, Range):
        yield (*extent, share)
    elif isinstance(extent, Derived):
        for number, each in enumerate(extent.inputs):
            if needed := extent.operation.needed(extent, number):
                yield from _ranges_read(each, share * min(1, needed / max(1, each.length)))


def _members_read(source: ByteSource, read: list[tuple[int, int, float]]) -> Iterator[Check]:
    """Yield the members of a source that are read completely."""
    assert source.members is not None
    file, base = in_file(source, 0)
    read.sort()
    starts = [start for start, _, _ in read]
    for name, offset, stop, size, crc in source.members(source):
        number = bisect_left(starts, offset)
        if number == len(read) or starts[number] >= stop:
            continue
        # The header of an array was already read. The plan reads only the elements after the
        # header.
        at = first = starts[number]
        header = first - offset if offset + size == stop else 0
        end, amount = first + size - header, float(header)
        while number < len(read) and starts[number] <= at < end:
            start, length, needed = read[number]
            at, amount, number = max(at, start + length), amount + needed, number + 1
        if at == end <= stop and header <= _HEADER and amount * (1 + _ROUNDING) >= size > 0:
            yield Check(file, base + first - header, size, crc, name)


def compare(found: Sequence[Check], runs: Iterable[Run]) -> list[tuple[Check, int]]:
    """Return (member, actual CRC-32) for each damaged member.

    `runs` contains checksums of bytes that were read. If `runs` does not cover a member of a local
    file, `compare` reads the other bytes of the member.
    """
    numbers = {identity: number for number, identity in enumerate(identities(found))}
    # Index of the source -> offset -> (length, CRC-32) of the longest run at this offset.
    longest: dict[int, dict[int, tuple[int, int]]] = {number: {} for number in numbers.values()}
    for source, offset, length, crc in runs:
        row = longest[source]
        row[offset] = max(row.get(offset, (0, 0)), (length, crc))
    starts = {source: sorted(row) for source, row in longest.items()}
    parts: list[tuple[int, Range, int | None]] = []
    for number, check in enumerate(found):
        source = numbers[check.source.identity]
        row = longest[source]
        if row.get(check.offset) != (check.length, check.crc32):
            parts += [(number, *part) for part in _parts(check, starts[source], row)]
    if not parts:
        return []
    from ckptkit.compute.workers import ordered

    summed = ordered(
        lambda part: crc32_of(part[1]) if part[2] is None else part[2],
        parts,
        lambda part: part[1].length if part[2] is None else 0,
    )
    sums = combined(
        (number, crc, part.length) for (number, part, _), crc in zip(parts, summed, strict=True)
    )
    return [(found[n], crc) for n, crc in sums.items() if crc != found[n].crc32]


def _parts(
    check: Check, starts: list[int], known: dict[int, tuple[int, int]]
) -> list[tuple[Range, int | None]]:
    """Split a member into parts, and return (range, CRC-32) for each part.

    If a part must be read, its CRC-32 is None. If too many bytes of a remote file would be read
    again, return an empty list.
    """
    found: list[tuple[Range, int | None]] = []
    again = 0
    at, stop = check.offset, check.offset + check.length
    while at < stop:
        length, crc = known.get(at, (0, None))
        if not 0 < length <= stop - at:
            number = bisect_left(starts, at + 1)
            length, crc = min(stop, at + _PIECE, *starts[number : number + 1]) - at, None
            again += length
        found.append((Range(check.source, at, length), crc))
        at += length
    return [] if check.source.remote and again > _PIECE >> 6 else found


def raise_damage(damaged: Sequence[tuple[Check, int]]) -> None:
    """Raise DamageError if members are damaged. If the file has changed, raise
    InputChangedError."""
    for check, _ in damaged:
        check.source.check_unchanged()
    if damaged:
        (check, seen), *others = damaged
        more = f", and {len(others):,} more" if others else ""
        what = mismatch(f"record {shown(check.name)}", seen, check.crc32)
        raise DamageError(what + more, [each.range for each, _ in damaged])
