"""Folders that are refused, as rows: what is made and tried, the error, and words that it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ckptkit
from ckptkit.core.errors import CkptkitError

Edit = Callable[[Any], Any]
Attempt = Callable[[Path], Any]  # makes something in an empty folder, and tries it


class Row(NamedTuple):
    """An attempt, the kind of error (None for a warning), and its words, divided by ``...``."""

    attempt: Attempt
    kind: type[CkptkitError] | tuple[type[CkptkitError], ...] | None
    words: str


def differing(rows: Mapping[str, Row], folder: Path) -> dict[str, Any]:
    """Try each row. Return the rows that end in another way than they say, and how."""
    found: dict[str, Any] = {}
    for number, (what, row) in enumerate(rows.items()):
        place = folder / str(number)
        place.mkdir()
        kind: type[CkptkitError] | None = None
        try:
            text = " ".join(row.attempt(place).warnings)
        except CkptkitError as error:
            kind, text = type(error), f"{error} {error.hint}"
        is_kind = issubclass(kind, row.kind) if kind and row.kind else kind is row.kind
        if not is_kind or not all(words in text for words in row.words.split(" ... ")):
            found[what] = kind, text
    return found


def opened(*steps: Edit) -> Attempt:
    """Make a folder step by step, and open it."""

    def attempt(folder: Path) -> Any:
        for step in steps:
            step(folder)
        return ckptkit.open(folder)

    return attempt


def change(path: Path, edit: Edit) -> None:
    """Load a file that a test has made, change it, save it."""
    held = torch.load(path, weights_only=False)
    edit(held)
    torch.save(held, path)


def files(folder: Path, named: Mapping[str, Any]) -> Path:
    """Files by their paths below the folder: of torch.save, if they are neither bytes nor text."""
    for name, content in named.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, (bytes, str)):
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        else:
            torch.save(content, path)
    return folder
