"""Scan files for code that runs when a program loads the files. Scan several files in parallel."""

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
# Receives a path, and the number of bytes read from the file since the last call.
Reading = Callable[[str, int], None]
MANY = 16  # minimum number of files for which worker processes save time
MOST = 8  # maximum number of workers that `scan_all` starts by default


class Failure(NamedTuple):
    """A file that could not be read, with the error."""

    path: str
    error: CkptkitError


class Watched(ByteSource):
    """A source that reports how many bytes were read.

    The reported total is at most the source's size.
    """

    def __init__(self, source: ByteSource, report: Callable[[int], None]) -> None:
        self._source, self._report, self._left = source, report, source.size
        self.name, self.size, self.identity = source.name, source.size, source.identity
        self.remote = source.remote

    def _read(self, offset: int, length: int) -> bytes:
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
        """Report the bytes that the scan did not need to read."""
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
    """Return a verdict: what would happen if a program loaded the file at `path`.

    `scan` runs no code and imports no module. `trust` lists globs of trusted class and function
    names, such as ``transformers.*``. Raise PathError or InputError if the file cannot be read.
    Malformed content raises no error, but affects the verdict.
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
    """Yield a verdict on each file, in order. For a folder, yield a verdict on each file in it.

    For a file that cannot be read, yield a Failure. `workers` is the number of processes. For 16
    files or more, the default is the number of cores, but at most 8. For fewer files, the default
    is 1.

    Calls of `progress` have two arguments: a path, and a number of bytes read from this file. For
    each file, the numbers add up to the size of the file. If a worker process scans a file,
    `progress` is called once, after the scan.
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
    """Scan files in worker processes and yield the results in order.

    The workers scan a few files before the caller requests their results.
    """
    # Imported only here, because the import is slow: it also imports pickle.
    from concurrent.futures import ProcessPoolExecutor

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
        killed = "the process that scanned this file was killed"
        return Failure(path, InputError(killed, hint="scan with one process: --workers 1"))


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
    """Yield the paths of files. For a folder, yield its files, then the files of its subfolders."""
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
    """Yield every file inside a local folder and its subfolders.

    For a link to a folder, yield a Failure.
    """
    failures: list[Failure] = []

    def fail(error: OSError) -> None:
        why = InputError(f"cannot be listed: {error.strerror}")
        failures.append(Failure(str(error.filename), why))

    for folder, folders, names in os.walk(path, onerror=fail):
        folders.sort()
        yield from (os.path.join(folder, name) for name in sorted(names))
        for place in (os.path.join(folder, name) for name in folders):
            if os.path.islink(place):
                why = InputError("is a link to a folder: ckptkit does not follow it")
                yield Failure(place, why)
    yield from failures


def _listed(folder: Folder, url: str, depth: int) -> Iterator[str]:
    """Yield the URL of every file in `folder` and its subfolders. `url` is the URL of `folder`."""
    check("scan_depth", depth, "folders inside folders")
    inner = folder.folders()
    yield from (in_folder(url, name) for name in folder.list() if name not in inner)
    for name in inner:
        yield from _listed(folder.sub(name), in_folder(url, name), depth + 1)
