"""Byte sources (a local file, memory, a folder of files), ranges of their bytes, and CRC-32s.

A source has a size, an identity and `read`. An extent is a `Range` of a source, or a `Derived`:
bytes that an operation computes from extents. A record locates the bytes of a storage: `locate`
returns an extent. Files are read with `pread`, not through `mmap`: if a file is truncated
meanwhile, `pread` returns fewer bytes, but a mapped file kills the process. Only tensors that
`ckptkit.load` returns are memory-mapped. Only regular files are opened, and none outside the folder
of the checkpoint. While an edit in place is incomplete, its journal lies beside the file.

Python's zlib computes a CRC-32 at 1 to 4 GB/s, about the speed of a copy. ISA-L (the extra
`speed`) exceeds 20 GB/s. Inside `reading`, every source adds the bytes that a thread reads to the
checksums of that thread, so checksums of the input need no second pass.
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
_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux; Python 3.13 and later define it


def identity_of(info: os.stat_result) -> Identity:
    """Return the identity of a local file. ctime comes last: chmod and link change it too."""
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


class _Thread(threading.local):
    """The checksums that this thread updates while it reads; None outside of `reading`."""

    sums: ReadSums | None = None


READING = _Thread()


class Member(NamedTuple):
    """`length` contiguous bytes of a container for which the container stores a CRC-32.

    The bytes lie between `offset` and `stop`. If they fill that range, they start at `offset`.
    """

    name: str
    offset: int
    stop: int
    length: int
    crc32: int


class ByteSource(ABC):
    """Random access to a fixed number of bytes."""

    name: str  # for messages
    size: int  # in bytes
    identity: Identity  # changes when the bytes change, as far as the file system can tell
    # True if each read is a network request: then few large reads are faster than many small ones.
    remote = False
    compares_answers = False  # True if every read checks that the file is unchanged
    # True if forked processes can read at the same time: they share no file position.
    is_shared = False
    whole: ByteSource | None = None  # the file that contains this one, or its compressed file
    # For a container: a function that yields the members with a CRC-32 of a source.
    members: Callable[[ByteSource], Iterator[Member]] | None = None

    @abstractmethod
    def read(self, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes from `offset`.

        Raises TruncatedError where the source has fewer.
        """

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset`, if possible without a copy.

        Raises like `read`.
        """
        buffer[:] = self.read(offset, len(buffer))

    def read_into_all(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, one after another, with the bytes from `offset`. Raises like `read`."""
        for buffer in buffers:
            self.read_into(offset, buffer)
            offset += len(buffer)

    def read_into_apart(self, offset: int, step: int, buffers: Sequence[memoryview]) -> None:
        """Fill buffers with the bytes from `offset`, `offset + step`, `offset + 2 * step`..."""
        for buffer in buffers:
            self.read_into(offset, buffer)
            offset += step

    def will_read(self, ranges: Sequence[tuple[int, int]]) -> None:  # noqa: B027
        """Announce small ranges (offset, length) in ascending order.

        A remote source fetches these ranges together. Local sources ignore the announcement.
        """

    def check_unchanged(self) -> None:  # noqa: B027 - memory does not change
        """Raise InputChangedError if the bytes changed since the source was opened."""

    def folder_and_name(self) -> tuple[Folder, str] | None:
        """Return the folder that contains this file, and the name there; None without a folder."""
        return None

    def close(self) -> None:  # noqa: B027 - memory has nothing to close
        """Release the file. Later reads raise an error."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def _missing(self, offset: int, length: int) -> TruncatedError:
        return TruncatedError(
            f"is truncated: {offset + length - self.size:,} bytes are missing after byte "
            f"{self.size:,}",
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

    def check_unchanged(self) -> None:
        if self.whole is not None:
            self.whole.check_unchanged()

    def folder_and_name(self) -> tuple[Folder, str] | None:
        """Return the folder and name of the file that the bytes were decompressed from."""
        return None if self.whole is None else self.whole.folder_and_name()

    def read(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise self._missing(offset, length)
        data = bytes(self.data[offset : offset + length])
        if READING.sums is not None:
            READING.sums.add(self.identity, offset, data)
        return data


class Section(ByteSource):
    """Contiguous bytes of another source, such as a file inside an archive."""

    def __init__(self, whole: ByteSource, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > whole.size:
            raise whole._missing(offset, length)
        self.whole: ByteSource = whole
        self.offset = offset
        self.size = length
        self.name = whole.name
        self.identity = (*whole.identity, offset, length)
        self.remote = whole.remote
        self.is_shared = whole.is_shared

    def read(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise self._missing(offset, length)
        return self.whole.read(self.offset + offset, length)

    def check_unchanged(self) -> None:
        self.whole.check_unchanged()

    def __reduce__(self) -> tuple[object, ...]:
        return Section, (self.whole, self.offset, self.size)


class LocalFile(ByteSource):
    """A regular file, opened once: all reads use the open file, even if its name is reused.

    A pickle of this object contains its path and identity. A worker process that unpickles the
    object reopens the file, and rejects a changed file.
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

    def read(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise self._missing(offset, length)
        try:
            data = self._pread(length, offset)
            while len(data) < length:
                more = self._pread(length - len(data), offset + len(data))
                if not more:
                    raise InputChangedError("became shorter while it was read", where=self.name)
                data += more
        except OSError as error:
            raise self._failed(error) from error
        if READING.sums is not None:
            READING.sums.add(self.identity, offset, data)
        return data

    def read_into(self, offset: int, buffer: memoryview) -> None:
        if not hasattr(os, "preadv"):
            super().read_into(offset, buffer)
            return
        if offset < 0 or offset + len(buffer) > self.size:
            raise self._missing(offset, len(buffer))
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

    def read_into_all(self, offset: int, buffers: Sequence[memoryview]) -> None:
        size = sum(map(len, buffers))
        if not hasattr(os, "preadv") or offset < 0 or offset + size > self.size:
            super().read_into_all(offset, buffers)
            return
        for first in range(0, len(buffers), _BUFFERS):
            part = buffers[first : first + _BUFFERS]
            size = sum(map(len, part))
            try:
                whole = os.preadv(self.fd, part, offset) == size
            except OSError as error:
                raise self._failed(error) from error
            if not whole:
                super().read_into_all(offset, part)
            offset += size

    def map(self) -> mmap | None:
        """Map the whole file, copy on write. Return None if the system cannot map it.

        The map reserves no memory, so the file may be larger than the memory. Raises
        InputChangedError if the file was truncated since it was opened. If the file is truncated
        later, a read of the missing part kills the process.
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

    def read_into_apart(self, offset: int, step: int, buffers: Sequence[memoryview]) -> None:
        preadv, fd = getattr(os, "preadv", None), self.fd
        if preadv is None or offset < 0:
            super().read_into_apart(offset, step, buffers)
            return
        for buffer in buffers:  # one system call each: there may be many small buffers
            try:
                count = preadv(fd, (buffer,), offset)
            except OSError as error:
                raise self._failed(error) from error
            if count < len(buffer):
                self.read_into(offset, buffer)
            offset += step

    def _failed(self, error: OSError) -> InputError:
        if self.fd < 0:
            hint = "read its tensors inside the `with` block, or open it again"
            return InputError("was closed", where=self.name, hint=hint)
        return InputError(f"cannot be read: {error.strerror}", where=self.name)

    def _pread(self, length: int, offset: int) -> bytes:
        if hasattr(os, "pread"):
            return os.pread(self.fd, length, offset)
        with self._seek_lock:  # Windows has no pread
            os.lseek(self.fd, offset, os.SEEK_SET)
            return os.read(self.fd, length)

    def _identify(self) -> None:
        self._opened = self._stat()
        self.identity = identity_of(self._opened)
        self.size = self._opened.st_size

    def _stat(self) -> os.stat_result:
        try:
            return os.fstat(self.fd)
        except OSError as error:
            raise self._failed(error) from error

    def check_unchanged(self) -> None:
        now = self._stat()
        if identity_of(now) != self.identity and not self._only_moved(now):
            raise InputChangedError(
                "changed while it was read", where=self.name, hint="run the command again"
            )

    def _only_moved(self, now: os.stat_result) -> bool:
        """Return whether links, mode, owner or name changed (and so ctime), but not the bytes.

        A file that a rename replaced loses a link. If only ctime changed, a program may have
        written to the file and then restored mtime.
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
            with suppress(OSError):  # all reads are complete
                os.close(fd)


class Folder:
    """A folder of files, addressed by plain names.

    Names that lead out of the folder raise PathError, and so do symbolic links. One kind of link is
    followed, because the Hugging Face cache consists of them: ``snapshots/<revision>/<name>`` ->
    ``../../blobs/<hash>``, also from folders below ``<revision>``.
    """

    _within = ""  # path of this folder in the outermost Folder, which owns the open files

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
        """Return the file called `name`. Repeated calls return the same object."""
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
        """Return the names of the subfolders, sorted, without links to folders."""
        try:
            with os.scandir(self.path) as entries:
                return tuple(
                    sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
                )
        except OSError as error:
            raise PathError(f"cannot be listed: {error.strerror}", where=self.name) from error

    def sub(self, name: str) -> Folder:
        """Return the folder `name` inside this one. Raises PathError for a link.

        This folder keeps and closes the files that are opened there.
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
        """Return the bytes of the files in the folder, and of opened files in its subfolders."""
        paths = [os.path.join(self.path, name) for name in self.list()]
        return sum(os.path.getsize(path) for path in paths if os.path.isfile(path)) + self._deeper()

    def _deeper(self) -> int:
        """Return the bytes of the opened files in subfolders."""
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
    """The location of a storage's bytes, computed only when needed."""

    @property
    def length(self) -> int: ...

    def locate(self) -> Range | Derived: ...


class Range(NamedTuple):
    """`length` bytes of `source` from `offset`."""

    source: ByteSource
    offset: int
    length: int

    def locate(self) -> Range:
        return self

    def read(self) -> bytes:
        return self.source.read(self.offset, self.length)

    def part(self, start: int, length: int) -> Range:
        """Return `length` bytes of this range from `start`. The caller ensures that they exist."""
        return Range(self.source, self.offset + start, length)


Piece = bytes | memoryview


class Operation:
    """A computation of output bytes from those of other extents; a frozen value, picklable.

    The output depends only on the inputs, the fields and the requested range.
    :mod:`ckptkit.compute.operation` contains the simplest operations. A new operation overrides
    `read`, and the following attributes and methods if their defaults do not apply.
    """

    __slots__ = ()
    seekable: ClassVar[bool] = True  # reading a part of the output costs only its share
    needs_numpy: ClassVar[bool] = True
    whole: ClassVar[bool] = False  # needs a whole tensor in memory: only one runs at a time
    expands: ClassVar[bool] = False  # its output, not its input, counts against the limits on size

    def read(self, extent: Derived, start: int, stop: int) -> Iterator[Piece]:
        """Yield bytes `start` to `stop` of `extent`. Its `operation` is this object."""
        raise NotImplementedError

    def ends(self, extent: Derived, size: int) -> Iterable[int]:
        """Yield the ends of parts of about `size` bytes that separate tasks may compute."""
        yield extent.length

    def runs(self, extent: Derived) -> Sequence[Extent]:
        """Return the extents whose concatenation is the output; empty if the bytes are computed."""
        return ()

    def needed(self, extent: Derived, number: int) -> int:
        """Return the number of bytes of input `number` whose checksum `read` does not verify."""
        return extent.inputs[number].length


@dataclass(frozen=True, slots=True)
class Derived:
    """`length` bytes that `operation` computes from `inputs`.

    Frozen and picklable, so that another machine can execute a plan.
    """

    operation: Operation
    inputs: tuple[Range | Derived, ...]
    length: int  # bytes

    def locate(self) -> Derived:
        return self

    def sources(self) -> Iterator[ByteSource]:
        """Yield every source of the bytes."""
        for each in self.inputs:
            if isinstance(each, Range):
                yield each.source
            else:
                yield from each.sources()


Extent = Range | Derived


def small_file_beside(source: ByteSource | Folder | None, name: str) -> bytes | None:
    """Return the bytes of the file `name` in a folder, or in the folder of a file.

    None if the file is missing, unreadable, or larger than 4 MiB.
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
    """Return the file that contains byte `offset` of a source, and the byte's offset there."""
    while isinstance(source, Section):
        offset += source.offset
        source = source.whole
    return source, offset


def leaves(extent: Extent) -> Iterator[Range]:
    """Yield the ranges of files that an extent reads.

    A range of a file inside an archive is given as a range of the archive.
    """
    if isinstance(extent, Derived):
        for each in extent.inputs:
            yield from leaves(each)
    else:
        yield Range(*in_file(extent.source, extent.offset), extent.length)


def starts_anywhere(extent: Extent) -> bool:
    """Return whether reading any part of an extent costs only its share."""
    if isinstance(extent, Range):
        return True
    return extent.operation.seekable and all(map(starts_anywhere, extent.inputs))


def runs(extent: Extent) -> Iterator[Extent]:
    """Yield the extents whose concatenation equals `extent`: usually `extent` itself."""
    found = extent.operation.runs(extent) if isinstance(extent, Derived) else ()
    if not found:
        yield extent
    for each in found:
        yield from runs(each)


@dataclass(frozen=True, slots=True)
class Pending:
    """A record computed by `operation` from other records. `locate` returns a Derived."""

    operation: Operation
    records: tuple[Record, ...]
    length: int  # bytes

    def locate(self) -> Derived:
        return Derived(self.operation, tuple(r.locate() for r in self.records), self.length)


# CRC-32


LARGE = 64 << 10  # bytes: shorter data are not worth the import of ISA-L

Data = bytes | bytearray | memoryview


def crc32(data: Data, start: int = 0) -> int:
    """Return the CRC-32 of earlier bytes, whose CRC-32 is `start`, followed by `data`."""
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
    """Return the CRC-32 of a concatenation. `size` is the size of the second byte string.

    A CRC is a polynomial over GF(2) modulo P, with bit 31 as the constant term. `size` more bytes
    multiply the polynomial by x**(8 size). Called with the CRC-32s of the first byte string and of
    the concatenation, this function returns the CRC-32 of the second byte string.
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

    A run is [index of the source, offset, length, CRC-32]. A read that starts at the end of a run
    extends it.
    """

    def __init__(self, identities: Sequence[object]) -> None:
        self.runs: list[list[int]] = []
        self.numbers = {identity: number for number, identity in enumerate(identities)}
        self._ends: dict[tuple[int, int], list[int]] = {}  # runs by (source, end)

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
    """Add the bytes that this thread reads inside the block to `sums`."""
    before, READING.sums = READING.sums, sums
    try:
        yield
    finally:
        READING.sums = before


# Paths


JOURNAL = ".ckptkit-journal"  # suffix of the file name of a journal
STREAM = "-"  # standard input or output
_NO_STREAM = "checkpoints are read in any order, which a pipe does not allow: save it as a file"


def open_regular(path: str, name: str, follow: bool) -> int:
    """Open `path`, a regular file, without waiting for the writer of a FIFO. Raises PathError."""
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
    """Raise UsageError if the path of an output is "-" and the command cannot write there."""
    if path == STREAM:
        raise UsageError(
            "cannot write this output to standard output",
            where=path,
            hint="name a file; ./- is a file called '-'",
        )


def _instead(path: str, name: str) -> str | None:
    """Return a hint for a missing path: similar names, a broken link, or a missing folder."""
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
    """Return the folder ``blobs`` of the Hugging Face cache that contains `path`, resolved.

    `path` is ``snapshots/<revision>`` or below. Return None if `path` is not in such a cache.
    """
    while (parent := os.path.dirname(path)) != path:
        if os.path.basename(parent) == "snapshots":
            blobs = os.path.join(os.path.dirname(parent), "blobs")
            return None if os.path.islink(blobs) else os.path.realpath(blobs)
        path = parent
    return None


def plain_name(name: str, folder: str) -> str:
    """Return `name` if it is a plain file name. Raises PathError."""
    odd = any(c in name for c in "/\\:\0") or "%2e" in name.lower() or "%2f" in name.lower()
    if odd or name in ("", ".", ".."):
        raise PathError(f"{name!r} is not a plain file name inside the folder", where=folder)
    return name


def journal_path(path: str | os.PathLike[str]) -> str:
    """Return the path of the journal of `path`, with links resolved. The journal need not exist."""
    folder, name = os.path.split(os.path.realpath(path))
    return os.path.join(folder, f".{name}{JOURNAL}")


def file_of(journal: str) -> str:
    """Return the file that a journal belongs to."""
    folder, name = os.path.split(journal)
    return os.path.join(folder, name[1 : -len(JOURNAL)])


def has_journal(path: str | os.PathLike[str]) -> bool:
    """Return whether an edit in place of the file `path`, or inside the folder, is incomplete."""
    try:
        return any(name.endswith(JOURNAL) for name in os.listdir(path))
    except OSError:  # not a folder
        return os.path.lexists(journal_path(path))


# File objects


class FileObject(ByteSource):
    """A binary file object, read from its beginning. The caller closes it."""

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
                hint="ckptkit.open(file.read()) reads its bytes",
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
            hint="open its path instead",
        )

    def read(self, offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise self._missing(offset, length)
        with self._lock:
            try:
                self._file.seek(offset)
                data = self._file.read(length)
                while len(data) < length and (more := self._file.read(length - len(data))):
                    data += more
            except (OSError, ValueError) as error:  # ValueError: it was closed meanwhile
                raise InputError(f"cannot be read: {error}", where=self.name) from error
        if len(data) < length:
            raise InputChangedError("became shorter while it was read", where=self.name)
        if READING.sums is not None:
            READING.sums.add(self.identity, offset, data)
        return data


def standard_input() -> FileObject:
    """Return standard input as a file. Repeated calls return the same file.

    A pipe is copied to a temporary file first, because a checkpoint is read in any order.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageError(
            "standard input is a terminal", where=STREAM, hint="redirect a file to it: < run.pth"
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
