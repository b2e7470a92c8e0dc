"""Read a checkpoint inside a gzip, bzip2, xz, zstd, tar or .tar.gz file.

    run.pth.gz, model.safetensors.zst     one compressed checkpoint
    model.tar.gz, model.nemo              an archive of files, one of which is a checkpoint

The checkpoint inside may have any other format. ckptkit reads a tar file in place. A compressed
stream cannot be read from the middle. Therefore ckptkit decompresses a compressed file once, into
an unnamed temporary file in ``TMPDIR``. Memory use does not depend on the size of the file.
"""

from __future__ import annotations

import bz2
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ckptkit import formats
from ckptkit.core.bytesource import ByteSource, LocalFile, Memory, Section
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import (
    AmbiguousError,
    CkptkitError,
    CorruptError,
    InputError,
    LimitError,
    MissingPackageError,
    TruncatedError,
    UnsupportedError,
)
from ckptkit.core.limits import LIMITS, UNPACKED
from ckptkit.core.limits import check as check_limit
from ckptkit.core.text import quoted
from ckptkit.formats.folder import best, candidates
from ckptkit.formats.format import CheckedPart, Defect, Probe
from ckptkit.formats.tar import read_members
from ckptkit.formats.torch_legacy import is_archive


def matches(probe: Probe) -> bool:
    return method_of(probe.head) is not None


def read(probe: Probe) -> Checkpoint:
    """Read the checkpoint inside a compressed file or tar file.

    Raises LimitError if the decompressed file is too large. Also raises the errors that `read` of
    the inner format raises.
    """
    method = method_of(probe.head)
    checkpoint = formats.read(_inside(probe), probe.options)
    return replace(
        checkpoint, about=f"decompressed ({method}) to be read" if method else "in a tar file"
    )


def check(probe: Probe) -> Iterator[CheckedPart | Defect]:
    """Yield the checksummed byte ranges of the inner checkpoint. Raises the errors of `read`."""
    return formats.check(Probe(_inside(probe)))


def _inside(probe: Probe) -> ByteSource:
    """Return the decompressed file. For a tar archive, return the checkpoint in the archive."""
    if is_archive(probe):
        return _member(probe.source)
    source, method = probe.source, method_of(probe.head)
    assert method is not None
    free = UNPACKED * source.size
    inner, failure = spool(source, method, free + LIMITS.unpacked_free + 1)
    # A decompressed size of up to UNPACKED times the file size is always allowed. `unpacked_free`
    # limits only the bytes beyond this size.
    what = f"decompressed bytes beyond {UNPACKED} times the size of the file"
    check_limit("unpacked_free", inner.size - free, what)
    if failure is not None:
        raise failure
    within = Probe(inner)
    if is_archive(within):
        return _member(inner)
    if matches(within):
        raise UnsupportedError(
            "is compressed twice", hint="decompress the outer stream first, with gunzip or unzstd"
        )
    return inner


def _member(archive: ByteSource) -> ByteSource:
    """Return the only checkpoint in a tar file.

    The names of the files show which file is a checkpoint, as in a folder.
    """
    members = read_members(archive, here=True).items()
    files = {name: each.data for name, each in members if each.kind == "file"}
    chosen = best(files)
    if chosen is not None and chosen.form == "file":
        _, offset, length = files[chosen.files[0]]
        inner = Section(archive, offset, length)
        inner.name = os.path.join(archive.name, chosen.files[0])
        return inner
    hint = "unpack it first: `tar -xf {where}`"
    if chosen is not None:
        raise UnsupportedError(
            "ckptkit cannot read a checkpoint of several files in an archive: "
            f"{quoted(chosen.files)}",
            hint=hint,
        )
    if found := [each.files[0] for each in candidates(files)]:
        raise AmbiguousError(f"contains {len(found)} checkpoints: {quoted(found)}", hint=hint)
    raise UnsupportedError(
        "is an archive without a checkpoint", hint="`tar -tf {where}` lists its files"
    )


# Decompression


_PIECE = 1 << 18  # maximum number of bytes to read or decompress at once
IN_MEMORY = 16 << 20  # maximum size of a decompressed file that stays in memory

# First bytes of the compressed files that ckptkit can read.
HEADS = {
    b"\x1f\x8b\x08": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd",
}  # fmt: skip
# First bytes that do not prove compression. Uncompressed data, such as small integers, may begin
# with these bytes too.
WEAK_HEADS = {
    b"\x5d\0\0": "xz",
    **dict.fromkeys((b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda"), "zlib"),
}
# First bytes of the compressed files that ckptkit cannot read.
CLOSED = {b"\x04\x22\x4d\x18": "lz4", b"7z\xbc\xaf\x27\x1c": "7z", b"Rar!\x1a\x07": "rar"}


class _Zstd:
    """A zstandard decompressor with the interface of zlib's decompressor.

    The library zstandard does not limit the size of its output. Therefore `decompress` passes at
    most 2 KiB of input to the library at once. 2 KiB of input decompress to at most 64 MiB.
    """

    _STEP = 2 << 10

    def __init__(self) -> None:
        try:
            import zstandard
        except ImportError as error:
            raise MissingPackageError(
                "is compressed with zstd: ckptkit needs the package zstandard",
                hint="pip install zstandard",
            ) from error
        self._inner = zstandard.ZstdDecompressor().decompressobj()
        self._failure = zstandard.ZstdError
        self.unconsumed_tail = b""

    @property
    def eof(self) -> bool:
        return bool(self._inner.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._inner.unused_data) + self.unconsumed_tail

    def decompress(self, data: bytes, max_length: int = 0, /) -> bytes:
        self.unconsumed_tail = data[self._STEP :]
        try:
            return bytes(self._inner.decompress(data[: self._STEP]))
        except self._failure as error:
            raise OSError(str(error)) from error


# Functions that create a decompressor. Each decompressor has `decompress`, `eof` and `unused_data`,
# as in zlib, bz2 and lzma.
_MACHINES: dict[str, Callable[[], Any]] = {
    "deflate": lambda: zlib.decompressobj(-zlib.MAX_WBITS),
    "zlib": zlib.decompressobj,
    "gzip": lambda: zlib.decompressobj(zlib.MAX_WBITS | 16),
    "bzip2": bz2.BZ2Decompressor,
    "xz": lzma.LZMADecompressor,
    "zstd": _Zstd,
}


def method_of(head: bytes) -> str | None:
    """Return the compression method of a file that begins with `head`, or None."""
    return next((name for start, name in HEADS.items() if head.startswith(start)), None)


def pieces(source: ByteSource, method: str) -> Iterator[bytes]:
    """Yield the decompressed bytes of a source in blocks.

    The source may contain several compressed streams. Raises CorruptError if a stream is damaged,
    TruncatedError if the last stream is incomplete, and MissingPackageError if a zstd stream needs
    the package zstandard, which is not installed.
    """
    machine = _MACHINES[method]()
    try:
        for at in range(0, source.size, _PIECE):
            data = source.read(at, min(_PIECE, source.size - at))
            while data:
                if machine.eof and method in ("deflate", "zlib"):
                    return
                if machine.eof:  # another stream or zeros follow
                    if not data.strip(b"\0"):
                        break
                    machine = _MACHINES[method]()
                yield from _output(machine, data)
                data = machine.unused_data if machine.eof else b""
    except (zlib.error, OSError, lzma.LZMAError, EOFError) as error:
        raise CorruptError(f"cannot be inflated ({method}): {error}") from error
    if not machine.eof:
        raise TruncatedError(
            f"ends inside its {method} stream",
            hint="the file is truncated: download or copy it again",
        )


def _output(machine: Any, data: bytes) -> Iterator[bytes]:
    """Yield the decompressed form of `data` in blocks of at most `_PIECE` bytes."""
    while True:
        piece = machine.decompress(data, _PIECE)
        yield piece
        data = getattr(machine, "unconsumed_tail", b"")
        if machine.eof or (not data and len(piece) < _PIECE):
            return


class Spool(LocalFile):
    """An unnamed temporary file of decompressed bytes. The file disappears when the process ends.

    On Linux, worker processes reopen this file through ``/proc/PID/fd`` of their parent process.
    """

    def __init__(self, whole: ByteSource, fd: int) -> None:
        self.fd = fd
        self.path = f"/proc/{os.getpid()}/fd/{fd}"
        self.name = whole.name
        self.whole = whole
        self._identify()

    def check_unchanged(self) -> None:
        """Raise InputChangedError if the compressed file changed after it was decompressed."""
        assert self.whole is not None
        self.whole.check_unchanged()


def spool(source: ByteSource, method: str, most: int) -> tuple[ByteSource, CkptkitError | None]:
    """Decompress at most `most` bytes of a source.

    If the decompressed size exceeds `IN_MEMORY`, the bytes go to a temporary file, else to memory.
    Return the decompressed source, and the error that stopped decompression (or None). Raises
    InputError if the folder of temporary files (``TMPDIR``) is full.
    """
    import tempfile  # imported only for compressed files

    failure: CkptkitError | None = None
    left = most
    try:
        with tempfile.SpooledTemporaryFile(IN_MEMORY) as file:
            try:
                for piece in pieces(source, method):
                    file.write(piece[:left])
                    if len(piece) > left:
                        raise LimitError(f"inflates to more than {most:,} bytes")
                    left -= len(piece)
            except (CorruptError, TruncatedError, MissingPackageError, LimitError) as error:
                failure = error
            if file.tell() > IN_MEMORY:
                file.flush()
                return Spool(source, os.dup(file.fileno())), failure
            file.seek(0)
            inner = Memory(file.read(), source.name)
            inner.whole = source
            return inner, failure
    except OSError as error:
        raise InputError(
            f"cannot be decompressed into a temporary file: {error.strerror}",
            where=source.name,
            hint="set the variable TMPDIR to a folder with more free space",
        ) from error
