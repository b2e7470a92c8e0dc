"""Write a plan to a URL: a file as one ordered stream, a folder as several at a time.

Everything appears at its end: fsspec's transactions finish the multipart uploads of an object
store, or drop them; on a file system of another machine they rename what was written, or remove it.
What names the other files of a folder (an index, the metadata of a DCP folder) is finished last,
before it the first of the others: a reader who finds it finds all of them. A process that is killed
between the first and the last leaves files that are no checkpoint; the same output may replace
them. Checksums that precede the bytes they cover cost a pass over the input first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Event, Lock
from typing import Any

from ckptkit.core.bytesource import ReadSums, reading
from ckptkit.core.errors import OutputError, OutputExistsError, UsageError
from ckptkit.core.options import Options
from ckptkit.core.plan import OutputFile, Plan
from ckptkit.core.text import plural, shown_url, typed
from ckptkit.publish.copying import checksums, in_order
from ckptkit.publish.preflight import check_names, checks, compare, identities, raise_damage
from ckptkit.remote.files import RemoteFile, filesystem, is_local, is_web
from ckptkit.remote.transport import not_written, presentable

PART = 16 << 20  # bytes of a part of an upload
SHARED = 8 << 20  # of one that shares the memory with others
PARTS = 9_000  # of one upload; stores allow 10,000
UPLOADS = 3  # files of a folder at a time


def upload(plan: Plan, url: str, options: Options) -> None:
    """Write the files of `plan` to `url`, or below it; in a dry run, only check that they may be.

    Raises UsageError and OutputExistsError before anything is sent; OutputError, InputChangedError,
    DamageError and the errors of reading the input with nothing changed at `url`, as far as the
    file system there keeps that promise.
    """
    name = shown_url(url)
    if options.verify:
        raise UsageError(
            "an output at a URL cannot be read back before it appears",
            where=name,
            hint=f"leave out {typed('--verify', 'verify=True')}; `diff` compares them afterwards",
        )
    fs, path = filesystem(url)  # an instance for each thread, as a transaction needs
    if is_web(fs):
        hint = "write it to a local path, and copy it there"
        raise UsageError("a web server takes no files", where=name, hint=hint)
    if is_local(fs):
        raise UsageError("is on this machine", where=name, hint=f"name its path: {path}")
    sources = plan.sources()
    if any(isinstance(each, RemoteFile) and filesystem(each.url)[1] == path for each in sources):
        raise UsageError("is the file that is read", where=name, hint="name another one")
    # Files that name others are finished last, before them the first of the others: numbers of
    # parts begin with it, and without it the rest is no checkpoint.
    literal = [file for file in plan.files if _is_literal(file)]
    others = [file for file in plan.files if not _is_literal(file)]
    files = [*others[1:], *others[:1], *literal]
    try:
        fs.invalidate_cache(path)
        old = _old_files(files, fs, path, name, options.force)
        if options.dry_run:
            return
        for each in old:
            fs.rm_file(each)
        if plan.is_folder:
            check_names([file.name for file in files])
            for folder in ("", *plan.folders):
                place = f"{path}/{folder}".rstrip("/")
                if not (old and fs.exists(place)):
                    fs.mkdir(place, create_parents=False)
        _Upload(fs, path, plan, options).send(files)
    except Exception as error:
        raise not_written(error, url) from presentable(error, url)


def _old_files(files: list[OutputFile], fs: Any, path: str, name: str, force: bool) -> list[str]:
    """Return the files to remove for a folder: of the same output, when it was cut off before.

    A mixture of both would pass for a whole one. Raises OutputExistsError for all else that is at
    `path`, and for these too without `force`; that replaces a single file by itself.
    """
    is_folder = bool(files[0].name)
    if (force and not is_folder) or not fs.exists(path):
        return []
    if not is_folder:
        hint = f"{typed('--force', 'force=True')} replaces it"
        raise OutputExistsError("exists already", where=name, hint=hint)
    base = path.rstrip("/") + "/"
    names = [file.name for file in files]
    found = [each.removeprefix(base) for each in fs.find(path)]
    if not found or names[-1] in found or not {*found} <= {*names}:
        raise OutputExistsError("exists already", where=name, hint="name another one")
    if not force:
        raise OutputExistsError(
            f"holds {len(found):,} of {plural(len(names), 'file')} of an output that was cut off",
            where=name,
            hint=f"{typed('--force', 'force=True')} replaces them",
        )
    return [base + each for each in found]


def _is_literal(file: OutputFile) -> bool:
    return all(isinstance(segment, bytes) for segment in file.segments)


class _Upload:
    """Files on their way to one place."""

    def __init__(self, fs: Any, path: str, plan: Plan, options: Options) -> None:
        self._fs = fs
        self._path = path
        self._plan = plan
        self._streams: list[Any] = []
        self._is_checked = options.check
        self._checks = checks(plan.files) if options.check else []
        self._runs: list[list[int]] = []
        self._progress = options.progress or (lambda count, total: None)
        self._telling = Lock()
        self._failed = Event()

    def send(self, files: Sequence[OutputFile]) -> None:
        """Send the files, and finish them; if one of them cannot be finished, remove the others.

        Those with bytes of tensors are sent at once, then those that only name them. They are
        finished in this order, in which their streams are opened, not that in which they have been
        sent.
        """
        is_sent = False
        try:
            with self._fs.transaction:
                self._send_all(files)
                is_sent = True
        except BaseException:
            for file in reversed(files) if is_sent and files[0].name else ():
                with suppress(Exception):  # the failure before this one is reported
                    self._fs.rm_file(self._place(file))
            raise

    def _send_all(self, files: Sequence[OutputFile]) -> None:
        from concurrent.futures import ThreadPoolExecutor

        if len(files) == 1:
            self._send(files[0], self._open(files[0], PART), check=self._check_sources)
            return
        try:
            streams = [(file, self._open(file, SHARED)) for file in files if not _is_literal(file)]
            with ThreadPoolExecutor(UPLOADS) as threads:
                sent = [threads.submit(self._send, *each) for each in streams]
            for each in sent:
                each.result()
            self._check_sources()
            for file in filter(_is_literal, files):
                self._send(file, self._open(file, SHARED))
        except BaseException:
            for stream in self._streams:
                _drop(stream)
            raise

    def _open(self, file: OutputFile, part: int) -> Any:
        size = max(part, -(-file.size // PARTS))
        self._streams.append(self._fs.open(self._place(file), "wb", block_size=size))
        return self._streams[-1]

    def _place(self, file: OutputFile) -> str:
        return f"{self._path}/{file.name}" if file.name else self._path

    def _check_sources(self) -> None:
        for source in self._plan.sources():
            source.check_unchanged()
        raise_damage(compare(self._checks, self._runs))

    def _send(
        self, file: OutputFile, stream: Any, check: Callable[[], None] = lambda: None
    ) -> None:
        sums = ReadSums(identities(self._checks))
        try:
            with reading(sums if self._is_checked else None):
                for piece in in_order(file.segments, checksums(file.segments)):
                    if self._failed.is_set():
                        break
                    stream.write(piece)
                    with self._telling:
                        self._progress(len(piece), self._plan.size)
                else:
                    if stream.tell() != file.size:
                        why = f"{stream.tell():,} bytes were written instead of {file.size:,}"
                        raise OutputError(why)
            self._runs += sums.runs
            check()
            if not self._failed.is_set():  # else another one raises its error
                stream.close()
        except BaseException:
            self._failed.set()
            raise
        finally:
            if self._failed.is_set():
                _drop(stream)


def _drop(stream: Any) -> None:
    """Keep a file from being sent: closing it would send the rest, and complete the upload."""
    from fsspec.spec import AbstractBufferedFile

    if isinstance(stream, AbstractBufferedFile):
        stream.closed = True
