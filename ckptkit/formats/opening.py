"""Open files and folders that may be edited in place meanwhile; report it if reading fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ckptkit.core.bytesource import ByteSource, Folder, LocalFile, has_journal
from ckptkit.core.errors import CkptkitError, InputChangedError, InputError
from ckptkit.core.text import is_url

PathLike = str | os.PathLike[str]


def open_place(path: PathLike, *, undo: bool = False) -> ByteSource | Folder:
    """Open the file or folder at `path`, which must not be in the middle of an edit in place.

    With `undo` an interrupted edit is undone; without, it is an error. Raises PathError,
    InputError.
    """
    if not is_url(path) and has_journal(path):
        from ckptkit.publish import in_place

        (in_place.undo_interrupted if undo else in_place.look)(os.fspath(path))
    return open_unchecked(path)


def open_unchecked(path: PathLike) -> ByteSource | Folder:
    """Open what is at `path` as it is, even in the middle of an edit in place.

    Raises PathError for what is neither a file nor a folder.
    """
    if is_url(path):
        from ckptkit.remote.files import open_url  # local files do not pay for it

        return open_url(os.fspath(path))
    return Folder(path) if os.path.isdir(path) else LocalFile(path)


@contextmanager
def steady(place: ByteSource | Folder | None, *, remote: bool = False) -> Iterator[None]:
    """Raise InputChangedError at the end, or for another error, if the files changed meanwhile.

    Writers do not wait for a reader: bytes from before and after a change may have been read
    together. With `remote`, files at URLs are looked at again, unless each answer of their server
    has been compared already. None is a checkpoint in memory.
    """
    if place is None:
        yield
        return
    try:
        yield
    except Exception as error:
        if changed := _changing(place, remote):
            raise changed from error
        raise
    if changed := _changing(place, remote):
        raise changed


def _changing(place: ByteSource | Folder, remote: bool) -> CkptkitError | None:
    for each in place.opened() if isinstance(place, Folder) else (place,):
        if each.compares_answers or (each.remote and not remote):
            continue
        try:
            each.check_unchanged()
            if isinstance(each, LocalFile) and has_journal(each.path):
                from ckptkit.publish import in_place

                in_place.look(each.path)
        except InputChangedError:
            hint = "run the command again when it is no longer written to"
            return InputChangedError("was changed while it was read", where=each.name, hint=hint)
        except InputError as error:
            return error
    return None
