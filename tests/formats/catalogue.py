"""Files that are refused, as rows: the threat's code, the bytes, the error, and what it says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

Row = tuple[str, bytes, Any, str]  # the error is a class, or several


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
    assert count > 50


def refuses(read: Callable[[bytes], object], row: Row) -> None:
    """Check that `read` refuses the bytes of a row as it says, in words that can be printed."""
    _, data, error, said = row
    with pytest.raises(error, match=said or None) as caught:
        read(data)
    assert str(caught.value).isprintable()
