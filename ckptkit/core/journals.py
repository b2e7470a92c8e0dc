"""Path of the journal of a file: a file beside it, until an edit in place is complete."""

from __future__ import annotations

import os

SUFFIX = ".ckptkit-journal"


def journal_path(path: str | os.PathLike[str]) -> str:
    """Return the path of the journal of the file `path`, if any; links are followed."""
    folder, name = os.path.split(os.path.realpath(path))
    return os.path.join(folder, f".{name}{SUFFIX}")


def file_of(journal: str) -> str:
    """Return the file that a journal belongs to."""
    folder, name = os.path.split(journal)
    return os.path.join(folder, name[1 : -len(SUFFIX)])


def has_journal(path: str | os.PathLike[str]) -> bool:
    """Return whether an edit in place of `path`, or of a file in it, was interrupted."""
    try:
        return any(name.endswith(SUFFIX) for name in os.listdir(path))
    except OSError:  # not a folder
        return os.path.lexists(journal_path(path))
