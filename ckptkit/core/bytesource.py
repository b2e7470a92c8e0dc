"""Byte sources (such as a local file or memory), folders, ranges of bytes, and CRC-32s.

A source has a size, an identity and a method `read`. A `Range` is a byte range of a source. A
`Derived` is a sequence of bytes that an operation computes from other bytes. The type `Extent` is
`Range` or `Derived`. A `Record` locates the bytes of a storage: the method `locate` returns a
`Range` or `Derived`.

ckptkit reads files with `pread` instead of `mmap`. If another program truncates the file, `pread`
returns fewer bytes, but access to a memory map would kill the process. Only tensors that
`ckptkit.load` returns are memory-mapped. ckptkit opens only regular files, and no file outside the
folder of the checkpoint. While an edit in place is incomplete, a journal exists beside the file.

Python's zlib computes CRC-32s at 1 to 4 GB/s. ISA-L (installed with the extra `speed`) computes
CRC-32s at more than 20 GB/s. Inside the context manager `reading`, ckptkit computes the checksums
of the input while it reads the input. ckptkit therefore reads the input only once. Each thread has
separate checksums.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
import threading
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import TYPE_CHECKING, BinaryIO, ClassVar, NamedTuple, Protocol

from ckptkit.core.errors import (
    ArgumentError,
    CkptkitError,
    InputChangedError,
    InputError,
    MissingFileError,
    PathError,
    TruncatedError,
    UsageError,
)
from ckptkit.core.text import nearest

if TYPE_CHECKING:
    from mmap import mmap


Identity = tuple[int | str, ...]


_BUFFERS = 1024  # maximum number of buffers in one preadv call (IOV_MAX of Linux and macOS)
_NO_RESERVE = 0x4000  # value of MAP_NORESERVE on Linux; Python defines this name since 3.13


def identity_of(info: os.stat_result) -> Identity:
    """Return the identity of a local file.

    The identity ends with the ctime. A write to the file, chmod and link change the ctime.
    """
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


class _Thread(threading.local):
    """The checksums that this thread updates while it reads.

    `sums` is None outside of `reading`.
    """

    sums: ReadSums | None = None


READING = _Thread()


class Member(NamedTuple):
    """A zip member or another part of a file: `length` contiguous bytes.

    The file contains the CRC-32 of the part.

    The part is somewhere between `offset` and `stop`. If `length` is `stop - offset`, the part
    starts at `offset`.
    """

    name: str
    offset: int
    stop: int
    length: int
    crc32: int


class ByteSource(ABC):
    """Random access to a fixed number of bytes."""

    name: str  # Name for messages.
    size: int  # Number of bytes.
    # The identity changes when the bytes change, if the file system reports the change.
    identity: Identity
    # True if each read is a network request. Then a few large reads are faster than many small
    # reads.
    remote = False
    compares_answers = False  # True if every read checks that the file is unchanged
    # True if forked processes can read at the same time, because they do not share a file position.
    is_shared = False
    whole: ByteSource | None = None  # the archive or compressed file that contains this source
    # A function that yields the members of a source, except members without a CRC-32.
    members: Callable[[ByteSource], Iterator[Member]] | None = None

    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`.

        Raises TruncatedError if the source ends before ``offset + length``.
        """
        self._check_inside(offset, length)
        data = self._read(offset, length)
        if READING.sums is not None:
            READING.sums.add(self.identity, offset, data)
        return data

    @abstractmethod
    def _read(self, offset: int, length: int) -> bytes:
        """Return bytes that are inside the source."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset`, if possible without a copy.

        Raises the same errors as `read`.
        """
        buffer[:] = self.read(offset, len(buffer))

    def read_rows(self, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        """Fill rows of equal length. Row number n gets the bytes from ``offset + n * step``."""
        for row in rows:
            self.read_into(offset, row)
            offset += step

    def will_read(self, ranges: Sequence[tuple[int, int]]) -> None:  # noqa: B027
        """Prepare for reads of small ranges.

        `ranges` contains pairs (offset, length) in ascending order. A remote source fetches all
        ranges together. A local source does nothing.
        """

    def check_unchanged(self) -> None:
        """Raise InputChangedError if the bytes changed since the source was opened."""
        if self.whole is not None:
            self.whole.check_unchanged()

    def folder_and_name(self) -> tuple[Folder, str] | None:
        """Return the folder and the name of this file. Return None if the file has no folder."""
        return None

    def close(self) -> None:  # noqa: B027 - memory has nothing to close
        """Close the file. Reads after this call raise an error."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def _check_inside(self, offset: int, length: int) -> None:
        """Raise TruncatedError unless `length` bytes from `offset` are inside the source."""
        if offset < 0 or length < 0 or offset + length > self.size:
            missing = offset + length - self.size
            raise TruncatedError(
                f"is truncated: {missing:,} bytes are missing after byte {self.size:,}",
                where=self.name,
                hint="download or copy the file again",
            )


class Memory(ByteSource):
    """Bytes in memory."""

    is_shared = True

    def __init__(self, data: bytes | memoryview, name: str = "<memory>") -> None:
        self.data = data
        self.name = name
        self.size = len(data)
        self.identity = ("memory", id(data))

    def __reduce__(self) -> tuple[object, ...]:
        return Memory, (bytes(self.data), self.name)

    def folder_and_name(self) -> tuple[Folder, str] | None:
        """Return the folder and name of the compressed file that contained the bytes."""
        return None if self.whole is None else self.whole.folder_and_name()

    def _read(self, offset: int, length: int) -> bytes:
        return bytes(self.data[offset : offset + length])


class Section(ByteSource):
    """A range of contiguous bytes of another source, such as a file inside an archive."""

    def __init__(self, whole: ByteSource, offset: int, length: int) -> None:
        whole._check_inside(offset, length)
        self.whole: ByteSource = whole
        self.offset = offset
        self.size = length
        self.name = whole.name
        self.identity = (*whole.identity, offset, length)
        self.remote = whole.remote
        self.is_shared = whole.is_shared

    def _read(self, offset: int, length: int) -> bytes:
        return self.whole.read(self.offset + offset, length)

    def __reduce__(self) -> tuple[object, ...]:
        return Section, (self.whole, self.offset, self.size)


class LocalFile(ByteSource):
    """A regular file that ckptkit opens once.

    All reads use the same open file, even if another file replaces this file at the same path. A
    pickle of a LocalFile contains the path and the identity. When a worker process unpickles a
    LocalFile, the process opens the file again and rejects a changed file.
    """

    is_shared = hasattr(os, "pread")

    def __init__(
        self, path: str | os.PathLike[str], *, expect: Identity | None = None, follow: bool = True
    ) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self.name = os.fspath(path)
        self.fd = open_regular(self.path, self.name, follow)
        self._seek_lock = threading.Lock()
        self._identify()
        if expect is not None and self.identity != expect:
            self.close()
            raise InputChangedError("was replaced or changed", where=self.name)

    def __reduce__(self) -> tuple[object, ...]:
        return partial(LocalFile, expect=self.identity), (self.path,)

    def __del__(self) -> None:
        self.close()

    def _read(self, offset: int, length: int) -> bytes:
        try:
            data = self._pread(length, offset)
            while len(data) < length:
                more = self._pread(length - len(data), offset + len(data))
                if not more:
                    raise InputChangedError("became shorter while it was read", where=self.name)
                data += more
        except OSError as error:
            raise self._failed(error) from error
        return data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if not hasattr(os, "preadv"):
            super().read_into(offset, buffer)
            return
        self._check_inside(offset, len(buffer))
        done = 0
        try:
            while done < len(buffer):
                count = os.preadv(self.fd, [buffer[done:]], offset + done)
                if not count:
                    raise InputChangedError("became shorter while it was read", where=self.name)
                done += count
        except OSError as error:
            raise self._failed(error) from error
        if READING.sums is not None:
            READING.sums.add(self.identity, offset, buffer)

    def read_rows(self, offset: int, step: int, rows: Sequence[memoryview]) -> None:
        preadv = getattr(os, "preadv", None)
        if preadv is None or offset < 0 or not rows:
            super().read_rows(offset, step, rows)
            return
        # Without gaps between the rows, one call reads many rows.
        width, fd = len(rows[0]), self.fd
        parts: Iterable[Sequence[memoryview]] = zip(rows, strict=True)
        if step == width:
            parts = (rows[n : n + _BUFFERS] for n in range(0, len(rows), _BUFFERS))
        for part in parts:
            try:
                count = preadv(fd, part, offset)
            except OSError as error:
                raise self._failed(error) from error
            if count < width * len(part):
                super().read_rows(offset, step, part)
            offset += step * len(part)

    def map(self) -> mmap | None:
        """Map the complete file into memory, copy-on-write.

        The map does not reserve memory, so the file may be larger than the memory. Return None if
        the operating system cannot map the file. Raise InputChangedError if the file was truncated
        since ckptkit opened it. If the file is truncated later, access to the missing bytes kills
        the process.
        """
        import mmap

        try:
            if sys.platform != "linux":
                return mmap.mmap(self.fd, self.size, access=mmap.ACCESS_COPY)
            flags = mmap.MAP_PRIVATE | _NO_RESERVE
            return mmap.mmap(self.fd, self.size, flags, mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError):  # ValueError: the file is shorter than `size`
            self.check_unchanged()
            return None

    def _failed(self, error: OSError) -> InputError:
        if self.fd < 0:
            hint = "read the tensors inside the `with` block, or open the file again"
            return InputError("was closed", where=self.name, hint=hint)
        return InputError(f"cannot be read: {error.strerror}", where=self.name)

    def _pread(self, length: int, offset: int) -> bytes:
        if hasattr(os, "pread"):
            return os.pread(self.fd, length, offset)
        with self._seek_lock:  # Windows has no pread
            os.lseek(self.fd, offset, os.SEEK_SET)
            return os.read(self.fd, length)

    def _identify(self) -> None:
        self._opened = os.fstat(self.fd)
        self.identity = identity_of(self._opened)
        self.size = self._opened.st_size

    def check_unchanged(self) -> None:
        try:
            now = os.fstat(self.fd)
        except OSError as error:
            raise self._failed(error) from error
        if identity_of(now) != self.identity and not self._only_moved(now):
            raise InputChangedError(
                "changed while it was read", where=self.name, hint="run the command again"
            )

    def _only_moved(self, now: os.stat_result) -> bool:
        """Return True if link count, mode, owner, group or name changed, and the bytes did not.

        Such a change sets a new ctime. If another file replaced this file by a rename, the link
        count of this file is lower. If only ctime changed, return False: a program may have written
        to the file and then restored mtime.
        """
        if identity_of(now)[:-1] != self.identity[:-1]:
            return False
        before, after = (
            (each.st_nlink, each.st_mode, each.st_uid, each.st_gid) for each in (self._opened, now)
        )
        if before != after:
            return True
        try:
            return not os.path.samestat(os.stat(self.path), now)
        except OSError:
            return True

    def folder_and_name(self) -> tuple[Folder, str]:
        return Folder(os.path.dirname(self.name)), os.path.basename(self.name)

    def close(self) -> None:
        fd, self.fd = getattr(self, "fd", -1), -1
        if fd >= 0:
            with suppress(OSError):  # ignore the error, because no read follows
                os.close(fd)


class Folder:
    """A folder. The methods take the names of files in the folder.

    The methods raise PathError for names that lead out of the folder, and for symbolic links. In a
    Hugging Face cache, however, ckptkit follows symbolic links from
    ``snapshots/<revision>/<name>``, and from folders below ``<revision>``, to
    ``../../blobs/<hash>``.
    """

    # Path of this folder relative to the outermost Folder: a prefix of the keys of `_open`.
    _within = ""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self.name = os.fspath(path)
        self._open: dict[str, ByteSource] = {}
        self._blobs = blobs_of(self.path)

    def list(self) -> list[str]:
        """Return the names in the folder, sorted."""
        try:
            return sorted(os.listdir(self.path))
        except OSError as error:
            raise PathError(f"cannot be listed: {error.strerror}", where=self.name) from error

    def __contains__(self, name: str) -> bool:
        return os.path.lexists(os.path.join(self.path, plain_name(name, self.name)))

    def open(self, name: str) -> ByteSource:
        """Return the file `name`. Repeated calls return the same object."""
        key = self._within + name
        if key not in self._open:
            place = os.path.join(self.path, plain_name(name, self.name))
            shown = os.path.join(self.name, name)
            if os.path.islink(place) and os.path.dirname(os.path.realpath(place)) == self._blobs:
                place = os.path.realpath(place)
            source = LocalFile(place, follow=False)
            source.name = shown
            self._open[key] = source
        return self._open[key]

    def folders(self) -> tuple[str, ...]:
        """Return the names of the subfolders, sorted. Omit symbolic links to folders."""
        try:
            with os.scandir(self.path) as entries:
                return tuple(
                    sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
                )
        except OSError as error:
            raise PathError(f"cannot be listed: {error.strerror}", where=self.name) from error

    def sub(self, name: str) -> Folder:
        """Return the subfolder `name`. Raise PathError for a link.

        Closing the outer folder also closes the open files of the subfolder.
        """
        place = os.path.join(self.path, plain_name(name, self.name))
        if os.path.islink(place) or not os.path.isdir(place):
            raise PathError("is not a folder", where=os.path.join(self.name, name))
        inner = Folder(place)
        inner.name = os.path.join(self.name, name)
        inner._within = f"{self._within}{name}/"
        inner._open, inner._blobs = self._open, self._blobs
        return inner

    def nbytes(self) -> int:
        """Return the total size of the files in the folder, and of open files in its subfolders."""
        paths = [os.path.join(self.path, name) for name in self.list()]
        return sum(os.path.getsize(path) for path in paths if os.path.isfile(path)) + self._deeper()

    def _deeper(self) -> int:
        """Return the total size of the open files in subfolders."""
        inside = re.compile(re.escape(self._within) + "[^/]+/")
        return sum(source.size for key, source in self._open.items() if inside.match(key))

    def opened(self) -> tuple[ByteSource, ...]:
        """Return the open files."""
        return tuple(self._open.values())

    def check_unchanged(self) -> None:
        for source in self._open.values():
            source.check_unchanged()

    def close(self) -> None:
        for source in self._open.values():
            source.close()


class Record(Protocol):
    """The location of a storage's bytes. `locate` computes the location on demand."""

    @property
    def length(self) -> int: ...

    def locate(self) -> Range | Derived: ...


class Range(NamedTuple):
    """`length` bytes of `source`, from byte `offset` on."""

    source: ByteSource
    offset: int
    length: int

    def locate(self) -> Range:
        return self

    def read(self) -> bytes:
        return self.source.read(self.offset, self.length)

    def part(self, start: int, length: int) -> Range:
        """Return the range of `length` bytes that begins at byte `start` of this range.

        The caller ensures that these bytes are inside this range.
        """
        return Range(self.source, self.offset + start, length)


Piece = bytes | memoryview


class Operation:
    """A computation of output bytes from input bytes. An operation is frozen and can be pickled.

    The output depends only on the inputs, the fields of the operation and the requested byte range.
    :mod:`ckptkit.compute.operation` contains the simplest operations. A subclass overrides `read`,
    and other attributes and methods whose defaults do not apply.
    """

    __slots__ = ()
    # True if the time to read a part of the output is proportional to the size of this part.
    seekable: ClassVar[bool] = True
    # True if the operation needs a complete tensor in memory. Only one such operation runs at a
    # time.
    whole: ClassVar[bool] = False
    # The limits on expansion compare the bytes that a plan writes with the bytes that it reads. If
    # True, they count the output of the operation as read bytes, in place of its input.
    expands: ClassVar[bool] = False

    def read(self, extent: Derived, start: int, stop: int) -> Iterator[Piece]:
        """Yield the bytes of `extent` from `start` to `stop`.

        ``extent.operation`` is this operation.
        """
        raise NotImplementedError

    def ends(self, extent: Derived, size: int) -> Iterable[int]:
        """Divide the output into parts of about `size` bytes. Yield the end of each part.

        Separate tasks may compute the parts.
        """
        yield extent.length

    def runs(self, extent: Derived) -> Sequence[Extent]:
        """Return ranges whose concatenation is the output.

        Return an empty sequence if the operation must compute the output.
        """
        return ()

    def needed(self, extent: Derived, number: int) -> int:
        """Return the number of bytes that `read` uses from the input with the index `number`.

        Do not count input bytes whose checksum `read` itself verifies.
        """
        return extent.inputs[number].length


@dataclass(frozen=True, slots=True)
class Derived:
    """`length` bytes that `operation` computes from `inputs`.

    A Derived is frozen and can be pickled, so that another machine can execute a plan.
    """

    operation: Operation
    inputs: tuple[Range | Derived, ...]
    length: int  # number of bytes

    def locate(self) -> Derived:
        return self

    def sources(self) -> Iterator[ByteSource]:
        """Yield every source from which the operation reads."""
        for each in self.inputs:
            if isinstance(each, Range):
                yield each.source
            else:
                yield from each.sources()


Extent = Range | Derived


def small_file_beside(source: ByteSource | Folder | None, name: str) -> bytes | None:
    """Return the bytes of the file `name`.

    The file is in the folder `source`, or in the folder that contains the file `source`. Return
    None if the file `name` is missing, unreadable or larger than 4 MiB.
    """
    if source is None:
        return None
    folder = source if isinstance(source, Folder) else (source.folder_and_name() or (None,))[0]
    try:
        if folder is None or name not in folder:
            return None
        file = folder.open(name)
        return file.read(0, file.size) if file.size <= 4 << 20 else None
    except CkptkitError:
        return None


def in_file(source: ByteSource, offset: int) -> tuple[ByteSource, int]:
    """Return the file that contains byte `offset` of a source, and the offset in this file."""
    while isinstance(source, Section):
        offset += source.offset
        source = source.whole
    return source, offset


def leaves(extent: Extent) -> Iterator[Range]:
    """Yield the byte ranges that ckptkit reads from files to compute `extent`.

    If a file is inside an archive, yield ranges of the archive.
    """
    if isinstance(extent, Derived):
        for each in extent.inputs:
            yield from leaves(each)
    else:
        yield Range(*in_file(extent.source, extent.offset), extent.length)


def starts_anywhere(extent: Extent) -> bool:
    """Return True if the time to read a part of `extent` is proportional to the part's size."""
    if isinstance(extent, Range):
        return True
    return extent.operation.seekable and all(map(starts_anywhere, extent.inputs))


def runs(extent: Extent) -> Iterator[Extent]:
    """Yield the ranges and derived bytes whose concatenation is `extent`.

    For most extents, yield only `extent`.
    """
    found = extent.operation.runs(extent) if isinstance(extent, Derived) else ()
    if not found:
        yield extent
    for each in found:
        yield from runs(each)


@dataclass(frozen=True, slots=True)
class Pending:
    """A Record whose bytes `operation` computes from other records.

    `locate` returns a Derived.
    """

    operation: Operation
    records: tuple[Record, ...]
    length: int  # number of bytes

    def locate(self) -> Derived:
        return Derived(self.operation, tuple(r.locate() for r in self.records), self.length)


# CRC-32


# Minimum number of bytes for which ISA-L takes less time than zlib, including the import of ISA-L.
LARGE = 64 << 10

Data = bytes | bytearray | memoryview


def crc32(data: Data, start: int = 0) -> int:
    """Return the CRC-32 of the concatenation of earlier bytes and `data`.

    `start` is the CRC-32 of the earlier bytes.
    """
    return (_fastest() if len(data) >= LARGE else zlib.crc32)(data, start)


@lru_cache
def _fastest() -> Callable[[Data, int], int]:
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.crc32
    found: Callable[[Data, int], int] = isal_zlib.crc32
    return found


def crc32_combine(first: int, second: int, size: int) -> int:
    """Return the CRC-32 of the concatenation of two byte strings.

    `first` and `second` are the CRC-32s of the byte strings. `size` is the length of the second
    byte string.

    A CRC is a polynomial over GF(2) modulo P, with bit 31 as the constant term. Appending `size`
    bytes multiplies the polynomial by x**(8 * size). The inverse works too: if `second` is the
    CRC-32 of the concatenation, the result is the CRC-32 of the second byte string.
    """
    return _multiply(_power(8 * size), first) ^ second


@lru_cache
def _power(exponent: int) -> int:
    power, square = 1 << 31, 1 << 30  # x**0, x**1
    while exponent:
        if exponent & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        exponent >>= 1
    return power


def _multiply(a: int, b: int) -> int:
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ 0xEDB88320 if b & 1 else b >> 1
    return product


class ReadSums:
    """CRC-32s of the bytes that a thread reads from some sources.

    A run is a list of four integers: index of the source, offset, length and CRC-32. A read that
    starts at the end of a run extends the run.
    """

    def __init__(self, identities: Sequence[object]) -> None:
        self.runs: list[list[int]] = []
        self.numbers = {identity: number for number, identity in enumerate(identities)}
        # Maps (index of the source, end of the run) to the run.
        self._ends: dict[tuple[int, int], list[int]] = {}

    def add(self, identity: object, offset: int, data: Data) -> None:
        number = self.numbers.get(identity)
        if number is None or not data:
            return
        run = self._ends.pop((number, offset), None)
        if run is None:
            run = [number, offset, 0, 0]
            self.runs.append(run)
        run[2] += len(data)
        run[3] = crc32(data, run[3])
        self._ends[number, offset + len(data)] = run


@contextmanager
def reading(sums: ReadSums | None) -> Iterator[None]:
    """Inside the block, update the checksums `sums` with all bytes that this thread reads."""
    before, READING.sums = READING.sums, sums
    try:
        yield
    finally:
        READING.sums = before


# Paths


JOURNAL = ".ckptkit-journal"  # suffix of the file name of a journal
STREAM = "-"  # standard input or output
_NO_STREAM = "ckptkit cannot seek in a pipe or device: save the checkpoint as a file"


def open_regular(path: str, name: str, follow: bool) -> int:
    """Open the regular file `path`. Raise PathError for a FIFO, without waiting for its writer."""
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
        hint = "`ulimit -n 65536` allows more open files" if error.errno == errno.EMFILE else None
        raise PathError(f"cannot be opened: {why}", where=name, hint=hint) from error
    except ValueError as error:  # the path contains a null byte
        raise PathError(f"cannot be opened: {error}", where=name) from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise PathError("is not a regular file", where=name, hint=_NO_STREAM)
    return fd


def check_is_name(path: str) -> None:
    """Raise UsageError if `path` is "-".

    Commands that cannot write to standard output call this function.
    """
    if path == STREAM:
        raise UsageError(
            "cannot write this output to standard output",
            where=path,
            hint="name a file; ./- is a file called '-'",
        )


def _instead(path: str, name: str) -> str | None:
    """Return a hint for a missing path: a broken link, a missing folder, or similar names."""
    folder, wanted = os.path.split(path)
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
    """Return the real path of the folder ``blobs`` in the Hugging Face cache that contains `path`.

    In such a cache, `path` is ``snapshots/<revision>`` or a folder inside it. Return None if `path`
    is not in a Hugging Face cache.
    """
    while (parent := os.path.dirname(path)) != path:
        if os.path.basename(parent) == "snapshots":
            blobs = os.path.join(os.path.dirname(parent), "blobs")
            return None if os.path.islink(blobs) else os.path.realpath(blobs)
        path = parent
    return None


def plain_name(name: str, folder: str) -> str:
    """Return `name`. Raise PathError unless `name` is a file name without folders."""
    odd = any(c in name for c in "/\\:\0") or "%2e" in name.lower() or "%2f" in name.lower()
    if odd or name in ("", ".", ".."):
        raise PathError(f"{name!r} is not a plain file name inside the folder", where=folder)
    return name


def journal_path(path: str | os.PathLike[str]) -> str:
    """Return the path of the journal of the file `path`. The journal may not exist.

    Symbolic links in `path` are resolved.
    """
    folder, name = os.path.split(os.path.realpath(path))
    return os.path.join(folder, f".{name}{JOURNAL}")


def file_of(journal: str) -> str:
    """Return the path of the file to which the journal at the path `journal` belongs."""
    folder, name = os.path.split(journal)
    return os.path.join(folder, name[1 : -len(JOURNAL)])


def has_journal(path: str | os.PathLike[str]) -> bool:
    """Return True if an edit in place of `path` is incomplete. `path` is a file or a folder."""
    try:
        return any(name.endswith(JOURNAL) for name in os.listdir(path))
    except OSError:  # not a folder
        return os.path.lexists(journal_path(path))


# File objects


class FileObject(ByteSource):
    """A binary file object. Offset 0 is the beginning of the file. The caller closes the object."""

    def __init__(self, file: BinaryIO) -> None:
        given = getattr(file, "name", None)
        self.name = given if isinstance(given, str) else "<file object>"
        self._file = file
        self._lock = threading.Lock()
        try:
            is_text = not isinstance(file.read(0), bytes)
            self.size = file.seek(0, os.SEEK_END)
        except (OSError, ValueError) as error:
            raise UsageError(
                f"the file object is not seekable: {error}",
                where=self.name,
                hint="ckptkit.open(file.read()) reads the complete file object",
            ) from error
        if is_text:
            raise ArgumentError(
                "the file object returns text, not bytes", where=self.name, hint='open(path, "rb")'
            )
        self.identity = ("file object", id(file), self.size)

    def __reduce__(self) -> tuple[object, ...]:
        raise UsageError(
            "an open file object cannot be sent to other processes",
            where=self.name,
            hint="open the path of the file instead",
        )

    def _read(self, offset: int, length: int) -> bytes:
        with self._lock:
            try:
                self._file.seek(offset)
                data = self._file.read(length)
                while len(data) < length and (more := self._file.read(length - len(data))):
                    data += more
            except (OSError, ValueError) as error:  # ValueError: the file object is closed
                raise InputError(f"cannot be read: {error}", where=self.name) from error
        if len(data) < length:
            raise InputChangedError("became shorter while it was read", where=self.name)
        return data


def standard_input() -> FileObject:
    """Return standard input as a file. Repeated calls return the same file.

    If standard input is a pipe, copy it to a temporary file first, because ckptkit does not read
    the bytes of a checkpoint in order.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError(
            "standard input is a terminal",
            where=STREAM,
            hint="redirect a file to standard input: < run.pth",
        )
    return _as_file(sys.stdin.buffer)


@cache
def _as_file(stream: BinaryIO) -> FileObject:
    if not stream.seekable():
        from shutil import copyfileobj
        from tempfile import TemporaryFile

        kept = TemporaryFile()  # noqa: SIM115  # open until the process ends
        copyfileobj(stream, kept)
        stream = kept
    found = FileObject(stream)
    found.name = STREAM
    return found
