"""Transports of byte ranges: HTTP, or any other file system of fsspec.

HTTP requests are made directly, through fsspec's session, because their statuses and headers
matter. The first response gives the size, the identity, and whether the server supports ranges. A
HEAD request would not show whether the server supports ranges, and signed URLs reject HEAD. Every
later response shows whether the file has changed. An interrupted transfer is resumed.

Failures of networks and servers become errors with hints. Libraries below fsspec raise errors of
any class, whose messages may contain the URL with its secrets. This module uses their statuses,
reasons and classes, and shows their messages only if the URL contains no secret.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from ckptkit.core.bytesource import Identity
from ckptkit.core.errors import (
    CkptkitError,
    InputChangedError,
    InputError,
    MissingFileError,
    OutputError,
    PathError,
)
from ckptkit.core.text import shown_url, without_query

HEAD = 64 << 10  # bytes of the first request
WHOLE = 64 << 20  # maximum bytes of a file to download whole from a server without ranges
PAGE = 1 << 20  # bytes to read of a file of unknown length, often an error page
PROGRESS = 64 << 10  # bytes that reset the count of failures, even if the connection broke then
TRIES = 5  # attempts in a row without progress
TRIES_RETRY_AFTER = 12  # attempts without progress, if the server sends Retry-After
PAUSE = 0.25  # seconds before the second attempt; doubled before each later attempt
LONGEST = 30  # maximum number of seconds before the next attempt, despite Retry-After
SILENCE = 60  # seconds without a byte after which a connection counts as broken
PATIENCE = 150  # seconds without progress after which ckptkit gives up
SLOWEST = 4096  # bytes per second; slower requests time out in the end
SLOWEST_STORED = 64 << 10  # bytes per second, for libraries that return whole responses

# Fields that distinguish versions of a file, in a listing as well as for a single file.
VERSION = (
    "ETag", "etag", "md5Hash", "checksum", "sha", "blob_id", "generation", "mtime",
    "LastModified", "last_modified", "updated", "created",
)  # fmt: skip
_RANGE = re.compile(r"bytes (\d{1,20})-(\d{1,20})/(\d{1,20})")


class Transport(ABC):
    """One remote file. `head` contains the first bytes, which the opening request returned."""

    url: str
    size: int
    identity: Identity
    head: bytes = b""
    compares_answers = False  # True if every response shows whether the file is unchanged

    def fetch(self, start: int, stop: int) -> bytes:
        """Return bytes `start` to `stop` of the file. Broken transfers are resumed.

        Raises InputError if the network fails, InputChangedError if the file has changed.
        """
        data = bytearray()
        failures, since = 0, time.monotonic()
        while len(data) < stop - start:
            before = len(data)
            reason: Exception = ConnectionError("the response is too short")
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
        """Wait before the next attempt. `since` is the time of the last progress.

        Raises the translated `reason` if a retry cannot help, or after too many attempts or
        seconds.
        """
        wait = reason.after if isinstance(reason, Status) else None
        tries = TRIES if wait is None else TRIES_RETRY_AFTER
        late = time.monotonic() - since > PATIENCE
        if failures >= tries or late or not passing(reason):
            raise refused(reason, self.url, opening=opening) from presentable(reason, self.url)
        time.sleep(PAUSE * 2 ** (failures - 1) if wait is None else min(wait, LONGEST))

    @abstractmethod
    def _fetch(self, start: int, stop: int, into: bytearray) -> None:
        """Append bytes `start` to `stop`, or fewer if the transfer breaks."""

    @abstractmethod
    def look(self) -> Identity:
        """Return the current identity of the file. Raises the same errors as opening the file."""

    def close(self) -> None:  # noqa: B027 - most transports keep nothing open
        """Release open resources."""


class Http(Transport):
    """A file on an HTTP server.

    Raises the errors of :func:`refused` for the server's responses, and InputError if the server
    does not support ranges of a large file.
    """

    compares_answers = True

    def __init__(self, fs: Any, url: str) -> None:
        self.url = url
        self._fs = fs
        head = bytearray()
        status, self.size, self.identity = self._open(head)
        self.head, self._whole = bytes(head), status == 200
        if self.size < 0 and len(self.head) < PAGE:
            self.size = len(self.head)
        if self._whole and len(self.head) != self.size:
            why = f"{self.size:,} bytes are too many"
            if self.size < 0:
                why = "the size is unknown"
            raise InputError(
                f"the server supports only whole files, not ranges, and {why}",
                where=shown_url(url),
                hint=_fetch_it(url),
            )

    def look(self) -> Identity:
        return self._open(bytearray(), 1)[2]

    def _open(self, into: bytearray, wanted: int = HEAD) -> tuple[int, int, Identity]:
        """Append the first bytes. Return the status, and the size and identity of the file."""
        failures, since = 0, time.monotonic()
        while True:
            try:
                return self._ask(0, wanted, into)
            except Exception as error:
                into.clear()
                failures += 1
                self._pause(failures, since, error, opening=True)

    def _fetch(self, start: int, stop: int, into: bytearray) -> None:
        if self._whole:
            into += self.head[start:stop]
        else:
            self._ask(start, stop, into, self.identity)

    def _ask(
        self, start: int, stop: int, into: bytearray, known: Identity | None = None
    ) -> tuple[int, int, Identity]:
        from fsspec.asyn import sync

        found: tuple[int, int, Identity] = sync(self._fs.loop, self._get, start, stop, into, known)
        return found

    async def _get(
        self, start: int, stop: int, into: bytearray, known: Identity | None
    ) -> tuple[int, int, Identity]:
        """Append a range of the file, or fewer bytes if the connection breaks.

        `known` is the identity of the opened file, None for the first request.
        """
        import aiohttp

        session = await self._fs.set_session()
        options = dict(self._fs.kwargs)
        # A range of compressed content would contain other bytes.
        ranged = {
            **options.pop("headers", {}),
            "Range": f"bytes={start}-{stop - 1}",
            "Accept-Encoding": "identity",
        }
        longest = 2 * SILENCE + (stop - start) / SLOWEST
        patience = aiohttp.ClientTimeout(total=longest, sock_connect=SILENCE, sock_read=SILENCE)
        url = self._fs.encode_url(self.url)
        async with session.get(url, headers=ranged, **{"timeout": patience, **options}) as response:
            status, size, identity = self._judge(response.status, response.headers, start, known)
            wanted = stop - start
            if known is None and status == 200 and wanted > 1:
                # No ranges: read the whole file if it is small, or of unknown size (a web page).
                whole = size if size <= WHOLE else 0
                wanted = PAGE if size < 0 else whole
            elif known is None:
                wanted = min(wanted, size)
            end = len(into) + wanted
            while len(into) < end:
                piece = await response.content.read(end - len(into))
                if not piece:
                    break
                into += piece
            return status, size, identity

    def _judge(
        self, status: int, headers: Mapping[str, str], start: int, known: Identity | None
    ) -> tuple[int, int, Identity]:
        """Return status, size (-1 if unknown) and identity. Raises for unusable responses."""
        where = shown_url(self.url)
        if status == 206:
            found = _RANGE.fullmatch(headers.get("Content-Range", ""))
            if found is None or int(found[1]) != start:
                raise InputError("the server does not send the requested range", where=where)
            size = int(found[3])
        elif status == 200:
            length = headers.get("Content-Length", "")
            size = int(length) if length.isdecimal() and len(length) < 20 else -1
        elif status == 416 and known is None and headers.get("Content-Range") == "bytes */0":
            size = 0
        else:
            after = headers.get("Retry-After", "")
            raise Status(status, int(after) if after.isdecimal() and len(after) < 9 else None)
        identity = ("http", size, headers.get("ETag", ""), headers.get("Last-Modified", ""))
        if known is not None and identity != known:
            raise InputChangedError(
                "changed while it was read", where=where, hint="run the command again"
            )
        if known is not None and status == 200:
            raise InputError(
                "the server stopped sending ranges", where=where, hint=_fetch_it(self.url)
            )
        return status, size, identity


def _fetch_it(url: str) -> str:
    return f"download it first: curl -O '{shown_url(url)}'"


class Stored(Transport):
    """A file in any other file system of fsspec."""

    def __init__(self, fs: Any, path: str, url: str, info: Mapping[str, Any]) -> None:
        if not isinstance(info.get("size"), int):
            raise InputError(
                "its size is unknown", where=shown_url(url), hint="copy it to a local file first"
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
        if self._fs.async_impl:  # one request per range, possibly several in parallel
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
    """Call a method of a file system. If it is asynchronous, raise TimeoutError after `seconds`.

    Without this limit, libraries of stores retry a request several times, with a timeout for each
    try.
    """
    if not fs.async_impl:
        return getattr(fs, name)(*args, **options)
    from fsspec.asyn import sync

    return sync(fs.loop, getattr(fs, f"_{name}"), *args, timeout=seconds, **options)


def information(fs: Any, path: str, url: str) -> Mapping[str, Any]:
    """Return the current information of a file system about a file or folder."""
    with translated(url):
        fs.invalidate_cache(path)
        found: Mapping[str, Any] = _within(PATIENCE, fs, "info", path)
    return found


def _version(info: Mapping[str, Any]) -> Identity:
    return (
        "stored",
        info["size"],
        *(f"{key}={moment(info[key])}" for key in VERSION if info.get(key)),
    )


def moment(value: object) -> object:
    """Convert a time to seconds; return other values unchanged.

    Some file systems use different types for times in listings and for single files.
    """
    return value.timestamp() if isinstance(value, datetime) else value


# Failures


# The package to install for a scheme. For other schemes, fsspec's message names the package.
_PACKAGES = {
    "http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs",
    "gcs": "gcsfs", "hf": "huggingface_hub", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs",
    "oci": "ocifs", "oss": "ossfs", "sftp": "paramiko", "ssh": "paramiko", "smb": "smbprotocol",
    "webdav": "webdav4",
}  # fmt: skip
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_CREDENTIALS = ("NoCredentialsError", "DefaultCredentialsError", "PartialCredentialsError")
_TYPED = "check the URL and the network"
_SET_CREDENTIALS = (
    "set them as for the service's own tools, or FSSPEC_S3_ANON=true for public S3 buckets"
)


class Status(Exception):
    """An unexpected HTTP status, and the seconds after which the server accepts a retry."""

    def __init__(self, status: int, after: int | None = None) -> None:
        super().__init__(f"HTTP status {status}")
        self.status, self.after = status, after


class MissingError(MissingFileError):
    """The URL does not exist."""


def passing(error: BaseException) -> bool:
    """Return whether a retry may help: the connection broke or timed out, or the server is busy."""
    if _misled(error) is not None:
        return False
    status = _status(error)
    if status is not None:
        return status in _PASSING
    names = {each.__name__ for each in type(error).__mro__}
    if names & {"ClientConnectorError", "InvalidURL"}:
        return False
    return bool(names & {"ClientError", "TimeoutError", "ConnectionError", "HTTPClientError"})


def refused(error: Exception, url: str, *, opening: bool = True) -> CkptkitError:
    """Convert a library's error to a CkptkitError. `opening`: while `url` was opened."""
    if isinstance(error, CkptkitError):
        return error
    kind, message, hint = _meaning(error, url, opening)
    return kind(message, where=shown_url(url), hint=hint)


def _meaning(
    error: Exception, url: str, opening: bool
) -> tuple[type[CkptkitError], str, str | None]:
    """Return class, message and hint of the CkptkitError for a library's error."""
    causes = [*_causes(error)]
    status = next((found for each in causes if (found := _status(each)) is not None), None)
    if misled := next(filter(None, map(_misled, causes)), None):
        return InputError, misled, _TYPED
    if status in (404, 410) or (status is None and isinstance(error, FileNotFoundError)):
        if not opening:
            return InputChangedError, "was removed while it was read", None
        answers = [getattr(each, "response", None) for each in causes]
        codes = [each.get("Error", {}).get("Code") for each in answers if isinstance(each, dict)]
        bucket = without_query(url).partition("://")[2].partition("/")[0]
        what = f"the bucket {bucket} " if "NoSuchBucket" in codes else ""
        return MissingError, f"{what}does not exist", None
    if status in (401, 403) or isinstance(error, PermissionError):
        answer = f" (HTTP status {status})" if status else ""
        hint = "check your credentials, and whether the URL has expired"
        return PathError, f"access is denied{answer}", hint
    if status in (412, 416):
        return InputChangedError, "changed while it was read", "run the command again"
    if status is not None:
        busy = "the server is busy or broken: try again later" if status in _PASSING else None
        return InputError, f"the server responds with HTTP status {status}", busy
    for each in causes:
        reason = getattr(each, "os_error", each)
        if type(each).__name__ in _CREDENTIALS:
            return PathError, "requires credentials, but none are set", _SET_CREDENTIALS
        if isinstance(reason, socket.gaierror):
            return PathError, f"its host is unknown: {reason.strerror or 'no address'}", _TYPED
        if isinstance(reason, ConnectionRefusedError):
            return PathError, "its host refuses the connection", _TYPED
    if passing(error):
        return InputError, f"the connection broke: {_text(error, url)}", "try again later"
    return InputError, f"cannot be read: {_text(error, url)}", None


@contextmanager
def translated(
    url: str, translation: Callable[[Exception, str], CkptkitError] = refused
) -> Iterator[None]:
    """Convert errors inside the block to CkptkitErrors, by `refused` or another function."""
    try:
        yield
    except Exception as error:
        raise translation(error, url) from presentable(error, url)


def presentable(error: Exception, url: str) -> Exception | None:
    """Return `error` as a cause to chain, None if its message could reveal a secret of `url`."""
    return error if shown_url(url) == url else None


def not_written(error: Exception, url: str) -> CkptkitError:
    """Convert an error of writing to `url` to an OutputError."""
    if isinstance(error, CkptkitError):
        return error
    known = refused(error, url)
    return OutputError(f"cannot be written: {known.message}", where=known.where, hint=known.hint)


def unknown(error: Exception, url: str) -> CkptkitError:
    """Convert fsspec's error for a URL without a file system."""
    scheme = url.rpartition("::")[2].partition("://")[0].lower()
    name = shown_url(url)
    if isinstance(error, ImportError):
        package = _PACKAGES.get(scheme)
        hint = f"pip install {package}" if package else str(error)
        return PathError(
            f"{scheme}:// needs a package that is not installed", where=name, hint=hint
        )
    from fsspec.registry import known_implementations, registry

    is_known = scheme in registry or scheme in known_implementations
    if isinstance(error, ValueError) and not is_known:
        return PathError(
            f"fsspec has no file system for {scheme}://",
            where=name,
            hint="check the scheme of the URL",
        )
    return refused(error, url)


def _misled(error: BaseException) -> str | None:
    """Describe an invalid redirect of a server; None for other errors."""
    names = {each.__name__ for each in type(error).__mro__}
    if "TooManyRedirects" in names:
        return "the server redirects in circles"
    if names & {"RedirectClientError", "NonHttpUrlClientError"}:
        return "the server redirects to a URL that is not http or https"
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of a response, None for other failures."""
    if _is_malformed(error):
        return None
    status = getattr(error, "status", None)
    answer = getattr(error, "response", None)
    if status is None and isinstance(answer, dict):  # botocore: s3fs
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    elif status is None:  # requests: huggingface_hub
        status = getattr(answer, "status_code", None)
    return status if isinstance(status, int) else None


def _is_malformed(error: BaseException) -> bool:
    """Return whether aiohttp failed to parse a response. aiohttp then sets status 400 itself."""
    return "HttpProcessingError" in (each.__name__ for each in type(error.__cause__).__mro__)


def _text(error: Exception, url: str) -> str:
    """Return the library's message, or only its class if the message could reveal a secret."""
    if _is_malformed(error):
        return "the response is not valid HTTP"
    if isinstance(error, TimeoutError):
        return "the server stopped sending"
    lines = str(error).strip().splitlines()
    line = lines[0] if lines and shown_url(url) == url else ""
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
