"""Files that are refused, as rows: the threat's code, the bytes, the error, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

Row = tuple[str, bytes, Any, str]  # the error is a class, or several


def catalogue(rows: Iterable[Row]) -> pytest.MarkDecorator:
    """Parametrize a test by the rows; each has its code in its name."""
    params = [pytest.param(row, id=f"{row[0]}-{number}") for number, row in enumerate(rows)]
    return pytest.mark.parametrize("row", params)


def refuses(read: Callable[[bytes], object], row: Row) -> None:
    """Check that `read` refuses the bytes of a row as it says, in words that can be printed."""
    _, data, error, said = row
    with pytest.raises(error, match=said or None) as caught:
        read(data)
    assert str(caught.value).isprintable()
