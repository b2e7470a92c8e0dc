"""Translation of network and server failures into errors with hints.

The libraries below fsspec raise errors of any class, whose texts may hold the URL with its secrets.
Their statuses, reasons and classes are used here; their texts are shown only where the URL has no
secret.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator

from ckptkit.core.errors import (
    CkptkitError,
    InputChangedError,
    InputError,
    MissingFileError,
    OutputError,
    PathError,
)
from ckptkit.core.urls import shown, without_query

# The package to install for a scheme; for others, the message of fsspec names one.
_PACKAGES = {
    "http": "aiohttp", "https": "aiohttp", "s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs",
    "gcs": "gcsfs", "hf": "huggingface_hub", "az": "adlfs", "abfs": "adlfs", "abfss": "adlfs",
    "oci": "ocifs", "oss": "ossfs", "sftp": "paramiko", "ssh": "paramiko", "smb": "smbprotocol",
    "webdav": "webdav4",
}  # fmt: skip
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_CREDENTIALS = ("NoCredentialsError", "DefaultCredentialsError", "PartialCredentialsError")
_TYPED = "check the URL and the network"


class Status(Exception):
    """An unexpected status of an HTTP server, and after how many seconds it wants to be asked."""

    def __init__(self, status: int, after: int | None = None) -> None:
        super().__init__(f"HTTP status {status}")
        self.status, self.after = status, after


class MissingError(MissingFileError):
    """The URL does not exist."""


def passing(error: BaseException) -> bool:
    """Return whether a retry may help: a connection broke or timed out, or the server is busy."""
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
    """Translate an error of a library about `url`, raised on opening or later."""
    if isinstance(error, CkptkitError):
        return error
    name = shown(url)
    if misled := next(filter(None, map(_misled, _causes(error))), None):
        return InputError(misled, where=name, hint=_TYPED)
    status = next((found for each in _causes(error) if (found := _status(each)) is not None), None)
    missing = isinstance(error, FileNotFoundError) and status is None
    if missing or status in (404, 410):
        if opening:
            return _missing(error, url, name)
        return InputChangedError("was removed while it was read", where=name)
    if status in (401, 403) or isinstance(error, PermissionError):
        answer = f" (HTTP status {status})" if status else ""
        return PathError(
            f"access is denied{answer}",
            where=name,
            hint="check your credentials, and whether the URL has expired",
        )
    if status in (412, 416):
        return InputChangedError(
            "changed while it was read", where=name, hint="run the command again"
        )
    if status is not None:
        hint = "the server is busy or broken: try again later" if status in _PASSING else None
        return InputError(f"the server answers with HTTP status {status}", where=name, hint=hint)
    return _unreachable(error, url, name)


def presentable(error: Exception, url: str) -> Exception | None:
    """Return `error` as a cause to chain; None where its text could reveal a secret of `url`."""
    return error if shown(url) == url else None


def not_written(error: Exception, url: str) -> CkptkitError:
    """Translate an error of a library that failed to write to `url`."""
    if isinstance(error, CkptkitError):
        return error
    known = refused(error, url)
    return OutputError(f"cannot be written: {known.message}", where=known.where, hint=known.hint)


def unknown(error: Exception, url: str) -> CkptkitError:
    """Translate the error of fsspec where it has no file system for `url`."""
    scheme = url.rpartition("::")[2].partition("://")[0].lower()
    name = shown(url)
    if isinstance(error, ImportError):
        package = _PACKAGES.get(scheme)
        hint = f"pip install {package}" if package else str(error)
        return PathError(
            f"{scheme}:// needs a package that is not installed", where=name, hint=hint
        )
    if isinstance(error, ValueError) and not _is_known(scheme):
        return PathError(
            f"no file system is known for {scheme}://",
            where=name,
            hint="fsspec lists those it knows",
        )
    return refused(error, url)


def _is_known(scheme: str) -> bool:
    """Return whether fsspec has a file system for a scheme."""
    from fsspec.registry import known_implementations, registry

    return scheme in registry or scheme in known_implementations


def _misled(error: BaseException) -> str | None:
    """Describe what is wrong with a server's redirection, None if nothing is."""
    names = {each.__name__ for each in type(error).__mro__}
    if "TooManyRedirects" in names:
        return "its server redirects from one place to the next without end"
    if names & {"RedirectClientError", "NonHttpUrlClientError"}:
        return "its server redirects to a URL that is not http or https, which is not followed"
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    """Return the status that a server answered with, None for other failures."""
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
    """Return whether aiohttp could not parse an answer; the status 400 of its error is its own."""
    return "HttpProcessingError" in (each.__name__ for each in type(error.__cause__).__mro__)


def _code(error: BaseException) -> object:
    """Return the code of an error of S3, None for others."""
    answer = getattr(error, "response", None)
    return answer.get("Error", {}).get("Code") if isinstance(answer, dict) else None


def _missing(error: Exception, url: str, name: str) -> CkptkitError:
    if any(_code(each) == "NoSuchBucket" for each in _causes(error)):
        bucket = without_query(url).partition("://")[2].partition("/")[0]
        return MissingError(f"there is no bucket {bucket}", where=name)
    return MissingError("does not exist", where=name)


def _unreachable(error: Exception, url: str, name: str) -> CkptkitError:
    for each in _causes(error):
        if type(each).__name__ in _CREDENTIALS:
            return PathError(
                "needs credentials, and there are none",
                where=name,
                hint="set them as for the service's own tools; "
                "FSSPEC_S3_ANON=true reads public buckets of S3",
            )
        reason = getattr(each, "os_error", each)
        if isinstance(reason, socket.gaierror):
            return PathError(
                "its host is not known: " + (reason.strerror or "no address"),
                where=name,
                hint=_TYPED,
            )
        if isinstance(reason, ConnectionRefusedError):
            return PathError("its host refuses the connection", where=name, hint=_TYPED)
    if passing(error):
        return InputError(
            f"the connection broke: {_text(error, url)}", where=name, hint="try again later"
        )
    return InputError(f"cannot be read: {_text(error, url)}", where=name)


def _text(error: Exception, url: str) -> str:
    """Return the library's message, or its class alone where the text could reveal a secret."""
    if _is_malformed(error):
        return "the server's answer does not follow HTTP"
    if isinstance(error, TimeoutError):
        return "the server sends nothing more"
    lines = str(error).strip().splitlines()
    line = lines[0] if lines and shown(url) == url else ""
    return f"{type(error).__name__}: {line}" if line else type(error).__name__
