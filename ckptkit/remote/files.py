"""Read remote files and folders as byte sources, and list the versions of remote files."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

from ckptkit.core.bytesource import ByteSource, Folder, Identity, LocalFile, plain_name
from ckptkit.core.errors import InputChangedError, PathError
from ckptkit.core.text import in_folder, shown_url, split_url, without_query
from ckptkit.remote.transport import (
    VERSION,
    Http,
    MissingError,
    Stored,
    Transport,
    information,
    moment,
    not_written,
    translated,
    unknown,
)

PIECE = 4 << 20  # maximum number of bytes per request
FIRST = 64 << 10  # minimum number of bytes per request, because smaller requests are not faster
# If the gap between two ranges is at most GAP bytes, one request reads both ranges. Two requests
# would take longer.
GAP = 64 << 10
KEPT = 16 << 20  # maximum number of bytes in the cache
WINDOWS = 256  # maximum number of byte ranges in the cache
REQUESTS = 8  # maximum number of parallel requests


class _FetchedRange(NamedTuple):
    """Bytes of a file from offset `start`."""

    start: int
    data: bytes

    @property
    def end(self) -> int:
        return self.start + len(self.data)


class RemoteFile(ByteSource):
    """A file at a URL. `read` downloads only the requested byte ranges.

    Small reads use a cache of byte ranges. During sequential reads, the requests grow up to `PIECE`
    bytes. A pickle of this object contains the URL and the identity of the file. A worker process
    that unpickles the object opens the URL again. If the file has changed, unpickling raises
    InputChangedError.
    """

    remote = True

    def __init__(self, url: str, transport: Transport) -> None:
        self.url = url
        self.name = shown_url(url)
        self.size = transport.size
        self.identity = transport.identity
        self.compares_answers = transport.compares_answers
        self._transport = transport
        self._lock = threading.Lock()
        self._windows = [_FetchedRange(0, transport.head)]

    def __reduce__(self) -> tuple[object, ...]:
        return _reopen, (self.url, self.identity)

    def _read(self, offset: int, length: int) -> bytes:
        at, stop = offset, offset + length
        pieces = []
        while at < stop:
            pieces.append(self._kept(at, stop) or self._fetched(at, stop))
            at += len(pieces[-1])
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def will_read(self, ranges: Sequence[tuple[int, int]]) -> None:
        runs: list[tuple[int, int]] = []
        for offset, length in ranges:
            start, stop = runs[-1] if runs else (offset, -GAP - 1)
            if offset <= stop + GAP and offset + length <= start + PIECE:
                runs[-1] = (start, offset + length)
            else:
                runs.append((offset, offset + length))
        runs = [(start, stop) for start, stop in runs if not self._kept(start, stop)]
        if not runs:
            return
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(min(REQUESTS, len(runs))) as threads:
            fetched = threads.map(self._transport.fetch, *zip(*runs, strict=True))
            for (start, _), data in zip(runs, fetched, strict=True):
                self._keep(_FetchedRange(start, data))

    def _kept(self, at: int, stop: int) -> bytes:
        """Return cached bytes that begin at offset `at` and end at `stop` or before.

        If the cache does not contain the byte at `at`, return b"".
        """
        with self._lock:
            for number, window in enumerate(self._windows):
                if window.start <= at < window.end:
                    self._windows.append(self._windows.pop(number))
                    return window.data[at - window.start : stop - window.start]
        return b""

    def _fetched(self, at: int, stop: int) -> bytes:
        """Download the bytes from offset `at` to `stop`, and cache them.

        If the cache contains the byte before `stop`, download only the bytes before the cached
        range. To speed up sequential reads, the method may also download bytes after `stop`.
        """
        with self._lock:
            before = [each for each in self._windows if each.end <= at <= each.end + GAP]
            ahead = 2 * max((len(each.data) for each in before), default=0)
            after = [each for each in self._windows if at < each.start < stop <= each.end]
            stop = min((each.start for each in after), default=stop)
        end = min(max(stop, at + min(max(ahead, FIRST), PIECE)), at + PIECE, self.size)
        data = self._transport.fetch(at, end)
        if stop - at < PIECE:
            self._keep(_FetchedRange(at, data))
        return data[: stop - at]

    def _keep(self, window: _FetchedRange) -> None:
        """Add a byte range to the cache, and drop the least recently used ranges."""
        with self._lock:
            kept = self._windows
            kept.append(window)
            while len(kept) > WINDOWS or sum(len(each.data) for each in kept) > KEPT:
                del kept[0]

    def check_unchanged(self) -> None:
        try:
            same = self._transport.look() == self.identity
        except MissingError as error:
            raise InputChangedError("was removed while it was read", where=self.name) from error
        if not same:
            raise InputChangedError(
                "changed while it was read", where=self.name, hint="run the command again"
            )

    def folder_and_name(self) -> tuple[Folder, str]:
        url, name = split_url(self.url)
        folder = RemoteFolder(url)
        folder._open[name] = self
        return folder, name

    def close(self) -> None:
        self._windows.clear()
        self._transport.close()


def _reopen(url: str, identity: Identity) -> ByteSource:
    source = open_url(url)
    if not isinstance(source, RemoteFile) or source.identity != identity:
        raise InputChangedError("was replaced or changed", where=shown_url(url))
    return source


class RemoteFolder(Folder):
    """A folder at a URL.

    HTTP servers do not list folders, but ckptkit can open a file by its name.
    """

    def __init__(self, url: str) -> None:
        self.path = url
        self.name = shown_url(without_query(url))
        self._open: dict[str, ByteSource] = {}
        self._fs, self._place = filesystem(url)
        self._listed: Mapping[str, Mapping[str, Any]] | None = None

    def list(self) -> list[str]:
        return sorted(self._entries())

    def _entries(self) -> Mapping[str, Mapping[str, Any]]:
        """Map the name of each file and subfolder to fsspec's information about it."""
        _check_listable(self._fs, self.name)
        if self._listed is None:
            with translated(self.path):
                self._fs.invalidate_cache(self._place)
                found = self._fs.ls(self._place, detail=True)
            here = self._place.rstrip("/")  # some stores list the folder itself as an empty object
            found = [each for each in found if each["name"].rstrip("/") != here]
            self._listed = {each["name"].rstrip("/").rpartition("/")[2]: each for each in found}
        return self._listed

    def __contains__(self, name: str) -> bool:
        plain_name(name, self.name)
        if not is_web(self._fs):
            return name in self._entries()
        try:
            self.open(name)
        except MissingError:
            return False
        return True

    def open(self, name: str) -> ByteSource:
        key = self._within + plain_name(name, self.name)
        if key in self._open:
            return self._open[key]
        url = in_folder(self.path, quote(name) if is_web(self._fs) else name)
        if is_web(self._fs):
            transport: Transport = Http(self._fs, url)
        elif name not in self._entries():
            raise MissingError("does not exist", where=shown_url(url))
        else:
            info = self._entries()[name]
            if info["type"] != "file":
                raise PathError("is not a file", where=shown_url(url))
            transport = Stored(self._fs, info["name"], url, info)
        self._open[key] = RemoteFile(url, transport)
        return self._open[key]

    def folders(self) -> tuple[str, ...]:
        if is_web(self._fs):
            return ()
        return tuple(
            sorted(name for name, each in self._entries().items() if each["type"] == "directory")
        )

    def sub(self, name: str) -> Folder:
        url = in_folder(self.path, plain_name(name, self.name))
        if name not in self.folders():
            raise PathError("is not a folder", where=shown_url(url))
        inner = RemoteFolder(url)
        inner._within, inner._open = f"{self._within}{name}/", self._open
        return inner

    def nbytes(self) -> int:
        if is_web(self._fs):
            return sum(source.size for source in self._open.values())
        files = (each for each in self._entries().values() if each["type"] == "file")
        return sum(each["size"] or 0 for each in files) + self._deeper()


def open_url(url: str) -> ByteSource | Folder:
    """Return the file or folder at `url`. Raises PathError if the URL cannot be reached."""
    fs, path = filesystem(url)
    if is_web(fs):
        return RemoteFile(url, Http(fs, url))
    if is_local(fs):
        return Folder(path) if os.path.isdir(path) else LocalFile(path)
    info = information(fs, path, url)
    if info["type"] == "directory":
        return RemoteFolder(url)
    return RemoteFile(url, Stored(fs, path, url, info))


def filesystem(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for `url`, and the path in this file system."""
    from fsspec.core import url_to_fs

    with translated(url, unknown):
        fs, path = url_to_fs(url)
    return fs, path


def is_web(fs: Any) -> bool:
    """Return whether the file system is an HTTP server."""
    return "https" in fs.protocol


def is_local(fs: Any) -> bool:
    """Return whether the file system contains the files of this machine (``file://``)."""
    return "file" in fs.protocol


# Listings


Mark = tuple[int, int | str]  # size in bytes, and an identifier of the file's version


class RemoteEntry(NamedTuple):
    """A file or folder. `name` is the path relative to the listed folder."""

    name: str
    mark: Mark
    is_folder: bool


def matching(folder: str, pattern: str) -> list[RemoteEntry]:
    """Return the files and folders below the URL `folder` that match the glob `pattern`.

    Raises PathError if the server cannot list folders.
    """
    fs, path = _listable(folder)
    with translated(folder):
        found = fs.glob(f"{path.rstrip('/')}/{pattern}", detail=True)
    entries = _entries(found, path)
    return [
        each._replace(mark=merged(below(in_folder(folder, each.name)))) if each.is_folder else each
        for each in entries
    ]


def below(folder: str) -> dict[str, Mark]:
    """Map the relative path of each file below the URL `folder` to its size and version.

    If the folder does not exist, return {}.
    """
    fs, path = _listable(folder)
    with translated(folder):
        try:
            found = fs.find(path, detail=True)
        except FileNotFoundError:
            return {}
    return {each.name: each.mark for each in _entries(found, path)}


def look(url: str) -> RemoteEntry:
    """Return the current size and version of the file or folder at `url`.

    The `name` of the result is "". Raises PathError if the URL does not exist.
    """
    info = information(*filesystem(url), url)
    folder = info["type"] == "directory"
    return RemoteEntry("", merged(below(url)) if folder else _mark(info), folder)


def merged(marks: Mapping[str, Mark]) -> Mark:
    """Return the size and version of a folder. `marks` maps its files to sizes and versions."""
    lines = (
        f"{len(name)} {name} {size} {version}\n" for name, (size, version) in sorted(marks.items())
    )
    names = hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape"))
    return sum(size for size, _ in marks.values()), names.hexdigest()


def read_small(url: str) -> bytes:
    """Return the content of a small file. Return b"" if the file does not exist."""
    fs, path = filesystem(url)
    with translated(url):
        try:
            fs.invalidate_cache(path)
            data: bytes = fs.cat_file(path)
        except FileNotFoundError:
            return b""
    return data


def write_small(url: str, data: bytes) -> None:
    """Write a small file, in one request if the file system supports it."""
    fs, path = filesystem(url)
    with translated(url, not_written):
        fs.pipe_file(path, data)


def make_folders(base: str, names: Iterable[str]) -> None:
    """Create folders below the URL `base`. For object stores, which have no folders, do nothing."""
    fs, path = filesystem(base)
    if fs.async_impl or is_web(fs):
        return
    for name in names:
        with translated(base, not_written):
            fs.makedirs(f"{path.rstrip('/')}/{name}".rstrip("/"), exist_ok=True)


def _listable(folder: str) -> tuple[Any, str]:
    fs, path = filesystem(folder)
    _check_listable(fs, shown_url(folder))
    fs.invalidate_cache()
    return fs, path


def _check_listable(fs: Any, where: str) -> None:
    if is_web(fs):
        raise PathError(
            "HTTP servers do not list folders",
            where=where,
            hint="use the URL of a file, such as model.safetensors.index.json",
        )


def _entries(found: Mapping[str, Mapping[str, Any]], path: str) -> list[RemoteEntry]:
    base = path.rstrip("/") + "/"
    return sorted(
        RemoteEntry(name, _mark(info), info["type"] == "directory")
        for place, info in found.items()
        if place.startswith(base) and (name := place[len(base) :].rstrip("/"))
    )


def _mark(info: Mapping[str, Any]) -> Mark:
    version = next((info[key] for key in VERSION if info.get(key)), "")
    return info.get("size") or 0, str(moment(version))
