"""The list of finished jobs, kept in the folder of their outputs, to resume a batch.

``.ckptkit-batch.jsonl``: a JSON object per line, ``{"output": NAME, "job": DIGEST, "made": [SIZE,
VERSION]}``; of two for one output the later counts. On this machine lines are appended, so that a
kill costs the last one at most, and the file is locked while a batch runs. An object in a store is
rewritten now and then, and when the batch ends.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from time import monotonic
from typing import NamedTuple, Protocol

from ckptkit.core.bytesource import LocalFile
from ckptkit.core.errors import CkptkitError, LimitError, OutputError, UsageError
from ckptkit.core.text import in_folder, is_url, shell_word
from ckptkit.publish.copying import write_all
from ckptkit.publish.preflight import check_folder
from ckptkit.run.batch.inputs import Mark, mark

NAME = ".ckptkit-batch.jsonl"
PAUSE = 30.0  # seconds between two uploads of the manifest
_CAREFUL = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
LARGEST = 256 << 20  # bytes of a manifest
SHARE = 20  # the pause is at least this many times the duration of an upload


class JobRecord(NamedTuple):
    """A finished job: its digest, and the mark of the output as it was made."""

    output: str
    job: str
    made: Mark


class Manifest(Protocol):
    """The finished jobs by output; `add` records more."""

    done: dict[str, JobRecord]

    def add(self, records: Iterable[JobRecord]) -> None: ...
    def marks(self, outputs: Iterable[str]) -> dict[str, Mark]:
        """Return the marks that outputs have now, without those that do not exist."""


@contextmanager
def opened(into: str, *, reading: bool = False) -> Iterator[Manifest]:
    """Yield the manifest of the folder or URL `into`, created where missing unless `reading`.

    Raises UsageError where another batch writes there, OutputError where it cannot be written.
    """
    if is_url(into):
        remote = _Remote(into)
        try:
            yield remote
        finally:
            remote.flush()
        return
    path = os.path.join(into, NAME)
    if reading:
        _check(path)
        yield _Local(into, _read(path), -1)
        return
    with _locked(path) as fd:
        yield _Local(into, _read(path), fd)


class _Local:
    def __init__(self, into: str, data: bytes, fd: int) -> None:
        self.done = _parse(data)
        self._into = into
        self._fd = fd

    def add(self, records: Iterable[JobRecord]) -> None:
        try:
            write_all(self._fd, _text(records))
        except OSError as error:
            raise OutputError(
                f"cannot be written: {error.strerror}", where=os.path.join(self._into, NAME)
            ) from error

    def marks(self, outputs: Iterable[str]) -> dict[str, Mark]:
        found = ((name, mark(os.path.join(self._into, name))) for name in outputs)
        return {name: each for name, each in found if each is not None}


class _Remote:
    def __init__(self, into: str) -> None:
        from ckptkit.remote import files

        self._into = into
        self._url = in_folder(into, NAME)
        self.done = _parse(files.read_small(self._url))
        self._changed = False
        self._next = monotonic() + PAUSE

    def add(self, records: Iterable[JobRecord]) -> None:
        for each in records:
            self.done[each.output] = each
            self._changed = True
        if monotonic() >= self._next:
            self.flush()

    def flush(self) -> None:
        """Write it, if there is something new."""
        if not self._changed:
            return
        from ckptkit.remote import files

        started = monotonic()
        files.write_small(self._url, _text(self.done.values()))
        self._changed = False
        self._next = monotonic() + max(PAUSE, SHARE * (monotonic() - started))

    def marks(self, outputs: Iterable[str]) -> dict[str, Mark]:
        from ckptkit.remote import files

        found = files.below(self._into)
        return {name: found[name] for name in outputs if name in found}


def _text(records: Iterable[JobRecord]) -> bytes:
    return b"".join(json.dumps(each._asdict()).encode() + b"\n" for each in records)


def _parse(data: bytes) -> dict[str, JobRecord]:
    """Return the records of whole lines; torn lines and those of other programs are skipped."""
    found: dict[str, JobRecord] = {}
    for line in data.split(b"\n"):
        with suppress(ValueError, TypeError, KeyError, RecursionError):
            record = _record(json.loads(line))
            found[record.output] = record
    return found


def _record(line: dict[str, object]) -> JobRecord:
    output, job, made = line["output"], line["job"], line["made"]
    if (
        not isinstance(output, str)
        or not isinstance(job, str)
        or not isinstance(made, list)
        or len(made) != 2
    ):
        raise ValueError
    return JobRecord(output, job, (made[0], made[1]))


def _read(path: str) -> bytes:
    """Return the bytes of a manifest, empty if there is none.

    Raises OutputError if it is not a regular file, or too large.
    """
    try:
        with closing(LocalFile(path, follow=False)) as file:
            if file.size > LARGEST:
                raise LimitError(
                    f"has {file.size:,} bytes, more than the {LARGEST:,} of a manifest"
                )
            return file.read(0, file.size)
    except CkptkitError as error:
        if not os.path.lexists(path):
            return b""
        raise OutputError(
            f"cannot be read: {error.message}", where=path, hint=f"rm {shell_word(path)}"
        ) from error


def _check(path: str) -> None:
    """Raise OutputError where the manifest cannot be written."""
    try:
        check_folder(os.path.dirname(path))
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", where=path) from error


@contextmanager
def _locked(path: str) -> Iterator[int]:
    """Yield a descriptor for appending, under an exclusive lock; cut off a torn last line."""
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | _CAREFUL, 0o666)
    except OSError as error:
        raise OutputError(f"cannot be written: {error.strerror}", where=path) from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OutputError("cannot be written: it is not a regular file", where=path)
        _lock(fd, path)
        data = _read(path)
        if not data.endswith(b"\n"):
            os.ftruncate(fd, data.rfind(b"\n") + 1)
        yield fd
    finally:
        os.close(fd)


def _lock(fd: int, path: str) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(
            "another batch is writing there",
            where=os.path.dirname(path),
            hint="wait for it, or name another --into",
        ) from error
    except OSError:  # a file system without locks
        pass
