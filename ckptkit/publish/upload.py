"""Upload the output of a plan to a URL.

A single file is sent as one ordered stream. The files of a folder are sent in parallel.

A file appears at the URL only if it is complete. In an object store, a transaction of fsspec
finishes or aborts the multipart uploads. On a remote file system, the transaction renames or
removes the written files.

Index files (such as the metadata of a DCP folder) are finished last. The first file with tensors is
finished just before the index files. Therefore, if a reader finds an index file, all files that the
index lists exist. If the process is killed before it finishes the first file with tensors, the
finished files are not a checkpoint. A new upload of the same output can then replace the finished
files. If a checksum precedes its bytes in the output, the input is read twice.
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

PART = 16 << 20  # bytes per part of a multipart upload
SHARED = 8 << 20  # bytes per part if several files are sent in parallel
PARTS = 9_000  # maximum number of parts of an upload (stores allow 10,000)
UPLOADS = 3  # maximum number of files to upload in parallel


def upload(plan: Plan, url: str, options: Options) -> None:
    """Write the file of `plan` to `url`, or the files of `plan` below `url`. With ``dry_run``,
    `upload` only makes the checks.

    Before the first byte is sent, raises UsageError for an invalid URL and for ``verify``, and
    OutputExistsError for an existing destination. Also raises OutputError if the output cannot be
    written, InputChangedError if the input changes, and DamageError if the input does not match its
    CRC-32s. If the input cannot be read, raises a CkptkitError. After an error, `url` is unchanged,
    unless the remote file system fails to remove written files.
    """
    name = shown_url(url)
    if options.verify:
        raise UsageError(
            "cannot verify an output at a URL before the output appears",
            where=name,
            hint=f"omit {typed('--verify', 'verify=True')}; `diff` compares the files afterwards",
        )
    # fsspec creates one file system object for each thread. Therefore, no other thread shares the
    # transaction of `fs`.
    fs, path = filesystem(url)
    if is_web(fs):
        hint = "write the output to a local path, then copy it"
        raise UsageError("cannot write to a web server", where=name, hint=hint)
    if is_local(fs):
        raise UsageError("is on this machine", where=name, hint=f"give its path: {path}")
    sources = plan.sources()
    if any(isinstance(each, RemoteFile) and filesystem(each.url)[1] == path for each in sources):
        raise UsageError("is the input file", where=name, hint="give another name")
    # Finish index files last, and the first shard just before the index files. An interrupted
    # upload then lacks the first shard, so the other shards are not a checkpoint.
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
    """Return the paths of files from an interrupted upload of the same folder.

    The caller must remove the files of the interrupted upload, because a mixture of the old and the
    new output would look complete. Without `force`, raises OutputExistsError if `path` exists. With
    `force`, a single file at `path` is overwritten. Raises OutputExistsError if the folder contains
    any other file.
    """
    is_folder = bool(files[0].name)
    if (force and not is_folder) or not fs.exists(path):
        return []
    if not is_folder:
        hint = f"{typed('--force', 'force=True')} replaces it"
        raise OutputExistsError("exists", where=name, hint=hint)
    base = path.rstrip("/") + "/"
    names = [file.name for file in files]
    found = [each.removeprefix(base) for each in fs.find(path)]
    if not found or names[-1] in found or not {*found} <= {*names}:
        raise OutputExistsError("exists", where=name, hint="give another name")
    if not force:
        raise OutputExistsError(
            f"contains {len(found):,} of {plural(len(names), 'file')} of an interrupted upload",
            where=name,
            hint=f"{typed('--force', 'force=True')} replaces them",
        )
    return [base + each for each in found]


def _is_literal(file: OutputFile) -> bool:
    return all(isinstance(segment, bytes) for segment in file.segments)


class _Upload:
    """The upload of the files of a plan."""

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
        """Send and finish the files. If a file cannot be finished, remove the finished files.

        Files with tensors are sent first, in parallel. Index files follow. The files are finished
        in the order in which their streams were opened.
        """
        is_sent = False
        try:
            with self._fs.transaction:
                self._send_all(files)
                is_sent = True
        except BaseException:
            for file in reversed(files) if is_sent and files[0].name else ():
                with suppress(Exception):  # report the original error
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
            # If another thread has failed, raise no error here, because that thread raises one.
            if not self._failed.is_set():
                stream.close()
        except BaseException:
            self._failed.set()
            raise
        finally:
            if self._failed.is_set():
                _drop(stream)


def _drop(stream: Any) -> None:
    """Abort an upload. Closing the stream would send the remaining bytes and complete the file."""
    from fsspec.spec import AbstractBufferedFile

    if isinstance(stream, AbstractBufferedFile):
        stream.closed = True
