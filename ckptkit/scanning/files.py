"""Scan files, several in parallel, for what loading them would run."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future
from contextlib import closing
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

from ckptkit.core.bytesource import ByteSource, Folder
from ckptkit.core.errors import CkptkitError, InputError
from ckptkit.core.limits import check
from ckptkit.core.text import in_folder, is_url, shown_url
from ckptkit.formats.format import open_place, steady
from ckptkit.scanning import find as hidden
from ckptkit.scanning.verdict import FileVerdict, Trusted, judge_file

PathLike = str | os.PathLike[str]
Reading = Callable[[str, int], None]  # receives a path, and the number of bytes read from it
MANY = 16  # files; for fewer files, starting worker processes costs more than it saves
MOST = 8  # maximum number of workers by default


class Failure(NamedTuple):
    """A file that could not be read."""

    path: str
    error: CkptkitError


class Watched(ByteSource):
    """A source that reports the bytes read from it, in total at most its size."""

    def __init__(self, source: ByteSource, report: Callable[[int], None]) -> None:
        self._source, self._report, self._left = source, report, source.size
        self.name, self.size, self.identity = source.name, source.size, source.identity
        self.remote = source.remote

    def read(self, offset: int, length: int) -> bytes:
        self._count(length)
        return self._source.read(offset, length)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        self._count(len(buffer))
        self._source.read_into(offset, buffer)

    def _count(self, nbytes: int) -> None:
        counted = min(nbytes, self._left)
        self._left -= counted
        if counted > 0:
            self._report(counted)

    def finish(self) -> None:
        """Report the remaining bytes, which the scan does not need to read."""
        self._count(self._left)

    def will_read(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._source.will_read(ranges)

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def folder_and_name(self) -> tuple[Folder, str] | None:
        return self._source.folder_and_name()


def scan(
    path: PathLike, *, trust: Iterable[str] = (), progress: Reading | None = None
) -> FileVerdict:
    """Return a verdict on what loading the file at `path` would do. Nothing is run or imported.

    `trust` lists globs of trusted class and function names (``transformers.*``). Raises PathError
    and InputError for files that cannot be read. Malformed content is part of the verdict.
    """
    with closing(open_place(path)) as place:
        if isinstance(place, Folder):
            raise InputError(
                "is a folder", where=place.name, hint="scan_all scans the files in a folder"
            )
        shown = shown_url(os.fspath(path))
        source = place if progress is None else Watched(place, partial(progress, shown))
        with steady(place, remote=True):
            verdict = judge_file(shown, place.size, hidden.pickles(source), Trusted(tuple(trust)))
        if isinstance(source, Watched):
            source.finish()
        return verdict


def scan_all(
    paths: Iterable[PathLike],
    *,
    trust: Iterable[str] = (),
    workers: int | None = None,
    progress: Reading | None = None,
) -> Iterator[FileVerdict | Failure]:
    """Yield the verdicts on files, and on all files in folders, in order. Failures are yielded too.

    `workers` is the number of processes. The default for 16 files or more is the number of cores,
    at most 8. `progress` receives a path and the number of bytes read from that file. The numbers
    of a file add up to its size. A file that a worker process scans is reported once, at its end.
    """
    trust = tuple(trust)
    files = _files(paths)
    first = list(islice(files, MANY))
    if workers is None:
        workers = min(MOST, os.cpu_count() or 1) if len(first) == MANY else 1
    rest = chain(first, files)
    if workers == 1:
        yield from (_attempt(each, trust, progress) for each in rest)
        return
    for result in _spread(rest, trust, workers):
        if progress is not None:
            progress(result.path, result.size if isinstance(result, FileVerdict) else 0)
        yield result


def _spread(
    files: Iterable[str | Failure], trust: tuple[str, ...], workers: int
) -> Iterator[FileVerdict | Failure]:
    """Yield results of worker processes, which work a few files ahead of the consumer."""
    from concurrent.futures import ProcessPoolExecutor  # imported late: it imports pickle

    waiting: deque[tuple[str | Failure, Future[FileVerdict | Failure]]] = deque()
    pool = ProcessPoolExecutor(workers)
    try:
        for file in files:
            waiting.append((file, pool.submit(_attempt, file, trust)))
            if len(waiting) > 4 * workers:
                yield _result(*waiting.popleft())
        while waiting:
            yield _result(*waiting.popleft())
    finally:
        pool.shutdown(cancel_futures=True)


def _result(file: str | Failure, future: Future[FileVerdict | Failure]) -> FileVerdict | Failure:
    try:
        return future.result()
    except BrokenExecutor:
        path = file.path if isinstance(file, Failure) else file
        killed = "the process that scanned it was killed"
        return Failure(path, InputError(killed, hint="scan it alone: --workers 1"))


def _attempt(
    file: str | Failure, trust: tuple[str, ...], progress: Reading | None = None
) -> FileVerdict | Failure:
    if isinstance(file, Failure):
        return file
    try:
        return scan(file, trust=trust, progress=progress)
    except CkptkitError as error:
        return Failure(shown_url(file), error)
    except MemoryError:
        return Failure(shown_url(file), InputError("needs more memory than available"))


def _files(paths: Iterable[PathLike]) -> Iterator[str | Failure]:
    """Yield the paths. For a folder, yield its files, sorted, and then those of subfolders."""
    for path in (os.fspath(each) for each in paths):
        try:
            if is_url(path):
                with closing(open_place(path)) as place:
                    found = list(_listed(place, path, 0)) if isinstance(place, Folder) else [path]
                yield from found
            elif os.path.isdir(path):
                yield from _walked(path)
            else:
                yield path
        except CkptkitError as error:
            yield Failure(shown_url(path), error)


def _walked(path: str) -> Iterator[str | Failure]:
    """Yield every file below a local folder. Links to folders are reported as failures."""
    unlisted: list[OSError] = []
    for folder, folders, names in os.walk(path, onerror=unlisted.append):
        for error in unlisted:
            yield Failure(str(error.filename), InputError(f"cannot be listed: {error.strerror}"))
        unlisted.clear()
        folders.sort()
        yield from (os.path.join(folder, name) for name in sorted(names))
        for name in folders:
            if os.path.islink(place := os.path.join(folder, name)):
                yield Failure(place, InputError("is a link to a folder: not followed"))
    yield from (
        Failure(str(error.filename), InputError(f"cannot be listed: {error.strerror}"))
        for error in unlisted
    )


def _listed(folder: Folder, url: str, depth: int) -> Iterator[str]:
    """Yield every file below a folder behind a URL."""
    check("scan_depth", depth, "folders inside folders")
    inner = folder.folders()
    yield from (in_folder(url, name) for name in folder.list() if name not in inner)
    for name in inner:
        yield from _listed(folder.sub(name), in_folder(url, name), depth + 1)
