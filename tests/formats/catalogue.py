"""Files that a format reads, and files that it refuses as rows: the threat's code, the bytes, the
error, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from ckptkit.core.bytesource import LocalFile, Memory
from ckptkit.core.checkpoint import Checkpoint
from ckptkit.core.errors import CkptkitError
from ckptkit.formats.format import Format, Probe

Row = tuple[str, bytes, Any, str]  # the error is a class, or several


def read_as(format: Format, data: bytes | Path, name: str = "made") -> Checkpoint:
    """The checkpoint in a file, or in these bytes, which the format recognizes."""
    probe = Probe(LocalFile(data) if isinstance(data, Path) else Memory(data, name))
    assert format.matches(probe)
    return format.read(probe)


def outcomes(files: Iterable[Path], read: Callable[[LocalFile], object]) -> dict[str, str]:
    """What becomes of each file: "read", or the name of the error."""
    found = {}
    for path in files:
        try:
            read(LocalFile(path))
            found[path.stem] = "read"
        except CkptkitError as error:
            found[path.stem] = type(error).__name__
    assert found
    return found


def change(*place: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    """A function that puts another value at a place in nested dicts and lists."""

    def apply(said: dict[str, Any]) -> None:
        for key in place[:-1]:
            said = said[key]
        said[place[-1]] = to

    return apply


def refuses_all(read: Callable[[bytes], object], rows: Iterable[Row]) -> None:
    """Check that `read` refuses every row; the failure names each row that it does not."""
    wrong, count = [], 0
    for row in rows:
        try:
            refuses(read, row)
        except (Exception, pytest.fail.Exception) as error:
            wrong.append(f"{row[0]}-{count}: {error!r}")
        count += 1
    assert not wrong, "\n".join(wrong)
    assert count


def refuses(read: Callable[[bytes], object], row: Row) -> None:
    """Check that `read` refuses the bytes of a row as it says, in words that can be printed."""
    _, data, error, said = row
    with pytest.raises(error, match=said or None) as caught:
        read(data)
    assert str(caught.value).isprintable()
