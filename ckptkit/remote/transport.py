"""Download byte ranges over HTTP, or from any other file system of fsspec.

For HTTP, this module uses the session of fsspec directly, because it needs the status and headers
of each response. The first response contains the size and identity of the file. The status of the
first response shows whether the server supports byte ranges. A HEAD request would not show whether
the server supports ranges. Some servers also reject HEAD for signed URLs. The headers of every
later response show whether the file has changed. If a transfer breaks, this module sends the
request again.

If a network or server fails, this module raises an error with a hint. The libraries that fsspec
uses raise errors of many classes. The error messages of these libraries may contain a URL with
secrets. If the URL may contain a secret, this module does not show the error messages of the
libraries.
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
from typing import Any, NamedTuple, TypeVar

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

HEAD = 64 << 10  # number of bytes in the first request
# If a server does not support byte ranges, ckptkit downloads complete files up to this size.
WHOLE = 64 << 20
# Maximum number of bytes to download if the server does not send the size of a file. Such a file is
# often an error page.
PAGE = 1 << 20
TRIES = 5  # maximum number of attempts
TRIES_RETRY_AFTER = 12  # maximum number of attempts if the server sends the header Retry-After
# Seconds before the second attempt. The pause doubles before each later attempt.
PAUSE = 0.25
LONGEST = 30  # Maximum number of seconds to wait, even if the header Retry-After asks for more.
SILENCE = 60  # Number of seconds without data after which ckptkit closes a connection.
PATIENCE = 150  # Number of seconds after which ckptkit stops retrying.
# Speed in bytes per second at which the timeout of a request still allows the complete transfer.
SLOWEST = 4096
# The speed, as for SLOWEST, if a library downloads a complete response at once.
SLOWEST_STORED = 64 << 10

# Keys of fsspec's file information whose values differ between versions of a file
VERSION = (
    "ETag", "etag", "md5Hash", "checksum", "sha", "blob_id", "generation", "mtime",
    "LastModified", "last_modified", "updated", "created",
)  # fmt: skip
_RANGE = re.compile(r"bytes (\d{1,20})-(\d{1,20})/(\d{1,20})")


T = TypeVar("T")


class Response(NamedTuple):
    """A response to an HTTP request: the status, the size of the file (-1 if unknown), the identity
    of the file, and the requested bytes."""

    status: int
    size: int
    identity: Identity
    data: bytes


class Transport(ABC):
    """One remote file. `head` contains the bytes that the first request returned."""

    url: str
    size: int
    identity: Identity
    head: bytes = b""
    compares_answers = False  # True if every response shows whether the file is unchanged

    def fetch(self, start: int, stop: int) -> bytes:
        """Download the bytes from offset `start` to `stop`. Retry if the transfer breaks.

        Raises InputError if the network fails. Raises InputChangedError if the file has changed.
        """

        def attempt() -> bytes:
            data = self._fetch(start, stop)
            if len(data) < stop - start:
                raise ConnectionError("the response is too short")
            return data

        return self._tried(attempt, opening=False)

    def _tried(self, attempt: Callable[[], T], *, opening: bool) -> T:
        """Return the result of `attempt`. Retry if the connection breaks or the server is busy.

        Raises a CkptkitError if another attempt cannot help, or after too many attempts or seconds.
        """
        failures, began = 0, time.monotonic()
        while True:
            try:
                return attempt()
            except Exception as error:
                failures += 1
                wait = error.after if isinstance(error, Status) else None
                tries = TRIES if wait is None else TRIES_RETRY_AFTER
                late = time.monotonic() - began > PATIENCE
                if failures >= tries or late or not passing(error):
                    cause = presentable(error, self.url)
                    raise refused(error, self.url, opening=opening) from cause
            time.sleep(PAUSE * 2 ** (failures - 1) if wait is None else min(wait, LONGEST))

    @abstractmethod
    def _fetch(self, start: int, stop: int) -> bytes:
        """Return the bytes from offset `start` to `stop`. If the connection breaks, return fewer
        bytes or raise an error."""

    @abstractmethod
    def look(self) -> Identity:
        """Return the current identity of the file. Raises the same errors as opening the file."""

    def close(self) -> None:  # noqa: B027 - most transports keep nothing open
        """Release open resources."""


class Http(Transport):
    """A file on an HTTP server.

    Raises InputError if the file is large and the server does not support byte ranges. For any
    other unusable response, raises the error that :func:`refused` returns.
    """

    compares_answers = True

    def __init__(self, fs: Any, url: str) -> None:
        self.url = url
        self._fs = fs
        status, self.size, self.identity, self.head = self._open(HEAD)
        self._whole = status == 200
        if self.size < 0 and len(self.head) < PAGE:
            self.size = len(self.head)
        if self._whole and len(self.head) != self.size:
            why = f"the file is too large ({self.size:,} bytes)"
            if self.size < 0:
                why = "the size is unknown"
            raise InputError(
                f"the server does not support byte ranges, and {why}",
                where=shown_url(url),
                hint=_fetch_it(url),
            )

    def look(self) -> Identity:
        return self._open(1).identity

    def _open(self, wanted: int) -> Response:
        return self._tried(lambda: self._ask(0, wanted), opening=True)

    def _fetch(self, start: int, stop: int) -> bytes:
        if self._whole:
            return self.head[start:stop]
        return self._ask(start, stop, self.identity).data

    def _ask(self, start: int, stop: int, known: Identity | None = None) -> Response:
        from fsspec.asyn import sync

        found: Response = sync(self._fs.loop, self._get, start, stop, known)
        return found

    async def _get(self, start: int, stop: int, known: Identity | None) -> Response:
        """Return the response to a request for the bytes from offset `start` to `stop`.

        If the connection breaks, return fewer bytes or raise an error. `known` is the identity that
        the first request returned. `known` is None for the first request.
        """
        import aiohttp

        session = await self._fs.set_session()
        options = dict(self._fs.kwargs)
        # "identity" requests an uncompressed response. Offsets in a compressed response would
        # differ from offsets in the file.
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
                # The server does not support byte ranges. If the file is small, read the complete
                # file. If the size of the file is unknown, read at most PAGE bytes.
                whole = size if size <= WHOLE else 0
                wanted = PAGE if size < 0 else whole
            data = bytearray()
            while len(data) < wanted:
                piece = await response.content.read(wanted - len(data))
                if not piece:
                    break
                data += piece
            return Response(status, size, identity, bytes(data))

    def _judge(
        self, status: int, headers: Mapping[str, str], start: int, known: Identity | None
    ) -> tuple[int, int, Identity]:
        """Return the HTTP status, the size of the file (-1 if unknown) and its identity.

        Raises Status for an unexpected HTTP status, InputError if the response does not contain the
        requested bytes, and InputChangedError if the file has changed.
        """
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
                "the server sends the complete file instead of the requested range",
                where=where,
                hint=_fetch_it(self.url),
            )
        return status, size, identity


def _fetch_it(url: str) -> str:
    return f"download the file first: curl -O '{shown_url(url)}'"


class Stored(Transport):
    """A file in a file system of fsspec other than HTTP."""

    def __init__(self, fs: Any, path: str, url: str, info: Mapping[str, Any]) -> None:
        if not isinstance(info.get("size"), int):
            raise InputError(
                "its size is unknown", where=shown_url(url), hint="download the file first"
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

    def _fetch(self, start: int, stop: int) -> bytes:
        data: bytes
        if self._fs.async_impl:  # without the lock, several threads can send requests
            seconds = SILENCE + (stop - start) / SLOWEST_STORED
            data = _within(seconds, self._fs, "cat_file", self._path, start=start, end=stop)
            return data
        with self._lock:
            if self._file is None:
                self._file = self._fs.open(self._path, "rb", cache_type="none")
            self._file.seek(start)
            data = self._file.read(stop - start)
        return data

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _within(seconds: float, fs: Any, name: str, *args: object, **options: object) -> Any:
    """Call a method of a file system.

    If the file system is asynchronous, raise TimeoutError after `seconds`. Without the timeout, the
    libraries of object stores retry a request several times, and wait for a timeout each time.
    """
    if not fs.async_impl:
        return getattr(fs, name)(*args, **options)
    from fsspec.asyn import sync

    return sync(fs.loop, getattr(fs, f"_{name}"), *args, timeout=seconds, **options)


def information(fs: Any, path: str, url: str) -> Mapping[str, Any]:
    """Return fsspec's current information (`info`) about a file or folder."""
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
    """Convert a datetime to seconds. Return other values unchanged.

    Some file systems return times of different types in listings and for single files.
    """
    return value.timestamp() if isinstance(value, datetime) else value


# Failures


# Maps the common URL schemes to the package to install. For other schemes, the message of fsspec
# names the package.
_PACKAGES = {"http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "gs": "gcsfs",
             "hf": "huggingface_hub"}  # fmt: skip
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_CREDENTIALS = ("NoCredentialsError", "DefaultCredentialsError", "PartialCredentialsError")
_TYPED = "check the URL and the network"
_SET_CREDENTIALS = (
    "set the credentials that the tools of the service use, or set FSSPEC_S3_ANON=true for public "
    "S3 buckets"
)


class Status(Exception):
    """An unexpected HTTP status. `after` is the number of seconds in the header Retry-After."""

    def __init__(self, status: int, after: int | None = None) -> None:
        super().__init__(f"HTTP status {status}")
        self.status, self.after = status, after


class MissingError(MissingFileError):
    """Raised for a URL that does not exist."""


def passing(error: BaseException) -> bool:
    """Return whether another attempt may succeed.

    Return True if the connection broke or timed out, or if the server is busy.
    """
    status = _status(error)
    if status is not None:
        return status in _PASSING
    names = {each.__name__ for each in type(error).__mro__}
    if names & {"ClientConnectorError", "InvalidURL", "TooManyRedirects"}:
        return False
    return bool(names & {"ClientError", "TimeoutError", "ConnectionError", "HTTPClientError"})


def refused(error: Exception, url: str, *, opening: bool = True) -> CkptkitError:
    """Convert a library's error to a CkptkitError.

    `opening` is True if the error occurred while opening `url`.
    """
    if isinstance(error, CkptkitError):
        return error
    kind, message, hint = _meaning(error, url, opening)
    return kind(message, where=shown_url(url), hint=hint)


def _meaning(
    error: Exception, url: str, opening: bool
) -> tuple[type[CkptkitError], str, str | None]:
    """Return the class, message and hint of the CkptkitError for a library's error."""
    causes = [*_causes(error)]
    status = next((found for each in causes if (found := _status(each)) is not None), None)
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
        busy = "the server is busy or broken; try again later" if status in _PASSING else None
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
    is_short = url.startswith("hf://") and "/" not in url.removeprefix("hf://").rstrip("/")
    owned = "a repository has an owner: hf://OWNER/NAME" if is_short else None
    return InputError, f"cannot be read: {_text(error, url)}", owned


@contextmanager
def translated(
    url: str, translation: Callable[[Exception, str], CkptkitError] = refused
) -> Iterator[None]:
    """Convert exceptions inside the block to CkptkitErrors by calling `translation`."""
    try:
        yield
    except Exception as error:
        raise translation(error, url) from presentable(error, url)


def presentable(error: Exception, url: str) -> Exception | None:
    """Return `error`, or None if its message could contain a secret of `url`.

    The caller uses the result as the `__cause__` of another error.
    """
    return error if shown_url(url) == url else None


def not_written(error: Exception, url: str) -> CkptkitError:
    """Convert an error that occurred while writing to `url` to an OutputError."""
    if isinstance(error, CkptkitError):
        return error
    known = refused(error, url)
    return OutputError(f"cannot be written: {known.message}", where=known.where, hint=known.hint)


def unknown(error: Exception, url: str) -> CkptkitError:
    """Convert the error that fsspec raises for a URL without a known file system."""
    scheme = url.rpartition("::")[2].partition("://")[0].lower()
    name = shown_url(url)
    if isinstance(error, ImportError):
        message = f"{scheme}:// needs a package that is not installed"
        hint = f"pip install {_PACKAGES[scheme]}" if scheme in _PACKAGES else str(error)
        return PathError(message, where=name, hint=hint)
    from fsspec.registry import known_implementations, registry

    is_known = scheme in registry or scheme in known_implementations
    if isinstance(error, ValueError) and not is_known:
        return PathError(
            f"fsspec has no file system for {scheme}://",
            where=name,
            hint="check the scheme of the URL",
        )
    return refused(error, url)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    """Return the HTTP status in an error. Return None for an error without a status."""
    if _is_malformed(error):
        return None
    status = getattr(error, "status", None)
    answer = getattr(error, "response", None)
    if status is None and isinstance(answer, dict):  # botocore: s3fs
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    elif status is None:  # requests: huggingface_hub
        status = getattr(answer, "status_code", None)
    return status if isinstance(status, int) and status else None  # 0: too many redirects


def _is_malformed(error: BaseException) -> bool:
    """Return whether aiohttp failed to parse a response.

    The error of aiohttp has the status 400, although the server did not send the status 400.
    """
    return "HttpProcessingError" in (each.__name__ for each in type(error.__cause__).__mro__)


def _text(error: Exception, url: str) -> str:
    """Return the message of a library's error.

    If the message could contain a secret, return only the name of the error's class.
    """
    if _is_malformed(error):
        return "the response is not valid HTTP"
    if isinstance(error, TimeoutError):
        return "the server stopped sending"
    lines = str(error).strip().splitlines()
    line = lines[0] if lines and shown_url(url) == url else ""
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
