"""Listings of remote files in few requests: by pattern, below a folder, and with versions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NamedTuple

from ckptkit.core.errors import PathError
from ckptkit.core.urls import in_folder, shown
from ckptkit.remote.files import filesystem, is_web
from ckptkit.remote.refusals import not_written, presentable, refused

# Fields that distinguish versions of a file: the first that the file system gives is used, in
# listings and for a single file alike.
_VERSION = (
    "ETag", "etag", "md5Hash", "checksum", "sha", "generation", "mtime",
    "LastModified", "last_modified", "updated", "created",
)  # fmt: skip

Mark = tuple[int, int | str]  # size in bytes and version: differs between versions of a file


class RemoteEntry(NamedTuple):
    """A file or folder: its path below the listed folder, with slashes."""

    name: str
    mark: Mark
    is_folder: bool


def matching(folder: str, pattern: str) -> list[RemoteEntry]:
    """Return the entries that match `pattern` below the URL `folder`, sorted by name.

    Raises PathError where the server has no listings.
    """
    fs, path = _listable(folder)
    try:
        found = fs.glob(f"{path.rstrip('/')}/{pattern}", detail=True)
    except Exception as error:
        raise refused(error, folder) from presentable(error, folder)
    entries = _entries(found, path)
    return [
        each._replace(mark=merged(below(in_folder(folder, each.name)))) if each.is_folder else each
        for each in entries
    ]


def below(folder: str) -> dict[str, Mark]:
    """Return the files below the URL `folder`, by name; empty if it does not exist."""
    fs, path = _listable(folder)
    try:
        found = fs.find(path, detail=True)
    except FileNotFoundError:
        return {}
    except Exception as error:
        raise refused(error, folder) from presentable(error, folder)
    return {each.name: each.mark for each in _entries(found, path)}


def look(url: str) -> RemoteEntry:
    """Return the file or folder at `url` as it is now, its name empty.

    Raises PathError if it does not exist.
    """
    fs, path = filesystem(url)
    try:
        fs.invalidate_cache(path)
        info = fs.info(path)
    except Exception as error:
        raise refused(error, url) from presentable(error, url)
    folder = info["type"] == "directory"
    return RemoteEntry("", merged(below(url)) if folder else _mark(info), folder)


def merged(marks: Mapping[str, Mark]) -> Mark:
    """Return the mark of a folder that holds these files."""
    lines = (
        f"{len(name)} {name} {size} {version}\n" for name, (size, version) in sorted(marks.items())
    )
    names = hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape"))
    return sum(size for size, _ in marks.values()), names.hexdigest()


def read_small(url: str) -> bytes:
    """Return the contents of a small file, empty if it does not exist."""
    fs, path = filesystem(url)
    try:
        fs.invalidate_cache(path)
        data: bytes = fs.cat_file(path)
    except FileNotFoundError:
        return b""
    except Exception as error:
        raise refused(error, url) from presentable(error, url)
    return data


def write_small(url: str, data: bytes) -> None:
    """Write a small file, in one request where the file system can."""
    fs, path = filesystem(url)
    try:
        fs.pipe_file(path, data)
    except Exception as error:
        raise not_written(error, url) from presentable(error, url)


def make_folders(base: str, names: Iterable[str]) -> None:
    """Make folders below the URL `base` where a file system has them; object stores need none."""
    fs, path = filesystem(base)
    if fs.async_impl or is_web(fs):
        return
    for name in names:
        try:
            fs.makedirs(f"{path.rstrip('/')}/{name}".rstrip("/"), exist_ok=True)
        except Exception as error:
            raise not_written(error, base) from presentable(error, base)


def _listable(folder: str) -> tuple[Any, str]:
    fs, path = filesystem(folder)
    if is_web(fs):
        raise PathError(
            "HTTP servers do not list folders", where=shown(folder), hint="name each file"
        )
    fs.invalidate_cache()
    return fs, path


def _entries(found: Mapping[str, Mapping[str, Any]], path: str) -> list[RemoteEntry]:
    return sorted(_named(found, path.rstrip("/") + "/"))


def _named(found: Mapping[str, Mapping[str, Any]], base: str) -> Iterator[RemoteEntry]:
    for path, info in found.items():
        if path.startswith(base) and (name := path[len(base) :].rstrip("/")):
            yield RemoteEntry(name, _mark(info), info["type"] == "directory")


def _mark(info: Mapping[str, Any]) -> Mark:
    version = next((info[key] for key in _VERSION if info.get(key)), "")
    return info.get("size") or 0, str(
        version.timestamp() if isinstance(version, datetime) else version
    )
