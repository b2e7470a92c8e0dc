"""Write a plan to a URL: a file as one ordered stream, a folder as several at a time.

Everything appears at its end: fsspec's transactions finish the multipart uploads of an object
store, or drop them; on a file system of another machine they rename what was written, or remove it.
What names the other files of a folder (an index, the metadata of a DCP folder) is sent and finished
last, so a reader who finds it finds all of them. Checksums that precede the bytes they cover cost a
pass over the input first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Event, Lock
from typing import Any

from ckptkit.core.bytesource import ByteSource
from ckptkit.core.errors import OutputError, OutputExistsError, UsageError
from ckptkit.core.plan import OutputFile, Plan
from ckptkit.core.urls import shown
from ckptkit.publish.copying import Progress, checksums, in_order
from ckptkit.publish.preflight import check_names
from ckptkit.remote.files import RemoteFile, filesystem, is_local, is_web
from ckptkit.remote.refusals import not_written, presentable

PART = 16 << 20  # bytes of a part of an upload
SHARED = 8 << 20  # of one that shares the memory with others
PARTS = 9_000  # of one upload; stores allow 10,000
UPLOADS = 3  # files of a folder at a time
_COPY = "write it to a local path, and copy it there"


def upload(plan: Plan, url: str, *, force: bool, progress: Callable[[int], None]) -> None:
    """Write the files of `plan` to `url`, or below it.

    `progress` is called with the number of bytes sent since the last call. Raises UsageError and
    OutputExistsError before anything is sent; OutputError, InputChangedError and the errors of
    reading the input with nothing changed at `url`, as far as the file system there keeps that
    promise.
    """
    name = shown(url)
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
        if (plan.is_folder or not force) and fs.exists(path):
            hint = "name another one" if plan.is_folder else "--force replaces it"
            raise OutputExistsError("exists already", where=name, hint=hint)
        if plan.is_folder:
            _make_folders(plan, fs, path)
        with fs.transaction:
            _Upload(fs, path, sources, progress).send(plan.files)
    except Exception as error:
        raise not_written(error, url) from presentable(error, url)


def _is_at(source: ByteSource, path: str) -> bool:
    return isinstance(source, RemoteFile) and filesystem(source.url)[1] == path


def _make_folders(plan: Plan, fs: Any, path: str) -> None:
    """Make the folders of the output, where there are such; outer ones first."""
    check_names([file.name for file in plan.files])
    for folder in ("", *plan.folders):
        fs.mkdir(f"{path}/{folder}".rstrip("/"), create_parents=False)


class _Upload:
    """Files on their way to one place, in a transaction that is open."""

    def __init__(
        self, fs: Any, path: str, sources: Sequence[ByteSource], progress: Progress
    ) -> None:
        self._fs = fs
        self._path = path
        self._sources = sources
        self._progress = progress
        self._telling = Lock()
        self._failed = Event()

    def send(self, files: Sequence[OutputFile]) -> None:
        """Send the files: those with bytes of tensors at once, then those that only name them."""
        if len(files) == 1:
            self._send(files[0], PART, self._check_sources)
            return
        from concurrent.futures import ThreadPoolExecutor

        last = [file for file in files if _is_literal(file)]
        with ThreadPoolExecutor(UPLOADS) as threads:
            sent = [threads.submit(self._send, file) for file in files if file not in last]
        for each in sent:
            each.result()
        self._check_sources()
        for file in last:
            self._send(file)

    def _check_sources(self) -> None:
        for source in self._sources:
            source.check_unchanged()

    def _send(
        self, file: OutputFile, part: int = SHARED, check: Callable[[], None] = lambda: None
    ) -> None:
        if self._failed.is_set():  # then another one raises its error
            return
        place = f"{self._path}/{file.name}" if file.name else self._path
        stream = self._fs.open(place, "wb", block_size=max(part, -(-file.size // PARTS)))
        try:
            self._write(file, stream)
            check()
            if not self._failed.is_set():
                stream.close()
        except BaseException:
            self._failed.set()
            raise
        finally:
            if self._failed.is_set():
                _drop(stream)

    def _write(self, file: OutputFile, stream: Any) -> None:
        for piece in in_order(file.segments, checksums(file.segments)):
            if self._failed.is_set():
                return
            stream.write(piece)
            with self._telling:
                self._progress(len(piece))
        if stream.tell() != file.size:
            raise OutputError(f"{stream.tell():,} bytes were written instead of {file.size:,}")


def _is_literal(file: OutputFile) -> bool:
    return all(isinstance(segment, bytes) for segment in file.segments)


def _drop(stream: Any) -> None:
    """Keep a file from being sent: closing it would send the rest, and complete the upload."""
    from fsspec.spec import AbstractBufferedFile

    if isinstance(stream, AbstractBufferedFile):
        stream.closed = True
