"""Transports of byte ranges: HTTP, or any other file system of fsspec.

HTTP requests are made directly, through fsspec's session, because their statuses and headers
matter: the first answer gives size, identity and whether the server supports ranges (a HEAD request
would not, and signed URLs refuse it), and every later one whether the file is still the same. An
interrupted transfer is continued where it broke.
"""

from __future__ import annotations

import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from ckptkit.core.bytesource import Identity
from ckptkit.core.errors import InputChangedError, InputError
from ckptkit.core.urls import shown
from ckptkit.remote.refusals import Status, passing, presentable, refused

HEAD = 64 << 10  # bytes of the first request
WHOLE = 64 << 20  # bytes up to which a file is fetched whole from a server without ranges
PAGE = 1 << 20  # bytes fetched of a file without a length: often a page with an error message
PROGRESS = 64 << 10  # bytes that make an attempt a success, even if the connection broke then
TRIES = 5  # attempts in a row without progress
TOLD = 12  # attempts, where the server says when to try again
PAUSE = 0.25  # seconds before the second attempt, twice as many before each later one
LONGEST = 30  # seconds before the next attempt at most, whatever the server says
SILENCE = 60  # seconds without a byte before a connection counts as broken
PATIENCE = 150  # seconds without progress after which there is no other attempt
SLOWEST = 4096  # bytes a second, below which a request counts as broken in the end
SLOWEST_STORED = 64 << 10  # the same, where nothing of an answer is seen before its end

# Fields that distinguish versions of a file, in a listing as well as for a single file.
_VERSION = (
    "ETag", "etag", "LastModified", "last_modified", "mtime", "updated", "created",
    "generation", "md5Hash", "checksum", "blob_id", "sha",
)  # fmt: skip
_RANGE = re.compile(r"bytes (\d{1,20})-(\d{1,20})/(\d{1,20})")


class Transport(ABC):
    """One remote file. `head` holds the first bytes, as many as opening it returned."""

    url: str
    size: int
    identity: Identity
    head: bytes = b""
    compares_answers = False  # True if every answer says whether the file is still the same

    def fetch(self, start: int, stop: int) -> bytes:
        """Return bytes `start` to `stop` of the file; broken transfers are continued.

        Raises InputError if the network fails, InputChangedError if the file is another one.
        """
        data = bytearray()
        failures, since = 0, time.monotonic()
        while len(data) < stop - start:
            before = len(data)
            reason: Exception = ConnectionError("the answer is too short")
            try:
                self._fetch(start + before, stop, data)
            except Exception as error:
                reason = error
            if len(data) < stop - start:
                if len(data) - before >= PROGRESS:
                    failures, since = 0, time.monotonic()
                failures += 1
                self._pause(failures, since, reason, opening=False)
        return bytes(data)

    def _pause(self, failures: int, since: float, reason: Exception, *, opening: bool) -> None:
        """Wait before the next attempt; the attempts `since` that time made no progress.

        Raises the translated `reason` where a retry would not help, or after too many or too long.
        """
        wait = reason.after if isinstance(reason, Status) else None
        tries = TRIES if wait is None else TOLD
        late = time.monotonic() - since > PATIENCE
        if failures >= tries or late or not passing(reason):
            raise refused(reason, self.url, opening=opening) from presentable(reason, self.url)
        time.sleep(PAUSE * 2 ** (failures - 1) if wait is None else min(wait, LONGEST))

    @abstractmethod
    def _fetch(self, start: int, stop: int, into: bytearray) -> None:
        """Append bytes `start` to `stop`, or as many as arrived before the transfer broke."""

    @abstractmethod
    def look(self) -> Identity:
        """Return the identity that the file has now. Raises what opening it raises."""

    def close(self) -> None:  # noqa: B027 - most keep nothing open
        """Release what is kept open."""


class Http(Transport):
    """A file on an HTTP server.

    Raises the errors of :func:`refused` for the server's answers, InputError if it sends no ranges
    of a large file.
    """

    compares_answers = True

    def __init__(self, fs: Any, url: str) -> None:
        self.url = url
        self._fs = fs
        first = self._open(HEAD)
        self.size, self.identity, self.head = first.size, first.identity, bytes(first.data)
        self._whole = first.status == 200
        if self.size < 0 and len(self.head) < PAGE:
            self.size = len(self.head)
        if self._whole and len(self.head) != self.size:
            why = f"{self.size:,} bytes are too many"
            if self.size < 0:
                why = "it does not say how many bytes there are"
            raise InputError(
                f"its server sends whole files only, no ranges, and {why}",
                where=shown(url),
                hint=_fetch_it(url),
            )

    def look(self) -> Identity:
        return self._open(1).identity

    def _open(self, wanted: int) -> _Opening:
        """Return the answer to a request for the first bytes, after as many attempts as needed."""
        failures, since = 0, time.monotonic()
        while True:
            answer = _Opening(self.url, wanted)
            try:
                self._ask(0, wanted, answer)
                return answer
            except Exception as error:
                failures += 1
                self._pause(failures, since, error, opening=True)

    def _fetch(self, start: int, stop: int, into: bytearray) -> None:
        if self._whole:
            into += self.head[start:stop]
        else:
            self._ask(start, stop, _Continuing(self.url, start, stop, self.identity, into))

    def _ask(self, start: int, stop: int, answer: _Answer) -> None:
        from fsspec.asyn import sync

        sync(self._fs.loop, _get, self._fs, self.url, start, stop, answer)


async def _get(fs: Any, url: str, start: int, stop: int, answer: _Answer) -> None:
    import aiohttp

    session = await fs.set_session()
    options = dict(fs.kwargs)
    # Compressed, the bytes of a range would be others.
    ranged = {
        **options.pop("headers", {}),
        "Range": f"bytes={start}-{stop - 1}",
        "Accept-Encoding": "identity",
    }
    longest = 2 * SILENCE + (stop - start) / SLOWEST
    patience = aiohttp.ClientTimeout(total=longest, sock_connect=SILENCE, sock_read=SILENCE)
    asked = session.get(fs.encode_url(url), headers=ranged, **{"timeout": patience, **options})
    async with asked as response:
        wanted = answer.judge(response.status, response.headers)
        while len(answer.data) < wanted:
            piece = await response.content.read(wanted - len(answer.data))
            if not piece:
                break
            answer.data += piece


class _Answer(ABC):
    """The expected answer to a request; its bytes are appended to `data`."""

    url: str
    data: bytearray

    @abstractmethod
    def judge(self, status: int, headers: Mapping[str, str]) -> int:
        """Return the length that `data` should reach. Raises if the answer is unusable."""

    def _range(self, headers: Mapping[str, str], start: int) -> int:
        """Return the size of the file, checking that the answer is a range from `start`."""
        found = _RANGE.fullmatch(headers.get("Content-Range", ""))
        if found is None or int(found[1]) != start:
            raise InputError("its server does not send the requested range", where=shown(self.url))
        return int(found[3])


class _Opening(_Answer):
    """The first answer, with size and identity of the file. The size is -1 while unknown."""

    def __init__(self, url: str, wanted: int) -> None:
        self.url = url
        self.wanted = wanted
        self.data = bytearray()

    def judge(self, status: int, headers: Mapping[str, str]) -> int:
        self.status = status
        if status == 206:
            self.size = self._range(headers, 0)
        elif status == 416 and headers.get("Content-Range") == "bytes */0":
            self.size = 0
        elif status == 200:
            self.size = _length(headers)
        else:
            raise _refusal(status, headers)
        self.identity = _identity(self.size, headers)
        if status == 206 or self.wanted == 1:
            return min(self.wanted, self.size)
        if self.size < 0:
            return PAGE
        return self.size if self.size <= WHOLE else 0


class _Continuing(_Answer):
    """A later answer: a range of the same file."""

    def __init__(
        self, url: str, start: int, stop: int, identity: Identity, data: bytearray
    ) -> None:
        self.url = url
        self.start = start
        self.identity = identity
        self.data = data
        self.end = len(data) + stop - start

    def judge(self, status: int, headers: Mapping[str, str]) -> int:
        if status not in (200, 206):
            raise _refusal(status, headers)
        size = self._range(headers, self.start) if status == 206 else _length(headers)
        if _identity(size, headers) != self.identity:
            raise InputChangedError(
                "changed while it was read", where=shown(self.url), hint="run the command again"
            )
        if status == 200:
            raise InputError(
                "its server stopped sending ranges", where=shown(self.url), hint=_fetch_it(self.url)
            )
        return self.end


def _refusal(status: int, headers: Mapping[str, str]) -> Status:
    after = headers.get("Retry-After", "")
    return Status(status, int(after) if after.isdecimal() and len(after) < 9 else None)


def _length(headers: Mapping[str, str]) -> int:
    length = headers.get("Content-Length", "")
    return int(length) if length.isdecimal() and len(length) < 20 else -1


def _identity(size: int, headers: Mapping[str, str]) -> Identity:
    return ("http", size, headers.get("ETag", ""), headers.get("Last-Modified", ""))


def _fetch_it(url: str) -> str:
    return f"fetch it first: curl -O '{shown(url)}'"


class Stored(Transport):
    """A file in any other file system that fsspec knows."""

    def __init__(self, fs: Any, path: str, url: str, info: Mapping[str, Any]) -> None:
        if not isinstance(info.get("size"), int):
            raise InputError(
                "its size is not known", where=shown(url), hint="copy it to a local file first"
            )
        self.url = url
        self.size = info["size"]
        self.identity = _version(info)
        self._fs = fs
        self._path = path
        self._file: Any = None
        self._lock = threading.Lock()

    def look(self) -> Identity:
        return _version(information(self._fs, self._path, self.url))

    def _fetch(self, start: int, stop: int, into: bytearray) -> None:
        if self._fs.async_impl:  # one request for this range, and several of them at a time
            seconds = SILENCE + (stop - start) / SLOWEST_STORED
            into += _within(seconds, self._fs, "cat_file", self._path, start=start, end=stop)
            return
        with self._lock:
            if self._file is None:
                self._file = self._fs.open(self._path, "rb", cache_type="none")
            self._file.seek(start)
            into += self._file.read(stop - start)

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _within(seconds: float, fs: Any, name: str, *args: object, **options: object) -> Any:
    """Call a method of a file system. Raises TimeoutError after `seconds`, if it is asynchronous.

    Libraries of stores repeat a request several times, each with a time limit of its own.
    """
    if not fs.async_impl:
        return getattr(fs, name)(*args, **options)
    from fsspec.asyn import sync

    return sync(fs.loop, getattr(fs, f"_{name}"), *args, timeout=seconds, **options)


def information(fs: Any, path: str, url: str) -> Mapping[str, Any]:
    """Return what a file system reports about a file or folder now."""
    try:
        fs.invalidate_cache(path)
        found: Mapping[str, Any] = _within(PATIENCE, fs, "info", path)
    except Exception as error:
        raise refused(error, url) from presentable(error, url)
    return found


def _version(info: Mapping[str, Any]) -> Identity:
    return (
        "stored",
        info["size"],
        *(f"{key}={_moment(info[key])}" for key in _VERSION if info.get(key)),
    )


def _moment(value: object) -> object:
    """Return a time as seconds, other values as they are.

    Some file systems give times in one form in a listing and in another for a file.
    """
    return value.timestamp() if isinstance(value, datetime) else value
