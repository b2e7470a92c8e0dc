"""Write a plan to a URL: one ordered stream, which appears when it is complete.

fsspec's transactions ensure that: an object store finishes a multipart upload, or drops it; a file
system on another machine renames the file it wrote, or removes it. Checksums that precede the bytes
they cover cost a pass over the input first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ckptkit.core.bytesource import ByteSource
from ckptkit.core.errors import OutputError, OutputExistsError, UsageError
from ckptkit.core.plan import Plan
from ckptkit.publish.copying import checksums, in_order
from ckptkit.remote.files import RemoteFile, filesystem, is_local, is_web
from ckptkit.remote.refusals import not_written, presentable
from ckptkit.remote.urls import shown

PART = 16 << 20  # bytes of a part of an upload
PARTS = 9_000  # of one upload; stores allow 10,000
_COPY = "write it to a local path, and copy it there"


def upload(plan: Plan, url: str, *, force: bool, progress: Callable[[int], None]) -> None:
    """Write the one file of `plan` to `url`.

    `progress` is called with the number of bytes sent since the last call. Raises UsageError and
    OutputExistsError before anything is sent; OutputError, InputChangedError and the errors of
    reading the input with nothing changed at `url`, as far as the file system there keeps that
    promise.
    """
    name = shown(url)
    if plan.is_folder:
        raise UsageError("a folder cannot be written to a URL", where=name, hint=_COPY)
    fs, path = filesystem(url)  # an instance for each thread, as a transaction needs
    if is_web(fs):
        raise UsageError("a web server takes no files", where=name, hint=_COPY)
    if is_local(fs):
        raise UsageError("is on this machine", where=name, hint=f"name its path: {path}")
    sources = plan.sources()
    if any(_is_at(source, path) for source in sources):
        raise UsageError("is the file that is read", where=name, hint="name another one")
    try:
        fs.invalidate_cache(path)
        if not force and fs.exists(path):
            raise OutputExistsError("exists already", where=name, hint="--force replaces it")
        with fs.transaction:
            _send(plan, sources, fs, path, progress)
    except Exception as error:
        raise not_written(error, url) from presentable(error, url)


def _is_at(source: ByteSource, path: str) -> bool:
    return isinstance(source, RemoteFile) and filesystem(source.url)[1] == path


def _send(
    plan: Plan, sources: list[ByteSource], fs: Any, path: str, progress: Callable[[int], None]
) -> None:
    from fsspec.spec import AbstractBufferedFile

    (planned,) = plan.files
    sums = checksums(planned.segments)
    file = fs.open(path, "wb", block_size=max(PART, -(-planned.size // PARTS)))
    try:
        for piece in in_order(planned.segments, sums):
            file.write(piece)
            progress(len(piece))
        if file.tell() != planned.size:
            raise OutputError(f"{file.tell():,} bytes were written instead of {planned.size:,}")
        for source in sources:
            source.check_unchanged()
        file.close()
    except BaseException:
        if isinstance(file, AbstractBufferedFile):
            file.closed = True  # closing would send the rest, and complete the upload
        raise
