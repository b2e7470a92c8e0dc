"""Inputs of a batch: files, folders that are checkpoints, and matches of patterns, local or remote.

Each has a name, which its output gets below the batch's folder: its path below the fixed part of
the pattern (``runs/**/*.pth``: below ``runs``), or its own last name if it was named itself. And
each has a mark, by which a later run recognizes whether it is still the same: size and time of
change, or an object's ETag.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from ckptkit.core.errors import PathError, UsageError
from ckptkit.core.text import in_folder, is_url, shown_url, without_query

Mark = tuple[int, int | str]  # see remote.listing


@dataclass(frozen=True, slots=True)
class Input:
    """A file or folder to read. `mark` is None if it does not exist, which reading it reports."""

    path: str  # absolute, or a URL
    name: str  # with slashes
    mark: Mark | None
    is_folder: bool = False

    @property
    def size(self) -> int:
        """Bytes."""
        return self.mark[0] if self.mark else 0


def find(sources: Iterable[str], into: str) -> list[Input]:
    """Return the inputs that `sources` name, in order and each once.

    Matches of a pattern that are below `into` are left out. Raises UsageError for a pattern that
    matches nothing, or nothing but files below `into`; PathError where a remote place cannot be
    listed.
    """
    found: dict[str, Input] = {}
    for source in sources:
        for each in _one(source, into):
            found.setdefault(each.path, each)
    return list(found.values())


def mark(path: str) -> Mark | None:
    """Return the mark of the file or folder at `path`, a path or URL; None if it cannot be seen."""
    if is_url(path):
        from ckptkit.remote import files

        try:
            return files.look(path).mark
        except PathError:
            return None
    try:
        info = os.stat(path)
    except (OSError, ValueError):
        return None
    return _folder_mark(path) if os.path.isdir(path) else (info.st_size, info.st_mtime_ns)


def _one(source: str, into: str) -> Iterator[Input]:
    if is_url(source):
        yield from _remote(source, into)
    elif glob.has_magic(source) and not os.path.lexists(source):
        yield from _matching(source, into)
    else:
        path = os.path.abspath(source)
        yield Input(path, plain(os.path.basename(path), source), mark(path), os.path.isdir(path))


def _matching(pattern: str, into: str) -> Iterator[Input]:
    fixed, rest = _split(pattern.split(os.sep))
    base = os.path.abspath(os.sep.join(fixed) + os.sep if fixed else ".")
    outputs = None if is_url(into) else os.path.abspath(into) + os.sep
    found = sorted(glob.iglob(os.sep.join(rest), root_dir=base, recursive=True))
    _check_found(found, pattern)
    paths = [os.path.abspath(os.path.join(base, each)) for each in found]
    if outputs is not None:
        paths = [path for path in paths if not (path + os.sep).startswith(outputs)]
    _check_left(paths, pattern, into)
    for path in paths:
        name = plain(os.path.relpath(path, base).replace(os.sep, "/"), pattern)
        yield Input(path, name, mark(path), os.path.isdir(path))


def _remote(source: str, into: str) -> Iterator[Input]:
    from ckptkit.remote import files

    if not glob.has_magic(without_query(source)):
        yield _named(source)
        return
    place, query, parameters = source.partition("?")
    fixed, rest = _split(place.split("/"))
    if len(fixed) < 3:
        raise UsageError(
            "the pattern has no fixed part to look below",
            where=shown_url(source),
            hint="name the host or bucket without wildcards",
        )
    base = "/".join(fixed) + query + parameters
    entries = files.matching(base, "/".join(rest))
    _check_found(entries, shown_url(source))
    found = [(in_folder(base, each.name), each) for each in entries]
    outputs = without_query(into).rstrip("/") + "/"
    found = [(url, each) for url, each in found if not without_query(url).startswith(outputs)]
    _check_left(found, shown_url(source), into)
    for url, each in found:
        yield Input(url, plain(each.name, shown_url(source)), each.mark, each.is_folder)


def _named(url: str) -> Input:
    from ckptkit.remote import files

    name = plain(without_query(url).rstrip("/").rpartition("/")[2], shown_url(url))
    try:
        entry = files.look(url)
    except PathError:
        return Input(url, name, None)
    return Input(url, name, entry.mark, entry.is_folder)


def _split(parts: list[str]) -> tuple[list[str], list[str]]:
    """Split the parts of a path before the first one with a wildcard."""
    at = next(number for number, part in enumerate(parts) if glob.has_magic(part))
    return parts[:at], parts[at:]


def plain(name: str, source: str) -> str:
    """Return `name` if it stays below a folder that it is joined to. Raises PathError.

    An object's key may contain ``..``.
    """
    for part in name.split("/"):
        drive = os.name == "nt" and ":" in part
        if part in ("", ".", "..") or "\0" in part or os.sep in part or drive:
            raise PathError(f"{name!r} cannot be the name of an output", where=source)
    return name


def _check_found(found: Iterable[object], pattern: str) -> None:
    if not found:
        raise UsageError(
            "nothing matches", where=pattern, hint="quote the pattern, as in 'runs/**/*.pth'"
        )


def _check_left(found: Iterable[object], pattern: str, into: str) -> None:
    if not found:
        why = f"everything that matches is below {shown_url(into)}, where the outputs go"
        raise UsageError(why, where=pattern, hint="name another folder with --into")


def _folder_mark(path: str) -> Mark:
    from ckptkit.remote.files import merged

    marks: dict[str, Mark] = {}
    for folder, _, names in os.walk(path):
        for name in names:
            place = os.path.join(folder, name)
            with suppress(FileNotFoundError):
                info = os.lstat(place)
                marks[os.path.relpath(place, path)] = info.st_size, info.st_mtime_ns
    return merged(marks)
